"""The report of a merge, and the rows of facts that text, terminals, notebooks and pages show of a plan, a merge and a
proof. The rows are made from the values that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .facts import Fact, line, percent, strengths
from .merge_methods import SUM
from .text import Note, Shown, by_pattern, codes_line, counted, json_text, listed, plural, size, stored

MOST: Final = 1.1
"""A share up to which rounding adds to a change, or takes from nothing, by chance alone."""

ENLARGED: Final = "A share above 100% is no mistake: the steps of the output's dtype are larger than the change there."

ADAPTER_PROOF: Final = "lora-merge/adapter-proof/1"
"""The schema of the proof of a written adapter."""

NOT_VERIFIED: Final = "not at all (--no-verify)"


def without_tensors(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a report or a proof without those of every tensor in `numbers`: 300 bytes for each."""
    numbers = {name: value for name, value in report.get("numbers", {}).items() if name != "tensors"}
    return {**report, "numbers": numbers} if "numbers" in report else {**report}


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
        codes: Quantised weights by format, how many were encoded, and plain matrices.
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

    def _facts(self) -> Iterator[Fact]:
        return merge_rows(vars(self))

    def to_json(self, *, tensors: bool = True) -> str:
        """Return the report as one JSON object.

        Parameters:
            tensors: Whether `numbers` has the values of every tensor, as with `--json-tensors`.

        Returns:
            A line of JSON, as `lora-merge --json` prints it.
        """
        return json_text(vars(self) if tensors else without_tensors(vars(self)))

    @property
    def matched(self) -> int:
        """The number of modules that were merged, of all adapters."""
        return sum(int(c["matched"]) for c in self.coverage.values())


# The rows that a plan and a report share: what goes in, and what comes out.


def merge_rows(report: Mapping[str, Any], *, verbose: bool = False) -> Iterator[Fact]:
    """Yield what a merge did, from the values of its report; `verbose`: with names, devices and the second reading."""
    yield from input_rows(report, verbose=verbose)
    yield from output_rows(report, report["written"])
    rate = size(int(report["written"] / max(report["seconds"], 1e-9)))
    wrote = f"{size(report['written'])} in {report['seconds']:.1f} s ({rate}/s)"
    memory = f"{size(report['peak_memory'])} of memory at most"
    yield line("wrote", f"{wrote} on {report['device']}, computed in {report['compute_dtype']}; {memory}")
    if verbose and report["device_choice"]:
        yield line("device", f"{report['device']}: {report['device_choice']}")
    if report["saturated"]:
        yield line("cut", cut_numbers(report["saturated"]))
    if report["verified"] is not None:
        yield from proof_rows({**report["verified"], "numbers": report["numbers"], "counted": True}, verbose=verbose)
    else:
        yield line("verified", NOT_VERIFIED)
        if report["numbers"]:
            yield line("change", effect(report["numbers"]))


def input_rows(
    facts: Mapping[str, Any], formulas: Mapping[str, str] = MappingProxyType({}), *, verbose: bool = False
) -> Iterator[Fact]:
    """Yield what is merged, from the values of a plan or a report. `formulas`: those of each adapter, in a plan."""
    yield line("base", f"{Path(facts['base']).name}: {facts['architecture']}")
    yield from (line("note", note) for note in facts["notes"])
    for name, row in facts["coverage"].items():
        applied = strengths(row["strengths"])
        matched = f"{row['matched']} of {plural(row['total'], 'module')} matched"
        yield line("adapter", f"{name}: {matched}" + f": {applied}" * bool(applied))
        if name in formulas:
            yield line("formula", formulas[name] or "none: it changes nothing")
        yield from (Fact("", pattern, f"× {n}") for pattern, n in row["patterns"].items() if verbose)
        yield from adapter_notes(name, {**row["skipped"], **row["ignored"]}, row["notes"])


def output_rows(facts: Mapping[str, Any], nbytes: int) -> Iterator[Fact]:
    """Yield what is written, from the values of a plan or a report."""
    yield line("output", f"{facts['output']} ({size(nbytes)}, {stored(facts['dtype'])})")
    yield line("changes", f"{facts['changed']} of {plural(facts['tensors'], 'tensor')}")
    if facts["codes"]:
        yield line("codes", codes_line(facts["codes"]))
    if facts["method"] != SUM:
        yield line("method", facts["method"])


def adapter_notes(name: str, left_out: Mapping[str, str], notes: Iterable[str] = ()) -> Iterator[Fact]:
    """Yield what the user should know of an adapter: what is left out of it and why, and its notes."""
    for reason in dict.fromkeys(left_out.values()):
        names = [key for key, why in left_out.items() if why == reason]
        yield line("note", f"{name}: left out {len(names)}: {counted(by_pattern(names))}: {reason}")
    yield from (line("note", f"{name}: {note}") for note in notes)


def disk_rows(disk: Mapping[str, Any] | None, output: str) -> Iterator[Fact]:
    """Yield the note on an output that has no room on its disk. `disk`: a `Room` as JSON has it."""
    if disk is not None and not disk["enough"]:
        missing = f"{size(disk['needed'])} needed, {size(disk['free'])} free"
        yield line("note", Note(f"the disk has no room for the output: {missing} at {output}"))


