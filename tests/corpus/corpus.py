"""Record and replay scenes of a corpus, each in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from tests.corpus.calls import Call, outcome
from tests.corpus.differences import differences

NOW = "now"
"""The folder of a call while it runs: one name for all, as an output's size would depend on a path in its header."""


def record_scene(folder: Path, name: str, most: int | None = None) -> Counter[str]:
    """Make the inputs of a scene, make its calls, and keep what comes of them; the number of calls by outcome.

    `most`: how many of its calls, spread evenly; None: all.
    """
    from tests.corpus.scenes import SCENES
    from tests.kit.pairs import spread

    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    (place / "in").mkdir(parents=True)
    (place / "out").mkdir()
    counts: Counter[str] = Counter()
    entries = []
    calls = SCENES[name](place / "in")
    for call in [calls[n] for n in sorted(spread(len(calls), most or len(calls)))]:
        result = call.result(place / "in", place / NOW)
        (place / NOW).rename(place / "out" / call.name)
        entries.append({"call": asdict(call), **json.loads(json.dumps(result))})
        counts[f"{call.function}: {outcome(result['report'])}"] += 1
        if outcome(result["report"]) == "crashed":
            print(f"{name}/{call.name}: {result['report']['crashed']}", flush=True)
    (place / "calls.json").write_text(json.dumps(entries, indent=1), encoding="utf-8")
    return counts


def replay_scene(folder: Path, name: str) -> Counter[str]:
    """Make the calls of a scene again and print what differs; the number of calls that differ or not."""
    place = folder / name
    counts: Counter[str] = Counter()
    for entry in json.loads((place / "calls.json").read_text(encoding="utf-8")):
        call = Call.of(entry["call"])
        result = json.loads(json.dumps(call.result(place / "in", place / NOW)))
        lines = [*differences(place / "in", entry, result, place / "out" / call.name, place / NOW)]
        counts["different" if lines else "same"] += 1
        if lines:
            print(f"{name}/{call.name}", *lines, sep="\n  ", flush=True)
    shutil.rmtree(place / NOW, ignore_errors=True)
    return counts


def unwaited() -> None:
    """Wait for no disk: nobody cuts the power."""
    os.fsync = lambda fd: None  # type: ignore[assignment,misc]
    if hasattr(os, "fdatasync"):
        os.fdatasync = lambda fd: None  # type: ignore[assignment,misc]


def every(work: Callable[[str], Counter[str]], names: Iterable[str], workers: int) -> Counter[str]:
    """The sum over all scenes, in so many processes."""
    if workers == 1:
        unwaited()
        return sum(map(work, names), Counter[str]())
    with ProcessPoolExecutor(workers, get_context("spawn"), unwaited) as pool:
        return sum(pool.map(work, names), Counter[str]())
