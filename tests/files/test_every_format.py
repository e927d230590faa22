"""Laws of every way to store a weight. The rows are those of the tables of formats: a new one is tested by being there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lora_merge
from lora_merge.dtypes import GGUF_TYPES, QUANTISED_DTYPES
from lora_merge.errors import InputError
from lora_merge.files.encodings.base import CODES, InvalidPart, OutOfRange
from lora_merge.files.formats import FORMATS
from lora_merge.files.formats.base import Checkpoint, WeightClaim
from lora_merge.files.formats.output import FILE_FORMATS, FOLDER_FORMATS, OutputFormat
from lora_merge.files.gguf.blocks import BLOCK_KINDS
from lora_merge.files.gguf.types import DECODED_ONLY_TYPES, ENCODED_TYPES
from lora_merge.proof.decoders import DECODERS
from lora_merge.proof.decoders.codes import BadPart
from lora_merge.proof.grids import Grid
from tests.files import quantised_forms
from tests.files.every_format import EXAMPLES, IN_EIGHTS, ROWS, WEIGHT, Example, Weight, in_memory, weights
from tests.files.quantised_forms import FORMS, note
from tests.kit.files import load, save
from tests.kit.gguf_files import Array
from tests.kit.pairs import examples
from tests.kit.quantised import NAMES, SIZES, adapter, base, same
from tests.kit.readme import ROOT
from tests.kit.tensors import rand


def numbers(count: int) -> Iterator[tuple[str, Tensor]]:
    """Numbers of every size: none, usual, tiny, huge, of both signs and of one, blocks of each beside each other."""
    usual = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02
    beside = usual.clone()
    beside[: count // 3], beside[count // 3 : count // 2], beside[-16:] = 0, beside[count // 3 : count // 2] * 5e4, 1e-6
    yield "zeros", torch.zeros(count)
    yield "usual", usual
    yield "tiny", usual * 1e-3
    yield "next to nothing", usual * 1e-30
    yield "large", usual * 3e6
    yield "huge", usual * 1e32
    yield "the largest", torch.where(usual > 0, 3.4e38, -3.4e38)
    yield "of one sign", usual.abs() + 0.01
    yield "of the other", -usual.abs() * 3
    yield "beside each other", beside


@cache
def claiming(name: str) -> Callable[[Checkpoint], Iterable[WeightClaim | None]]:
    """The format that reads the example of a row."""
    checkpoint = EXAMPLES[name]((32, 64)).checkpoint()
    (claim,) = (claim for claim in FORMATS if any(claim(checkpoint)))
    return claim


def test_every_format_has_an_example_and_every_encoding_a_second_decoder() -> None:
    assert {claiming(name) for name in EXAMPLES} == set(FORMATS)
    assert {type(w.encoding).__name__ for name in ROWS for w in weights(name)} == set(DECODERS)
    assert BLOCK_KINDS.keys() == ENCODED_TYPES


def test_values_of_dtype_that_quantise_are_the_formats_of_outputs() -> None:
    assert {*QUANTISED_DTYPES} == {*FILE_FORMATS, *FOLDER_FORMATS, *GGUF_TYPES}


@pytest.mark.parametrize("form", [*FILE_FORMATS.values(), *FOLDER_FORMATS.values()])
def test_format_module_reads_what_it_writes(form: OutputFormat) -> None:
    """By the file that wrote it and no other, with the settings that it was written with."""
    (plain,) = in_memory({WEIGHT: torch.zeros(128, 256)}).values()
    new = form.make(plain)
    assert new is not None
    tensors = {t.name: t for t in (new.packing.codes, *new.others) if t is not None}
    checkpoint = Checkpoint(tensors, {}, form.section([]) if form.section else {})
    ((reader, weight),) = ((claim.__module__, weight) for claim in FORMATS for weight in claim(checkpoint))
    assert (reader, weight.weight.name, weight.weight.shape) == (form.make.__module__, WEIGHT, (128, 256))
    assert weight.packing.codes is not None and weight.packing.parts == new.packing.parts
    written, read = (
        {k: v for k, v in vars(p.encoding).items() if k not in ("new_scales", "label")}
        for p in (new.packing, weight.packing)
    )
    assert {k for k in written if written[k] != read[k]} <= {"ends"}  # int8 is written without its lowest code


@pytest.mark.few(7)
@pytest.mark.parametrize("name", ROWS)
def test_new_numbers_lie_within_half_a_step_or_are_refused(name: str) -> None:
    """Of every size in one shape; usual ones in another shape and in fp64 too."""
    for nth, found in enumerate(weights(name)):
        for what, values in [] if found.encoding.decode_only else numbers(found.total):
            usual = what in {"usual", "beside each other"}
            for wide in (values, values.double()) if usual else (values,) if not nth else ():
                try:
                    made = found.encoded(wide)
                except OutOfRange:
                    assert what in {"large", "huge", "the largest", "beside each other"}
                    continue
                got, grid = made.proven()
                want = values.double().numpy()
                want = want if grid.turn is None else grid.turn(want)
                off = np.abs(got - want) / np.maximum(grid.step(want), 1e-300)
                assert off.max() <= 0.5 + 1e-4, f"{what}: {off.max()} steps"


POSITIVE = {"ScaledCodes": "scale", "PackedInts": "scale", "Fp4": "whole"}
"""Class of an encoding → the role of its scales that only numbers other than 0 need."""


@pytest.mark.few(15)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if "low-rank" not in name])
def test_zeros_may_have_the_scale_0(name: str) -> None:
    """They are decoded as zeros, stay so, and become other numbers; other codes with that scale are refused."""
    for found in weights(name):
        role = POSITIVE.get(type(found.encoding).__name__, "")
        if (
            role not in found.raw
            or getattr(found.encoding, "kind", "") == "E8M0"
            or getattr(found.encoding, "divided", False)
        ):
            continue
        raw = {role: bytes(len(found.raw[role]))}
        with pytest.raises(InvalidPart, match="for codes that are not 0"):
            found._replace(raw={**found.raw, **raw}).decoded()
        nothing = found.encoded(torch.zeros(found.total))
        stored = nothing._replace(raw={**nothing.raw, **raw})
        assert not stored.decoded().any() and not stored.proven()[0].any()
        assert not stored.encoded(torch.zeros(found.total)).decoded().any()
        within_half_a_step(stored, torch.randn(found.total, generator=torch.Generator().manual_seed(2)) * 0.02)


@pytest.mark.parametrize("name", EXAMPLES)
def test_tensor_without_axes_makes_no_format_fail(name: str) -> None:
    example = EXAMPLES[name]((32, 64))
    for last, tensor in example.layer.items():
        layer = {**example.layer, last: torch.zeros((), dtype=tensor.dtype)}
        for claim in FORMATS:
            tuple(claim(example._replace(layer=layer).checkpoint()))


TABLES = {"map", "nested_map", "book", "order"}
"""Roles that are no scales, shifts or factors."""


def without_a_scale(found: Weight) -> Iterator[Weight]:
    """The weight with zeros in place of one kind of its scales; of blocks of bytes, in place of where scales are."""
    codes = found.raw[CODES]
    if type(found.encoding).__name__ == "Ggml":
        for some in (np.s_[:4], np.s_[-8:]):
            blocks = np.frombuffer(codes, np.uint8).reshape(-1, found.encoding.unit[1]).copy()
            blocks[:, some] = 0
            yield found._replace(raw={**found.raw, CODES: blocks.tobytes()})
    for role in found.raw.keys() - TABLES - {CODES}:
        yield found._replace(raw={**found.raw, role: bytes(len(found.raw[role]))})


@pytest.mark.few(14)
@pytest.mark.parametrize("name", ROWS)
def test_codes_of_the_scale_0_are_zeros_to_both_decoders(name: str) -> None:
    """To the proof too no number beside them is within half a step, and no step is 0, by which it divides."""
    for stored in chain.from_iterable(map(without_a_scale, weights(name))):
        try:
            got, (exact, grid) = stored.decoded().numpy(), stored.proven()
        except (InvalidPart, BadPart):
            continue
        assert not exact[got == 0].any()
        assert (grid.step(exact) > 0).all()


DRAWS = 8


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ROWS)
def test_mean_of_draws_is_the_number_up_to_the_ends_of_the_range(name: str) -> None:
    """The numbers of a weight grow by less than half a step of any format, by less than that of most, and by more."""
    found = weights(name)[0]
    if found.encoding.decode_only:
        pytest.skip("its numbers are not drawn")
    usual = torch.randn(found.total, generator=torch.Generator().manual_seed(1)) * 0.02
    before = (found.encoded(usual) if name.startswith("new ") else found).decoded()
    for growth in (1.003, 1.02, 1.1):
        values, mean = before * growth, torch.zeros(found.total, dtype=torch.float64)
        for n in range(DRAWS):
            made = found.encoded(values, torch.full((found.total,), (n + 0.5) / DRAWS))
            mean += made.decoded().double() / DRAWS
        grid = made.proven()[1]
        off = (mean - values.double()).abs().numpy() / np.maximum(grid.step(values.double().numpy()), 1e-300)
        # A draw of a rotated row moves all its numbers.
        assert off.max() <= (0.55 if grid.turn is None else 2) / DRAWS, f"× {growth}: {off.max()} steps"


STORED = [name for name in ROWS if not name.startswith("new ")]


@pytest.mark.few(60)
@pytest.mark.parametrize("name", STORED)
def test_decoders_read_the_same_numbers(name: str) -> None:
    """In fp32 and in float64; where a number is the difference of two larger ones, the proof allows for theirs. It is
    the fast test of each row: the list is not thinned out."""
    for found in weights(name):
        (exact, grid), got = found.proven(), found.decoded().double().numpy()
        want = exact if grid.turn is None else grid.turn(exact)
        assert (np.abs(got - want) <= grid.lost(want) + 2.0**-149).all(), "the smallest number of fp32"
        rows_stand_alone(found, exact, grid)


def rows_stand_alone(found: Weight, values: Array, grid: Grid) -> None:
    """Hold rows that the proof reads alone to those of the whole weight, which it reads at once."""
    if grid.turn is None:
        some = np.arange(found.total // found.shape[-1])[1::3]
        alone, own = found.rows_alone(some)
        chosen = (some[:, None] * found.shape[-1] + np.arange(found.shape[-1])).ravel()
        assert np.array_equal(alone.ravel(), values[chosen])
        assert np.array_equal(own.step(alone).ravel(), grid.step(values)[chosen])


def within_half_a_step(found: Weight, values: Tensor) -> None:
    """Store new numbers, hold each to the exact one, and rows that are read alone to those of the whole weight."""
    new = found.encoded(values)
    made, grid = new.proven()
    rows_stand_alone(new, made, grid)
    want = values.double().numpy()
    want = want if grid.turn is None else grid.turn(want)
    assert (np.abs(made - want) / np.maximum(grid.step(want), 1e-300)).max() <= 0.5 + 1e-4


@settings(max_examples=examples(12), deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS.keys() - IN_EIGHTS)), rows=st.integers(9, 140), wide=st.integers(1, 5),
    scale=st.sampled_from([2e-6, 0.02, 50.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_weights_of_any_shape_and_size_are_read_and_written(
    name: str, rows: int, wide: int, scale: float, seed: int
) -> None:
    """As the library reads them, where it stores no rows to fill up; with a block of zeros, and a change of 1 %.

    compressed-tensors reads no zero points of fewer than nine rows.
    """
    form, shape = FORMS[name], (rows, 64 * wide)
    numbers = rand(*shape, seed=seed, scale=scale)
    numbers[rows // 2, :64] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_forms, "SHAPE", shape)
        layer = form.make(numbers)
        found, read = Example(layer | note(form), form.config).weight(), form.read
        if found.shape == shape:
            want = form.turn(read(layer).double()).reshape(-1)
            got = form.turn(found.decoded().double().view(shape)).reshape(-1)
            torch.testing.assert_close(got, want, rtol=1e-5 + form.slack, atol=1e-6 * float(want.abs().max()))
    values = found.decoded()
    within_half_a_step(found, values + 0.01 * scale * rand(*values.shape, seed=seed + 1))


NAN = {
    "F32": b"\0\0\xc0\x7f", "F16": b"\0\x7e", "BF16": b"\xc0\x7f",
    "F8_E4M3": b"\x7f", "F8_E5M2": b"\x7d", "F8_E8M0": b"\xff", "F8_E4M3FNUZ": b"\x80", "F8_E5M2FNUZ": b"\x80",
}  # fmt: skip
"""Dtype → the bytes of a number that is none."""


def not_numbers(found: Weight) -> Iterator[tuple[str, str, bytes]]:
    """(part, what, its bytes) with one entry that is not a number, for each part that can hold one."""
    for role, part in {CODES: None, **found.packing.parts}.items():
        kind = getattr(found.encoding, "dtype", "") if part is None else part.info.dtype
        raw = bytearray(found.raw[role])
        for dtype, nan in {**NAN, **({"U8": b"\xff"} if powers(found, role) else {})}.items():
            if kind == dtype:
                spoilt = raw.copy()
                at = len(raw) // 2 // len(nan) * len(nan) * (role == CODES)
                spoilt[at : at + len(nan)] = nan
                yield role, f"{dtype} {nan.hex()}", bytes(spoilt)


def powers(found: Weight, role: str) -> bool:
    """Whether the bytes of a part are powers of two."""
    return role == "scale" and getattr(found.encoding, "kind", "") == "E8M0"


@pytest.mark.few(19)
@pytest.mark.parametrize("name", STORED)
def test_nan_is_refused(name: str) -> None:
    """In codes, scales, zero points, tables; the decoders of the proof refuse it too, but for codes."""
    found = weights(name)[0]
    assert found.decoded().isfinite().all()
    for role, what, raw in not_numbers(found):
        bad = found._replace(raw={**found.raw, role: raw})
        with pytest.raises(InvalidPart):
            bad.decoded()
            pytest.fail(f"{role}: {what}")
        if role != CODES:
            with pytest.raises(BadPart):
                bad.proven()
                pytest.fail(f"{role}: {what}, by the proof")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["ModelOpt fp8", "block fp8", "ComfyUI mxfp8", "ComfyUI nvfp4"])
def test_nan_is_copied_where_no_adapter_changes_the_weight(name: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    lora, last = save(adapter(), tmp_path / "lora.safetensors"), "weight_scale" if name == "ComfyUI nvfp4" else "weight"
    for number, layer in enumerate(NAMES):
        spoilt = {key: tensor.clone() for key, tensor in tensors.items()}
        spoilt[f"{layer}.{last}"].view(-1).view(torch.uint8)[5] = 0x7F
        save(spoilt, file)
        out = tmp_path / (f"out{number}" if source.is_dir() else f"out{number}.safetensors")
        for dtype in ("bf16", "keep"):
            if SIZES[number] or dtype == "bf16":
                with pytest.raises(InputError, match="cannot be decoded") as caught:
                    lora_merge.merge(source, lora, out, dtype=dtype)
                assert layer in caught.value.where and not out.exists()
            else:
                lora_merge.merge(source, lora, out)
                made = load(out / "model.safetensors" if source.is_dir() else out)
                assert all(same(made[key], spoilt[key]) for key in spoilt if key.startswith(layer))


PAGE = (ROOT / "configs" / "site" / "pages" / "formats.md").read_text(encoding="utf-8")


def test_page_describes_every_format_as_the_code_does() -> None:
    """Which file reads it, whether it is kept, which types of GGUF there are, and what an output can be."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ]
    told = [row for row in cells if len(row) == 4 and row[2] in {"yes", "no"}]
    found = set()
    for name in EXAMPLES:
        claim = claiming(name)
        kept = not weights(name)[0].encoding.decode_only
        found.add((claim.__module__.rpartition(".")[2], "yes" if kept else "no"))
    assert {(row[1].strip("`"), row[2]) for row in told if "GGUF" not in row[0]} == found
    types = {row[2]: {*row[0].removeprefix("GGUF: ").split(", ")} for row in told if "GGUF" in row[0]}
    assert types == {"yes": ENCODED_TYPES, "no": DECODED_ONLY_TYPES}
    made = [
        re.findall(r"`([a-z0-9_]+)`", row[0])
        for row in cells
        if len(row) == 4 and row[0].startswith("`") and " of " in row[0]
    ]
    assert [sorted(names) for names in made[-3:]] == [sorted(FILE_FORMATS), sorted(FOLDER_FORMATS), sorted(GGUF_TYPES)]
