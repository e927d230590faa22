"""What a GPU and its link can do, on which the design rests: `python -m tests.gpu.probe`, half a
minute; prints JSON."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F

from lora_merge.disk.pages import address, aligned_buffer

SIZE: Final = 64 << 20
HALF: Final = [torch.float16, torch.bfloat16]
EIGHT: Final = [torch.float8_e4m3fn, torch.float8_e5m2]


def timed(act: Callable[[], object]) -> float:
    """Return the seconds of one call, until the device is idle."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def best(act: Callable[[], object], rounds: int = 7) -> float:
    """Return the seconds of the fastest call, after one that does not count."""
    act()
    return min(timed(act) for _ in range(rounds))


def start() -> dict[str, float]:
    """What a process pays once."""
    began = time.perf_counter()
    torch.ones(1, device="cuda").add_(1).item()
    context = time.perf_counter() - began
    began = time.perf_counter()
    (torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda")).sum().item()
    return {"context_s": context, "cublas_s": time.perf_counter() - began}


def copies() -> dict[str, float]:
    """Rates of memory that is pageable, pinned, registered; and of both ways at once."""
    there, other = (torch.empty(SIZE, dtype=torch.uint8, device="cuda") for _ in range(2))
    view = aligned_buffer(SIZE)
    window = torch.frombuffer(view, dtype=torch.uint8)
    pinned, more = (torch.empty(SIZE, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    window.fill_(1)
    found: dict[str, float] = {}

    def rates(name: str, host: torch.Tensor) -> None:
        found[f"{name}_up"] = SIZE / best(lambda: there.copy_(host, non_blocking=True)) / 1e9
        found[f"{name}_down"] = SIZE / best(lambda: host.copy_(there, non_blocking=True)) / 1e9

    rates("pageable", window)
    rates("pinned", pinned)
    odd = slice(8, SIZE - 56)  # as windows begin where a tensor does
    part = there[: SIZE - 64]
    found["odd_share"] = (
        (SIZE - 64) / best(lambda: part.copy_(pinned[odd], non_blocking=True)) / 1e9 / found["pinned_up"]
    )
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    found["register_error"] = float(int(runtime.cudaHostRegister(address(view), SIZE, 1)))
    found["register_ms"] = (time.perf_counter() - began) * 1e3
    if not found["register_error"]:
        rates("registered", window)
        found["registered_share"] = found["registered_up"] / found["pinned_up"]
        runtime.cudaHostUnregister(address(view))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(one):
            there.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(two):
            more.copy_(other, non_blocking=True)

    found["duplex_share"] = 2 * SIZE / best(both) / 1e9 / (found["pinned_up"] + found["pinned_down"])
    for piece in (8 << 20, 1 << 20, 64 << 10):

        def parts(piece: int = piece) -> None:
            for low in range(0, SIZE, piece):
                there[low : low + piece].copy_(pinned[low : low + piece], non_blocking=True)

        found[f"pieces_of_{piece >> 10}_kib"] = SIZE / best(parts) / 1e9
    return found


def kernels() -> dict[str, float]:
    """Rates of the operations that every window needs."""
    numbers = torch.ones(SIZE // 2, device="cuda")
    halves = numbers.half()
    pieces, into = list(halves.chunk(16)), list(numbers.chunk(16))
    return {
        "aminmax_gb_s": numbers.nbytes / best(lambda: torch.aminmax(numbers)) / 1e9,
        "foreach_gb_s": (numbers.nbytes + halves.nbytes) / best(lambda: torch._foreach_copy_(into, pieces)) / 1e9,
    }


def exactness() -> dict[str, float]:
    """Whether the device's arithmetic is what the proof expects."""
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    want = a.double() @ b.double()
    different = 0
    for dtype in (*HALF, *EIGHT):
        limit = torch.finfo(dtype).max
        values = torch.cat([torch.randn(1 << 22) * scale for scale in (1e-3, 1, 100)]).clamp(-limit, limit)
        kind = torch.uint8 if dtype in EIGHT else torch.int16
        different += int((values.cuda().to(dtype).cpu().view(kind) != values.to(dtype).view(kind)).sum())
    x, k = torch.randn(1, 4, 33, 29, dtype=torch.float64), torch.randn(4, 1, 6, 6, dtype=torch.float64)
    there = F.conv_transpose2d(x.cuda(), k.cuda(), stride=2).cpu()
    return {
        "product_error": float(((a @ b).double() - want).abs().max() / want.abs().max()),
        "casts_different": float(different),
        "conv_error": float((there - F.conv_transpose2d(x, k, stride=2)).abs().max()),
    }


def svds(size: int, *drivers: str | None) -> dict[str, float]:
    """Seconds of SVDs in fp64, by driver; None: torch's own choice."""
    found = {}
    matrix = torch.randn(size, size, device="cuda", dtype=torch.float64)
    for driver in drivers:
        name = f"svd_{size}_{driver}_s" if driver else f"svd_{size}_s"
        found[name] = timed(lambda d=driver: torch.linalg.svd(matrix, full_matrices=False, driver=d))  # type: ignore[misc]
    return found


def main() -> int:
    """Print the figures of all parts, or with `svd` of large SVDs; 1 if a part fails, after the others."""
    small = partial(svds, 1024, None, "gesvd", "gesvda")
    large = partial(svds, 4096, None), partial(svds, 4096, "gesvda")  # gesvd takes minutes
    found: dict[str, float] = {}
    failed = False
    for part in large if "svd" in sys.argv else (start, copies, kernels, exactness, small):
        try:
            found |= part()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            failed = True
        print(json.dumps(found), flush=True)  # the last line counts
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
