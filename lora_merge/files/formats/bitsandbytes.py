"""Weights of bitsandbytes: nf4 and fp4, whose JSON is in a tensor next to the codes; int8 with a scale for each row.

https://github.com/bitsandbytes-foundation/bitsandbytes bitsandbytes/functional.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite, prod
from typing import Any, Final

from ...disk.reader import read_bytes
from ...dtypes import DTYPE_ROWS, StoredTensor
from ..encodings.base import Packing, WeightPart
from ..encodings.scaled_codes import ScaledTensors, scaled
from ..encodings.table import ABSMAX, MAP, NESTED, NESTED_MAP, TableCodes
from .base import (
    Checkpoint,
    Claims,
    NewWeight,
    WeightClaim,
    claimed,
    codes_of,
    new_note,
    new_tensor,
    new_weight,
    positive,
    read_note,
)

STATES: Final = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
ROLES: Final = {"absmax": ABSMAX, "quant_map": MAP, "nested_absmax": NESTED, "nested_quant_map": NESTED_MAP}

NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""bitsandbytes' table: quantiles of a normal distribution. Dettmers et al. 2023, arXiv:2305.14314, appendix E."""

FLAT: Final = 64  # values with one scale, of nf4


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield every weight of bitsandbytes."""
    for state in STATES:
        for name in checkpoint.stems(state):
            yield _four_bits(checkpoint, name, f"{name}.{state}")
    for stem in checkpoint.stems("SCB"):
        codes, form = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_format")
        scale = checkpoint.tensors[f"{stem}.SCB"]
        if codes is None or codes.dtype != "I8" or scale.shape != codes.shape[:1]:
            continue
        if form is not None and (form.nbytes != 1 or read_bytes(form) != b"\0"):
            continue  # an old order of the values, for one kind of device
        of = ScaledTensors(codes, scale, "bitsandbytes int8", checkpoint.present(stem, "weight_format"))
        yield claimed(codes, scaled(of, factor=1 / 127, ends=(-127, 127)))


def _four_bits(checkpoint: Checkpoint, name: str, mark: str) -> WeightClaim | None:
    """Return the claim of a weight by the JSON that says how it is stored; None if that contradicts the tensors."""
    codes, note = checkpoint.tensors.get(name), read_note(checkpoint.tensors[mark])
    state = note if isinstance(note, dict) else {}
    size, nested, doubled = _count(state, "blocksize"), _count(state, "nested_blocksize"), "nested_blocksize" in state
    shape, offset = state.get("shape"), state.get("nested_offset", 0.0)
    if codes is None or not isinstance(shape, list) or not shape or not all(map(positive, shape)):
        return None
    if not size or (doubled and not nested) or not isinstance(offset, float) or not isfinite(offset):
        return None
    # The sizes that the JSON asks for.
    total = prod(shape)
    size = min(size, total + total % 2)  # a larger block, of any size in the JSON, is the whole weight
    blocks = -(-total // size)
    nested = min(nested, blocks)
    # The other tensors must have these dtypes and sizes.
    sizes = {"absmax": ("U8" if doubled else "F32", blocks), "quant_map": ("F32", 16)}
    sizes |= {"nested_absmax": ("F32", -(-blocks // nested)), "nested_quant_map": ("F32", 256)} if doubled else {}
    tensors = {last: info for last in sizes if (info := checkpoint.get(name, last)) is not None}
    same = all((t.dtype, t.shape) == (sizes[last][0], (sizes[last][1],)) for last, t in tensors.items())
    if not same or len(tensors) < len(sizes) or size % 2 or codes.nbytes != -(-total // 2):
        return None
    units = {"absmax": (size, 1 if doubled else 4), "nested_absmax": (size * nested, 4)}
    parts = {ROLES[last]: WeightPart(info, *units.get(last, (0, 0))) for last, info in tensors.items()}
    label = f"bitsandbytes {state.get('quant_type', '4-bit')}"
    encoding = TableCodes.shared((2, 1), size * (nested or 1), size=size, nested=nested, offset=offset, label=label)
    packing = Packing(encoding, codes, parts, frozenset({mark}))
    return claimed(replace(codes, dtype="U8"), packing, name, tuple(shape))  # they may be stored as another dtype


def _count(state: Mapping[str, Any], key: str) -> int:
    """Return a positive whole number of the JSON; 0 for anything else."""
    number = state.get(key)
    return number if positive(number) else 0


def new_int8(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as int8 with a scale for each row, 127 times as large."""
    scale = new_tensor(weight, "SCB", "F32", weight.shape[:1])
    form = new_tensor(weight, "weight_format", "U8", (), b"\0")
    of = ScaledTensors(codes_of(weight, "I8", weight.shape), scale, "bitsandbytes int8")
    return new_weight(scaled(of, new_scales=True, factor=1 / 127, ends=(-127, 127)), form)


def new_nf4(weight: StoredTensor) -> NewWeight | None:
    """Return a matrix as nf4, without double quantisation."""
    total = prod(weight.shape)
    absmax = new_tensor(weight, "weight.absmax", "F32", (-(-total // FLAT),))
    table = new_tensor(weight, "weight.quant_map", "F32", (len(NF4),), struct.pack("<16f", *NF4))
    state = {
        "quant_type": "nf4", "blocksize": FLAT, "shape": list(weight.shape),
        "dtype": DTYPE_ROWS[weight.dtype].library if weight.dtype in ("F32", "F16", "BF16") else "bfloat16",
    }  # fmt: skip
    note = new_note(weight, "weight.quant_state.bitsandbytes__nf4", state, (absmax, table))
    parts = {ABSMAX: WeightPart(absmax, FLAT, 4), MAP: WeightPart(table)}
    codes = codes_of(weight, "U8", (total // 2, 1))
    encoding = TableCodes.shared((2, 1), FLAT, size=FLAT, label="bitsandbytes nf4", new_scales=True)
    return new_weight(Packing(encoding, codes, parts), note)


def section(unquantised: Sequence[str], *, bits: int) -> Mapping[str, Any]:
    """Return the section of config.json on 4 or 8 bits; `unquantised`: names of modules."""
    entries: dict[str, Any] = {
        "quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8,
        "llm_int8_skip_modules": list(unquantised),
    }  # fmt: skip
    if bits == 4:
        entries |= {
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": "bfloat16",
        }  # fmt: skip
    return entries
