"""The report of a command that writes an adapter: a table and a panel on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...text import by_reason, plural, size
from ..look import grid, mark, panel, show, styled, table, text
from ..merge_look import nearest, removal
from ..text import echo, shortage

if TYPE_CHECKING:
    from ...adapters_out.report import AdapterReport


def tell(done: AdapterReport, title: str, *, quiet: bool, verbose: bool) -> None:
    """Say what was done or would be done; `title`: what was done, such as "resized". Notes are said always."""
    if quiet or not styled(sys.stdout):
        for line in lines(done, verbose=verbose) if not quiet else ():
            echo(line)
        for note in (*done.notes, *shortage(done.disk, done.output)):
            echo(f"note: {note}", err=quiet)
        return
    rows = [(name, text(found["modules"]), text(found["layers"]), f"{found['strength']:g}×")
            for name, found in done.coverage.items()]  # fmt: skip
    show(table(("adapter", "modules", "layers that they change", "strength"), rows, right=(1, 2)))
    if verbose:
        layers = [(name, one["algorithm"], one["rank"], _number(one, "residual"), _number(one, "largest"))
                  for name, one in done.layers.items()]  # fmt: skip
        show(table(("layer", "kind", "rank", "residual", "largest |ΔW|"), layers, right=(2, 3, 4)))
    if done.planned:
        show(grid([("output", text(nearest(done.output), "bold")), ("", _made(done)), *_notes(done)]))
    else:
        show(panel(f"{mark('done')} {title}", _rows(done)))


def _number(layer: Mapping[str, Any], name: str) -> str:
    """Return a number of a layer with three digits; "" where it is not known."""
    return f"{layer[name]:.3g}" if name in layer else ""


def _rows(done: AdapterReport) -> Iterator[tuple[str, Any]]:
    """Yield what the file holds, where it lies, how it was proven, and how to undo it."""
    yield "holds", done.summary
    yield "", done.change
    yield "lies in", text(nearest(done.output), "bold cyan")
    yield "", f"{_made(done)}, in {done.seconds:.1f} s"
    if done.verified is None:
        yield "proven", "not at all (--no-verify)"
    else:
        yield "proven", text(_proof(done), "green")
    yield from _notes(done)
    yield "undo", f"{removal(done.output, folder=Path(done.output).is_dir())}   (the inputs are as they were)"


def _notes(done: AdapterReport) -> Iterator[tuple[str, Any]]:
    for name, facts in done.coverage.items():
        for keys, why in by_reason(facts["ignored"]):
            yield "note", text(f"{name}: left out: {keys}: {why}", "yellow")
    for note in (*done.notes, *shortage(done.disk, done.output)):
        yield "note", text(note, "yellow")


def _made(done: AdapterReport) -> str:
    return f"{size(done.written)}, dtype {done.dtype}, {plural(len(done.layers), 'layer')}"


def _proof(done: AdapterReport) -> str:
    """Return what was proven, in plain words."""
    proof = done.verified or {}
    if not proof["recomputed"]:
        return "every tensor is in the file; what this method makes is not computed a second time"
    return (f"{mark('done')} {proof['recomputed']} of {plural(proof['layers'], 'layer')} computed again in fp64: the "
            f"file changes a model as this report says")  # fmt: skip


def lines(done: AdapterReport, *, verbose: bool) -> Iterator[str]:
    """Yield the plain lines of a report."""
    for name, facts in done.coverage.items():
        change, layers = plural(facts["modules"], "module changes", "modules change"), plural(facts["layers"], "layer")
        yield f"adapter  {name}: {change} {layers}, {facts['strength']:g}×"
        for keys, why in by_reason(facts["ignored"]):
            yield f"  left out: {keys}: {why}"
    for name, layer in done.layers.items() if verbose else ():
        lost = "" if done.planned else f", residual {_number(layer, 'residual')}"
        largest = f", largest |ΔW| {_number(layer, 'largest')}" if "largest" in layer else ""
        yield f"  {name}: {layer['algorithm']}, rank {layer['rank']}{lost}{largest}"
    yield f"output   {done.output}: {_made(done)}"
    yield f"  {done.summary}"
    if done.change:
        yield f"  {done.change}"
    if done.verified:
        yield (
            f"verified {done.verified['recomputed']} of {plural(done.verified['layers'], 'layer')} computed again in "
            f"fp64: worst residual {done.verified['worst_residual']:.3g}"
        )
