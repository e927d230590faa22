"""How much of the product the tests watch: random small mistakes, one at a time, in a copy of the tree.

    python -m tests.mutate --record                      # once, half an hour: which test runs which line
    python -m tests.mutate --count 80 --seed 1           # all areas: 80 mistakes drawn from all
    python -m tests.mutate --count 60 --slow 150         # and the slow lane for what the fast one has not noticed
    python -m tests.mutate --count 20 lora_merge/proof/verify.py
    python -m tests.mutate --named                       # mistakes that once went unnoticed
    python -m tests.mutate --at lora_merge/proof/verify.py:184 --also tests/test_new.py  # all mistakes of one line

A mistake is another operator or number, a condition turned over, a dropped statement, exchanged arguments, or a
constant that is returned. Each is written into a copy of the repository, never into the working tree, and the tests
that run its line are run there, the quickest first, until one fails or `--limit` seconds are over. Printed are every
mistake with its place and difference, "noticed by" the test that failed or "NOT NOTICED", and at the end the share of
those that can be seen: messages, type annotations and what stands in `UNSEEN` are left out of the draw. Which test
runs which line is recorded in `.pytest_cache/`, by the text of the line; a new line is tested by all that run any line
of its module; a new module, or all without a record, by the files that are named after it or import it, or what
imports it. This is no part of the suite: it is run by hand before
a release, and what nothing notices gets a law of its class.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Final

from tests.kit.mistakes import Mistake, mistakes

ROOT: Final = Path(__file__).resolve().parents[1]
CACHE: Final = ROOT / ".pytest_cache" / "lines"
BY_NAME: Final = 8  # files that are run where nothing is recorded
ENDLESS: Final = "it never ends"
LEFT_OUT: Final = "(slow or release or pairs or few) and not bench and not gpu and not fuzz"
NO_TESTS: Final = 5  # pytest, where all are left out
GONE: Final = 4  # pytest, where a recorded test has another name now
AREAS: Final = {
    "proof": "proof/verify proof/combination_methods proof/patch_rows proof/proof_report proof/grids proof/weights recipes/find_inputs recipes/read_recipe recipes/replay recipes/unmerge proof/recomputation proof/row_comparison proof/second_reading/comparison proof/sample proof/loadable proof/header_changes files/safetensors proof/second_reading/modules proof/second_reading/rows "
    "proof/second_reading/scales proof/second_reading/layouts proof/second_reading/claims proof/second_reading/formulas proof/second_reading/methods proof/second_reading/blocks proof/second_reading/parts "
    "proof/peft_initialisation proof/account",
    "matching": "matching/match matching/formula matching/split_layers matching/orientation matching/tied_embeddings matching/weight_finder matching/conflicts matching/values "
    "matching/missing_tensors matching/patch matching/layer_order matching/stored_base",
    "planning": "planning/changes planning/checkpoint_cache planning/model_card planning/combination planning/containers planning/folder_files planning/inputs planning/make_plan planning/output_files planning/plan planning/quantisation planning/recipe",
    "publishing": "disk/writer disk/locks disk/scale_spool disk/draft disk/files disk/publish planning/header_entries disk/hashes disk/destination batch/run recipes/resume",
}
NAMED: Final = (
    ("lora_merge/proof/verify.py", "if not same.all():", "if False:"),
    ("lora_merge/proof/verify.py", "merged.findings.count(cut=_compare(target, first, count, fd, merged))", "pass"),
    ("lora_merge/proof/sample.py", "insort(chosen, random.choice(part))", "pass"),
    ("lora_merge/matching/match.py", "self.strengths.factor(piece.key, component), self.base", "self.strengths.factor(component, piece.key), self.base"),
    ("lora_merge/matching/match.py", "self.strengths.factor(into, component := self.names.component(into))", "self.strengths.factor(component := self.names.component(into), into)"),
    ("lora_merge/adapters/peft/methods.py", "stored = 0 if _shares(fields, module) else rank(row, shapes)", "stored = rank(row, shapes)"),
    ("lora_merge/adapters/peft/methods.py", 'module.endswith("lm_head") and fields.flag(', "fields.flag("),
    ("algorithms/lora_sparse.py", "holds=len(set(places)) == len(places)", "holds=True"),
    ("lora_merge/proof/reference/peft.py", '"silu": x * logistic', '"silu": x + logistic'),
    ("lora_merge/proof/reference/lycoris.py", "return factors * turned - g.w", "return factors * turned + g.w"),
    ("lora_merge/proof/reference/peft.py", "if up.shape == (k, g.out // k, rank):", "if down.shape[2] == g.cols:"),
    ("lora_merge/cli/batch_command.py", "if not quiet or s.error is not None:", "if not quiet:"),
    ("lora_merge/viewing/base.py", "if (why := quantised(index))", "if not (why := quantised(index))"),
)  # fmt: skip
"""(file, text in it, what is put in its place): mistakes that once failed no test."""


class Lines:
    """Which tests run which line, and how many seconds each takes."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self.data, self.seconds, self.texts = CoverageData(str(CACHE)), {}, {}
        if CACHE.exists():
            self.data.read()
            recorded = json.loads(CACHE.with_suffix(".json").read_text())
            self.seconds, self.texts = recorded["seconds"], recorded["texts"]

    def tests(self, path: str, line: int) -> list[str]:
        """The quickest first; the file named after the module where nothing is recorded."""
        text, old = (ROOT / path).read_text(encoding="utf-8").splitlines(), self.texts.get(path, "").splitlines()
        same = [n for n, before in enumerate(old, 1) if before == text[line - 1]]  # where the line was
        by_line = self.data.contexts_by_lineno(str((ROOT / path).resolve())) if old else {}
        found = set(by_line.get(min(same, key=lambda n: abs(n - line)), ()) if same else ()) - {""}
        found = found or {name for names in by_line.values() for name in names}
        known = sorted((name for name in found if self.seconds.get(name)), key=lambda name: self.seconds[name])
        return known or _by_name(path)


