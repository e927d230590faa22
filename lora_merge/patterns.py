"""Regular expressions out of files and command lines: only those that are sure to end soon are run.

Python's engine tries every way to share a text among the loops of a pattern: k loops take up to n^k steps, a loop
inside a loop 2^n.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 500  # characters of a pattern
MOST_LOOPS: Final = 3  # `*`, `+` or `{`
LONGEST_NAME: Final = 300  # characters of a name that is searched; real ones have up to 150
NESTED: Final = re.compile(r"\)[*+{]")


def endless(pattern: str, name: str = "") -> bool:
    """Whether searching this name (any short one) for the pattern could take absurdly long."""
    loops = sum(pattern.count(c) for c in "*+{")
    too_long = len(pattern) > LONGEST or (loops > 0 and len(name) > LONGEST_NAME)
    return too_long or loops > MOST_LOOPS or NESTED.search(pattern) is not None
