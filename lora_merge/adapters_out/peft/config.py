"""The folder of a PEFT adapter: `adapter_config.json` next to `adapter_model.safetensors`. No torch.

PEFT has other names for factors of embeddings: which parameter is one, and how its factors are stored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...algorithms import ALGORITHMS
from ...errors import FitError, UsageError
from ...models.part_factors import or_leave_out
from ...models.tied_weights import DECODER_CLASSES, HEADED
from ...text import Note
from ..dialects import PRODUCT_ALGORITHMS, Dialect
from ..groups import Place, PlaceChange
from ..job import FACTORS
from ..metadata.loaders import BIASED
from .kronecker import TO_LORA, settings

if TYPE_CHECKING:
    from ..groups import Place
    from ..module_tensors import StoredModule

EXPERT: Final = re.compile(r"\.experts\.\d+\.")
"""In names of layers of one expert. Factors of all experts of a layer are what PEFT 0.19 and later stack themselves;
whole values it leaves out in silence."""

DUMMY_TARGET: Final = "dummy-target-modules"
"""What PEFT 0.11 and later write for an adapter of whole modules alone: it refuses an empty list.

Source: DUMMY_TARGET_MODULES in peft/utils/constants.py.
"""

FAN_IN_FAN_OUT: Final = "fan_in_fan_out"
"""The entry of PEFT's configuration that says whether weights are stored [in, out]."""

AUTO: Final = "auto_mapping"
"""The entry of PEFT's configuration that names the class of the model."""

DIFFERING: Final = (
    "the ranks of the layers differ: PEFT reads them in rank_pattern and alpha_pattern, while llama.cpp's converter "
    "takes one lora_alpha for all"
)

BIAS_ENDING: Final = ".bias"
WRAPPED_BIAS: Final = ".base_layer.bias"
"""The endings of a new bias, and of that of a layer with factors."""


def task_type(model: Mapping[str, Any]) -> str | None:
    """Return the task in PEFT's words of a language model with this configuration; None for heads of other tasks, as
    PEFT then asks for modules of its own in every folder."""
    classes = model.get("architectures")
    if not isinstance(classes, list) or not any(str(name).endswith(HEADED) for name in classes):
        return None
    if model.get("is_encoder_decoder"):
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if any(str(name).endswith(DECODER_CLASSES) for name in classes) else None


def expect_one(components: Iterable[str], what: str) -> None:
    """Raise UsageError for several components, which one folder cannot hold; `what` says where they are from."""
    names = sorted({*components})
    if len(names) > 1:
        raise UsageError(f"a PEFT folder is for one component, {what} {', '.join(names)}", "--include",
                         f"write a folder for each: {' -o FOLDER, then '.join(f'--include {c}' for c in names)}"
                         " -o OTHER")  # fmt: skip


