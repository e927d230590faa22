"""A corpus of calls of the program: recorded with one version, repeated with a later one, and compared.

    python -m tests.corpus record FOLDER [SCENE...] [-n WORKERS]    # make the inputs, call, and keep what comes of it
    python -m tests.corpus replay FOLDER [SCENE...] [-n WORKERS]    # call again with this version and compare

`record` runs at the commit before a change, `replay` after it. The calls come from a table of scenes (scenes.py): small
models, adapters, quantised and GGUF bases, and the calls that read them. A table, and not whatever the tests do, as it
says what is covered, covers each command alike, and takes two minutes instead of a run of the suite.

A scene's folder in the corpus has its inputs as files (`in/`), the calls as data with the plan and the report of each
as JSON (`calls.json`), and all outputs (`out/CALL/`), so that a difference is a number for each tensor. So
`replay` needs nothing of the version that recorded, nor of scenes.py: it runs the command line and the two functions of
Python for tensors in memory, and imports no other part of `lora_merge`.
"""
