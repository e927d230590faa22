"""A corpus of real merges, recorded from the test suite and made again by any other version.

    python -m tests.corpus record FOLDER            # run the suite here and keep the inputs and results of its merges
    python -m tests.corpus replay FOLDER            # make them again with this version and compare the bytes

`record` runs at the commit before a change, `replay` after it. The inputs are files, and only names that
`lora_merge` itself exports are called, so the two versions may have nothing else in common.
"""
