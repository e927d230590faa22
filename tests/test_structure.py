"""The boundaries of the code, held by tests: who may import whom, and what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import lora_merge
from lora_merge.adapters.peft.methods import PEFT_METHODS
from lora_merge.algorithms import ALGORITHMS
from lora_merge.merge_methods import METHODS, SUM
from tests.kit.package import HOSTS, LIBRARIES, PACKAGE, ROOT, nodes, syntax

ROOMS = (
    "disk", "sources", "files", "models", "adapters", "matching", "planning", "proof", "engine", "adapters_out", "recipes",
    "memory", "batch", "viewing", "comfyui", "ui", "cli",
)  # fmt: skip
"""From the lowest to the highest. A room imports only rooms before it, and the shared vocabulary."""

FACE = ("lora_merge", "lora_merge.api")
"""The public API. It may import the rooms below it; those above it, which are for people, import it."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package but the formulas, with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "algorithms" not in parts:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room(module: str) -> str:
    """The room that a module stands in; "" for the vocabulary, "algorithms", "face" for the public API, "start" for what starts the program."""
    parts = module.split(".")
    if module in FACE:
        return "face"
    if module == "lora_merge.__main__":
        return "start"
    return parts[1] if len(parts) > 1 and parts[1] in (*ROOMS, "algorithms") else ""


@cache
def imports(module: str, path: Path, *, typed: bool = True) -> tuple[str, ...]:
    """Whole names of the modules that a file imports: anywhere, by a statement or by `import_module("name")`.

    `typed`: also those for type checkers alone.
    """
    return tuple(imported(module, path, typed=typed))


def imported(module: str, path: Path, *, typed: bool) -> Iterator[str]:
    """What `imports` returns."""
    tree = syntax(path)
    blocks = [b for b in tree.body if isinstance(b, ast.If) and ast.unparse(b.test) == "TYPE_CHECKING"]
    left_out = set() if typed else {n for b in blocks for n in ast.walk(b)}
    package = module.split(".")[: None if path.name == "__init__.py" else -1]
    for node in nodes(path):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                whole = f"{target}.{name.name}"
                yield whole if Path(ROOT, *whole.split(".")).with_suffix(".py").exists() else target
        elif isinstance(node, ast.Call) and re.search(
            r"import_module$|__import__$", getattr(node.func, "attr", getattr(node.func, "id", ""))
        ):
            names = [n.value for a in node.args[:1] for n in ast.walk(a) if isinstance(n, ast.Constant)]
            yield from (resolve_name(n, ".".join(package)) for n in names if isinstance(n, str) and n.strip("."))


def test_imports_point_downwards() -> None:
    """Also those inside functions and for type checkers. The formulas stand between `files` and `models`."""
    rooms = ["", *ROOMS[:3], "algorithms", *ROOMS[3:-3], "face", *ROOMS[-3:], "start"]
    heights = {name: n for n, name in enumerate(rooms)}
    wrong = {
        f"{module} imports {target}"
        for module, path in modules()
        for target in imports(module, path)
        if target.partition(".")[0] == "lora_merge" and heights[room(target)] > heights[room(module)]
    }
    assert wrong == {"lora_merge.job imports lora_merge.algorithms"}  # the table: names and types of their settings


def test_imports_have_no_cycle() -> None:
    """Also those inside functions and for type checkers."""
    graph = {module: set(imports(module, path)) - {module} for module, path in modules() if module not in FACE}
    list(TopologicalSorter({k: v & graph.keys() for k, v in graph.items()}).static_order())


def test_proof_uses_tables_of_what_it_proves_and_none_of_its_arithmetic() -> None:
    tables = {f"lora_merge.files.{name}" for name in ("encodings.base", "gguf.grid_points", "formats.output")}
    for module, path in modules():
        if room(module) == "proof":
            for target in imports(module, path):
                shared = re.match(r"lora_merge\.(algorithms|files\.(encodings|formats|gguf))\.", target)
                assert not shared or target in tables, f"{module} imports {target}"


def test_observers_of_a_fold_compute_no_weight() -> None:
    """What measures a merge is called by the fold, and imports nothing that folds; only names of types."""
    folding = {f"lora_merge.engine.{name}" for name in ("fold", "block_folder", "gpu_windows", "window_merger")}
    measuring = [m for m in modules() if re.search(r"engine\.(change_|cancellation)", m[0])]
    assert len(measuring) > 3
    for module, path in measuring:
        assert folding.isdisjoint(imports(module, path, typed=False)), module


def test_encodings_know_no_program_that_stores_them() -> None:
    """Numbers and bytes are one thing, names of tensors and configurations another."""
    for module, path in modules():
        if module.startswith("lora_merge.files.encodings"):
            wrong = [t for t in imports(module, path) if re.match(r"lora_merge\.files\.(?!encodings)", t)]
            assert not wrong, f"{module} imports {wrong}"


