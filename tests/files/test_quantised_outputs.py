"""Quantised outputs beside each other: what reports count, batches that share a base, and proofs without a recipe."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from jsonschema import validate

import lora_merge
from lora_merge.disk.reader import Reader
from lora_merge.dtypes import Source
from lora_merge.errors import VerificationFailed
from lora_merge.viewing.json_schemas import schema_of
from tests.kit.files import load, save
from tests.kit.tensors import rand

LAYERS = [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]
SIDE = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bf16 base, two adapters of its first two layers, and the base quantised with one of them."""
    base = {f"{name}.weight": rand(SIDE, SIDE, seed=i, scale=0.02).bfloat16() for i, name in enumerate(LAYERS)}
    save(base | {"model.embed_tokens.weight": rand(64, SIDE).bfloat16()}, tmp_path / "base.safetensors")
    for seed, name in enumerate(("ink", "oil")):
        lora = {}
        for layer in LAYERS[:2]:
            lora[f"{layer}.lora_A.weight"] = rand(4, SIDE, seed=seed)
            lora[f"{layer}.lora_B.weight"] = rand(SIDE, 4, seed=seed + 2, scale=0.01)
        save(lora, tmp_path / f"{name}.safetensors")
    return tmp_path


def merged(folder: Path, base: str, adapter: str, out: str, dtype: str = "keep") -> lora_merge.Report:
    source, lora, output = (folder / f"{name}.safetensors" for name in (base, adapter, out))
    return lora_merge.merge(source, lora, output, dtype=dtype, verify=False)


@pytest.mark.parametrize("dtype", ["fp8_scaled", "nvfp4"])
def test_report_counts_quantised_weights_encoded_ones_and_plain_matrices(dtype: str, folder: Path) -> None:
    assert merged(folder, "base", "ink", "plain").codes == {}
    new = merged(folder, "base", "ink", "new", dtype)
    assert new.codes == {"formats": {dtype: 3}, "encoded": 3, "plain": 1}
    assert f"format 3 of 4 matrices in {dtype}, all quantised anew; 1 unquantised" in repr(new)
    kept = merged(folder, "new", "oil", "kept")
    assert kept.codes == {"formats": {dtype: 3}, "encoded": 2, "plain": 1}
    assert merged(folder, "new", "oil", "back", "bf16").codes == {}
    validate(json.loads(kept.to_json()), schema_of("report"))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["fp8_scaled", "nvfp4"])
def test_jobs_of_a_batch_read_a_quantised_base_once_and_give_the_bytes_of_single_merges(
    dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(folder, "base", "ink", "new", dtype)
    read, read_into = Counter[str](), Reader.read_into

    def counted(self: Reader, buffer: memoryview, source: Source, offset: int) -> None:
        if isinstance(source, Path):
            read[source.name] += len(buffer)
        read_into(self, buffer, source, offset)

    for base, made in (("base", dtype), ("new", "keep")):
        alone = {name: merged(folder, base, name, f"{base}-{name}", made) for name in ("ink", "oil")}
        jobs = [
            {"base": folder / f"{base}.safetensors", "adapters": [folder / f"{name}.safetensors"], "dtype": made,
             "output": folder / f"{base}-{name}-too.safetensors", "verify": False}
            for name in alone
        ]  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(Reader, "read_into", counted)
            assert [r.status for r in lora_merge.run_batch(jobs)] == ["merged"] * 2
        source = folder / f"{base}.safetensors"
        # Twice would be a read for each job; scales of blocks may be fetched by two threads at once.
        assert source.stat().st_size <= read[source.name] < 2 * source.stat().st_size
        for name in alone:
            one, other = (load(folder / f"{base}-{name}{end}.safetensors") for end in ("", "-too"))
            assert one.keys() == other.keys()
            assert all(torch.equal(bits(one[key]), bits(other[key])) for key in one)


@pytest.mark.parametrize("dtype", ["fp8_scaled", "nvfp4"])
def test_quantised_output_is_proven_against_named_inputs_without_its_recipe(dtype: str, folder: Path) -> None:
    merged(folder, "base", "ink", "new", dtype)
    merged(folder, "new", "oil", "kept")
    for base, adapter, out in (("base", "ink", "new"), ("new", "oil", "kept")):
        inputs = folder / f"{base}.safetensors", folder / f"{adapter}.safetensors"
        bare = save(load(folder / f"{out}.safetensors"), folder / f"{out}-bare.safetensors")
        assert lora_merge.verify(bare, *inputs, full=True)["tensors"] == 2
        wrong = load(bare)
        bits(wrong[f"{LAYERS[0]}.weight"])[5] ^= 0x44  # a bit of the exponent, of both codes of a byte
        with pytest.raises(VerificationFailed):
            lora_merge.verify(save(wrong, bare), *inputs, full=True)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
