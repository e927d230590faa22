"""The second reading of an adapter knows most of it, on full-size inventories, and says what the plan says."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.adapters.modules import group
from lora_merge.algorithms import Shape
from lora_merge.cli.reports import plain_lines
from lora_merge.dtypes import StoredTensor
from lora_merge.errors import FitError, UsageError, VerificationFailed
from lora_merge.facts import strengths
from lora_merge.files.checkpoint import Index
from lora_merge.job import Adapter, Job
from lora_merge.matching.match import ModuleMatcher
from lora_merge.models.names import names
from lora_merge.models.weights import Weight
from lora_merge.planning.changes import Matches, matches
from lora_merge.planning.inputs import Inputs
from lora_merge.planning.make_plan import outputs
from lora_merge.planning.plan import OutputTensor
from lora_merge.proof.second_reading.claims import _spans as spans
from lora_merge.proof.second_reading.comparison import UNKNOWN_PARTS, Confirmation, check_sources, compare
from lora_merge.proof.second_reading.methods import METHOD_ROWS
from lora_merge.proof.second_reading.modules import groups
from lora_merge.proof.second_reading.rows import BaseRows as StoredRows
from lora_merge.proof.second_reading.rows import ModulePart, Networks, WeightPlace
from lora_merge.recipes.replay import prove
from lora_merge.report import placed, proof_rows, second_reading
from lora_merge.row_ranges import RowNumbers
from tests.kit.adapters import kohya, unread
from tests.kit.blocks import SPELLINGS
from tests.kit.files import index, load, load_all, save
from tests.kit.models import sd1
from tests.kit.pipeline_names import header, modules, pipeline
from tests.kit.tensors import Tensors, rand

KOHYA = ("lora_up", "lora_down")
PEFT = ("lora_B", "lora_A")
LLAMA = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "use_rslora": True, "alpha_pattern": {"q_proj": 32}}


class Numbers:
    """Every α is 2; no two tensors are the same."""

    def elements(self, info: StoredTensor) -> tuple[float, ...]:
        return (0.0,) * prod(info.shape) if info.dtype == "I64" else (2.0,)

    def same(self, _a: StoredTensor, _b: StoredTensor) -> bool:
        return False

    def differing(self, _copy: StoredTensor, _own: StoredTensor) -> int:
        return 0

    def zero_outside(self, _info: StoredTensor, _rows: tuple[int, int], _columns: tuple[int, int]) -> bool:
        return False


def read(
    base: Index,
    adapter: Mapping[str, Shape],
    config: Mapping[str, Any] | None = None,
    parts: tuple[tuple[str, float], ...] = (),
    metadata: Mapping[str, str] | None = None,
) -> Confirmation:
    """What the second reading makes of an adapter of these tensors; it says so where it disagrees with the plan."""
    path = Path("adapter.safetensors")
    file = replace(index(adapter), path=path, files=(path,), config=config or {}, metadata=metadata or {})
    job = Job(base.path, (Adapter(path, 0.5, parts),), Path("out.safetensors"))
    inputs = Inputs(job, base, names(base), (group(file),))
    matched = matches(inputs, Numbers())
    targets = [target for _, target in outputs(Matches(inputs, matched))]
    return compare(job, base, matched, targets, lambda info: Numbers().elements(info)[0])


def lora(shape: Shape, name: str, endings: tuple[str, str], *, alpha: bool) -> dict[str, Shape]:
    up, down = ((shape[0], 4, *[1] * (len(shape) - 2)), (4, *shape[1:]))
    found = {f"{name}.{endings[0]}.weight": up, f"{name}.{endings[1]}.weight": down}
    return found | ({f"{name}.alpha": ()} if alpha else {})


def layers(of: str) -> dict[str, Shape]:
    """Module → shape of every layer that a trainer may choose."""
    left_out = ("embed", "modulation", "table", "token", "latent")
    return {
        module: shape for (module, leaf), shape in modules(header(of)).items()
        if leaf == "weight" and len(shape) > 1 and not module.rpartition(".")[2].endswith(left_out)
    }  # fmt: skip


def flat(name: str) -> str:
    return name.replace(".", "_")


def dotted(name: str) -> str:
    return name


Row = tuple[str, str, Callable[[str], str], str, tuple[str, str], float]
PAIRS: tuple[Row, ...] = (
    # base                  adapter's words          names             prefix                endings  share
    ("native/sdxl",         "native/sdxl",           flat,             "lora_unet_",         KOHYA,   1.0),
    ("native/sdxl",         "diffusers/sdxl",        flat,             "lora_unet_",         KOHYA,   1.0),
    ("diffusers/sdxl",      "diffusers/sdxl",        dotted,           "unet.",              PEFT,    1.0),
    ("diffusers/sdxl",      "native/sdxl",           flat,             "lora_unet_",         KOHYA,   1.0),
    ("native/sdxl-refiner", "diffusers/sdxl-refiner", flat,            "lora_unet_",         KOHYA,   0.95),
    ("native/sd15",         "diffusers/sd15",        flat,             "lora_unet_",         KOHYA,   1.0),
    ("diffusers/sd15",      "diffusers/sd15",        flat,             "lora_unet_",         KOHYA,   1.0),
    ("native/flux-dev",     "native/flux-dev",       flat,             "lora_unet_",         KOHYA,   1.0),
    ("native/flux-dev",     "native/flux-dev",       dotted,           "diffusion_model.",   PEFT,    1.0),
    ("native/flux-dev",     "diffusers/flux-dev",    dotted,           "transformer.",       PEFT,    0.99),
    ("diffusers/flux-dev",  "diffusers/flux-dev",    dotted,           "transformer.",       PEFT,    1.0),
    ("diffusers/flux-dev",  "native/flux-dev",       dotted,           "diffusion_model.",   PEFT,    0.99),
    ("diffusers/sd3",       "diffusers/sd3",         dotted,           "transformer.",       PEFT,    1.0),
    ("native/sd3",          "diffusers/sd3",         dotted,           "transformer.",       PEFT,    0.9),  # the last block's halves
    ("diffusers/qwen-image", "diffusers/qwen-image", dotted,           "transformer.",       PEFT,    1.0),
    ("native/qwen-image",   "diffusers/qwen-image",  dotted,           "transformer.",       PEFT,    1.0),
    ("diffusers/wan",       "diffusers/wan",         dotted,           "transformer.",       PEFT,    1.0),
    ("native/wan-t2v-14B",  "native/wan-t2v-14B",    flat,             "lora_unet_",         KOHYA,   1.0),
    ("native/wan-t2v-14B",  "diffusers/wan",         dotted,           "transformer.",       PEFT,    0.95),
    ("diffusers/wan-i2v-14B", "native/wan-i2v-14B",  dotted,           "diffusion_model.",   PEFT,    0.95),
    *((f"transformers/{name}", f"transformers/{name}", dotted, "base_model.model.", PEFT, 1.0) for name in (
        "llama-3.1-8b", "qwen3-8b", "qwen3-0.6b", "phi3-mini", "mistral-7b", "gemma2-2b", "gemma3-1b", "mixtral-8x7b")),
)  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("row", PAIRS, ids=lambda row: " ".join((row[0], row[3], row[1])))
def test_full_size_adapter_is_mostly_known_and_lies_where_the_plan_has_it(row: Row) -> None:
    stored, words, named, prefix, endings, share = row
    config = LLAMA if stored.startswith("transformers") else {}
    chosen = layers(words)
    tensors: dict[str, Shape] = {}
    for name, shape in chosen.items():
        tensors |= lora(shape, prefix + named(name), endings, alpha=not config)
    found = read(index(header(stored)), tensors, config)
    assert found.modules == len(chosen)
    assert found.proven >= share * len(chosen), found.alone[:9]
    assert len(found.alone) == found.modules - found.proven


def test_encoders_of_sdxl_are_known_under_their_flat_names() -> None:
    clip = "text_model.encoder.layers"
    parts = {f"{clip}.{n}.self_attn.{p}_proj": 0 for n in range(2) for p in ("q", "k", "v", "out")}
    tensors: dict[str, Shape] = {}
    for module in parts:
        tensors |= lora((768, 768), f"lora_te1_{flat(module)}", KOHYA, alpha=True)
        tensors |= lora((1280, 1280), f"lora_te2_{flat(module)}", KOHYA, alpha=True)
    for base in (index(header("single-file/sdxl")), pipeline(
            unet=header("diffusers/sdxl"), text_encoder=header("transformers/clip-l.text_model"),
            text_encoder_2=header("transformers/clip-bigg"))):  # fmt: skip
        found = read(base, tensors)
        assert (found.proven, found.modules) == (16, 16)


@pytest.mark.parametrize("form", [("lora_te1_", "lora_te2_", "lora_te3_"), ("text_encoder.", "text_encoder_2.", "text_encoder_3."),
                                  ("lora_te_",)], ids=" ".join)  # fmt: skip
def test_every_name_of_an_encoder_is_known_on_a_pipeline(form: tuple[str, ...]) -> None:
    """Each is its own place; a name of a network that is not read is counted as known by the plan alone."""
    clip, t5 = "text_model.encoder.layers.0.self_attn.q_proj", "encoder.block.0.layer.0.SelfAttention.q"
    stacks = ("clip-l.text_model", clip, 768), ("clip-bigg", clip, 1280), ("t5xxl-encoder", t5, 4096)
    encoders, tensors = {}, {}
    for n, (prefix, (of, module, size)) in enumerate(zip(form, stacks, strict=False), 1):
        encoders["text_encoder" + (f"_{n}" if n > 1 else "")] = header(f"transformers/{of}")
        name = prefix + (dotted if prefix.endswith(".") else flat)(module)
        tensors |= lora((size, size), name, PEFT if prefix.endswith(".") else KOHYA, alpha=True)
    denoiser = {"unet": header("diffusers/sd15")} if len(form) == 1 else {"transformer": header("diffusers/sd3")}
    found = read(pipeline(**denoiser, **encoders), tensors)
    assert (found.proven, found.modules, found.alone) == (len(form), len(form), [])


def test_split_names_are_known_on_a_fused_base() -> None:
    """Phi-3: grouped keys and values would be narrower; here all three are as high as the input is wide."""
    block, tensors = "base_model.model.model.layers.3", {}
    for part in ("q_proj", "k_proj", "v_proj"):
        tensors |= lora((3072, 3072), f"{block}.self_attn.{part}", PEFT, alpha=False)
    for part in ("gate_proj", "up_proj"):
        tensors |= lora((8192, 3072), f"{block}.mlp.{part}", PEFT, alpha=False)
    found = read(index(header("transformers/phi3-mini")), tensors, LLAMA)
    assert (found.proven, found.modules) == (5, 5)


def test_parameter_is_the_one_of_its_own_name_first_and_of_no_other_parameter() -> None:
    """`weight` beside what is only called like one, norms that store a scale, fused projections without modules."""
    shapes: dict[str, Shape] = {
        "a.weight": (8, 4), "a.bias": (8,), "a_weight": (4, 4), "a_bias": (4,), "a.scale": (4,),
        "norm.scale": (8,), "attn.in_proj_weight": (24, 8), "attn.in_proj_bias": (24,),
    }  # fmt: skip
    found = Networks(shapes)
    wanted = {
        ("a", "weight"): "a.weight", ("a", "bias"): "a.bias", ("a", "scale"): "a.scale",
        ("norm", "weight"): "norm.scale", ("norm", "bias"): None, ("norm", "scale"): "norm.scale",
        ("attn.in_proj", "weight"): "attn.in_proj_weight", ("attn.in_proj", "bias"): "attn.in_proj_bias",
        ("attn.in_proj", "scale"): None, ("attn", "bias"): None,
    }  # fmt: skip
    for (module, parameter), key in wanted.items():
        place = found.find(module, parameter)
        assert (place and place.rows[0].key) == key, (module, parameter)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("encoders", "part"), [(1, "te"), (1, "unet"), *((2, part) for part in ("te", "te1", "te2", "unet"))]
)
def test_strengths_by_encoder_are_proven_on_pipelines(encoders: int, part: str) -> None:
    """Of two, each by its own name and both by the common one; what a single one is called depends on the denoiser."""
    small, large = header("transformers/clip-l.text_model"), header("transformers/clip-bigg")
    if encoders == 1:
        base = pipeline(unet=header("diffusers/sd15"), text_encoder=small)
    else:
        base = pipeline(unet=header("diffusers/sdxl"), text_encoder=small, text_encoder_2=large)
    tensors = lora((1280, 320), "lora_unet_time_embedding_linear_1", KOHYA, alpha=True)
    for stem, width in {1: {"te": 768}, 2: {"te1": 768, "te2": 1280}}[encoders].items():
        name = f"lora_{stem}_text_model_encoder_layers_3_self_attn_q_proj"
        tensors |= lora((width, width), name, KOHYA, alpha=True)
    found = read(base, tensors, parts=((part, 0.5),))
    assert found.proven == found.modules == encoders + 1


FAMILIES: dict[str, dict[str, Shape]] = {
    "lora_mid": {"lora_up.weight": (64, 4), "lora_down.weight": (4, 32), "lora_mid.weight": (4, 4, 3, 3)},
    "loha": {"hada_w1_a": (64, 4), "hada_w1_b": (4, 32), "hada_w2_a": (64, 4), "hada_w2_b": (4, 32), "alpha": ()},
    "lokr": {"lokr_w1": (8, 4), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 8), "alpha": ()},
    "lokr whole": {"lokr_w1": (8, 4), "lokr_w2": (8, 8), "alpha": ()},
    "glora": {"a1.weight": (32, 4), "a2.weight": (4, 32), "b1.weight": (64, 4), "b2.weight": (4, 32), "alpha": ()},
    "early glora": {
        "a1.weight": (4, 32),
        "a2.weight": (32, 4),
        "b1.weight": (4, 32),
        "b2.weight": (64, 4),
        "alpha": (),
    },
    "full": {"diff": (64, 32)},
    "dora": {"lora_up.weight": (64, 4), "lora_down.weight": (4, 32), "alpha": (), "dora_scale": (64, 1)},
    "dora in": {"lora_up.weight": (64, 4), "lora_down.weight": (4, 32), "alpha": (), "dora_scale": (1, 32)},
    "webui's scale": {"lora_up.weight": (64, 4), "lora_down.weight": (4, 32), "scale": ()},
}
"""Tensors of one module on a weight [64, 32], or [64, 32, 3, 3] for a core, as trainers store them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_known(family: str) -> None:
    kernel = (3, 3) if family == "lora_mid" else ()
    base = index({"a.weight": (64, 32, *kernel), "a.bias": (64,), "norm.weight": (64,)})
    tensors = {f"a.{ending}": shape for ending, shape in FAMILIES[family].items()}
    found = read(base, {**tensors, "norm.w_norm": (64,), "a.diff_b": (64,)}
                 if family == "full" else tensors)  # fmt: skip
    assert found.alone == []
    assert found.proven == (3 if family == "full" else 1)


