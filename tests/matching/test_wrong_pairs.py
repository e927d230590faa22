"""Adapters on bases that they were not made for: refused from headers, in a sentence that names both sides."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.errors import FitError, InputError, ShapeMismatch
from tests.kit.files import load, save
from tests.kit.hollow import hollow
from tests.kit.tensors import rand

HEADERS = Path(__file__).parents[1] / "headers"


def shapes(inventory: str) -> dict[str, tuple[int, ...]]:
    table = json.loads(gzip.decompress((HEADERS / f"{inventory}.json.gz").read_bytes()))
    return {name: tuple(shape) for name, shape in table.items()}


def adapter(inventory: str, prefix: str, path: Path, keep: Callable[[str], bool] = lambda _: True) -> Path:
    """A rank-4 LoRA on every linear layer of an inventory."""
    tensors: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes(inventory).items():
        if key.endswith(".weight") and len(shape) == 2 and keep(key):
            name = prefix + key.removesuffix(".weight").replace(".", "_")
            tensors |= {f"{name}.lora_up.weight": (shape[0], 4), f"{name}.lora_down.weight": (4, shape[1])}
    return hollow(tensors, path)


def attention(key: str) -> bool:
    return "attn" in key


PAIRS = [
    # adapter's inventory, base's inventory, words for the adapter, words for the base
    ("diffusers/sd15", "single-file/sdxl", "Stable Diffusion 1", "Stable Diffusion XL"),
    ("native/sdxl", "single-file/sd1", "Stable Diffusion XL", "Stable Diffusion 1"),
    ("native/wan-i2v-14B", "native/wan-t2v-14B", "I2V", "T2V or 2.2"),
    ("native/wan-t2v-14B", "native/wan-i2v-14B", "T2V or 2.2", "I2V"),
    ("native/wan-t2v-1.3B", "native/wan-t2v-14B", "1.3B", "14B"),
    ("native/wan-t2v-14B", "native/wan-t2v-1.3B", "14B", "1.3B"),
    ("native/flux-dev", "native/qwen-image", "Flux.1", "Qwen-Image"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("made_for", "given", "theirs", "ours"), PAIRS)
def test_sides_of_a_wrong_pair_are_named(tmp_path: Path, made_for: str, given: str, theirs: str, ours: str) -> None:
    base = hollow(shapes(given), tmp_path / "base.safetensors")
    lora = adapter(made_for, "lora_unet_", tmp_path / "lora.safetensors", attention)
    with pytest.raises(FitError) as e:
        lora_merge.plan(base, lora, tmp_path / "out.safetensors")
    text = str(e.value)
    assert e.value.exit_code == 4
    assert theirs in text, text
    assert ours in text, text


@pytest.mark.few(2)
@pytest.mark.parametrize("given", ["native/flux-dev", "native/qwen-image", "native/wan-t2v-14B"])
@pytest.mark.parametrize("made_for", ["diffusers/sd15", "diffusers/sdxl"])
def test_model_mismatch_is_named_before_encoders_that_the_base_lacks(tmp_path: Path, made_for: str, given: str) -> None:
    """Names of the UNet fit no better than those of its text encoders."""
    base = hollow(shapes(given), tmp_path / "base.safetensors")
    tensors = {}
    for key, (rows, *cols) in shapes(made_for).items():
        if key.endswith(("attn1.to_q.weight", "attn2.to_k.weight")):
            name = f"unet.{key.removesuffix('.weight')}"
            tensors |= {f"{name}.lora_A.weight": (4, *cols), f"{name}.lora_B.weight": (rows, 4)}
    for encoder in ("text_encoder", "text_encoder_2"):
        for layer in range(90):  # more modules than the UNet has
            name = f"{encoder}.text_model.encoder.layers.{layer}.self_attn.q_proj"
            tensors |= {f"{name}.lora_A.weight": (4, 768), f"{name}.lora_B.weight": (768, 4)}
    with pytest.raises(FitError, match="no module") as e:
        lora_merge.plan(base, hollow(tensors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors")
    assert "looks made for Stable Diffusion" in e.value.what and "text encoder" not in str(e.value)
    assert e.value.fix.startswith("use the base")


def test_small_model_of_another_kind_is_recognised_by_the_names(tmp_path: Path) -> None:
    """The sizes of a toy model's weights name no model."""
    small = {key: tuple(min(n, 12) for n in shape) for key, shape in shapes("single-file/sd1").items()}
    tensors: dict[str, tuple[int, ...]] = {}
    for key in filter(attention, shapes("diffusers/sdxl")):
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        tensors |= {f"{name}.lora_up.weight": (12, 4), f"{name}.lora_down.weight": (4, 10)}
    with pytest.raises(
        ShapeMismatch, match=r"do not fit the base: the base is Stable Diffusion 1, and .* match nothing there"
    ):
        lora_merge.plan(hollow(small, tmp_path / "base.safetensors"), hollow(tensors, tmp_path / "lora.safetensors"))


