"""Blocks of GGUF types: the `gguf` library reads and writes them as this project does."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.files.encodings.base import CODES, InvalidPart, OutOfRange
from lora_merge.files.gguf.blocks import BLOCK_KINDS, decode, encode
from lora_merge.files.gguf.encoding import ggml
from lora_merge.files.gguf.types import DECODED_ONLY_TYPES, ENCODED_TYPES, GGML_TYPES
from lora_merge.proof.decoders.codes import BadPart
from lora_merge.proof.decoders.ggml import BLOCK_FORMS, blocks
from lora_merge.proof.decoders.ggml_grids import points
from tests.kit.gguf_files import SCALES, Array, encoded
from tests.kit.pairs import examples

WRITTEN = sorted(ENCODED_TYPES - SCALES.keys())
"""Types that the library writes too."""


def raw_blocks(kind: str, count: int, seed: int = 0) -> Array:
    """Random bytes with scales of a usual size, and some of zero."""
    raw = np.random.default_rng(seed).integers(0, 256, (count, GGML_TYPES[kind].unit[1]), dtype=np.uint8)
    layout = BLOCK_KINDS[kind].layout
    for at in (layout.d, layout.m):
        if at is not None:
            scales = np.random.default_rng(seed + 1).normal(0, 0.01, (count, 1)).astype(np.float16)
            raw[:, at : at + 2] = np.where(np.arange(count)[:, None] % 7 == 3, 0, scales.view(np.uint8))
    if layout.d is None:
        low, high = (100, 140) if kind == "MXFP4" else (0, 0x7E)
        raw[:, : layout.subs] = np.random.default_rng(seed).integers(low, high, (count, layout.subs))
    return raw


def flat(raw: Array) -> torch.Tensor:
    return torch.from_numpy(raw.reshape(-1).copy())


def by_library(raw: Array, kind: str) -> Array:
    return quants.dequantize(raw, GGMLQuantizationType[kind])


def steps(raw: torch.Tensor, kind: str, values: Array) -> Array:
    """How many steps of their block the numbers of blocks are away from values."""
    levels, grid = blocks({"codes": raw.numpy().tobytes()}, SimpleNamespace(kind=kind, head=0, offset=0.0), 0, 0)
    wide = values.ravel().astype(np.float64)
    return np.abs(grid.value(levels) - wide) / np.maximum(grid.step(wide), 1e-30)


def test_every_type_that_is_read_has_two_decoders() -> None:
    assert ENCODED_TYPES == BLOCK_KINDS.keys() == BLOCK_FORMS.keys()
    for number in GGMLQuantizationType:
        assert GGML_TYPES[number.name].number == number.value
        assert GGML_TYPES[number.name].unit == quants.GGML_QUANT_SIZES[number]


@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES))
def test_blocks_are_decoded_as_the_library_does(kind: str) -> None:
    raw = raw_blocks(kind, 40)
    wanted = by_library(raw, kind).ravel()
    np.testing.assert_array_equal(decode(kind, flat(raw)).numpy(), wanted)
    levels, grid = blocks({"codes": raw.tobytes()}, SimpleNamespace(kind=kind, head=0, offset=0.0), 0, 0)
    np.testing.assert_allclose(grid.value(levels), wanted, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES - {"Q8_0", "TQ2_0"}))
def test_unchanged_numbers_stay_what_they_are(kind: str) -> None:
    """In Q8_0 and TQ2_0 too, but for the levels -128 and 2, which no program writes."""
    raw = raw_blocks(kind, 40)
    values = decode(kind, flat(raw))
    np.testing.assert_array_equal(decode(kind, encode(kind, values.clone(), flat(raw))).numpy(), values.numpy())


@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES))
def test_scales_stay_where_they_cover_the_new_numbers(kind: str) -> None:
    raw = flat(encoded(np.random.default_rng(1).normal(0, 0.02, (8, 256)), kind))
    values = decode(kind, raw)
    _, grid = blocks({"codes": raw.numpy().tobytes()}, SimpleNamespace(kind=kind, head=0, offset=0.0), 0, 0)
    small = values + 0.3 * torch.from_numpy(grid.step(values.double().numpy()) / 2).float()
    made = encode(kind, small, raw)
    assert torch.equal(decode(kind, made), values), "a change of a third of a half step changes nothing"


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES))
@given(
    scale=st.sampled_from([3e-7, 1e-3, 0.02, 30.0]),
    seed=st.integers(0, 99),
    before=st.sampled_from(["zeros", "others"]),
)
@settings(max_examples=examples(8), deadline=None)
def test_new_numbers_lie_within_half_a_step(kind: str, scale: float, seed: int, before: str) -> None:
    """Whatever the blocks held before: nothing, other numbers, scales of another size."""
    random = np.random.default_rng(seed)
    scale *= 0.1 if kind == "NVFP4" else 1  # its numbers end at 2688
    values = (random.standard_normal((6, 256)) * scale).astype(np.float32)
    values[1], values[2], values[3], values[4] = 0, abs(values[2]), -abs(values[3]), 0.7 * scale
    values[5, ::3] *= 40
    count = values.size // GGML_TYPES[kind].unit[0]
    old = flat(
        raw_blocks(kind, count, seed) if before == "others" else np.zeros((count, GGML_TYPES[kind].unit[1]), np.uint8)
    )
    for dtype in (torch.float32, torch.float64):
        made = encode(kind, torch.from_numpy(values).to(dtype).ravel(), old)
        assert steps(made, kind, values).max() <= 0.5 + 1e-5


@pytest.mark.parametrize("kind", WRITTEN)
def test_new_blocks_are_as_good_as_the_library_s(kind: str) -> None:
    values = np.random.default_rng(3).normal(0, 0.02, (64, 256)).astype(np.float32)
    count = values.size // GGML_TYPES[kind].unit[0]
    own = decode(
        kind,
        encode(
            kind, torch.from_numpy(values).ravel(), torch.zeros(count * GGML_TYPES[kind].unit[1], dtype=torch.uint8)
        ),
    )
    other = by_library(quants.quantize(values, GGMLQuantizationType[kind]), kind)
    assert np.square(own.numpy() - values.ravel()).mean() <= 1.1 * np.square(other - values).mean()


@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES))
def test_scales_that_are_no_numbers_are_refused(kind: str) -> None:
    layout = BLOCK_KINDS[kind].layout
    for at in [n for n in (layout.d, layout.m) if n is not None] or [0]:
        raw = raw_blocks(kind, 3)
        raw[1, at : at + 2] = 255  # NaN in f16, and in e8m0
        with pytest.raises(InvalidPart, match="not a number"):
            decode(kind, flat(raw))
        with pytest.raises(BadPart):
            steps(flat(raw), kind, np.zeros(3 * GGML_TYPES[kind].unit[0]))


@pytest.mark.parametrize("kind", sorted(ENCODED_TYPES - {"MXFP4"}))
def test_numbers_beyond_the_largest_scale_are_refused(kind: str) -> None:
    numbers, size = GGML_TYPES[kind].unit
    with pytest.raises(OutOfRange):
        encode(kind, torch.full((numbers,), -1e30), torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("kind", sorted(DECODED_ONLY_TYPES))
def test_points_of_grids_are_decoded_as_the_library_does(kind: str) -> None:
    raw = encoded(np.zeros((24, 256)), kind).reshape(24, -1)
    raw[:, :] = np.where(np.arange(24)[:, None] == 7, 0, raw)
    wanted = by_library(raw, kind).ravel()
    assert len(np.unique(np.abs(wanted))) > 20
    made = ggml(kind).decode({CODES: flat(raw)}, 0, raw.size)
    np.testing.assert_allclose(made.numpy(), wanted, rtol=2e-7, atol=0)
    levels, grid = points({"codes": raw.tobytes()}, SimpleNamespace(kind=kind, head=0), 0, 0)
    np.testing.assert_allclose(grid.value(levels), wanted, rtol=3e-7, atol=1e-30)
    heads = ggml(kind, head=8, cols=256).decode({CODES: flat(raw)}, 0, raw.size).view(3, 2, 4, 256)
    np.testing.assert_array_equal(heads.transpose(1, 2).reshape(-1).numpy(), made.numpy())
    raw[:, [49, 51, 53, 55] if kind == "IQ1_M" else [0, 1]] = 255
    with pytest.raises(InvalidPart, match="not a number"):
        ggml(kind).decode({CODES: flat(raw)}, 0, raw.size)
    with pytest.raises(BadPart, match="not a number"):
        points({"codes": raw.tobytes()}, SimpleNamespace(kind=kind, head=0), 0, 0)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16", "BF16", "F32"])
def test_heads_are_stored_with_alternating_halves(kind: str) -> None:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    rows, cols, heads = 16, 256, 2
    logical = np.random.default_rng(0).normal(0, 0.02, (rows, cols)).astype(np.float32)
    stored = logical.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)
    plain, turned = ggml(kind), ggml(kind, head=rows // heads, cols=cols)
    assert turned.group == rows // heads * cols
    empty = {CODES: torch.zeros(plain.nbytes(stored.size), dtype=torch.uint8)}
    made = plain.encode(torch.from_numpy(stored).ravel(), empty)
    assert torch.equal(turned.encode(torch.from_numpy(logical).ravel(), empty)[CODES], made[CODES])
    order = turned.decode(made, 0, stored.size).reshape(rows, cols)
    assert torch.equal(order[1], plain.decode(made, 0, stored.size).reshape(rows, cols)[2])
    levels, grid = blocks({"codes": made[CODES].numpy().tobytes()}, turned, 0, 0)
    np.testing.assert_allclose(grid.value(levels), order.ravel(), rtol=3e-7, atol=1e-9)


def test_norms_of_gemma_are_stored_plus_one() -> None:
    norm = ggml("F32", offset=1.0)
    made = norm.encode(torch.tensor([0.25, -0.5]), {CODES: torch.zeros(8, dtype=torch.uint8)})
    assert made[CODES].view(torch.float32).tolist() == [1.25, 0.5]
    assert norm.decode(made, 0, 2).tolist() == [0.25, -0.5]
    levels, grid = blocks({"codes": made[CODES].numpy().tobytes()}, norm, 0, 0)
    assert grid.value(levels).tolist() == [0.25, -0.5]


@pytest.mark.parametrize(("kind", "digits"), [("F16", 10), ("BF16", 7), ("F32", 23)])
def test_plain_numbers_are_rounded_once(kind: str, digits: int) -> None:
    """A number a little above a middle: by way of fp32 it would become the middle, and then the even neighbour."""
    values = torch.tensor([1 + 2.0 ** -(digits + 1) + 2.0**-45, -1 - 2.0 ** -(digits + 1)], dtype=torch.float64)
    codes = {CODES: torch.zeros(ggml(kind).nbytes(2), dtype=torch.uint8)}
    made = ggml(kind).encode(values, codes)
    assert ggml(kind).decode(made, 0, 2).tolist() == [1 + 2.0**-digits, -1.0]
