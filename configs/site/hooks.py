"""Makes the generated pages of the documentation site; mkdocs calls the functions `on_…`."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import isfunction
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "https://github.com/lora-merge/lora-merge/blob/main/"
OF_SITE = "configs/site/pages/"
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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page; the messages of `notes.md` are those of the code."""
    return explained(markdown, notes()) if page.file.src_uri == "notes.md" else markdown


def explained(markdown: str, messages: Set[str]) -> str:
    """Return a page of explanations in which each has the message that is most like the one of its row.

    Explanations of messages that exist no more are left out; messages without an explanation are listed at the end.
    """
    lines = markdown.splitlines()
    rows = {line: cells for line in lines if len(cells := line.split(" | ")) == 3 and cells[0] != "| message"}
    left = set(map(cell, messages))
    new = {line: line for line, cells in rows.items() if cells[0].removeprefix("| ") in left}
    left -= {cells[0].removeprefix("| ") for line, cells in rows.items() if line in new}
    for line, cells in rows.items():
        for message in get_close_matches(cells[0].removeprefix("| "), sorted(left), 1) if line not in new else ():
            new[line] = " | ".join([f"| {message}", *cells[1:]])
            left.remove(message)
    kept = [new.get(line, line) for line in lines if line in new or line not in rows]
    others = ["", "## Others", "", *(f"* {message}" for message in sorted(left))] if left else []
    return "\n".join([*kept, *others, ""])


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
        if inner.startswith(OF_SITE):
            places[inner] = inner.removeprefix(OF_SITE)
        inner = inner if inner in places else f"{inner}/README.md" if f"{inner}/README.md" in places else inner
        there = os.path.relpath(places[inner], here).replace(os.sep, "/") if inner in places else SOURCE + inner
        return f"]({there}{'#' + anchor if anchor else ''})"

    text = re.sub(r"^\[!\[.*\n", "", text, flags=re.MULTILINE)  # badges are pictures of other servers
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
        "The blocks are those of one size of each model; others have more or fewer.",
        "",
        "| model | components | blocks |",
        "|---|---|---|",
    ]
    rows, order = {row.title: ", ".join(f"`{name}`" for name in _components(row)) for row in shipped()}, orders()
    named = (f"| {title} | {rows[title]} | {order.get(title, '')} |" for title in sorted(rows, key=str.lower))
    return "\n".join([*lines, *named, ""])


def orders() -> dict[str, str]:
    """Return title of a model → its blocks, "`BASE`, `IN00`–`IN11` …", from the inventories of the tests."""
    from lora_merge.models.blocks import blocks
    from lora_merge.models.components import components
    from lora_merge.models.names import Names

    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests" / "headers").rglob("*.json.gz"), reverse=True):
        shapes = {key: tuple(shape) for key, shape in json.loads(gzip.decompress(path.read_bytes())).items()}
        names = Names(components(shapes, {}, (), None), shapes)
        stacks: dict[str, list[str]] = {}
        for block in blocks(names).order if names.architecture not in found else ():
            stacks.setdefault(block.rstrip("0123456789"), []).append(block)
        if stacks:
            ends = (dict.fromkeys((stack[0], stack[-1])) for stack in stacks.values())
            found[names.architecture] = ", ".join("–".join(f"`{block}`" for block in pair) for pair in ends)
    return found


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
        for name, what, fix in raised(path, frozenset(kinds)):
            found.setdefault(name, set()).add((what, fix))
    lines = [
        "# Errors",
        "",
        "Every error says what is wrong, where, and how to fix it. `…` stands for a name or a number.",
        "",
    ]
    for name, kind in sorted(kinds.items(), key=lambda item: (item[1].exit_code, item[0])):
        if name in found:
            about = (kind.__doc__ or "").strip().partition("\n\n")[0]
            lines += [f"## {name}: exit code {kind.exit_code}", "", about, ""]
            lines += ["| message | fix |", "|---|---|"]
            lines += [
                f"| {cell(what)} | {cell(fix)} |" for what, fix in sorted(found[name], key=lambda row: row[0].lower())
            ]
            lines.append("")
    return "\n".join(lines)


