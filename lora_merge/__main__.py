"""The process of `lora-merge` and `python -m lora_merge`."""

import atexit
import os
import sys
from types import FrameType

from .process import deaf, on_stop

ANSWERS = frozenset({"inspect", "verify", "doctor"})
"""Commands that only say something: they fail where nobody can hear it. What others have made is there all the same."""


def start() -> None:
    """Run the program, then end the process at once.

    Taking torch apart object by object takes a third of a second, when there is nothing left to do.
    """
    on_stop(_quit)  # until `main` has a better answer
    from .cli.main import main
    from .cli.streams import SafeStream, open_descriptors

    open_descriptors()
    sys.stdout = out = SafeStream(sys.stdout)
    sys.stderr = err = SafeStream(sys.stderr)
    code = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    deaf()
    atexit._run_exitfuncs()
    out.flush()
    if out.lost:
        print(f"warning: not all could be written to the standard output: {out.lost.strerror}", file=err)
        code = code or int(sys.argv[1] in ANSWERS)
    err.flush()
    os._exit(code)


def _quit(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # nothing was begun


if __name__ == "__main__":
    start()
