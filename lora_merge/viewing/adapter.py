"""Facts about an adapter, from its header: algorithms, ranks, alphas, names, what it was trained on and with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any, Final

from ..adapters.modules import AdapterFile, Module, rank_of, weight_shapes
from ..adapters.network_settings import rules_of
from ..adapters.suffixes import split_row_part
from ..adapters.tensor_values import FileValues
from ..adapters.training_metadata import entry, made_for
from ..algorithms import DoesNotFit
from ..change_statistics import Groups
from ..disk.reader import Reader
from ..dtypes import Shape
from ..errors import MergeError
from ..files.checkpoint import Index
from ..grouping import by_key
from ..matching.missing_tensors import Gap, gaps
from ..models.adapter_architecture import described, modules_of
from ..models.blocks import adapter_groups, network_of
from ..models.names import denoiser_of, of_the_denoiser
from ..models.prefixes import PREFIXES, innermost
from ..text import by_pattern, is_finite
from .file_verdict import INCOMPLETE
from .training import training

TRAINERS: Final = (
    # metadata key             trainer
    ("lora_adapter_metadata",  "diffusers"),
    ("lycoris_config",         "SimpleTuner"),
    ("training_info",          "ai-toolkit"),
    ("ot_branch",              "OneTrainer"),
    ("ss_num_train_items",     "musubi-tuner"),
    ("ss_num_train_images",    "kohya sd-scripts"),
    ("ss_network_module",      "kohya sd-scripts or musubi-tuner"),
)  # fmt: skip

NETWORK_ROLES: Final = {
    "te": "reads the prompt",
    "=": "reads the prompt",
    "vae": "turns latents into pictures",
    "any": "",
}
"""Beginning of the name of a network → what it does; denoisers make the picture. "=clip_l": ComfyUI's own names."""

LAYER_ROLES: Final = (
    # kind                its names, between dots or underscores
    ("cross-attention",   r"attn2|cross_?attn|EncDecAttention"),
    ("self-attention",    r"attn1|self_?attn|SelfAttention"),
    ("attention",         r"[a-z]+_attn|attn|attention|qkv|to_[qkv]|to_out|to_add_out|[qkvo]_proj|out_proj"),
    ("feed-forward",      r"ff|ffn|ff_context|[a-z]*_?mlp|feed_?forward|fc[12]|DenseReluDense|(?:gate|up|down)_proj"),
    ("modulation",        r"[a-z]*_?mod|modulation|adaLN_modulation|norm\w*"),
    ("convolution",       r"resnets|in_layers|out_layers|conv\w*|downsamplers|upsamplers|skip_connection|op"),
    ("ends of a block",   r"proj_in|proj_out"),
    ("inputs",            r"[a-z]*_?emb\w*|time_\w+|[a-z]*_in|x_embedder|context_embedder"),
)  # fmt: skip
"""What a layer does → names for it; the first that fits counts."""
ROLE_PATTERNS: Final = [
    (kind, re.compile(rf"(?:^|[._])(?:{names})(?=[._]|$)", re.IGNORECASE)) for kind, names in LAYER_ROLES
]


