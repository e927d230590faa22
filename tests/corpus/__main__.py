"""`python -m tests.corpus record|replay FOLDER [SCENE...] [-n WORKERS]`; see __init__.py."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch: sums of matrices depend on them

from tests.corpus.corpus import every, record_scene, replay_scene


def main(arguments: Sequence[str] | None = None) -> int:
    """Record or replay; 1 if anything differs."""
    parser = argparse.ArgumentParser("python -m tests.corpus")
    parser.add_argument("command", choices=("record", "replay"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("scenes", nargs="*", help="beginnings of names; default: all")
    parser.add_argument("-n", "--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    folder, start = options.folder.absolute(), time.perf_counter()
    if options.command == "record":
        from tests.corpus.scenes import SCENES

        names, work = [*SCENES], partial(record_scene, folder)
    else:
        names, work = sorted(p.parent.name for p in folder.glob("*/calls.json")), partial(replay_scene, folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    chosen = [n for n in names if not options.scenes or n.startswith(tuple(options.scenes))]
    counts = every(work, chosen, options.workers)
    print(*(f"{count:5} {what}" for what, count in sorted(counts.items())), sep="\n")
    print(f"{counts.total()} calls of {len(chosen)} scenes in {time.perf_counter() - start:.0f} s")
    return int(counts["different"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