@pytest.mark.parametrize(("key", "what"), [
    ("body.0.rdb1.conv1.weight", r"an upscaler \(ESRGAN\)"), ("decoder.conv_in.weight", "a VAE"),
    ("control_model.input_hint_block.0.weight", "a ControlNet"), ("emb_params", "an embedding"),
])  # fmt: skip
def test_base_of_another_kind_is_called_what_it_is(tmp_path: Path, key: str, what: str) -> None:
    lora = adapter("diffusers/sd15", "lora_unet_", tmp_path / "lora.safetensors", lambda key: "attn2.to_k" in key)
    with pytest.raises(FitError, match=f"Stable Diffusion 1, the base is {what}"):
        lora_merge.plan(hollow({key: (4, 4, 3, 3)}, tmp_path / "base.safetensors"), lora)


def test_doubtful_pair_can_be_merged_on_request(tmp_path: Path) -> None:
    """Text-to-video adapters are used on image-to-video models; whoever wants that says so."""
    base = hollow(shapes("native/wan-i2v-14B"), tmp_path / "base.safetensors")
    lora = adapter("native/wan-t2v-14B", "lora_unet_", tmp_path / "lora.safetensors", attention)
    plan = lora_merge.plan(base, lora, tmp_path / "out.safetensors", unmatched="skip")
    assert any("T2V" in note for note in plan.adapters[0].notes)


