"""The experts of a layer by other names than the base stores: one expert of a stack, all experts as one, parts of both.
No torch.

Programs train experts one by one, all gates in one tensor, or gate and value as one; bases store them alone,
`[E, out, in]`, or `[E, in, out]`. The two weights of a stack show which it is: `gate_up_proj` is twice as long on one
side as `down_proj` on the other, and no pair of shapes allows both readings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Final, NamedTuple

from .name_table import MOST_EXPERTS
from .weights import RowSlice, WeightView, as_matrices, rows_of, stacked, transposed

EXPERT_LAYERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gate_proj": ("gate",),
        "up_proj": ("up",),
        "down_proj": ("down",),
        "gate_up_proj": ("gate", "up"),
        "w1": ("gate",),
        "w3": ("up",),
        "w2": ("down",),
        "w13": ("gate", "up"),
    }
)
"""Last level of a module's name → the layers of an expert that it holds, in this order.

Sources: https://github.com/thinking-machines-lab/tinker-cookbook tinker_cookbook/weights/_merge_utils.py (w1, w2, w3);
https://github.com/vllm-project/vllm model_executor/layers/fused_moe/layer.py (w13).
"""

EXPERT_NAMES: Final = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
"""Layer of an expert → its names in bases that store each expert alone."""

INTERLEAVED: Final = frozenset({"gpt_oss"})
"""Architectures with a row of the gate and a row of the value in turn (transformers, modeling_gpt_oss.py)."""

_NAME: Final = re.compile(
    rf"(?P<owner>(?:.*[._])?experts)(?:[._](?P<number>\d{{1,6}}))?[._](?P<leaf>{'|'.join(EXPERT_LAYERS)})"
)

_STACK: Final = re.compile(r"(?:.*[._])?experts[._][A-Za-z]\w*(?:\.weight)?")

Find = Callable[[str], WeightView | None]
"""Name of a module → its weight, by the names that the base's tables have."""


class Stack(NamedTuple):
    """The stacked experts of one layer."""

    pair: Mapping[str, WeightView]  # gate_up_proj and down_proj
    in_out: bool

    def part(self, name: str, expert: int, *, interleaved: bool) -> WeightView | None:
        """Return [out, in] of a layer of one expert: gate, up, down, or both of the first two; None without it."""
        view = self.pair["down_proj" if name == "down" else "gate_up_proj"]
        experts, rows, cols = view.shape
        if expert >= experts:
            return None
        key = view.row_slices[0].key
        whole = WeightView((RowSlice(key, expert * rows, (expert + 1) * rows, cols),), (rows, cols))
        whole = transposed(whole) if self.in_out else whole
        if name in ("down", "both"):
            return whole
        first, half = int(name == "up"), whole.shape[0] // 2
        if not interleaved:
            return rows_of(whole, first * half, (first + 1) * half)
        if not self.in_out:
            return None
        (piece,) = whole.row_slices
        return WeightView((piece._replace(columns=range(first, 2 * half, 2)),), (half, whole.shape[1]))


def layer_of(module: str) -> re.Match[str] | None:
    """Return (owner, number, leaf) of a name for experts; None for any other name."""
    return _NAME.fullmatch(module)


def is_stack(name: str) -> bool:
    """Return whether a parameter of this name and three axes is a stack of matrices."""
    return _STACK.fullmatch(name) is not None


def sources(module: re.Match[str]) -> Iterator[str]:
    """Yield names of which the base has one if it has the experts."""
    owner, mark = module["owner"], _mark(module)
    yield from (f"{owner}{mark}down_proj", *(f"{owner}{mark}0{mark}{name}" for name in EXPERT_NAMES["down"]))


def stack_of(module: re.Match[str], find: Find) -> Stack | None:
    """Return the stacked experts of a layer; None if the base stores each alone, or the shapes do not show how."""
    owner, mark = module["owner"], _mark(module)
    pair = {name: find(f"{owner}{mark}{name}") for name in ("gate_up_proj", "down_proj")}
    views = {name: as_matrices(view) for name, view in pair.items() if view is not None and len(view.shape) == 3}
    if len(views) < 2 or any(len(view.row_slices) > 1 for view in views.values()):
        return None
    (experts, a, b), (others, c, d) = (view.shape for view in views.values())
    upright, in_out = (a, b) == (2 * d, c), (b, a) == (2 * c, d)
    return Stack(views, in_out) if experts == others <= MOST_EXPERTS and (upright or in_out) else None


def weight_of(module: re.Match[str], find: Find, stack: Stack | None, architecture: str) -> WeightView | None:
    """Return [out, in] of one expert's layer, or [E, out, in] of all experts'; None if the base lacks it."""
    parts, interleaved = EXPERT_LAYERS[module["leaf"]], architecture in INTERLEAVED

    def weight_of_expert(expert: int) -> WeightView | None:
        if stack is not None and len(parts) > 1:
            return stack.part("both", expert, interleaved=interleaved)
        views = [
            stack.part(part, expert, interleaved=interleaved) if stack else _alone(module, part, expert, find)
            for part in parts
        ]
        parts_of_expert = [view for view in views if view is not None]
        return stacked(parts_of_expert) if len(parts_of_expert) == len(parts) else None

    if module["number"] is not None:
        return weight_of_expert(int(module["number"]))
    experts: list[WeightView] = []
    for expert in count():
        if expert > MOST_EXPERTS or (view := weight_of_expert(expert)) is None:
            break
        experts.append(view)
    every = stacked(experts) if len({view.shape for view in experts}) == 1 else None
    return every and WeightView(every.row_slices, (len(experts), *experts[0].shape))


def _alone(module: re.Match[str], part: str, expert: int, find: Find) -> WeightView | None:
    """Return a layer of an expert that the base stores alone. Experts without a gate call their first layer up, so `w1`
    is that and `w3` is none."""
    owner, mark = module["owner"], _mark(module)

    def layer(part: str) -> WeightView | None:
        views = (find(f"{owner}{mark}{expert}{mark}{name}") for name in EXPERT_NAMES[part])
        return next((view for view in views if view is not None), None)

    if module["leaf"] not in ("w1", "w3"):
        return layer(part)
    gate = layer("gate")
    return layer("up") if (gate is None) == (module["leaf"] == "w1") else gate if module["leaf"] == "w1" else None


def _mark(module: re.Match[str]) -> str:
    """Return the mark between the levels of a name."""
    return module.string[module.end("owner")]
