"""Alpha, rank and variant that are stated outside of the tensors: in the header, or in files next to the adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters.network_settings import ENTRY_MEANINGS, Meaning
from lora_merge.errors import InputError, MergeError

RANK = 4
Header = dict[str, str]

TRAINERS = {
    "musubi-tuner, converted, with alpha folded in": {
        "ss_network_alpha": "1", "ss_network_dim": "4", "ss_network_module": "networks.lora_wan", "format": "pt",
        "ss_network_args": '{"rank_dropout": "0.1"}', "ss_scale_weight_norms": "None", "ss_max_grad_norm": "1.0",
        "modelspec.title": "x", "modelspec.architecture": "wan2.1/lora", "sshs_model_hash": "00",
    },
    "ai-toolkit": {
        "format": "pt", "name": "x", "version": "1.0", "software": '{"name": "ai-toolkit", "repo": "x"}',
        "training_info": '{"step": 2000, "epoch": 3}', "ss_output_name": "x",
    },
    "OneTrainer": {
        "ot_branch": "master", "ot_config": '{"lora_alpha": 1.0, "lora_rank": 16, "lora_decompose": true}',
        "ss_tag_frequency": "{}",
    },
    "SimpleTuner with LyCORIS": {"lycoris_config": '{"algo": "lora", "linear_dim": 4, "linear_alpha": 1}'},
    "ComfyUI": {"prompt": '{"3": {"inputs": {"scale": 2, "alpha": 16}}}', "workflow": '{"nodes": [{"scale": 2.0}]}'},
    "a scale of 1": {"scale": "1.0", "lora_weight_scale": "1"},
    "diffusers without numbers": {"format": "pt"},
}  # fmt: skip
"""What the trainers' own code writes into the header of a file whose change is B A."""


def adapter(folder: Path, header: Header | None = None, ranks: tuple[int, ...] = (RANK, RANK), **more: Any) -> Path:
    torch.manual_seed(0)
    tensors = {}
    for name, rank in zip("ab", ranks, strict=True):
        tensors |= {f"{name}.lora_A.weight": torch.randn(rank, 5), f"{name}.lora_B.weight": torch.randn(6, rank)}
    folder.mkdir(exist_ok=True)
    save_file(tensors | more, folder / "style.safetensors", header)
    return folder / "style.safetensors"


def scales(path: Path, **options: Any) -> list[float]:
    """The factors of B A in the merged weights, of both modules."""
    base = {f"{name}.weight": torch.zeros(6, 5) for name in "ab"}
    done = lora_merge.merge_state_dict(base, path, **options)
    file = path if path.is_file() else next(path.glob("*.safetensors"))
    t = load_file(file)
    products = {name: t[f"{name}.lora_B.weight"] @ t[f"{name}.lora_A.weight"] for name in "ab"}
    return [round((done[f"{n}.weight"] / product).mean().item(), 4) for n, product in products.items()]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("entries", "scale"),
    [
        ({"alpha": "8"}, 2.0),
        ({"network_alpha": "2", "rank": "4"}, 0.5),
        ({"lora_alpha": "16.0", "lora_rank": "4"}, 4.0),
        ({"alpha": "8", "rank": "4", "use_rslora": "True"}, 4.0),
        ({"alpha": "8", "use_rslora": "False", "dora": "false"}, 2.0),
        ({"network_config": '{"network": {"alpha": 8, "dim": 4}}'}, 2.0),
        ({"training": '{"lora": {"rank": 4, "scaling": 3.0}}'}, 3.0),
        ({"r": "4", "lora_alpha": "8", "use_rslora": "True", "target_modules": "{'a', 'b'}"}, 4.0),
        ({"config": "{'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8, 'runtime_config': None}"}, 2.0),
        ({"alpha": "None"}, 1.0),
        ({"linear_alpha": "16", "conv_alpha": "auto", "rank": "4"}, 1.0),
        ({"alpha": "8", "use_dora": "0", "rslora": "0", "dora_type": "None"}, 2.0),
    ],
)
def test_stated_alpha_is_divided_by_the_rank_of_each_module(tmp_path: Path, entries: Header, scale: float) -> None:
    assert scales(adapter(tmp_path, entries)) == [scale, scale]


