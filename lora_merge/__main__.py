"""The entry point of `lora-merge` and of `python -m lora_merge`."""

import _imp
import _signal as signal  # type: ignore[import-not-found]  # `signal` makes enums first, and Ctrl-C would show a traceback
import os
import sys

STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

PRINTING_COMMANDS = frozenset({"inspect", "verify", "doctor"})
"""Commands whose only result is what they print: they fail if that cannot be written. Other commands have made their
output even then."""


def start() -> None:
    """Run the program, then end the process at once.

    A normal exit would free the objects of torch one by one, which takes a third of a second.
    """
    for number in STOPS:  # before anything is imported, and until `main` sets a handler that cleans up
        if signal.getsignal(number) != signal.SIG_IGN or number != getattr(signal, "SIGHUP", None):  # as under nohup
            signal.signal(number, _quit)
    if _imp.lock_held():
        # Ctrl-C arrived while Python imported modules of its own, and Python dropped it but kept the lock: nobody else
        # imports here. Every other thread would wait for this lock without end.
        _quit(signal.SIGINT, None)
    import atexit

    from .process import collect_rarely, ignore_signals, kept_objects

    collect_rarely()
    with kept_objects():
        from .cli.main import main
        from .cli.stdio import SafeStream, open_descriptors

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
    ignore_signals()
    # Python has no public name for this. A normal exit, from which a first callback could end the process, waits for
    # all threads before it calls any.
    atexit._run_exitfuncs()
    out.flush()
    if out.lost:
        print(f"warning: part of the standard output could not be written: {out.lost.strerror}", file=err)
        code = code or int(sys.argv[1] in PRINTING_COMMANDS)
    err.flush()
    os._exit(code)


def _quit(number: int, _frame: object) -> None:
    os._exit(128 + number)  # there is nothing to clean up yet


if __name__ == "__main__":
    start()
