"""GPTQ and AWQ: whole numbers packed into words, the weight stored as its transpose. They are read, never written.

auto-round writes GPTQ's tensors too. Codes of 3 bits are a stream: 32 of them lie in three words.

Both chose their grids with calibration data; new numbers would need them again.
https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...disk.files import StoredTensor
from .base import CODES, Checkpoint, Claim, Encoding, InvalidPart, Packing, Part, Parts, claimed, finite
from .packed_ints import ORDER, WORD
from .scaled import SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

ACROSS: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: where column j of eight lies in its word: in the nibble of this number."""


@dataclass(frozen=True, eq=False)
class Transposed(Encoding):
    """Whole numbers of the transposed weight [cols, rows], with scales and zero points of groups of its rows."""

    bits: int = 4
    shape: tuple[int, int] = (0, 0)
    along_rows: bool = False  # AWQ: packed along the second axis of what is stored
    scales: str = "F16"  # dtype of the scales
    plus_one: bool = False  # whether zero points are stored less one
    name: ClassVar[str] = "gptq"
    decode_only: ClassVar[str] = "its grid was chosen with calibration data"

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return (q - z) · s in fp32."""
        from . import arithmetic, few_bits

        (rows, cols), bits = self.shape, self.bits
        low, high = first // cols, (first + count) // cols
        raw = parts[CODES].view(few_bits.INT32)
        if self.along_rows:
            each, order = WORD // bits, few_bits.indices(ACROSS)
            words = slice(low // each, -(-high // each))
            inside = slice(low - words.start * each, high - words.start * each)
            levels = few_bits.from_words(raw.view(cols, -1)[:, words], bits)[:, :, order].flatten(1)[:, inside]
            zero = few_bits.from_words(parts[ZERO].view(-1, rows // each)[:, words], bits)[:, :, order]
            zero = zero.flatten(1)[:, inside]
        else:
            columns = raw.view(-1, rows)[:, low:high].t().contiguous().view(arithmetic.BYTE)
            levels = few_bits.from_rows(columns, bits, dense=True).t()
            whole = parts[ZERO].view(arithmetic.BYTE).view(-1, rows * bits // 8)
            zero = few_bits.from_rows(whole, bits, dense=True)[:, low:high] + int(self.plus_one)
        scale = finite(parts[SCALE].view(-1, rows)[:, low:high], "a scale")
        group = parts[ORDER] if ORDER in parts else few_bits.repeated(len(scale), cols)
        if bool((group < 0).any()) or bool((group >= len(scale)).any()):
            raise InvalidPart("its g_idx names a group that is not there")
        return ((levels - zero[group]) * scale[group]).t().contiguous()


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of GPTQ and AWQ folders; none of those whose numbers lie in the order of a kernel."""
    config = found.config
    method = config.get("quant_method")
    if (method, config.get("packing_format")) == ("auto-round", "auto_round:auto_gptq"):
        method = "gptq"
    if method not in ("gptq", "awq") or (method == "awq" and str(config.get("version", "gemm")).lower() != "gemm"):
        return
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2", "", None):
        return
    for stem in found.stems("qweight"):
        made = _weight(found, stem, config.get("bits"), awq=method == "awq")
        if made is not None:
            yield made


def _weight(found: Checkpoint, stem: str, bits: Any, *, awq: bool) -> Claim | None:
    codes, zero, scale = found.tensors[f"{stem}.qweight"], found.get(stem, "qzeros"), found.get(stem, "scales")
    order = found.get(stem, "g_idx")
    if bits not in ((4,) if awq else (2, 3, 4, 8)) or zero is None or scale is None or len(scale.shape) != 2:
        return None
    if {codes.dtype, zero.dtype} != {"I32"} or len(codes.shape) != 2:
        return None
    first, second = codes.shape
    cols, rows = (first, second * WORD // bits) if awq else (first * WORD // bits, second)
    groups = scale.shape[0]
    whole = rows * cols and groups and not cols * bits % WORD and not rows * bits % WORD
    if not whole or zero.shape != (groups, rows * bits // WORD) or scale.shape[1] != rows:
        return None
    if scale.dtype not in ("F16", "BF16", "F32") or (order is None and cols % groups):
        return None
    if order is not None and (order.dtype != "I32" or order.shape != (cols,)):
        return None
    stored: dict[str, StoredTensor] = {CODES: codes, ZERO: zero, SCALE: scale}
    stored |= {ORDER: order} if order is not None else {}
    plus_one = not awq and found.config.get("checkpoint_format") != "gptq_v2"
    label = "AWQ" if awq else "GPTQ"
    encoding = Transposed.shared(
        (1, 0), cols, bits=bits, shape=(rows, cols), along_rows=awq, scales=scale.dtype, plus_one=plus_one, label=label
    )
    parts = {role: Part(info) for role, info in stored.items()}
    return claimed(codes, f"{stem}.weight", (rows, cols), Packing(encoding, codes, parts))
