"""One example-maker per row of ALGORITHMS: what the row's files may look like, in small.

An `Example` is a weight's shape and the stored shape of each slot. Everything else has a default: values
are normal noise, all zeros is the adapter that changes nothing. The laws run over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lora_merge.algorithms import ALGORITHMS, Shape
from tests.algorithms.pipeline import Stacked, stack

Maker = Callable[[torch.Generator], Tensor]

INPUTS = (1, 2, 3)


@dataclass(frozen=True)
class Example:
    """One layer as a file may hold it."""

    label: str
    target: Shape
    slots: Mapping[str, Shape]
    values: Mapping[str, Maker] = field(default_factory=dict)
    """Makers of what cannot be normal noise: indices, flags."""
    neutral: Callable[[Tensor, dict[str, Tensor]], dict[str, Tensor]] | None = None
    """(weight, stored) → slots of an adapter that changes nothing, where zeros are not that."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    alpha: float | None = None
    blind: tuple[int, ...] = ()
    """Axes of the weight whose length the adapter does not know."""
    free: tuple[tuple[str, int], ...] = ()
    """(slot, axis) whose length may be another one."""
    unnoticed: tuple[str, ...] = ()
    """Slots without which the rest is a file of another kind; only a configuration tells."""
    spread: float = 0.3
    """Standard deviation of the noise."""

    def layer(self, g: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        """A weight and the stored tensors; numbers that bf16 holds, so that all dtypes start equal."""
        weight = torch.randn(self.target, generator=g).bfloat16().to(dtype)
        stored = {}
        for slot, shape in self.slots.items():
            if slot in self.values:
                stored[slot] = self.values[slot](g)
            else:
                noise = torch.randn(shape, generator=g) * self.spread
                stored[slot] = noise.bfloat16().to(dtype)
        return weight, stored


def stacked(name: str, example: Example, n: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Stacked:
    """n layers of the example with different values, ready for the row's formula."""
    g = torch.Generator().manual_seed(seed)
    layers = [example.layer(g, dtype) for _ in range(n)]
    return stack(ALGORITHMS[name], layers, example.alpha, example.settings)


def constant(value: Any) -> Maker:
    return lambda _: torch.tensor(value)


def _lora(out: int = 12, r: int = 3, alpha: float | None = 6.0) -> list[Example]:
    return [
        Example("linear", (out, 10), {"up": (out, r), "down": (r, 10)}, alpha=alpha),
        Example("no alpha", (out, 10), {"up": (out, r), "down": (r, 10)}),
        Example("conv", (out, 5, 3, 2), {"up": (out, r, 1, 1), "down": (r, 5, 3, 2)}, alpha=2.0),
        Example("dylora conv", (out, 5, 3, 3), {"up": (out, r), "down": (r, 5, 3, 3)}),
        Example("linear on 1x1", (out, 10, 1, 1), {"up": (out, r), "down": (r, 10)}),
        Example("tucker", (out, 5, 3, 2), alpha=2.0,
                slots={"up": (out, r, 1, 1), "down": (r, 5, 1, 1), "mid": (r, r, 3, 2)}),
        Example("vector", (out,), {"up": (out, r), "down": (r, 1)}),
    ]  # fmt: skip


def _sparse() -> tuple[list[Example], list[Example]]:
    def indices(g: torch.Generator) -> Tensor:
        places = torch.randperm(12 * 10, generator=g)[:7]
        return torch.stack([places // 10, places % 10]).to(torch.int16)

    rest = {"indices": (2, 7), "values": (7,), "size": (2,)}
    made = {"indices": indices, "size": constant([12, 10])}
    return [Example("linear", (12, 10), {"up": (12, 3), "down": (3, 10), **rest}, made, alpha=6.0)], [
        Example("conv", (12, 5, 2, 1), {"up": (12, 3), "down": (3, 5), "mid": (3, 3, 2, 1), **rest}, made,
                neutral=_what_is_there)
    ]  # fmt: skip


def _what_is_there(weight: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    rows, columns = stored["indices"].long()
    zeros = {s: torch.zeros_like(t) for s, t in stored.items() if t.is_floating_point()}
    return {**zeros, "values": weight.flatten(1)[rows, columns]}


def _loha() -> list[Example]:
    flat = {"w1_a": (12, 3), "w1_b": (3, 10), "w2_a": (12, 3), "w2_b": (3, 10)}
    conv = {"w1_a": (12, 3), "w1_b": (3, 30), "w2_a": (12, 3), "w2_b": (3, 30)}
    four = {"w1_a": (12, 3, 1, 1), "w1_b": (3, 5, 3, 2), "w2_a": (12, 3, 1, 1), "w2_b": (3, 5, 3, 2)}
    tucker = {"w1_a": (3, 12), "w1_b": (3, 5), "t1": (3, 3, 3, 2),
              "w2_a": (3, 12), "w2_b": (3, 5), "t2": (3, 3, 3, 2)}  # fmt: skip
    return [
        Example("linear", (12, 10), flat, alpha=1.5),
        Example("conv", (12, 5, 3, 2), conv, alpha=1.5),
        Example("OneTrainer conv", (12, 5, 3, 2), four),
        Example("tucker", (12, 5, 3, 2), tucker, alpha=6.0),
        Example("tucker of PEFT's Conv1d", (12, 5, 6), {**tucker, "t1": (3, 3, 6, 1), "t2": (3, 3, 6, 1)}, alpha=6.0),
    ]


def _lokr() -> list[Example]:
    low1, low2 = {"w1_a": (4, 2), "w1_b": (2, 3)}, {"w2_a": (5, 2), "w2_b": (2, 7)}
    whole = {"w1": (4, 3), "w2": (5, 7)}
    tucker = {"w2_a": (2, 5), "w2_b": (2, 7), "t2": (2, 2, 3, 2)}
    flat = {"w2_a": (5, 2), "w2_b": (2, 42)}
    return [
        Example("whole", (20, 21), whole, alpha=1e10),
        Example("whole, infinite alpha", (20, 21), whole, alpha=float("inf")),
        Example("whole, rs_lora", (20, 21), whole, alpha=8.0, settings={"rs_lora": True}),
        Example("low second", (20, 21), {"w1": (4, 3), **low2}, alpha=6.0),
        Example("low first", (20, 21), {**low1, "w2": (5, 7)}, alpha=6.0),
        Example("both low", (20, 21), {**low1, **low2}, alpha=6.0, settings={"rs_lora": True}),
        Example("conv, whole", (20, 21, 3, 2), {"w1": (4, 3), "w2": (5, 7, 3, 2)}),
        Example("one kernel axis", (20, 21, 3), {"w1": (4, 3), "w2": (5, 7, 3)}),
        Example("one kernel axis, PEFT", (20, 21, 3), {"w1": (4, 3), "w2": (5, 7, 3)}, settings={"right_aligned": True}),
        Example("conv, flat", (20, 21, 3, 2), {"w1": (4, 3), **flat}, alpha=6.0),
        Example("conv, axes", (20, 21, 3, 2), alpha=6.0,
                slots={"w1": (4, 3), "w2_a": (5, 2), "w2_b": (2, 7, 3, 2)}),
        Example("conv, tucker", (20, 21, 3, 2), {**low1, **tucker}, alpha=6.0),
    ]  # fmt: skip


def _glora() -> list[Example]:
    linear = {"a1": (10, 3), "a2": (3, 10), "b1": (12, 3), "b2": (3, 10)}
    conv = {"a1": (5, 3, 1, 1), "a2": (3, 5, 1, 1), "b1": (12, 3, 1, 1), "b2": (3, 5, 3, 2)}
    tucker = {"a1": (5, 3), "a2": (3, 5), "b1": (12, 3), "b2": (3, 5), "bm": (3, 3, 3, 2)}
    return [
        Example("linear", (12, 10), linear, alpha=6.0),
        Example("rs_lora", (12, 10), linear, alpha=6.0, settings={"rs_lora": True}),
        Example("conv", (12, 5, 3, 2), conv, alpha=6.0),
        Example("tucker", (12, 5, 3, 2), tucker, alpha=6.0),
    ]


def _glora_old() -> list[Example]:
    linear = {"a1": (3, 10), "a2": (10, 3), "b1": (3, 10), "b2": (12, 3)}
    return [Example("linear", (12, 10), linear, alpha=6.0)]


def _tlora() -> list[Example]:
    def start(weight: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        u, s, vh = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        r = len(stored["q"])
        first = {(12, 10): 0, (10, 12): 7}[tuple(weight.shape[:2])]
        kept = slice(first, first + r)
        return {"p": u[:, kept], "q": vh[kept], "lambdas": s[None, kept]}

    slots = {"p": (12, 3), "q": (3, 10), "lambdas": (1, 3)}
    conv = {"p": (12, 3, 1, 1), "q": (3, 10, 1, 1), "lambdas": (1, 3)}
    last = {"p": (10, 3), "q": (3, 12), "lambdas": (1, 3)}
    told = {"algo": "tlora"}
    return [
        Example("linear", (12, 10), slots, neutral=start, settings=told, alpha=6.0),
        Example("1x1", (12, 10, 1, 1), conv, neutral=start, settings=told),
        Example("last", (10, 12), last, neutral=start, settings={**told, "sig_type": "last"}),
    ]


def _full(slot: str = "diff") -> list[Example]:
    return [
        Example("linear", (12, 10), {slot: (12, 10)}),
        Example("conv", (12, 5, 3, 2), {slot: (12, 5, 3, 2)}),
        Example("vector", (12,), {slot: (12,)}),
    ]


def _set() -> list[Example]:
    def same(weight: Tensor, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"diff": weight}

    return [Example(e.label, e.target, e.slots, neutral=same) for e in _full()]


def _ia3() -> list[Example]:
    def case(label: str, target: Shape, vector: Shape, axis: int) -> Example:
        slots = {"diff": vector, "on_input": ()}
        blind = tuple(i for i in range(4) if i != axis)
        return Example(label, target, slots, {"on_input": constant(axis)}, blind=blind)

    return [
        case("out", (12, 10), (12,), 0),
        case("in", (12, 10), (10,), 1),
        case("square out", (12, 12), (12,), 0),
        case("square in", (12, 12), (12,), 1),
        case("conv out", (12, 5, 3, 2), (1, 12, 1, 1), 0),
        case("conv in", (12, 5, 3, 2), (1, 5, 1, 1), 1),
        case("groups in", (12, 5, 3, 2), (1, 10, 1, 1), 1),
        case("square groups in", (14, 7, 3), (1, 14, 1), 1),
        case("square groups out", (14, 7, 3), (1, 14, 1), 0),
        case("one input of each group", (14, 1, 3), (1, 7, 1), 1),
        case("conv out that divides the columns", (10, 5, 3, 2), (1, 10, 1, 1), 0),
    ]


def _rescaled(_: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    ones = {"rescale": torch.ones_like(stored["rescale"])} if "rescale" in stored else {}
    return {"blocks": torch.zeros_like(stored["blocks"]), **ones}


def _diag_oft() -> list[Example]:
    both = {"blocks": (4, 3, 3), "rescale": (12, 1, 1, 1)}
    return [
        Example("linear", (12, 10), {"blocks": (4, 3, 3)}, neutral=_rescaled, blind=INPUTS),
        Example("conv, rescaled", (12, 5, 3, 2), both, neutral=_rescaled, blind=INPUTS),
        Example("limited", (12, 10), {"blocks": (4, 3, 3)}, neutral=_rescaled, alpha=0.01,
                blind=INPUTS),
    ]  # fmt: skip


def _oft_diag() -> list[Example]:
    def eye(_: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = stored["blocks"]
        return {"blocks": torch.eye(blocks.shape[-1], dtype=blocks.dtype).expand(blocks.shape)}

    return [
        Example("stack", (12, 10), {"blocks": (4, 3, 3)}, neutral=eye, blind=INPUTS),
        Example("shared", (12, 10), {"blocks": (3, 3)}, neutral=eye, blind=INPUTS),
    ]


def _boft() -> list[Example]:
    both = {"blocks": (2, 4, 4, 4), "rescale": (16, 1)}
    return [
        Example("linear", (16, 10), both, neutral=_rescaled, blind=INPUTS),
        Example("conv, limited", (16, 5, 3, 2), {"blocks": (3, 8, 2, 2)}, neutral=_rescaled,
                alpha=0.01, blind=INPUTS),
    ]  # fmt: skip


def _onetrainer(target: Shape) -> list[Example]:
    flag = {"scaled": constant(1)}
    return [
        Example("blocks", target, {"skew": (4, 15)}, blind=(0,)),
        Example("shared", target, {"skew": (1, 15)}, blind=(0, *INPUTS)),
        Example("scaled", target, {"skew": (4, 15), "scaled": ()}, flag, blind=(0,)),
    ]


def _fused() -> list[Example]:
    slots = {"up": (10, 3), "down": (6, 10)}
    parts = {"parts": ((0, 6), (12, 16))}
    return [Example("q and v", (18, 10), slots, alpha=6.0, settings=parts, blind=(0,))]


def _transposed() -> list[Example]:
    slots = {"up": (3, 12), "down": (10, 3)}
    return [
        Example("alpha over rank", (12, 10), slots, settings={"lora_alpha": 6.0}),
        Example("alpha", (12, 10), slots, settings={"lora_alpha": 2.0, "over_rank": False}),
    ]


def _xs() -> list[Example]:
    def core(_: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"core": torch.zeros_like(stored["core"])}

    slots = {"left": (12, 3), "core": (3, 3), "right": (10, 3)}
    return [
        Example("linear", (12, 10), slots, neutral=core, alpha=6.0),
        Example("conv", (12, 5, 2), slots, neutral=core),
    ]


def _bora() -> list[Example]:
    def lengths(weight: Tensor, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = weight.reshape(len(weight), -1)
        return {"up": torch.zeros_like(stored["up"]), "rows": flat.norm(dim=1), "columns": flat.norm(dim=0)}

    slots = {"up": (12, 3), "down": (3, 10), "rows": (12,), "columns": (10,)}
    return [
        Example("linear", (12, 10), slots, neutral=lengths, alpha=6.0, unnoticed=("rows", "columns")),
        Example("conv", (12, 5, 2), slots, neutral=lengths, unnoticed=("rows", "columns")),
    ]


def _stacked_experts(up: int, down: int) -> list[Example]:
    return [Example("three experts", (3, 8, 10), {"up": (up, 8, 2), "down": (down, 2, 10)}, alpha=4.0,
                    blind=(0,) if 3 not in (up, down) else ())]  # fmt: skip


EXAMPLES: Mapping[str, list[Example]] = {
    "lora": _lora(),
    "lora_sparse": _sparse()[0],
    "lora_sparse_tucker": _sparse()[1],
    "lora_fused": _fused(),
    "lora_blocks": [
        Example(
            "four layers",
            (14, 10),
            {**{f"up_{n}": (rows, 2) for n, rows in enumerate((5, 3, 4, 2))}, "down": (8, 10)},
            alpha=6.0,
        ),
        Example("k and v", (12, 5, 2), {"up_0": (6, 2), "up_1": (6, 2), "down": (4, 5, 2)}),
        Example("one", (12, 10), {"up_0": (12, 2), "down": (2, 10)}),
    ],
    "lora_xs": _xs(),
    "bora": _bora(),
    "lora_transposed": _transposed(),
    "lora_stacked": _stacked_experts(3, 3),
    "lora_stacked_down": _stacked_experts(3, 1),
    "lora_stacked_up": _stacked_experts(1, 3),
    "lora_switch": [
        Example(
            "three experts", (3, 8, 10), {"up": (3, 8, 2), "down": (3, 2, 10)}, settings={"lora_alpha": 4.0}, blind=(0,)
        )
    ],
    "loha": _loha(),
    "lokr": _lokr(),
    "glora": _glora(),
    "glora_old": _glora_old(),
    "tlora": _tlora(),
    "full": _full(),
    "full_rank": _full("down"),
    "set": _set(),
    "ia3": _ia3(),
    "diag_oft": _diag_oft(),
    "oft_diag": _oft_diag(),
    "boft": _boft(),
    "onetrainer_oft": _onetrainer((12, 24)),
    "onetrainer_oft_conv": _onetrainer((12, 4, 3, 2)),
}
