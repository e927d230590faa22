"""VB-LoRA, ΔW = B A, both mixed from one bank of vectors. Li et al. 2024, arXiv:2405.15179, section
3.

Every piece of length L of A's rows and B's columns is a softmax mixture of the k bank vectors with
the largest logits. Files may store those k indices and the first k − 1 weights instead of all
logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Checks, Factorisation, Shape, Shapes, expect, flat, of_factors, rank_of
from .bounds import COUNT, Bounds, below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices


class VbTensors(NamedTuple):
    """The logits over the bank."""

    down: Tensor  # [n, r, in/L, vectors]
    up: Tensor  # [n, out/L, r, vectors]
    bank: Tensor  # [n, vectors, L]; shared
    top: int  # `topk`


class VbTopTensors(NamedTuple):
    """The k chosen vectors, and all their weights except the last, which makes the sum 1."""

    down_choice: Indices  # [n, r, in/L, k]
    down_weight: Tensor  # [n, r, in/L, k − 1]
    up_choice: Indices  # [n, out/L, r, k]
    up_weight: Tensor  # [n, out/L, r, k − 1]
    bank: Tensor  # [n, vectors, L]; shared


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes; the pieces must tile the weight."""
    down, up, bank = _three(shapes, "down", "up")
    _tile(down, up, bank, target)
    expect(
        holds=down[2] == up[2] == bank[0],
        otherwise=f"{down[2]} and {up[2]} logits for {bank[0]} vectors",
    )
    return {"down": down, "up": up, "bank": bank}


def fitted_shapes_top(shapes: Shapes, target: Shape) -> Shapes:
    """Return the stored shapes; the pieces must tile the weight, with one weight fewer than choices."""
    down, up, bank = _three(shapes, "down_choice", "up_choice")
    _tile(down, up, bank, target)
    for side, stored in (("down", down), ("up", up)):
        weights = shapes[f"{side}_weight"]
        expect(
            holds=weights == (*stored[:2], stored[2] - 1),
            otherwise=f"{side}: {list(weights)} for {list(stored)}",
        )
    return {"down_choice": down, "down_weight": (*down[:2], down[2] - 1),
            "up_choice": up, "up_weight": (*up[:2], up[2] - 1), "bank": bank}  # fmt: skip


def _three(shapes: Shapes, down: str, up: str) -> tuple[Shape, Shape, Shape]:
    a, b, bank = shapes[down], shapes[up], shapes.get("bank", ())
    expect(
        holds=len(a) == 3 == len(b) and len(bank) == 2 and bank[0] > 0,
        otherwise=f"they are {list(a)}, {list(b)}, {list(bank)}",
    )
    return a, b, bank


def _tile(down: Shape, up: Shape, bank: Shape, target: Shape) -> None:
    (out, cols), length = flat(target), bank[1]
    expect(
        holds=down[1] * length == cols and up[0] * length == out and down[0] == up[1],
        otherwise=f"{list(down[:2])} and {list(up[:2])} pieces of {length} do not make a {out}×{cols} weight",
    )


def factors(base: Tensor, t: VbTensors) -> tuple[Tensor, Tensor]:
    """Return B and A; `base` is not read."""
    return _pair(_mix(t.down, t.bank, t.top), _mix(t.up, t.bank, t.top))


def top_factors(base: Tensor, t: VbTopTensors) -> tuple[Tensor, Tensor]:
    """Return B and A; `base` is not read."""
    return _pair(_pick(t.down_choice, t.down_weight, t.bank), _pick(t.up_choice, t.up_weight, t.bank))


def entries(shapes: Shapes, _: Shape) -> list[Bounds]:
    """Return the range of indices into the bank."""
    return [below(shapes["bank"][0])]


def _mix(logits: Tensor, bank: Tensor, top: int) -> Tensor:
    largest, chosen = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return _weigh(chosen, largest.softmax(dim=-1), bank)


def _pick(chosen: Tensor, weights: Tensor, bank: Tensor) -> Tensor:
    import torch

    return _weigh(chosen, torch.cat((weights, 1 - weights.sum(dim=-1, keepdim=True)), dim=-1), bank)


def _weigh(chosen: Tensor, weights: Tensor, bank: Tensor) -> Tensor:
    """Return [n, ·, ·, L]: sparse weights over the bank, times the bank."""
    dense = weights.new_zeros(*weights.shape[:-1], bank.shape[1]).scatter_add_(-1, chosen, weights)
    return (dense.flatten(1, 2) @ bank).reshape(*dense.shape[:-1], bank.shape[2])


def _pair(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return B and A from pieces [n, r, in/L, L] and [n, out/L, r, L]."""
    return up.transpose(2, 3).flatten(1, 2), down.flatten(2)


VBLORA = of_factors(
    "vblora", VbTensors, fitted_shapes, Factorisation(rank_of("down"), factors), "arXiv:2405.15179",
    shared=frozenset({"bank"}), checks=Checks({"top": lambda _s, _t: [Bounds(1, COUNT.end)]}),
)  # fmt: skip
VBLORA_TOP = of_factors(
    "vblora_top", VbTopTensors, fitted_shapes_top, Factorisation(rank_of("down_choice"), top_factors),
    "arXiv:2405.15179",
    shared=frozenset({"bank"}), checks=Checks({"up_choice": entries, "down_choice": entries}),
)  # fmt: skip
