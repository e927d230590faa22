"""Reads and writes containers, folders and stored values."""

from pathlib import Path

from ..addresses import Address, open_addresses_with, stage_outputs_with
from ..disk.uploads import Sink, find_sinks_with


def _locate(text: str) -> Path | None:
    from ..sources.inputs import locate  # imported here: paths have no use for it

    return locate(text)


def _stage(address: Address) -> Path:
    from ..sources.outputs import stage

    return stage(address)


def _sink(path: Path) -> Sink | None:
    from ..sources.outputs import sink_at

    return sink_at(path)


open_addresses_with(_locate)
stage_outputs_with(_stage)
find_sinks_with(_sink)
