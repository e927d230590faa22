"""Makes the generated pages of the documentation site; mkdocs calls the functions `on_…`."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "https://github.com/lora-merge/lora-merge/blob/main/"
FOLDERS = ("lora_merge", "algorithms", "configs", "tests/bench")

API = """# Python

Everything below is imported from `lora_merge`. All failures are subclasses of `MergeError`, with `what`, `where`, `fix`
and `exit_code`.
"""


BLOCKS = """# Parts and blocks

`--strength-for PART=FACTOR` takes components, blocks, ranges of blocks, and regular expressions over the names of the
base:

```bash
lora-merge sdxl.safetensors style.safetensors --strength-for te=0.5 --strength-for IN04-IN08=0
lora-merge parts sdxl.safetensors
```

`lora-merge parts BASE` lists the parts and blocks of one base. A U-Net has `BASE`, `IN00` …, `M00`, `OUT00` …; in other
models a block is one layer of a stack: `D` double, `S` single, `L` others, with their number.
"""


def readmes() -> dict[str, str]:
    """Return path in the repository → path in the site of every README that is a page."""
    found = {"README.md": "index.md"}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("README.md")):
            inner = path.relative_to(ROOT)
            if inner.parts[:2] != ("lora_merge", "algorithms"):  # a link to the top folder
                found[inner.as_posix()] = inner.with_name("index.md").as_posix()
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the repository."""
    from mkdocs.structure.files import File

    pages = {"api.md": api(), "errors.md": errors(), "blocks.md": blocks()}
    pages |= {target: page(source) for source, target in readmes().items()}
    for target, text in pages.items():
        files.append(File.generated(config, target, content=text))
    return files


def page(source: str) -> str:
    """Return the text of a README with links that are right where the site has it."""
    places, text = readmes(), (ROOT / source).read_text(encoding="utf-8")
    here = PurePosixPath(places[source]).parent

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[1].partition("#")
        if not target or "://" in target:
            return found[0]
        inner = os.path.normpath(PurePosixPath(source).parent / target).replace(os.sep, "/")
        inner = re.sub(r"^lora_merge/algorithms\b", "algorithms", inner)
        inner = inner if inner in places else f"{inner}/README.md" if f"{inner}/README.md" in places else inner
        there = os.path.relpath(places[inner], here).replace(os.sep, "/") if inner in places else SOURCE + inner
        return f"]({there}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)]+)\)", link, text)


def api() -> str:
    """Return the page of the public names, each with its docstring."""
    import lora_merge

    names = [name for name in lora_merge.__all__ if not name.startswith("_")]
    functions = [name for name in names if name[0].islower()]
    return API + "".join(f"\n::: lora_merge.{name}\n" for name in [*functions, *(n for n in names if n[0].isupper())])


def blocks() -> str:
    """Return the page of parts and blocks: what `--strength-for` takes, by model."""
    from lora_merge.models.architectures import shipped
    from lora_merge.models.blocks import PRESETS

    lines = [
        BLOCKS,
        "## Presets of `lbw=`",
        "",
        "| preset | blocks with factor 1 |",
        "|---|---|",
        *(f"| `{name}` | {used or ('all' if name == 'ALL' else 'none')} |" for name, used in PRESETS.items()),
        "",
        "## Models with a table of names",
        "",
        "| model | components |",
        "|---|---|",
    ]
    rows = {row.title: ", ".join(f"`{name}`" for name in _components(row)) for row in shipped()}
    return "\n".join([*lines, *(f"| {title} | {rows[title]} |" for title in sorted(rows, key=str.lower)), ""])


def _components(row: Any) -> list[str]:
    """Return the names of the components of an architecture."""
    return list(dict.fromkeys([row.component, *row.text_encoders]))


def errors() -> str:
    """Return the page of all errors: class, exit code, text and fix, from the code that raises them."""
    from lora_merge import errors as module

    kinds = {
        name: kind for name, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((ROOT / "lora_merge").rglob("*.py")):
        for name, what, fix in raised(ast.parse(path.read_text(encoding="utf-8")), set(kinds)):
            found.setdefault(name, set()).add((what, fix))
    lines = [
        "# Errors",
        "",
        "Every error says what is wrong, where, and how to fix it. `…` stands for a name or a number.",
        "",
    ]
    for name, kind in sorted(kinds.items(), key=lambda item: (item[1].exit_code, item[0])):
        if name in found:
            lines += [f"## {name}: exit code {kind.exit_code}", "", (kind.__doc__ or "").strip(), ""]
            lines += ["| message | fix |", "|---|---|"]
            lines += [
                f"| {cell(what)} | {cell(fix)} |" for what, fix in sorted(found[name], key=lambda row: row[0].lower())
            ]
            lines.append("")
    return "\n".join(lines)


def raised(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield class, message and fix of every error that a module makes with a text."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in names
            and len(node.args) == 3
        ):
            what, fix = text(node.args[0]), text(node.args[2])
            if what.strip("… "):
                yield node.func.id, what, fix


def text(node: ast.expr) -> str:
    """Return a string of the code, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "…"


def cell(value: str) -> str:
    """Return text for a cell of a table."""
    for old, new in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("`", "'"), ("\n", " ")):
        value = value.replace(old, new)
    return value
