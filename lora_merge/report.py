"""The report of a merge: what each adapter matched, bytes, seconds, and the result of the proof."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
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
    schema: str = "lora-merge/report/1"  # the format of `to_json`: viewing/schemas/report.json

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def matched(self) -> int:
        """The number of modules that were merged, of all adapters."""
        return sum(int(c["matched"]) for c in self.coverage.values())
