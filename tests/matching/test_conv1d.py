"""Square layers of [in, out] and of [out, in] in one model: ours equals what PEFT merges, by each layer's class.

PEFT writes one `fan_in_fan_out`, of the layer that it wrapped last; the files are also merged with the flag edited, which
PEFT corrects when it loads them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lora_merge
from lora_merge.matching.orientation import LayerOrientation, base_types, conv1d_by_base, conv1d_by_shapes
from tests.kit.files import load_all

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

Conv1D = transformers.pytorch_utils.Conv1D
SIZES = {"c": Conv1D, "l": lambda out, width: nn.Linear(width, out)}


class Layers(nn.Module):
    """Layers by kind and size: `{"conv1d": ("c", 16, 16)}` is a Conv1D from 16 to 16."""

    def __init__(self, **layers: tuple[str, int, int]) -> None:
        super().__init__()
        for name, (kind, out, width) in layers.items():
            setattr(self, name, SIZES[kind](out, width))
            layer = getattr(self, name)
            layer.weight.data = torch.randn(layer.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def trained(model: nn.Module, config: Any, folder: Path, *, flag: bool | None = None) -> dict[str, torch.Tensor]:
    """Save the base and a random adapter on it; what PEFT merges. `flag`: what the file is made to say."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder / "base")
    else:
        (folder / "base").mkdir()
        save_file(model.state_dict(), folder / "base" / "model.safetensors")
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    for parameter in tuned.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) if parameter.requires_grad else 0
    tuned.save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    if flag is not None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": flag}))
    merged = tuned.merge_and_unload()
    if not hasattr(model, "save_pretrained"):
        return dict(merged.state_dict())
    merged.save_pretrained(folder / "theirs")
    return load_all(folder / "theirs")


def check(folder: Path, wanted: dict[str, torch.Tensor], **options: Any) -> None:
    lora_merge.merge(folder / "base", folder / "adapter", folder / "ours", **options)
    ours = load_all(folder / "ours")
    for key, value in ours.items():
        torch.testing.assert_close(value, wanted[key], atol=1e-5, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")
    changed = sum(not torch.equal(v, ours[k]) for k, v in load_all(folder / "base").items())
    assert changed


METHODS = {
    "lora": lambda names: peft.LoraConfig(target_modules=names, r=2, lora_alpha=4, init_lora_weights=False),
    "dora": lambda names: peft.LoraConfig(target_modules=names, r=2, use_dora=True, init_lora_weights=False),
    "adalora": lambda names: peft.AdaLoraConfig(target_modules=names, init_r=2, target_r=2, total_step=10),
    "vera": lambda names: peft.VeraConfig(target_modules=names, r=2, save_projection=True),
    "ia3": lambda names: peft.IA3Config(target_modules=names, feedforward_modules=names[:1]),
    "fourierft": lambda names: peft.FourierFTConfig(target_modules=names, n_frequency=20),
    "hira": lambda names: peft.HiraConfig(target_modules=names, r=2),
    "vblora": lambda names: peft.VBLoRAConfig(target_modules=names, r=2, num_vectors=8, vector_length=4),
    "randlora": lambda names: peft.RandLoraConfig(target_modules=names, r=4, save_projection=True),
    "waveft": lambda names: peft.WaveFTConfig(target_modules=names, n_frequency=20),
    "deft": lambda names: peft.DeftConfig(target_modules=names, r=2),
    "gralora": lambda names: peft.GraloraConfig(target_modules=names, r=4, gralora_k=2),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
def test_shapes_decide_for_layers_that_are_not_square_and_those_for_the_others(method: str, tmp_path: Path) -> None:
    """An unknown model of Conv1D: the flag is what PEFT wrote, of HiRA false."""
    model = Layers(wide=("c", 24, 16), tall=("c", 16, 24), square=("c", 16, 16))
    check(tmp_path, trained(model, METHODS[method](["wide", "tall", "square"]), tmp_path))


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
def test_linear_layers_of_an_unknown_model_stay_as_they_are(method: str, tmp_path: Path) -> None:
    model = Layers(wide=("l", 24, 16), tall=("l", 16, 24), square=("l", 16, 16))
    check(tmp_path, trained(model, METHODS[method](["wide", "tall", "square"]), tmp_path))


@pytest.mark.few(2)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "hira"])
def test_conv1d_that_was_wrapped_last_and_a_linear_layer(method: str, tmp_path: Path) -> None:
    model = Layers(lin0=("l", 16, 16), conv1d=("c", 16, 16))
    check(tmp_path, trained(model, METHODS[method](["lin0", "conv1d"]), tmp_path))


@pytest.mark.few(4)
@pytest.mark.parametrize("method", METHODS)
def test_conv1d_that_was_wrapped_first_is_refused_until_the_user_says_it(method: str, tmp_path: Path) -> None:
    model = Layers(conv1d=("c", 16, 16), lin0=("l", 16, 16))
    wanted = trained(model, METHODS[method](["conv1d", "lin0"]), tmp_path)
    with pytest.raises(lora_merge.MergeError, match="conv1d") as caught:
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    assert caught.value.exit_code == 4
    assert 'setting={"fan_in_fan_out": ' in caught.value.fix
    check(tmp_path, wanted, setting={"fan_in_fan_out": True})


