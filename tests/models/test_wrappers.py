"""Bases whose names have levels that training or PEFT left in them. Run: pytest tests/models/test_wrappers.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lora_merge
from lora_merge.adapters.modules import looks_like_adapter
from lora_merge.errors import MergeError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.recipes.replay import prove
from lora_merge.viewing.inspect import inspect
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.models import sd1
from tests.kit.pairs import examples
from tests.kit.tensors import Tensors, rand

TRAINED = ("_forward_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
W = 8


def llama() -> Tensors:
    """A tiny Llama of two layers."""
    shapes = {"model.embed_tokens.weight": (20, W), "model.norm.weight": (W,), "lm_head.weight": (20, W)}
    for n in range(2):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (W, W) for p in "qkvo"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (2 * W, W) for p in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (W, 2 * W), f"{layer}.input_layernorm.weight": (W,)}
    return {name: rand(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}


def peft(base: Tensors, prefix: str = "base_model.model.") -> Tensors:
    """A LoRA in PEFT's names for every projection."""
    return {
        f"{prefix}{key.removesuffix('.weight')}.lora_{side}.weight": rand(*shape, seed=n)
        for n, (key, value) in enumerate(base.items())
        if key.endswith("_proj.weight")
        for side, shape in (("A", (2, value.shape[1])), ("B", (value.shape[0], 2)))
    }


def phi3() -> Tensors:
    """A tiny Phi-3: q, k and v are fused."""
    rest = {key: value for key, value in llama().items() if ".self_attn." not in key and "mlp" not in key}
    shapes = {"self_attn.qkv_proj": (3 * W, W), "self_attn.o_proj": (W, W), "mlp.gate_up_proj": (4 * W, W)}
    return rest | {f"model.layers.0.{name}.weight": rand(*shape, seed=9) for name, shape in shapes.items()}


def in_parts(_: Tensors) -> Tensors:
    """A LoRA for each of the three, as musubi-tuner writes them."""
    name = "lora_unet_model_layers_0_self_attn_qkv_proj"
    down = {f"{name}.lora_down.{i}.weight": rand(2, W, seed=i) for i in range(3)}
    return down | {f"{name}.lora_up.{i}.weight": rand(W, 2, seed=i) for i in range(3)}


BASES: dict[str, tuple[Callable[[], Tensors], Callable[[Tensors], Tensors]]] = {
    "llama": (llama, peft),
    "sd1": (sd1, kohya),
    "phi3": (phi3, in_parts),
    "unknown": (lambda: {f"body.{k}": v for k, v in llama().items()}, peft),
}


def wrapped(key: str, levels: list[tuple[int, str]], *, layers: bool) -> str:
    """The key with levels before some of its parts, and with `base_layer` before the parameter of projections."""
    parts = key.split(".")
    for at, level in levels:
        parts.insert(at % len(parts), level)
    if layers and key.endswith(("proj.weight", "to_q.weight")):
        parts.insert(-1, "base_layer")
    return ".".join(parts)


@settings(max_examples=examples(30), deadline=None)
@given(
    case=st.sampled_from(list(BASES)),
    levels=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(TRAINED)), max_size=3),
    layers=st.booleans(),
)
def test_base_with_such_levels_is_the_same_base(
    case: str,
    levels: list[tuple[int, str]],
    layers: bool,  # noqa: FBT001
) -> None:
    make, train = BASES[case]
    base = make()
    told = {key: wrapped(key, levels, layers=layers) for key in base}
    got = lora_merge.merge_state_dict({told[key]: value for key, value in base.items()}, train(base))
    assert list(got) == list(told.values())
    for key, value in lora_merge.merge_state_dict(base, train(base)).items():
        assert torch.equal(got[told[key]], value), told[key]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [
    "model.layers.0.base_layer.mlp.up_proj", "model.layers.0.module.mlp.up_proj", "model.layers.0.mlp.up_proj.base_layer",
    "lora_unet_model_layers_0_mlp_up_proj_base_layer", "lycoris__orig_mod_model_layers_0__orig_mod_mlp_up_proj",
    "lora_unet_model_layers_0_module_mlp_up_proj",
])  # fmt: skip
def test_adapter_may_have_such_levels_too(name: str) -> None:
    """On a plain base, and on one that has them itself: then its own name is one of those."""
    plain = {key.replace(name, "model.layers.0.mlp.up_proj"): value for key, value in factors(name).items()}
    want = lora_merge.merge_state_dict(llama(), plain)
    for level in ("", "module.", "_orig_mod."):
        told = {key: key.replace("layers.0.", f"layers.0.{level}") for key in want}
        got = lora_merge.merge_state_dict({told[key]: value for key, value in llama().items()}, factors(name))
        assert all(torch.equal(got[told[key]], value) for key, value in want.items())


def factors(name: str) -> Tensors:
    """A pair for one projection."""
    return {f"{name}.lora_A.weight": rand(2, W), f"{name}.lora_B.weight": rand(2 * W, 2)}


