"""Reads and writes containers, folders and stored numbers."""

from pathlib import Path

from ..addresses import open_addresses_with


def _locate(text: str) -> Path | None:
    from ..sources.inputs import locate  # imported here: paths have no use for it

    return locate(text)


open_addresses_with(_locate)
