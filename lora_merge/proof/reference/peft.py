"""Reference formulas of PEFT's tuners, without those that turn by blocks (rotations.py).

Plain float64; `algorithms/` names the papers.
"""

from __future__ import annotations

from math import comb
from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .formula_input import FormulaInput, Reference
from .lycoris import expert_rows, lora, triples
from .rotations import bounded, cayley, series, triangles

COMPUTED: Final = frozenset(f"db{n}" for n in range(1, 11))
"""Daubechies' wavelets whose filters are computed from their definition. For longer ones that loses digits; their
filters, and those of other families, are the tables of PyWavelets."""


def adalora(g: FormulaInput) -> Array:
    """Return B diag(E) A."""
    return g.scalars["scale"] * (g.some("up") @ np.diag(g["values"].reshape(-1)) @ g["down"])


def lora_bias(g: FormulaInput) -> Array:
    """Return a scaled vector."""
    return g.scalars["scale"] * g.some("diff")


def embedding(g: FormulaInput) -> Array:
    """Return (B A)ᵀ."""
    return g.scalars["scale"] * (g["up"] @ g["down"][:, g.rows]).T


def experts(g: FormulaInput) -> Array:
    """Return ΔW of stacked experts: expert e has rows e·r … of A and every E-th column of B."""
    which, inside = expert_rows(g)
    first = g.read("up", np.array([0]))
    result = np.empty((len(which), g.shape[2]))
    for e in np.unique(which):
        down, rows = g.read("down", np.array([e]))[0], which == e
        if first.ndim == 4:  # the first entry is all of B: each ΔW[e] is transposed
            result[rows] = (first[0, :, :, e] @ down[:, inside[rows]]).T
        else:
            result[rows] = g.read("up", inside[rows])[:, :, e] @ down
    return g.scalars["scale"] * result.reshape(len(g.rows), g.cols)


def stacked(g: FormulaInput) -> Array:
    """Return ΔW of stacked experts with factors of three axes, of which a factor of one entry is for all experts."""
    which, inside = expert_rows(g)
    up, down = g["up"], g["down"]
    result = np.empty((len(which), g.shape[2]))
    for e in np.unique(which):
        rows = which == e
        result[rows] = up[min(e, len(up) - 1), inside[rows]] @ down[min(e, len(down) - 1)]
    return g.scalars["scale"] * result.reshape(len(g.rows), g.cols)


