"""What callers may have set in torch for work of their own, and ours must not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 products in fp32 on CUDA, also where the user has allowed TF32, whose ten bits lose small changes.

    The switch is the process's: it is turned only where it has to be, and turned back when nobody needs it any more.
    """
    with _switch:
        if not _exact_users:
            _exact_users.append(torch.get_float32_matmul_precision())
            if _exact_users[0] != "highest":
                torch.set_float32_matmul_precision("highest")
        _exact_users.append("")
    try:
        yield
    finally:
        with _switch:
            _exact_users.pop()
            if len(_exact_users) == 1 and (before := _exact_users.pop()) != "highest":
                torch.set_float32_matmul_precision(before)


_switch = Lock()
_exact_users: list[str] = []  # the user's setting, then one entry for each that needs the other
