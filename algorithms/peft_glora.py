"""GLoRA as PEFT has it: W' = W + W ⊙ A + B, and for the bias b' = b + b ⊙ D + E + W C. PEFT 0.21.2
tuners/glora/layer.py.

Only the name is that of LyCORIS' GLoRA: here A is multiplied with W element by element. Each letter is a product of two
factors, or one tensor: a vector, a number, or zeros in the shape of the whole. PEFT stores the zeros and loads them, so
they are read like other values. A layer without a bias has zeros for C, D and E, which are not read. If the bias was
trained too (`bias`), the adapter stores the trained bias, which then takes the place of b on the right.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, expect_shapes, flat

if TYPE_CHECKING:
    from torch import Tensor


class PeftGloraTensors(NamedTuple):
    """A and B, each either one tensor of [n, out or 1, cols or 1] or a pair of factors."""

    a: Tensor | None = None
    a_up: Tensor | None = None  # [n, out, r]
    a_down: Tensor | None = None  # [n, r, cols]
    b: Tensor | None = None
    b_up: Tensor | None = None  # [n, out, r]
    b_down: Tensor | None = None  # [n, r, cols]


class PeftGloraBiasTensors(NamedTuple):
    """C, D and E, and the weight of the same layer before the merge."""

    d: Tensor  # [n, out or 1, 1]
    e: Tensor  # [n, out or 1, 1]
    weight: Tensor  # [n, out, in]; the base's
    c: Tensor | None = None  # [n, in, 1]
    c_up: Tensor | None = None  # [n, in, r]
    c_down: Tensor | None = None  # [n, r, 1]
    trained: Tensor | None = None  # b as it was trained, [n, out, 1]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in PeftGloraTensors."""
    expect(holds=len(target) == 2, otherwise=f"the weight is {list(target)}, PEFT's GLoRA is for linear layers only")
    return {**_letter(shapes, "a", flat(target)), **_letter(shapes, "b", flat(target))}


def fitted_shapes_bias(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in PeftGloraBiasTensors."""
    out, weight = prod(target), flat(shapes["weight"])
    expect(holds=weight[0] == out, otherwise=f"the weight has {weight[0]} rows, the bias {out}")
    inputs = _letter(shapes, "c", (weight[1], 1))
    for slot in ("d", "e"):
        expect(
            holds=shapes[slot] in ((out,), (1,)),
            otherwise=f"{slot} is {list(shapes[slot])}, the bias has {out} numbers",
        )
    fitted = {**inputs, "d": (prod(shapes["d"]), 1), "e": (prod(shapes["e"]), 1), "weight": weight}
    if "trained" in shapes:
        fitted |= {"trained": (*expect_shapes(shapes, {"trained": (out,)})["trained"], 1)}
    return fitted


def _letter(shapes: Shapes, name: str, size: tuple[int, int]) -> Shapes:
    """Return the shapes of one letter, a matrix of this size."""
    up, down = f"{name}_up", f"{name}_down"
    if name in shapes:
        stored = shapes[name]
        known = {size: size, (size[0], 1): (size[0], 1), (1,): (1, 1)}
        expect(
            holds=stored in known and not {up, down} & shapes.keys(),
            otherwise=f"{name} is {list(stored)} with {sorted({up, down} & shapes.keys())}, not {list(size)}",
        )
        return {name: known[stored]}
    expect(holds={up, down} <= shapes.keys(), otherwise=f"{name} is not complete")
    rank = shapes[up][-1] if shapes[up] else 0
    return expect_shapes(shapes, {up: (size[0], rank), down: (rank, size[1])})


def delta(base: Tensor, t: PeftGloraTensors) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`."""
    change = base * _matrix(t.a, t.a_up, t.a_down)
    return change.add_(_matrix(t.b, t.b_up, t.b_down))


def delta_bias(base: Tensor, t: PeftGloraBiasTensors) -> Tensor:
    """Return Δb [n, out, 1] from the untouched `base`."""
    if t.c is not None:
        through = t.weight @ t.c
    else:
        assert t.c_up is not None and t.c_down is not None, "fitted_shapes"
        through = (t.weight @ t.c_up) @ t.c_down
    bias = base if t.trained is None else t.trained
    changed = through.addcmul_(bias, t.d.expand_as(base)).add_(t.e)
    return changed if t.trained is None else changed.add_(t.trained - base)


def _matrix(whole: Tensor | None, up: Tensor | None, down: Tensor | None) -> Tensor:
    """Return the matrix of a letter, in a shape that broadcasts to the whole matrix."""
    if whole is not None:
        return whole
    assert up is not None and down is not None, "fitted_shapes"
    return up @ down


PEFT_GLORA = Algorithm(
    "peft_glora", PeftGloraTensors, fitted_shapes, delta, "arXiv:2306.07967",
    row_axes={"a": 0, "a_up": 0, "b": 0, "b_up": 0}, reads_base=True,
)  # fmt: skip
PEFT_GLORA_BIAS = Algorithm(
    "peft_glora_bias", PeftGloraBiasTensors, fitted_shapes_bias, delta_bias, "arXiv:2306.07967",
    reads_base=True, base_slots={"weight": "weight"}, value="trained",
    parameter="bias",
)  # fmt: skip
