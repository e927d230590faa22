"""Reference formulas of the tuners that PEFT has had since 2026. Plain float64; papers stand in `algorithms/`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .given import Given, Reference


def glora(g: Given) -> Array:
    """W ⊙ A + B."""
    return g.w * _letter(g, "a") + _letter(g, "b")


def glora_bias(g: Given) -> Array:
    """b ⊙ D + E + W C."""
    column = g["c"] if "c" in g.slots else g["c_up"] @ g["c_down"]
    change = g["weight"][g.rows] @ column.reshape(-1, 1)
    for slot, factor in (("d", g.w), ("e", np.ones_like(g.w))):
        value = g[slot].reshape(-1, 1)
        change = change + (value if len(value) == 1 else value[g.rows]) * factor
    return change


def _letter(g: Given, name: str) -> Array:
    if name not in g.slots:
        return g[f"{name}_up"][g.rows] @ g[f"{name}_down"]
    value = g[name]
    return value if len(value) == 1 and g.out > 1 else value[g.rows]


RECENT: Final = MappingProxyType({"peft_glora": Reference(glora), "peft_glora_bias": Reference(glora_bias)})
