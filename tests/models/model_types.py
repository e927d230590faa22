"""Adds the types of models that the installed transformers knows to lora_merge/matching/model_types.json.

    python -m tests.models.model_types

For a newer version than the tests install, put it before the installed one, without what it depends on:

    pip install --no-deps --target newest transformers
    PYTHONPATH=newest python -m tests.models.model_types
"""

from __future__ import annotations

import json
from pathlib import Path

from lora_merge.matching import orientation as beside

FILE = Path(beside.__file__).with_name("model_types.json")


def installed() -> set[str]:
    """Every type that AutoConfig takes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return set(CONFIG_MAPPING_NAMES)


def listed() -> set[str]:
    """Every type of the file."""
    return set(json.loads(FILE.read_text(encoding="ascii")))


if __name__ == "__main__":
    FILE.write_text(json.dumps(sorted(listed() | installed()), indent=0) + "\n", encoding="ascii")
