"""How another Python process is started: it finds modules where this one does, and nowhere else."""

from __future__ import annotations

import sys


def command(module: str, function: str) -> list[str]:
    """The command that calls a function of a module.

    `python -m` would put the current folder first on the path: a `typing.py` that came with a model would run. The
    options against that are as new as Python 3.11.
    """
    path = [p for p in sys.path if isinstance(p, str)]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!a}; from {module} import {function}; {function}()"]