@pytest.mark.parametrize("said", [True, False])
def test_flag_in_an_unknown_model_is_refused_until_the_user_says_it(*, said: bool, tmp_path: Path) -> None:
    model = Layers(a=("c" if said else "l", 16, 16))
    wanted = trained(model, METHODS["lora"](["a"]), tmp_path, flag=True)
    with pytest.raises(lora_merge.MergeError, match="square"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours")
    check(tmp_path, wanted, setting={"fan_in_fan_out": said})


def test_setting_that_nothing_asks_for_is_refused(tmp_path: Path) -> None:
    trained(Layers(a=("l", 24, 16)), METHODS["lora"](["a"]), tmp_path)
    with pytest.raises(lora_merge.MergeError, match="no module of the adapters uses"):
        lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "o", setting={"fan_in_fan_out": True})


SMALL = dict(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, n_inner=16)
MODELS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SMALL, ["c_proj"]),
    "imagegpt": ("ImageGPTForCausalImageModeling", "ImageGPTConfig", SMALL, ["c_proj", "c_fc"]),
    "openai": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {k: v for k, v in SMALL.items() if k != "n_inner"}, ["c_proj"]),
    "decision transformer": ("DecisionTransformerModel", "DecisionTransformerConfig", dict(
        state_dim=4, act_dim=3, hidden_size=16, max_ep_len=16, n_layer=2, n_head=2, n_inner=16, n_positions=16),
        ["c_proj", "c_fc"]),
    "clvp": ("ClvpForCausalLM", "ClvpDecoderConfig", dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, n_inner=16, feature_size=8,
        num_mel_attn_blocks=1, max_position_embeddings=16, max_text_tokens=16), ["c_proj", "c_fc", "q_proj"]),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", SMALL | dict(multi_query=False), ["c_proj", "c_fc"]),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", SMALL | dict(rotary_dim=4), ["q_proj", "fc_in", "fc_out"]),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", dict(
        vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=16, max_position_embeddings=16,
        attention_types=[[["global"], 2]]), ["c_fc", "q_proj", "c_proj"]),
    "llama": ("LlamaForCausalLM", "LlamaConfig", dict(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16), ["q_proj", "up_proj"]),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("method", "flag"), [("lora", None), ("lora", True), ("lora", False), ("hira", None)])
@pytest.mark.parametrize("name", MODELS)
def test_type_of_the_model_decides(*, name: str, method: str, flag: bool | None, tmp_path: Path) -> None:
    kind, config, arguments, names = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    check(tmp_path, trained(model, METHODS[method](names), tmp_path, flag=flag))


@pytest.mark.parametrize("flag", [True, False])
def test_code_of_qwen_comes_with_the_checkpoint(*, flag: bool, tmp_path: Path) -> None:
    model = Layers(c_attn=("l", 48, 16), c_proj=("l", 16, 16), w1=("l", 16, 16))
    wanted = trained(model, METHODS["lora"](["c_attn", "c_proj", "w1"]), tmp_path, flag=flag)
    config = {"model_type": "qwen", "auto_map": {"AutoModel": "modeling_qwen.QWenLMHeadModel"}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    check(tmp_path, wanted)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["weird", ["gpt2"], {"a": 1}, 7, None])
@pytest.mark.parametrize("types", ["base", "a part of it"])
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", ["square", "c_proj", "conv1d"])
def test_type_that_nobody_knows_says_nothing(*, kind: Any, types: str, flag: bool, name: str) -> None:
    """A config.json with one is like none at all: a custom model may have layers of both kinds."""
    config = {"model_type": kind} if types == "base" else {"text_config": {"model_type": kind}}
    layers, said = [LayerOrientation(name, None)], base_types(config)
    assert conv1d_by_shapes(name, layers, said, flag=flag) is conv1d_by_shapes(name, layers, (), flag=flag)
    assert conv1d_by_base(name, said, recognised=False, kind="LORA") is conv1d_by_base(
        name, (), recognised=False, kind="LORA"
    )


