"""Every PEFT tuner: the file it saves, merged by our rules, is the function that PEFT computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers.activations import ACT2FN

import lora_merge
from lora_merge.algorithms.peanut import ACTIVATION_FUNCTIONS
from tests.kit.peft_oracle import (
    assert_close,
    assert_same_function,
    assert_same_merge,
    assert_tool_agrees,
    inputs,
    merged,
    save,
    train,
)

LINEAR = ["wide", "tall", "square"]
GPT = ["gpt", "gpt_square"]
CONV = ["conv", "point", "line", "volume"]
ROWS = {"q": slice(0, 4), "k": slice(4, 8), "v": slice(8, 12)}

CASES: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    "lora": (peft.LoraConfig, [*LINEAR, *CONV, "table"], {"r": 4, "lora_alpha": 6}),
    "lora-conv1d": (peft.LoraConfig, GPT, {"r": 4, "lora_alpha": 6, "fan_in_fan_out": True}),
    "rslora": (peft.LoraConfig, [*LINEAR, "conv"], {"r": 4, "lora_alpha": 6, "use_rslora": True}),
    "patterns": (
        peft.LoraConfig, LINEAR,
        {"r": 4, "lora_alpha": 6, "rank_pattern": {"^wide": 2, "t.*": 3}, "alpha_pattern": {"(tall|wide)": 5, "a": 9}},
    ),
    "lora-bias": (peft.LoraConfig, ["wide", "square"], {"r": 4, "lora_alpha": 6, "lora_bias": True}),
    "dora": (
        peft.LoraConfig, [*LINEAR, "conv", "line", "volume", "table"], {"r": 4, "lora_alpha": 6, "use_dora": True},
    ),
    "dora-conv1d": (peft.LoraConfig, GPT, {"r": 4, "lora_alpha": 6, "use_dora": True, "fan_in_fan_out": True}),
    "bias-all": (peft.LoraConfig, ["wide", "square"], {"r": 4, "bias": "all"}),
    "bias-lora": (peft.LoraConfig, ["wide", "square"], {"r": 4, "bias": "lora_only"}),
    "pissa": (peft.LoraConfig, LINEAR, {"r": 4, "lora_alpha": 6, "init_lora_weights": "pissa"}),
    "olora": (peft.LoraConfig, LINEAR, {"r": 4, "lora_alpha": 6, "init_lora_weights": "olora"}),
    "olora-rs": (peft.LoraConfig, LINEAR, {"r": 4, "use_rslora": True, "init_lora_weights": "olora"}),
    "adalora": (peft.AdaLoraConfig, LINEAR, {"init_r": 6, "lora_alpha": 5, "total_step": 100}),
    "loha": (peft.LoHaConfig, [*LINEAR, "conv"], {"r": 4, "alpha": 6, "rank_pattern": {"wide": 2}}),
    "loha-tucker": (peft.LoHaConfig, ["conv"], {"r": 4, "alpha": 6, "use_effective_conv2d": True}),
    "loha-line": (peft.LoHaConfig, ["line"], {"r": 4, "alpha": 6}),
    "loha-line-tucker": (peft.LoHaConfig, ["line"], {"r": 4, "alpha": 6, "use_effective_conv2d": True}),
    "lokr": (peft.LoKrConfig, [*LINEAR, "conv"], {"r": 2, "alpha": 6, "decompose_both": True}),
    "lokr-full": (peft.LoKrConfig, LINEAR, {"r": 30, "alpha": 6}),
    "lokr-line": (peft.LoKrConfig, ["line"], {"r": 2, "alpha": 6}),  # PEFT's kron turns its blocks, as ours then
    "lokr-point": (peft.LoKrConfig, ["point"], {"r": 2, "alpha": 6, "use_effective_conv2d": True}),
    **{
        f"oft-{terms}": (
            peft.OFTConfig, [*LINEAR, "table"],
            {"r": 0, "oft_block_size": 6, "use_cayley_neumann": terms > 0, "num_cayley_neumann_terms": terms},
        )
        for terms in (0, 2, 3, 4, 5, 7)  # one term is the identity
    },
    "oft-shared": (peft.OFTConfig, LINEAR, {"r": 0, "oft_block_size": 6, "block_share": True}),
    "oft-constrained": (peft.OFTConfig, LINEAR, {"r": 0, "oft_block_size": 6, "coft": True, "eps": 0.3}),
    "oft-point": (peft.OFTConfig, ["point"], {"r": 0, "oft_block_size": 2}),
    "boft": (peft.BOFTConfig, LINEAR, {"boft_block_size": 6}),
    "boft-conv": (peft.BOFTConfig, ["conv", "point"], {"boft_block_size": 4}),
    "ia3": (peft.IA3Config, [*LINEAR, "conv"], {"feedforward_modules": []}),
    "ia3-in": (peft.IA3Config, [*LINEAR, "conv"], {"feedforward_modules": ["wide", "tall", "square", "conv"]}),
    "ia3-pattern": (peft.IA3Config, ["wide", "square", "point"], {"feedforward_modules": "(wide|point)"}),
    "ia3-conv1d": (peft.IA3Config, GPT, {"feedforward_modules": ["gpt_square"], "fan_in_fan_out": True}),
    "vera": (peft.VeraConfig, LINEAR, {"r": 5}),
    "vera-seeded": (peft.VeraConfig, LINEAR, {"r": 5, "save_projection": False, "projection_prng_key": 3}),
    "fourierft": (peft.FourierFTConfig, LINEAR, {"n_frequency": 50, "scaling": 100.0}),
    "fourierft-conv1d": (peft.FourierFTConfig, GPT, {"n_frequency": 50, "random_loc_seed": 5, "fan_in_fan_out": True}),
    "ln": (peft.LNTuningConfig, ["norm"], {}),
    "hra": (peft.HRAConfig, [*LINEAR, "conv"], {"r": 4}),
    "hra-long": (peft.HRAConfig, ["wide", "point"], {"r": 30}),  # more reflections than inputs
    "hra-gs": (peft.HRAConfig, [*LINEAR, "conv"], {"r": 4, "apply_GS": True}),
    "miss": (peft.MissConfig, LINEAR, {"r": 5}),
    "miss-mini": (peft.MissConfig, LINEAR, {"r": 6, "mini_r": 4, "init_weights": "mini"}),
    "miss-bat": (peft.MissConfig, LINEAR, {"r": 6, "init_weights": "bat"}),
    "shira": (peft.ShiraConfig, LINEAR, {"r": 2, "random_seed": 1}),
    "c3a": (peft.C3AConfig, LINEAR, {"block_size": 12}),
    **{
        f"road-{n}": (peft.RoadConfig, ["wide", "square"], {"variant": f"road_{n}", "group_size": 4})
        for n in (1, 2, 4)
    },
    "delora": (peft.DeloraConfig, LINEAR, {"r": 4}),
    "gralora": (peft.GraloraConfig, LINEAR, {"r": 4, "alpha": 6, "gralora_k": 2}),
    "gralora-hybrid": (peft.GraloraConfig, LINEAR, {"r": 4, "alpha": 6, "gralora_k": 2, "hybrid_r": 3}),
    "hira": (peft.HiraConfig, [*LINEAR, "conv", "table"], {"r": 4}),
    "vblora": (peft.VBLoRAConfig, LINEAR, {"r": 4, "num_vectors": 10, "vector_length": 6, "topk": 2}),
    "vblora-top": (
        peft.VBLoRAConfig, LINEAR,
        {"r": 4, "num_vectors": 10, "vector_length": 6, "topk": 3, "save_only_topk_weights": True},
    ),
    "lora-bd": (
        peft.LoraConfig, LINEAR,
        {"r": 4, "lora_alpha": 6, "use_bdlora": peft.BdLoraConfig(["wide"], ["tall"], nblocks=2, match_strict=False)},
    ),
    "kasa": (peft.LoraConfig, LINEAR, {"r": 4, "lora_alpha": 6, "kasa_config": peft.KasaConfig()}),
    "pvera": (peft.PveraConfig, LINEAR, {"r": 5}),
    "pvera-seeded": (peft.PveraConfig, LINEAR, {"r": 5, "save_projection": False, "projection_prng_key": 4}),
    "beft": (peft.BeftConfig, ["wide", "square"], {}),
    **{
        f"deft-{method}": (peft.DeftConfig, LINEAR, {"r": 4, "alpha": 6, "decomposition_method": method})
        for method in ("relu", "qr")
    },
    "para": (peft.DeftConfig, LINEAR, {"r": 4, "para": True, "decomposition_method": "qr"}),
    "supertuning": (peft.SupertuningConfig, LINEAR, {"sparsity": 0.9, "save_precomputed_indices": True}),
    "supra": (
        peft.SupertuningConfig, LINEAR,
        {"sparsity": 0.9, "r": 4, "lora_alpha": 6, "save_precomputed_indices": True},
    ),
    "randlora": (peft.RandLoraConfig, LINEAR, {"r": 5}),
    "randlora-seeded": (peft.RandLoraConfig, LINEAR, {"r": 5, "save_projection": False, "projection_prng_key": 3}),
    "randlora-sparse": (peft.RandLoraConfig, LINEAR, {"r": 5, "save_projection": False, "sparse": True}),
    "randlora-very-sparse": (peft.RandLoraConfig, LINEAR, {"r": 5, "save_projection": False, "very_sparse": True}),
    **{f"waveft-{name}": (peft.WaveFTConfig, LINEAR, {"n_frequency": 50, "wavelet_family": name})
       for name in ("db1", "db2", "db3", "db7", "db10", "sym2", "sym7", "sym10", "coif1", "coif2", "coif3", "coif4")},
    "waveft-plain": (peft.WaveFTConfig, [*LINEAR], {"n_frequency": 50, "use_idwt": False, "random_loc_seed": 5}),
    "waveft-conv1d": (peft.WaveFTConfig, GPT, {"n_frequency": 50, "wavelet_family": "db4", "fan_in_fan_out": True}),
    **{f"peanut-{depth}": (peft.PeanutConfig, LINEAR, {"r": 4, "depth": depth, "scaling": 0.5, "act_fn": act})
       for depth, act in ((0, "relu"), (1, "silu"), (3, "tanh"))},
    "unilora": (peft.UniLoraConfig, LINEAR, {"r": 4, "save_indices": True}),
    **{
        f"glora-{ab}-{c}-{de}": (
            peft.GloraConfig, LINEAR if ab != "none" else ["wide", "square"],  # without a bias nothing is left
            {"r": 4, "config_A_B": ab, "config_C": c, "config_D_E": de},
        )
        for ab in ("lora", "vector", "constant", "none")
        for c in ("lora", "vector", "none")
        for de in ("vector", "constant", "none")
        if (ab, c, de) != ("none",) * 3
    },
    "supertuning-rebuilt": (peft.SupertuningConfig, LINEAR, {"sparsity": 0.9, "save_precomputed_indices": False}),
    "supertuning-smallest": (
        peft.SupertuningConfig, LINEAR,
        {"sparsity": 0.8, "save_precomputed_indices": False, "select_top": False, "r": 3},
    ),
    **{
        f"psoft-{number}": (peft.PsoftConfig, LINEAR, {"r": 4, "psoft_alpha": 3, **options})
        for number, options in enumerate((
            {}, {"ab_svd_init": "pissa_init"}, {"psoft_orth": False}, {"psoft_mag_a": False},
            {"psoft_mag_b": False, "r": 1}, {"psoft_svd": "lowrank", "random_seed": 5},
            {"psoft_svd": "lowrank", "psoft_svd_lowrank_niter": 2}, {"psoft_orth": False, "r": 1},
            {"use_cayley_neumann": True, "cayley_neumann_eps": 0.4},
            *({"use_cayley_neumann": True, "num_cayley_neumann_terms": n} for n in (2, 3, 4, 5, 6)),
        ))
    },
    **{
        f"adamss-{groups}-{rank}": (
            peft.AdamssConfig, LINEAR, {"r": rank, "num_subspaces": groups, "subspace_rank": 2, "random_seed": rank},
        )
        for groups, rank in ((3, 6), (5, 12), (1, 4))
    },
    "adamss-dynamic": (peft.AdamssConfig, LINEAR, {"r": 6, "num_subspaces": 3, "use_dynamic_rank": True}),
    "tinylora": (peft.TinyLoraConfig, [*LINEAR, "table"], {"r": 4, "u": 3, "weight_tying": 1.0}),
    "tinylora-conv1d": (peft.TinyLoraConfig, GPT, {"r": 4, "u": 3, "weight_tying": 1.0, "fan_in_fan_out": True}),
    "frod": (peft.FrodConfig, LINEAR, {}),
    "frod-dense": (peft.FrodConfig, LINEAR, {"sparse_rate": 0.3}),
    "frod-conv1d": (peft.FrodConfig, GPT, {"fan_in_fan_out": True}),
    "osf": (peft.OSFConfig, LINEAR, {"effective_rank": 10}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_statistics_of_a_trained_batch_norm_are_the_new_ones(tmp_path: Path) -> None:
    """PEFT puts the trained copy of the layer in its place, with its buffers."""
    base, tuned = train(
        peft.LNTuningConfig(target_modules=["norm"]), model=torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(6)})
    )
    tuned.train()
    tuned.base_model.model["norm"](torch.randn(9, 6) * 3 + 2)
    save(tuned.eval(), tmp_path)
    done = lora_merge.merge_state_dict(base.state_dict(), tmp_path)
    assert base.state_dict().keys() == done.keys()
    assert_same_merge(tuned, done)


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_merged_file_is_the_function_that_peft_computes(name: str, tmp_path: Path) -> None:
    make, layers, options = CASES[name]
    base, tuned = train(make(target_modules=layers, **options))
    state = merged(base, *save(tuned, tmp_path))
    assert_same_function(base, tuned, state, layers)
    assert_same_merge(tuned, state)
    assert_tool_agrees(base, tmp_path, state)


@pytest.mark.parametrize("name", ACTIVATION_FUNCTIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.linspace(-9, 9, 500)
    ours, arguments = ACTIVATION_FUNCTIONS[name]
    torch.testing.assert_close(getattr(torch.nn.functional, ours)(x, **arguments), ACT2FN[name](x))


@pytest.mark.filterwarnings("ignore")
def test_rotated_kernels_are_merged_as_peft_merges_them_and_the_plan_says_so(tmp_path: Path) -> None:
    """PEFT 0.21.2 turns unfolded inputs and folds them again, adding what overlaps: no kernel does that."""
    base, tuned = train(peft.OFTConfig(target_modules=["conv", "point"], r=0, oft_block_size=2))
    state = merged(base, *save(tuned, tmp_path))
    assert_tool_agrees(base, tmp_path, state)
    assert_same_merge(tuned, state)
    plain = copy.deepcopy(base)
    plain.load_state_dict(state)
    theirs = tuned.base_model.model.conv(inputs("conv"))
    assert not torch.allclose(plain.conv(inputs("conv")), theirs, atol=1e-2)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    (adapter,) = lora_merge.plan(tmp_path / "base.safetensors", tmp_path, tmp_path / "out.safetensors").adapters
    assert any("conv: PEFT's forward pass" in note for note in adapter.notes)
    assert not any("point" in note for note in adapter.notes)


def test_pruned_adalora_is_scaled_by_its_first_rank(tmp_path: Path) -> None:
    base, tuned = train(peft.AdaLoraConfig(target_modules=LINEAR, init_r=6, target_r=3, lora_alpha=5, total_step=100))
    for name in LINEAR:
        layer = tuned.base_model.model.get_submodule(name)
        layer.lora_A["default"].data[2] = 0  # as the allocator prunes a triple …
        layer.lora_E["default"].data[2] = 0
    wanted = {name: tuned.base_model.model.get_submodule(name)(inputs(name)) for name in LINEAR}
    tensors, config = save(tuned, tmp_path)
    kept = [0, 1, 3, 4, 5]  # … and as the file then lacks it
    for key, value in tensors.items():
        tensors[key] = value[:, kept] if key.endswith("lora_B") else value[kept]
    state = merged(base, tensors, config)
    for name in LINEAR:
        plain = torch.nn.functional.linear(inputs(name), state[f"{name}.weight"].float(), getattr(base, name).bias)
        assert_close(plain, wanted[name], name)


def test_layer_with_all_ranks_pruned_stays_as_it_is() -> None:
    weight = torch.randn(24, 24)
    tensors = {"m.lora_A": torch.zeros(0, 24), "m.lora_B": torch.zeros(24, 0), "m.lora_E": torch.zeros(0, 1)}
    base = torch.nn.ModuleDict({"m": torch.nn.Linear(24, 24)})
    base["m"].weight.data = weight
    state = merged(base, tensors, {"peft_type": "ADALORA", "init_r": 6})
    assert torch.equal(state["m.weight"].float(), weight)


class Experts(torch.nn.Module):
    """Stacked matrices, [E, out, in] or [E, in, out], applied without a bias."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shapes = {"gate_up_proj": (3, 20, 12), "down_proj": (3, 12, 10)}
        for name, (count, out, width) in shapes.items():
            shape = (count, width, out) if is_transposed else (count, out, width)
            setattr(self, name, torch.nn.Parameter(torch.randn(*shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.gate_up_proj if self.is_transposed else self.gate_up_proj.mT
        down = self.down_proj if self.is_transposed else self.down_proj.mT
        return (x @ up)[..., :10] @ down


class Mixture(torch.nn.Module):
    """A model with experts."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.experts = Experts(is_transposed=is_transposed)
        self.gate = torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.gate(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj", "gate_up_proj"]])
def test_experts_that_were_trained_by_parameter_name(names: list[str], is_transposed: bool, tmp_path: Path) -> None:  # noqa: FBT001
    parameters = [f"experts.{name}" for name in names]
    config = peft.LoraConfig(target_modules=["gate"], target_parameters=parameters, r=2, lora_alpha=6)
    base, tuned = train(config, model=Mixture(is_transposed=is_transposed))
    x = torch.randn(3, 5, 12)
    state = merged(base, *save(tuned, tmp_path))
    assert_tool_agrees(base, tmp_path, state)
    wanted = tuned(x)
    plain = copy.deepcopy(base)
    plain.load_state_dict(state)
    assert_close(plain(x), wanted, "experts: forward")
    assert_same_merge(tuned, state)


@pytest.mark.filterwarnings("ignore")
def test_attention_with_fused_projections_gets_its_output_delta_twice(tmp_path: Path) -> None:
    """PEFT 0.21 adds it twice, in training as in its merge; what was trained is what is merged."""
    base = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(24, 4, batch_first=True)})
    base, tuned = train(peft.LoraConfig(target_modules=["attn"], r=4, lora_alpha=6), model=base)
    state = merged(base, *save(tuned, tmp_path))
    assert_tool_agrees(base, tmp_path, state)
    x = torch.randn(2, 5, 24)
    wanted = tuned.base_model.model["attn"](x, x, x)[0]
    plain = copy.deepcopy(base)
    plain.load_state_dict(state)
    assert_close(plain["attn"](x, x, x)[0], wanted, "attention: forward", bound=2e-5)
    assert not torch.allclose(base["attn"](x, x, x)[0], wanted, atol=1e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [
    peft.LoraConfig(target_modules=["wide"], modules_to_save=["norm", "square"], r=4),
    peft.LoraConfig(target_modules=["wide"], trainable_token_indices={"table": [7, 3, 21]}, r=4),
    peft.TrainableTokensConfig(target_modules=["table"], token_indices=[7, 3, 21]),
], ids=["modules", "tokens-beside-lora", "tokens"])  # fmt: skip
def test_whole_parameters_and_rows_take_the_place_of_the_bases(config: Any, tmp_path: Path) -> None:
    base, tuned = train(config)
    state = merged(base, *save(tuned, tmp_path))
    assert_tool_agrees(base, tmp_path, state)
    named = {"norm", "square"} if getattr(config, "modules_to_save", None) else {"table"}
    assert_same_function(base, tuned, state, sorted(named & {n for n, _ in base.named_children()}))
    assert_same_merge(tuned, state)


@pytest.mark.parametrize("layout", ["fused", "apart"])
def test_glora_reads_the_weight_beside_a_bias_wherever_it_lies(layout: str, tmp_path: Path) -> None:
    """W C is of the weight that was trained: rows of a fused tensor, or a tensor of its own."""
    g = torch.Generator().manual_seed(3)
    whole, bias = torch.randn(12, 8, generator=g), torch.randn(12, generator=g)
    letters = {"A.X": torch.zeros(1), "B.X": torch.zeros(1), "C.X": torch.randn(8, 1, generator=g),
               "D.X": torch.randn(4, generator=g), "E.X": torch.randn(1, generator=g)}  # fmt: skip
    attention = "transformer_blocks.0.attn"
    base = {f"{attention}.to_{x}": (whole[rows], bias[rows]) for x, rows in ROWS.items()}
    if layout == "fused":
        others = ("double_blocks.0.img_mod.lin", "single_blocks.0.linear1")
        base = {"double_blocks.0.img_attn.qkv": (whole, bias), **{n: (whole, torch.zeros(0)) for n in others}}
    adapter = {f"{attention}.to_{x}.glora_{k}": v.clone() for x in "qkv" for k, v in letters.items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "GLORA"}))
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    state = {f"{n}.{of}": v.clone() for n, pair in base.items() for of, v in zip(("weight", "bias"), pair, strict=True)}
    done = lora_merge.merge_state_dict(state, tmp_path)
    got = [value for key, value in done.items() if key.endswith("bias")]
    wanted = bias * (1 + letters["D.X"].repeat(3)) + letters["E.X"] + (whole @ letters["C.X"])[:, 0]
    torch.testing.assert_close(torch.cat(got), wanted)