@pytest.mark.parametrize("family", ["loha", "lokr", "lokr whole", "glora"])
def test_every_family_is_known_on_convolutions(family: str) -> None:
    """Of one by one: their factors are those of a linear layer, and the base's shape has two axes more."""
    found = read(
        index({"a.weight": (64, 32, 1, 1)}), {f"a.{ending}": shape for ending, shape in FAMILIES[family].items()}
    )
    assert (found.modules, found.proven, found.alone) == (1, 1, [])


@pytest.mark.parametrize("family", ["glora", "early glora"])
@pytest.mark.parametrize("rank", [1, 31, 32, 48])
def test_layout_of_glora_is_known_below_the_sizes_of_the_weight(rank: int, family: str) -> None:
    """The two layouts exchange sizes and ranks; the smaller one is the rank only if it is smaller than both sizes."""
    sizes = {f"a.{end}": tuple(rank if n == 4 else n for n in shape) for end, shape in FAMILIES[family].items()}
    found = read(index({"a.weight": (64, 32)}), sizes)
    assert (found.proven, found.alone) == ((1, []) if rank < 32 else (0, ["a"]))


def written(
    folder: Path, base: Tensors, adapter: Tensors, config: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The matching part of the proof of a real merge."""
    save(base, folder / "base.safetensors")
    place = folder / "adapter"
    place.mkdir()
    if config is None:
        path = save(adapter, place / "adapter.safetensors")
    else:
        save(adapter, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config))
        path = place
    out = folder / "out.safetensors"
    report = lora_merge.merge(folder / "base.safetensors", [(path, 0.7)], out, **options)
    assert report.verified is not None
    return report.verified["matching"]


def test_sparse_and_ia3_are_known(tmp_path: Path) -> None:
    import torch

    base = {"a.weight": rand(64, 32), "b.weight": rand(64, 32), "c.weight": rand(64, 32)}
    sparse = {"a.lora_up.weight": rand(64, 4), "a.lora_down.weight": rand(4, 32), "a.alpha": torch.tensor(2.0),
              "a.bias_indices": torch.tensor([[0, 63], [5, 31]], dtype=torch.int16), "a.bias_values": rand(2),
              "a.bias_size": torch.tensor([64, 32], dtype=torch.int16)}  # fmt: skip
    ia3 = {"b.weight": rand(64), "b.on_input": torch.tensor(0), "c.weight": rand(32), "c.on_input": torch.tensor(1)}
    assert written(tmp_path, base, sparse | ia3) == {"modules": 3, "proven": 3, "alone": [], "why": {}}


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "LOKR", "GRALORA"])
def test_methods_of_peft_are_known(tmp_path: Path, kind: str) -> None:
    base, name = {"m.a.weight": rand(64, 32), "m.a.bias": rand(64), "m.b.weight": rand(64, 32)}, "base_model.model.m"
    adapter, config = {
        "IA3": ({f"{name}.a.ia3_l": rand(64, 1), f"{name}.b.ia3_l": rand(1, 32)}, {"feedforward_modules": ["b"]}),
        "LOHA": ({f"{name}.a.hada_{w}": rand(*s, seed=1) for w, s in (("w1_a", (64, 4)), ("w1_b", (4, 32)),
                                                              ("w2_a", (64, 4)), ("w2_b", (4, 32)))}, {"r": 4, "alpha": 2}),
        "LOKR": ({f"{name}.a.lokr_w1": rand(8, 4), f"{name}.a.lokr_w2": rand(8, 8)}, {"r": 4, "alpha": 2}),
        "GRALORA": ({f"{name}.a.gralora_A": rand(2, 16, 2), f"{name}.a.gralora_B": rand(2, 2, 32),
                     f"{name}.a.gralora_A_general.weight": rand(3, 32), f"{name}.a.gralora_B_general.weight": rand(64, 3)},
                    {"r": 2, "hybrid_r": 3, "alpha": 2}),
    }[kind]  # fmt: skip
    found = written(tmp_path, base, adapter, {"peft_type": kind, **config})
    assert found["proven"] == found["modules"] == (2 if kind == "IA3" else 1)


CONV1D: dict[str, Callable[[int, int], dict[str, Shape]]] = {
    "lora": lambda i, o: {"lora_A.weight": (2, i), "lora_B.weight": (o, 2)},
    "dora": lambda i, o: {"lora_A.weight": (2, i), "lora_B.weight": (o, 2), "lora_magnitude_vector": (o,)},
    "hira": lambda i, o: {"hira_A": (2, i), "hira_B": (o, 2)},
    "ia3": lambda _, o: {"ia3_l": (o, 1)},
}
"""Method → its tensors for a layer with so many inputs and outputs."""


@pytest.mark.parametrize("model", ["gpt2", "openai-gpt", "imagegpt", "decision_transformer", "gpt_bigcode", None])
@pytest.mark.parametrize("method", CONV1D)
def test_layers_of_transposed_weights_are_known(model: str | None, method: str) -> None:
    """Conv1D of transformers; without a model's type, only where the shape tells."""
    sizes = {"attn.c_attn": (8, 24), "mlp.c_fc": (8, 32)} | ({"attn.c_proj": (8, 8)} if model else {})
    across = model != "gpt_bigcode"
    base = {f"h.0.{name}.weight": (i, o) if across else (o, i) for name, (i, o) in sizes.items()}
    base |= {f"h.0.{name}.bias": (o,) for name, (_, o) in sizes.items()}
    tensors = {f"base_model.model.h.0.{name}.{ending}": shape for name, size in sizes.items()
               for ending, shape in CONV1D[method](*size).items()}  # fmt: skip
    config = {"peft_type": "LORA" if "ora" in method else method.upper(), "r": 2, "fan_in_fan_out": across and method != "hira",
              "use_dora": method == "dora", "feedforward_modules": []}  # fmt: skip
    stored = replace(index(base), config={"model_type": model} if model else {})
    found = read(stored, tensors, config)
    assert found.modules == len(sizes)
    assert found.alone == [] or (method == "ia3" and model is None)  # a factor alone does not tell


E, IN, OUT = 3, 8, 10
EXPERTS = {"mlp.experts.gate_up_proj": (2 * OUT, IN), "mlp.experts.down_proj": (IN, OUT)}
"""Parameter of stacked experts → (outputs, inputs) of one."""


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("named", [[*EXPERTS], [*EXPERTS][:1], [*EXPERTS][1:]], ids=len)
def test_stacked_experts_and_the_layers_beside_them_are_known(named: list[str], *, across: bool) -> None:
    """PEFT wraps their module once for each parameter; the last one registered is outermost, whatever is named first."""
    base: dict[str, Shape] = {f"model.layers.0.{n}": (E, *(s[::-1] if across else s)) for n, s in EXPERTS.items()}
    base["model.layers.0.q_proj.weight"] = (16, IN)
    tensors: dict[str, Shape] = {}
    wrapped = "base_model.model.model.layers.0.mlp.experts"
    for n, name in enumerate(reversed([n for n in EXPERTS if n in named])):
        stem, (out, cols) = wrapped + ".base_layer" * n, EXPERTS[name]
        tensors |= {f"{stem}.lora_A.weight": (2 * E, cols), f"{stem}.lora_B.weight": (out, 2 * E)}
    tensors |= lora((16, IN), "base_model.model.model.layers.0.q_proj", PEFT, alpha=False)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_rslora": True, "target_parameters": named[::-1],
              "alpha_pattern": {"experts.down_proj": 4}, "target_modules": ["q_proj"], "peft_version": "0.21.2"}  # fmt: skip
    found = read(index(base), tensors, config)
    assert (found.modules, found.proven) == (len(named) + 1, len(named) + 1), found.alone


