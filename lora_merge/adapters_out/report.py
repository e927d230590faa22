"""The report of a command that writes an adapter, and its rows of facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import fsum, sqrt
from pathlib import Path
from typing import Any, Final

from ..change_statistics import Groups
from ..facts import Fact, line, rows_in_python, share_of, times
from ..options import KEEP
from ..report import NOT_VERIFIED, adapter_notes, disk_rows, layers_recomputed, note_row, survives, without_tensors
from ..survival import ENOUGH, grade, judged, lost, percent, spoken, survived, target
from ..text import Note, Shown, json_text, listed, plural, size
from .job import FACTORS, RANK_OPTIONS, STORED_AS, WHOLE, AdapterJob
from .rank_rules import EXACT
from .values import effect_of_layers


@dataclass(frozen=True, repr=False)
class AdapterReport(Shown):
    """The outcome of `combine`, `resize`, `convert`, `extract` or `average`; `--json` prints `to_json()`.

    Attributes:
        output: The file or folder that was written.
        format: Its dialect.
        dtype: Its dtype.
        coverage: Adapter → modules, layers, strength.
        layers: Layer → block, algorithm, rank, rank_before, alpha, norm, energy, residual; largest, the largest |ΔW|,
            and changed, the share of values that are not zero, of the `elements` of its `of` values that were looked
            at; adapters, the norm of each adapter's change at its strength (None: it changes nothing there); of two
            checkpoints weight, ‖W‖ of the base, and ratio, norm / weight; if these are in 16 bits also noise, the share
            of the norm that rounding errors have.
        residual: √(Σ‖Δ − Δ̂‖² / Σ‖Δ‖²) of the stored tensors, over everything that was written.
        energy: 1 − residual², the share of the change that survives.
        survival: How that is judged: share, grade; below 95 % also warning, a sentence, with target, a better share,
            fix, the option that keeps it, and ranks, the least and the largest that layers need for it, if the run
            knows them; {} of a plan.
        numbers: The layers in all, by network and by block: the same, as sums over the layers; {} of a plan.
        written: Bytes.
        seconds: Of the whole run.
        notes: Remarks for the user.
        verified: What the proof found; None without a proof.
        version: Of lora-merge.
        weights: Bytes of the weights whose changes are computed, in fp64.
        planned: Whether this is a plan: nothing is written, and nothing is known of the loss.
        disk: Of a plan, needed, the bytes that the run takes on the disk at most, free, the free bytes there, and
            whether that is enough; None of an output that is written.
        stages: Stage of the progress → its seconds, which add up to those of the whole run; {} of a plan.
        schema: The format of `to_json()`; `lora-merge schema adapter` describes it.

    Examples:
        >>> report = lora_merge.resize("style.safetensors", "small.safetensors", rank=8)
        >>> report.energy > 0.9, report.layers["lora_unet_mid_block_attentions_0_proj_in"]["rank"]
        (True, 8)
    """

    output: str
    format: str
    dtype: str
    coverage: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, Any]]
    residual: float
    energy: float
    written: int
    seconds: float
    notes: tuple[Note, ...] = ()
    verified: Mapping[str, Any] | None = None
    version: str = ""
    weights: int = 0
    numbers: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = field(default=False)
    disk: Mapping[str, Any] | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    survival: Mapping[str, Any] = field(default_factory=dict)
    schema: str = "lora-merge/adapter/1"

    def _heading(self) -> str:
        return f"Written: {Path(self.output).name}"

    def _facts(self) -> Iterator[Fact]:
        return rows_in_python(adapter_rows(vars(self)))

    def to_json(self, *, tensors: bool = True) -> str:
        """Return the report as one JSON object.

        Parameters:
            tensors: Whether it has `layers`, as with `--json-tensors`.

        Returns:
            A line of JSON, as `lora-merge --json` prints it.
        """
        return json_text(asdict(self) if tensors else without_tensors(asdict(self)))

    @property
    def summary(self) -> str:
        """One line: the ranks, the share of the change that survives, and the layer that loses most."""
        return _ranks_and_share(vars(self))

    @property
    def change(self) -> str:
        """One line: ‖ΔW‖, its share of ‖W‖ if that is known, and ‖ΔW‖ of each input."""
        return _norms(vars(self))


def adapter_rows(report: Mapping[str, Any], *, verbose: bool = False) -> Iterator[Fact]:
    """Yield what a command wrote or would write, from the values of its report; `verbose`: with every layer, norms and
    residuals."""
    planned = report["planned"]
    took = "" if planned else f" in {report['seconds']:.1f} s"
    words = "" if report["format"] == "keep" else f", format {report['format']}"
    yield line("output", f"{report['output']} ({size(report['written'])}, dtype {report['dtype']}{words}){took}")
    yield from _inputs(report["coverage"], each=verbose or planned)
    yield line("layers", f"{len(report['layers'])}: {_ranks(report)}{_split(report)}")
    yield from (Fact("", name, _layer(layer)) for name, layer in report["layers"].items() if verbose)
    if not planned:
        yield survives(report["energy"])
    if verbose:
        yield from _numbers(report)
    if warning := report["survival"].get("warning"):
        yield line("warning", warning)
    if (proof := report["verified"]) is not None:
        yield line("verified", layers_recomputed(proof, verbose=verbose))
    elif not planned:
        yield NOT_VERIFIED
    yield from (note_row(note) for note in report["notes"])
    yield from disk_rows(report["disk"], report["output"])


def _split(report: Mapping[str, Any]) -> str:
    """Return why an output has more layers than its only input has modules: fused layers, such as q, k, v, are split
    where its format has them apart."""
    modules = [row["modules"] for row in report["coverage"].values()]
    more = len(modules) == 1 and 0 < modules[0] < len(report["layers"])
    return f"; {modules[0]} modules; fused ones (q, k, v …) are split" if more else ""


MOST_INPUTS: Final = 2
"""Adapters that have a row each; more have one together."""


def _inputs(coverage: Mapping[str, Any], *, each: bool) -> Iterator[Fact]:
    """Yield what was read; `each`: with a row for each adapter, however many there are."""
    if each or len(coverage) <= MOST_INPUTS:
        for name, row in coverage.items():
            if "base" in row:
                yield line("input", f"{name} − {row['base']}: {plural(row['modules'], 'weight')} compared")
            else:
                yield line("input", f"{times(row['strength'], '.4g')} × {name}: {plural(row['modules'], 'module')}")
    else:
        yield line("inputs", listed(f"{times(row['strength'], '.3g')} × {name}" for name, row in coverage.items()))
    for name, row in coverage.items():
        yield from adapter_notes(name, row["ignored"])


def _numbers(report: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield norms and residuals."""
    if change := _norms(report):
        yield line("change", change)
    if not report["planned"]:
        name, share = _worst(report["layers"])
        least = f"; worst layer {name}: {spoken(share)} survives" if share < report["energy"] else ""
        yield line("residual", f"{report['residual']:.2%} of ‖ΔW‖{least}")


