"""Reference formulas of PEFT's tuners that transform coefficients or read the weight. Plain float64."""

from __future__ import annotations

from math import comb
from types import MappingProxyType
from typing import Final

import numpy as np

from .floats import Array
from .formula_input import FormulaInput, Reference

COMPUTED: Final = frozenset(f"db{n}" for n in range(1, 11))
"""Daubechies' wavelets whose filters are computed from their definition. For longer ones that loses digits; their
filters, and those of other families, are the tables of PyWavelets."""


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
    values = g["spectrum"].reshape(-1) * g.numbers["scale"]
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
    return g.numbers["scale"] * (g.some("up") @ hidden)


def unilora(g: FormulaInput) -> Array:
    """Return the product of two factors whose entries are entries of one vector."""
    theta = g["bank"].reshape(-1)
    up = theta[g.places("up_choice", len(theta))[g.rows]] * g.some("up_weight")
    return np.asarray(up @ (theta[g.places("down_choice", len(theta))] * g["down_weight"]))


TRANSFORMS: Final = MappingProxyType({
    "waveft": Reference(waveft), "peanut": Reference(peanut, whole=True), "unilora": Reference(unilora),
})  # fmt: skip
