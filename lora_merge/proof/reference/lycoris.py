"""Reference formulas of the kohya, LyCORIS and OneTrainer families. Plain float64; `algorithms/` names the papers."""

from __future__ import annotations

from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .formula_input import FormulaInput, Reference
from .rotations import cayley, inputs_turned, series, triangles


def _mixed(g: FormulaInput, core: str, inner: str) -> Array:
    """Return the inner factor times the Tucker core, Σ_j core[i, j, k] inner[j, c] as [i, c·k], if there is a core."""
    if core not in g.slots:
        return g[inner]
    joined = np.einsum("ijk,jc->ick", g[core], g[inner])
    return joined.reshape(len(joined), prod(joined.shape[1:]))


def lora(g: FormulaInput) -> Array:
    """Return α / r · up · down."""
    return g.scalars["scale"] * (g.some("up") @ _mixed(g, "mid", "down"))


def _sparse(g: FormulaInput, values: Array) -> Array:
    """Return a matrix with these values at their places; stored coordinates beyond int16 have wrapped."""
    where = g.places("indices", g.out, g.cols, wrapped=2**16)
    dense = np.zeros((g.out, g.cols))
    np.add.at(dense, (where[0], where[1]), values)
    return dense[g.rows]


def lora_sparse(g: FormulaInput) -> Array:
    """Return the LoRA plus a sparse matrix."""
    return lora(g) + g.scalars["scale"] * _sparse(g, g["values"].reshape(-1))


def lora_sparse_tucker(g: FormulaInput) -> Array:
    """Return the same less the base's values at the sparse places: the sparse matrix replaces them."""
    return lora_sparse(g) - g.w * _sparse(g, np.ones(g["values"].size))


def lora_fused(g: FormulaInput) -> Array:
    """Return one small LoRA per part of the rows."""
    up, down = g["up"], g["down"]
    rank, result, done = up.shape[1], np.zeros((g.out, g.cols)), 0
    for i, (first, end) in enumerate(g.settings["parts"]):
        height = end - first
        result[first:end] = up[done : done + height] @ down[i * rank :][:rank]
        done += height
    return g.scalars["scale"] * result[g.rows]


def lora_transposed(g: FormulaInput) -> Array:
    """Return (A B)ᵀ with A (in, r) and B (r, out)."""
    a, b = g["down"], g["up"]
    scale = g.settings["lora_alpha"] / (a.shape[1] if a.size and g.settings.get("over_rank", True) else 1)
    return scale * (a @ b[:, g.rows]).T


def expert_rows(g: FormulaInput) -> tuple[Array, Array]:
    """Return the expert, and the row in its matrix, of every asked-for row of a weight [experts, out, in]; if a
    row of the weight as a matrix holds a whole expert, its rows one after the other."""
    _, height, width = g.shape
    lines = g.cols // width
    which, inside = np.divmod((g.rows[:, None] * lines + np.arange(lines)).reshape(-1), height)
    return which, inside


def lora_switch(g: FormulaInput) -> Array:
    """Return ΔW of stacked experts, each of which has factors of its own."""
    which, inside = expert_rows(g)
    result = np.empty((len(which), g.shape[2]))
    for e in np.unique(which):
        up, down = (g.read(slot, np.array([e]))[0] for slot in ("up", "down"))
        result[which == e] = up[inside[which == e]] @ down
    scale = g.settings["lora_alpha"] / (down.shape[0] if down.size and g.settings.get("over_rank", True) else 1)
    return scale * result.reshape(len(g.rows), g.cols)


def loha(g: FormulaInput) -> Array:
    """Return two low-rank matrices multiplied element by element."""
    halves = []
    for i in "12":
        outer = g[f"w{i}_a"][:, g.rows].T if f"t{i}" in g.slots else g.some(f"w{i}_a")
        halves.append(outer @ _mixed(g, f"t{i}", f"w{i}_b"))
    return g.scalars["scale"] * halves[0] * halves[1]


