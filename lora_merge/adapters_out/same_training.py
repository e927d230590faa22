"""Snapshots whose tensors can be averaged: all have the same ones. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..adapters.peft.rules import ADAPTER_METADATA
from ..errors import FitError
from ..files.checkpoint import Index

NOT_ONE: Final = "average changes, for which they need not be alike: --space delta"


def expect_alike(snapshots: Sequence[Index]) -> None:
    """Raise FitError unless all snapshots have the same tensors."""
    first = {name: info.shape for name, info in snapshots[0].tensors.items()}
    for index in snapshots[1:]:
        other = {name: info.shape for name, info in index.tensors.items()}
        if first != other:
            name = next(n for n in (*first, *other) if first.get(n) != other.get(n))
            what = "two snapshots have a tensor in different shapes" if name in first.keys() & other.keys() else (
                "a snapshot lacks a tensor that another one has")  # fmt: skip
            raise FitError(what, f"{index.path}: {name}", NOT_ONE)
        if index.metadata.get(ADAPTER_METADATA) != snapshots[0].metadata.get(ADAPTER_METADATA):
            raise FitError("two snapshots have different configurations in their headers", str(index.path), NOT_ONE)
