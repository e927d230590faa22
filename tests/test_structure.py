"""The boundaries of the code, held by tests: who may import whom, and what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from graphlib import TopologicalSorter
from inspect import signature
from pathlib import Path

import lora_merge
from lora_merge.arguments import MergeOptions

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lora_merge"


def imports(path: Path, *, top_level: bool) -> Iterator[str]:
    """Names of modules that a file imports; only those that importing the file itself runs, if `top_level`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if not top_level else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            if node.level and not node.module:
                yield from ("." * node.level + a.name for a in node.names)


def test_imports_have_no_cycle() -> None:
    """Also those inside functions and for type checkers, but for the program's own `from . import __version__`."""
    graph = {
        path.stem: {
            name.lstrip(".").partition(".")[0] for name in imports(path, top_level=False) if name.startswith(".")
        }
        for path in PACKAGE.glob("*.py")
        if path.stem not in ("__init__", "__main__")
    }
    known = set(graph)
    list(TopologicalSorter({k: v & known - {k} for k, v in graph.items()}).static_order())


def test_algorithms_see_torch_the_standard_library_and_themselves() -> None:
    for path in (ROOT / "algorithms").glob("*.py"):
        for name in imports(path, top_level=False):
            if not name.startswith("."):
                top = name.partition(".")[0]
                assert top in {"torch", "__future__"} or top in sys.stdlib_module_names, f"{path.name}: {name}"
            else:
                assert not name.startswith(".."), f"{path.name}: {name}"
        assert not any(n.partition(".")[0] == "torch" for n in imports(path, top_level=True)), path.name


def test_only_the_command_line_knows_typer() -> None:
    for path in PACKAGE.rglob("*.py"):
        if not path.name.startswith("cli"):
            assert not any(n.partition(".")[0] == "typer" for n in imports(path, top_level=False)), path.name


def test_plans_are_made_without_torch() -> None:
    code = "import sys, lora_merge.planning.make_plan, lora_merge.cli.main; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_untouched_bytes_go_out_before_torch_is_there() -> None:
    """It is imported beside the first windows: nothing that a run imports at its beginning may wait for it."""
    code = "import sys, lora_merge.engine.merge; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_caught_and_dropped() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "algorithms").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                name = getattr(node.type, "id", "")
                broad = node.type is None or name in ("Exception", "BaseException")
                handled = any(isinstance(n, ast.Raise) for n in ast.walk(node)) or _kept(node)
                assert not broad or handled, f"{path.name}:{node.lineno}"


def _kept(node: ast.ExceptHandler) -> bool:
    """Whether the exception itself is handed on, to somebody who raises or reports it."""
    return any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(node))


def test_a_file_is_no_longer_than_one_can_hold_in_mind() -> None:
    long = {
        p.name: n for p in sorted((ROOT / "lora_merge").rglob("*.py")) if (n := len(p.read_text().splitlines())) > 350
    }
    assert not long


def test_type_checkers_see_every_public_name_and_option() -> None:
    """At run time they are loaded on first use, and options are looked at by `make_job`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen | {"__version__"} == set(lora_merge.__all__) <= set(dir(lora_merge))
    assert "__getattr__" not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert [*MergeOptions.__annotations__] == [
        "strength",
        "strength_for",
        *(f.name for f in fields(lora_merge.Job)[3:]),
    ]
    for call in (lora_merge.merge, lora_merge.plan, lora_merge.merge_state_dict):
        assert signature(call).parameters["options"].annotation == "Unpack[MergeOptions]"
