"""The report of a command that writes an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..text import html_table, plural, size


@dataclass(frozen=True, repr=False)
class AdapterReport:
    """The outcome of one run; `--json` prints `to_json()`."""

    output: str
    format: str
    dtype: str
    coverage: Mapping[str, Any]  # adapter → modules, layers, strength
    layers: Mapping[str, Mapping[str, Any]]  # layer → algorithm, rank, rank_before, alpha, norm, energy, residual
    residual: float  # √(Σ‖Δ − Δ̂‖² / Σ‖Δ‖²) of the stored tensors, over everything written
    energy: float  # 1 − residual²
    written: int  # bytes
    seconds: float
    notes: tuple[str, ...] = ()
    verified: Mapping[str, Any] | None = None
    version: str = ""
    weights: int = 0  # bytes of the weights whose changes are computed
    planned: bool = field(default=False)  # whether this is a plan: nothing is written, and nothing is known of the loss
    schema: str = "lora-merge/adapter/1"  # the format of `to_json`: viewing/schemas/adapter.json

    def __repr__(self) -> str:
        return "AdapterReport: " + "; ".join(f"{name} {value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return html_table(f"Written: {Path(self.output).name}", self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know first."""
        yield "output", f"{self.output} ({size(self.written)}, dtype {self.dtype})"
        for name, one in self.coverage.items():
            yield "adapter", f"{name}: {plural(one['modules'], 'module')}, {one['strength']:g}×"
        yield "layers", f"{len(self.layers)}: {self.summary}"
        if self.verified is not None:
            yield "verified", f"{plural(self.verified['recomputed'], 'layer')} computed again in fp64"
        yield from (("note", note) for note in self.notes)

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def summary(self) -> str:
        """One line: the ranks, the share of the change that is kept, and the layer that loses most."""
        ranks = sorted(int(layer["rank"]) for layer in self.layers.values() if layer["rank"])
        text = f"rank {ranks[-1]}" if ranks else "whole matrices"
        if ranks and ranks[0] < ranks[-1]:
            text = f"rank {ranks[0]}…{ranks[-1]} (median {ranks[len(ranks) // 2]})"
        if self.planned:
            return text
        worst = min(self.layers, key=lambda name: float(self.layers[name]["energy"]), default="")
        least = float(self.layers[worst]["energy"]) if worst else 1.0
        return f"{text}, keeps {_percent(self.energy)} of ‖ΔW‖², worst layer {worst} {_percent(least)}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