def raised(path: Path, names: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    """Yield class, message and fix of every error that a module makes; several where its text depends on something."""
    for name, call, known in made(path, names):
        what, fix = (texts(call.args[n], known) if len(call.args) == 3 else [] for n in (0, 2))
        for one, other in product(what, fix):
            if one.strip("… "):
                yield name, one, other


@cache
def made(path: Path, names: frozenset[str]) -> Sequence[tuple[str, ast.Call, Texts]]:
    """Return class, call and the texts of the names in it, for every error that a module makes."""
    found = []
    for call, function, kind in _calls_of(path):
        name = getattr(call.func, "id", kind if getattr(call.func, "attr", "") == "__init__" else "")
        if name in names:
            found.append((name, call, _constants(path) | (_locals(function, path) if function else {})))
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _calls_of(path: Path) -> Sequence[tuple[ast.Call, ast.FunctionDef | None, str]]:
    """Return every call in a module, with the function and the class that it is in."""
    found = []
    waiting: list[tuple[ast.AST, ast.FunctionDef | None, str]] = [(_tree(path), None, "")]
    while waiting:
        node, function, kind = waiting.pop()
        if isinstance(node, ast.Call):
            found.append((node, function, kind))
        function = node if isinstance(node, ast.FunctionDef) else function
        kind = node.name if isinstance(node, ast.ClassDef) else kind
        waiting += [(inner, function, kind) for inner in reversed([*ast.iter_child_nodes(node)])]
    return found


Texts: TypeAlias = dict[str, list[str]]
"""Name → the texts that it can be."""


@cache
def _module(path: Path) -> dict[str, Any]:
    """Return the names that a module has or imports."""
    try:
        return vars(import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))
    except ImportError:  # an extra that is not installed
        return {}


HERE = ""
"""The name that has the path of the module in a table of texts."""


@cache
def _constants(path: Path) -> Texts:
    """Return the texts that a module has or imports: constants, and the values of tables."""
    found: Texts = {HERE: [str(path)]}
    for name, value in _module(path).items():
        values = [*value.values()] if isinstance(value, Mapping) else [value]
        if values and all(isinstance(one, str) for one in values):
            found[name] = [*dict.fromkeys(values)]
    return found


def _returned(path: Path, name: str) -> list[str]:
    """Return the texts that a function returns which a module has or imports; "…" for another value."""
    function = _module(path).get(name)
    if not isfunction(function) or function.__annotations__.get("return") != "str":
        return ["…"]
    where = (Path(import_module(function.__module__).__file__ or ""), function.__name__)
    if where not in _results:
        _results[where] = ["…"]  # for a function that calls itself
        node = next(node for node in _tree(where[0]).body if getattr(node, "name", "") == where[1])
        known = _constants(where[0]) | _locals(node, where[0])
        values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
        _results[where] = [*dict.fromkeys(text for value in values for text in texts(value, known))]
    return _results[where]


_results: dict[tuple[Path, str], list[str]] = {}
"""(module, function) → the texts that it returns."""


@cache
def _callers() -> dict[str, list[tuple[Path, ast.Call, ast.FunctionDef | None]]]:
    """Return name of a function or method → its calls in the package: module, call and calling function."""
    found: dict[str, list[tuple[Path, ast.Call, ast.FunctionDef | None]]] = {}
    for path in sorted((ROOT / "lora_merge").rglob("*.py")):
        for call, function, _ in _calls_of(path):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            found.setdefault(name, []).append((path, call, function))
    return found