@pytest.mark.parametrize(("down", "up"), [((4, 5, 3), (6, 4, 1)), ((4, 1, 3), (6, 4, 1)), ((2, 4, 5), (2, 3, 4))])
def test_rank_of_three_axes_is_that_of_a_convolution_or_of_each_expert(
    tmp_path: Path, down: tuple[int, ...], up: tuple[int, ...]
) -> None:
    kernel = up[-1] == 1
    factors = {"a.lora_A.weight": torch.randn(down), "a.lora_B.weight": torch.randn(up)}
    rank = down[0] if kernel else down[1]
    save_file(factors, tmp_path / "style.safetensors", {"alpha": str(2 * rank), "rank": str(rank)})
    weight = torch.zeros(6, *down[1:]) if kernel else torch.zeros(2, 3, 5)
    done = lora_merge.merge_state_dict({"a.weight": weight}, tmp_path / "style.safetensors")["a.weight"]
    b, a = factors["a.lora_B.weight"], factors["a.lora_A.weight"]
    product = (b.flatten(1) @ a.flatten(1)).reshape(weight.shape) if kernel else b @ a
    assert torch.allclose(done, 2 * product, atol=1e-5)


def test_stated_patterns_of_peft_hold_for_their_modules(tmp_path: Path) -> None:
    header = {"r": "4", "lora_alpha": "4", "peft_type": "PeftType.LORA", "alpha_pattern": "{'b': 12}"}
    assert scales(adapter(tmp_path, header)) == [1.0, 3.0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_headers_of_trainers_are_not_refused(tmp_path: Path, trainer: str) -> None:
    assert scales(adapter(tmp_path, TRAINERS[trainer])) == [1.0, 1.0]


@pytest.mark.parametrize("entries", [{"alpha": "16"}, {"lora_alpha": "16", "r": "4"}, {"scale": "7"}])
def test_alpha_of_a_tensor_wins(tmp_path: Path, entries: Header) -> None:
    alphas = {f"{name}.alpha": torch.tensor(2.0) for name in "ab"}
    assert scales(adapter(tmp_path, entries, **alphas)) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"alpha": "nan"}, "alpha = nan"),
        ({"network_alpha": "Infinity"}, "network_alpha = inf"),
        ({"lora_alpha": "auto"}, "lora_alpha = auto"),
        ({"alpha": "8", "network_alpha": "4"}, "several values"),
        ({"alpha": "8", "rank": "16"}, "rank = 16"),
        ({"lora_scale": "2.0"}, "lora_scale = 2"),
        ({"scale": "0.5"}, "scale = 0.5"),
        ({"unet_alpha": "8", "text_encoder_alpha": "4"}, "_alpha = "),
        ({"network_alphas": '{"a": 8}'}, "network_alphas"),
        ({"networkAlphaScale": "3"}, "networkAlphaScale"),
        ({"alpha": "0"}, "stated as 0"),
    ],
)
def test_entry_that_is_not_used_is_refused_and_the_setting_answers(tmp_path: Path, entries: Header, words: str) -> None:
    path = adapter(tmp_path, entries)
    with pytest.raises(MergeError) as caught:
        scales(path)
    assert words in str(caught.value) and 'setting={"lora_alpha": ' in caught.value.fix
    assert caught.value.exit_code in (3, 4)
    assert scales(path, setting={"lora_alpha": 12}) == [3.0, 3.0]


def test_bare_number_is_not_used_for_modules_of_different_ranks(tmp_path: Path) -> None:
    path = adapter(tmp_path, {"alpha": "8"}, ranks=(4, 2))
    with pytest.raises(InputError, match=r'different ranks[\s\S]*ranks 2, 4[\s\S]*setting=\{"lora_alpha": 8\}'):
        scales(path)
    assert scales(path, setting={"lora_alpha": 8}) == [2.0, 4.0]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"use_dora": "True"}, "DoRA is switched on"),
        ({"dora_type": "rows"}, "dora_type = rows"),
        ({"qkv_order": "grouped"}, "qkv_order = grouped"),
        ({"layout": '{"rows_interleaved": true}'}, "rows_interleaved = True"),
    ],
)
def test_entry_of_another_formula_is_refused_by_its_name(tmp_path: Path, entries: Header, words: str) -> None:
    alphas = {f"{name}.alpha": torch.tensor(4.0) for name in "ab"}
    with pytest.raises(InputError, match=words):
        scales(adapter(tmp_path, entries, **alphas))


