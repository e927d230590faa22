"""Overrides global settings of torch that the caller's program may have changed; merges must not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Final

import torch

from .devices import DEVICE_KINDS

_PRODUCTS: Final = [getattr(b, "matmul", None) for b in (torch.backends.cuda, torch.backends.mkldnn)]
"""Backends with torch 2.9's settings of fp32 products; mkldnn is that of CPUs with AMX or bf16, and of XPUs."""

_SUMS: Final = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Settings with which CUDA rounds the partial sums of products in 16 bits; they matter for products in 16 bits."""

_switch = Lock()
_exact_users: list[Callable[[], None]] = []  # the function that restores the settings, then an entry for each user


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block without this thread's default device and autocast, and with exact products."""
    with ExitStack() as stack, exact_products():
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in DEVICE_KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32, also if the caller has allowed TF32 or bf16, which would lose small changes, and
    add up products of 16 bits in fp32. Turn off deterministic algorithms, with which products on CUDA fail unless
    cuBLAS was configured before.

    These settings belong to the process. They are changed only if needed, and restored when the last user has finished.
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
    """Make products exact and possible; return a function that restores the caller's settings."""
    back, mode = ExitStack(), torch.get_deterministic_debug_mode()
    back.callback(_make_exact())
    if mode:
        torch.set_deterministic_debug_mode(0)
        back.callback(torch.set_deterministic_debug_mode, mode)
    cuda = torch.backends.cuda.matmul
    for name in _SUMS if torch.backends.cuda.is_built() else ():  # type: ignore[no-untyped-call]
        if allowed := getattr(cuda, name, False):
            setattr(cuda, name, False)
            back.callback(setattr, cuda, name, allowed)
    return back.close


def _make_exact() -> Callable[[], None]:
    """Make fp32 products exact; return a function that restores the caller's settings."""
    precisions = [(b, b.fp32_precision) for b in _PRODUCTS if b is not None and hasattr(b, "fp32_precision")]
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer settings were used, and they alone apply
        whole = "highest"
    inexact = [(b, before) for b, before in precisions if before not in ("ieee", "none")]
    if whole == "highest" and not inexact:
        return _nothing
    if whole != "highest":
        torch.set_float32_matmul_precision("highest")
    for backend, _ in inexact:
        backend.fp32_precision = "ieee"

    def back() -> None:
        if whole != "highest":
            torch.set_float32_matmul_precision(whole)
        for backend, before in precisions:
            if backend.fp32_precision != before:
                backend.fp32_precision = before

    return back


def _nothing() -> None:
    """Restore nothing: no setting was changed."""
