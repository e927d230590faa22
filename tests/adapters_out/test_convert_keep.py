"""`--to keep`: an adapter in its own words, with another dtype, α, rank or algorithm; `--to xlabs`, `--to ai-toolkit`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from lora_merge.adapters_out import matrix_modules
from lora_merge.adapters_out.combine import plan
from lora_merge.adapters_out.delta import stored_module
from lora_merge.adapters_out.groups import Place
from lora_merge.adapters_out.module_tensors import StoredModule
from lora_merge.errors import FitError, VerificationFailed
from lora_merge.recipes.commands import COMMANDS
from tests.kit.command_line import run
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import Tensors, rand


def stored(folder: Path, tensors: Tensors) -> Path:
    path = folder / "a.safetensors"
    save_file(tensors, path)
    return path


ROWS: dict[str, dict[str, tuple[int, ...]]] = {
    "lora": {"lora_up.weight": (6, 2), "lora_down.weight": (2, 4), "alpha": ()},
    "processor": {"processor.to_q_lora.up.weight": (6, 2), "processor.to_q_lora.down.weight": (2, 4)},
    "named": {"lora_B.default.weight": (6, 2), "lora_A.default.weight": (2, 4)},
    "dora": {"lora_up.weight": (6, 2), "lora_down.weight": (2, 4), "alpha": (), "dora_scale": (6, 1)},
    "dora of inputs": {"lora_up.weight": (6, 2), "lora_down.weight": (2, 4), "alpha": (), "dora_scale": (1, 4)},
    "loha": {"hada_w1_a": (6, 2), "hada_w1_b": (2, 4), "hada_w2_a": (6, 2), "hada_w2_b": (2, 4), "alpha": ()},
    "lokr": {"lokr_w1": (2, 2), "lokr_w2_a": (3, 1), "lokr_w2_b": (1, 2), "alpha": ()},
    "tucker": {"lora_up.weight": (6, 2, 1, 1), "lora_mid.weight": (2, 2, 3, 3), "lora_down.weight": (2, 4, 1, 1), "alpha": ()},
    "bias": {"lora_up.weight": (6, 2), "lora_down.weight": (2, 4), "alpha": (), "diff_b": (6,)},
    "whole": {"diff": (6, 4), "diff_b": (6,)},
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "processor"])
def test_file_keeps_its_words_in_another_dtype(kind: str, tmp_path: Path) -> None:
    """The model need not be known."""
    tensors = {f"some.layer.{ending}": rand(*shape, seed=n) + 1 for n, (ending, shape) in enumerate(ROWS[kind].items())}
    out = tmp_path / "b.safetensors"
    code, _, told = run("convert", stored(tmp_path, tensors), "-o", out, "--dtype", "bf16")
    assert code == 0, told
    found = load_file(out)
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        wanted = torch.float32 if name.endswith("alpha") else torch.bfloat16
        assert torch.equal(value, tensors[name].to(wanted)), name


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "processor"])
@pytest.mark.parametrize("options", [{"algorithm": "lora"}, {"rank": 3}, {"alpha": 3.0}])
def test_file_keeps_its_words_in_another_form(kind: str, options: dict[str, object], tmp_path: Path) -> None:
    tensors = {f"some.layer.{ending}": rand(*shape, seed=n) + 1 for n, (ending, shape) in enumerate(ROWS[kind].items())}
    path, out = stored(tmp_path, tensors), tmp_path / "b.safetensors"
    lora_merge.convert((path, -0.5), out, dtype="fp32", **options)  # type: ignore[arg-type]
    name = "some.layer.to_q" if kind == "processor" else "some.layer"
    base = {f"{name}.weight": rand(6, 4)}
    before, after = (
        lora_merge.merge_state_dict(base, [given], compute_dtype="fp64") for given in ((path, -0.5), (out, 1))
    )
    close = 1e-5 if "rank" not in options or kind == "lora" else 0.5
    assert torch.allclose(before[f"{name}.weight"], after[f"{name}.weight"], atol=close)


def test_folder_of_peft_stays_one(tmp_path: Path) -> None:
    (source := tmp_path / "a").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": rand(2, 8), f"{name}.lora_B.weight": rand(8, 2)}
    save_file(tensors, source / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (source / "adapter_config.json").write_text(json.dumps(config))
    lora_merge.convert(source, tmp_path / "b", rank=1, dtype="fp16")
    made = json.loads((tmp_path / "b/adapter_config.json").read_text())
    assert (made["r"], made["lora_alpha"], made["task_type"]) == (1, 1, "CAUSAL_LM")
    assert {n: t.shape for n, t in load_file(tmp_path / "b/adapter_model.safetensors").items()} == {
        f"{name}.lora_A.weight": (1, 8), f"{name}.lora_B.weight": (8, 1)
    }  # fmt: skip


MODEL = {"task_type": "CAUSAL_LM", "base_model_name_or_path": "llama", "revision": "v2",
         "auto_mapping": {"base_model_class": "GPT2LMHeadModel", "parent_library": "transformers"}}  # fmt: skip
"""What a folder says of its model."""


def test_sum_of_folders_of_peft_is_a_folder_without_a_base_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are square and [in, out] in the model, which changes no factor; a file has to be named as one."""
    monkeypatch.chdir(tmp_path)
    name = "base_model.model.transformer.h.0.attn.c_proj"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["c_proj"], "fan_in_fan_out": True}
    pairs = [(rand(2, 8, seed=n), rand(8, 2, seed=n + 5)) for n in (0, 1)]
    for folder, (down, up) in zip("ab", pairs, strict=True):
        Path(folder).mkdir()
        save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, f"{folder}/adapter_model.safetensors")
        Path(folder, "adapter_config.json").write_text(json.dumps(config | MODEL))
    assert lora_merge.combine(["a", ("b", -0.5)]).output == str(tmp_path / "a+b.safetensors")
    assert lora_merge.combine(["a", ("b", -0.5)], "a+b").output == str(tmp_path / "a+b")
    made = json.loads(Path("a+b/adapter_config.json").read_text())
    assert {key: made.get(key) for key in MODEL} == MODEL
    assert (made["r"], made["lora_alpha"], made["fan_in_fan_out"]) == (4, 4, True)
    stored = load_file("a+b/adapter_model.safetensors")
    wanted = 4 * pairs[0][1] @ pairs[0][0] - 2 * pairs[1][1] @ pairs[1][0]
    assert torch.allclose(stored[f"{name}.lora_B.weight"] @ stored[f"{name}.lora_A.weight"], wanted, atol=1e-5)
    assert plan(COMMANDS["combine"].job(["a", "b"], "a+b", None, {})).planned  # as a batch that is run again does
    lora_merge.resize("a", "small/", rank=1)
    assert json.loads(Path("small/adapter_config.json").read_text())["r"] == 1
    assert Path(lora_merge.combine(["a", "b"], "c.safetensors").output).is_file()