def test_library_is_imported_only_where_it_belongs() -> None:
    for module, path in modules():
        for name in (n.partition(".")[0] for n in imports(module, path, typed=False)):
            if name != "lora_merge" and name not in sys.stdlib_module_names and name != "sre_parse":
                assert room(module) in {**LIBRARIES, **HOSTS}.get(name, ()), f"{module} imports {name}"


def test_room_has_a_page_of_its_own_that_names_only_modules_that_exist() -> None:
    for name in ROOMS:
        text = (PACKAGE / name / "README.md").read_text(encoding="utf-8")
        named = {n for n in re.findall(r"`([\w/]+\.py)`", text) if n.partition("/")[0] not in ROOMS}
        assert named <= {p.relative_to(PACKAGE / name).as_posix() for p in (PACKAGE / name).rglob("*.py")}, name


def test_algorithms_see_torch_numpy_the_standard_library_and_themselves() -> None:
    """numpy where the library that trains draws or sorts with it."""
    for path in (ROOT / "algorithms").rglob("*.py"):
        module = ".".join(["lora_merge", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for name in imports(module, path):
            top = name.partition(".")[0]
            own = name.startswith("lora_merge.algorithms")
            assert own or top in {"torch", "numpy", *sys.stdlib_module_names}, f"{path.name}: {name}"
        first = [n for n in syntax(path).body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert not any(re.match(r"(import|from) (torch|numpy)", ast.unparse(n)) for n in first), path.name


NAMING = (
    "adapters/suffixes.py",
    "adapters/peft/",
    "proof/examples.py",
    "proof/reference/",
    "proof/second_reading/",
    "proof/peft_initialisation.py",
)
"""Tables that say which formula a name or a configuration means, and the proof's own."""

WORDS = {("batch/schema_errors.py", "lora"), ("report.py", "full"), ("options.py", "full"), ("comfyui/loaders.py", "lora"),
         ("files/pickle_scan.py", "set"), ("files/gguf/adapter.py", "lora"), ("files/pickles.py", "lora"), ("proof/verify.py", "full"), ("recipes/replay.py", "full"), ("adapters_out/metadata.py", "lora_bias"), ("recipes/commands.py", "lora"), ("adapters/network_settings.py", "lora"), ("adapters/network_settings.py", "loha"),
         ("adapters/network_settings.py", "lokr"), ("option_texts.py", "full"), *(("options.py", name) for name in ("lora", "lokr"))}  # fmt: skip
"""Strings that are spelled like an algorithm and name something else: a file, a key, a kind of proof, a value of --algorithm, Python's set."""


def test_algorithms_are_asked_for_by_name_in_tables_alone() -> None:
    """What the rooms have to know of one is a fact of its row, or it is imported."""
    found = {
        (path.relative_to(PACKAGE).as_posix(), node.value)
        for _, path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in ALGORITHMS
    }
    assert {(place, name) for place, name in found if not place.startswith(NAMING)} == WORDS


COMPARING = {"adapters_out/form.py", "adapters_out/job.py", "adapters_out/peft/config.py"}
"""Modules that ask for the form of an adapter that is written, by the name of its row."""


def test_facts_of_a_formula_are_fields_of_its_row() -> None:
    """A row is imported to make a module or a patch of it, not to compare it or its name, or to keep a list of names."""
    places = set()
    for module, path in modules():
        if room(module) == "algorithms":
            continue
        tree, inner = syntax(path), nodes(path)
        rows = {a.asname or a.name for n in inner if isinstance(n, ast.ImportFrom) and "algorithms" in (n.module or "")
                for a in n.names}  # fmt: skip
        if not rows:
            continue
        asked = [n for n in inner if isinstance(n, ast.Compare)]
        asked += [n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
        names = {n.value.id for a in asked for n in ast.walk(a)
                 if isinstance(n, ast.Attribute) and n.attr == "name" and isinstance(n.value, ast.Name)}  # fmt: skip
        names |= {
            n.id
            for a in asked
            if isinstance(a, ast.Compare)
            for n in (a.left, *a.comparators)
            if isinstance(n, ast.Name)
        }
        if names & rows:
            places.add(path.relative_to(PACKAGE).as_posix())
    assert places == COMPARING


def test_facts_of_a_peft_method_are_fields_of_its_row() -> None:
    """No module compares a value with the name of a method, nor with a constant that is one; the proof has its own tables."""
    constants = {n.target.id for _, path in modules() for n in syntax(path).body if isinstance(n, ast.AnnAssign)
                 if isinstance(n.target, ast.Name) and isinstance(n.value, ast.Constant) and n.value.value in PEFT_METHODS}  # fmt: skip
    asked = {
        (path.relative_to(PACKAGE).as_posix(), ast.unparse(compared))
        for _, path in modules()
        for compared in nodes(path)
        if isinstance(compared, ast.Compare)
        for side in (compared.left, *compared.comparators)
        for n in (side, *getattr(side, "elts", ()))
        if (isinstance(n, ast.Constant) and n.value in PEFT_METHODS) or (isinstance(n, ast.Name) and n.id in constants)
    }
    assert {place for place, _ in asked if not place.startswith("proof/second_reading/")} == set()


def test_facts_of_a_merge_method_are_fields_of_its_row() -> None:
    """The proof has formulas of its own, which it chooses by name. "sum" is also a rule for signs."""
    places = {
        path.relative_to(PACKAGE).as_posix()
        for module, path in modules()
        if room(module) in ("engine", "planning", "matching", "proof")
        for compared in nodes(path)
        if isinstance(compared, ast.Compare)
        for node in ast.walk(compared)
        if isinstance(node, ast.Constant) and node.value in METHODS.keys() - {SUM}
    }
    assert places == {"proof/combination_methods.py"}


def test_plans_are_made_without_torch() -> None:
    code = "import sys, lora_merge.planning.make_plan, lora_merge.cli.main; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_untouched_bytes_go_out_before_torch_is_there() -> None:
    """It is imported beside the first windows: nothing that a run imports at its beginning may wait for it."""
    code = "import sys, lora_merge.engine.merge; assert not {'torch', 'filelock', 'platformdirs'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_odd_dtypes_are_imported_where_one_is_met() -> None:
    """A merge that needs no proof of such numbers yet does not wait for their library."""
    code = "import sys, lora_merge.engine.merge, lora_merge.proof.verify, lora_merge.recipes.replay; assert 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exceptions_are_not_caught_and_dropped() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "algorithms").glob("*.py")]:
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                name = getattr(node.type, "id", "")
                broad = node.type is None or name in ("Exception", "BaseException")
                handled = any(isinstance(n, ast.Raise) for n in ast.walk(node)) or _kept(node)
                assert not broad or handled, f"{path.name}:{node.lineno}"


def test_links_are_followed_by_one_function() -> None:
    """`Path.resolve` raises RuntimeError for a link to itself, before Python 3.13: anybody's path may be one."""
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            assert not (isinstance(node, ast.Attribute) and node.attr == "resolve"), f"{path}:{node.lineno}: real_path"


def _kept(node: ast.ExceptHandler) -> bool:
    """Whether the exception itself is handed on, to somebody who raises or reports it."""
    return any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(node))


OF_OTHERS = (
    "sys.stdout", "sys.stderr", "error.__cause__", "found.__cause__", "failure.filename", "timed.__name__",
    "call.argtypes", "backend.fp32_precision", "self._here.made", "command.get_params", "command.format_options",
    "command.collect_usage_pieces", "self._server.should_exit", "command.__signature__", "command.__annotations__", "parameter.process_value",
)  # fmt: skip
"""Attributes of objects of Python's library, of torch and of typer that are set as those libraries want it."""


def test_fields_are_written_by_the_module_of_their_class_alone() -> None:
    """Other modules call a method, or make another object."""
    for _, path in modules():
        owners = [n for c in nodes(path) if isinstance(c, ast.ClassDef) for n in ast.walk(c)]
        own = {n.attr if isinstance(n, ast.Attribute) else n.id for n in written(owners)
               if isinstance(n, ast.Name) or (isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self")}  # fmt: skip
        for node in written(nodes(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
                name = ast.unparse(node)
                assert node.attr in own or name in OF_OTHERS, f"{path.name}:{node.lineno}: {name}"


def written(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the targets of assignments, and of loops."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target] if target is not None else ()


def test_type_checkers_see_every_public_name() -> None:
    """At run time they are loaded on first use."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {a.name for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen | {"__version__"} == set(lora_merge.__all__) <= set(dir(lora_merge))
    assert "__getattr__" not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


RIDDLES = {"found", "made", "told", "own", "there", "one", "given", "kept", "held", "seen", "wanted", "met"}
"""Words that say how a thing came to be, not what it is: they name no module, class, field or function."""


def test_names_are_nouns() -> None:
    for module, path in modules():
        names = {path.stem, *(d for d in _definitions(path))}
        assert not RIDDLES & {name.strip("_").lower() for name in names}, module


def _definitions(path: Path) -> Iterator[str]:
    """Yield the names of classes, of their fields, and of functions."""
    for node in nodes(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            )


def test_public_name_of_a_class_is_that_of_one_class() -> None:
    places = defaultdict(list)
    for module, path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_test_modules_are_imported_by_no_module() -> None:
    """What several of them share is in `tests/kit`, or in a conftest."""
    for path in (ROOT / "tests").rglob("*.py"):
        if not re.search(r"(?<!def )\btest_", path.read_text(encoding="utf-8")):
            continue  # it defines tests and names none: seven of eight files, whose syntax need not be read
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        wrong = [name for name in imports(module, path) if re.match(r"tests\.(?:\w+\.)*test_", name)]
        assert not wrong, f"{module} imports {wrong}"


def test_private_names_stay_in_their_module() -> None:
    for module, path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                assert not [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")], (
                    module
                )
