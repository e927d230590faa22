"""4-bit floating-point codes (e2m1) with a scale for each block of a row: nvfp4 and mxfp4.

nvfp4: blocks of 16, scales in fp8, and one scale for the whole weight, which files store as a factor or as a divisor.
mxfp4: blocks of 32, scales that are powers of two (e8m0). A byte holds two codes: ComfyUI puts the even column into
the high half, compressed-tensors, ModelOpt and gpt-oss into the low half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from ...dtypes import Shape, StoredTensor
from .base import (
    ALL_ZEROS,
    CODES,
    DRAW,
    Encoding,
    InvalidPart,
    OutOfRange,
    Packing,
    PartValues,
    WeightPart,
    end_margin,
)
from .scaled_codes import E8M0, MX_COLUMNS, SCALE, TILE, tiled_shape

if TYPE_CHECKING:
    from torch import Tensor

WHOLE_SCALE: Final = "whole"
"""Role of the scale of the whole weight."""

PRE: Final = "pre"
"""Role of the values by which a layer multiplies its inputs: W = decoded · diag(p)."""

NVFP4_COLUMNS: Final = 16  # of a row with one scale

LARGEST_CODE: Final = 6.0  # of e2m1
LAST_STEP: Final = 2.0  # between the two largest codes
REFIT_BELOW: Final = 2.4  # a block whose largest code would be below is fitted again
LARGEST_SCALE: Final = 448.0  # the largest scale of a block


@dataclass(frozen=True, eq=False)
class Fp4(Encoding):
    """4-bit floating-point codes with a scale for each block of a row."""

    kind: str = "F8_E4M3"  # of the scales of blocks
    cols: int = 0
    high_first: bool = False
    swizzled: bool = False
    divided: bool = False  # whether the scale of the whole weight is a divisor
    turned: int = 0  # rows of a matrix whose transpose the model knows as the weight; 0 if it is the matrix itself
    inputs: str = ""  # dtype of the factors of the inputs; "" without them
    fixed: ClassVar[frozenset[str]] = frozenset((PRE,))
    from_zeros: ClassVar[bool] = True

    @property
    def needs_largest(self) -> bool:
        """Whether there is a new scale for the whole weight."""
        return self.new_scales and self.kind != E8M0

    @property
    def joint_scale(self) -> bool:
        """Whether weights that servers join need one scale of the whole weight; ComfyUI joins none."""
        return self.kind != E8M0 and not self.high_first

    def fault(self, role: str, values: Sequence[float]) -> str:
        """Return the reason why the scale of the whole weight is invalid; "" if it is valid."""
        bad = role == WHOLE_SCALE and not all(0 <= n < inf and (n or not self.divided) for n in values)
        return f"its scale is not a positive number: {values[0]:g}" if bad else ""

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return e2m1 · s · g in fp32."""
        from . import arithmetic

        values = arithmetic.from_halves(parts[CODES], arithmetic.E2M1, high_first=self.high_first)
        if WHOLE_SCALE in parts and not parts[WHOLE_SCALE].item() and bool(values.any()):
            raise InvalidPart(ALL_ZEROS)
        scaled = values.view(-1, self.size).mul_(self._scale(parts, count)[:, None]).view(-1)
        if PRE in parts:
            return scaled.view(-1, self.cols).mul_(self._pre(parts))
        return scaled.view(-1, self.turned, self.cols).transpose(1, 2) if self.turned else scaled

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes and scales of blocks; None if the scale of the whole weight does not cover the values."""
        from . import arithmetic

        count = values.numel()
        if self.needs_largest and not parts[WHOLE_SCALE].item():
            return None
        # The values in the basis and order of the file.
        if self.turned:
            values = values.view(-1, self.cols, self.turned).transpose(1, 2).contiguous()
        if PRE in parts:
            values = (values.view(-1, self.cols) / self._pre(parts).to(values.dtype)).view(-1)
        # Codes at the old scales, and the blocks that need other scales.
        blocks = values.view(-1, self.size)
        old, stored = self._scale(parts, count), parts[SCALE]
        codes, rows = _codes_at_old_scales(blocks, old, every=self.new_scales or DRAW in parts)
        # Scales and codes of these blocks.
        if rows is None or len(rows):
            some, before = (blocks, old) if rows is None else (blocks[rows], old[rows])
            scale = self._refitted(some, before, parts)
            if scale is None:
                return None
            new = self._codes(some, scale, parts)
            codes = new if rows is None else codes.view(-1, self.size).index_copy_(0, rows, new.view(some.shape))
            if scale is not before:
                stored = self._stored(scale if rows is None else old.index_copy(0, rows, scale), parts, count)
        return {CODES: arithmetic.in_halves(codes, high_first=self.high_first), SCALE: stored}

    def _codes(self, blocks: Tensor, scale: Tensor, parts: PartValues) -> Tensor:
        """Return the nearest codes of blocks, or those of stochastic rounding, flat."""
        from . import arithmetic, stochastic_rounding
        from .nearest_codes import e2m1_codes

        levels = _levels(blocks, scale)
        return e2m1_codes(
            stochastic_rounding.to_table(levels, arithmetic.e2m1(), parts[DRAW]) if DRAW in parts else levels
        )

    def _refitted(self, blocks: Tensor, old: Tensor, parts: PartValues) -> Tensor | None:
        """Return the scales of blocks: the old ones, the same tensor, where all of them cover the values and are not
        too coarse. None if that of the weight does not cover them; OutOfRange if there is none."""
        import torch

        from . import arithmetic

        largest, whole, covered = (
            arithmetic.largest_of_each(blocks),
            self._whole(parts),
            LARGEST_CODE + LAST_STEP * end_margin(parts),
        )
        if self.kind != E8M0 and float(largest.max()) > LARGEST_SCALE * whole * covered:
            if WHOLE_SCALE not in parts:
                raise OutOfRange
            return None
        refit = ((largest > old * covered) | (largest < old * REFIT_BELOW)) & (largest > 0)
        if not bool(refit.any()):
            return old
        return torch.where(refit, self._fitted(largest.float() / LARGEST_CODE, whole, covered), old)

    def refit(self, parts: PartValues, largest: float) -> PartValues:
        """Return the scale of the whole weight at which the largest scale of a block is the largest fp8 number."""
        import torch

        if PRE in parts:
            largest /= float(self._pre(parts).min())
        scale = largest / (LARGEST_SCALE * LARGEST_CODE) or 1.0
        return {WHOLE_SCALE: torch.full_like(parts[WHOLE_SCALE], 1 / scale if self.divided else scale)}

    def _fitted(self, ideal: Tensor, whole: float, covered: float) -> Tensor:
        """Return scales of blocks that the file can hold, times that of the weight, near the wanted ones; `covered` of
        them reach as far as the largest codes of the wanted ones."""
        from . import arithmetic

        if self.kind == E8M0:
            return arithmetic.power_above(ideal)
        ideal = (ideal / whole).clamp(2.0**-9, LARGEST_SCALE)
        codes = arithmetic.cut_to_fp8(ideal, "F8_E4M3")
        short = arithmetic.from_fp8(codes, "F8_E4M3") * covered < ideal * LARGEST_CODE  # among the smallest fp8 values
        return arithmetic.from_fp8(codes + short, "F8_E4M3") * whole

    def _pre(self, parts: PartValues) -> Tensor:
        """Return the factors of the inputs in fp32; InvalidPart if one is not a positive number."""
        factors = parts[PRE].float()
        if not bool(((factors > 0) & (factors < inf)).all()):
            raise InvalidPart("a factor of its inputs is not a positive number")
        return factors

    def _whole(self, parts: PartValues) -> float:
        if WHOLE_SCALE not in parts:
            return 1.0
        scale = parts[WHOLE_SCALE].item()
        if fault := self.fault(WHOLE_SCALE, [scale]):
            raise InvalidPart(fault)
        return 1 / scale if self.divided else scale

    def _scale(self, parts: PartValues, count: int) -> Tensor:
        """Return the scale of each block, times that of the weight, in fp32; InvalidPart if one is negative or NaN."""
        from . import arithmetic

        raw = parts[SCALE].view(arithmetic.BYTE)
        if self.swizzled:
            raw = raw.index_select(0, arithmetic.swizzle(count // self.cols, self.cols // self.size))
        scale = arithmetic.powers(raw) if self.kind == E8M0 else arithmetic.from_fp8(raw, "F8_E4M3")
        largest = int(raw.max()) if len(raw) else 0
        if largest > arithmetic.LARGEST_BYTE["F8_E4M3"] and not bool(
            (scale >= 0).all()
        ):  # as e8m0, the byte may be good
            raise InvalidPart("a scale is negative or not a number")
        return scale * self._whole(parts)

    def _stored(self, scale: Tensor, parts: PartValues, count: int) -> Tensor:
        """Return the scales of blocks as they are stored."""
        from . import arithmetic

        whole = self._whole(parts)
        stored = arithmetic.exponents(scale) if self.kind == E8M0 else arithmetic.cut_to_fp8(scale / whole, "F8_E4M3")
        if not self.swizzled:
            return stored
        filled = parts[SCALE].view(arithmetic.BYTE).clone()
        filled[arithmetic.swizzle(count // self.cols, self.cols // self.size)] = stored
        return filled


def _levels(blocks: Tensor, scale: Tensor) -> Tensor:
    """Return the values of blocks over their scales, flat; a block of zeros may have the scale 0."""
    import torch

    divisor = scale if len(scale) and float(scale.amin()) > 0 else torch.where(scale > 0, scale, inf)
    return (blocks / divisor.to(blocks.dtype)[:, None]).view(-1)


def _codes_at_old_scales(blocks: Tensor, old: Tensor, *, every: bool) -> tuple[Tensor, Tensor | None]:
    """Return the codes of blocks at their old scales, flat, and the blocks whose scales may not be kept: few, as the
    codes show. None for all of them, without codes, where `every` one is to be looked at."""
    from .nearest_codes import doubtful, marked_e2m1_codes

    if every:
        return old[:0], None
    codes = marked_e2m1_codes(_levels(blocks, old))
    rows = doubtful(codes, blocks.shape[1])
    return codes.bitwise_and_(15), rows


class Fp4Tensors(NamedTuple):
    """The tensors of a weight of 4-bit floating-point codes."""

    codes: StoredTensor
    scale: StoredTensor
    label: str
    whole: StoredTensor | None
    marks: frozenset[str] = frozenset()
    fp8_scales: bool = False  # also without a scale of the whole weight
    pre: StoredTensor | None = None  # factors of the inputs

    @property
    def shape(self) -> Shape:
        """The shape of the weight, of which a byte holds two codes."""
        return (*self.codes.shape[:-1], *(2 * n for n in self.codes.shape[-1:]))


def fp4(
    of: Fp4Tensors,
    *,
    high_first: bool = False,
    swizzled: bool = False,
    divided: bool = False,
    new_scales: bool = False,
) -> Packing | None:
    """Return how a weight is stored as e2m1 codes; None if dtypes and shapes do not go together.

    With a scale of the whole weight, or with `fp8_scales`, it is nvfp4, else mxfp4.
    """
    codes, scale, nv = of.codes, of.scale, of.fp8_scales or of.whole is not None
    size, kinds = (NVFP4_COLUMNS, ("F8_E4M3", "U8")) if nv else (MX_COLUMNS, ("F8_E8M0", "U8"))
    if codes.dtype != "U8" or scale.dtype not in kinds or len(codes.shape) not in (2, 3) or not prod(codes.shape):
        return None
    if of.whole is not None and (of.whole.dtype != "F32" or prod(of.whole.shape) != 1):
        return None
    # The scales must be as many as the shape of the codes asks for.
    *lead, cols = of.shape
    across = cols // size
    scales = prod(lead[:-1]) * prod(tiled_shape(lead[-1], across)) if swizzled else prod(lead) * across
    if cols % size or prod(scale.shape) != scales or (swizzled and len(lead) > 1 and lead[-1] % TILE):
        return None
    if of.pre is not None and (of.pre.dtype not in ("F32", "F16", "BF16") or of.pre.shape != (cols,)):
        return None
    # So many values are decoded together as share a scale, a row of factors, or a tile of scales.
    kind = "F8_E4M3" if nv else E8M0
    part = WeightPart(scale, TILE * cols, prod(tiled_shape(TILE, across))) if swizzled else WeightPart(scale, size, 1)
    together = part.group if swizzled else cols if of.pre is not None else size
    encoding = Fp4.shared((2, 1), together, kind=kind, size=size, cols=cols, label=of.label,
                      high_first=high_first, swizzled=swizzled, divided=divided, new_scales=new_scales,
                      inputs=of.pre.dtype if of.pre is not None else "")  # fmt: skip
    parts = {SCALE: part} | ({WHOLE_SCALE: WeightPart(of.whole)} if of.whole is not None else {})
    parts |= {PRE: WeightPart(of.pre)} if of.pre is not None else {}
    return Packing(encoding, codes, parts, of.marks)