def test_half_of_a_model_is_conv1d(tmp_path: Path) -> None:
    """A decoder like GPT-2's behind an encoder of [out, in]: the flag is true, of the decoder."""
    encoder = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    decoder = transformers.GPT2Config(**SMALL, add_cross_attention=True, is_decoder=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(config)
    names = ["c_attn", "c_proj", "q_attn", "q_proj", "query"]
    check(tmp_path, trained(model, METHODS["lora"](names), tmp_path))


SQUARE, LIES, STANDS = (
    LayerOrientation("square", None),
    LayerOrientation("wide", in_out=True),
    LayerOrientation("tall", in_out=False),
)


@pytest.mark.parametrize(
    ("name", "flag", "layers", "wanted"),
    [
        ("square", False, [SQUARE], False),  # nothing points to Conv1D
        ("square", None, [SQUARE], False),
        ("square", True, [SQUARE], None),
        ("c_proj", True, [LayerOrientation("c_proj", None)], True),
        ("c_proj", False, [LayerOrientation("c_proj", None)], None),
        ("c_proj", None, [LayerOrientation("c_proj", None)], None),
        ("square", True, [SQUARE, LIES], True),
        ("square", None, [SQUARE, LIES], True),
        ("square", False, [SQUARE, LIES], None),  # the last layer was an nn.Linear, and this may be the one
        ("square", False, [SQUARE, LayerOrientation("square", in_out=True)], True),
        ("square", True, [SQUARE, STANDS], None),
        ("square", False, [SQUARE, STANDS], False),
        ("square", True, [SQUARE, LIES, STANDS], None),
        ("square", False, [SQUARE, LIES, STANDS], None),
        ("square", True, [SQUARE, LayerOrientation("c_attn", in_out=True)], False),  # for which the flag speaks
        ("square", True, [SQUARE, LIES, LayerOrientation("square", in_out=False)], False),
        ("c_proj", False, [LayerOrientation("c_proj", None), LayerOrientation("c_fc", in_out=False)], False),  # nanoGPT
        ("c_proj", False, [LayerOrientation("c_proj", in_out=True)], True),
        ("c_proj", True, [LayerOrientation("c_proj", in_out=False)], None),
    ],
)
def test_signs_are_weighed(
    *, name: str, flag: bool | None, layers: list[LayerOrientation], wanted: bool | None
) -> None:
    assert conv1d_by_shapes(name, layers, (), flag=flag) is wanted
    assert wanted or conv1d_by_shapes(name, layers, {"opt"}, flag=flag) in (False, wanted)


def test_known_models_need_no_signs() -> None:
    assert conv1d_by_base("c_proj", {"gpt2"}, recognised=False, kind="LORA") is True
    assert conv1d_by_base("q_proj", {"gpt2"}, recognised=False, kind="LORA") is False
    assert conv1d_by_base("c_proj", {"gpt_bigcode"}, recognised=False, kind="LORA") is False
    assert conv1d_by_base("c_proj", {"gpt2"}, recognised=False, kind="LOHA") is False  # PEFT's LoHa takes no Conv1D
    assert conv1d_by_base("c_proj", {"jais", ""}, recognised=False, kind="LORA") is None
    assert conv1d_by_base("q_proj", set(), recognised=True, kind="LORA") is False


@pytest.mark.few(4)
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_change_of_one_layer_is_that_of_the_merge_or_its_turn_is_asked_for(
    method: str, *, flag: bool, tmp_path: Path
) -> None:
    """`delta` sees one weight: its shape and name tell, and where they do not, no flag of another layer is believed. Of
    methods whose tensors fit every shape a merge asks the bias, which it does not see."""
    wide = {} if method in ("fourierft", "waveft") else {"wide": ("c", 24, 16)}
    model = Layers(**wide, conv1d=("c", 16, 16), tall=("l", 24, 16), lin0=("l", 16, 16))
    layers = [name for name, _ in model.named_children()]
    wanted = trained(model, METHODS[method](layers), tmp_path, flag=flag)
    opened, asked = lora_merge.load_adapter(tmp_path / "adapter"), set()
    for layer in layers:
        weight, name = model.get_submodule(layer).weight.data, f"base_model.model.{layer}"
        try:
            change = opened.delta(name, weight)
        except lora_merge.MergeError as e:
            assert "fan_in_fan_out" in e.fix and weight.shape[0] == weight.shape[1]
            asked.add(layer)
            change = opened.delta(name, weight, fan_in_fan_out=layer == "conv1d")
        torch.testing.assert_close(weight + change, wanted[f"{layer}.weight"], atol=1e-5, rtol=1e-4)
    assert asked == ({"conv1d"} if method == "hira" or not flag else set())


def test_types_of_a_model_s_parts_count_too() -> None:
    parts = {"decoder": {"model_type": "gpt2"}, "encoder": {"model_type": "bert", "other": {"x": 1}}}
    assert base_types({"model_type": "encoder-decoder", **parts}) == {"encoder-decoder", "gpt2", "bert"}


@pytest.mark.parametrize("out_in", [True, False])
def test_bias_says_what_the_outputs_of_its_layer_are(*, out_in: bool) -> None:
    """An adapter of another layer of this name is refused, though its factors would fit the weight the other way round."""
    base = {"up.weight": torch.randn(12, 24), "up.bias": torch.randn(12 if out_in else 24)}
    prefix = "base_model.model.up.lora_"
    lora = {f"{prefix}A.weight": torch.randn(2, 12), f"{prefix}B.weight": torch.randn(24, 2)}
    if out_in:
        with pytest.raises(lora_merge.MergeError, match="do not fit"):
            lora_merge.merge_state_dict(base, lora)
    else:
        change = (lora[f"{prefix}B.weight"] @ lora[f"{prefix}A.weight"]).T
        torch.testing.assert_close(lora_merge.merge_state_dict(base, lora)["up.weight"], base["up.weight"] + change)


def test_every_type_of_the_installed_transformers_is_listed() -> None:
    """Otherwise: python -m tests.models.model_types."""
    from tests.models.model_types import installed, listed

    assert installed() <= listed()