FILES = {
    "lora_config.json": '{"base_model": "x", "lora_config": {"r": 4, "alpha": 8, "dropout": 0.0}}',
    "adapter_config.json": '{"rank": 4, "alpha": 8}',
    "params.json": '{"dim": 4096, "n_layers": 2, "lora": {"enable": true, "rank": 4, "scaling": 2.0}}',
    "model_config.yaml": "peft:\n  lora_tuning:\n    adapter_dim: 4\n    alpha: 8\n",
    "config.json": '{"model_type": "llama", "rope_scaling": {"scale": 7}, "lora": {"r": 4, "lora_alpha": 8}}',
    "style.json": '{"network_alpha": 8}',
    "training.yaml": "optimizer:\n  alpha: 0.99\nconfig:\n- network:\n    alpha: 8\n    dim: 4\n",
    "saved.json": '{"peft_type": "LORA", "r": 4, "lora_alpha": 8}',
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("named", ["folder", "file"])
def test_configuration_next_to_the_file_gives_alpha(tmp_path: Path, name: str, named: str) -> None:
    path = adapter(tmp_path / "style")
    if name == "adapter_config.json":
        path = path.rename(path.with_name("adapter_model.safetensors"))
    path.with_name(name).write_text(FILES[name])
    assert scales(path.parent if named == "folder" else path) == [2.0, 2.0]


@pytest.mark.parametrize("text", ['{"alpha": 8}', '{"scale": 0.5}', '{"training": {"scaling": 2}}', '{"lora_alpha": '])
def test_number_in_a_file_of_unknown_meaning_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = adapter(tmp_path / "style")
    path.with_name("notes.json").write_text(text)
    with pytest.raises(InputError, match=r"notes\.json"):
        scales(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("long.json", json.dumps({"x": "y" * (1 << 18), "lora_alpha": 8})), ("own.toml", "lora_alpha = 8\n")],
)
def test_configuration_that_is_not_read_is_refused_where_it_names_alpha(tmp_path: Path, name: str, text: str) -> None:
    path = adapter(tmp_path / "style")
    path.with_name(name).write_text(text)
    with pytest.raises(
        InputError, match=rf'cannot be read: (it is longer|TOML)[\s\S]*{name}[\s\S]*setting=\{{"lora_alpha": '
    ):
        scales(path)
    path.with_name(name).write_text(text.replace("lora_alpha", "steps"))
    assert scales(path) == [1.0, 1.0]


def test_configuration_of_several_files_is_refused(tmp_path: Path) -> None:
    """It may be of the other adapter; files that are named after the other adapter are not of this one."""
    path = adapter(tmp_path / "style")
    save_file({"x": torch.zeros(1)}, path.with_name("other.safetensors"))
    path.with_name("other.json").write_text('{"lora_alpha": 99}')
    assert scales(path) == [1.0, 1.0]
    for text in ('{"lora_alpha": 8}', '{"lora_alpha": 8, "r": 4}'):
        path.with_name("lora_config.json").write_text(text)
        with pytest.raises(InputError, match=r'another one[\s\S]*lora_config\.json[\s\S]*setting=\{"lora_alpha": 8'):
            scales(path)
    assert scales(path, setting={"lora_alpha": 8}) == [2.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"model_type": "llama", "scale": 3, "rope_scaling": {"alpha": 2}}),
        json.dumps({"optimizer": {"alpha": 0.99}, "sampler": {"guidance_scale": 7}}),
        json.dumps({"activation text": "x", "preferred weight": 0.8}),
        json.dumps({"config": {"process": [{"network": {"type": "lora", "linear": 16, "linear_alpha": 16}}]}}),
        "{" * 10_000,
    ],
)
def test_files_about_other_things_are_not_refused(tmp_path: Path, text: str) -> None:
    path = adapter(tmp_path / "style")
    path.with_name("notes.json").write_text(text)
    assert scales(path.parent) == [1.0, 1.0]


def test_second_reading_confirms_a_plain_alpha(tmp_path: Path) -> None:
    path = adapter(tmp_path, {"alpha": "8"})
    save_file({f"{name}.weight": torch.zeros(6, 5) for name in "ab"}, tmp_path / "base.safetensors")
    report = lora_merge.merge(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    assert report.verified is not None and report.verified["matching"]["proven"] == 2


def test_every_meaning_is_in_the_table_or_a_rule() -> None:
    assert {*ENTRY_MEANINGS.values()} == {*Meaning} - {Meaning.UNKNOWN}
    assert all(name == name.lower() for name in ENTRY_MEANINGS)