def attention_of_flux(*, more: bool = False) -> Tensors:
    names = {
        f"transformer_blocks.0.attn.{n}": 8 for n in ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "to_add_out")
    }
    names |= {f"single_transformer_blocks.0.attn.to_{n}": 8 for n in "qkv"} | ({"x_embedder": 8} if more else {})
    found: Tensors = {}
    for n, (name, rows) in enumerate(names.items()):
        found[f"transformer.{name}.lora_A.weight"] = rand(2, 4 if more and name == "x_embedder" else 8, seed=n)
        found[f"transformer.{name}.lora_B.weight"] = rand(rows, 2, seed=n)
    return found


@pytest.mark.parametrize("based", [False, True])
def test_xlabs_files_hold_the_attention_of_flux(based: bool, tmp_path: Path) -> None:  # noqa: FBT001
    from diffusers.loaders.lora_conversion_utils import _convert_xlabs_flux_lora_to_diffusers

    path, out = stored(tmp_path, attention_of_flux()), tmp_path / "b.safetensors"
    save_file(flux(), tmp_path / "flux.safetensors")
    given = {"base": tmp_path / "flux.safetensors"} if based else {}
    lora_merge.convert(path, out, to="xlabs", **given)  # type: ignore[arg-type]
    assert {n.partition(".processor.")[2] for n in load_file(out)} == {
        f"{part}.{side}.weight" for part in ("qkv_lora1", "qkv_lora2", "proj_lora1", "proj_lora2", "qkv_lora")
        for side in ("up", "down")
    }  # fmt: skip
    _convert_xlabs_flux_lora_to_diffusers(load_file(out))  # refuses a key that it does not know
    before, after = (lora_merge.merge_state_dict(flux(), [p], compute_dtype="fp64") for p in (path, out))
    assert all(torch.allclose(before[k], after[k], atol=1e-6) for k in before)
    with pytest.raises(FitError, match="no name for rows"):
        lora_merge.convert(stored(tmp_path, attention_of_flux(more=True)), tmp_path / "c", to="xlabs", **given)  # type: ignore[arg-type]


def test_ai_toolkit_writes_what_it_writes_for_the_model(tmp_path: Path) -> None:
    """Flux.1 as diffusers does; models that came later under diffusion_model."""
    lora_merge.convert(stored(tmp_path, of_flux()), tmp_path / "flux", to="ai-toolkit")
    assert all(n.startswith("transformer.") and not n.endswith("alpha") for n in load_file(tmp_path / "flux"))
    name = "lora_unet_layers_0_attention_to_q"
    tensors = {f"{name}.lora_up.weight": rand(3840, 1), f"{name}.lora_down.weight": rand(1, 3840)}
    lora_merge.convert(stored(tmp_path, tensors), tmp_path / "zimage", to="ai-toolkit")
    assert "diffusion_model.layers.0.attention.to_q.lora_A.weight" in load_file(tmp_path / "zimage")


def test_fault_of_the_output_is_detected_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(place: Place, tensors: Mapping[str, Tensor], *facts: Any, **options: Any) -> StoredModule:
        tensors = {ending: value.clone() for ending, value in tensors.items()}
        if place.module.endswith("linear2"):
            tensors[".lora_B.weight"].view(-1)[0] += 64
        return stored_module(place, tensors, *facts, **options)

    monkeypatch.setattr(matrix_modules, "stored_module", faulty)
    with pytest.raises(VerificationFailed, match="not what the report says"):
        lora_merge.convert(stored(tmp_path, of_flux()), tmp_path / "b.safetensors", to="comfy", dtype="bf16")
    assert not (tmp_path / "b.safetensors").exists()