def bdlora(g: FormulaInput) -> Array:
    """Return B A if one factor is block-diagonal: its block j is multiplied by share j of the other factor."""
    up, down = g["up"], g["down"]
    k, rank, _ = down.shape
    if up.shape == (k, g.out // k, rank):  # the blocks of B
        result = np.concatenate([up[j] @ down[j] for j in range(k)])
    else:
        result = np.concatenate([up[:, j] @ down[j] for j in range(k)], axis=1)
    return g.scalars["scale"] * result[g.rows]


def c3a(g: FormulaInput) -> Array:
    """Return a matrix of circulant blocks."""
    kernel = g["kernel"]
    b = kernel.shape[2]
    block, p = np.divmod(g.rows, b)
    shifted = (np.arange(b)[None, :] - p[:, None]) % b  # [rows, q]
    picked = np.take_along_axis(kernel[block], shifted[:, None, :], axis=2)
    return picked.reshape(len(g.rows), -1) / g.cols


def deft(g: FormulaInput) -> Array:
    """Return Q (c R − Pᵀ W)."""
    p = g["subspace"]
    q = np.linalg.qr(p)[0] if g.settings.get("method") == "qr" else p
    inner = -(q if g.settings.get("method") == "qr" else np.maximum(p, 0)).T @ g.all_w
    return (q @ (inner + (g.scalars["scale"] * g["content"] if "content" in g.slots else 0)))[g.rows]


def delora(g: FormulaInput) -> Array:
    """Return the product of both factors' unit vectors times λ / r, its columns times w."""
    b, a = g["up"], g["down"]
    result = np.zeros((len(g.rows), g.cols))
    for i in range(len(a)):
        size = max(float(np.sqrt(b[:, i] @ b[:, i])), 1e-4) * max(float(np.sqrt(a[i] @ a[i])), 1e-4)
        result += np.outer(b[g.rows, i], a[i]) / size
    return result * g["length"].reshape(-1)[0] / max(len(a), 1) * g["norms"].reshape(-1)


def fourierft(g: FormulaInput) -> Array:
    """Return the real part of the inverse Fourier transform of a few entries."""
    u, v = np.divmod(g.places("places", g.out * g.cols), g.cols)
    value = g["spectrum"].reshape(-1) * g.scalars["scale"] / (g.out * g.cols)
    by_row = np.exp(2j * np.pi * np.outer(g.rows, u) / g.out) * value
    columns = np.zeros((len(g.rows), g.cols), dtype=complex)
    np.add.at(columns.T, v, by_row.T)
    return (np.fft.ifft(columns, axis=1) * g.cols).real


def gralora(g: FormulaInput) -> Array:
    """Return blocks (j, m), from block m of the inputs and block j of the outputs, plus an optional B A."""
    inputs, outputs = g["inputs"], g["outputs"]
    blocks = [[(inputs[m][:, j] @ outputs[j][m]).T for m in range(len(inputs))] for j in range(len(outputs))]
    result = np.block(blocks)[g.rows]
    if "up" in g.slots:
        result = result + g.some("up") @ g["down"]
    return g.scalars["scale"] * result


def hira(g: FormulaInput) -> Array:
    """Return W times a low-rank matrix, element by element."""
    return g.w * (g.some("up") @ g["down"])


def hira_embedding(g: FormulaInput) -> Array:
    """Return W times a transposed low-rank matrix, element by element, for an embedding."""
    return g.w * (g["up"] @ g["down"][:, g.rows]).T


def hra(g: FormulaInput) -> Array:
    """Return W after all reflections less W."""
    w, u = g.w.copy(), g["vectors"]
    before = w.copy()
    basis = np.linalg.qr(u)[0] if g.settings.get("orthogonal") else u / np.sqrt(np.sum(u * u, axis=0))
    for i in range(basis.shape[1]):
        w -= 2 * np.outer(w @ basis[:, i], basis[:, i])
    return w - before


def miss(g: FormulaInput) -> Array:
    """Return ΔW[o, i] = D[i mod r, o mod width]."""
    block = g["block"]
    return block[np.arange(g.cols)[None, :] % len(block), g.rows[:, None] % block.shape[1]]


def miss_bat(g: FormulaInput) -> Array:
    """Return (W + I) D in square blocks."""
    block, w = g["block"], g.w
    rank = block.shape[1]
    result = np.empty_like(w)
    for n, (a, p) in enumerate(zip(*np.divmod(g.rows, rank), strict=True)):
        pieces = w[n].reshape(-1, rank)
        result[n] = (pieces @ block[a] + block[a][p]).reshape(-1)
    return result


def osf(g: FormulaInput) -> Array:
    """Return the trained singular triples less the smallest ones of the weight, which they replace."""
    values = g["values"].reshape(-1)
    return g.some("left") @ np.diag(values) @ g["right"] - triples(g, values.size, "last")


def pissa(g: FormulaInput) -> Array:
    """Return B A less the weight's best approximation of the same rank."""
    return lora(g) - triples(g, len(g["down"]), "principal")


def olora(g: FormulaInput) -> Array:
    """Return B A less the first columns of Q times the first rows of R, for W = Q R."""
    q, r = np.linalg.qr(g.all_w)
    rank = len(g["down"])
    return lora(g) - g.scalars["scale"] * (q[g.rows, :rank] @ r[:rank])


def kasa(g: FormulaInput) -> Array:
    """Return B diag(E) A less the smallest singular triples of the weight."""
    return adalora(g) - triples(g, len(g["down"]), "last")


def ia3_out(g: FormulaInput) -> Array:
    """Return W with its rows times their factors less W."""
    return (g.some("factor").reshape(-1, 1) - 1) * g.w


def ia3_in(g: FormulaInput) -> Array:
    """Return W with its inputs times their factors less W; groups of rows may have their own factors."""
    factor = g["factor"]
    group = g.rows * len(factor) // g.out
    return g.w * (np.repeat(factor[group], g.cols // factor.shape[1], axis=1) - 1)


def randlora(g: FormulaInput) -> Array:
    """Return the sum over pairs (k, i), which one factor counts by k first and the other by i first."""
    lam, gamma, a, b = g["rank_scale"], g["side_scale"], g["down"], g["up"]
    (rank, count), small, large = lam.shape, gamma.shape[1], max(g.out, g.cols)
    rows = np.array([lam[k, i] * a[k, 0, :small] * gamma[i] for k in range(rank) for i in range(count)])
    columns = np.array([b[:large, i, k] for i in range(count) for k in range(rank)]).T
    if small == g.cols:
        return g.scalars["scale"] * (columns[g.rows] @ rows)
    return g.scalars["scale"] * (columns @ rows[:, g.rows]).T


def road(g: FormulaInput) -> Array:
    """Return W with pairs of rows, half a group apart, rotated and stretched, less W."""
    theta, alpha, size = g["theta"].reshape(-1), g["stretch"].reshape(-1), int(g.settings["group"])
    group, inside = np.divmod(g.rows, size)
    half, kinds = size // 2, len(theta) * 2 // g.out
    if kinds == 1:
        keep_at = turn_at = group * half + inside % half
    elif kinds == 2:
        keep_at = turn_at = g.rows
    else:
        keep_at = group * 2 * size + inside
        turn_at = keep_at + size
    keep, turn = alpha[keep_at] * np.cos(theta[keep_at]), alpha[turn_at] * np.sin(theta[turn_at])
    upper = inside < half
    partner = np.where(upper, g.rows + half, g.rows - half)
    order = np.argsort(partner)
    other = np.empty((len(g.rows), g.cols))
    other[order] = g.base(partner[order])
    sign = np.where(upper, -1.0, 1.0)
    return (keep[:, None] - 1) * g.w + (turn * sign)[:, None] * other


def shira(g: FormulaInput) -> Array:
    """Return a matrix of the values at their rows and columns."""
    rows, cols = g.places("places", g.out, g.cols)
    return _scattered(g, rows, cols, g["values"].reshape(-1))


def supertuning(g: FormulaInput) -> Array:
    """Return a matrix of the values at row-major positions, plus an optional B A."""
    rows, cols = np.divmod(g.places("places", g.out * g.cols), g.cols)
    change = _scattered(g, rows, cols, g["values"].reshape(-1))
    return change + (lora(g) if "up" in g.slots else 0.0)


def _scattered(g: FormulaInput, rows: Array, cols: Array, values: Array) -> Array:
    place = np.full(g.out, -1)
    place[g.rows] = np.arange(len(g.rows))
    change, inside = np.zeros((len(g.rows), g.cols)), place[rows] >= 0
    np.add.at(change, (place[rows[inside]], cols[inside]), values[inside])
    return change


def vblora(g: FormulaInput) -> Array:
    """Return B A whose vectors are bank vectors, weighed by the softmax of the largest logits."""
    bank, top = g["bank"], g.settings.get("top", 2)

    def mixed(logits: Array) -> Array:
        chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :top]
        largest = np.take_along_axis(logits, chosen, axis=-1)
        weight = np.exp(largest - largest.max(axis=-1, keepdims=True))
        return np.einsum("...k,...kl->...l", weight / weight.sum(axis=-1, keepdims=True), bank[chosen])

    return _from_pieces(g, mixed(g["down"]), mixed(g["up"]))


def vblora_top(g: FormulaInput) -> Array:
    """Return B A whose vectors are the chosen bank vectors, weighed; the last weight makes their sum 1."""
    bank = g["bank"]

    def mixed(chosen: Array, weight: Array) -> Array:
        weight = np.concatenate([weight, 1 - weight.sum(axis=-1, keepdims=True)], axis=-1)
        return np.einsum("...k,...kl->...l", weight, bank[chosen])

    down, up = (mixed(g.places(f"{side}_choice", len(bank)), g[f"{side}_weight"]) for side in ("down", "up"))
    return _from_pieces(g, down, up)


def _from_pieces(g: FormulaInput, down: Array, up: Array) -> Array:
    """Return B A, from rows of A in pieces [r, in/L, L] and columns of B in pieces [out/L, r, L]."""
    piece, inside = np.divmod(g.rows, up.shape[2])
    return up[piece, :, inside] @ down.reshape(len(down), g.cols)


def vera(g: FormulaInput) -> Array:
    """Return diag(b) B diag(d) A, cut to size; of a doubled rank (PVeRA) only the first half, the mean, is used."""
    up = g["up"]
    rank = up.shape[1]
    inner = g["rank_scale"].reshape(-1)[:rank, None] * g["down"][:rank, : g.cols]
    return g.some("out_scale").reshape(-1, 1) * (up[g.rows] @ inner)


def glora(g: FormulaInput) -> Array:
    """Return W ⊙ A + B."""
    return g.w * _letter(g, "a") + _letter(g, "b")


def glora_bias(g: FormulaInput) -> Array:
    """Return b ⊙ D + E + W C; if the adapter has its own b, plus its difference to the base's."""
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
    return np.asarray(g.scalars["scale"] * np.concatenate(parts)[g.rows])


def lora_xs(g: FormulaInput) -> Array:
    """Return U M Vᵀ."""
    return np.asarray(g.scalars["scale"] * (g.some("left") @ (g["core"] @ g["right"].T)))


def bora(g: FormulaInput) -> Array:
    """Return V with the lengths of its rows, then of its columns, replaced, minus W."""
    v = g.all_w + g.scalars["scale"] * (g["up"] @ g["down"])
    v = g["rows"].reshape(-1, 1) * v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12)
    v = g["columns"].reshape(1, -1) * v / np.maximum(np.linalg.norm(v, axis=0, keepdims=True), 1e-12)
    return np.asarray((v - g.all_w)[g.rows])


def _low_pass(moments: int) -> Array:
    """Return Daubechies' reconstruction filter from the zeros of its polynomial."""
    y = np.polynomial.Polynomial([comb(moments - 1 + k, k) for k in range(moments)]).roots().astype(complex)
    zeros = [min(np.roots([1, 4 * zero - 2, 1]), key=abs) for zero in y]
    filled = np.real(np.poly([*zeros, *[-1.0] * moments]))
    return np.asarray(filled * np.sqrt(2) / filled.sum())


def _synthesis(taps: Array, count: int) -> Array:
    """Return [2 · count − len + 2, count]: column j holds the filter from row 2j on, the ends cut."""
    whole = np.zeros((2 * count + len(taps) - 2, count))
    for j in range(count):
        whole[2 * j : 2 * j + len(taps), j] = taps
    cut = len(taps) - 2
    return whole[cut : len(whole) - cut]


def waveft(g: FormulaInput) -> Array:
    """Return a matrix of few coefficients, or the inverse wavelet transform of its four bands."""
    rows, cols = np.divmod(g.places("places", g.out * g.cols), g.cols)
    values = g["spectrum"].reshape(-1) * g.scalars["scale"]
    if not g.settings["transform"]:
        plain = np.zeros((g.out, g.cols))
        plain[rows, cols] = values
        return plain[g.rows]
    family = str(g.settings["family"])
    low = _low_pass(int(family[2:])) if family in COMPUTED else g["filters"].reshape(2, -1)[0]
    high = low[::-1] * (-1.0) ** np.arange(len(low))
    height, width = ((n + len(low) - 1) // 2 * 2 for n in (g.out, g.cols))
    dense = np.zeros((height, width))
    dense[rows + (height - g.out) // 2, cols + (width - g.cols) // 2] = values
    down, across = ([_synthesis(taps, n // 2) for taps in (low, high)] for n in (height, width))
    h, w = height // 2, width // 2
    bands = ((0, 0, dense[:h, :w]), (1, 0, dense[:h, w:]), (0, 1, dense[h:, :w]), (1, 1, dense[h:, w:]))
    done = sum(down[a] @ band @ across[b].T for a, b, band in bands)
    return np.asarray(done)[g.rows, : g.cols]


def _activation(name: str, x: Array) -> Array:
    """Return an activation by its definition; numpy has no error function, so GELU uses the standard library's."""
    from math import erf, pi, sqrt

    logistic = 1 / (1 + np.exp(-x))
    softplus = np.logaddexp(0, x)
    formulas = {
        "relu": np.maximum(x, 0), "relu6": np.clip(x, 0, 6), "leaky_relu": np.where(x < 0, 0.01 * x, x),
        "tanh": np.tanh(x), "sigmoid": logistic, "silu": x * logistic, "swish": x * logistic,
        "mish": x * np.tanh(softplus), "gelu": x / 2 * (1 + np.vectorize(erf)(x / sqrt(2))),
        "gelu_pytorch_tanh": x / 2 * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    }  # fmt: skip
    return np.asarray(formulas[name])


def peanut(g: FormulaInput) -> Array:
    """Return the output of a small network with mirrored shortcuts, whose input is the weight's columns."""
    name, depth = str(g.settings["activation"]), int(g.settings["depth"])
    states = [_activation(name, g["down"] @ g.all_w)]
    for i in range(depth):
        states.append(_activation(name, g[f"encoder_{i}"] @ states[-1]))
    hidden = states.pop()
    for i in range(depth):
        hidden = _activation(name, g[f"decoder_{i}"] @ hidden) + states.pop()
    return g.scalars["scale"] * (g.some("up") @ hidden)


def unilora(g: FormulaInput) -> Array:
    """Return the product of two factors whose entries are entries of one vector."""
    theta = g["bank"].reshape(-1)
    up = theta[g.places("up_choice", len(theta))[g.rows]] * g.some("up_weight")
    return np.asarray(up @ (theta[g.places("down_choice", len(theta))] * g["down_weight"]))


PEFT: Final = MappingProxyType({
    "adalora": Reference(adalora), "lora_bias": Reference(lora_bias), "lora_embedding": Reference(embedding),
    "lora_experts": Reference(experts), "lora_experts_transposed": Reference(experts),
    **{f"lora_stacked{shared}": Reference(stacked) for shared in ("", "_down", "_up")},
    "bdlora": Reference(bdlora), "c3a": Reference(c3a), "deft": Reference(deft, whole=True, loss=8),
    "delora": Reference(delora), "fourierft": Reference(fourierft, loss=8), "gralora": Reference(gralora),
    "hira": Reference(hira), "hira_embedding": Reference(hira_embedding), "hra": Reference(hra, loss=8),
    "miss": Reference(miss), "miss_mini": Reference(miss), "miss_bat": Reference(miss_bat),
    "osf": Reference(osf, whole=True, loss=64), "pissa": Reference(pissa, whole=True, loss=64),
    "olora": Reference(olora, whole=True, loss=64), "kasa": Reference(kasa, whole=True, loss=64),
    "peft_ia3_out": Reference(ia3_out), "peft_ia3_in": Reference(ia3_in), "randlora": Reference(randlora),
    "road": Reference(road), "shira": Reference(shira), "supertuning": Reference(supertuning),
    "vblora": Reference(vblora), "vblora_top": Reference(vblora_top), "vera": Reference(vera),
    "pvera": Reference(vera),
    "peft_glora": Reference(glora), "peft_glora_bias": Reference(glora_bias), "psoft": Reference(psoft, whole=True),
    "adamss": Reference(adamss, whole=True), "tinylora": Reference(tinylora),
    "lora_blocks": Reference(lora_blocks), "lora_xs": Reference(lora_xs), "bora": Reference(bora, whole=True, loss=8),
    "frod": Reference(frod, whole=True, loss=64),
    "waveft": Reference(waveft), "peanut": Reference(peanut, whole=True), "unilora": Reference(unilora),
})  # fmt: skip