@pytest.mark.parametrize(("channels", "groups"), [(2, 4), (1, 8)])
@pytest.mark.parametrize("up", [(8, 4, 1, 1), (8, 1, 1, 1)], ids=["kohya", "PEFT"])
def test_branch_beside_a_grouped_convolution_has_no_place_in_its_weight(
    tmp_path: Path, channels: int, groups: int, up: tuple[int, ...]
) -> None:
    """PEFT refuses to merge it too: "Merging is not supported for _ConvNd layers with groups > 1"."""
    base = hollow({"conv.weight": (8, channels, 3, 3)}, tmp_path / "base.safetensors")
    tensors = {"conv.lora_down.weight": (4, 8, 3, 3), "conv.lora_up.weight": up}
    with pytest.raises(FitError) as e:
        lora_merge.plan(base, hollow(tensors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors")
    assert "conv" in e.value.where
    assert f"a convolution in {groups} groups" in e.value.fix


@pytest.mark.parametrize("down", [(4, 5, 3, 3), (4, 8, 1, 1), (4, 8, 3, 5)])
def test_misfits_within_a_model_have_nothing_to_do_with_groups(tmp_path: Path, down: tuple[int, ...]) -> None:
    base = hollow({"conv.weight": (8, 2, 3, 3)}, tmp_path / "base.safetensors")
    tensors = {"conv.lora_down.weight": down, "conv.lora_up.weight": (8, 4, 1, 1)}
    with pytest.raises(FitError) as e:
        lora_merge.plan(base, hollow(tensors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors")
    assert "groups" not in e.value.fix


@pytest.mark.parametrize("alpha", ["inf", "-inf", "nan"])
def test_alpha_that_is_no_number_is_the_fault_of_the_adapter(tmp_path: Path, alpha: str) -> None:
    base = hollow({"layer.weight": (8, 8)}, tmp_path / "base.safetensors")
    tensors = {"layer.lora_down.weight": rand(2, 8), "layer.lora_up.weight": rand(8, 2)}
    lora = save(tensors | {"layer.alpha": torch.tensor(float(alpha))}, tmp_path / "lora.safetensors")
    with pytest.raises(InputError, match=f"alpha is {alpha}\n") as e:
        lora_merge.plan(base, lora, tmp_path / "out.safetensors")
    assert e.value.where == f"{lora}: layer.alpha"


@pytest.mark.parametrize("alpha", [1e-152, -1e-46, 5e-324, 1e39, -1.7e308])
def test_alpha_beyond_fp32_is_the_fault_of_the_adapter_in_every_command(tmp_path: Path, alpha: float) -> None:
    base = save({"layer.weight": rand(8, 8)}, tmp_path / "base.safetensors")
    tensors = {"layer.lora_down.weight": rand(2, 8), "layer.lora_up.weight": rand(8, 2)}
    lora = save(tensors | {"layer.alpha": torch.tensor(alpha, dtype=torch.float64)}, tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    for command in (
        lambda: lora_merge.merge(base, lora, out),
        lambda: lora_merge.combine([lora, lora], out),
        lambda: lora_merge.resize(lora, out, rank=1),
        lambda: lora_merge.convert(lora, out, to="kohya", base=base),
    ):
        with pytest.raises(InputError, match=r"alpha is .* too large for fp32"):
            command()
        assert not out.exists()


@pytest.mark.parametrize("alpha", [2**62 - 1, 9187343237679939583])
def test_whole_numbers_that_no_float_holds_are_one_alpha_to_plan_and_proof(tmp_path: Path, alpha: int) -> None:
    base = save({"a.weight": rand(4, 4)}, tmp_path / "base.safetensors")
    blocks = {"a.oft_blocks": torch.full((2, 2, 2), 0.5), "a.alpha": torch.tensor(alpha)}
    done = lora_merge.merge(base, save(blocks, tmp_path / "oft.safetensors"), tmp_path / "out.safetensors")
    assert done.verified is not None
    assert done.verified["matching"]["proven"] == 1


def test_whole_numbers_are_reported_with_their_file(tmp_path: Path) -> None:
    base = save({"layer.weight": torch.ones(8, 8, dtype=torch.int8)}, tmp_path / "base.safetensors")
    lora = save({"layer.lora_down.weight": rand(2, 8), "layer.lora_up.weight": rand(8, 2)}, tmp_path / "l.safetensors")
    with pytest.raises(FitError, match="whole numbers") as e:
        lora_merge.plan(base, lora, tmp_path / "out.safetensors")
    assert e.value.where == f"{base}: layer.weight is int8"


def test_layer_that_does_not_fit_can_be_left_out_by_name(tmp_path: Path) -> None:
    """As where a text-to-video adapter meets an image-to-video model: all layers fit but the first."""
    base = {f"{n}.weight": rand(8, 4, seed=i) for i, n in enumerate(("patch_embedding", "blocks.0.q", "blocks.0.k"))}
    lora = {f"{n}.lora_B.weight": rand(8, 2) for n in ("patch_embedding", "blocks.0.q", "blocks.0.k")}
    lora |= {k.replace("lora_B", "lora_A"): rand(2, 2 if "patch" in k else 4) for k in lora}
    model, whole = save(base, tmp_path / "base.safetensors"), save(lora, tmp_path / "whole.safetensors")
    for strength, parts in ((1, {}), (1, {"re:blocks": 0}), (0, {}), (0, {"re:patch": 0}), (1, {"re:patch": 0.5})):
        with pytest.raises(ShapeMismatch, match=r"patch_embedding") as error:
            lora_merge.plan(model, [(whole, strength)], tmp_path / "out.safetensors", strength_for=parts)
        ((part, factor),) = json.loads(error.value.fix.partition("strength_for=")[2]).items()
    report = lora_merge.merge(model, whole, tmp_path / "out.safetensors", strength_for={part: float(factor)})
    assert any(
        "patch_embedding: it does not fit the base, and is left out" in n for n in report.coverage[whole.name]["notes"]
    )
    fitting = {k: v for k, v in lora.items() if "patch" not in k}
    wanted = lora_merge.merge_state_dict(base, fitting)
    got = load(tmp_path / "out.safetensors")
    assert all(torch.equal(got[k], wanted[k]) for k in wanted)
    split = {f"double_blocks.0.img_attn.qkv.lora_{x}.weight": rand(*s) for x, s in (("A", (2, 9)), ("B", (24, 2)))}
    flux = {f"transformer_blocks.0.attn.{n}.weight": rand(8, 8) for n in ("to_q", "to_k", "to_v")}
    flux |= {f"single_transformer_blocks.0.{n}.weight": rand(8, 8) for n in ("proj_mlp", "attn.to_q")}
    for name in ("x_embedder", "transformer_blocks.0.norm1.linear", "time_text_embed.text_embedder.linear_1"):
        flux[f"{name}.weight"] = rand(8, 8)
    flux["transformer_blocks.0.attn.norm_added_q.weight"] = rand(8)
    with pytest.raises(ShapeMismatch):  # one of three tensors that it would change
        lora_merge.merge_state_dict(flux, split, strength_for={"re:to_q": 0})
    done = lora_merge.merge_state_dict(flux, split, strength_for={r"re:attn\.to_": 0})
    assert all(torch.equal(done[k], flux[k]) for k in flux)


@pytest.mark.parametrize("keep", ["lora_unet_", "lora_"])
def test_names_of_another_kind_of_model_are_no_sign_of_a_smaller_one(keep: str, tmp_path: Path) -> None:
    """A tiny U-Net LoRA on a tiny language model: its blocks have higher numbers, but other names too."""
    layer = "model.layers.{}.self_attn.q_proj"
    save({f"{layer.format(n)}.weight": rand(8, 8) for n in range(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    names = ["lora_unet_down_blocks_3_attentions_0_proj_in", "lora_te_text_model_encoder_layers_7_mlp_fc1"]
    tensors = {f"{n}.lora_{w}.weight": rand(*s) for n in names if n.startswith(keep)
               for w, s in (("up", (8, 2)), ("down", (2, 8)))}  # fmt: skip
    with pytest.raises(FitError) as refused:
        lora_merge.plan(tmp_path, save(tensors, tmp_path / "a.st"), tmp_path / "out")
    assert "smaller or pruned" not in str(refused.value)
    assert "image or video model" in refused.value.what
    deeper = {
        f"{layer.format(n)}.lora_{w}.weight": rand(*s) for n in range(4) for w, s in (("B", (8, 2)), ("A", (2, 8)))
    }
    with pytest.raises(FitError, match="smaller or pruned"):
        lora_merge.plan(tmp_path, save(deeper, tmp_path / "b.st"), tmp_path / "out", setting={"lora_alpha": 2})


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "token_embedding.weight"])
@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.zeros(0), torch.zeros(0, 4)])
def test_embeddings_without_rows_are_a_base_like_any_other(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    """A tensor of one number has no axis of rows that could be counted."""
    save({name: value, "m.weight": torch.zeros(4, 4)}, tmp_path / "base")
    save({"m.lora_up.weight": torch.ones(4, 1), "m.lora_down.weight": torch.ones(1, 4)}, tmp_path / "a")
    lora_merge.merge(tmp_path / "base", [tmp_path / "a"], tmp_path / "out", device="cpu")
    assert load(tmp_path / "out")["m.weight"].eq(1).all()


@pytest.mark.parametrize("more", [(), ("lora_A.weight", "lora_B.weight")])
def test_single_number_has_no_bias(tmp_path: Path, more: tuple[str, ...]) -> None:
    """A change of a bias beside a weight without axes is refused as every other that does not fit."""
    base = save({"a.weight": torch.tensor(1.0)}, tmp_path / "base.safetensors")
    adapter = save({f"a.{n}": torch.ones(4, 4) for n in (*more, "diff_b")}, tmp_path / "lora.safetensors")
    with pytest.raises(lora_merge.MergeError) as told:
        lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
    assert told.value.exit_code == 4