def _layer(layer: Mapping[str, Any]) -> str:
    """Return the kind and rank of a layer, and as far as they are known what is lost and its largest number."""
    numbers = {"residual": layer.get("residual"), "largest |ΔW|": layer.get("largest")}
    known = (f"{name} {number:.3g}" for name, number in numbers.items() if number is not None)
    rank = f"rank {layer['rank']}" if layer["rank"] or layer["algorithm"] == WHOLE else "rank from its values"
    return ", ".join([layer["algorithm"], rank, *known])


def _ranks_and_share(report: Mapping[str, Any]) -> str:
    """Return the ranks, the share of the change that survives, and the layer that loses most."""
    if report["planned"]:
        return _ranks(report)
    name, share = _worst(report["layers"])
    least = f", worst layer {name} {spoken(share)}" * (share < report["energy"])
    return f"{_ranks(report)}; survives: {judged(report['energy'], 'the change')}{least}"


def _worst(layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, float]:
    """Return the layer that loses most, and the share of its change that survives."""
    return min(((name, float(layer["energy"])) for name, layer in layers.items()), key=lambda row: row[1],
               default=("", 1.0))  # fmt: skip


def _ranks(report: Mapping[str, Any]) -> str:
    layers = report["layers"]
    ranks = sorted(int(layer["rank"]) for layer in layers.values() if layer["rank"])
    text = f"rank {ranks[-1]}" if ranks else "whole matrices"
    if ranks and ranks[0] < ranks[-1]:
        text = f"ranks {ranks[0]} to {ranks[-1]} (median {ranks[len(ranks) // 2]})"
    if not report["planned"]:
        return text
    decided_later = any(not layer["rank"] and layer["algorithm"] != WHOLE for layer in layers.values())
    return f"{f'{text}; ' if ranks else ''}the rank is chosen from the values" if decided_later else text


def judging(job: AdapterJob, report: AdapterReport) -> AdapterReport:
    """Return the report of a run with the judgement on the share of the change that survives."""
    share = report.energy
    survival: dict[str, Any] = {"share": share, "grade": grade(share).word}
    if share < ENOUGH:
        survival |= _advice(job, report, target(share))
    return replace(report, survival=survival)


