"""Stochastic rounding: changes that are smaller than a step survive on average, and the draws are the tensor's own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import UsageError
from lora_merge.files.encodings.arithmetic import E2M1
from lora_merge.files.encodings.stochastic_rounding import draws, to_floats, to_integers, to_table
from lora_merge.files.formats.bitsandbytes import NF4
from lora_merge.files.gguf.blocks import IQ4
from lora_merge.recipes.replay import prove
from tests.files.quantised_forms import FORMS, SHAPE
from tests.kit.files import load, save
from tests.kit.flux import flux
from tests.kit.quantised import NAMES, base, parts
from tests.kit.tensors import Tensors, rand

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BF16": torch.bfloat16, "F16": torch.float16}


def test_draws_are_uniform_and_belong_to_name_seed_and_place() -> None:
    draw = draws(0)
    whole = draw("w", 0, 2**16)
    assert 0 <= float(whole.min()) <= float(whole.max()) < 1
    assert torch.equal(draw("w", 1000, 50), whole[1000:1050])
    counts = torch.histc(whole, 16, 0, 1)
    assert float((counts - 4096).abs().max()) < 5 * 64
    for other in (draw("v", 0, 2**16), draws(1)("w", 0, 2**16), draw("w", 1, 2**16)):
        assert abs(float(torch.corrcoef(torch.stack([whole, other]))[0, 1])) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_become_a_neighbour_and_stay_right_on_average(dtype: str) -> None:
    kind = DTYPES[dtype]
    values = torch.cat(
        [rand(30, scale=s) for s in (1e-4, 0.02, 3.0)] + [torch.tensor([0.0, 1.0, -1.75, 447.0, -450.0])]
    )
    uniform = draws(3)("w", 0, 2000 * len(values)).view(2000, -1)
    made = to_floats(values.expand(2000, -1), dtype, uniform)
    assert torch.equal(made.to(kind).float(), made), "all are numbers of the dtype"
    held = values.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    spread = made.amax(0) - made.amin(0)
    assert ((made.mean(0) - held).abs() <= 0.06 * spread).all()
    exact = values.to(kind).float() == values
    assert not spread[exact].any()


def test_integers_and_tables_become_a_neighbour_and_stay_right_on_average() -> None:
    values, uniform = rand(40, scale=0.4), draws(5)("w", 0, 80_000).view(2000, 40)
    table = torch.tensor([1.0, -0.7, 0.0, 0.1, 0.25, -1.0, -0.2])
    many = values.repeat(2000, 1)
    for made in (to_integers(many, uniform), to_table(many, table, uniform)):
        inside = values.clamp(float(made.min()), float(made.max()))
        assert ((made.mean(0) - inside).abs() <= 0.05).all()
        assert all(len(column.unique()) <= 2 for column in made.T)


@pytest.mark.parametrize("table", [E2M1, NF4, tuple(reversed(NF4)), IQ4, (3.0, 1.0)], ids=len)
def test_draw_chooses_between_the_two_numbers_of_a_table_beside_a_value(table: tuple[float, ...]) -> None:
    """Held against a search, also where the table has zeros of both signs, at its numbers, and beyond its ends."""
    levels = torch.tensor(sorted({float(n) for n in table}))
    near = torch.cat([levels, (levels[1:] + levels[:-1]) / 2, levels * 1.01, levels * 0.99, torch.tensor([-0.0, 1e30])])
    values, uniform = near.repeat_interleave(3), torch.tensor([0.0, 0.5, 1 - 2**-24]).repeat(len(near))
    above = torch.tensor([int((levels <= v).sum()) for v in values]).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    want = torch.where(uniform * (high - low) < values - low, high, low)
    assert torch.equal(to_table(values, torch.tensor(table), uniform), want)


def small(name: str = NAMES[0]) -> Tensors:
    """A change of about 1 % of the weight: less than half a step of most formats."""
    stem = f"base_model.model.{name}"
    return {f"{stem}.lora_A.weight": rand(4, SHAPE[1], seed=1), f"{stem}.lora_B.weight": rand(SHAPE[0], 4, scale=0.001)}


KEPT = ("ComfyUI int8 rotated", "ComfyUI mxfp8", "ComfyUI nvfp4", "compressed-tensors int4 with zero points",
        "bitsandbytes nf4 doubled")  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_small_change_survives(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    source, tensors = base(form, tmp_path / "base")
    lora, layer = small(), NAMES[0]
    path = save(lora, tmp_path / "lora.safetensors")
    change = lora[f"base_model.model.{layer}.lora_B.weight"] @ lora[f"base_model.model.{layer}.lora_A.weight"]
    before = form.read(parts(tensors, layer)).double()
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    report = lora_merge.merge(source, path, out, rounding="stochastic")
    made = load(out / "model.safetensors" if source.is_dir() else out)
    applied = form.read(parts(made, layer)).double() - before
    assert abs(float((applied * change).sum() / (change * change).sum()) - 1) < 0.2
    assert report.verified is not None
    assert report.verified["tensors"] == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3fn"])
def test_plain_numbers_are_rounded_so_too_and_windows_do_not_matter(dtype: str, tmp_path: Path) -> None:
    weights = {f"{layer}.weight": rand(*SHAPE, seed=n, scale=0.02) for n, layer in enumerate(NAMES)}
    source, path = save(weights, tmp_path / "base.safetensors"), save(small(), tmp_path / "lora.safetensors")
    found = []
    for number, seed in enumerate((0, 0, 1)):
        out, memory = tmp_path / f"{number}.safetensors", "8MiB" if number else "1GiB"
        lora_merge.merge(source, path, out, dtype=dtype, rounding="stochastic", seed=seed, max_memory=memory)
        found.append(load(out))
    with pytest.warns(UserWarning, match="lost in the rounding") if dtype.startswith("fp8") else nullcontext():
        found.append(lora_merge.merge_state_dict(weights, [small()], dtype=dtype, rounding="stochastic"))
    raw = [t[f"{NAMES[0]}.weight"].view(torch.uint8) for t in found]
    assert torch.equal(raw[0], raw[1])
    assert torch.equal(raw[0], raw[3])
    assert not torch.equal(raw[0], raw[2])
    if dtype == "bf16":
        return
    lora_merge.replay(tmp_path / "2.safetensors", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3fn", "fp8_scaled"])
def test_every_row_of_a_weight_that_is_changed_in_part_is_rounded_so(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fused weight too, however it is cut; weights that no adapter changes have the nearest numbers."""
    weights = {name: w.repeat(4, 4) if w.ndim > 1 else w for name, w in flux().items()}
    changed, other = (f"double_blocks.0.{stream}_attn.qkv.weight" for stream in ("img", "txt"))
    rows, cols = weights[changed].shape
    layer = "transformer.transformer_blocks.0.attn.to_q"
    lora = {f"{layer}.lora_A.weight": rand(4, cols), f"{layer}.lora_B.weight": rand(rows // 3, 4)}
    source, path = save(weights, tmp_path / "base.safetensors"), save(lora, tmp_path / "lora.safetensors")
    found = []
    for number, most in enumerate((2**20, 2 * cols)):
        monkeypatch.setattr("lora_merge.engine.row_blocks.BLOCK_ELEMENTS", most)
        out = tmp_path / f"{number}.safetensors"
        memory = "8MiB" if number else "1GiB"
        lora_merge.merge(source, path, out, dtype=dtype, rounding="stochastic", max_memory=memory)
        assert prove(out, full=True)["full"]
        found.append(load(out))
    lora_merge.merge(source, path, tmp_path / "nearest.safetensors", dtype=dtype)
    plain = load(tmp_path / "nearest.safetensors")
    if dtype != "fp8_scaled":  # which is for files alone
        found.append(lora_merge.merge_state_dict(weights, [lora], dtype=dtype, rounding="stochastic"))
    raw, *others = [{name: t.view(torch.uint8) for name, t in some.items() if t.ndim} for some in found]
    assert all(torch.equal(some[name], values) for some in others for name, values in raw.items())
    assert not torch.equal(plain[changed][rows // 3 :].view(torch.uint8), raw[changed][rows // 3 :])
    assert torch.equal(plain[other].view(torch.uint8), raw[other])


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, "x"])
def test_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(UsageError, match="whole number"):
        lora_merge.merge("base", "adapter", seed=seed)  # type: ignore[arg-type]
