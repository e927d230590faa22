"""The report of a merge: what each adapter matched, bytes, seconds, and the result of the proof."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .text import codes_line, html_table, size, stored


@dataclass(frozen=True, repr=False)
class Report:
    """The outcome of one merge; `--json` prints `to_json()`."""

    output: str
    base: str
    architecture: str
    coverage: Mapping[str, Any]  # adapter → matched, total, components, strengths, patterns, skipped, ignored, notes
    tensors: int
    changed: int
    written: int  # bytes
    seconds: float
    device: str
    dtype: str
    compute_dtype: str
    method: str
    stages: Mapping[str, float] = field(default_factory=dict)  # stage → seconds busy; wait: the rest of the total
    peak_memory: int = 0  # bytes, the most that this process has used so far
    verified: Mapping[str, Any] | None = None
    version: str = ""
    saturated: Mapping[str, int] = field(default_factory=dict)  # tensor → numbers cut (`on_overflow="saturate"`)
    notes: tuple[str, ...] = ()  # remarks for the user, such as a device that was not used
    device_choice: str = ""  # why `--device auto` took the device
    numbers: Mapping[str, Any] = field(default_factory=dict)  # what the merge did to the weights
    codes: Mapping[str, Any] = field(default_factory=dict)  # quantised weights by format, encoded ones, plain matrices
    schema: str = "lora-merge/report/1"  # the format of `to_json`: viewing/schemas/report.json

    def __repr__(self) -> str:
        return "Report: " + "; ".join(f"{name} {value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        return html_table(f"Merged: {Path(self.output).name}", self._facts())

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know first."""
        yield "output", f"{self.output} ({size(self.written)}, {stored(self.dtype)})"
        yield "base", f"{Path(self.base).name} ({self.architecture})"
        for name, one in self.coverage.items():
            parts = [f"{s}× {part}" for part, counts in one["strengths"].items() for s in counts]
            yield "adapter", f"{name}: {one['matched']} of {one['total']} modules, {', '.join(parts)}"
        yield "changed", f"{self.changed} of {self.tensors} tensors in {self.seconds:.1f} s on {self.device}"
        if self.codes:
            yield "codes", codes_line(self.codes)
        if self.verified is not None:
            worst = f"at most {self.verified['worst_ulp']:.2f} ulp from the exact numbers"
            yield "verified", f"{self.verified['tensors']} tensors computed again in fp64, {worst}"
        yield from (("note", note) for note in self.notes)

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def matched(self) -> int:
        """The number of modules that were merged, of all adapters."""
        return sum(int(c["matched"]) for c in self.coverage.values())