def adapter_facts(file: AdapterFile) -> dict[str, Any]:
    """Return what the header and the configuration of an adapter contain."""
    index = file.index
    with Reader([index]) as reader:
        values = FileValues(reader)
        alpha = {m.where: values.elements(m.shared["alpha"])[:1] for m in file.modules if "alpha" in m.shared}
    ranks = {m.where: rank for m in file.modules if (rank := rank_of(m))}
    file = replace(file, modules=_with_own_tensors(file))
    alphas = Counter(a for some in alpha.values() for a in some)
    for table in (index.config, *(entry(index, e) for e in ("lora_adapter_metadata", "lora_config"))):
        alphas.update(_alphas(table) if isinstance(table, Mapping) else ())
    alpha = {**_configured(file, ranks), **alpha}
    dora = sum("magnitude" in m.shared for m in file.modules)
    lacking = _gaps(file)
    algorithms = _algorithms(file) | dict.fromkeys(lacking, INCOMPLETE)
    numbers, kinds = Counter(ranks.values()), dict(Counter(algorithms.values()).most_common())
    return {
        "kind": "adapter", "algorithms": kinds, **({"dora": dora} if dora else {}),
        "modules": len(file.modules), "ranks": _by_count(numbers), "alphas": _by_count(alphas),
        "rank_range": spread([*ranks.values()]), "alpha_range": spread([a for some in alpha.values() for a in some]),
        "trainer": trainer(index), "names": prefixes(file.modules),
        **model_facts(file),
        "parameters": sum(prod(t.shape) for t in index.tensors.values()),
        "patterns": _patterns(algorithms, ranks, alpha), "blocks": _blocks(file, ranks, alpha),
        "trained": training(index),
        "configuration": {k: v for k, v in index.config.items() if v not in (None, False, [], {})},
        "parts": parts(file.modules), "incomplete": [*_incomplete(file, lacking)], "ignored": dict(file.ignored),
        "whole": [t.name for t in file.strange],
    }  # fmt: skip


def _with_own_tensors(file: AdapterFile) -> tuple[Module, ...]:
    """Return the modules without the tensors that all of them share, such as those of VeRA."""
    try:
        known = rules_of(file)
    except MergeError:  # a merge reports what is wrong with the configuration
        return file.modules
    return tuple(m for m in file.modules if not known.of(m.name).is_shared(m.name))


def _shapes(modules: Sequence[Module]) -> dict[str, Shape]:
    """Return module → [out, in] of its weight, for guesses of the architecture."""
    return {split_row_part(name)[0]: shape for name, shape in weight_shapes(modules).items()}


def parts(modules: Sequence[Module]) -> dict[str, Any]:
    """Return network → what it does, modules, parameters, and how many modules are of each kind of layer."""
    networks: dict[str, dict[str, Any]] = {}
    denoiser = denoiser_of(_shapes(modules))
    for m in modules:
        hint, _ = innermost(m.name)
        network = network_of(m.name, denoiser)
        does = next((does for start, does in NETWORK_ROLES.items() if hint.startswith(start)), "makes the picture")
        row = networks.setdefault(network, {"does": does, "modules": 0, "parameters": 0, "layers": Counter()})
        row["modules"] += 1
        row["parameters"] += sum(prod(t.shape) for t in m.tensors)
        row["layers"][kind_of(m.name)] += 1
    return {name: {**row, "layers": dict(row["layers"].most_common())} for name, row in networks.items()}


def kind_of(name: str) -> str:
    """Return what the layer of a module or of a weight does, by its name; "other" if the name does not show it."""
    _, body = innermost(name)
    return next((kind for kind, names in ROLE_PATTERNS if names.search(body)), "other")


def algorithm_of(module: Module) -> str:
    """Return the algorithm that the tensors of a module most likely belong to; "incomplete" if none fits."""
    return next(iter(module.complete), INCOMPLETE)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the greatest of some numbers; empty without any."""
    return {"min": min(values), "median": median(values), "max": max(values)} if values else {}


def _gaps(file: AdapterFile) -> Mapping[str, Gap]:
    """Return the modules that lack a tensor which the others have."""
    try:
        return gaps(file.modules, rules_of(file))
    except MergeError:  # a merge reports what is wrong with the configuration
        return {}


def _incomplete(file: AdapterFile, lacking: Mapping[str, Gap]) -> Iterator[str]:
    """Yield the modules that lack a tensor: by the table of algorithms, or by comparison with the others."""
    yield from (m.where for m in file.modules if not m.complete and m.where not in lacking)
    yield from (f"{name} has no {gap.key}" for name, gap in lacking.items())


def _algorithms(file: AdapterFile) -> dict[str, str]:
    """Return module → its algorithm: the one that PEFT's configuration means, else the first that its tensors fit."""
    try:
        known = rules_of(file)
    except MergeError:  # a merge reports what is wrong with the configuration
        return {m.where: algorithm_of(m) for m in file.modules}
    names = {}
    for m in file.modules:
        try:
            names[m.where] = known.of(m.name).algorithm(m.name, m.complete) or algorithm_of(m)
        except (MergeError, DoesNotFit):
            names[m.where] = algorithm_of(m)
    return names


