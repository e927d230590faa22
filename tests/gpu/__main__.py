"""`make gpu`: every check that needs a GPU, in less than 30 minutes; writes figures.json and the table of README.md."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.gpu import names
from .predictions import PREDICTIONS, table
from .steps import STEPS, carry_out

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


def main() -> int:
    """Run the steps that were asked for; 0 if all of them ran and no prediction is refuted."""
    p = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    p.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(s.name for s in STEPS))
    p.add_argument(
        "--data", type=Path, default=Path("/dev/shm/lora-merge-gpu"), help="where files of full size are made"
    )
    o = p.parse_args()
    if unknown := [s for s in o.steps if s not in {step.name for step in STEPS}]:
        p.error(f"no step is called {unknown[0]!r}")
    if not names():
        print(NO_GPU, file=sys.stderr)
        return 1
    o.data.mkdir(parents=True, exist_ok=True)
    known, path = dict[str, Any](), HERE / "figures.json"
    if o.steps and path.exists():
        known = json.loads(path.read_text())
    page = HERE / "README.md"

    def keep(found: Mapping[str, Any]) -> None:
        """Write what is known so far: the machine may be taken away at any time."""
        now = known | found | {"date": time.strftime("%Y-%m-%d %H:%M")}
        path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
        page.write_text(written(now, page.read_text(encoding="utf-8")), encoding="utf-8")

    steps = [s for s in STEPS if not o.steps or s.name in o.steps]
    figures = known | carry_out(steps, o.data, keep=keep)
    print(table(figures))
    return int(failed(figures))


if __name__ == "__main__":
    sys.exit(main())
