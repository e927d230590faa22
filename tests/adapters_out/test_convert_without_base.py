"""Conversions without a base: what the adapter's names and shapes tell, and what they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.errors import UsageError
from tests.kit.command_line import run
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import Tensors, rand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("assumed")
    save_file(flux(), made / "flux.safetensors")
    save_file(of_flux(), made / "lora.safetensors")
    save_file(of_flux(dora=True), made / "dora.safetensors")
    save_file(of_flux(loha=True), made / "loha.safetensors")
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("adapter", "chain"),
    [("lora", ("diffusers", "comfy", "peft", "kohya")), ("dora", ("diffusers", "kohya")), ("loha", ("comfy", "kohya"))],
)
def test_steps_without_a_base_write_what_they_write_with_one(
    adapter: str, chain: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    before = folder / f"{adapter}.safetensors"
    for to in chain:
        ending = "" if to == "peft" else ".safetensors"
        alone, based = tmp_path / f"{to}-alone{ending}", tmp_path / f"{to}-based{ending}"
        code, _, told = run("convert", before, "-o", alone, "--to", to)
        assert code == 0, told
        lora_merge.convert(before, based, to=to, base=folder / "flux.safetensors")
        files = [p / "adapter_model.safetensors" if p.is_dir() else p for p in (alone, based)]
        one, other = (load_file(p) for p in files)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        before = alone


def parts(*, every: bool) -> Tensors:
    """An adapter of diffusers for q and v of both kinds of blocks, or for all four parts of the second kind."""
    found: Tensors = {}
    names = {f"single_transformer_blocks.0.attn.to_{x}": 8 for x in "qv"} | {"transformer_blocks.0.attn.to_q": 8}
    names |= {"single_transformer_blocks.0.proj_mlp": 32} if every else {}
    for n, (name, rows) in enumerate(names.items()):
        found[f"transformer.{name}.lora_A.weight"] = rand(2, 8, seed=n)
        found[f"transformer.{name}.lora_B.weight"] = rand(rows, 2, seed=n)
    return found


def test_part_that_is_left_out_has_zero_rows_where_its_size_is_known(folder: Path, tmp_path: Path) -> None:
    save_file(parts(every=True), tmp_path / "a.safetensors")
    lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="kohya")
    ups = load_file(tmp_path / "b.safetensors")
    assert not ups["lora_unet_single_blocks_0_linear1.lora_up.weight"][8:16].any()
    assert not ups["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"][8:].any()
    wanted, got = (
        lora_merge.merge_state_dict(flux(), [tmp_path / name], compute_dtype="fp64")
        for name in ("a.safetensors", "b.safetensors")
    )
    assert all(torch.allclose(wanted[k], got[k], atol=1e-6) for k in wanted)


KOHYA_SD3 = "lora_unet_joint_blocks_{}_context_block_adaLN_modulation_1.lora_up.weight"
DIFFUSERS_SD3 = "transformer.transformer_blocks.{}.norm1_context.linear.lora_B.weight"


def sd3(last: int, blocks: int = 2, up: str = KOHYA_SD3) -> Tensors:
    """An adapter for the modulation of the text stream of SD3, whose last block has a third of the rows."""
    found: Tensors = {}
    for n in range(blocks):
        found[up.format(n)] = rand(last if n == blocks - 1 else 48, 2, seed=n)
        found[up.format(n).replace("_up", "_down").replace("_B", "_A")] = rand(2, 8, seed=n)
    return found


ASKS = {
    "the rows of a part": (parts(every=False), "kohya", "leaves out single_transformer_blocks.0.proj_mlp"),
    "the last block": (sd3(48), "diffusers", "which block is the last one"),
    "the last block in diffusers' words": (sd3(48, up=DIFFUSERS_SD3), "kohya", "which block is the last one"),
    "the only block": (sd3(16, 1), "diffusers", "which block is the last one"),
    "the model": ({"a.lora_A.weight": rand(2, 8), "a.lora_B.weight": rand(8, 2)}, "kohya", "match no known model"),
    "a name": (
        of_flux() | {"lora_unet_other.lora_up.weight": rand(8, 2), "lora_unet_other.lora_down.weight": rand(2, 8),
                     "lora_unet_other.alpha": torch.tensor(1.0)},
        "diffusers", "lora_unet_other is no known name",
    ),
    "a shape": ({"transformer.single_blocks.0.linear1.oft_blocks": rand(2, 4, 4)}, "kohya", "shape of a weight"),
}  # fmt: skip


@pytest.mark.parametrize("what", ASKS)
def test_facts_that_the_adapter_lacks_are_asked_for(what: str, tmp_path: Path) -> None:
    tensors, to, told = ASKS[what]
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=told) as failure:
        lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to=to)
    assert "base=MODEL" in failure.value.fix
    assert not (tmp_path / "b.safetensors").exists()


def test_last_block_is_recognised_by_its_rows(tmp_path: Path) -> None:
    """Its halves are swapped in diffusers, and those of no other block."""
    save_file(sd3(16), tmp_path / "a.safetensors")
    lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="diffusers")
    before, after = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    for n, order in ((0, range(48)), (1, [*range(8, 16), *range(8)])):
        assert torch.equal(after[DIFFUSERS_SD3.format(n)], before[KOHYA_SD3.format(n)][list(order)])


def test_formula_that_reads_the_base_asks_for_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="reads the weights of the base"):
        lora_merge.convert(
            folder / "dora.safetensors", tmp_path / "b.safetensors", to="kohya", algorithm="lora", rank=2
        )
    assert not (tmp_path / "b.safetensors").exists()
