"""The report of a merge, and the rows of facts that text, terminals, notebooks and pages show of a plan, a merge and a
proof. The rows are made from the values that `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from .change_statistics import RETAINED
from .facts import Fact, line, percent, rows_in_python, share_of, strengths, times
from .merge_methods import METHODS, SUM
from .option_texts import in_python
from .survival import NOTHING, grade, judged, spoken, worst
from .text import Note, Shown, by_pattern, codes_line, counted, json_text, listed, plural, size, stored

ADAPTER_PROOF: Final = "lora-merge/adapter-proof/1"
"""The schema of the proof of a written adapter."""

LOST_ALPHA: Final = Note(
    "no alpha is stored, but trainers that write such names store it; merged as alpha = rank (scale 1), and if the "
    "training had another, state it with --setting lora_alpha=VALUE"
)
"""The note on an adapter whose alpha was probably lost: the strength of its change is uncertain."""

NOT_THE_BASE: Final = "the result is not the base"
"""The end of a warning about an adapter that is taken out of a checkpoint otherwise than it was merged into it."""

LEFT_OUT: Final = Note("it does not fit the base, and is left out because its strength is 0")
"""The end of a note that is shown with -v only: the user asked for it, and the strengths say it."""

AS_LARGE: Final = 0.95
"""A change of so much of the weights leaves little of them; those of trainings are a few percent."""

DONE: Final = frozenset({"merged", "made", "skipped"})
"""Status of jobs of a batch whose output exists."""

NOT_VERIFIED: Final = Fact("verified", "not at all (--no-verify)", style="yellow")
"""The row of an output without a proof."""


OF_EVERY_TENSOR: Final[Mapping[str, Any]] = {
    "numbers": {"tensors": {}},  # of a merge or its proof
    "layers": {},  # of a written adapter
    "match": {"numbers": {"tensors": {}}}, "weights": {"modules": {}}, "sizes": {"tensors": {}},  # of inspect
    "tensors": {}, "equal_tensors": {}, "modules": {}, "whole": {"tensors": {}},  # of compare
}  # fmt: skip
"""Entries of JSON objects that have a row for every tensor: {} is such an entry, others have one inside."""


def without_tensors(values: Mapping[str, Any], tables: Mapping[str, Any] = OF_EVERY_TENSOR) -> dict[str, Any]:
    """Return the values of a report, a proof or facts without those of every tensor: 300 bytes for each. Numbers with
    the names of such entries stay."""
    return {
        name: without_tensors(value, tables[name]) if tables.get(name) and isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in tables or tables[name] or not isinstance(value, Mapping | list)
    }


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
        saturated: Tensor → values that were cut (`on_overflow="saturate"`).
        files: For each input folder its files: read, copied, or left out and why.
        notes: Remarks about the merge, such as a device that was not used; those about an adapter are in `coverage`.
        device_choice: Why `device="auto"` took the device.
        numbers: What the merge did to the weights, by component, block, adapter and tensor.
        codes: Quantised weights by format, how many were encoded, and plain matrices.
        survival: Of each adapter in order: adapter, share, the share of its change that survives, None if that is not
            known, and grade, how it is judged.
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
    survival: Sequence[Mapping[str, Any]] = ()
    schema: str = "lora-merge/report/1"

    def _heading(self) -> str:
        return f"Merged: {Path(self.output).name}"

    def _facts(self) -> Iterator[Fact]:
        return rows_in_python(merge_rows(vars(self)))

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
    """Yield what a merge did, from the values of its report: what a person wants to know when it ends; `verbose`: all
    that is known, with names, devices and units in the last place."""
    if verbose:
        yield from _every_row(report)
        return
    dtype = "as the base" if report["dtype"] == "keep" else report["dtype"]
    device = f" on {report['device']}" * (report["device"] != "cpu")
    written = f"{size(report['written'])}, dtype {dtype}"
    yield line("output", f"{report['output']} ({written}) in {report['seconds']:.1f} s{device}")
    adapters = [(name, row["strengths"]) for name, row in report["coverage"].items()]
    yield from survival_rows(adapters, report["survival"], report["method"])
    yield line("change", f"{report['changed']} of {plural(report['tensors'], 'tensor')}{moved(report['numbers'])}")
    if report["codes"]:
        yield line("format", codes_line(report["codes"]))
    if words := trigger_words(report["coverage"]):
        yield line("triggers", ", ".join(words))
    yield from map(note_row, report["notes"])
    for name, row in report["coverage"].items():
        yield from adapter_notes(name, {**row["skipped"], **row["ignored"]}, unasked(row["notes"]))
    yield from (line("warning", warning) for warning in too_large(report["numbers"]))
    if report["saturated"]:
        yield line("cut", cut_values(report["saturated"]))
    if (proof := report["verified"]) is not None:
        yield from brief_proof(proof)
    else:
        yield NOT_VERIFIED


def _every_row(report: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield all that is known of a merge."""
    yield from input_rows(report, verbose=True)
    yield from output_rows(report, report["written"])
    rate = size(int(report["written"] / max(report["seconds"], 1e-9)))
    wrote = f"{size(report['written'])} in {report['seconds']:.1f} s ({rate}/s)"
    memory = f"{size(report['peak_memory'])} of memory at most"
    yield line("wrote", f"{wrote} on {report['device']}, computed in {report['compute_dtype']}; {memory}")
    if report["device_choice"]:
        yield line("device", f"{report['device']}: {report['device_choice']}")
    yield from (line("warning", warning) for warning in too_large(report["numbers"]))
    if report["saturated"]:
        yield line("cut", cut_values(report["saturated"]))
    yield from survival_rows([(name, row["strengths"]) for name, row in report["coverage"].items()],
                             report["survival"], report["method"], each=True)  # fmt: skip
    if report["verified"] is not None:
        yield from proof_rows({**report["verified"], "numbers": report["numbers"], "counted": True})
    else:
        yield NOT_VERIFIED
        if report["numbers"]:
            yield line("change", effect(report["numbers"]))


