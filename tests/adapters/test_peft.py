"""What a PEFT configuration is taken to mean, and what is refused. Run: pytest tests/adapters/test_peft.py"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters.peft.config import REFUSED_INIT, REFUSED_LORA
from lora_merge.adapters.peft.methods import PEFT_METHODS
from lora_merge.adapters.peft.rules import PeftRules, StoredValue, rules
from lora_merge.algorithms import ALGORITHMS, DoesNotFit
from lora_merge.errors import FitError, InputError, MergeError
from lora_merge.files import pickles
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.models.weights import RowSlice, WeightView
from tests.kit.pairs import examples

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
UP, DOWN = "base_model.model.a.lora_B.weight", "base_model.model.a.lora_A.weight"


def folder(at: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A PEFT folder; by default with a plain pair for `a`."""
    pair = {UP: torch.randn(6, 4), DOWN: torch.randn(4, 5)}
    save_file(dict(pair if tensors is None else tensors), at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps(dict(config)))
    return at


def pair_scale(told: PeftRules, module: str, rank: int = 4) -> float:
    return told.scalars("lora", module, {"up": (6, rank), "down": (rank, 5)})["scale"]


# What is refused

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    **{kind: ({"peft_type": kind}, kind) for kind, method in PEFT_METHODS.items() if method.refuses},
    "alora": ({**LORA, "alora_invocation_tokens": [1, 2]}, "aLoRA"),
    "arrow": ({**LORA, "arrow_config": {"top_k": 2}}, "Arrow"),
    "qalora": ({**LORA, "use_qalora": True}, "QALoRA"),
    "replicated": ({**LORA, "layer_replication": [[0, 4], [2, 5]]}, "layer replication"),
    "corda": ({**LORA, "init_lora_weights": "corda"}, "CorDA"),
    "loftq": ({**LORA, "init_lora_weights": "loftq"}, "LoftQ"),
    "lora-ga": ({**LORA, "init_lora_weights": "lora_ga"}, "LoRA-GA"),
    "pissa-niter": ({**LORA, "init_lora_weights": "pissa_niter_4"}, "randomised"),
    "unknown-init": ({**LORA, "init_lora_weights": "fancy"}, "fancy"),
    "unknown-switch": ({**LORA, "use_future": True}, "use_future"),
    "unknown-config": ({**LORA, "future_config": {"a": 1}}, "future_config"),
    "unknown-type": ({"peft_type": "FUTURE"}, "FUTURE"),
    "no-type": ({"r": 4}, "without peft_type"),
    "without-places": ({"peft_type": "UNILORA"}, "UNILORA"),
    "unseeded": ({"peft_type": "FOURIERFT", "random_loc_seed": None}, "FOURIERFT"),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("name", REFUSALS)
def test_methods_without_a_merged_form_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config, method = REFUSALS[name]
    with pytest.raises(InputError) as caught:
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5)}, folder(tmp_path, config))
    assert caught.value.exit_code == 3
    assert method in str(caught.value) and len(caught.value.fix) > 10


def test_every_refused_feature_has_a_test() -> None:
    tested = {field for config, _ in REFUSALS.values() for field in config}
    starts = [str(config.get("init_lora_weights")) for config, _ in REFUSALS.values()]
    assert set(REFUSED_LORA) <= tested
    assert all(any(start.startswith(prefix) for start in starts) for prefix in REFUSED_INIT)


def test_every_method_of_the_installed_peft_is_known_one_way_or_the_other() -> None:
    from peft import PeftType

    assert {kind.value for kind in PeftType} <= PEFT_METHODS.keys()
    assert not any(method.refuses and (method.algorithms or method.suffixes) for method in PEFT_METHODS.values())


def test_every_name_in_the_tables_is_a_row() -> None:
    for method in PEFT_METHODS.values():
        rows = [ALGORITHMS[name] for name in method.algorithms]
        assert method.counts.keys() <= set(method.algorithms)
        for row in rows:
            assert set(method.shared) <= set(row.slots)
            assert method.scale is None or "scale" in row.scalars
        assert all(any(name in row.settings for row in rows) for name in method.settings)
        for told in method.suffixes.values():
            slot, *names = (told,) if isinstance(told, str) else told
            assert all(slot in ALGORITHMS[name].slots for name in names or method.algorithms)


def test_tensors_of_another_method_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="peft_type is IA3, the tensors are those of lora"):
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5)}, folder(tmp_path, {"peft_type": "IA3"}))


def test_oft_without_its_switch_is_refused() -> None:
    with pytest.raises(InputError, match="use_cayley_neumann"):
        rules({"peft_type": "OFT"}, "c").settings("peft_oft")


