"""The process of `lora-merge` and `python -m lora_merge`."""

import atexit
import gc
import os
import sys

from .cli import main


def start() -> None:
    """Run the program, then end the process at once.

    Taking torch apart object by object takes a third of a second, when there is nothing left to do; looking for
    cyclic garbage, of which a merge makes little, takes nearly as long.
    """
    gc.set_threshold(50_000)
    code = 0
    try:
        main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    start()
