"""Reference formulas of PEFT's orthogonal tuners, which turn inputs or outputs block by block."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .formula_input import FormulaInput, Reference


def cayley(s: Array) -> Array:
    """Return (I − S)(I + S)⁻¹ per block."""
    eye = np.eye(s.shape[-1])
    return (eye - s) @ np.linalg.inv(eye + s)


def bounded(x: Array, limit: float) -> Array:
    """Return each block with a Frobenius norm of at most `limit`, where there is a limit."""
    if not limit:
        return x
    norm = np.sqrt(np.sum(x * x, axis=(-2, -1), keepdims=True))
    return np.where(norm > limit, x * (limit / np.maximum(norm, np.finfo(float).tiny)), x)


def triangles(stored: Array) -> Array:
    """Return skew-symmetric blocks, [k, b, b], from their upper triangles."""
    b = round((1 + np.sqrt(1 + 8 * stored.shape[1])) / 2)
    s, upper = np.zeros((len(stored), b, b)), np.triu_indices(b, 1)
    s[:, upper[0], upper[1]] = stored
    return s - np.swapaxes(s, 1, 2)


def series(s: Array, terms: int, *, doubled_last: bool) -> Array:
    """Return the Neumann series, with the last terms as the version of PEFT that trained the adapter has them."""
    plain = doubled_last or terms < 3
    factors = [1.0] + [2.0] * (terms - 1) if plain else [1.0] + [2.0] * (max(terms, 4) - 2) + [1.0]
    power, total = np.broadcast_to(np.eye(s.shape[-1]), s.shape), np.zeros_like(s)
    for factor in factors:
        total = total + factor * power
        power = power @ s
    return total


def inputs_turned(w: Array, right: Array) -> Array:
    """Return W bd(right); one block may serve as all."""
    b = right.shape[-1]
    return np.hstack([w[:, j * b :][:, :b] @ right[j % len(right)] for j in range(w.shape[1] // b)])


def _rotation(g: FormulaInput) -> Array:
    s = triangles(g["skew"])
    s = bounded(s, g.settings.get("limit", 0.0) / np.sqrt(len(s)))
    terms = g.settings.get("terms", 5)
    return series(s, terms, doubled_last=g.settings.get("doubled_last", False)) if terms else cayley(s)


def peft_oft(g: FormulaInput) -> Array:
    """Return W bd(R)ᵀ − W."""
    return inputs_turned(g.w, np.swapaxes(_rotation(g), 1, 2)) - g.w


def peft_oft_embedding(g: FormulaInput) -> Array:
    """Return W bd(R) − W."""
    return inputs_turned(g.w, _rotation(g)) - g.w


def _rotations_of_blocks(g: FormulaInput, side: int) -> Array:
    x = g["blocks"]
    x = bounded(x, g.settings.get("limit", 0.0) * side**2 / np.sqrt(len(x)))
    return cayley((x - np.swapaxes(x, 1, 2)) / 2)


def peft_oft2(g: FormulaInput) -> Array:
    """Return s ⊙ W bd(R)ᵀ − W."""
    side = -(-g.out // (g.cols // g["blocks"].shape[1]))
    turned = inputs_turned(g.w, np.swapaxes(_rotations_of_blocks(g, side), 1, 2))
    return g.some("rows").reshape(-1, 1) * turned - g.w


def peft_oft1(g: FormulaInput) -> Array:
    """Return bd(R)ᵀ W − W, the blocks cut to the weight's height."""
    b = g["blocks"].shape[1]
    rotation = _rotations_of_blocks(g, b)
    turned = np.empty((len(g.rows), g.cols))
    for block in np.unique(g.rows // b):
        inside = g.rows // b == block
        height = min(b, g.out - block * b)
        turn = rotation[block % len(rotation)].T[g.rows[inside] % b, :height]
        turned[inside] = turn @ g.base(np.arange(block * b, block * b + height))
    return turned - g.w


def boft(g: FormulaInput) -> Array:
    """Return s ⊙ W Mᵀ − W, stage by stage on pairs of half blocks of columns."""
    blocks, x = g["blocks"], g.w
    half = blocks.shape[-1] // 2
    rotations = cayley((blocks - np.swapaxes(blocks, -1, -2)) / 2)
    for stage, stack in enumerate(rotations):
        index = np.arange(g.cols)
        if stage:  # of every run of half blocks the first of each half in turn, then the second …
            index = index.reshape(-1, 2, 2**stage, half).transpose(0, 2, 1, 3).reshape(-1)
        turned = np.empty_like(x)
        turned[:, index] = inputs_turned(x[:, index], np.swapaxes(stack, 1, 2))
        x = turned
    return g.some("rows").reshape(-1, 1) * x - g.w


ROTATIONS: Final = MappingProxyType({
    "peft_oft": Reference(peft_oft, loss=8), "peft_oft_embedding": Reference(peft_oft_embedding, loss=8),
    "peft_oft2": Reference(peft_oft2, loss=8), "peft_oft1": Reference(peft_oft1, loss=8),
    "peft_boft": Reference(boft, loss=8),
})  # fmt: skip
