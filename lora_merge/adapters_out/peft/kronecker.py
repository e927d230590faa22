"""LoHa and LoKr as PEFT stores them: the tensors as they are; ranks, α and the sizes of factors in the configuration.

Facts: peft 0.21, tuners/loha/layer.py and tuners/lokr/layer.py. PEFT makes each layer's tensors from the configuration
before it loads them, so a shape that no configuration gives cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...algorithms.loha import LOHA
from ...errors import FitError

if TYPE_CHECKING:
    from ..module_tensors import StoredModule

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Ending → shape of a layer's tensors."""

TO_LORA: Final = "bring it to LoRA: --algorithm lora, with --rank if it is not low-rank"


def shapes_of(module: StoredModule) -> dict[str, tuple[int, ...]]:
    """Return ending → shape of the stored tensors."""
    return {ending: entry.shape for ending, entry in module.tensors.items()}


def rank_of(shapes: Shapes) -> int:
    """Return `r` of a layer for PEFT: the rank of its small factors; of two whole ones the least r that means those."""
    for ending in (".hada_w1_b", ".lokr_w2_b", ".lokr_w1_b"):
        if ending in shapes:
            return shapes[ending][0]
    return -(-max(shapes[".lokr_w2"][:2]) // 2)


def settings(modules: Sequence[StoredModule]) -> dict[str, Any]:
    """Return the entries for these layers, all of one algorithm; FitError where no configuration gives their shapes."""
    shapes = {m.place.label: shapes_of(m) for m in modules}
    of_kernels = [s for m, s in zip(modules, shapes.values(), strict=True) if m.place.kernel]
    folded = {any(ending.endswith(("_t1", "_t2")) for ending in s) for s in of_kernels}
    if len(folded) > 1:
        raise FitError("PEFT gives all convolutions a core or none", modules[0].place.label, TO_LORA)
    common = {"rank_dropout": 0.0, "module_dropout": 0.0, "init_weights": True,
              "use_effective_conv2d": folded == {True}}  # fmt: skip
    if modules[0].layer.algorithm == LOHA.name:
        return common
    if line := next((m for m in modules if len(shapes_of(m).get(".lokr_w2", ())) == 3), None):
        raise FitError("PEFT pairs other axes of a kernel in one dimension", line.place.label, TO_LORA)
    both = any(".lokr_w1_a" in s for s in shapes.values())
    factors = (-1, *sorted({n for s in shapes.values() for n in _first(s)}))  # near the root, or a size of some w1
    factor = next((f for f in factors if all(_fits(m, f, both=both) for m in modules)), None)
    if factor is None:
        raise FitError("PEFT has one rule for the factors of all layers, which these do not follow",
                       modules[0].place.label, TO_LORA)  # fmt: skip
    return {**common, "decompose_both": both, "decompose_factor": factor, "rank_dropout_scale": False}


def _first(shapes: Shapes) -> tuple[int, int]:
    """Return (rows, columns) of w1."""
    if ".lokr_w1" in shapes:
        return shapes[".lokr_w1"][0], shapes[".lokr_w1"][1]
    return shapes[".lokr_w1_a"][0], shapes[".lokr_w1_b"][1]


def _fits(module: StoredModule, factor: int, *, both: bool) -> bool:
    """Return whether PEFT makes the shapes of a layer with this `decompose_factor`, and the rank `rank_of`."""
    shapes, (out, cols) = shapes_of(module), module.place.view.shape[:2]
    rank, (l, m) = rank_of(shapes), _first(shapes)  # noqa: E741
    whole = ".lokr_w1" in shapes, ".lokr_w2" in shapes
    needs = not (both and rank < max(l, m) / 2), not rank < max(out // l, cols // m) / 2
    return split(out, factor) == (l, out // l) and split(cols, factor) == (m, cols // m) and whole == needs


def split(size: int, factor: int) -> tuple[int, int]:
    """Return the two factors of a size as PEFT's `factorization` chooses them."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = isqrt(size) if factor < 0 else min(isqrt(size), factor)
    first = next(n for n in range(max(most, 1), 0, -1) if size % n == 0)
    return first, size // first