# Numbers


@pytest.mark.parametrize(("more", "module", "scale"), [
    ({}, "a", 2.0),
    ({"use_rslora": True}, "a", 4.0),
    ({"lora_alpha": 0}, "a", 0.0),
    ({"alpha_pattern": {"b": 12}}, "x.b", 3.0),
    ({"alpha_pattern": {"b": 12}}, "x.ab", 2.0),  # a key means a whole name, or more of them
    ({"alpha_pattern": {"x.b": 12}}, "base_model.model.y.x.b", 3.0),
    ({"alpha_pattern": {"^b": 12}}, "b", 3.0),
    ({"alpha_pattern": {"^b": 12}}, "x.b", 2.0),
    ({"alpha_pattern": {r"layers\.[01]\.(q|k)": 12, "q": 99}}, "layers.1.q", 3.0),
    ({"alpha_pattern": {r"layers\.[01]\.(q|k)": 12, "q": 100}}, "layers.2.q", 25.0),
    # levels that training put around PEFT's model, and inside it
    *(({"alpha_pattern": {"^x.b": 12}}, f"{wrapper}base_model.model.x.b", 3.0)
      for wrapper in ("module.", "model.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.", "_orig_mod.module.")),
    *(({"alpha_pattern": {"x.b": 12}}, f"base_model.model.x.{inside}.b", 3.0)
      for inside in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module._orig_mod")),
    ({"alpha_pattern": {"^module.b": 12}}, "base_model.model.module.b", 3.0),  # the model's own
    ({}, "base_model.model.attn.base_layer.out_proj", 4.0),  # MultiheadAttention, PEFT 0.21
])  # fmt: skip
def test_scale_of_a_lora(more: dict[str, Any], module: str, scale: float) -> None:
    assert pair_scale(rules({**LORA, **more}, "c"), module) == pytest.approx(scale)


def test_rank_comes_from_the_tensors() -> None:
    assert pair_scale(rules({**LORA, "r": 99}, "c"), "a", rank=2) == 4.0
    told = rules({**LORA, "rank_pattern": {"a": 16}}, "c")
    assert told.scalars("lora_bias", "a", {"diff": (6, 1)})["scale"] == 0.5  # no factor in sight


@pytest.mark.parametrize(("version", "doubled"), [("0.16.0", True), ("0.17.1", True), ("0.18.0", False), (None, True),
                                                  ("0.21.2.dev0", False), ("1.0.0", False)])  # fmt: skip
def test_oft_series_ends_as_in_the_version_that_trained_it(version: str | None, doubled: bool) -> None:  # noqa: FBT001
    config = {"peft_type": "OFT", "use_cayley_neumann": True, "num_cayley_neumann_terms": 4, "peft_version": version}
    told = rules(config, "c").settings("peft_oft")
    assert told == {"terms": 4, "doubled_last": doubled, "limit": 0.0, "shared": False}


# Whole parameters

PLAIN = {
    "m.lm_head.modules_to_save.weight": StoredValue("value", "m.lm_head.weight"),
    "m.lm_head.modules_to_save.default.weight": StoredValue("value", "m.lm_head.weight"),
    "m.score.modules_to_save.dense.bias": StoredValue("value", "m.score.dense.bias"),
    "m.norm.ln_tuning_layers.weight": StoredValue("value", "m.norm.weight"),
    "m.norm.ln_tuning_layers.default.bias": StoredValue("value", "m.norm.bias"),
    "m.q.base_layer.bias": StoredValue("value", "m.q.bias"),
    "m.emb.token_adapter.trainable_tokens_delta": StoredValue("value", "m.emb.weight", "", (5, 2)),
    "m.emb.trainable_tokens_delta.default": StoredValue("value", "m.emb.weight", "", (5, 2)),
}
COPIES = ["m.lm_head.original_module.weight", "m.emb.base_layer.weight", "m.emb.token_adapter.base_layer.weight"]
IGNORED = ["m.emb.trainable_tokens_original", "m.q.lora_velora_x.weight", "m.q.lora_monteclora_sampler.default.std"]
ADAPTERS = [UP, "m.experts.base_layer.lora_A.weight", "m.q.lora_magnitude_vector", "m.q.weight", "m.q.bias"]


@pytest.mark.parametrize("key", [*PLAIN, *COPIES, *IGNORED, *ADAPTERS])
def test_meaning_of_a_key_without_an_algorithm(key: str) -> None:
    told = rules({**LORA, "bias": "all", "trainable_token_indices": {"emb": [5, 2]}}, "c")
    meant = told.stored_value(key)
    if key in PLAIN:
        assert meant == PLAIN[key]
    elif key in ADAPTERS:
        assert meant is None  # `split`, or the name itself, says it
    else:
        assert meant is not None and meant.why and meant.kind == ("copy" if key in COPIES else "ignored")


def test_bias_of_a_layer_is_a_copy_unless_biases_were_trained() -> None:
    meant = rules(LORA, "c").stored_value("m.q.base_layer.bias")
    assert meant is not None and meant.kind == "copy"


@pytest.mark.parametrize("rows", [None, [1, 1], [-1], [0.5], "1", [True], {"other": [1]}, {"emb": 3}])
def test_token_rows_that_are_no_row_numbers_are_refused(rows: Any) -> None:
    told = rules({**LORA, "trainable_token_indices": rows}, "c")
    with pytest.raises(InputError, match="token_indices"):
        told.stored_value("m.emb.token_adapter.trainable_tokens_delta")


def test_tensor_saved_twice_is_set_once(tmp_path: Path) -> None:
    value = torch.randn(6, 5)
    tensors = {f"base_model.model.a.{name}": value.clone() for name in ("weight", "modules_to_save.weight")}
    tensors["base_model.model.a.original_module.weight"] = torch.randn(6, 5)
    base = torch.randn(6, 5)
    told = folder(tmp_path, {**LORA, "modules_to_save": ["a"]}, tensors)
    for strength in (1.0, 0.5):
        done = lora_merge.merge_state_dict({"a.weight": base}, [(str(told), strength)])["a.weight"]
        torch.testing.assert_close(done, base + strength * (value - base))


def test_bias_of_the_module_beside_the_trained_one_never_counts(tmp_path: Path) -> None:
    """With bias="all" PEFT saves it too; files have the wider dtype first, here that of the untrained one."""
    value = torch.randn(6).half()
    tensors = {"base_model.model.a.original_module.bias": torch.randn(6), "base_model.model.a.bias": value}
    told = folder(tmp_path, {**LORA, "bias": "all", "modules_to_save": ["a"]}, tensors)
    done = lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5), "a.bias": torch.randn(6)}, told)
    assert torch.equal(done["a.bias"], value.float())


def test_two_values_for_one_parameter_are_refused_unless_they_are_equal(tmp_path: Path) -> None:
    """PEFT saves the bias of a module inside a trained one twice: as it was trained, and under `bias="all"`."""
    value = torch.randn(6)
    for number, other in enumerate((value.clone(), value + 1)):
        tensors = {"base_model.model.a.b.bias": value, "base_model.model.a.modules_to_save.default.b.bias": other}
        place = tmp_path / str(number)
        place.mkdir()
        told = folder(place, {**LORA, "bias": "all", "modules_to_save": ["a"]}, tensors)
        base = {"a.b.weight": torch.randn(6, 5), "a.b.bias": torch.randn(6)}
        if number:
            with pytest.raises(InputError, match="are for the same part of a layer"):
                lora_merge.merge_state_dict(base, told)
        else:
            assert torch.equal(lora_merge.merge_state_dict(base, told)["a.b.bias"], value)


@pytest.mark.parametrize("name", ["base_layer.weight", "original_module.weight"])
def test_weight_of_another_size_and_nothing_that_fits_it_are_refused(name: str, tmp_path: Path) -> None:
    tensors = {UP: torch.randn(6, 4), DOWN: torch.randn(4, 5), f"base_model.model.a.{name}": torch.randn(8, 5)}
    with pytest.raises(FitError, match="up has 6 rows, the weight has 8"):
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5)}, folder(tmp_path, LORA, tensors))
    with pytest.raises(FitError, match="down reads 5 inputs, the weight of the base has 7"):
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 7)}, {UP: tensors[UP], DOWN: tensors[DOWN]})


def test_tokens_that_the_base_lacks_are_refused(tmp_path: Path) -> None:
    tensors = {"base_model.model.a.trainable_tokens_delta": torch.randn(1, 5)}
    told = folder(tmp_path, {"peft_type": "TRAINABLE_TOKENS", "token_indices": [6]}, tensors)
    with pytest.raises(FitError, match="row 6 of 6"):
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5)}, told)


@pytest.mark.parametrize("switch", ["use_dora", "lora_bias"])
def test_tensors_of_the_configuration_that_the_file_lacks(switch: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="incomplete"):
        lora_merge.merge_state_dict({"a.weight": torch.randn(6, 5)}, folder(tmp_path, {**LORA, switch: True}))