def _patterns(
    algorithms: Mapping[str, str], ranks: Mapping[str, int], alphas: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return pattern of names → algorithm, number of modules, ranks and alphas; an incomplete module is apart."""
    complete = [name for name, algorithm in algorithms.items() if algorithm != INCOMPLETE]
    named = {**by_pattern(complete), **{name: [name] for name in algorithms.keys() - {*complete}}}
    return {
        pattern: {
            "algorithm": ", ".join(Counter(algorithms[n] for n in names)), "modules": len(names),
            "ranks": sorted({ranks[n] for n in names if n in ranks}),
            "alphas": sorted({a for n in names for a in alphas.get(n, ())}),
        }
        for pattern, names in named.items()
    }  # fmt: skip


def model_facts(file: AdapterFile) -> dict[str, str]:
    """Return the model that an adapter is for, "unknown" if nothing shows it, and what shows it where its names and
    shapes do not."""
    shapes = _shapes(file.modules)
    models, by = made_for(file.index, shapes)
    flat = modules_of({} if by else of_the_denoiser(shapes))  # variants differ in their shapes
    return {"made_for": described(models, flat), **({"made_for_by": by} if by else {})}


def module_groups(file: AdapterFile) -> Groups:
    """Return the parts and the blocks of an adapter's modules, by their names."""
    return adapter_groups({m.name: () for m in file.modules} | _shapes(file.modules))


def _blocks(file: AdapterFile, ranks: Mapping[str, int], alphas: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return block → number of modules, their ranks and alphas, in the order of the blocks' numbers."""
    groups = module_groups(file)
    by_block = by_key((groups.block(m.name), m.where) for m in file.modules)
    return {
        block: {
            "modules": len(names), "ranks": spread([ranks[n] for n in names if n in ranks]),
            "alphas": spread([a for n in names for a in alphas.get(n, ())]),
        }
        for block, names in sorted(by_block.items(), key=lambda item: groups.place(item[0]))
    }  # fmt: skip


def _by_count(counts: Counter[Any]) -> list[Any]:
    """Return the values that occur, the most frequent first."""
    return [value for value, _ in counts.most_common()]


def trainer(index: Index) -> str:
    """Return the program that trained an adapter; "unknown" if its metadata does not name one."""
    if "lora_parameters" in index.config:
        return "mlx-lm"
    if index.config:
        return f"PEFT {index.config.get('peft_version', '')}".strip()
    return next((name for key, name in TRAINERS if key in index.metadata), "unknown")


def _alphas(configuration: Mapping[str, Any]) -> Iterator[float]:
    """Yield the α that a PEFT configuration gives, for all modules or some; diffusers has one per component."""
    for key, value in configuration.items():
        if key.rpartition(".")[2] == "lora_alpha" and is_finite(value):
            yield float(value)
        if key.rpartition(".")[2] == "alpha_pattern" and isinstance(value, Mapping):
            yield from (float(v) for v in value.values() if is_finite(v))


def _configured(file: AdapterFile, ranks: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
    """Return module → the α that PEFT's configuration gives it; {} without one, and where a merge would refuse it."""
    default = file.index.config.get("lora_alpha")
    if default is None or not is_finite(default):
        return {}
    try:
        fields = rules_of(file).fields
        named = [m for m in file.modules if m.where in ranks]
        return {m.where: (float(fields.pattern("alpha_pattern", m.name, default)),) for m in named}
    except MergeError:
        return {}


def prefixes(modules: Sequence[Module]) -> list[str]:
    """Return the prefixes of module names, the most frequent first."""
    known = sorted((p for p, _ in PREFIXES), key=len, reverse=True)
    counts = Counter(next((p for p in known if m.name.startswith(p)), "(none)") for m in modules)
    return [prefix for prefix, _ in counts.most_common()]