@pytest.mark.parametrize(("model", "version"), [("mixtral", "0.21.2"), ("gpt_oss", "0.21.2"), ("gpt_oss", "0.18.0")])
def test_square_experts_are_known_by_the_type_of_the_model(model: str, version: str) -> None:
    base = replace(index({"model.layers.0.mlp.experts.down_proj": (E, IN, IN)}), config={"model_type": model})
    stem = "base_model.model.model.layers.0.mlp.experts"
    config = {"peft_type": "LORA", "target_parameters": ["experts.down_proj"], "peft_version": version}
    tensors = {f"{stem}.lora_A.weight": (2 * E, IN), f"{stem}.lora_B.weight": (IN, 2 * E)}
    found = read(base, tensors, config)
    assert (found.modules, found.proven, found.alone) == (1, 1, [])


@pytest.mark.parametrize("entry", ["ss_network_args", "lycoris_config"])
@pytest.mark.parametrize(("arguments", "known"), [
    ({"algo": "lokr", "factor": 8, "bypass_mode": False, "apply_preset": {"module_algo_map": {"Attention": {"factor": 4}}}}, 1),
    ({"algo": "locon", "rs_lora": "False", "block_size": "4"}, 1),
    ({"algo": "dylora"}, 0), ({"bypass_mode": "True"}, 0), ({"apply_preset": {"name_algo_map": {"a": {"algo": "dylora"}}}}, 0),
])  # fmt: skip
def test_arguments_of_the_network_that_are_off_change_nothing(
    entry: str, arguments: dict[str, Any], known: int
) -> None:
    base, tensors = (
        index({"a.weight": (64, 32)}),
        {"a.lora_up.weight": (64, 4), "a.lora_down.weight": (4, 32), "a.alpha": ()},
    )
    assert read(base, tensors, metadata={entry: json.dumps(arguments)}).proven == known


