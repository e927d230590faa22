"""The commands that print tables: parts and blocks of a base, known algorithms, known architectures."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from ..options import OPTIONS
from ..paths import expand
from ..text import Lines, json_text, plural
from ..viewing.json_schemas import schema
from .argument_values import completed
from .help import add
from .options import with_options
from .reports import put
from .terminal import show, styled, table

JSON_OPTION: Final = typer.Option("--json", help="Print one JSON object.")


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    add(app, parts, "parts sdxl.safetensors")
    add(app, algorithms, "algorithms", "algorithms --json")
    add(app, architectures, "architectures")


@with_options(OPTIONS["cache"], before="as_json")
def parts(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Checkpoint: a .safetensors file, a model folder or an address.")
    ],
    as_json: Annotated[bool, JSON_OPTION] = False,
    **_: Any,
) -> None:
    """List parts and blocks, for --strength-for."""

    from ..viewing.parts import parts_of

    model = parts_of(expand(completed(base)))
    if as_json:
        put(json_text(model))
    elif styled(sys.stdout):
        columns = ("block", "tensors", "first of them")
        rows = [(name, facts["tensors"], facts["first"] or "") for name, facts in model["blocks"].items()]
        show(
            table(
                ("part", "tensors"),
                model["parts"].items(),
                title=f"{model['base']}: {model['architecture']}",
                right=[1],
            )
        )
        show(table(columns, rows, title="--strength-for NAME=FLOAT, FIRST-LAST=FLOAT", right=[1]))
        lists = [(count, " ".join(order)) for count, order in model["lists"].items()]
        show(table(("numbers", "order"), lists, title="--strength-for lbw=NUMBER,NUMBER,…", right=[0]))
    else:
        put(Lines.of(text_of_parts(model)))


@with_options()
def algorithms(as_json: Annotated[bool, JSON_OPTION] = False) -> None:
    """List the algorithms of adapters that can be merged."""
    _print("algorithms", ("names", "what", "paper"), list(known_algorithms()), as_json=as_json)


@with_options()
def architectures(as_json: Annotated[bool, JSON_OPTION] = False) -> None:
    """List the models that are recognised by their tensors."""
    _print("architectures", ("title", "part", "text encoders", "layouts"), list(known_architectures()), as_json=as_json)


def _print(name: str, columns: tuple[str, ...], rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows as JSON, as a table on a terminal, or as lines with a tab between two cells."""
    cells = [[", ".join(value) if isinstance(value, list) else value for value in row.values()] for row in rows]
    if as_json:
        put(json_text({name: rows, "schema": schema(name)}))
    elif styled(sys.stdout):
        show(table(columns, cells))
    else:
        put(Lines.of("\t".join(row) for row in cells))


def known_algorithms() -> Iterator[dict[str, Any]]:
    """Yield names, first words and papers of every formula; names of one file are next to each other."""
    from ..algorithms import ALGORITHMS

    files: dict[str, list[str]] = {}
    for row in ALGORITHMS.values():
        files.setdefault(row.module, []).append(row.name)
    for module, listed in files.items():
        words = (sys.modules[module].__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        what = re.split(r"\. (?=[A-Z])", words)[0].rstrip(". ")
        papers = [*dict.fromkeys(ALGORITHMS[name].paper for name in listed)]
        yield {"names": listed, "what": what, "papers": papers}


def known_architectures() -> Iterator[dict[str, Any]]:
    """Yield title, part, text encoders and layouts of every model, by title."""
    from ..models.architectures import shipped

    for row in sorted(shipped(), key=lambda a: (a.title.lower(), a.component)):
        encoders = [f"{part} ({kind})" for part, kind in row.text_encoders.items()]
        yield {"title": row.title, "part": row.component, "text_encoders": encoders, "layouts": [*row.layouts]}


def text_of_parts(model: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""

    def tensors(count: int) -> str:
        return " " * (6 - len(str(count))) + plural(count, "tensor")

    yield f"{model['base']}: {model['architecture']}"
    yield ""
    yield "parts (--strength-for NAME=FLOAT)"
    for name, count in model["parts"].items():
        yield f"  {name:<14}{tensors(count)}"
    yield ""
    yield "blocks (--strength-for NAME=FLOAT, FIRST-LAST=FLOAT)"
    for name, facts in model["blocks"].items():
        yield f"  {name:<14}{tensors(facts['tensors'])}" + (f"  {facts['first']} …" if facts["first"] else "")
    yield ""
    yield "lists of block weights (--strength-for lbw=NUMBER,NUMBER,…)"
    for count, order in model["lists"].items():
        yield f"  {count} numbers: {' '.join(order)}"
