"""LoKr, ΔW = c · (w1 ⊗ w2). Yeh et al. 2023, arXiv:2309.14859, section 3.3; LyCORIS
lycoris/modules/lokr.py.

Either factor is stored whole or as a product a b; a convolution's kernel sits in w2, flattened, as
trailing axes, or in a Tucker core t2 (then w2_a is (r, rows)). c = α / r if a factor is a product;
if both are whole c = 1 and α means nothing (trainers store 1e10 or inf there). With rs_lora and
whole factors LyCORIS trains with √r and stores α = r^1.5: only the metadata shows it.

PEFT 0.21 passes w1 and a whole w2 with one kernel axis to `torch.kron`, which pairs w1's rows and
columns with w2's columns and kernel. PEFT trains that product, so it is merged (`right_aligned`).
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Bypass, Factorisation, Shape, Shapes, alpha_over, expect, flat, same_inputs, tucker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Scalar


class LokrTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked; out = l·p, cols = m·q."""

    scale: Scalar  # c
    rs_scale: Scalar  # c if the metadata says rs_lora
    w1: Tensor | None = None  # [n, l, m]
    w1_a: Tensor | None = None  # [n, l, r]
    w1_b: Tensor | None = None  # [n, r, m]
    w2: Tensor | None = None  # [n, p, q]; with one kernel axis [n, p, q / k, k]
    w2_a: Tensor | None = None  # [n, p, r]; with a core [n, r, p]
    w2_b: Tensor | None = None  # [n, r, q]; with a core [n, r, q / k]
    t2: Tensor | None = None  # [n, r, r, k]
    rs_lora: bool = False
    right_aligned: bool = False  # whether w1 pairs with the last two axes of such a w2


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in LokrTensors."""
    fitted, (l, m), ones = _factor("w1", shapes)  # noqa: E741
    second, (p, inner), kernel = _factor("w2", shapes)
    expect(holds=prod(ones) == 1, otherwise=f"w1 has the kernel {list(ones)}, which only w2 can have")
    expect(
        holds=len(target) > 1 and l * p == target[0] and same_inputs((m * inner, *kernel), target[1:]),
        otherwise=f"w1 ⊗ w2 is {[l * p, m * inner, *kernel]}, the weight is {list(target)}",
    )
    return {**fitted, **second}


def _factor(name: str, shapes: Shapes) -> tuple[dict[str, Shape], tuple[int, int], Shape]:
    """Return the fitted shapes of one factor, its (rows, columns), and the kernel axes outside the columns."""
    a, b, t = f"{name}_a", f"{name}_b", name.replace("w", "t")
    present = {slot for slot in (name, a, b, t) if slot in shapes}
    if present == {name}:
        whole = shapes[name]
        expect(holds=len(whole) > 1, otherwise=f"{name} is {list(whole)}")
        flattened = whole if len(whole) == 3 and name == "w2" else flat(whole)
        return {name: flattened}, (whole[0], whole[1]), whole[2:]
    expect(
        holds=present - {t} == {a, b},
        otherwise=f"there is {sorted(present)}: needs {name} alone, or {a} and {b}",
    )
    (rows, rank), core = flat(shapes[a]), shapes.get(t)
    width, kernel = shapes[b][1:2], shapes[b][2:]
    expect(holds=len(width) == 1, otherwise=f"{b} is {list(shapes[b])}")
    if core is not None:
        rows, rank = rank, rows
        expect(
            holds=core[:2] == (rank, rank) and not kernel,
            otherwise=f"{t} is {list(core)}, {a} {list(shapes[a])}, {b} {list(shapes[b])}",
        )
        kernel = core[2:]
    expect(
        holds=shapes[b][0] == rank,
        otherwise=f"{a} has rank {rank}, {b} has rank {shapes[b][0]}",
    )
    fitted: dict[str, Shape] = {a: flat(shapes[a]), b: flat(shapes[b])}
    if core is not None:
        fitted[t] = (rank, rank, flat(core[1:])[1])
    return fitted, (rows, width[0]), kernel


def scalars_from(alpha: float | None, shapes: Shapes, target: Shape) -> Mapping[str, float]:
    """Return c, by the rule in the docstring of this module."""
    if "w1" in shapes and "w2" in shapes:
        known = alpha is not None and 0 < alpha < inf
        return {"scale": 1.0, "rs_scale": alpha ** (1 / 3) if alpha and known else 1.0}
    scale = alpha_over("w2_b" if "w2_b" in shapes else "w1_b")(alpha, shapes, target)["scale"]
    return {"scale": scale, "rs_scale": scale}


def delta(base: Tensor, t: LokrTensors) -> Tensor:
    """Return ΔW [n, out, cols] in one product; `base` is not read."""
    left, right = _factors(t, t.rs_scale if t.rs_lora else t.scale)
    return (left * right).view(base.shape)


def accumulate(acc: Tensor, t: LokrTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc in place, without storing ΔW."""
    left, right = _factors(t, (t.rs_scale if t.rs_lora else t.scale) * strength)
    blocks = [max(sizes) for sizes in zip(left.shape, right.shape, strict=True)]
    acc.view(blocks).addcmul_(left, right)