def test_unknown_modules_are_counted_and_named(tmp_path: Path) -> None:
    base, out = sd1(), tmp_path / "out.safetensors"
    odd = unread("lora_unet_time_embed_0", 64, 16) | {"lora_unet_time_embed_0.alpha": torch.tensor(2.0)}
    save(base, tmp_path / "base.safetensors")
    save(kohya(base, te=False) | odd, tmp_path / "style.safetensors")
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "style.safetensors", out)
    assert report.verified is not None
    matching = report.verified["matching"]
    assert matching["alone"] == ["lora_unet_time_embed_0"]
    assert matching["modules"] == matching["proven"] + 1 == 16
    assert placed(matching).endswith(
        "; the values of the other 1 are right, their placement was not checked a second time (the second reading cannot "
        "resolve their tensor names)"
    )
    for proof in ({**report.verified, "numbers": report.numbers}, prove(out), prove(out, full=True)):
        said = [*plain_lines(proof_rows(proof))]
        assert said[-1] == (f"matching placement confirmed for {matching['proven']} of {matching['modules']} modules; "
                            "of the other 1 the values alone: lora_unet_time_embed_0; the second reading cannot "
                            "resolve their tensor names (1)")  # fmt: skip


def test_adapter_that_no_second_reading_resolves_is_said_to_be_right() -> None:
    """A count of none would frighten; strengths have a minus sign, and their exponents a hyphen."""
    none = {"modules": 192, "proven": 0, "alone": ["a", "b"], "why": {"layer names": 192}}
    words = "the values of all 192 modules are right, their placement was not checked a second time"
    assert placed(none) == f"{words} (the second reading cannot resolve layer names)"
    assert second_reading(none).startswith(f"{words}: a, b and 190 more; ")
    assert strengths({"unet": {-0.8: 3, 1e-05: 1}}) == "1e-05× unet (1), −0.8× unet (3)"


