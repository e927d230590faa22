"""The folder of a PEFT adapter: `adapter_config.json` next to `adapter_model.safetensors`. No torch.

PEFT has other names for factors of embeddings: which parameter is one, and how its factors are stored. LoHa and LoKr
keep their tensors as they are; ranks, α and the sizes of factors are in the configuration. PEFT makes each layer's
tensors from the configuration before it loads them, so a shape that no configuration gives cannot be loaded. Facts:
peft 0.21, tuners/loha/layer.py and tuners/lokr/layer.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ...algorithms import ALGORITHMS
from ...algorithms.loha import LOHA
from ...errors import FitError, UsageError
from ...models.part_factors import or_leave_out
from ...models.tied_weights import DECODER_CLASSES, HEADED
from ...text import Note
from ..dialects import PRODUCT_ALGORITHMS, Dialect
from ..groups import Place, PlaceChange
from ..job import FACTORS
from ..metadata import BIASED

if TYPE_CHECKING:
    from ..module_tensors import StoredModule

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Ending → shape of a layer's tensors."""

TO_LORA: Final = "bring it to LoRA: `--algorithm lora`, with --rank if it is not low-rank"


def shapes_of(module: StoredModule) -> dict[str, tuple[int, ...]]:
    """Return ending → shape of the stored tensors."""
    return {ending: entry.shape for ending, entry in module.tensors.items()}


def rank_of(shapes: Shapes) -> int:
    """Return `r` of a layer for PEFT: the rank of its small factors; of two whole ones the least r that means those."""
    for ending in (".hada_w1_b", ".lokr_w2_b", ".lokr_w1_b"):
        if ending in shapes:
            return shapes[ending][0]
    return -(-max(shapes[".lokr_w2"][:2]) // 2)


def settings(modules: Sequence[StoredModule]) -> dict[str, Any]:
    """Return the entries for these layers, all of one algorithm; FitError where no configuration gives their shapes."""
    shapes = {m.place.label: shapes_of(m) for m in modules}
    of_kernels = [s for m, s in zip(modules, shapes.values(), strict=True) if m.place.kernel]
    folded = {any(ending.endswith(("_t1", "_t2")) for ending in s) for s in of_kernels}
    if len(folded) > 1:
        raise FitError("PEFT gives all convolutions a core or none", modules[0].place.label, TO_LORA)
    common = {"rank_dropout": 0.0, "module_dropout": 0.0, "init_weights": True,
              "use_effective_conv2d": folded == {True}}  # fmt: skip
    if modules[0].layer.algorithm == LOHA.name:
        return common
    if line := next((m for m in modules if len(shapes_of(m).get(".lokr_w2", ())) == 3), None):
        raise FitError("PEFT pairs other axes of a kernel in one dimension", line.place.label, TO_LORA)
    both = any(".lokr_w1_a" in s for s in shapes.values())
    factors = (-1, *sorted({n for s in shapes.values() for n in _first(s)}))  # near the root, or a size of some w1
    factor = next((f for f in factors if all(_fits(m, f, both=both) for m in modules)), None)
    if factor is None:
        raise FitError("PEFT has one rule for the factors of all layers, which these do not follow",
                       modules[0].place.label, TO_LORA)  # fmt: skip
    return {**common, "decompose_both": both, "decompose_factor": factor, "rank_dropout_scale": False}


def _first(shapes: Shapes) -> tuple[int, int]:
    """Return (rows, columns) of w1."""
    if ".lokr_w1" in shapes:
        return shapes[".lokr_w1"][0], shapes[".lokr_w1"][1]
    return shapes[".lokr_w1_a"][0], shapes[".lokr_w1_b"][1]


def _fits(module: StoredModule, factor: int, *, both: bool) -> bool:
    """Return whether PEFT makes the shapes of a layer with this `decompose_factor`, and the rank `rank_of`."""
    shapes, (out, cols) = shapes_of(module), module.place.view.shape[:2]
    rank, (l, m) = rank_of(shapes), _first(shapes)  # noqa: E741
    whole = ".lokr_w1" in shapes, ".lokr_w2" in shapes
    needs = not (both and rank < max(l, m) / 2), not rank < max(out // l, cols // m) / 2
    return split(out, factor) == (l, out // l) and split(cols, factor) == (m, cols // m) and whole == needs


def split(size: int, factor: int) -> tuple[int, int]:
    """Return the two factors of a size as PEFT's `factorization` chooses them."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = isqrt(size) if factor < 0 else min(isqrt(size), factor)
    first = next(n for n in range(max(most, 1), 0, -1) if size % n == 0)
    return first, size // first


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


def expect_one(components: Iterable[str], what: str, output: Path) -> None:
    """Raise UsageError for several components, which one folder cannot hold; `what` says where they are from."""
    folder = output.name if output.parent in (Path(), Path.cwd()) else output
    names = sorted({*components})
    if len(names) > 1:
        steps = "".join(f"`--include {name} -o {folder}-{name}`, then " for name in names[:-1])
        raise UsageError(
            f"a PEFT folder is for one component, {what} {', '.join(names)}",
            "--include",
            f"write a folder for each: {steps}`--include {names[-1]} -o {folder}-{names[-1]}`",
        )


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
    if config is None or "lora_alpha" not in config or not config["rank_pattern"]:
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
