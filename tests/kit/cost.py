"""What work costs: calls are counted, not seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def slowness() -> float:
    """How many times as long as the machine on which bounds were set this one takes just now for the same Python."""
    started = time.process_time()
    sorted({str(i): i % 7 for i in range(200_000)}.items(), key=lambda item: (item[1], item[0]))
    return max(1.0, (time.process_time() - started) / 0.17)


def steps(act: Callable[[], object]) -> int:
    """How many calls Python makes for it: work is counted, since seconds are another machine's and another hour's."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls
