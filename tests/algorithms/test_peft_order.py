"""Methods of PEFT that count layers: the order is that of the model's own class, for real classes of transformers."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file

import lora_merge
from lora_merge.adapters.peft.rules import rules
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import MergeError
from lora_merge.matching.layer_order import _targets
from lora_merge.models.module_order import in_order, tables
from tests.algorithms.peft_models import MODELS, SMALL
from tests.kit.peft_oracle import assert_close, save, train
from tests.models.module_orders import added, joined

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unilora": (peft.UniLoraConfig, {"r": 3, "theta_d_length": 50}),
    "unilora-seeded": (peft.UniLoraConfig, {"r": 2, "theta_d_length": 5000, "proj_seed": 7}),
    "tinylora": (peft.TinyLoraConfig, {"r": 3, "u": 4}),
    "tinylora-drawn": (peft.TinyLoraConfig, {"r": 3, "u": 4, "save_projection": False, "projection_seed": 9}),
    "tinylora-tied": (peft.TinyLoraConfig, {"r": 3, "u": 4, "weight_tying": 0.6}),
    "tinylora-one": (peft.TinyLoraConfig, {"r": 3, "u": 4, "weight_tying": 1.0, "save_projection": False}),
}


SOME: dict[str, dict[str, Any]] = {
    "all": {},
    "one": {"layers_to_transform": 1},
    "some": {"layers_to_transform": [10, 0, 3]},
    "named": {"layers_to_transform": [1, 2], "layers_pattern": "layers"},
    "first of two": {"layers_to_transform": [1], "layers_pattern": ["nothing", "layers"]},
}


@pytest.mark.parametrize("chosen", SOME)
def test_layers_that_are_not_named_are_those_that_peft_selects(chosen: str) -> None:
    config = peft.UniLoraConfig(target_modules=["q", "lm_head"], **SOME[chosen])
    told = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    stacks = ("layers", "model.layers", "a.layers.1.layers", "h", "model.h", "model.layers.0.experts", "m.0.layers")
    paths = [f"{stack}.{i}.{end}" for stack in stacks for i in (0, 1, 2, 10) for end in ("q", "s.q", "x.q", "other")]
    source = Path("b")
    base = {f"{path}.weight": StoredTensor("x", "F32", (2, 2), source, 0, 16) for path in [*paths, "lm_head", "1.q"]}
    wanted = [key.removesuffix(".weight") for key in base]
    wanted = [path for path in wanted if check_target_module_exists(config, path) is True]
    assert list(_targets(rules(told, "adapter_config.json"), base)) == wanted
    assert wanted


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_layers_are_counted_as_the_models_class_lists_them(model: str, method: str, tmp_path: Path) -> None:
    make, config, targets = MODELS[model]
    how, options = METHODS[method]
    torch.manual_seed(1)
    base, tuned = train(how(target_modules=targets, **options), model=make(config).eval())
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    lora_merge.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", device="cpu")
    done = make.from_pretrained(tmp_path / "out").eval().state_dict()
    wanted = copy.deepcopy(tuned).merge_and_unload().state_dict()
    changed = 0
    for name, value in wanted.items():
        assert_close(done[name], value, name)
        changed += not torch.equal(value, base.state_dict()[name])
    assert changed > len(targets)


@pytest.mark.parametrize("model", MODELS)
def test_order_is_that_of_named_modules(model: str) -> None:
    make, config, _ = MODELS[model]
    with torch.device("meta"):
        names = [n for n, m in make(config).named_modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
    shuffled = random.Random(4).sample(names, len(names))
    assert in_order(shuffled, model) == names
    assert in_order([], model) == []


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "opt", "FluxTransformer2DModel", "WanTransformer3DModel"])
def test_table_of_orders_is_what_its_generator_makes(name: str) -> None:
    table = {part: [*orders] for part, orders in tables()[name].items()}
    made = added({}, name)
    assert {part: {*orders} for part, orders in made.items()} == {p: {*o} for p, o in joined([table]).items()}
    assert added({name: {"": ["lm_head model"]}}, name).get("", [""])[0] == "lm_head model"


def test_class_around_the_model_lists_what_the_model_lists() -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1}
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))
    names = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert any(".encoder_attn." in name for name in names)
    assert in_order(sorted(names), "whisper") == names


def test_siblings_that_types_of_models_order_differently_have_no_order_of_their_own() -> None:
    names = ["a.self_attn.q_proj", "a.self_attn.v_proj"]
    assert in_order(names, "llama") == names
    assert in_order(names, "opt") == names[::-1]
    assert in_order(names, "") is None
    assert in_order(["x.wide", "x.tall"], "llama") is None
    assert in_order(["a.layers.10.q", "a.layers.9.q"], "") == ["a.layers.9.q", "a.layers.10.q"]
    assert len(tables()) > 30


@pytest.mark.filterwarnings("ignore")
def test_unknown_order_is_refused_and_one_vector_needs_none(tmp_path: Path) -> None:
    for tying, refused in ((0.0, True), (1.0, False)):
        config = peft.TinyLoraConfig(target_modules=["wide", "tall"], r=3, u=4, weight_tying=tying)
        base, tuned = train(config)
        save(tuned, tmp_path / f"{tying}")
        if not refused:
            done = lora_merge.merge_state_dict(base.state_dict(), tmp_path / f"{tying}")
            for name, value in copy.deepcopy(tuned).merge_and_unload().state_dict().items():
                assert_close(done[name], value, name)
            continue
        with pytest.raises(MergeError, match="order in which the model's code lists them") as e:
            lora_merge.merge_state_dict(base.state_dict(), tmp_path / f"{tying}")
        assert e.value.exit_code == 3
    assert load_file(tmp_path / "1.0" / "adapter_model.safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "targets", "change", "why"), [
    ("llama", ["q_proj"], {"model_type": "unheard-of"}, "order"),
    ("llama", ["q_proj", "lm_head"], {"architectures": ["LlamaModel"]}, "class"),
    ("t5", ["q"], {"architectures": ["T5EncoderModel"]}, "class"),
    ("bert", ["nothing", "query"], {}, ""),
])  # fmt: skip
def test_layers_that_are_not_named_must_be_known(
    model: str, targets: list[str], change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    make, config, _ = MODELS[model]
    base, tuned = train(peft.UniLoraConfig(target_modules=targets, r=2), model=make(config).eval())
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    told = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(told | change))
    if not why:
        plan = lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
        assert any("not stored (save_indices)" in note for note in plan.adapters[0].notes)
        return
    with pytest.raises(MergeError, match=why) as e:
        lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert "save_indices=True" in e.value.fix


@pytest.mark.filterwarnings("ignore")
def test_numbered_experts_may_be_no_layers_of_the_trained_model(tmp_path: Path) -> None:
    """transformers 5 has one parameter for them, though its files number them; there PEFT wraps q_proj alone."""
    small = {**SMALL, "num_hidden_layers": 1, "moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}
    config = transformers.Qwen3MoeConfig(**small, num_key_value_heads=1, head_dim=8)
    base, tuned = train(
        peft.UniLoraConfig(target_modules=["q_proj", "down_proj"], r=2),
        model=transformers.Qwen3MoeForCausalLM(config),
    )
    save(tuned, tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    assert any(".experts.1." in key for key in load_file(tmp_path / "base" / "model.safetensors"))
    with pytest.raises(MergeError, match="transformers 5 one parameter"):
        lora_merge.plan(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