def _factors(t: LokrTensors, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale · w1 as [n, l, 1, m, 1] and w2 as [n, 1, p, 1, q]: their product is ΔW in blocks."""
    w1 = t.w1 if t.w1_a is None or t.w1_b is None else t.w1_a @ t.w1_b
    w2 = t.w2
    if t.w2_a is not None and t.w2_b is not None:
        w2 = t.w2_a @ t.w2_b if t.t2 is None else t.w2_a.mT @ tucker(t.t2, t.w2_b)
    assert w1 is not None and w2 is not None, "fitted_shapes lets no other combination through"
    w1 = w1 * scale
    if w2.dim() == 4 and t.right_aligned:
        return w1[:, None, :, None, :, None], w2[:, :, None, :, None, :]
    return w1[:, :, None, :, None], w2.flatten(2)[:, None, :, None, :]


def factors(base: Tensor, t: LokrTensors) -> tuple[Tensor, Tensor]:
    """Return the Kronecker products of the left and of the right factors of w1 and w2; `base` is not read."""
    import torch

    u1, v1 = _pair(t.w1, t.w1_a, t.w1_b)
    w2 = t.w2 if t.w2 is None else t.w2.flatten(2)
    u2, v2 = _pair(w2, t.w2_a if t.t2 is None or t.w2_a is None else t.w2_a.mT,
                   t.w2_b if t.t2 is None or t.w2_b is None else tucker(t.t2, t.w2_b))  # fmt: skip
    u1 = u1 * (t.rs_scale if t.rs_lora else t.scale)
    n = len(u1)
    if t.w2 is not None and t.w2.dim() == 4 and t.right_aligned:
        left = torch.einsum("nla,npb->nplab", u1, u2)
        right = torch.einsum("nam,nbqk->nabqmk", v1, v2.reshape(n, u2.shape[2], *t.w2.shape[2:]))
    else:
        left, right = torch.einsum("nla,npb->nlpab", u1, u2), torch.einsum("nam,nbq->nabmq", v1, v2)
    return left.flatten(1, 2).flatten(2), right.flatten(1, 2).flatten(2)


def _pair(whole: Tensor | None, up: Tensor | None, down: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two factors of w1 or w2; of a whole matrix one is an identity, on its shorter side."""
    import torch

    if up is not None and down is not None:
        return up, down
    assert whole is not None, "fitted_shapes lets no other combination through"
    n, rows, cols = whole.shape
    identity = torch.eye(min(rows, cols), dtype=whole.dtype, device=whole.device).expand(n, -1, -1)
    return (identity, whole) if rows <= cols else (whole, identity)


def _rank(shapes: Shapes, _: Shape) -> int:
    """Return the product of the ranks of w1 and w2."""
    whole = [min(flat(shapes[slot])) for slot in ("w1", "w2") if slot in shapes]
    return prod([*whole, *(shapes[slot][0] for slot in ("w1_b", "w2_b") if slot in shapes)])


def weight_shape(shapes: Shapes) -> Shape | None:
    """Return the shape of the weight; None if no kernel says how the columns of w2 are cut."""
    sides = []
    for name in ("w1", "w2"):
        core = shapes.get(name.replace("w", "t"))
        if name in shapes:
            sides.append(shapes[name])
        elif f"{name}_a" in shapes and f"{name}_b" in shapes:
            a, b = shapes[f"{name}_a"], shapes[f"{name}_b"]
            sides.append((a[0], *b[1:]) if core is None else (a[1], b[1], *core[2:]))
    if len(sides) != 2 or len(sides[0]) != 2 or len(sides[1]) < 2:
        return None
    (rows, cols), (p, q, *kernel) = sides
    return (rows * p, cols * q, *kernel)


LOKR = Algorithm(
    "lokr", LokrTensors, fitted_shapes, delta, "arXiv:2309.14859", scalars_from=scalars_from,
    row_axes={"w1": 0, "w1_a": 0}, not_sliceable_with=frozenset({"right_aligned"}), accumulate=accumulate,
    low_rank=Factorisation(_rank, factors), weight_shape=weight_shape,
    bypass=Bypass(no_magnitude=True, groups="other"),
)  # fmt: skip