def test_whole_values_of_another_size_are_refused_but_tables_and_heads(tmp_path: Path) -> None:
    base = {"a.weight": torch.randn(6, 5), "norm.weight": torch.randn(6), "head.weight": torch.randn(3, 5),
            "head.bias": torch.randn(3)}  # fmt: skip
    whole = "base_model.model."

    def merged(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return lora_merge.merge_state_dict(base, folder(tmp_path, LORA, {whole + k: v for k, v in tensors.items()}))

    for wrong in ({"norm.weight": (7,)}, {"head.bias": (4,)}, {"a.weight": (5,)}, {"a.weight": (6, 4)},
                  {"head.weight": (4, 5), "head.bias": (5,)}, {"norm.weight": (6, 1, 2)}):  # fmt: skip
        with pytest.raises(FitError, match="do not fit"):
            merged({name: torch.randn(shape) for name, shape in wrong.items()})
    done = merged({"head.weight": torch.randn(4, 5), "head.bias": torch.randn(4)})
    assert (done["head.weight"].shape, done["head.bias"].shape) == ((4, 5), (4,))


def test_scaling_without_its_side_is_no_new_value() -> None:
    adapter = {f"lora_unet_blocks_{i}.{s}": t for i in range(3)
               for s, t in (("weight", torch.randn(8)), ("on_input", torch.tensor(1)))}  # fmt: skip
    del adapter["lora_unet_blocks_1.on_input"]
    with pytest.raises(MergeError):
        lora_merge.merge_state_dict({f"blocks.{i}.weight": torch.randn(8, 8) for i in range(3)}, adapter)


@pytest.mark.parametrize(("kind", "tensors", "told"), [
    ("HRA", {"hra_u": (8, 3)}, {"r": 4}),
    ("MISS", {"miss_block": (3, 8)}, {"r": 4}),
    ("VERA", {"vera_lambda_b": (8,), "vera_lambda_d": (3,)}, {"r": 4}),
    ("FOURIERFT", {"fourierft_spectrum": (9,)}, {"n_frequency": 10}),
    ("WAVEFT", {"waveft_spectrum": (9,)}, {"n_frequency": 10}),
    ("OFT", {"oft_R.weight": (1, 6)}, {"use_cayley_neumann": True}),  # one block of two, and not shared
    ("OFT", {"oft_r": (1, 4, 4)}, {"r": 2}),
    ("OFT", {"oft_r": (1, 4, 4), "oft_s": (8, 1)}, {"r": 2}),
])  # fmt: skip
def test_lengths_that_only_the_configuration_confirms(
    kind: str, tensors: Mapping[str, tuple[int, ...]], told: Mapping[str, Any], tmp_path: Path
) -> None:
    saved = {f"base_model.model.a.{name}": torch.randn(shape) for name, shape in tensors.items()}
    base = {"a.weight": torch.randn(8, 8)}
    with pytest.raises(FitError, match="configuration"):
        lora_merge.merge_state_dict(base, folder(tmp_path, {"peft_type": kind, **told}, saved))
    agreed = {"r": 3, "n_frequency": 9, "block_share": True}
    lora_merge.merge_state_dict(base, folder(tmp_path, {"peft_type": kind, **told, **agreed}, saved))


@pytest.mark.parametrize(("tensors", "named"), [
    ({"oft_R.weight": (2, 6)}, 'setting={"terms"'),  # not OneTrainer's, which has the same name
    ({"lora_A": (2, 8), "lora_B": (8, 2), "lora_E": (2, 1)}, "adapter_config.json"),
    ({"lora_A.weight": (8, 8)}, "incomplete"),  # not ai-toolkit's whole difference
])  # fmt: skip
def test_files_of_peft_without_their_configuration(tensors: Mapping[str, tuple[int, ...]], named: str) -> None:
    adapter = {f"base_model.model.a.{name}": torch.randn(shape) for name, shape in tensors.items()}
    with pytest.raises(MergeError, match=named):
        lora_merge.merge_state_dict({"a.weight": torch.randn(8, 8)}, adapter)


# Parameters that modules mean


@pytest.mark.parametrize(("module", "first"), [
    ("base_model.model.m.q_proj", "m.q_proj.weight"),
    ("base_model.model.m.attn.base_layer.out_proj", "m.attn.out_proj.weight"),
    ("base_model.model.m.experts", "m.experts.down_proj"),
    ("base_model.model.m.experts.base_layer", "m.experts.gate_up_proj"),
])  # fmt: skip
def test_parameter_that_a_module_means(module: str, first: str) -> None:
    names = ["experts.down_proj", "experts.gate_up_proj"]
    for order in (names, names[::-1]):  # the order of registration counts, not this one
        assert rules({**LORA, "target_parameters": order}, "c").targets(module)[0] == first


STACK = {**LORA, "target_parameters": ["experts.down_proj"]}
NOW, BEFORE = {"peft_version": "0.19.1"}, {"peft_version": "0.18.1"}


@pytest.mark.parametrize(("config", "model", "apart", "row"), [
    ({"base_model_name_or_path": "openai/gpt-oss-20b"}, "", False, "lora_experts_transposed"),
    (BEFORE, "gpt_oss", False, "lora_experts_transposed"),
    (NOW, "aria", False, "lora_experts_transposed"),
    (NOW, "llama4_text", False, "lora_experts"),
    (NOW | {"auto_mapping": {"base_model_class": "Qwen3_5MoeForCausalLM"}}, "", False, "lora_experts"),
    (NOW, "", True, "lora_experts"),
    (NOW, "", False, "the base's type"),
    (BEFORE, "llama4_text", False, "0.18.1"),
    ({}, "llama4_text", False, "peft_version"),
    ({"peft_version": "0.19.0"}, "gpt_oss", False, "0.19.0"),
])  # fmt: skip
def test_square_experts_are_oriented(config: dict[str, Any], model: str, apart: bool, row: str) -> None:  # noqa: FBT001
    pieces = [RowSlice(f"m.{i}", 0, 12 // (1 + apart), 4) for i in range(1 + apart)]
    told, view = rules({**STACK, **config}, "c"), WeightView(tuple(pieces), (3, 4, 4))
    if row.startswith("lora"):
        assert told.algorithm("m.experts", ["lora", "lora_experts"], view, model) == row
    else:
        with pytest.raises(DoesNotFit, match=row):
            told.algorithm("m.experts", ["lora", "lora_experts"], view, model)
    oblong = WeightView(pieces[:1], (3, 4, 5))
    assert told.algorithm("m.experts", ["lora", "lora_experts"], oblong, model) == "lora_experts"


def test_square_experts_of_an_unknown_base_are_refused_and_a_matrix_is_no_stack_of_them(tmp_path: Path) -> None:
    pair = {"m.experts.lora_A.weight": torch.randn(6, 4), "m.experts.lora_B.weight": torch.randn(4, 6)}
    adapter = folder(tmp_path, STACK | NOW, pair)
    with pytest.raises(MergeError, match="square") as refused:
        lora_merge.merge_state_dict({"m.experts.down_proj": torch.randn(3, 4, 4)}, adapter)
    assert "config.json" in refused.value.fix
    with pytest.raises(MergeError, match="the weight has 5") as misfit:
        lora_merge.merge_state_dict({"m.experts.weight": torch.randn(5, 4)}, pair)
    assert "stacked" not in str(misfit.value)


def test_bare_names_are_of_modules_that_are_no_layers() -> None:
    config = {**LORA, "target_parameters": ["down_proj", "gate.weight"]}
    for targets in (["q_proj"], r".*\.q_proj", "all-linear"):
        told = rules({**config, "target_modules": targets}, "c")
        assert told.targets("base_model.model.m.experts") == ("m.experts.down_proj",)
        assert told.targets("base_model.model.m.gate") == ("m.gate.weight",)
        assert told.targets("base_model.model.m.q_proj")[0] == "m.q_proj.weight"


@pytest.mark.parametrize(("pattern", "why"), [
    ({}, "both mean"), ({"rank_pattern": {"w1": 3}}, "both mean"), ({"alpha_pattern": {"w1": 32}}, "alpha_pattern"),
])  # fmt: skip
def test_parameters_of_unknown_order_are_refused(pattern: dict[str, Any], why: str, tmp_path: Path) -> None:
    names = ["base_model.model.m.mlp", "base_model.model.m.mlp.base_layer"]
    pairs = {f"{n}.lora_{x}.weight": torch.randn(s) for n in names for x, s in (("A", (4, 5)), ("B", (6, 4)))}
    adapter = folder(tmp_path, {**LORA, "target_parameters": ["mlp.w1", "mlp.w2"], **pattern}, pairs)
    with pytest.raises(MergeError, match=why):
        lora_merge.merge_state_dict({"m.mlp.w1": torch.randn(6, 5), "m.mlp.w2": torch.randn(6, 5)}, adapter)


def test_rank_other_than_that_of_the_configuration_is_noted() -> None:
    said = {**LORA, "r": 16, "rank_pattern": {"k": 4}}
    assert "rank 16" in rules(said, "c").doubt("lora", "m.q", {"down": (4, 9), "up": (9, 4)})
    assert not rules(said, "c").doubt("lora", "m.k", {"down": (4, 9), "up": (9, 4)})
    assert not rules({}, "c").doubt("lora", "m.q", {"down": (4, 9), "up": (9, 4)})


# diffusers' metadata


def test_metadata_of_components_and_of_the_whole() -> None:
    packed = {"transformer.r": 4, "transformer.lora_alpha": 8, "text_encoder.r": 4, "text_encoder.lora_alpha": 2}
    told = rules({}, "f", {"lora_adapter_metadata": json.dumps(packed)})
    assert pair_scale(told.of("transformer.blocks.0.q"), "transformer.blocks.0.q") == 2.0
    assert pair_scale(told.of("text_encoder.q"), "text_encoder.q") == 0.5
    assert told.of("vae.q").scalars("lora", "vae.q", {"down": (4, 5)}) == {}
    whole = rules({}, "f", {"lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 8})})
    assert pair_scale(whole.of("blocks.0.q"), "blocks.0.q") == 2.0


@pytest.mark.parametrize(
    ("module", "scale"),
    [
        *((f"{prefix}blocks.0.q", 2.0) for prefix in ("", "diffusion_model.", "base_model.model.", "unet.", "net.")),
        *(("lora_unet_blocks_0_q", 2.0), ("lora_te_layers_0_q", 0.5), ("lora_te1_layers_0_q", 0.5)),
        *(("lora_te2_layers_0_q", None), ("transformer_2.blocks.0.q", None), ("lora_vae_q", None)),
    ],
)
def test_metadata_of_a_component_holds_for_it_by_its_other_names(module: str, scale: float | None) -> None:
    packed = {"transformer.r": 4, "transformer.lora_alpha": 8, "text_encoder.r": 4, "text_encoder.lora_alpha": 2}
    told = rules({}, "f", {"lora_adapter_metadata": json.dumps(packed)}).of(module)
    assert told.scalars("lora", module, {"down": (4, 5)}).get("scale") == scale


def test_metadata_of_two_denoisers_is_of_neither_by_other_names() -> None:
    told = rules({}, "f", {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer_2.r": 2})})
    assert not told.of("diffusion_model.q").scalars("lora", "diffusion_model.q", {"down": (4, 5)})


def test_patterns_of_a_component_start_where_its_own_names_do() -> None:
    config = {"r": 4, "lora_alpha": 4, "target_modules": ["q"], "alpha_pattern": {"^b.0.q": 8, "^q$": 12}}
    packed = {f"transformer.{name}": value for name, value in config.items()}
    told = rules({}, "f", {"lora_adapter_metadata": json.dumps(packed)})
    for name, scale in {"b.0.q": 2.0, "q": 3.0, "a.b.0.q": 1.0, "b.1.q": 1.0}.items():
        for module in (f"transformer.{name}", name, f"diffusion_model.{name}"):
            assert pair_scale(told.of(module), module) == scale, module
    with pytest.raises(InputError, match="other names"):  # which of the patterns it has, nothing tells
        pair_scale(told.of("lora_unet_b_0_q"), "lora_unet_b_0_q")


def test_alpha_beside_the_tensors_counts_before_the_metadata_of_other_names(tmp_path: Path) -> None:
    pair = {"lora_unet_a.lora_up.weight": torch.randn(6, 4), "lora_unet_a.lora_down.weight": torch.randn(4, 5)}
    path, base = tmp_path / "a.safetensors", {"a.weight": torch.randn(6, 5)}
    metadata = {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": 8})}
    delta = pair["lora_unet_a.lora_up.weight"] @ pair["lora_unet_a.lora_down.weight"]
    for alpha, scale in (({}, 2.0), ({"lora_unet_a.alpha": torch.tensor(3.0)}, 0.75)):
        save_file(pair | alpha, path, metadata)
        done = lora_merge.merge_state_dict(base, path)["a.weight"]
        torch.testing.assert_close(done, base["a.weight"] + scale * delta)


def test_metadata_is_used_by_a_merge(tmp_path: Path) -> None:
    up, down, base = torch.randn(6, 4), torch.randn(4, 5), torch.randn(6, 5)
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps({"r": 4, "lora_alpha": 8})}
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file({"a.lora_B.weight": up, "a.lora_A.weight": down}, path, metadata)
    done = lora_merge.merge_state_dict({"a.weight": base}, path)["a.weight"]
    torch.testing.assert_close(done, base + 2 * up @ down)


@pytest.mark.parametrize(
    ("name", "alpha", "told", "scale"),
    [
        ("transformer.a", None, {"r": 4, "lora_alpha": 8}, 2.0),
        ("transformer.a", None, {"r": 4, "lora_alpha": 8, "alpha_pattern": {"a": 12}, "target_modules": ["a"]}, 3.0),
        ("diffusion_model.a", None, {"r": 4, "lora_alpha": 8}, 2.0),
        ("diffusion_model.a", 4.0, {"r": 4, "lora_alpha": 8}, 1.0),  # converted, with an alpha of its own
        ("transformer.a", None, {"rank": 4, "alpha": 8}, 2.0),  # another tool's
        ("transformer.a", None, ["r", "lora_alpha"], 1.0),
    ],
)
def test_finetrainers_header_states_alpha(
    tmp_path: Path, name: str, alpha: float | None, told: object, scale: float
) -> None:
    """What its trainers write, trainer/{sft,control}_trainer/trainer.py, and its loader reads back."""
    up, down, base = torch.randn(6, 4), torch.randn(4, 5), torch.randn(6, 5)
    tensors = {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down}
    tensors |= {} if alpha is None else {f"{name}.alpha": torch.tensor(alpha)}
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, path, {"format": "pt", "lora_config": json.dumps(told, indent=4)})
    done = lora_merge.merge_state_dict({"a.weight": base}, path)["a.weight"]
    torch.testing.assert_close(done, base + scale * up @ down)
    save_file({"a.weight": base}, tmp_path / "base.safetensors")
    notes = str(lora_merge.plan(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors").adapters[0].notes)
    assert ("does not read" in notes) is (scale != 1)


def test_configuration_beside_a_file_counts_when_the_file_is_named(tmp_path: Path) -> None:
    base = torch.zeros(6, 5)
    told = folder(tmp_path, LORA)
    whole = lora_merge.merge_state_dict({"a.weight": base}, told)["a.weight"]
    named = lora_merge.merge_state_dict({"a.weight": base}, told / "adapter_model.safetensors")["a.weight"]
    assert torch.equal(whole, named) and whole.abs().max() > 0


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "epoch-3.safetensors"])
def test_configuration_counts_for_files_of_peft_by_other_names(name: str, wrapper: str, tmp_path: Path) -> None:
    base = {"a.weight": torch.zeros(6, 5)}
    told = folder(tmp_path, LORA)
    whole = lora_merge.merge_state_dict(base, told)["a.weight"]
    tensors = {wrapper + key: value for key, value in load_file(told / "adapter_model.safetensors").items()}
    (told / "adapter_model.safetensors").unlink()
    (torch.save if name.endswith(".bin") else save_file)(tensors, told / name)
    assert torch.equal(lora_merge.merge_state_dict(base, told / name)["a.weight"], whole)
    assert "read with the adapter_config.json next to it" in open_checkpoint(told / name).notes
    with pytest.raises(InputError, match=f"if {name} is the adapter, name that file"):
        lora_merge.merge_state_dict(base, told)


def test_files_by_other_names_are_not_opened_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles take long."""
    told, opened = folder(tmp_path, LORA), list[Path]()
    torch.save(load_file(told / "adapter_model.safetensors"), told / "pytorch_model.bin")
    save_file({"a.weight": torch.zeros(6, 5)}, tmp_path / "base.safetensors")
    really = pickles.read_pickled
    monkeypatch.setattr(pickles, "read_pickled", lambda path: opened.append(path) or really(path))
    lora_merge.merge(tmp_path / "base.safetensors", told / "pytorch_model.bin", tmp_path / "out.safetensors")
    assert len(opened) == 2


def test_configuration_beside_a_file_of_another_trainer_does_not_count(tmp_path: Path) -> None:
    """An alpha of its own, which PEFT's files have not, and which those numbers would replace."""
    pair = {"a.lora_up.weight": torch.randn(6, 4), "a.lora_down.weight": torch.randn(4, 5)}
    path = folder(tmp_path, LORA) / "kohya.safetensors"
    save_file(pair | {"a.alpha": torch.tensor(3.0)}, path)
    done = lora_merge.merge_state_dict({"a.weight": torch.zeros(6, 5)}, path)["a.weight"]
    torch.testing.assert_close(done, 0.75 * pair["a.lora_up.weight"] @ pair["a.lora_down.weight"])


@pytest.mark.parametrize("beside", ["non_lora_trainables.bin", "trainable_params.bin"])
def test_file_alone_is_refused_where_more_was_trained(beside: str, tmp_path: Path) -> None:
    told = folder(tmp_path, LORA)
    torch.save({"base_model.model.norm.weight": torch.ones(5)}, told / beside)
    with pytest.raises(InputError, match="more trained weights are next to") as e:
        lora_merge.merge_state_dict({"a.weight": torch.zeros(6, 5)}, told / "adapter_model.safetensors")
    assert beside in e.value.where and str(told) in e.value.fix


@pytest.mark.parametrize("slots", [{"lora_A"}, {"lora_B"}, {"lora_A", "lora_B"}])
def test_tensors_that_were_not_gathered_are_called_so(slots: set[str], tmp_path: Path) -> None:
    told = folder(tmp_path, LORA)
    file = told / "adapter_model.safetensors"
    save_file({k: torch.zeros(0) if slots & {*k.split(".")} else v for k, v in load_file(file).items()}, file)
    with pytest.raises(MergeError, match="ZeRO-3"):
        lora_merge.merge_state_dict({"a.weight": torch.zeros(6, 5)}, told)


def test_two_models_of_a_training_in_one_file_are_not_added_up(tmp_path: Path) -> None:
    pair = {UP: (6, 4), DOWN: (4, 5)}
    tensors = {f"{model}.{key}": torch.randn(shape) for model in ("policy", "critic") for key, shape in pair.items()}
    with pytest.raises(MergeError, match="no module of the adapter is in the base"):
        lora_merge.merge_state_dict({"a.weight": torch.zeros(6, 5)}, folder(tmp_path, LORA, tensors))


# Odd and hostile configurations

FIELDS = sorted(
    {
        *REFUSED_LORA,
        *("peft_type", "r", "lora_alpha", "alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_r", "bias"),
        *("init_lora_weights", "feedforward_modules", "target_parameters", "trainable_token_indices", "eps", "coft"),
        *("token_indices", "use_cayley_neumann", "num_cayley_neumann_terms", "peft_version", "scaling", "topk"),
        *("projection_prng_key", "random_loc_seed", "apply_GS", "group_size", "decomposition_method", "use_bdlora"),
        *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "randlora_alpha", "kasa_config"),
    }
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("a") | st.just("relu")
ITEMS = SCALARS | st.just([]) | st.just({})  # st.recursive takes ten times as long, and nothing looks deeper
JSON = SCALARS | st.lists(ITEMS, max_size=3) | st.dictionaries(st.text(max_size=4), ITEMS, max_size=3)
SHAPES = {name: {slot: (4, 4, 4, 4) for slot in row.slots} for name, row in ALGORITHMS.items()}


@settings(max_examples=examples(300))
@given(kind=st.sampled_from(sorted(PEFT_METHODS)), config=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_configuration_is_understood_or_refused_in_one_way(kind: str, config: dict[str, Any]) -> None:
    try:
        told = rules({"peft_type": kind, **config}, "c")
    except MergeError:
        return
    for name in PEFT_METHODS[told.kind].algorithms:
        for ask in (
            lambda name=name: told.scalars(name, "a", SHAPES.get(name, {})),
            lambda name=name: told.settings(name),
            lambda name=name: told.algorithm("a", [name]),
            lambda: told.targets("a"),
            lambda: told.stored_value("a.trainable_tokens_delta"),
            lambda: told.fan_in_fan_out,
        ):
            try:
                ask()
            except (MergeError, DoesNotFit) as e:
                assert isinstance(e, InputError | DoesNotFit)


@pytest.mark.parametrize("pattern", ["[", "(?P<x>", "a{99999999999}", "x+" * 99_999, r"(a+)+\1"])
def test_patterns_that_are_broken_are_refused_at_once(pattern: str) -> None:
    told = rules({**LORA, "alpha_pattern": {pattern: 3}}, "c")
    started = time.process_time()
    with pytest.raises(InputError, match="alpha_pattern"):
        pair_scale(told, "a" * 200)
    assert time.process_time() - started < 10  # nothing, or for ever


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"r": "x", "lora_alpha": 3}', "[" * 100_000])
def test_odd_metadata_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        pair_scale(rules({}, "f", {"lora_adapter_metadata": text}).of("a"), "a", rank=0)


@pytest.mark.pairs
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("pattern", [{}, {"lm_head": 16}])
@pytest.mark.parametrize("module", ["lm_head", "language_model.lm_head", "lm_head.decoder", "embed_tokens", "q_proj"])
@pytest.mark.parametrize("flag", [None, False, True])
def test_head_keeps_the_scale_of_its_rank_only_with_the_embeddings_factors(
    flag: bool | None,  # noqa: FBT001
    module: str,
    pattern: dict[str, int],
    rslora: bool,  # noqa: FBT001
) -> None:
    """Elsewhere the factors tell the rank: rank_pattern may have named the module in another way."""
    config = {**LORA, "rank_pattern": pattern, "use_rslora": rslora}
    if flag is not None:
        config["ensure_weight_tying"] = flag
    shares = flag is True and module.endswith("lm_head")
    rank = (pattern.get("lm_head", LORA["r"]) if module.endswith("lm_head") else LORA["r"]) if shares else 2
    assert isinstance(rank, int)
    found = pair_scale(rules(config, "c"), f"base_model.model.{module}", rank=2)
    assert found == pytest.approx(8 / (rank**0.5 if rslora else rank))