def config(modules: Sequence[StoredModule], before: Mapping[str, Any], places: Sequence[Place]) -> dict[str, Any]:
    """Return the configuration: the most frequent rank, patterns for the others; only entries that PEFT 0.13 knows.

    `places`: all parameters of the model that are known.
    """
    whole = sorted(whole_modules(((m.place, m.tensors) for m in modules), places))
    kinds = {m.layer.algorithm if m.layer.algorithm in PRODUCT_ALGORITHMS else FACTORS for m in modules if m.layer.rank}
    if len(kinds) > 1:
        raise FitError("a PEFT folder is for one algorithm", ", ".join(sorted(kinds)), TO_LORA)
    if kinds & {*PRODUCT_ALGORITHMS}:
        return _of_products(modules, before, places, whole)
    ranks = {m.place.module: m.layer.rank for m in modules if m.layer.rank}
    of_experts = [rank for name, rank in ranks.items() if EXPERT.search(name)]  # `rank_pattern` is not for them
    usual = Counter(of_experts or ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {_pattern(name): rank for name, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA", "inference_mode": True,
        **_entries_of_model(before), "r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others,
        "target_modules": _targets(ranks, places) or DUMMY_TARGET, "modules_to_save": whole or None,
        "use_rslora": False, "use_dora": any("magnitude" in e for m in modules for e in m.tensors),
        "bias": _bias(modules, whole),
        "lora_dropout": 0.0, "init_lora_weights": True,
        FAN_IN_FAN_OUT: before.get(FAN_IN_FAN_OUT) or any(m.place.view.row_slices[0].transposed for m in modules),
        **({BIASED: True} if any(".lora_B.bias" in m.tensors for m in modules) else {}),
    }  # fmt: skip


def differing_ranks(config: Mapping[str, Any] | None) -> list[Note]:
    """Return the note on a configuration of LoRA with ranks that differ by layer, which some readers do not know.

    llama.cpp's convert_lora_to_gguf.py writes lora_alpha alone, and llama-adapter.h divides it by each tensor's rank.
    """
    if config is None or config["peft_type"] != "LORA" or not config["rank_pattern"]:
        return []
    most = max(config["r"], *config["rank_pattern"].values())
    return [Note(f"{DIFFERING}: for such a reader, write it with --rank {most}, which gives all layers that rank")]


def _entries_of_model(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of the model: it is as true of the output. PEFT chooses the class that loads an
    adapter by its task, or else by `auto_mapping`."""
    entries = {name: before.get(name) for name in ("task_type", "base_model_name_or_path", "revision")}
    return {**entries, **({AUTO: before[AUTO]} if isinstance(before.get(AUTO), dict) else {})}


def whole_modules(modules: Iterable[tuple[Place, Collection[str]]], places: Iterable[Place]) -> set[str]:
    """Return the modules that a folder replaces as a whole: each with a new weight, and norms. A bias of a module
    without a weight, such as that of BERT's head, belongs to no norm.
    `modules`: parameters, and the endings of their tensors."""
    weights = {p.module for p in places if p.parameter == "weight"}
    return {
        place.module for place, endings in modules
        if ".weight" in endings or (BIAS_ENDING in endings and place.norm and place.module in weights)
    }  # fmt: skip


def magnitude_shape(place: Place) -> tuple[int, ...]:
    """Return the shape in which PEFT stores the magnitudes of a layer: [out], and [1, out, 1, 1] of a convolution."""
    return (1, -1, *(1 for _ in place.view.shape[2:])) if len(place.view.shape) > 2 else (-1,)


def _bias(modules: Iterable[StoredModule], whole: Collection[str]) -> str:
    """Return which biases the folder has: those of layers with factors, others too, or none."""
    if any(BIAS_ENDING in m.tensors and m.place.module not in whole for m in modules):
        return "all"
    return "lora_only" if any(WRAPPED_BIAS in m.tensors for m in modules) else "none"


def _of_products(
    modules: Sequence[StoredModule], before: Mapping[str, Any], places: Iterable[Place], whole: Sequence[str]
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration of a folder of LoHa or of LoKr."""
    factored = [m for m in modules if m.layer.rank]
    ranks = {m.place.module: m.layer.rank for m in factored}
    alphas = {m.place.module: m.layer.alpha for m in factored}
    usual, alpha = (Counter(numbers.values()).most_common(1)[0][0] for numbers in (ranks, alphas))
    return {
        "peft_type": factored[0].layer.algorithm.upper(), "inference_mode": True,
        **_entries_of_model(before), "r": usual, "alpha": alpha, **settings(factored),
        "target_modules": _targets(ranks, places),
        "rank_pattern": {_pattern(name): rank for name, rank in ranks.items() if rank != usual},
        "alpha_pattern": {_pattern(name): number for name, number in alphas.items() if number != alpha},
        "modules_to_save": whole or None,
    }  # fmt: skip


def _targets(chosen: Collection[str], places: Iterable[Place]) -> str | list[str]:
    """Return the layers with factors: PEFT compares the names of a list with the ends of all names, and a text as a
    pattern with whole names. Flux has a proj_out of its own, and one in each block."""
    others = {p.module for p in places}.difference(chosen)
    ends = {name[dot.end() :] for name in others for dot in re.finditer(r"\.", name)}
    return sorted(chosen) if ends.isdisjoint(chosen) else "|".join(map(re.escape, sorted(chosen)))


def _pattern(name: str) -> str:
    return f"^{re.escape(name)}$"


TABLE_NAMES: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens(?:_per_layer)?|embed_positions|embed_in|wte|wpe|shared|tok_embeddings|embeddings?"
    r"|(?:\w+_)?(?:word|position|token|token_type)_embeddings?|(?:row|column|lang|rel|entity|segment)_embeddings"
    r"|tokens_embed|positions_embed|input_embeds_layer|position_embeds_layer|(?:global_)?relative_attention_bias)$"
)
"""Names of `nn.Embedding` in language models and text encoders; PEFT has names of its own for their factors."""


def is_table(place: Place, shares: Sequence[PlaceChange] = ()) -> bool:
    """Return whether a parameter is a table of embeddings: an adapter has factors of one, or it has such a name."""
    trained = any(ALGORITHMS[share.patch.algorithm].layout == "table" for share in shares)
    return len(place.view.shape) == 2 and (trained or TABLE_NAMES.search(place.module) is not None)


def expect_table(place: Place, to: Dialect) -> None:
    """Raise FitError for a dialect that cannot store factors of an embedding: its loader puts factors on layers
    alone."""
    if "up_bias" in to.endings and "table_up" not in to.endings:
        raise FitError(f"{to.name} cannot store factors of an embedding", place.label,
                       or_leave_out("use kohya or comfy", place.keys))  # fmt: skip