def _advice(job: AdapterJob, report: AdapterReport, better: float) -> dict[str, Any]:
    """Return the warning about a loss: what keeps a better share of the change.

    Ranks come from the singular values that the run computed; where it computed too few of them, none are named.
    """
    layers, share = [*report.layers.values()], f"{better:.0%}"
    cut = [layer for layer in layers if "rank_for_energy" in layer]
    squares = fsum(layer["norm"] ** 2 for layer in layers)
    left_out = fsum(layer["norm"] ** 2 * layer["left_out"] for layer in cut) / squares
    nearest = job.algorithm not in (*STORED_AS, KEEP)  # the nearest product of another form
    exactly = job.rules.all_are(EXACT) or job.keeps_forms
    ranks = None
    if not nearest and (left_out < (1 - report.energy) / 2 if cut else exactly):  # rounding took more than the ranks
        fix = None if report.dtype in ("fp32", "fp64") else "--dtype fp32"
        where, needs = f"in {report.dtype}", f"{percent(better):g} % needs a wider dtype"
    else:
        others = [f"--{name.replace('_', '-')}" for name, _ in job.options if name in RANK_OPTIONS[1:]]
        algorithm = f"--algorithm {FACTORS} " * nearest
        fix = f"{algorithm}--rank energy:{better:g}" + f" without {' and '.join(others)}" * bool(others)
        known = [layer["rank_for_energy"][share] for layer in cut]
        complete = all("rank_for_energy" in layer for layer in layers if layer["energy"] < better)
        ranks = [min(known), max(known)] if known and complete and None not in known and not nearest else None
        least = max([0, *filter(None, known), *(layer["rank"] + 1 for layer in layers if layer["energy"] < better)])
        needs = f"{percent(better):g} % needs {_rank_words(ranks, 0 if nearest else least)}"
        where = f"as {job.algorithm}" if nearest else f"at {_ranks(vars(report)).partition(' (')[0]}"
    gone = f"{lost(report.energy)} of the change"
    warning = Note(f"{gone} is lost {where}; {needs}: {fix}") if fix else Note(f"{gone} is lost {where}")
    return {"target": better, "ranks": ranks, "fix": fix, "warning": warning}


def _rank_words(ranks: Sequence[int] | None, least: int) -> str:
    """Return the ranks of layers that keep a share of the change. `least`: what is known if they are not."""
    if ranks is None:
        return f"rank {least} or more" if least else "higher ranks"
    return f"rank {ranks[1]}" if ranks[0] == ranks[1] else f"ranks {ranks[0]} to {ranks[1]} by layer"


def _norms(report: Mapping[str, Any]) -> str:
    every = report["numbers"].get("all")
    if not every:
        return ""
    share = f", {share_of(every['ratio'], '‖W‖')}" if every.get("ratio") else ""
    inputs = [
        f"{name} {change['change']:.4g}"
        for name, change in zip(report["coverage"], every.get("adapters", ()), strict=False) if change
    ]  # fmt: skip
    return f"‖ΔW‖ {every['norm']:.4g}{share}" + (f"; {', '.join(inputs)}" if len(inputs) > 1 else "")


def numbers_by_block(layers: Mapping[str, Mapping[str, Any]], groups: Groups) -> dict[str, Any]:
    """Return the numbers of layers in all, by network and by block."""
    kinds: dict[str, dict[str, list[Mapping[str, Any]]]] = {"components": {}, "blocks": {}}
    for name, layer in layers.items():
        for kind, group in groups.of(name):
            kinds[kind].setdefault(group, []).append(layer)
    return {"all": _totals([*layers.values()]), **{
        kind: {name: _totals(rows[name]) for name in sorted(rows, key=groups.place)}
        for kind, rows in kinds.items()
    }}  # fmt: skip


def _totals(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    squares = fsum(layer["norm"] * layer["norm"] for layer in layers)
    lost = fsum(lost * lost for lost in (layer["norm"] * layer["residual"] for layer in layers))
    share = lost / squares if squares else 0.0
    facts: dict[str, Any] = {
        "layers": len(layers), "norm": sqrt(squares), "residual": sqrt(share), "energy": survived(1 - share, share),
    }  # fmt: skip
    if layers and all("weight" in layer for layer in layers):
        size = sqrt(fsum(layer["weight"] ** 2 for layer in layers))
        facts |= {"weight": size, "ratio": sqrt(squares) / size if size else None}
    if layers and all("adapters" in layer for layer in layers):
        columns = zip(*(layer["adapters"] for layer in layers), strict=True)
        facts["adapters"] = [_added([s["change"] for s in column if s]) for column in columns]
    return {**facts, **effect_of_layers(layers)}


def _added(norms: Sequence[float]) -> dict[str, float] | None:
    """Return the norm of the changes of an adapter in several layers; None where it changes none of them."""
    return {"change": sqrt(fsum(norm * norm for norm in norms))} if norms else None
