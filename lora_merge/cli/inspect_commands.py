"""The commands that only look: inspect, compare, schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import FitError, InputError, MergeError, UsageError
from ..options import OPTIONS, READING
from ..paths import exists, expand
from ..progress import unwatched
from ..text import Lines, json_text
from ..viewing.json_schemas import schema as version
from .argument_values import completed, expanded, named_adapter
from .help import add, offered
from .options import HTML, JSON_TENSORS, PLOT, SILENT, with_options
from .progress_display import watching
from .reports import PageFiles, announcing, echo, put, show_comparison, show_facts
from .tables import parts

if TYPE_CHECKING:
    from ..job import Adapter

FACTS_AS_JSON = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    for command, lines in (
        (inspect, ("inspect style.safetensors", "inspect sdxl.safetensors style.safetensors:0.8 --weights")),
        (compare, ("compare sdxl.safetensors merged.safetensors",)),
        (schema, ("schema report", "schema jobs > jobs.schema.json")),
    ):
        add(app, command, *lines)


@with_options(OPTIONS["cache"], before="html")
def inspect(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Checkpoints or adapters; or a base and adapters for it.")
    ],
    weights: Annotated[bool, typer.Option("--weights", help=READING["weights"].help)] = False,
    hashes: Annotated[bool, typer.Option("--hashes", help=READING["hashes"].help)] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="List the parts and blocks of a base, for --strength-for.")
    ] = False,
    html: HTML = None,
    plot: PLOT = None,
    as_json: FACTS_AS_JSON = False,
    json_tensors: JSON_TENSORS = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="List name patterns too, and all facts of several files.")
    ] = False,
    quiet: SILENT = False,
    **_: Any,
) -> None:
    """Say what a file is, or how adapters fit a base. Reads headers only, unless asked for numbers."""
    if blocks:
        if len(files) > 1:
            raise UsageError("blocks are those of one base", "--blocks", "name one file")
        parts(files[0], as_json=as_json)
        return
    from ..files.folder_layouts import several
    from ..report import without_tensors
    from ..viewing.file_verdict import misplaced

    words = [*expanded(files)]
    inside = [path for word in words for path in several(expand(word))]
    pairs = _pairs([word for word in words if not several(expand(word))])
    pictures = PageFiles(html, plot, quiet=as_json or quiet)
    pictures.protect([*inside, *(path for base, ref in pairs for path in (base, *([ref.path] if ref else [])))])
    with watching(quiet=as_json or quiet, doing="reading the weights" if weights else "") as display:
        options: dict[str, Any] = {"weights": weights, "hashes": hashes, "pictures": html is not None}
        results, unread = _facts(pairs, inside, {**options, "progress": display or unwatched,
                                                "announce": announcing(display, quiet=as_json or quiet)})  # fmt: skip
    pictures.write(lambda: [dict(facts) for facts in results] if len(results) > 1 else dict(results[0]))
    remarks, no_adapter = misplaced(results, words) if not inside and "match" not in results[0] else ([], False)
    if as_json:
        values = results if json_tensors else [without_tensors(facts) for facts in results]
        many = {"files": values, "unread": unread, "schema": version("files")}
        put(json_text(many if len(results) + len(unread) > 1 else values[0]))
    elif not quiet:
        show_facts(results, unread, verbose=verbose)
        for text in remarks:
            echo(text)
    misfits = [facts["match"] for facts in results if "match" in facts and not facts["match"]["fits"]]
    if misfits or no_adapter:
        raise typer.Exit(FitError.exit_code)


def _facts(
    pairs: Sequence[tuple[Path, Adapter | None]], inside: Sequence[Path], options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the facts of files, and of those inside folders; of the latter, path → why some cannot be read."""
    from ..viewing.inspect import inspect as look

    results, unread = [look(*pair, **options) for pair in pairs], dict[str, str]()
    for path in inside:
        try:
            results.append(look(path, **options))
        except MergeError as e:
            unread[str(path)] = e.what
    if not results:
        raise InputError("no file of the folder can be read", str(inside[0].parent), "name one of its files")
    return results, unread


def _pairs(files: Sequence[str]) -> list[tuple[Path, Adapter | None]]:
    """Return (file, None) for each file; (base, adapter) for each adapter, if the first file is a base and all others
    are adapters."""
    from ..adapters.modules import is_adapter
    from ..planning.checkpoint_cache import CheckpointCache

    refs, cache = [_ref(text) for text in files], CheckpointCache()
    base = [ref.path for ref in refs[:1] if exists(ref.path)]
    indexes = [cache.index(ref.path, adapter=bool(n), partners=base) for n, ref in enumerate(refs)]
    kinds = [is_adapter(index) for index in indexes] if len(refs) > 1 else []
    if kinds and not kinds[0] and all(kinds[1:]):
        return [(refs[0].path, ref) for ref in refs[1:]]
    return [(ref.path, None) for ref in refs]


def _ref(text: str) -> Adapter:
    """Return a path with the strength and parts behind it, if there are any."""
    from ..job import Adapter

    if exists(completed(text)):
        return Adapter(expand(completed(text)))
    named = named_adapter(text)
    return Adapter(expand(named.path), 1.0 if named.strength is None else named.strength, named.parts)


@with_options(OPTIONS["cache"], before="html")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A model or an adapter.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Read this base model, if the two adapters use different naming schemes."),
    ] = None,
    html: HTML = None,
    plot: PLOT = None,
    as_json: FACTS_AS_JSON = False,
    json_tensors: JSON_TENSORS = False,
    quiet: SILENT = False,
    **_: Any,
) -> None:
    """Say where two models differ, or how alike adapters are.

    Compares models tensor by tensor, and the changes of adapters module by module.
    """
    from ..report import without_tensors
    from ..viewing.compare import compare as look

    first, second = expand(completed(a)), expand(completed(b))
    pictures = PageFiles(html, plot, quiet=as_json or quiet)
    pictures.protect([first, second])
    with watching(quiet=as_json or quiet, doing="reading both") as display:
        comparison = look(
            first,
            second,
            expand(completed(base)) if base else None,
            pictures=html is not None,
            progress=display or unwatched,
            announce=announcing(display, quiet=as_json or quiet),
        )
    pictures.write(lambda: dict(comparison))
    if as_json:
        put(json_text(comparison if json_tensors else without_tensors(comparison)))
    elif not quiet:
        show_comparison(comparison)


def _schemas(incomplete: str) -> list[str]:
    """Return the schemas whose names begin so, for the shell's completion."""
    from ..viewing.json_schemas import SCHEMA_KINDS

    return offered(SCHEMA_KINDS)(incomplete)


@with_options()
def schema(
    what: Annotated[
        str,
        typer.Argument(metavar="report|jobs|…", help="What the schema describes.", autocompletion=_schemas),
    ] = "report",
) -> None:
    """Print the JSON Schema of a report, or of jobs files.

    Merges print report, plan; commands that write adapters: adapter; verify: proof, adapter-proof; batch: job-report,
    job-plan; inspect: inspect, files; parts, compare, algorithms, architectures, doctor: their names; all: error.
    """
    from ..viewing.json_schemas import SCHEMA_KINDS, schema_of

    if what not in SCHEMA_KINDS:
        raise UsageError(
            f"there is no schema {what[:40]!r}", "lora-merge schema", f"use one of {', '.join(SCHEMA_KINDS)}"
        )
    document: dict[str, Any] = schema_of(what)
    put(Lines.of(json_text(document, indent=2).splitlines()))