@cache
def _locals(function: ast.FunctionDef, path: Path, depth: int = 2) -> Texts:
    """Return the texts that a function of a module gives its names, and those that calls in its module, and in modules
    that import it, pass to it.

    `depth`: of calls whose arguments are followed."""
    found: Texts = {}
    parameters = [a for a in (*function.args.args, *function.args.kwonlyargs) if a.arg != "self"]
    for where, call, caller in _callers().get(function.name, ()) if depth else ():
        if where == path or _module(where).get(function.name, path) is _module(path).get(function.name):
            inner = _locals(caller, where, depth - 1) if caller is not None and caller is not function else {}
            for label, value in _passed(parameters, call):
                found.setdefault(label, []).extend(texts(value, _constants(where) | inner))
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for name, value in _assigned(target, node.value):
                if label := getattr(name, "id", ""):
                    found.setdefault(label, []).extend(texts(value, _constants(path) | found))
    return {label: [*dict.fromkeys(values)] for label, values in found.items()}


def _passed(parameters: Sequence[ast.arg], call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield parameter and value for the arguments of a call."""
    yield from ((a.arg, value) for a, value in zip(parameters, call.args, strict=False))
    yield from ((word.arg, word.value) for word in call.keywords if word.arg)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (name, value) of an assignment; for `a, b = c if d else e`, those of each branch."""
    branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    for branch in branches:
        if isinstance(target, ast.Tuple) and isinstance(branch, ast.Tuple):
            yield from zip(target.elts, branch.elts, strict=False)
        else:
            yield target, branch


def texts(node: ast.expr, known: Texts) -> list[str]:
    """Return what a string of the code can be, with … for what is filled in."""
    if isinstance(node, ast.Constant | ast.Name):
        return [str(node.value)] if isinstance(node, ast.Constant) else [*known.get(node.id, ["…"])]
    if isinstance(node, ast.IfExp | ast.BoolOp):
        ways = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
        return [text for value in ways for text in texts(value, known)]
    if isinstance(node, ast.Subscript):
        return _piece(node, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return ["".join(pair) for pair in product(texts(node.left, known), texts(node.right, known))]
    if isinstance(node, ast.JoinedStr):
        fixed = {name: known[name] for name in known if name.isupper()}
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        return ["".join(row) for row in product(*(texts(part, fixed) for part in parts))]
    return _formatted(node, known)


def _piece(node: ast.Subscript, known: Texts) -> list[str]:
    """Return a text of a table, or what `text.rpartition(…)[n]` can be."""
    if isinstance(node.value, ast.Name):
        return texts(node.value, known)
    if getattr(getattr(node.value, "func", None), "attr", "") == "rpartition":
        whole, mark, number = node.value.func.value, node.value.args[0].value, node.slice.value
        return [text.rpartition(mark)[number] for text in texts(whole, known)]
    return ["…"]


def _formatted(node: ast.expr, known: Texts) -> list[str]:
    """Return what a template with `.format(…)` can be, or a count of things; "…" for another expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "plural":
        one, *many = (str(arg.value) for arg in node.args[1:] if isinstance(arg, ast.Constant))
        return [f"… {many[0] if many else one + 's'}"]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return [re.sub(r"\{[^{}]*\}", "…", text) for text in texts(node.func.value, known)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _returned(Path(known[HERE][0]), node.func.id) if HERE in known else ["…"]
    return ["…"]


def notes() -> set[str]:
    """Return the text of every remark that is no error, from the code: `Note(…)`; not those that pass others on."""
    found: set[str] = set()
    for path in sorted((ROOT / "lora_merge").rglob("*.py")):
        for _, call, known in made(path, frozenset({"Note"})):
            found.update(text for text in texts(call.args[0], known) if text.strip("…:; "))
    return found


def cell(value: str) -> str:
    """Return text for a cell of a table."""
    from lora_merge.text import Message

    value = str(Message(value))
    for old, new in (("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("`", "'"), ("\n", " ")):
        value = value.replace(old, new)
    return value