def test_names_that_would_be_one_stay_as_they_are() -> None:
    base = {"block.module.lin.weight": rand(W, W), "block.lin.weight": rand(W, W, seed=1)}
    for name in ("block.module.lin", "block.lin"):
        pair = {f"{name}.lora_A.weight": rand(2, W), f"{name}.lora_B.weight": rand(W, 2)}
        got = lora_merge.merge_state_dict(base, pair)
        assert [key for key in base if not torch.equal(got[key], base[key])] == [f"{name}.weight"]


class Net(nn.Module):
    """Two layers of which one is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(W, W)
        self.second = nn.Linear(W, W)
        self.norm = nn.LayerNorm(W)

    def forward(self, x: Any) -> Any:
        """PEFT wants one."""
        return self.norm(self.second(self.first(x)))


@pytest.mark.few(3)
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "oft"])
def test_model_saved_with_an_adapter_attached(kind: str, deleted: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """PEFT's own names, and those that stay when the adapter was deleted: what is merged goes into the layers."""
    from peft import IA3Config, LoraConfig, OFTConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    configs = {
        "lora": LoraConfig(r=2, target_modules=["first", "second"]),
        "dora": LoraConfig(r=2, target_modules=["first"], use_dora=True),
        "ia3": IA3Config(target_modules=["first"], feedforward_modules=[]),
        "oft": OFTConfig(oft_block_size=4, r=0, target_modules=["first"], use_cayley_neumann=False),
    }
    model = inject_adapter_in_model(configs[kind], Net(), adapter_name="style")
    if deleted:
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.delete_adapter("style")
    attached = {k: v.detach().clone() for k, v in model.state_dict().items()}
    assert deleted or len(attached) > len(Net().state_dict())
    base = save(attached, tmp_path / "base.safetensors")
    pair = {"first.lora_A.weight": rand(2, W), "first.lora_B.weight": rand(W, 2)}
    adapter = save(pair, tmp_path / "a.safetensors")
    report = lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
    assert prove(tmp_path / "out.safetensors", full=True)["proven"]
    got, want = load(tmp_path / "out.safetensors"), lora_merge.merge_state_dict(Net().state_dict(), pair)
    assert list(got) == list(load(base))
    assert torch.equal(got["first.base_layer.weight"], want["first.weight"])
    assert all(torch.equal(got[k], v) for k, v in attached.items() if k != "first.base_layer.weight")
    assert any("base_layer" in note for note in report.notes)
    told = [note for note in report.notes if "adapter attached" in note]
    left = [key for key in attached if ".style" in key]
    assert (f"{len(left)} tensors" in told[0] and left[0] in told[0]) if left else not told


def test_wrapped_model_is_a_base_though_most_tensors_are_the_adapters(tmp_path: Path) -> None:
    base = {key.replace("_proj.weight", "_proj.base_layer.weight"): value for key, value in llama().items()}
    left = {key.replace(".weight", ".default.weight"): value for key, value in peft(llama(), "").items()}
    assert len(left) > len(base)
    both = save(base | left, tmp_path / "base.safetensors")
    assert not looks_like_adapter(open_checkpoint(both))
    facts = inspect(both)
    assert facts["kind"] == "checkpoint"
    assert any(f"{len(left)} tensors" in note for note in facts["notes"])
    assert sum("levels" in note for note in facts["notes"]) == 1
    alone = save(left, tmp_path / "left.safetensors")
    assert looks_like_adapter(open_checkpoint(alone))
    # what PEFT stores beside the factors of an embedding
    table = {"e.base_layer.weight": rand(9, W), "e.lora_embedding_A": rand(2, 9), "e.lora_embedding_B": rand(W, 2)}
    assert looks_like_adapter(open_checkpoint(save(table, tmp_path / "table.safetensors")))


def test_notes_are_reported_by_every_command(tmp_path: Path) -> None:
    """In text, JSON and quietly: what stays, and what of the adapter has no place."""
    base = {f"_orig_mod.{key}": value for key, value in llama().items()}
    stray = {"elsewhere.lora_A.weight": rand(2, W), "elsewhere.lora_B.weight": rand(W, 2)}
    words = [save(base, tmp_path / "base.safetensors"), save(peft(llama()) | stray, tmp_path / "a.safetensors")]
    words += ["-o", tmp_path / "o.safetensors", "--unmatched", "skip", "--dry-run"]
    text, quiet, told = (run(*words, *how) for how in ([], ["-q"], ["--json"]))
    assert text.code == quiet.code == told.code == 0
    report = json.loads(told.out)
    assert any("_orig_mod" in note for note in report["notes"])
    assert "levels that training leaves (_orig_mod)" in text.out
    assert "levels that training leaves (_orig_mod)" in quiet.err
    (covered,) = report["coverage"].values()
    assert (covered["matched"], list(covered["skipped"])) == (14, ["elsewhere"])


def test_layers_without_a_place_are_still_refused() -> None:
    with pytest.raises(MergeError, match="no module of the adapter"):
        lora_merge.merge_state_dict({f"module.{k}": v for k, v in llama().items()}, factors("base_layer.other"))