ADAPTER_ROWS: Final = 2
"""Adapters that have a row each in a short report; more have one together."""


def survival_rows(
    adapters: Sequence[tuple[str, Mapping[str, Mapping[Any, int]]]], survival: Sequence[Mapping[str, Any]],
    method: str, *, each: bool = False,
) -> Iterator[Fact]:  # fmt: skip
    """Yield how much of the change of each adapter survives. `adapters`: names and strengths by component; `survival`:
    the judgements, in their order; `method`: what makes one change of them, of which each has a part; `each`: with a
    row for each adapter, however many there are."""
    rows = [(name, *_applied(by_part), row["share"]) for (name, by_part), row in zip(adapters, survival, strict=True)]
    if each or len(rows) <= ADAPTER_ROWS:
        for name, strength, parts, share in rows:
            what = f"{strength} × {name}{f' ({parts})' * bool(parts)}"
            part = of_change(method, "it") if METHODS[method].combines else ""
            judged_first = "" if share is None else f"{judged(share, part)}: "
            yield Fact("survives" if judged_first else "adapter", judged_first + what,
                       style="" if share is None else grade(share).style)  # fmt: skip
        return
    yield line("adapters", listed(f"{strength} × {name}" for name, strength, *_ in rows))
    known = [(share, name) for name, _, _, share in rows if share is not None]
    if (least := worst(share for share, _ in known)) is not None:
        name = next(name for share, name in known if share == least)
        of_each, of_one = (judged(least, of_change(method, of))
                           for of in ("each adapter's change", f"the change of {name}"))  # fmt: skip
        words = of_one if spoken(least) == NOTHING else f"at least {of_each}; lowest: {name}"
        yield Fact("survives", words, style=grade(least).style)


def of_change(method: str, change: str) -> str:
    """Return what of a change a method writes: "what ties makes of the change"; the change itself if it is added."""
    return f"what {method} makes of {change}" if METHODS[method].combines else change


def trigger_words(coverage: Mapping[str, Any]) -> list[str]:
    """Return the trigger words of adapters that were added, not subtracted, from the coverage of a report."""
    added = (row for row in coverage.values() if _strengths(row["strengths"])[-1] > 0)
    return [*dict.fromkeys(word for row in added for word in row.get("trigger_words", ()))]


def _applied(strengths: Mapping[str, Mapping[Any, int]]) -> tuple[str, str]:
    """Return the strength, or the least and the largest one, at which components change, and these components."""
    values = _strengths(strengths)
    words = " to ".join(times(value) for value in dict.fromkeys((values[0], values[-1])))
    return words, ", ".join(part for part, counts in strengths.items() if any(map(float, counts)))


def _strengths(strengths: Mapping[str, Mapping[Any, int]]) -> list[float]:
    """Return the strengths other than 0 in ascending order; 0 alone if there are no others."""
    return sorted({s for counts in strengths.values() for s in map(float, counts) if s}) or [0.0]


def input_rows(
    facts: Mapping[str, Any], formulas: Mapping[str, str] = MappingProxyType({}), *, verbose: bool = False
) -> Iterator[Fact]:
    """Yield what is merged, from the values of a plan or a report. `formulas`: those of each adapter, in a plan."""
    yield line("base", f"{Path(facts['base']).name}: {facts['architecture']}")
    yield from map(note_row, facts["notes"])
    for name, row in facts["coverage"].items():
        applied = strengths(row["strengths"])
        matched = f"{row['matched']} of {plural(row['total'], 'module')} matched"
        yield line("adapter", f"{name}: {matched}" + f": {applied}" * bool(applied))
        if name in formulas:
            yield line("formula", formulas[name] or "none: it changes nothing")
        yield from (Fact("", pattern, f"× {n}") for pattern, n in row["patterns"].items() if verbose)
        notes = row["notes"] if verbose else unasked(row["notes"])
        yield from adapter_notes(name, {**row["skipped"], **row["ignored"]}, notes)


