"""Reference formulas of tuners that PEFT and others added in 2026. Plain float64; `algorithms/` names the papers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .formula_input import FormulaInput, Reference
from .rotations import bounded, cayley, series, triangles


def glora(g: FormulaInput) -> Array:
    """Return W ⊙ A + B."""
    return g.w * _letter(g, "a") + _letter(g, "b")


def glora_bias(g: FormulaInput) -> Array:
    """Return b ⊙ D + E + W C; where the adapter has its own b, plus its difference to the base's."""
    column = g["c"] if "c" in g.slots else g["c_up"] @ g["c_down"]
    trained = g["trained"].reshape(-1, 1)[g.rows] if "trained" in g.slots else g.w
    change = trained - g.w + g["weight"][g.rows] @ column.reshape(-1, 1)
    for slot, factor in (("d", trained), ("e", np.ones_like(g.w))):
        value = g[slot].reshape(-1, 1)
        change = change + (value if len(value) == 1 else value[g.rows]) * factor
    return change


def _letter(g: FormulaInput, name: str) -> Array:
    if name not in g.slots:
        return g[f"{name}_up"][g.rows] @ g[f"{name}_down"]
    value = g[name]
    return value if len(value) == 1 and g.out > 1 else value[g.rows]


def psoft(g: FormulaInput) -> Array:
    """Return B (R − I) A."""
    left, right = g.some("left"), g["right"]
    rank = len(right)
    turned = _turned(g) if g.settings["orthogonal"] else g["turn"]
    if "rows" in g.slots:
        turned = np.diag(g["rows"].reshape(-1)) @ turned
    if "columns" in g.slots:
        turned = turned @ np.diag(g["columns"].reshape(-1))
    return np.asarray(left @ ((turned - np.eye(rank)) @ right))


def _turned(g: FormulaInput) -> Array:
    """Return (I + Q)(I − Q)⁻¹, or PEFT's series for it: all powers doubled but the first and the last."""
    skew = bounded(triangles(g["turn"].reshape(1, -1)), g.settings["limit"])
    terms = int(g.settings["terms"])
    return np.asarray((series(skew, terms, doubled_last=False) if terms else cayley(-skew))[0])


def adamss(g: FormulaInput) -> Array:
    """Return the product of each group's own factors and the subspace that all groups share."""
    inputs = g["weight"].shape[1]
    space = g["space"][:, inputs:] if len(g.shape) == 1 else g["space"][:, :inputs]
    count = sum(slot.startswith("up_") for slot in g.slots)
    stacked = np.concatenate([g[f"up_{i}"] @ g[f"down_{i}"] for i in range(count)])
    return np.asarray(stacked[g.places("order", g.out)[g.rows]] @ space)


def tinylora(g: FormulaInput) -> Array:
    """Return B (Σ v P) A."""
    inner = sum(value * matrix for value, matrix in zip(g["vector"].reshape(-1), g["mixed"], strict=True))
    return np.asarray(g.some("up") @ (inner @ g["down"]))


def frod(g: FormulaInput) -> Array:
    """Return U (S + diag(l)) Vᵀ − W."""
    basis, inner = g["basis"], np.diag(g["diagonal"].reshape(-1))
    singular = np.linalg.matrix_rank(basis) < len(basis)
    turned = g.all_w @ (np.linalg.pinv(basis, rcond=1e-6) if singular else np.linalg.inv(basis)).T
    length = np.sqrt(np.sum(turned * turned, axis=0))
    unit = np.divide(turned, length, out=np.zeros_like(turned), where=length > 1e-12)
    rows, columns = g.places("places", g.cols).reshape(2, -1)
    np.add.at(inner, (rows, columns), g["values"].reshape(-1))
    return np.asarray(unit[g.rows] @ inner @ basis.T - g.w)


def lora_blocks(g: FormulaInput) -> Array:
    """Return B_j A_j in the rows of each layer j."""
    ups = [g[slot] for slot in sorted(slot for slot in g.slots if slot.startswith("up_"))]
    parts = [up @ down for up, down in zip(ups, np.split(g["down"], len(ups)), strict=True)]
    return np.asarray(g.numbers["scale"] * np.concatenate(parts)[g.rows])


def lora_xs(g: FormulaInput) -> Array:
    """Return U M Vᵀ."""
    return np.asarray(g.numbers["scale"] * (g.some("left") @ (g["core"] @ g["right"].T)))


def bora(g: FormulaInput) -> Array:
    """Return V with the lengths of its rows, then of its columns, replaced, minus W."""
    v = g.all_w + g.numbers["scale"] * (g["up"] @ g["down"])
    v = g["rows"].reshape(-1, 1) * v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    v = g["columns"].reshape(1, -1) * v / np.maximum(np.linalg.norm(v, axis=0, keepdims=True), 1e-12)
    return np.asarray((v - g.all_w)[g.rows])


RECENT: Final = MappingProxyType({
    "peft_glora": Reference(glora), "peft_glora_bias": Reference(glora_bias), "psoft": Reference(psoft, whole=True),
    "adamss": Reference(adamss, whole=True), "tinylora": Reference(tinylora),
    "lora_blocks": Reference(lora_blocks), "lora_xs": Reference(lora_xs), "bora": Reference(bora, whole=True, loss=8),
    "frod": Reference(frod, whole=True, loss=64),
})  # fmt: skip