def _by_name(path: str) -> list[str]:
    """The tests of a module where nothing is recorded: the files named after it, then those that import it, then those
    that import a module that imports it, and so on; else its room's, else all."""
    files = sorted(ROOT.glob("tests/*/test_*.py"))
    texts, own = (
        {at: at.read_text("utf-8") for at in files},
        [at for at in files if at.stem == f"test_{Path(path).stem}"],
    )
    near, known = [_module(path)], {_module(path)}
    while near:
        words = re.compile("|".join(rf"\b{re.escape(module)}\b" for module in near))
        own += [at for at in files if at not in own and words.search(texts[at])]
        near = [user for user, used in _imports().items() if user not in known and not used.isdisjoint(near)]
        known |= {*near}
    room = ROOT / "tests" / Path(path).parent.name
    return [str(at.relative_to(ROOT)) for at in own] or [f"tests/{room.name}" if room.exists() else "tests"]


def _module(path: str) -> str:
    return Path(path).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


@cache
def _imports() -> dict[str, set[str]]:
    """Module of the product → the modules and packages that it imports, anywhere in it."""
    found: dict[str, set[str]] = {}
    for at in sorted((ROOT / "lora_merge").rglob("*.py")):
        path = at.relative_to(ROOT)
        used = found[_module(str(path))] = set()
        for node in ast.walk(ast.parse(at.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                origin = ".".join(
                    [*path.parts[: len(path.parts) - node.level], *([node.module] if node.module else [])]
                )
                used |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return found


def record(paths: list[str]) -> None:
    """Run the tests once, and keep which of them runs which line."""
    import coverage
    import pytest

    class Contexts:
        seconds: ClassVar[dict[str, float | None]] = {}

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            watch.switch_context(nodeid)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            before = self.seconds.get(report.nodeid, 0.0)
            self.seconds[report.nodeid] = None if report.failed or before is None else before + report.duration

    CACHE.parent.mkdir(exist_ok=True)
    CACHE.unlink(missing_ok=True)
    watch = coverage.Coverage(None, source=["lora_merge", "algorithms"], config_file=False)  # children end as we do
    watch.start()
    pytest.main(["-q", *paths], plugins=[Contexts()])
    watch.stop()
    lines = coverage.CoverageData(str(CACHE))
    lines.update(watch.get_data())
    lines.write()
    sources = [*(ROOT / "lora_merge").rglob("*.py"), *(ROOT / "algorithms").glob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}
    CACHE.with_suffix(".json").write_text(json.dumps({"seconds": Contexts.seconds, "texts": texts}))


def copied(to: Path) -> Path:
    """The files of the working tree that git knows, elsewhere."""
    known = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, known.stdout.decode().split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def _run(tree: Path, tests: list[str], log: Path, *, slow: bool) -> int:
    """In a child: run tests of a changed tree until one fails; `slow`: those that the fast lane leaves out."""
    import pytest

    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "lora_merge", "algorithms")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True
    lane = ["-m", LEFT_OUT] if slow else []
    os.environ |= {"LORA_MERGE_TESTS": "all"} if slow else {}
    quiet = ["-q", "-x", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", f"--rootdir={tree}"]
    return int(pytest.main([*quiet, *lane, *tests]))


def noticed(tree: Path, tests: list[str], seconds: float, log: Path, *, slow: bool = False) -> str:
    """What noticed a change of the tree: the test that failed, or that they never end; "" if nothing did."""
    pid = os.fork()  # from here, where all that is installed has been imported
    if not pid:
        code = 70  # unless pytest says otherwise
        try:
            code = _run(tree, tests, log, slow=slow)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end, done = time.monotonic() + seconds, (0, 0)
    while not done[0] and time.monotonic() < end:
        time.sleep(0.1)
        done = os.waitpid(pid, os.WNOHANG)
    if not done[0]:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "" if slow else ENDLESS
    text, code = log.read_text(errors="replace"), os.waitstatus_to_exitcode(done[1])
    if code == NO_TESTS:
        return ""
    if code == GONE and "not found: " not in text:
        return "the program, which cannot be imported"
    if code == GONE:
        kept = [name for name in tests if name.split("[")[0] not in text]
        return noticed(tree, kept, seconds, log) if len(kept) < len(tests) and kept else ""
    failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code > 0 and not failed:
        raise RuntimeError(f"the tests did not run:\n{text[-2000:]}")
    return "" if code == 0 else failed[0] if failed else f"signal {-code}"


def within(tests: list[str], lines: Lines, limit: float) -> tuple[list[str], float]:
    """As many of the tests as take `limit` seconds together, and those seconds."""
    total, chosen = 0.0, []
    for name in tests:
        total += lines.seconds.get(name, limit / BY_NAME)
        if chosen and total > limit:
            break
        chosen.append(name)
    return chosen, min(total, limit)


def drawn(paths: list[str], count: int, seed: int) -> list[Mistake]:
    """`count` mistakes, as many of a module as it has lines for."""
    everything = [m for path in paths for m in mistakes(path, (ROOT / path).read_text(encoding="utf-8"))]
    return sorted(random.Random(seed).sample(everything, min(count, len(everything))), key=lambda m: (m.path, m.start))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument(
        "modules", nargs="*", help="files, or the areas proof, matching, planning, publishing; all if none"
    )
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for each mistake")
    parser.add_argument("--slow", type=float, default=0, help="seconds of the slow lane where the fast one saw nothing")
    parser.add_argument("--record", action="store_true", help="record which tests run which line")
    parser.add_argument("--named", action="store_true", help="the mistakes that once went unnoticed")
    parser.add_argument("--at", help="FILE:LINE: every mistake of one line")
    parser.add_argument("--also", action="append", default=[], help="tests that are run each time: new ones")
    asked = parser.parse_args()
    if asked.record:
        return record(asked.modules)
    if asked.at:
        path, _, line = asked.at.rpartition(":")
        chosen = [m for m in mistakes(path, (ROOT / path).read_text(encoding="utf-8")) if m.line == int(line)]
    elif asked.named:
        chosen = [named(*row) for row in NAMED]
    else:
        chosen = drawn(files(asked.modules or [*AREAS]), asked.count, asked.seed)
    return watch(chosen, asked.limit, asked.also, asked.slow)


def files(asked: list[str]) -> list[str]:
    return [f"lora_merge/{m}.py" for a in asked if a in AREAS for m in AREAS[a].split()] + [
        a for a in asked if a not in AREAS
    ]


def named(path: str, old: str, new: str) -> Mistake:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{path}: {old!r} is there {source.count(old)} times"
    at = source.index(old)
    return Mistake(path, source[:at].count("\n") + 1, "by hand", at, at + len(old), new)


def watch(chosen: list[Mistake], limit: float, also: Sequence[str] = (), slow: float = 0) -> None:
    """Make each mistake, and tell whether a test notices."""
    for name in ("torch", "diffusers", "lycoris", "peft", "transformers", "safetensors", "typer"):
        import_module(name)
    lines, missed, late = Lines(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder, "tree"))
        for n, mistake in enumerate(chosen):
            source = (tree / mistake.path).read_text(encoding="utf-8")
            (tree / mistake.path).write_text(mistake.applied(source), encoding="utf-8")
            running = lines.tests(mistake.path, mistake.line)
            tests, seconds = within(running, lines, limit)
            by = noticed(tree, [*also, *tests], 60 + 6 * seconds, Path(folder, "log"))
            if by == ENDLESS and not lines.seconds:  # nobody knows how long whole files take here
                by = ""
            if slow and not by:  # the files with most of the tests that run the line come first
                files = [name for name, _ in Counter(test.split("::")[0] for test in running).most_common()]
                by = noticed(tree, files, slow, Path(folder, "log"), slow=True)
                late += bool(by)
            (tree / mistake.path).write_text(source, encoding="utf-8")
            missed += not by
            print(f"{n + 1}/{len(chosen)} {mistake.path}:{mistake.line} {mistake.what}, {len(tests)} tests of "
                  f"{seconds:.0f} s: {'noticed by ' + by if by else 'NOT NOTICED'}\n{mistake.difference(source)}", flush=True)  # fmt: skip
    print(f"{len(chosen) - missed} of {len(chosen)} noticed, {1 - missed / max(len(chosen), 1):.0%}; "
          f"{late} of these by the slow lane alone")  # fmt: skip


if __name__ == "__main__":
    main()