def unasked(notes: Iterable[str]) -> Iterator[str]:
    """Yield the notes on what the user did not ask for."""
    return (note for note in notes if not note.endswith(LEFT_OUT))


def output_rows(facts: Mapping[str, Any], nbytes: int) -> Iterator[Fact]:
    """Yield what is written, from the values of a plan or a report."""
    yield line("output", f"{facts['output']} ({size(nbytes)}, {stored(facts['dtype'])})")
    yield line("changes", f"{facts['changed']} of {plural(facts['tensors'], 'tensor')}")
    if facts["codes"]:
        yield line("format", codes_line(facts["codes"]))
    if facts["method"] != SUM:
        yield line("method", facts["method"])


def adapter_notes(name: str, left_out: Mapping[str, str], notes: Iterable[str] = ()) -> Iterator[Fact]:
    """Yield what the user should know of an adapter: what is left out of it and why, and its notes."""
    for reason in dict.fromkeys(left_out.values()):
        names = [key for key, why in left_out.items() if why == reason]
        yield line("note", f"{name}: left out {len(names)}: {counted(by_pattern(names))}: {reason}")
    yield from (note_row(f"{name}: {note}") for note in notes)


def note_row(note: str) -> Fact:
    """Return the row of a note; a warning if the result is uncertain."""
    return line("warning" if note.endswith((LOST_ALPHA, in_python(LOST_ALPHA), NOT_THE_BASE)) else "note", note)


def disk_rows(disk: Mapping[str, Any] | None, output: str) -> Iterator[Fact]:
    """Yield the note on an output that has no room on its disk. `disk`: a `Room` as JSON has it."""
    if disk is not None and not disk["enough"]:
        missing = f"{size(disk['needed'])} needed, {size(disk['free'])} free"
        yield line("note", Note(f"the disk has no room for the output: {missing} at {output}"))


# The rows of a proof, and their words.