# The rows of a proof, and their words.


def proof_rows(proof: Mapping[str, Any], *, verbose: bool = False) -> Iterator[Fact]:
    """Yield what the proof of a merge found. With `counted` the numbers are those of the whole merge."""
    yield line("verified", recomputed(proof))
    if proof["untouched"]["of"]:
        yield line("copied", unchanged(proof["untouched"]))
    if proof["saturated"]:
        yield line(
            "cut", f"{proof['saturated']} of the numbers compared, too large for their dtype, as it was asked for"
        )
    for row in proof["retained"]:
        if row["retained"] is not None:
            yield line("retained", f"{retained(row['retained'])} of the change that {row['adapter']} makes")
    if proof["numbers"]:
        whole = proof["full"] or proof.get("counted", False)
        rows = "" if whole else f", in the {plural(proof['rows'], 'row')} that were read"
        yield line("change", f"{effect(proof['numbers'])}{rows}")
    if (matching := proof["matching"])["alone"] or verbose:
        yield line("matching", second_reading(matching))
    if (account := proof["account"])["unused"]:
        yield line("unused", unused(account))
    yield from (line("warning", warning) for warning in proof["warnings"])


def verify_rows(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what `verify` has proven of a merge or of a written adapter."""
    yield line("output", proof["output"])
    if proof["schema"] == ADAPTER_PROOF:
        yield line("verified", f"{layers_recomputed(proof)}; its inputs give the same bytes")
    else:
        yield from proof_rows(proof)


def layers_recomputed(proof: Mapping[str, Any] | None) -> str:
    """Return how much of a written adapter was computed again, and what was lost at most."""
    if proof is None:
        return NOT_VERIFIED
    if not proof["recomputed"]:
        return "every tensor is in the file; what this method makes is not computed a second time"
    layers = f"{proof['recomputed']} of {plural(proof['layers'], 'layer')} computed again in fp64"
    return f"{layers}: worst residual {proof['worst_residual']:.3g}"


def cut_numbers(counts: Mapping[str, int]) -> str:
    """Return how many numbers were cut, by tensor."""
    most = sorted(counts, key=lambda name: (-counts[name], name))
    return f"{plural(sum(counts.values()), 'number')} too large for the output's dtype: " + listed(
        [f"{counts[name]} of {name}" for name in most]
    )


def recomputed(proof: Mapping[str, Any]) -> str:
    """Return how much of a merge was computed again, and how far the output is from the exact numbers."""
    if not proof["changed"]:
        return "all tensors were copied, from the base or an adapter; none had to be computed again"
    rows = "every row" if proof["full"] else plural(proof["rows"], "row")
    return (
        f"{proof['tensors']} of {plural(proof['changed'], 'merged tensor')} computed again in fp64, {rows}: at most "
        f"{proof['worst_ulp']:.2f} ulp from the exact numbers (perfect rounding has 0.50), judged by the bound of "
        f"{proof['bound']['compute_dtype']}"
    )


def unchanged(same: Mapping[str, int]) -> str:
    """Return how much of the unchanged tensors was compared with the base."""
    share = "every byte" if same["bytes"] == same["of"] else f"a sample of {size(same['bytes'])} of {size(same['of'])}"
    return f"unchanged tensors are those of the base: {share}"


def effect(numbers: Mapping[str, Any]) -> str:
    """Return how large a change is compared with the weights, and in how many of them the output loses it."""
    every = numbers["all"]
    if every["ratio"] is None:
        words = "the changed weights were zero"
    else:
        words = f"{percent(every['ratio'])} of the weights (‖ΔW‖ / ‖W‖), {every['changed']:.1%} of their numbers differ"
    if numbers["below"]:
        words += f"; less than 90% of it is in {plural(numbers['below'], 'weight')}, least in {numbers['worst']}"
    return words


def retained(share: float | None) -> str:
    """Return the share of a change that is in the output. Rounding may add to it where its steps are larger than the
    change, or leave nothing of it."""
    if share is None:
        return "?"
    if share > MOST:
        return f"{share:.0%} (rounding is larger than the change)"
    return f"{share:.1%}" if share >= 1 - MOST else "none (rounding is larger than the change)"


def unused(account: Mapping[str, Any]) -> str:
    """Return how many tensors of the adapters change nothing, and why the first of them do not."""
    first = [f"{name} ({why})" for name, why in [*account["reasons"].items()][:3]]
    more = account["unused"] - len(first)
    names = ", ".join(first) + (f" and {more} more" if more else "")
    return f"{account['unused']} of {account['tensors']} adapter tensors change nothing: {names}"


def second_reading(matching: Mapping[str, Any]) -> str:
    """Return for how many modules a second reading of the adapters found the plan's place and numbers."""
    left, first = matching["modules"] - matching["proven"], matching["alone"][:3]
    names = ", ".join(first) + (f" and {left - len(first)} more" if left > len(first) else "")
    unknown = " and ".join(f"{what} ({count})" for what, count in matching.get("why", {}).items())
    more = f"; {left} checked by numbers but not by place: {names}; the second reading does not know {unknown}"
    more = more if left else ""
    return f"proven a second way for {matching['proven']} of {plural(matching['modules'], 'module')}{more}"
