"""What callers may have set in torch for work of their own, and ours must not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Final

import torch

from .devices import KINDS

_PRODUCTS: Final = [getattr(b, "matmul", None) for b in (torch.backends.cuda, torch.backends.mkldnn)]
"""What has torch 2.9's switches of fp32 products; mkldnn computes those of CPUs with AMX or bf16, and of XPUs."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without the caller's default device and autocast, which hold for this thread, and with exact products."""
    with ExitStack() as stack, exact_products():
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 products in fp32, also where the user has allowed TF32 or bf16, whose few bits lose small changes; and
    products at all where he asks for deterministic algorithms: on CUDA an error, unless cuBLAS has been told before.

    The switch is the process's: it is turned only where it has to be, and turned back when nobody needs it any more.
    """
    with _switch:
        if not _exact_users:
            _exact_users.append(_turn())
        _exact_users.append(_nothing)
    try:
        yield
    finally:
        with _switch:
            _exact_users.pop()
            if len(_exact_users) == 1:
                _exact_users.pop()()


def _turn() -> Callable[[], None]:
    """Make products exact and possible; what is returned puts everything back as the user has it."""
    back, mode = _make_exact(), torch.get_deterministic_debug_mode()
    if not mode:
        return back
    torch.set_deterministic_debug_mode(0)

    def both() -> None:
        torch.set_deterministic_debug_mode(mode)
        back()

    return both


def _make_exact() -> Callable[[], None]:
    """Make fp32 products exact; what is returned puts everything back as the user has it."""
    own = [(b, b.fp32_precision) for b in _PRODUCTS if b is not None and hasattr(b, "fp32_precision")]
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # it does not tell where only the newer switches were turned, and then they alone count
        whole = "highest"
    inexact = [(b, before) for b, before in own if before not in ("ieee", "none")]
    if whole == "highest" and not inexact:
        return _nothing
    if whole != "highest":
        torch.set_float32_matmul_precision("highest")
    for backend, _ in inexact:
        backend.fp32_precision = "ieee"

    def back() -> None:
        if whole != "highest":
            torch.set_float32_matmul_precision(whole)
        for backend, before in own:
            if backend.fp32_precision != before:
                backend.fp32_precision = before

    return back


def _nothing() -> None:
    """There is nothing to put back."""


_switch = Lock()
_exact_users: list[Callable[[], None]] = []  # what puts the user's setting back, then an entry for each in need