def lokr(g: FormulaInput) -> Array:
    """Return w1 ⊗ w2, whose row i is row i div p of w1 times row i mod p of w2, for w2 of p rows."""
    w1 = g["w1"] if "w1" in g.slots else g["w1_a"] @ g["w1_b"]
    outer = "w2" if "w2" in g.slots else "w2_a"
    w2 = g[outer].T if "t2" in g.slots else g[outer]
    w2 = w2 if "w2" in g.slots else w2 @ _mixed(g, "t2", "w2_b")
    scale = g.scalars["rs_scale" if g.settings.get("rs_lora") else "scale"]
    if w2.ndim == 3:
        if g.settings.get("right_aligned"):
            return scale * np.kron(w1, w2).reshape(g.out, g.cols)[g.rows]
        w2 = w2.reshape(len(w2), -1)
    upper, lower = np.divmod(g.rows, len(w2))
    return scale * (w1[upper][:, :, None] * w2[lower][:, None, :]).reshape(len(g.rows), g.cols)


def _glora(g: FormulaInput, a_first: Array, a_second: Array, added: Array) -> Array:
    """Return c · (W A A' + B B'), W contracted on its input axis."""
    rank = a_first.shape[1]
    scale = g.scalars["scale"] * (np.sqrt(rank) if g.settings.get("rs_lora") else 1.0)
    w = g.w.reshape(len(g.rows), a_first.shape[0], -1)
    through = np.einsum("oik,ir,rj->ojk", w, a_first, a_second, optimize=True)
    return scale * (through.reshape(len(g.rows), -1) + added)


def glora(g: FormulaInput) -> Array:
    """Return ΔW of the present layout."""
    return _glora(g, g["a1"], g["a2"], g.some("b1") @ _mixed(g, "bm", "b2"))


def glora_old(g: FormulaInput) -> Array:
    """Return ΔW of the layout of early LyCORIS, where 1 and 2 are swapped."""
    return _glora(g, g["a2"], g["a1"], g.some("b2") @ g["b1"])


def tlora(g: FormulaInput) -> Array:
    """Return P λ Q less its start, r singular triples of the weight."""
    start = triples(g, g["q"].shape[0], g.settings.get("sig_type", "principal"))
    return g.scalars["scale"] * (g.some("p") @ np.diag(g["lambdas"].reshape(-1)) @ g["q"] - start)


def triples(g: FormulaInput, count: int, which: str) -> Array:
    """Return rows of the product of `count` singular triples of the weight: the largest (`principal`), the smallest
    (`last`), or those in the middle."""
    u, s, v = np.linalg.svd(g.all_w, full_matrices=False)
    middle = (len(s) - count) // 2
    part = {"principal": slice(count), "last": slice(len(s) - count, None)}.get(which, slice(middle, middle + count))
    return np.asarray(u[g.rows, part] @ np.diag(s[part]) @ v[part])


def full(g: FormulaInput) -> Array:
    """Return the stored difference."""
    return g.some("diff")


def replace(g: FormulaInput) -> Array:
    """Return the stored value less the weight."""
    return g.some("diff") - g.w


def full_rank(g: FormulaInput) -> Array:
    """Return the stored difference, which has the name of a factor."""
    return g.some("down")


