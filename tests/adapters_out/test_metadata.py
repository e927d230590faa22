"""What an output says of itself: as the programs that read it compute it, and never what is no longer true."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import lora_merge
from tests.kit.files import metadata
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import Tensors, rand

TOLD = {"ss_network_module": "networks.lora_flux", "ss_network_dim": "3", "ss_network_alpha": "1.5", "ss_seed": "7",
        "ss_base_model_version": "flux1", "ss_network_args": json.dumps({"train_t5xxl": "True"}), "sshs_model_hash": "old",
        "sshs_legacy_hash": "old", "modelspec.title": "a", "modelspec.date": "2026-01-01", "modelspec.hash_sha256": "0x1",
        "modelspec.architecture": "flux-1-dev/lora", "ss_output_name": "a", "ss_x": "é"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("metadata")
    save_file(flux(), made / "base.safetensors")
    save_file({k: v + rand(*v.shape, seed=5) for k, v in flux().items()}, made / "tuned.safetensors")
    save_file(of_flux(), made / "a.safetensors", TOLD)
    save_file(of_flux(), made / "b.safetensors", {**TOLD, "ss_output_name": "b", "ss_seed": "8"})
    save_file(of_flux(), made / "bare.safetensors")
    save_file(of_flux(loha=True), made / "loha.safetensors", {
        **TOLD, "ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps({"algo": "loha", "preset": "full"}),
    })  # fmt: skip
    large: Tensors = {}
    for n in range(6):
        name = f"lora_unet_single_blocks_{n}_linear2"
        large[f"{name}.lora_up.weight"] = rand(2000, 16, seed=n)
        large[f"{name}.lora_down.weight"] = rand(16, 10000, seed=n).half()
        large[f"{name}.alpha"] = torch.tensor(16.0)
    save_file(large, made / "large.safetensors", TOLD)
    return made


def made_by(command: str, folder: Path, output: Path) -> dict[str, str]:
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    todo: dict[str, Any] = {
        "combine": lambda: lora_merge.combine([a, b], output), "resize": lambda: lora_merge.resize(a, output, rank=2),
        "convert": lambda: lora_merge.convert(a, output, to="comfy"), "average": lambda: lora_merge.average([a, b], output),
        "extract": lambda: lora_merge.extract(folder / "base.safetensors", folder / "tuned.safetensors", output, rank=2,
                                              others="skip"),
    }  # fmt: skip
    todo[command]()
    return metadata(output)


def test_hashes_are_those_of_sd_scripts(folder: Path, tmp_path: Path) -> None:
    """Its recipe with the library's own writer: library/train_util.py, precalculate_safetensors_hashes."""
    for name in ("a", "large"):
        out = tmp_path / f"{name}.safetensors"
        lora_merge.convert(folder / f"{name}.safetensors", out)
        told, raw = metadata(out), out.read_bytes()
        assert told["sshs_model_hash"] == hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest()
        theirs = save(load_file(out), {k: v for k, v in told.items() if k.startswith("ss_")})
        assert told["sshs_legacy_hash"] == hashlib.sha256(theirs[0x100000:0x110000]).hexdigest()[:8]


KEPT = {  # command → entries of the inputs that stay, and that are gone
    "combine": ("ss_base_model_version ss_x ss_network_args modelspec.architecture", "ss_seed modelspec.date"),
    "average": ("ss_base_model_version ss_seed ss_output_name", "modelspec.date"),
    "resize": ("ss_seed ss_output_name ss_base_model_version modelspec.date ss_network_args", "modelspec.hash_sha256"),
    "convert": ("ss_seed ss_output_name ss_base_model_version modelspec.date ss_network_args", "modelspec.hash_sha256"),
    "extract": ("", "ss_seed modelspec.date"),
}


@pytest.mark.parametrize("command", KEPT)
def test_entries_stay_where_they_are_true(command: str, folder: Path, tmp_path: Path) -> None:
    told = made_by(command, folder, tmp_path / "made.safetensors")
    kept, gone = (text.split() for text in KEPT[command])
    last = {**TOLD, "ss_output_name": "b", "ss_seed": "8"} if command == "average" else TOLD
    assert {k: told.get(k) for k in kept} == {k: last[k] for k in kept}
    assert not told.keys() & {*gone}
    rank = {"combine": "3", "convert": "3", "average": "3"}.get(command, "2")  # equal factors are stored once
    assert told["ss_network_dim"] == rank
    assert told["ss_network_module"] == "networks.lora_flux"
    assert told["ss_base_model_version"] == "flux1"
    assert told["modelspec.title"] == "made"
    assert told["modelspec.architecture"] in ("flux-1-dev/lora", "flux-1/lora")
    assert told["sshs_model_hash"] not in ("", "old")
    assert ("modelspec.merged_from" in told) == (command in ("combine", "average"))


