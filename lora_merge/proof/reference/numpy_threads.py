"""Matrix products of numpy on the thread that asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock
from typing import Any, Final

_lock: Final = RLock()  # a user that was left open may end while another begins, when memory is collected
_set: Final = ExitStack()
_users = 0


@cache
def _libraries() -> Any:
    """Return what sets the threads of numpy's library, which is loaded by now; the search takes milliseconds."""
    from threadpoolctl import ThreadpoolController  # a fortieth of a second, for proofs alone

    return ThreadpoolController()


@contextmanager
def one_core() -> Iterator[None]:
    """Let numpy's matrix products run on the thread that asks, until the end of the block.

    Its library has one group of threads for the whole process. If several threads ask at once, they wait for it in a
    loop: that took two fifths of the processor's time when adapters were combined on two cores.
    """
    global _users  # the setting is one of the process: the first user makes it, the last one takes it back
    with _lock:
        _users += 1
        if _users == 1:
            _set.enter_context(_libraries().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _set.close()