def test_known_modules_are_reported() -> None:
    share = {"adapter": "a", "strength": 1.0, "retained": 1.0}
    every = {"ratio": 0.01, "changed": 0.5, "elements": 1, "of": 1}
    proof = {"numbers": {"all": every, "below": 0}, "untouched": {"bytes": 1, "of": 1}, "full": True, "tensors": 1, "changed": 1, "rows": 1, "worst_ulp": 0.5, "saturated": 0, "bound": {"compute_dtype": "fp32"},
             "retained": [share], "warnings": [], "matching": {"modules": 9, "proven": 9, "alone": []}, "account": {"unused": 0}}  # fmt: skip
    assert [*plain_lines(proof_rows(proof))][3:] == ["matching placement confirmed for 9 of 9 modules"]


@pytest.mark.parametrize(
    ("kind", "at"), [("LORA", ""), ("LORA", ".modules_to_save"), ("LN_TUNING", ".ln_tuning_layers")]
)
def test_whole_values_under_the_names_of_the_base_are_known(kind: str, at: str, tmp_path: Path) -> None:
    base = {"m.a.weight": rand(8, 8), "m.head.weight": rand(4, 8), "m.head.bias": rand(4)}
    name = "base_model.model.m"
    adapter = {f"{name}.head{at}.weight": rand(4, 8, seed=1), f"{name}.head{at}.bias": rand(4, seed=1)}
    if kind == "LORA":
        adapter |= {f"{name}.a.lora_A.weight": rand(2, 8), f"{name}.a.lora_B.weight": rand(8, 2)}
    save(base, tmp_path / "base.safetensors")
    (tmp_path / "lora").mkdir()
    save(adapter, tmp_path / "lora" / "adapter_model.safetensors")
    config = {"peft_type": kind, "r": 2, "lora_alpha": 2, "modules_to_save": ["head"]}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(config))
    report = lora_merge.merge(tmp_path / "base.safetensors", tmp_path / "lora", tmp_path / "out.safetensors")
    assert report.verified is not None
    count = 3 if kind == "LORA" else 2
    assert report.verified["matching"] == {"modules": count, "proven": count, "alone": [], "why": {}}


def test_modules_that_share_a_tensor_are_counted_one_by_one(tmp_path: Path) -> None:
    """VeRA: one pair of factors for all modules."""
    base = {f"m.{n}.weight": rand(8, 8, seed=i) for i, n in enumerate("abc")}
    adapter = {
        f"base_model.model.m.{n}.vera_lambda_{s}": rand(*shape)
        for n in "abc"
        for s, shape in (("b", (8,)), ("d", (2,)))
    }
    adapter |= {"base_model.vera_A": rand(2, 8), "base_model.vera_B": rand(8, 2)}
    found = written(tmp_path, base, adapter, {"peft_type": "VERA", "r": 2})
    assert (found["modules"], found["proven"], found["alone"]) == (3, 3, [])