def test_network_module_is_that_of_the_output(folder: Path, tmp_path: Path) -> None:
    """LoHa that became LoRA is no module of LyCORIS; what is copied still is one."""
    loha = folder / "loha.safetensors"
    lora_merge.convert(loha, tmp_path / "lora.safetensors", to="kohya", algorithm="lora")
    lora_merge.convert(loha, tmp_path / "same.safetensors", to="kohya")
    lora_merge.convert(loha, tmp_path / "whole.safetensors", to="kohya", algorithm="full")
    lora, same, whole = (metadata(tmp_path / f"{n}.safetensors") for n in ("lora", "same", "whole"))
    assert (lora["ss_network_module"], json.loads(lora["ss_network_args"])) == ("networks.lora_flux", {})
    assert (same["ss_network_module"], json.loads(same["ss_network_args"])["algo"]) == ("lycoris.kohya", "loha")
    assert (whole["ss_network_module"], json.loads(whole["ss_network_args"])["algo"]) == ("lycoris.kohya", "full")


def test_adapter_without_entries_of_training_gets_none(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    lora_merge.resize(folder / "bare.safetensors", out, rank=2)
    assert metadata(out).keys() == {"format", "lora_merge.recipe"}


def test_convolutions_have_a_rank_of_their_own(tmp_path: Path) -> None:
    tensors = {
        "lora_unet_a.lora_up.weight": rand(6, 4), "lora_unet_a.lora_down.weight": rand(4, 6),
        "lora_unet_b.lora_up.weight": rand(6, 2, 1, 1), "lora_unet_b.lora_down.weight": rand(2, 6, 3, 3),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors", {"ss_network_module": "networks.lora", "ss_network_dim": "4"})
    lora_merge.resize(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=3, conv_rank=1, alpha="rank")
    told = metadata(tmp_path / "b.safetensors")
    assert (told["ss_network_dim"], told["ss_network_alpha"]) == ("3", "3")
    assert json.loads(told["ss_network_args"]) == {"conv_dim": "1", "conv_alpha": "1"}


def test_damaged_arguments_are_replaced(folder: Path, tmp_path: Path) -> None:
    for text in ("[1]", "{", "x" * 3):
        save_file(of_flux(), tmp_path / "a.safetensors", {**TOLD, "ss_network_args": text})
        lora_merge.resize(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rank=2, overwrite=True)
        assert json.loads(metadata(tmp_path / "b.safetensors")["ss_network_args"]) == {}


def test_diffusers_gets_the_ranks_from_the_entry_that_it_trusts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    lora_merge.convert(folder / "a.safetensors", out, to="diffusers", rank=3, rank_for={"re:final_layer_adaLN": 2})
    told = json.loads(metadata(out)["lora_adapter_metadata"])
    assert (told["transformer.r"], told["transformer.lora_alpha"]) == (3, 3)
    assert told["transformer.rank_pattern"] == {r"^norm_out\.linear$": 2}
    assert "transformer_blocks.0.attn.to_q" in told["transformer.target_modules"]
    assert "lora_adapter_metadata" not in made_by("convert", folder, tmp_path / "comfy.safetensors")


def test_sum_of_files_without_metadata_says_what_reads_it(tmp_path: Path) -> None:
    """Programs that read kohya's words look for the module, the rank and the hashes."""
    tensors = {"lora_unet_x.lora_down.weight": torch.ones(2, 8), "lora_unet_x.lora_up.weight": torch.ones(8, 2),
               "lora_unet_x.alpha": torch.tensor(2.0)}  # fmt: skip
    for name, factor in (("a", 1.0), ("b", 2.0)):
        down = torch.eye(2, 8) * factor
        save_file({**tensors, "lora_unet_x.lora_down.weight": down}, tmp_path / f"{name}.safetensors")
    out = tmp_path / "o.safetensors"
    lora_merge.combine([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], out)
    told = metadata(out)
    assert told["ss_network_module"] == "networks.lora" and told["ss_network_dim"] == "4"
    data = out.read_bytes()
    assert told["sshs_model_hash"] == hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