def brief_proof(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield in short what the proof of a merge found."""
    same = proof["untouched"]
    sampled = " (sampled)" * (same["bytes"] < same["of"])
    equals = "is the base rounded to the output's dtype" if same.get("converted") else "equals the base"
    rest = f"; the rest {equals}{sampled}" if same["of"] else ""
    words = recomputed(proof)
    if proof["changed"]:
        rows = "all rows" if proof["full"] else plural(proof["rows"], "row")
        words = f"{proof['tensors']} of {plural(proof['changed'], 'merged tensor')} ({rows} recomputed in fp64)"
    yield line("verified", f"{words}{rest}")
    if (matching := proof["matching"])["alone"]:
        yield line("matching", placed(matching))
    yield from (line("warning", warning) for warning in proof["warnings"])


def proof_rows(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what the proof of a merge found. With `counted` the numbers are those of the whole merge."""
    yield line("verified", recomputed(proof))
    if proof["untouched"]["of"]:
        yield line("copied", unchanged(proof["untouched"]))
    yield from _cut_rows(proof)
    if proof["numbers"]:
        whole = proof["full"] or proof.get("counted", False)
        rows = "" if whole else f", in the {plural(proof['rows'], 'row')} that were read"
        yield line("change", f"{effect(proof['numbers'])}{rows}")
    yield line("matching", second_reading(proof["matching"]))
    if (account := proof["account"])["unused"]:
        yield line("unused", unused(account))
    yield from (line("warning", warning) for warning in proof["warnings"])


def _cut_rows(proof: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the row about values that were cut, as `--on-overflow saturate` asks."""
    if cut := proof["saturated"]:
        yield line(
            "cut",
            f"{cut} of the numbers compared, too large for their dtype and cut to its largest (--on-overflow saturate)",
        )


def verify_rows(proof: Mapping[str, Any], *, verbose: bool = False) -> Iterator[Fact]:
    """Yield what `verify` has proven of a merge or of a written adapter; `verbose`: with units and unused tensors."""
    yield line("output", proof["output"])
    if proof["schema"] == ADAPTER_PROOF:
        yield survives(proof["survival"]["share"])
        if warning := proof["survival"].get("warning"):
            yield line("warning", warning)
        yield line("verified", f"its inputs give the same bytes; {layers_recomputed(proof, verbose=verbose)}")
    else:
        adapters = [(row["adapter"], row["strengths"]) for row in proof["retained"]]
        yield from survival_rows(adapters, proof["survival"], proof["method"], each=verbose)
        yield from (line("warning", warning) for warning in too_large(proof["numbers"]))
        if verbose:
            yield from proof_rows(proof)
            return
        yield from _cut_rows(proof)
        yield from brief_proof(proof)


def survives(share: float) -> Fact:
    """Return the row about the share of a change that survives, in the colour of its judgement."""
    return Fact("survives", judged(share, "the change"), style=grade(share).style)


def layers_recomputed(proof: Mapping[str, Any], *, verbose: bool = False) -> str:
    """Return how much of a written adapter was computed again; `verbose`: with the largest loss of a layer."""
    if not proof["recomputed"]:
        return "every tensor is in the file; this method has no second computation to compare with"
    layers = f"{proof['recomputed']} of {plural(proof['layers'], 'layer')} recomputed in fp64"
    worst_layer = f"worst residual {proof['worst_residual']:.3g}"
    return f"{layers}: {worst_layer if verbose else 'the same share survives'}"


def cut_values(counts: Mapping[str, int]) -> str:
    """Return how many values were cut, by tensor."""
    most = sorted(counts, key=lambda name: (-counts[name], name))
    return f"{plural(sum(counts.values()), 'number')} too large for the output's dtype: " + listed(
        [f"{counts[name]} of {name}" for name in most]
    )


def recomputed(proof: Mapping[str, Any]) -> str:
    """Return how much of a merge was computed again, and how far the output is from the exact values."""
    if not proof["changed"]:
        return "all tensors were copied, from the base or an adapter; none had to be recomputed"
    rows = "every row" if proof["full"] else plural(proof["rows"], "row")
    return (
        f"{proof['tensors']} of {plural(proof['changed'], 'merged tensor')} recomputed in fp64, {rows}: at most "
        f"{proof['worst_ulp']:.2f} ulp from the exact numbers (the nearest has 0.50 at most, a stochastic one 1.00), "
        f"judged by the bound of {proof['bound']['compute_dtype']}"
    )


def unchanged(same: Mapping[str, int]) -> str:
    """Return how much of the unchanged tensors was compared with the base."""
    share = "every byte" if same["bytes"] == same["of"] else f"a sample of {size(same['bytes'])} of {size(same['of'])}"
    rounded = ", rounded to the output's dtype" if same.get("converted") else ""
    return f"unchanged tensors equal the base{rounded}: {share}"


def effect(numbers: Mapping[str, Any]) -> str:
    """Return how large a change is compared with the weights, and in how many of them the output loses it."""
    every = numbers["all"]
    if every["ratio"] is None:
        words = "the changed weights were zero"
    else:
        moved_by, differ = size_of_change(numbers, "the weights"), percent(every["changed"])
        words = f"{moved_by} (‖ΔW‖ / ‖W‖), {differ} of their numbers differ"
    if numbers["below"]:
        weights = plural(numbers["below"], "weight")
        words += f"; less than {spoken(RETAINED)} of it is in {weights}, least in {numbers['worst']}"
    return words


def moved(numbers: Mapping[str, Any]) -> str:
    """Return how far a merge moves the weights that it changes."""
    known = numbers and numbers["all"]["ratio"] is not None
    return f", by {size_of_change(numbers, 'their weights')}" if known else ""


def size_of_change(numbers: Mapping[str, Any], weights: str) -> str:
    """Return how large a change is: "2 % of the weights", "about 2 % …" where some rows of them were looked at."""
    every = numbers["all"]
    return "about " * bool(every["elements"] < every["of"]) + share_of(every["ratio"], weights)


def too_large(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if a change is as large as the weights."""
    if numbers and (numbers["all"]["ratio"] or 0) >= AS_LARGE:
        yield (
            f"the change is {size_of_change(numbers, 'the weights')}; trained changes are a few percent of them: "
            "check the strengths, and that the adapters are for this base"
        )


def placed(matching: Mapping[str, Any]) -> str:
    """Return in short for how many modules a second reading of the adapters found the plan's place and numbers."""
    left, unknown = matching["modules"] - matching["proven"], " and ".join(matching.get("why", {}))
    known = f"{_confirmed(matching)}; the values of the other {left}" if matching["proven"] else NONE_TWICE.format(left)
    others = f" are right, their placement was not checked a second time (the second reading cannot resolve {unknown})"
    return f"{known}{others}" if unknown else _confirmed(matching)


NONE_TWICE: Final = "the values of all {} modules"


def _confirmed(matching: Mapping[str, Any]) -> str:
    return f"placement confirmed for {matching['proven']} of {plural(matching['modules'], 'module')}"


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
    alone = f": {names}; the second reading cannot resolve {unknown}"
    if left and not matching["proven"]:
        return f"{NONE_TWICE.format(left)} are right, their placement was not checked a second time{alone}"
    return _confirmed(matching) + (f"; of the other {left} the values alone{alone}" if left else "")