def ia3(g: FormulaInput) -> Array:
    """Return W with its rows, or the input channels of each group with their kernels, times a factor, less W."""
    factor = g["diff"]
    if g.places("on_input", 2).flat[0]:
        group = g.rows * len(factor) // g.out
        return g.w * np.repeat(factor[group], g.cols // factor.shape[1], axis=1)
    return g.w * factor.reshape(-1)[g.rows, None]


def _rotations(blocks: Array, limit: float) -> Array:
    """Return (I + Q)(I − Q)⁻¹ for Q = X − Xᵀ, whose norm over all blocks is cut to the limit."""
    q = blocks - np.swapaxes(blocks, -1, -2)
    norm = float(np.sqrt(np.sum(q * q)))
    if norm > limit:
        q = q * (limit / norm)
    return cayley(-q)


def _turned_rows(g: FormulaInput, rotations: Array) -> Array:
    """Return the wanted rows of bd(R)ᵀ W; one rotation may serve all blocks."""
    b = rotations.shape[-1]
    blocks, inside = np.divmod(g.rows, b)
    turned = np.empty((len(g.rows), g.cols))
    for block in np.unique(blocks):
        rotation = rotations[block if len(rotations) > 1 else 0]
        rows = blocks == block
        turned[rows] = rotation.T[inside[rows]] @ g.base(np.arange(block * b, (block + 1) * b))
    return turned


def _stretch(g: FormulaInput, turned: Array) -> Array:
    """Return the rotated weight times the stored factors of its rows, if any, less the weight."""
    factors = g.some("rescale").reshape(-1, 1) if "rescale" in g.slots else 1.0
    return factors * turned - g.w


def diag_oft(g: FormulaInput) -> Array:
    """Return s ⊙ bd(R)ᵀ W − W."""
    return _stretch(g, _turned_rows(g, _rotations(g["blocks"], g.scalars["limit"])))


def oft_diag(g: FormulaInput) -> Array:
    """Return bd(R)ᵀ W − W, with R itself stored."""
    return _turned_rows(g, g["blocks"]) - g.w


def boft(g: FormulaInput) -> Array:
    """Return W rotated in stages less W: each stage rotates pairs of half blocks, at twice the distance."""
    x, rotations = g.all_w, _rotations(g["blocks"], g.scalars["limit"])
    half = rotations.shape[-1] // 2
    for stage, stack in enumerate(rotations):
        reach = half * 2**stage
        index = np.arange(g.out).reshape(-1, 2, reach).transpose(0, 2, 1).reshape(len(stack), -1)
        turned = np.empty_like(x)
        for rotation, rows in zip(stack, index, strict=True):
            turned[rows] = rotation @ x[rows]
        x = turned
    return _stretch(g, x[g.rows])


def _neumann(g: FormulaInput) -> Array:
    """Return OneTrainer's series for R, [k, b, b], from the upper triangles of S."""
    skew = triangles(g["skew"])
    if "scaled" in g.slots:
        skew = skew / (2 * np.sqrt(max(skew.shape[2] - 1, 1)))
    return series(skew, 5, doubled_last=False)


def onetrainer_oft(g: FormulaInput) -> Array:
    """Return W bd(R)ᵀ − W, for linear layers."""
    return inputs_turned(g.w, np.swapaxes(_neumann(g), 1, 2)) - g.w


def onetrainer_oft_conv(g: FormulaInput) -> Array:
    """Return W bd(R) − W, for convolutions."""
    return inputs_turned(g.w, _neumann(g)) - g.w


LYCORIS: Final = MappingProxyType({
    "lora": Reference(lora, linear="down"), "lora_sparse": Reference(lora_sparse),
    "lora_sparse_tucker": Reference(lora_sparse_tucker), "lora_fused": Reference(lora_fused),
    "lora_transposed": Reference(lora_transposed), "lora_switch": Reference(lora_switch),
    "loha": Reference(loha), "lokr": Reference(lokr),
    "glora": Reference(glora), "glora_old": Reference(glora_old), "tlora": Reference(tlora, whole=True, loss=64),
    "full": Reference(full), "full_rank": Reference(full_rank), "set": Reference(replace), "ia3": Reference(ia3),
    "diag_oft": Reference(diag_oft, loss=8), "oft_diag": Reference(oft_diag),
    "boft": Reference(boft, whole=True, loss=8),
    "onetrainer_oft": Reference(onetrainer_oft), "onetrainer_oft_conv": Reference(onetrainer_oft_conv),
})  # fmt: skip
