"""The boundaries of the code, held by tests: who may import whom, and what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lora_merge
from lora_merge.algorithms import ALGORITHMS

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


ROOMS = (
    "disk", "files", "models", "adapters", "matching", "planning", "proof", "engine", "adapters_out", "memory", "batch",
    "viewing", "cli",
)  # fmt: skip
"""From the lowest to the highest. A room imports only rooms before it, and the shared vocabulary."""

FACE = ("lora_merge", "lora_merge.__main__", "lora_merge.api", "lora_merge.looking")
"""Modules that show the rooms to the outside. They may import every room; no room imports them."""

LIBRARIES = {
    "torch": {"engine", "adapters_out", "memory", "files", "viewing", "cli"},
    "numpy": {"proof", "adapters", "engine", "adapters_out", "cli"},
    "typer": {"cli"},
    "tqdm": {"cli", ""},
    "plotly": {"viewing"},
    "matplotlib": {"viewing"},
    "rich": {"cli"},
    "pydantic": {"batch"},
    "ray": {"batch"},
    "filelock": {"disk"},
    "platformdirs": {"disk"},
    "safetensors": {"proof"},
    "threadpoolctl": {"proof"},
    "ml_dtypes": {"proof"},
}
"""Library → the rooms that may import it, at the top of a file or inside a function."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package but the formulas, with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "algorithms" not in parts:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room(module: str) -> str:
    """The room that a module stands in; "" for the vocabulary, "face" for what shows the rooms to the outside."""
    parts = module.split(".")
    if module in FACE:
        return "face"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def own_imports(module: str, path: Path) -> Iterator[str]:
    """Whole names of the project's own modules that a file imports anywhere, also inside functions and for types."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            target = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                inner = Path(*target.split("."), f"{name.name}.py")
                yield f"{target}.{name.name}" if (ROOT / inner).exists() else target


def test_imports_point_downwards() -> None:
    """Also those inside functions and for type checkers."""
    heights = {"": -1, **{name: n for n, name in enumerate(ROOMS)}, "face": len(ROOMS)}
    wrong = [
        f"{module} imports {target}"
        for module, path in modules()
        for target in own_imports(module, path)
        if not target.startswith("lora_merge.algorithms") and heights[room(target)] > heights[room(module)]
    ]
    assert not wrong


def test_imports_have_no_cycle() -> None:
    """Also those inside functions and for type checkers."""
    graph = {module: set(own_imports(module, path)) - {module} for module, path in modules() if module not in FACE}
    list(TopologicalSorter({k: v & graph.keys() for k, v in graph.items()}).static_order())


def run_imports(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, also inside functions; not those for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typed = {
        n for b in tree.body if isinstance(b, ast.If) and ast.unparse(b.test) == "TYPE_CHECKING" for n in ast.walk(b)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in typed:
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in typed and not node.level:
            yield node.module or ""


def test_a_library_is_imported_only_where_it_belongs() -> None:
    for module, path in modules():
        for name in run_imports(path):
            allowed = LIBRARIES.get(name.partition(".")[0])
            assert allowed is None or room(module) in allowed, f"{module} imports {name}"


def test_a_room_says_what_happens_in_it() -> None:
    """Each has a page of its own, and holds at most seventeen modules, or parts with a folder of their own."""
    for name in ROOMS:
        text = (PACKAGE / name / "README.md").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 60, name
        named = {n for n in re.findall(r"`([\w/]+\.py)`", text) if n.partition("/")[0] not in ROOMS}
        there = {p.relative_to(PACKAGE / name).as_posix() for p in (PACKAGE / name).rglob("*.py")}
        assert named <= there, f"{name}: {named - there}"
        direct = {p.name for p in (PACKAGE / name).glob("*.py")} - {"__init__.py"}
        assert direct <= named, f"{name}: its README does not tell of {direct - named}"
        assert len(direct) <= 17, f"{name} has {len(direct)} modules"


def test_algorithms_see_torch_numpy_the_standard_library_and_themselves() -> None:
    """numpy where the library that trains draws or sorts with it."""
    for path in (ROOT / "algorithms").glob("*.py"):
        for name in imports(path, top_level=False):
            if not name.startswith("."):
                top = name.partition(".")[0]
                assert top in {"torch", "numpy", "__future__"} or top in sys.stdlib_module_names, f"{path.name}: {name}"
            else:
                assert not name.startswith(".."), f"{path.name}: {name}"
        assert not any(n.partition(".")[0] in ("torch", "numpy") for n in imports(path, top_level=True)), path.name


NAMING = ("adapters/suffixes.py", "adapters/peft/", "proof/examples.py", "proof/reference/")
"""Tables that say which formula a name or a configuration means, and the proof's own."""

WORDS = {("cli/demo.py", "lora"), ("cli/demo.py", "loha"), ("cli/demo.py", "glora"), ("viewing/pages/made.py", "full"), ("cli/text.py", "full"),
         ("files/pickle_scan.py", "set"), ("proof/verify.py", "full"), ("adapters_out/peft/folder.py", "lora_bias")}  # fmt: skip
"""Strings that are spelled like an algorithm and name something else: a file, a kind of proof, Python's set."""


def test_outside_of_the_tables_no_algorithm_is_asked_for_by_its_name() -> None:
    """What the rooms have to know of one is a fact of its row, or it is imported."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in ALGORITHMS
    }
    assert {(place, name) for place, name in found if not place.startswith(NAMING)} == WORDS


def test_plans_are_made_without_torch() -> None:
    code = "import sys, lora_merge.planning.make_plan, lora_merge.cli.main; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_untouched_bytes_go_out_before_torch_is_there() -> None:
    """It is imported beside the first windows: nothing that a run imports at its beginning may wait for it."""
    code = "import sys, lora_merge.engine.merge; assert not {'torch', 'filelock', 'platformdirs'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_odd_dtypes_are_imported_where_one_is_met() -> None:
    """A merge that needs no proof of such numbers yet does not wait for their library."""
    code = "import sys, lora_merge.engine.merge, lora_merge.proof.verify, lora_merge.proof.replay; assert 'ml_dtypes' not in sys.modules"
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


def test_type_checkers_see_every_public_name() -> None:
    """At run time they are loaded on first use."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen | {"__version__"} == set(lora_merge.__all__) <= set(dir(lora_merge))
    assert "__getattr__" not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
