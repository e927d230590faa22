"""Named lists of block weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

PRESETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NONE": "",
        "ALL": "",
        "INS": "BASE IN01 IN02 IN04",
        "IND": "BASE IN05 IN07 IN08",
        "INALL": "BASE IN",
        "MIDD": "BASE IN05 IN07 IN08 M00 OUT03 OUT04 OUT05 OUT06",
        "OUTD": "BASE OUT03 OUT04 OUT05 OUT06",
        "OUTS": "BASE OUT07 OUT08 OUT09 OUT10 OUT11",
        "OUTALL": "BASE OUT",
    }
)
"""Preset → the blocks with factor 1; all others have 0. Source: the default presets of sd-webui-lora-block-weight."""

FLUX_ALL: Final = "FLUXALL"
"""The preset with factor 1 for all 61 blocks of Flux.1."""

LAST: Final = 24
"""Number of the last of the 25 blocks of a U-Net of Stable Diffusion 1 that stand behind BASE, counted from 0."""


def _smooth(x: float) -> float:
    """Return the cubic that rises from 0 to 1 with level ends."""
    return x * x * (3 - 2 * x)


def _folded(x: float) -> float:
    """Return a number folded into [0, 1], as a strip of paper is."""
    return 1 - abs(1 - x % 2)


def _true_cubic(x: float) -> float:
    """Return the cubic of TRUE_CUBIC_HERMITE, which has 0 for its first block."""
    return (154 * x**3 - 231 * x**2 + 100 * x + 1) / 24 if x else 0.0


def _fake_cubic(x: float) -> float:
    """Return the cubic of FAKE_CUBIC_HERMITE."""
    return (152 * x**3 - 228 * x**2 + 100 * x) / 24


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _ends(count: int) -> Callable[[int], float]:
    """Return the curve that is 1 for so many blocks at each end, else 0."""
    return lambda n: float(n < count or n > LAST - count)


def _rings(first: int, last: int, edge: float = 0.0) -> Callable[[int], float]:
    """Return the curve that is 1 for blocks [first, last] and those opposite, and `edge` for the blocks beside them."""

    def ring(n: int) -> float:
        near = min(n, LAST - n)
        return 1.0 if first <= near <= last else edge if near in (first - 1, last + 1) else 0.0

    return ring


def _along(curve: Callable[[float], float]) -> Callable[[int], float]:
    return lambda n: curve(n / LAST)


def _times(k: int) -> Callable[[float], float]:
    return lambda x: _folded(k * _smooth(x))


def _parts(k: int) -> Callable[[float], float]:
    return lambda x: _smooth(_folded(k * x))


def _down(curve: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: 1 - curve(x)


_WAVES: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType({
    **{f"SMOOTHSTEP*{k}": _times(k) for k in (2, 3, 4)}, **{f"SMOOTHSTEP/{k}": _parts(k) for k in (2, 3, 4)},
})  # fmt: skip

CURVES: Final[Mapping[str, Callable[[int], float]]] = MappingProxyType({
    "GRAD_V": lambda n: abs(12 - n) / 12,
    "GRAD_A": lambda n: 1 - abs(12 - n) / 12,
    "FLAT_25": lambda _: 0.25,
    "FLAT_75": lambda _: 0.75,
    **{f"WRAP{2 * count:02d}": _ends(count) for count in (4, 6, 7, 8)},
    "MID12_50": lambda n: 0.5 * (5 <= n <= 18),
    "OUT07": lambda n: float(n >= 18),
    "OUT12": lambda n: float(n >= 13),
    "OUT12_5": lambda n: 0.5 * (n == 12) + (n >= 13),
    "RING08_SOFT": _rings(6, 8, 0.5),
    "RING08_5": _rings(6, 9),
    "RING10_5": _rings(5, 9),
    "RING10_3": _rings(6, 10),
    "SMOOTHSTEP": _along(_smooth),
    "REVERSE-SMOOTHSTEP": _along(_down(_smooth)),
    **{name: _along(wave) for name, wave in _WAVES.items()},
    **{f"R_{name}": _along(_down(wave)) for name, wave in _WAVES.items()},
    "COSINE": _along(_cosine),
    "REVERSE_COSINE": _along(_down(_cosine)),
    "TRUE_CUBIC_HERMITE": _along(_true_cubic),
    "TRUE_REVERSE_CUBIC_HERMITE": _along(_down(_true_cubic)),
    "FAKE_CUBIC_HERMITE": _along(_fake_cubic),
    "FAKE_REVERSE_CUBIC_HERMITE": _along(_down(_fake_cubic)),
})  # fmt: skip
"""Preset for the 26 blocks of Stable Diffusion 1 → factor of the n-th block behind BASE, whose factor is 0.

Source: the presets for models of sd-webui-supermerger, written as the curves that they follow."""