FACTORS = {
    "lora": {"lora_up.weight": (4, 2), "lora_down.weight": (2, 4)},
    "dora": {"lora_up.weight": (4, 2), "lora_down.weight": (2, 4), "dora_scale": (4, 1)},
    "loha": {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (4, 2), "hada_w2_b": (2, 4)},
    "lokr": {"lokr_w1": (2, 2), "lokr_w2": (2, 2)},
    "lokr of pairs": {"lokr_w1_a": (2, 1), "lokr_w1_b": (1, 2), "lokr_w2_a": (2, 1), "lokr_w2_b": (1, 2)},
    "glora": {"a1.weight": (2, 4), "a2.weight": (4, 2), "b1.weight": (2, 4), "b2.weight": (4, 2)},
    "oft": {"oft_blocks": (2, 2, 2)},
    "full": {"diff": (4, 4)},
    "ia3": {"weight": (4,), "on_input": ()},
    "norm": {"w_norm": (4,)},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("weight", [(4,), (4, 4), (4, 4, 1, 1), (1,), (4, 0)])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_fewer_axes_are_merged_and_read_again_or_refused(tmp_path: Path, name: str, weight: Shape) -> None:
    """Each tensor in turn, and every two, with fewer axes, or with none."""
    base = save({"x.weight": torch.zeros(weight)}, tmp_path / "b.safetensors")
    fewer = [dict.fromkeys(some, n) for n in (0, 1) for some in combinations_with_replacement(FACTORS[name], 2)]
    for cut in fewer:
        shapes = {f"x.{slot}": shape[: cut.get(slot)] for slot, shape in FACTORS[name].items()}
        adapter = save({key: torch.full(shape, 0.5) for key, shape in shapes.items()}, tmp_path / "a.safetensors")
        for strength in (1.0, 0.0):  # with 0 what does not fit is left out, and read again all the same
            given = lora_merge.Adapter(adapter, 1.0, (("model", strength),))
            with suppress(lora_merge.MergeError):
                lora_merge.merge(base, [given], tmp_path / "o.safetensors", overwrite=True, unmatched="skip")


@pytest.mark.parametrize("extra", ["a.gate", "a.b.gate", "a.b.c.gate", "b.gate"])
def test_module_with_a_tensor_of_unknown_meaning_is_not_claimed(extra: str) -> None:
    """It may change the meaning of the others. Endings have one to three parts."""
    tensors = {"a.lora_up.weight": (8, 2), "a.lora_down.weight": (2, 8), extra: (4,)}
    stems = [g.stem for g in groups(index(tensors).tensors.values()) if g.stem == "a"]
    assert stems == ([] if extra.startswith("a.") else ["a"])


@pytest.mark.parametrize("form", ["base_model.model.model.{}", "lora_unet_{}"])
@pytest.mark.parametrize("tied", [False, True])
def test_tables_that_may_be_tied_are_known_by_the_plan_alone(form: str, *, tied: bool) -> None:
    """Which of two layers with one weight an adapter changes is not in its names; the other layers are known."""
    layers = {"embed_tokens": (32, 8), "layers.0.mlp.up_proj": (16, 8)}
    base = index({f"model.{name}.weight": shape for name, shape in layers.items()})
    base = replace(base, config={"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied})
    tensors: dict[str, Shape] = {}
    for name, shape in layers.items():
        flat_name = f"model_{flat(name)}" if form.startswith("lora_") else name
        tensors |= lora(shape, form.format(flat_name), KOHYA if form.startswith("lora_") else PEFT, alpha=True)
    found = read(base, tensors)
    assert (found.modules, found.proven) == (2, 1 if tied else 2)
    assert [name.endswith("embed_tokens") for name in found.alone] == [True] * tied


def test_neighbouring_rows_of_one_tensor_are_one_span() -> None:
    rows = [
        StoredRows("a", 0, 4, 8),
        StoredRows("a", 4, 6, 8),
        StoredRows("a", 6, 9, 8),
        StoredRows("b", 0, 2, 8),
        StoredRows("b", 3, 5, 8),
        StoredRows("a", 9, 10, 8),
    ]
    found = spans(WeightPlace(tuple(rows), (16, 8)), turned=False)
    assert [(s.key, s.start, s.stop, s.cols, s.first) for s in found] == [
        ("a", 0, 9, 8, 0), ("b", 0, 2, 8, 9), ("b", 3, 5, 8, 11), ("a", 9, 10, 8, 13),
    ]  # fmt: skip


def test_second_reading_shares_no_code_with_the_planner() -> None:
    """Headers and its own files alone: no table, name or number of the planner."""
    own = {"modules", "blocks", "parts", "layouts", "rows", "scales", "claims", "formulas", "methods"}
    for name in own:
        tree = ast.parse(
            (Path(lora_merge.__file__).parent / "proof" / "second_reading" / f"{name}.py").read_text(encoding="utf-8")
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                near = (node.level, node.module) == (3, "dtypes") or (node.level == 1 and node.module in own)
                assert near or (not node.level and str(node.module).partition(".")[0] in sys.stdlib_module_names), (
                    node.module
                )
            elif isinstance(node, ast.Import):
                assert all(alias.name in sys.stdlib_module_names for alias in node.names), name


@pytest.mark.parametrize(("pattern", "known"), [
    (r"^m\.layers\.0\.a", 1), (".*a", 1), (r"layers\.[01]\..*", 1), (r"layers\.\d+\.a", 1), (r".*\.[0]\..*", 0), ("(?:m|n).*a", 0), ("a{1}", 0),
])  # fmt: skip
def test_patterns_of_ranks_are_read_where_their_time_is_bounded(pattern: str, known: int) -> None:
    base, name = index({"m.layers.0.a.weight": (64, 32)}), "base_model.model.m.layers.0.a"
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {pattern: 2}}
    found = read(base, lora((64, 32), name, PEFT, alpha=False), config)
    assert (found.modules, found.proven) == (1, known)


@pytest.mark.parametrize("rank", [1, 3, 32])
def test_factors_of_any_rank_are_known_with_a_configuration(rank: int) -> None:
    tensors: dict[str, Shape] = {
        "base_model.model.a.lora_A.weight": (rank, 32),
        "base_model.model.a.lora_B.weight": (64, rank),
    }
    found = read(index({"a.weight": (64, 32)}), tensors, {"peft_type": "LORA", "r": 7, "lora_alpha": 3})
    assert (found.modules, found.proven) == (1, 1)
    whole = {"base_model.model.a.lokr_w1": (8, 4), "base_model.model.a.lokr_w2": (8, 8)}
    assert read(index({"a.weight": (64, 32)}), whole, {"peft_type": "LOKR", "r": rank, "alpha": 3}).proven == 1


@pytest.mark.parametrize("part", ["", "transformer."])
def test_configuration_in_the_header_of_diffusers_is_known(part: str) -> None:
    told = {f"{part}{name}": value for name, value in {"r": 4, "lora_alpha": 2, "use_rslora": True}.items()}
    tensors = lora((64, 32), f"{part}blocks.0.attn.to_q", PEFT, alpha=False)
    found = read(index({"blocks.0.attn.to_q.weight": (64, 32)}), tensors,
                 metadata={"lora_adapter_metadata": json.dumps(told)})  # fmt: skip
    assert (found.modules, found.proven) == (1, 1)


TABLE, TOKENS = "model.embed_tokens", "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
CHOSEN = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "told",
    [
        {"trainable_token_indices": [5, 4, 9, 10]},
        {"trainable_token_indices": {"embed_tokens": [5, 4, 9, 10], "other": [1, 2, 3, 4]}},
        {"trainable_token_indices": {"model.embed_tokens": [0, 1, 2, 19]}},
        {"peft_type": "TRAINABLE_TOKENS", "token_indices": [7, 8, 9, 3]},
    ],
)
def test_trained_tokens_are_read_a_second_time(told: dict[str, Any]) -> None:
    base = replace(index({f"{TABLE}.weight": (20, 8)}), config={"tie_word_embeddings": True, "architectures": ["X"]})
    found = read(base, {TOKENS: (4, 8)}, {**CHOSEN, **told})
    assert (found.modules, found.proven, found.alone) == (1, 1, [])


@pytest.mark.parametrize("shift", [lambda r: [r[1], r[0], *r[2:]], lambda r: [x + 1 for x in r], lambda r: r[::-1]])
def test_tokens_that_a_wrong_plan_puts_elsewhere_are_noticed(
    shift: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = index({f"{TABLE}.weight": (20, 8)})
    right = ModuleMatcher._replace_rows

    def wrong(self: Any, info: Any, view: Any, rows: Any) -> None:
        right(self, info, view, RowNumbers(shift([*rows])))

    monkeypatch.setattr(ModuleMatcher, "_replace_rows", wrong)
    with pytest.raises(VerificationFailed, match="what an adapter's module changes"):
        read(base, {TOKENS: (4, 8)}, {**CHOSEN, "trainable_token_indices": [5, 7, 11, 12]})


def test_factors_of_mlx_lm_are_known_by_their_order() -> None:
    """Its A is [in, r] and its B [r, out]."""
    name, config = "layers.0.mlp.up_proj", {"fine_tune_type": "lora", "lora_parameters": {"rank": 3, "scale": 20.0}}
    base = index({f"{name}.weight": (6, 8)})
    assert read(base, {f"{name}.lora_a": (8, 3), f"{name}.lora_b": (3, 6)}, config).proven == 1
    with pytest.raises(lora_merge.MergeError):
        read(base, {f"{name}.lora_a": (3, 6), f"{name}.lora_b": (8, 3)}, config)


@pytest.mark.parametrize(("up", "down", "weight"), [((8, 2), (2, 6), (8, 6)), ((3, 8, 2), (3, 2, 6), (3, 8, 6))])
def test_factors_of_mlx_lm_have_each_size_of_their_weight(up: Shape, down: Shape, weight: Shape) -> None:
    fits, turned = METHOD_ROWS["mlx"].fits, len(up) == 2
    sizes = {"up": up[::-1] if turned else up, "down": down[::-1] if turned else down}
    assert fits(sizes, weight)
    for slot, shape in sizes.items():
        for axis, size in enumerate(shape):
            assert not fits({**sizes, slot: (*shape[:axis], size + 1, *shape[axis + 1 :])}, weight)
        assert not fits({**sizes, slot: shape[:1]}, weight)


def test_tensor_that_nobody_changes_is_the_bases() -> None:
    base, other = index({"a": (4,), "b": (4,)}), index({"b": (4,)})
    right = [OutputTensor(n, n, "F32", Weight(t.shape, t), 0, t.nbytes) for n, t in base.tensors.items()]
    foreign = replace(other.tensors["b"], source=Path("elsewhere.safetensors"))
    check_sources(base, [], right)
    check_sources(base, [], [t._replace(weight=Weight(t.shape, replace(t.source))) for t in right])
    for targets in (right[:1], [right[0], right[1]._replace(weight=Weight(foreign.shape, foreign))]):
        with pytest.raises(VerificationFailed, match="from another place"):
            check_sources(base, [], targets)


@pytest.mark.few(3)
@pytest.mark.parametrize("order", ["stacked", "heads"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_rows_with_two_orders_are_those_of_the_setting(
    tmp_path: Path, order: str, *, sharded: bool, named: bool
) -> None:
    """MiniMax-H3: rows of two heads by index, of published names stacked, of DiffSynth's as --setting says; both readings
    agree in files and in shards. Names of two orders without a word are refused, and words that no module needs."""
    width, default = 256, ".default" if named else ""
    shapes = {
        "video_patch_proj": 16,
        "audio_patch_proj": 8,
        "condition_proj": 32,
        "blocks.0.mlp.fc1": width,
        "blocks.0.attn.out_proj": width,
        "token_refiner.blocks.0.attn.qkv_proj": width,
        "blocks.0.attn.qkv_proj": width,
    }
    tensors = {f"{name}.weight": rand(3 * width if "qkv" in name else width, cols) for name, cols in shapes.items()}
    base, key = tmp_path / "base", "blocks.0.attn.qkv_proj"
    base.mkdir()
    for n, part in enumerate(([*tensors][:4], [*tensors][4:]) if sharded else ([*tensors],)):
        save({name: tensors[name] for name in part}, base / f"model-{n}.safetensors")
    if sharded:
        place = {name: f"model-{int(n > 3)}.safetensors" for n, name in enumerate(tensors)}
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    source = base if sharded else base / "model-0.safetensors"
    up, down = rand(3 * width, 2, seed=1), rand(2, width, seed=2)
    lora = save(
        {f"{key}.lora_A{default}.weight": down, f"{key}.lora_B{default}.weight": up}, tmp_path / "lora.safetensors"
    )
    setting = {"row_order": order} if named else {}
    out = tmp_path / ("out" if sharded else "out.safetensors")
    report = lora_merge.merge(source, lora, out, setting=setting)
    assert report.verified is not None and report.verified["matching"]["proven"] == 1
    stacked = torch.arange(3 * width).reshape(
        3, 2, 128
    )  # the rows of q, k and v of each head in an adapter of that order
    own = order if named else "stacked"
    rows = stacked if own == "stacked" else stacked.reshape(2, 3, 128).transpose(0, 1)
    rows = (rows.transpose(0, 1) if sharded else rows).reshape(-1)
    merged = load_all(out) if sharded else load(out)
    assert torch.allclose(merged[f"{key}.weight"], tensors[f"{key}.weight"] + (up @ down)[rows], atol=1e-5)
    error, said = (FitError, "two orders") if named else (UsageError, "no module of the adapters uses row_order")
    with pytest.raises(error, match=said) as failed:
        lora_merge.merge(source, lora, tmp_path / "no", setting={} if named else {"row_order": order}, verify=False)
    assert '{"row_order": "stacked"}' in failed.value.fix or not named
    with pytest.raises(UsageError, match="not heads or stacked"):
        lora_merge.merge(source, lora, tmp_path / "no", setting={"row_order": "other"})


FULL = ",".join(str(n / 26) for n in range(26))
BLOCKS = (
    # base                   adapter's words        prefix        names    part                          modules
    ("native/sd15",          "diffusers/sd15",      "lora_unet_", flat,    ("IN04", "OUT03-05", "IN08-OUT02", "M00", "BASE", "IN",
     "lbw:MIDD", "lbw:INALL", "lbw:OUTS", "lbw:ALL0.5", f"lbw:{FULL}", "lbw:" + ",".join(["0.5"] * 17), "middle_block")),
    ("diffusers/sdxl",       "diffusers/sdxl",      "unet.",      dotted,  ("IN04+OUT02", "lbw:IND", "down_blocks.1")),
    ("native/flux-dev",      "diffusers/flux-dev",  "transformer.", dotted, ("D00-D05", "D05-S02", "IN", "OUT", "lbw:FLUXALL", "single_blocks.3-9")),
    ("diffusers/wan",        "diffusers/wan",       "transformer.", dotted, ("B03-B07", "blocks.3", "lbw:ALL0.5")),
    ("transformers/qwen3-0.6b", "transformers/qwen3-0.6b", "base_model.model.", dotted, ("L03", "layers.0-9", "L01-04")),
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: f"{row[0]} {row[1]}")
def test_strengths_of_blocks_lists_and_paths_are_read(row: Any) -> None:
    """As the plan has them: each factor, or a disagreement that fails the proof. Parts of other layouts are named."""
    stored, words, prefix, named, parts = row
    config, base = (LLAMA if stored.startswith("transformers") else {}), index(header(stored))
    tensors: dict[str, Shape] = {}
    modules = [*layers(words).items()]
    for name, shape in (*modules[::7], modules[1], modules[-1]):  # with an input, and the output
        tensors |= lora(shape, prefix + named(name), KOHYA if prefix == "lora_unet_" else PEFT, alpha=not config)
    for part in parts:
        found = read(base, tensors, config, ((part, 0.5),))
        assert found.proven >= 0.98 * found.modules > 0, (part, found)


ENCODERS = {
    "cond_stage_model.transformer.": "lora_te_", "conditioner.embedders.0.transformer.": "lora_te1_",
    "conditioner.embedders.1.model.": "lora_te2_", "text_encoders.clip_l.transformer.": "lora_te1_",
}  # fmt: skip
"""Prefix of an encoder's keys → that of its modules in kohya's adapters."""


@cache
def of_whole_model(stored: str) -> Mapping[str, Shape]:
    """A LoRA of some layers of the denoiser, the ends among them, and of the encoders that it has kohya's names for."""
    tensors: dict[str, Shape] = {}
    for n, (module, shape) in enumerate(layers(stored).items()):
        prefix = next((p for p in ENCODERS if module.startswith(p)), "")
        name = ENCODERS[prefix] + flat(module.removeprefix(prefix)) if prefix else module
        of_denoiser = stored.startswith("diffusers/") or module.startswith("model.diffusion_model.")
        if (prefix and module.endswith(("fc1", "out_proj", "c_fc"))) or (
            of_denoiser and (n % 3 == 0 or "out" in module)
        ):
            tensors |= lora(shape, name, PEFT, alpha=True)
    return tensors


@pytest.mark.few(2)
@pytest.mark.parametrize("row", [*SPELLINGS, *((b, p, "") for b in ("single-file/sd1", "diffusers/sd15") for p in ("output_blocks.11", "up_blocks.3"))],
                         ids=lambda row: " ".join(row[:2]))  # fmt: skip
def test_every_spelling_of_a_block_is_confirmed_for_all_modules(row: tuple[str, str, str]) -> None:
    stored, part, _ = row
    found = read(index(header(stored)), dict(of_whole_model(stored)), parts=((part, 0.5),))
    assert found.proven == found.modules > 100, found


@pytest.mark.parametrize("stored", ["native/flux-dev", "diffusers/kolors"])
def test_module_has_every_name_that_means_it_or_a_part_of_it(stored: str) -> None:
    (network,) = (n for n in Networks(dict(header(stored))).networks if n.others)
    pairs = {
        (module, name)
        for name, meanings in network.others.items()
        for meaning in meanings
        for module in ((meaning.module,) if isinstance(meaning, ModulePart) else meaning)
    }
    assert pairs == {(module, name) for module, names in network.other_names.items() for name in names}
    assert any(len(names) > 1 for names in network.other_names.values())


def test_part_that_is_not_read_is_the_reason(tmp_path: Path) -> None:
    """A pattern of file names, and a list of a model whose blocks have no table."""
    base = index(header("native/sd15"))
    tensors = lora(
        (320, 320), "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", KOHYA, alpha=True
    )
    found = read(base, tensors, parts=(("*input_blocks.1*", 0.5),))
    assert (found.proven, found.modules, found.why) == (0, 1, {UNKNOWN_PARTS: 1})


TRAINED = "base_model.model.model."


@pytest.mark.parametrize(("stored", "trained", "proven"), [
    ("model.language_model.", TRAINED, 1), ("language_model.model.", TRAINED, 1), ("thinker.model.", TRAINED, 1), ("llm.model.", TRAINED, 1),
    ("model.", f"{TRAINED}language_model.", 1), ("model.language_model.", "base_model.model.language_model.model.", 1),
    ("talker.model.", TRAINED, 0),
])  # fmt: skip
def test_names_with_another_level_mean_the_language_model(stored: str, trained: str, proven: int) -> None:
    """Nowhere else: towers have the same layers."""
    layer = "layers.0.self_attn.q_proj"
    towers = ("model.visual.", "vision_tower.encoder.", "thinker.audio_tower.")
    shapes = {f"{at}{layer}.weight": (8, 8) for at in (stored, *towers)}
    place = Networks(shapes).find(f"{trained}{layer}", "weight")
    assert [row.key for row in place.rows if place] == [f"{stored}{layer}.weight"] if proven else place is None
