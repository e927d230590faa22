"""`make gpu`: every check that needs a GPU, in less than 30 minutes; writes figures.json and the table of README.md."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.gpu import names
from tests.gpu.predictions import PREDICTIONS, table
from tests.gpu.programs import ROOT
from tests.gpu.speed import ROOM
from tests.gpu.steps import MINUTES, STEPS, carry_out

HERE = Path(__file__).parent
NO_GPU = """no CUDA device here: nothing was checked.
make gpu needs a machine with an NVIDIA GPU and a torch that is built for CUDA; see tests/gpu/README.md"""


def written(figures: Mapping[str, Any], text: str) -> str:
    """Return the text of the page with the figures of a run in its table."""
    rows = f"<!-- figures -->\n{table(figures)}\n<!-- end -->"
    return re.sub(r"<!-- figures -->.*?<!-- end -->", lambda _: rows, text, flags=re.DOTALL)


def failed(figures: Mapping[str, Any]) -> bool:
    """Return whether a prediction is refuted, or a part of a step of the last run failed."""
    return any(x.verdict(figures) == "refuted" for x in PREDICTIONS) or any(
        figures.get(f"{s.name}_errors") for s in STEPS
    )


def folder() -> Path:
    """The first of these folders with room for SDXL and its outputs, the one in memory first; else the largest."""
    free = {p: shutil.disk_usage(p).free for p in (Path("/dev/shm"), Path(tempfile.gettempdir()), ROOT) if p.is_dir()}
    largest = max(free, key=free.__getitem__)
    return next((p for p, size in free.items() if size >= ROOM["sdxl"]), largest) / "lora-merge-gpu"


def arguments() -> argparse.Namespace:
    """What was asked for."""
    p = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    p.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(s.name for s in STEPS))
    p.add_argument(
        "--minutes", type=float, default=MINUTES, help="for all steps; with few, each has only its first parts"
    )
    p.add_argument("--data", type=Path, help="where files of full size are made; else where there is room")
    p.add_argument("--into", type=Path, default=HERE, help="where figures.json and README.md are written; else here")
    o = p.parse_args()
    if unknown := [s for s in o.steps if s not in {step.name for step in STEPS}]:
        p.error(f"no step is called {unknown[0]!r}")
    return o


def main() -> int:
    """Run the steps that were asked for; 0 if all of them ran and no prediction is refuted."""
    o = arguments()
    if not names():
        print(NO_GPU, file=sys.stderr)
        return 1
    data = o.data or folder()
    data.mkdir(parents=True, exist_ok=True)
    o.into.mkdir(parents=True, exist_ok=True)
    known, path = dict[str, Any](), o.into / "figures.json"
    if o.steps and path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))

    def keep(found: Mapping[str, Any]) -> None:
        """Write what is known so far: the machine may be taken away at any time."""
        now = known | found | {"date": time.strftime("%Y-%m-%d %H:%M")}
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        page = (HERE / "README.md").read_text(encoding="utf-8")
        (o.into / "README.md").write_text(written(now, page), encoding="utf-8")

    steps = [s for s in STEPS if not o.steps or s.name in o.steps]
    figures = known | carry_out(steps, data, o.minutes, say=partial(print, flush=True), keep=keep)
    print(table(figures))
    return int(failed(figures))


if __name__ == "__main__":
    sys.exit(main())
