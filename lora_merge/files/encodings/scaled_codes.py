"""Codes of one byte, fp8 or whole numbers, times scales: W = (q − z) · s, the form of most quantised checkpoints.

One scale belongs to the whole weight, for a row, for a group of columns of a row, or for a block of rows and columns.
Scales are kept if they cover the new values; each of the others is fitted again by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, lcm, prod
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from ...dtypes import DTYPE_ROWS, ITEM_BYTES, StoredTensor, flat
from .base import ALL_ZEROS, CODES, DRAW, Encoding, InvalidPart, Packing, PartValues, WeightPart, end_margin

if TYPE_CHECKING:
    from torch import Tensor

SCALE: Final = "scale"
ZERO: Final = "zero"

E8M0: Final = "E8M0"
"""Powers of two in a byte; files call their dtype F8_E8M0 or U8."""

SCALE_STORAGE: Final = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F8_E8M0": E8M0}
"""Dtype of a tensor of scales → how its values are stored."""

MX_COLUMNS: Final = 32  # of a row with one scale, in the MX formats: mxfp8 and mxfp4

CODE_DTYPES: Final = ("F8_E4M3", "F8_E5M2", "I8")
TILE: Final = 128  # rows of the tiles in which cuBLAS wants the scales of blocks
NEARLY_HALF: Final = 0.4  # of a step by which a number may be beyond the last code
REFIT_BELOW: Final = {True: 2.0**-6, False: 0.8}
"""Whether codes are fp8 → the share of the range below which a scale is fitted again. A floating-point code is as exact
anywhere in the range; a whole number is not."""


class ScaledTensors(NamedTuple):
    """The tensors of a weight of codes and scales.

    `block`: rows and columns with one scale; by default the shape of the scales says whether there is one for the whole
    weight, for each matrix or for each row. `byte_powers`: whether bytes among the scales are e8m0.
    """

    codes: StoredTensor
    scale: StoredTensor
    label: str
    marks: frozenset[str] = frozenset()
    zero: StoredTensor | None = None
    block: tuple[int, int] | None = None
    byte_powers: bool = False

    @classmethod
    def mx(
        cls, codes: StoredTensor, scale: StoredTensor, label: str, marks: frozenset[str] = frozenset()
    ) -> ScaledTensors:
        """Return the tensors of a weight of mxfp8, which has a power of two for 32 columns."""
        return cls(codes, scale, label, marks, block=(1, MX_COLUMNS), byte_powers=True)

    @property
    def kind(self) -> str:
        """The form in which the scales are stored; "" if they are not values of a known kind."""
        return E8M0 if self.byte_powers and self.scale.dtype == "U8" else SCALE_STORAGE.get(self.scale.dtype, "")


@dataclass(frozen=True, eq=False)
class ScaledCodes(Encoding):
    """Codes of one byte times scales."""

    dtype: str = ""  # of the codes: F8_E4M3, F8_E5M2 or I8
    kind: str = "F32"  # of the scales
    shape: tuple[int, int] = (0, 0)  # rows and columns of one matrix
    block: tuple[int, int] = (0, 0)  # rows and columns with one scale; (0, 0): one scale for the whole weight
    swizzled: bool = False  # whether scales are in cuBLAS's tiles
    powers: bool = False  # whether all scales are powers of two
    factor: float = 1.0  # W = q · s · factor
    ends: tuple[int, int] = (-128, 127)  # the smallest and the largest code of whole numbers
    zeros: str = ""  # dtype of the zero points; "" without them
    rotation: int = 0  # columns that are rotated together; 0 without a rotation
    from_zeros: ClassVar[bool] = True

    @property
    def needs_largest(self) -> bool:
        """Whether there is one new scale for the whole weight."""
        return self.new_scales and not self.block[0]

    @property
    def common(self) -> str:
        """Role of the scale of the whole weight; "" if new values may need another."""
        return "" if self.block[0] or self.new_scales else SCALE

    def factor_of(self, parts: PartValues) -> float:
        """Return the scale of the whole weight; 1 for values in units of it."""
        return float(self._scale(parts, 0) * self.factor) if SCALE in parts else 1.0

    def fault(self, role: str, values: Sequence[float]) -> str:
        """Return the reason why a scale is invalid; "" if it is valid."""
        bad = role == SCALE and not all(0 <= n < inf for n in values)
        return f"its scale is not a positive number: {values[0]:g}" if bad else ""

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return self.block

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return (q − z) · s in fp32."""
        from . import arithmetic

        if not self.block[0]:
            unit = self.factor_of(parts)
            values = arithmetic.from_bytes(parts[CODES], self.dtype, unit or 1.0)
            if not unit and bool(values.any()):
                raise InvalidPart(ALL_ZEROS)
            return values
        scale = self._scale(parts, count) * self.factor
        # One product instead of two: fp8 becomes fp32 as parts of fp16, over 256.
        step = (
            256.0 if self.dtype == "F8_E4M3" and not self.zeros and float(scale.max()) < arithmetic.SAFE_SCALE else 1.0
        )
        values = arithmetic.from_bytes(parts[CODES], self.dtype, 1 / step)
        scale, blocks = scale * step, self._blocks(values)
        if self.zeros:
            blocks = blocks - self._spread(parts[ZERO].float(), count)
        if scale.numel() and not float(scale.min()) and bool((blocks * (self._spread(scale, count) == 0)).any()):
            raise InvalidPart(ALL_ZEROS)
        values = self._flat(blocks.mul_(self._spread(scale, count)), count)
        return arithmetic.rotated(values, self.rotation) if self.rotation else values

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes, scales and zero points; None if one scale for the whole weight does not cover it."""
        import torch

        from . import arithmetic

        if not self.block[0]:
            return self._at_one_scale(values, parts)
        count = values.numel()
        if self.rotation:
            values = arithmetic.rotated(values, self.rotation)
        blocks = self._blocks(values)
        # Each block keeps its scale, and zero point, or gets a new one by its smallest and largest number.
        low, high = self._ends(blocks)
        old, zeros = torch.ones_like(low) if self.new_scales else self._scale(parts, count).view(low.shape), {}
        if self.zeros:
            zero = parts[ZERO].view(low.shape).to(low.dtype)
            scale, zero = self._fitted_with_zero((low, high), old, zero, parts)
            zeros[ZERO] = zero.to(parts[ZERO].dtype).reshape(-1)
            levels = blocks / torch.where(scale > 0, scale, inf).to(values.dtype)[:, :, None, :, None]
            levels += zero[:, :, None, :, None]
        else:
            scale = self._fitted((low, high), old, parts)
            levels = self._levels(blocks, scale[:, :, None, :, None])
        codes = arithmetic.cut_to_bytes(self._drawn(self._flat(levels, count), parts), self.dtype, self.ends)
        return {CODES: codes, SCALE: self._stored(scale, parts[SCALE], count), **zeros}

    def _at_one_scale(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes at the scale of the whole weight, which stays; None if the caller has to fit it again."""
        from . import arithmetic

        if SCALE in parts and not parts[SCALE].item() and (self.new_scales or bool(values.any())):
            return None
        unit = self.factor_of(parts)
        levels = values if unit == 1 else values / (unit or inf)
        if DRAW in parts and not self.new_scales and levels.numel():
            (bottom, top), (least, most) = self._covered(parts), levels.aminmax()
            if not (bottom <= float(least) and float(most) <= top):
                return None
        drawn = self._drawn(levels, parts)
        if self.new_scales:  # the scale was made for the largest of all values
            return {CODES: arithmetic.cut_to_bytes(drawn, self.dtype, self.ends)}
        codes = arithmetic.to_bytes(drawn, self.dtype, self.ends)
        return None if codes is None else {CODES: codes}

    def _levels(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """Return the values of blocks over their scales; 0 if a scale is 0."""
        import torch

        return blocks / (torch.where(scale > 0, scale, inf).to(blocks.dtype) * self.factor)

    def _ends(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest number of each block; for fp8, they may be further from zero."""
        from . import arithmetic

        if self.dtype != "I8" and not self.zeros:
            size = arithmetic.largest_of_each(blocks).amax(2)
            return -size, size
        return blocks.amin((2, 4)), blocks.amax((2, 4))

    def _drawn(self, levels: Tensor, parts: PartValues) -> Tensor:
        """Return the levels, those of stochastic rounding if draws are given."""
        from . import stochastic_rounding

        if DRAW not in parts:
            return levels
        if self.dtype == "I8":
            return stochastic_rounding.to_integers(levels, parts[DRAW]).clamp_(*self.ends)
        return stochastic_rounding.to_floats(levels, self.dtype, parts[DRAW])

    def refit(self, parts: PartValues, largest: float) -> PartValues:
        """Return the scale at which the largest magnitude becomes the largest code."""
        import torch

        from . import arithmetic

        limit, size = self._limit * self.factor, torch.full_like(parts[SCALE], largest, dtype=torch.float32)
        scale = arithmetic.covering(size, limit, limit, self.kind) if largest else torch.ones_like(size)
        return {SCALE: scale.to(parts[SCALE].dtype)}

    @property
    def _limit(self) -> float:
        """The largest code."""
        return DTYPE_ROWS[self.dtype].largest or float(self.ends[1])

    def _covered(self, parts: PartValues) -> tuple[float, float]:
        """Return the lowest and the highest level of the codes."""
        margin = end_margin(parts)
        if self.dtype == "I8":
            return self.ends[0] - margin, self.ends[1] + margin
        top = self._limit + 2 * margin * (DTYPE_ROWS[self.dtype].room - self._limit)
        return -top, top

    def _scale(self, parts: PartValues, count: int) -> Any:
        """Return the scales in fp32, flat, or the one of the whole weight; InvalidPart if one is negative or not a
        number."""
        from . import arithmetic

        raw = parts[SCALE]
        scale = arithmetic.powers(raw) if self.kind == E8M0 else raw.float()
        if not self.block[0] and 0 < (single := scale.item()) < inf:
            return single
        if self.swizzled:
            scale = scale.index_select(0, arithmetic.swizzle(-(-count // self.shape[1]), self._columns))
        good = (scale >= 0) & (scale < inf)
        if not bool(good.all()):
            raise InvalidPart(f"a scale is not a positive number: {scale[~good][0].item():g}")
        return scale if self.block[0] else scale.item()

    @property
    def _columns(self) -> int:
        """The number of scales in a row."""
        return -(-self.shape[1] // self.block[1])

    def _blocks(self, values: Tensor) -> Tensor:
        """Return [matrices, blocks of rows, rows, blocks of columns, columns]; the last blocks may be padded."""
        from torch.nn.functional import pad

        (rows, cols), (high, wide) = self.shape, self.block
        count = values.numel() // cols
        rows = rows if rows % high and count % rows == 0 else count
        matrices = values.view(-1, rows, cols)
        if rows % high or cols % wide:
            matrices = pad(matrices, (0, -cols % wide, 0, -rows % high))
        return matrices.view(len(matrices), -(-rows // high), high, -(-cols // wide), wide)

    def _flat(self, blocks: Tensor, count: int) -> Tensor:
        """Return the values of `_blocks` in their order, without the padding."""
        matrices, _, high, _, _ = blocks.shape
        cols = self.shape[1]
        rows = count // cols // matrices
        whole = blocks.reshape(matrices, blocks.shape[1] * high, -1)
        return whole[:, :rows, :cols].reshape(-1)

    def _spread(self, values: Tensor, count: int) -> Tensor:
        """Return one number for each block in a shape that fits `_blocks`."""
        (rows, cols), (high, _) = self.shape, self.block
        total = count // cols
        matrices = total // rows if rows % high and total % rows == 0 else 1
        return values.view(matrices, -1, 1, self._columns, 1)

    def _fitted(self, ends: tuple[Tensor, Tensor], old: Tensor, parts: PartValues) -> Tensor:
        """Return the scales: the old ones if they cover the values, else the smallest that do."""
        import torch

        from . import arithmetic

        floats, (lowest, highest), (low, high) = self.dtype != "I8", self.ends, ends
        largest, limit, (bottom, top) = torch.maximum(-low, high), self._limit, self._covered(parts)
        reach = largest if floats else torch.maximum(high, -low * (highest / -lowest))
        if self.kind == E8M0 or self.powers:
            new = arithmetic.power_above(reach / (limit * self.factor))
        else:
            room = top if floats else limit + end_margin(parts, NEARLY_HALF)
            new = arithmetic.covering(reach, limit * self.factor, room * self.factor, self.kind)
        if self.new_scales:
            return torch.where(new > 0, new, old)
        over = largest > old * (self.factor * top)
        if not floats:
            over &= (high > old * (self.factor * top)) | (low < old * (self.factor * bottom))
        coarse = (largest < old * (self.factor * limit * REFIT_BELOW[floats])) & (largest > 0)
        return torch.where((over | coarse) & (new > 0), new, old)

    def _fitted_with_zero(
        self, ends: tuple[Tensor, Tensor], old: Tensor, zero: Tensor, parts: PartValues
    ) -> tuple[Tensor, Tensor]:
        """Return scales and zero points: the old ones if they cover the values."""
        import torch

        from . import arithmetic

        low, high, (lowest, highest), margin = ends[0].clamp(max=0), ends[1].clamp(min=0), self.ends, end_margin(parts)
        over = (high > (highest + margin - zero) * old) | (low < (lowest - margin - zero) * old)
        steps = highest - lowest
        over |= (high - low < REFIT_BELOW[False] * steps * old) & (high > low)
        if DRAW in parts:
            reach, point = arithmetic.with_zero(low, high, self.ends)
            new = arithmetic.covering(reach, 1, 1, self.kind)
        else:
            new = arithmetic.covering(high - low, steps, steps, self.kind)  # the zero point may take half a step
            point = (lowest - (low / torch.where(new > 0, new, inf)).round()).clamp(lowest, highest)
        over &= new > 0
        return torch.where(over, new, old), torch.where(over, point, zero)

    def _stored(self, scale: Tensor, old: Tensor, count: int) -> Tensor:
        """Return scales as they are stored; padding between them stays."""
        from . import arithmetic

        stored = arithmetic.exponents(scale) if self.kind == E8M0 else scale.to(old.dtype)
        if not self.swizzled:
            return stored.reshape(-1)
        filled = old.clone()
        filled[arithmetic.swizzle(-(-count // self.shape[1]), self._columns)] = stored.reshape(-1).view(filled.dtype)
        return filled


def scaled(of: ScaledTensors, **settings: Any) -> Packing | None:
    """Return how a weight is stored as codes and scales; None if their dtypes and shapes do not go together."""
    shape, size = of.codes.shape, prod(of.scale.shape)
    settings |= {"dtype": of.codes.dtype, "kind": of.kind, "label": of.label}
    if of.codes.dtype not in CODE_DTYPES or not of.kind or not prod(shape) or len(shape) < 2:
        return None
    if of.kind == E8M0 and (of.block is None or of.zero is not None):
        return None
    # A scale for the whole weight.
    if len(shape) > 3 and of.block is None:
        shape = flat(shape)  # a convolution has a scale for each output channel
    if of.block is None and size == 1 and of.zero is None and not settings.get("rotation"):
        return Packing(ScaledCodes.shared((1, 1), **settings), of.codes, {SCALE: WeightPart(of.scale)}, of.marks)
    # Scales of blocks of rows and columns.
    (rows, cols), matrices, (high, wide) = shape[-2:], prod(shape[:-2]), of.block or _rows_of(shape, of.scale.shape)
    block = min(high, rows), min(wide, cols)  # a larger one, of any size in the file, is the whole weight
    rotation, swizzled = settings.get("rotation", 0), settings.get("swizzled", False)
    if not block[0] or len(shape) > 3 or cols % (rotation or 1) or (swizzled and matrices > 1 and rows % TILE):
        return None
    # Consecutive values of the weight, and the scales that belong to them.
    up, across, whole = -(-rows // block[0]), -(-cols // block[1]), rows % block[0] == 0
    elements, scales = (block[0] * cols, across) if whole else (rows * cols, up * across)
    count = matrices * up * across
    if swizzled:
        elements, scales = TILE * cols, prod(tiled_shape(TILE, across))
        count = matrices * prod(tiled_shape(rows, across))
    zeros = of.zero.dtype if of.zero is not None else ""
    if size != count or (of.zero is not None and (zeros != "I8" or prod(of.zero.shape) != count)):
        return None
    # The parts, and the values that are decoded together.
    parts = {SCALE: WeightPart(of.scale, elements, scales * ITEM_BYTES[of.scale.dtype])}
    if of.zero is not None:
        parts[ZERO] = WeightPart(of.zero, elements, scales)
    encoding = ScaledCodes.shared((1, 1), lcm(elements, cols), shape=(rows, cols), block=block, zeros=zeros, **settings)
    return Packing(encoding, of.codes, parts, of.marks)


def tiled_shape(rows: int, across: int) -> tuple[int, int]:
    """Return the shape of scales [rows, across] in cuBLAS's tiles of 128 rows and 4 columns, which are filled up."""
    return -(-rows // TILE) * TILE, -(-across // 4) * 4


def _rows_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns with one scale, where there is one for each row or each matrix; (0, 0) for neither."""
    lead, (rows, cols) = shape[:-2], shape[-2:]
    while scales and scales[-1] == 1 and scales != (*lead, rows):
        scales = scales[:-1]
    if scales == (*lead, rows):
        return 1, cols
    return (rows, cols) if lead and scales in (lead, ()) else (0, 0)
