"""The codec of fp8 with one scale for a weight, W = q · s, in the two styles of ComfyUI.

Old: `l.weight` and `l.scale_weight`, under a prefix with a tensor `scaled_fp8`. New: `l.weight` and `l.weight_scale`,
and for each layer a JSON, in a tensor `l.comfy_quant` or in the metadata entry `_quantization_metadata`.
https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/utils.py (convert_old_quants).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, ClassVar, Final

from ...dtypes import TABLE
from .base import CODES, Checkpoint, Claim, Encoding, Packing, Part, Parts, claimed
from .comfy import layers

if TYPE_CHECKING:
    from torch import Tensor

FORMATS: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Name of a format in the JSON of a layer → dtype."""

SCALE: Final = "scale"


@dataclass(frozen=True, eq=False)
class ScaledFp8(Encoding):
    """fp8 times one number."""

    dtype: str = ""
    name: ClassVar[str] = "fp8_scaled"

    def fault(self, role: str, numbers: Sequence[float]) -> str:
        """Return the reason why a scale is invalid; "" if it is valid."""
        return "" if all(0 < n < inf for n in numbers) else f"its scale is no positive number: {numbers[0]:g}"

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return q · s in fp32."""
        from .arithmetic import from_fp8

        return from_fp8(parts[CODES], self.dtype).mul_(parts[SCALE].item())

    def encode(self, values: Tensor, parts: Parts, first: int) -> Parts | None:
        """Return the codes of W / s; None if a number is beyond the range."""
        from .arithmetic import to_fp8

        codes = to_fp8(values / parts[SCALE].item(), self.dtype)
        return None if codes is None else {CODES: codes}

    def refit(self, parts: Parts, largest: float) -> Parts:
        """Return the scale at which the largest magnitude becomes the largest number of the dtype, as in ComfyUI."""
        import torch

        scale = largest / TABLE[self.dtype].largest
        return {SCALE: torch.full_like(parts[SCALE], scale)}


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield every weight that is stored in one of the two styles."""
    marks = [name.removesuffix("scaled_fp8") for name in found.tensors if name.rpartition(".")[2] == "scaled_fp8"]
    for stem in found.stems("scale_weight") if marks else ():
        mark = next((m for m in marks if stem.startswith(m)), None)
        if mark is not None:
            beside = found.present(stem, "scale_input") | {f"{mark}scaled_fp8"}
            yield from _packed(found, stem, "scale_weight", beside)
    for stem, layer in layers(found):
        if FORMATS.get(layer.form) == getattr(found.get(stem, "weight"), "dtype", None):
            yield from _packed(found, stem, "weight_scale", found.present(stem, "comfy_quant", "input_scale"))


def _packed(found: Checkpoint, stem: str, scale: str, beside: frozenset[str]) -> Iterator[Claim]:
    """Yield the weight of a layer, if this codec can read its dtype and scale."""
    weight, side = found.get(stem, "weight"), found.get(stem, scale)
    if weight is None or side is None or weight.dtype not in FORMATS.values():
        return
    if side.dtype == "F32" and prod(side.shape) == 1 and len(side.shape) < 2:
        packing = Packing(_encoding(weight.dtype), weight, {SCALE: Part(side)}, beside)
        yield claimed(weight, weight.name, weight.shape, packing)


@cache
def _encoding(dtype: str) -> Encoding:
    return ScaledFp8((1, 1), dtype=dtype)
