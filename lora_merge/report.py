"""The report of a merge: what each adapter matched, bytes, seconds, and the result of the proof."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .text import Note, Shown, codes_line, json_text, plural, size, stored


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The outcome of one merge; `--json` prints `to_json()`.

    Attributes:
        output: The file or folder that was written.
        base: The base.
        architecture: What the base is.
        coverage: Adapter → matched, total, components, strengths, patterns, skipped, ignored, notes.
        tensors: How many tensors the output has.
        changed: How many of them adapters changed.
        written: Bytes.
        seconds: From the first step to the name of the output.
        device: The device that computed.
        dtype: As for `merge`.
        compute_dtype: As for `merge`.
        method: As for `merge`.
        stages: Stage → seconds in which it was busy; wait: the rest of the total.
        peak_memory: Bytes, the most that this process has used so far.
        verified: What the proof found; None without a proof.
        version: Of lora-merge.
        saturated: Tensor → numbers that were cut (`on_overflow="saturate"`).
        files: For each input folder its files: read, copied, or left out and why.
        notes: Remarks about the merge, such as a device that was not used; those about an adapter are in `coverage`.
        device_choice: Why `device="auto"` took the device.
        numbers: What the merge did to the weights, by component, block, adapter and tensor.
        codes: Quantised weights by format, those that were encoded, and plain matrices.
        schema: The format of `to_json()`; `lora-merge schema report` describes it.

    Examples:
        >>> report = lora_merge.merge("base.safetensors", ("style.safetensors", 0.8), "out.safetensors")
        >>> report.coverage["style.safetensors"]["strengths"]
        {'unet': {'0.8': 192}, 'te': {'0.8': 72}}
    """

    output: str
    base: str
    architecture: str
    coverage: Mapping[str, Any]
    tensors: int
    changed: int
    written: int
    seconds: float
    device: str
    dtype: str
    compute_dtype: str
    method: str
    stages: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    verified: Mapping[str, Any] | None = None
    version: str = ""
    saturated: Mapping[str, int] = field(default_factory=dict)
    files: Sequence[Mapping[str, object]] = ()
    notes: tuple[Note, ...] = ()
    device_choice: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    codes: Mapping[str, Any] = field(default_factory=dict)
    schema: str = "lora-merge/report/1"

    def _heading(self) -> str:
        return f"Merged: {Path(self.output).name}"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know first."""
        yield "output", f"{self.output} ({size(self.written)}, {stored(self.dtype)})"
        yield "base", f"{Path(self.base).name} ({self.architecture})"
        for name, row in self.coverage.items():
            parts = [f"{s}× {part}" for part, counts in row["strengths"].items() for s in counts]
            yield "adapter", f"{name}: {row['matched']} of {plural(row['total'], 'module')}, {', '.join(parts)}"
        yield "changed", f"{self.changed} of {plural(self.tensors, 'tensor')} in {self.seconds:.1f} s on {self.device}"
        if self.codes:
            yield "codes", codes_line(self.codes)
        if self.verified is not None:
            worst = f"at most {self.verified['worst_ulp']:.2f} ulp from the exact numbers"
            again = f"{plural(self.verified['tensors'], 'tensor')} computed again in fp64, {worst}"
            yield "verified", again if self.verified["changed"] else "all tensors were copied, none computed"
        for name, row in self.coverage.items():
            yield from (("note", f"{name}: {note}") for note in row.get("notes", ()))
        yield from (("note", note) for note in self.notes)

    def to_json(self) -> str:
        """Return the report as one JSON object.

        Returns:
            A line of JSON, as `lora-merge --json` prints it.
        """
        return json_text(vars(self))

    @property
    def matched(self) -> int:
        """The number of modules that were merged, of all adapters."""
        return sum(int(c["matched"]) for c in self.coverage.values())
