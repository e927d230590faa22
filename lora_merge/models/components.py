"""The networks of a checkpoint: denoiser, text encoders, VAE; each is recognised from its own keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

from ..dtypes import Shape
from ..errors import InputError
from .architectures import Architecture, nearly, recognise, shipped
from .name_table import form, parameter_forms
from .network import Component

FILE_PREFIXES: Final = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        #  keys begin with                                                         what is inside
        (r"model\.diffusion_model\.|diffusion_model\.",                            "denoiser"),
        (r"cond_stage_model\.(?:transformer|model)\.",                             "te"),
        (r"conditioner\.embedders\.(?P<zero>[0-9]{1,9})\.(?:transformer|model)\.",        "te"),
        (r"conditioner\.conditioners\.prompt\.(?:model\.)?",                       "te"),
        (r"text_encoders\.\w+\.(?:logit_scale|spiece_model|tokenizer)",            "other"),
        (r"text_encoders\.(?P<id>\w+)\.(?:transformer\.)?",                        "te"),
        (r"text_encoder(?:_(?P<one>[0-9]{1,9}))?\.",                                      "te"),
        (r"first_stage_model\.|vae\.|pretransform\.model\.",                       "vae"),
        (r"text_embedding_projection\.",                                           "other"),  # LTX-2's
        (r"model_ema\.",                                                           "ignored"),
    )
)  # fmt: skip
"""Prefix in a single file → role of the network under that prefix."""

_CONTAINER: Final = re.compile("|".join(pattern.pattern for pattern, _ in FILE_PREFIXES))

FOLDER_PREFIXES: Final = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        #  sub-folder of a pipeline                             what is inside
        (r"unet|transformer(?:_\d)?|prior|decoder",             "denoiser"),
        (r"text_encoder(?:_(?P<one>[0-9]{1,9}))?",                     "te"),
        (r"vae|vqgan|audio_vae",                                "vae"),
        (r".*",                                                 "other"),
    )
)  # fmt: skip

LOOSE: Final = (
    *("", "model.model.", "net.", "core.", "model.", "transformer.", "unet.", "prior.", "bert."),
    *("vit.", "deit.", "beit.", "ijepa.", "dinov2.", "dinov2_with_registers.", "swin.", "segformer."),
    *("audio_spectrogram_transformer.", "nomic_bert.", "gte.", "new.", "roberta."),  # `new.` is GTE's too
    "encoder.",  # TrOCR and Donut are a ViT or Swin and a decoder, the Decision Transformer a GPT-2 between layers
    *("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."),  # saved while wrapped: DDP, torch.compile
)
"""Prefixes that count only if a known model is under them: many models have such a level of their own."""

WITHIN: Final = {
    **dict.fromkeys(("camembert", "jina_embeddings_v3", "xlm-roberta", "xlm-roberta-xl", "xmod"), "roberta."),
    **dict.fromkeys(("bert-generation", "big_bird", "megatron-bert"), "bert."),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "xlstm"), "backbone."),
    **dict.fromkeys(("squeezebert", "xlm", "xlnet", "flaubert", "openai-gpt"), "transformer."),
    **dict.fromkeys(("vit_mae", "vit_msn", "yolos"), "vit."),
    "deberta-v2": "deberta.",
}
"""Type of a transformers model → its `base_model_prefix` (the first level of a model with a head), if they differ."""

CLIP_WIDTHS: Final = {768: "clip_l", 1024: "clip_h", 1280: "clip_g"}
ENCODER_IDS: Final = {"t5xxl": "t5", "t5base": "t5", "pile_t5xl": "t5", "umt5xxl": "t5", "mt5xl": "t5"}
"""ComfyUI's name of a text encoder → its kind in the architecture files, if they differ."""

MOST_NETWORKS: Final = 32
"""The most networks in known places; known models have at most six. The names of more are not taken for places."""

LEAST_SHARED_NAMES: Final = 0.98
"""The least share of a model's forms of names that an architecture must have to be recognised without one sign tensor;
with 0.95 Lumina-Image 2 could be Z-Image."""

PRESENT: Final = 0.3
"""The least share of an architecture's forms that such a model must have: the list is that of all its variants."""

UNSURE: Final = ("clip", "unknown")
"""Kinds of encoders that only their position in the checkpoint distinguishes."""


def components(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], folders: Collection[str], extra: Architecture | None
) -> list[Component]:
    """Return all networks of a base, the denoiser (or only network) first.

    `folders`: the sub-folders of a pipeline, whose keys are `<folder>.<name>`. `extra`: the user's architecture;
    InputError if no network is of that architecture.
    """
    keys: dict[str, dict[str, str]] = {}
    loose: list[str] = []
    for key in shapes:
        if (prefix := _prefix(key, folders)) is None:
            loose.append(key)
        else:
            keys.setdefault(prefix, {})[key[len(prefix) :]] = key
    if len(keys) > MOST_NETWORKS and not folders:
        keys, loose = {}, [*shapes]
    containers = [_container(prefix, names, shapes, folders) for prefix, names in keys.items()]
    networks = [_identified(c, extra) for c in containers if c.role != "ignored"]
    if loose:
        networks.append(_rest(loose, shapes, config, extra, aside=any(c.role == "denoiser" for c in networks)))
    if extra is not None and all(c.architecture is not extra for c in networks):
        raise InputError(f"the map is for {extra.title}, which this base is not", str(extra.file),
                         "correct the layouts in the map, or leave --map out")  # fmt: skip
    return labelled([replace(component, config=config) for component in networks])


def _prefix(key: str, folders: Collection[str]) -> str | None:
    if folders:
        return next((f"{folder}." for folder in folders if key.startswith(f"{folder}.")), None)
    m = _CONTAINER.match(key)
    return m[0] if m else None


def _container(
    prefix: str, keys: Mapping[str, str], shapes: Mapping[str, Shape], folders: Collection[str]
) -> Component:  # fmt: skip
    """Return the component under a prefix of FILE_PREFIXES, or of FOLDER_PREFIXES; its architecture is not known
    yet."""
    for pattern, role in FOLDER_PREFIXES if folders else FILE_PREFIXES:
        if m := pattern.fullmatch(prefix.removesuffix(".") if folders else prefix):
            named = m.groupdict()
            kind = str(named.get("id") or "")
            number = int(named.get("one") or 0) or int(named.get("zero") or -1) + 1
            label = prefix.removesuffix(".") if folders and role == "denoiser" else role
            return Component(role, label, prefix, kind=ENCODER_IDS.get(kind, kind), number=number, keys=keys,
                             shapes=shapes)  # fmt: skip
    raise AssertionError(f"{prefix} was just matched")


def _identified(component: Component, extra: Architecture | None) -> Component:
    """Return the component with its architecture and layout, and the kind and label that follow from them."""
    keys, shapes, kind, label = component.keys, component.shapes, component.kind, component.label

    def shape_of(body: str) -> Shape | None:
        key = keys.get(body)
        return None if key is None else shapes[key]

    among = [a for a in shipped() if _may_be(a, component.role)]
    hit = _single_network(shape_of, among, extra) or _cut_down(keys, shapes, among)
    if hit:
        kind = kind or _kind(hit[0], keys, shapes)
    if component.role == "te":
        kind = kind or "unknown"
    if label == "denoiser":
        label = hit[0].component if hit else "model"
    architecture, layout = hit or (None, component.layout)
    return replace(component, architecture=architecture, layout=layout, kind=kind, label=label)


def _may_be(architecture: Architecture, role: str) -> bool:
    """Return whether a network in this role can be of the architecture: an encoder can be any language model."""
    return _role(architecture) == role or (role == "te" and architecture.component == "model")


def _role(architecture: Architecture) -> str:
    if architecture.kind:
        return "te"
    return {"vae": "vae", "connectors": "other"}.get(architecture.component, "denoiser")


def _kind(architecture: Architecture, keys: Mapping[str, str], shapes: Mapping[str, Shape]) -> str:
    """Return clip_l, clip_h or clip_g by the width of the embeddings; else the kind of the architecture."""
    if architecture.kind != "clip":
        return architecture.kind
    name = next((k for b, k in keys.items() if b.endswith("token_embedding.weight")), None)
    return CLIP_WIDTHS.get(shapes[name][-1] if name else 0, "clip")


def _rest(
    loose: Sequence[str], shapes: Mapping[str, Shape], config: Mapping[str, Any],
    extra: Architecture | None, *, aside: bool,
) -> Component:  # fmt: skip
    """Return the component of the keys without a known prefix; `aside`: whether another component is the denoiser."""
    levels = {key.partition(".")[0] for key in loose}
    kind = str(config.get("model_type") or "")
    inner = WITHIN.get(kind, f"{kind.replace('-', '_')}." if kind else "")
    prefixes = () if aside else [p for p in LOOSE if not p or p.partition(".")[0] in levels]

    def exactly(prefix: str) -> tuple[Architecture, str] | None:
        return _single_network(lambda body: shapes.get(prefix + body), shipped(), extra)

    def without_one(prefix: str) -> tuple[Architecture, str] | None:
        return _cut_down(_without(prefix, loose), shapes, shipped())

    for recognised, prefix in product((exactly, without_one), prefixes):
        if hit := recognised(prefix):
            keys = _without(prefix, loose)
            return Component(_role(hit[0]), hit[0].component, prefix, *hit, kind=_kind(hit[0], keys, shapes),
                             inner=inner, keys=keys, shapes=shapes)  # fmt: skip
    heads = {f"{level}." for level in levels}
    prefix = next(iter(heads)) if len(heads) == 1 and heads <= set(LOOSE) else ""
    role, label = ("other", "other") if aside else ("denoiser", "model")
    return Component(role, label, prefix, title=stated_class(config), inner=inner, keys=_without(prefix, loose),
                     shapes=shapes)  # fmt: skip


def stated_class(config: Mapping[str, Any]) -> str:
    """Return the class of the model that a config.json states; "" if it states none."""
    stated = config.get("architectures")
    name = stated[0] if isinstance(stated, list) and stated else stated or config.get("_class_name")
    return name if isinstance(name, str) else ""


def _without(prefix: str, keys: Iterable[str]) -> dict[str, str]:
    return {key.removeprefix(prefix): key for key in keys}


def _single_network(
    shape_of: Callable[[str], Shape | None], among: Sequence[Architecture], extra: Architecture | None
) -> tuple[Architecture, str] | None:
    """Return the (architecture, layout) that fits, the user's first; None if none or several fit.

    Tests show that no two shipped architectures fit one model.
    """
    hits = recognise(shape_of, (extra,) if extra else ()) or recognise(shape_of, among)
    return hits[0] if len(hits) == 1 else None


def _cut_down(
    keys: Mapping[str, str], shapes: Mapping[str, Shape], among: Sequence[Architecture]
) -> tuple[Architecture, str] | None:
    """Return the (architecture, layout) of a model that lacks one of the tensors that show it, by the names of all
    others; None if none or several fit."""
    known, hits = parameter_forms(), list[tuple[Architecture, str]]()
    for architecture, layout in nearly(lambda body: shapes.get(keys.get(body, "")), among):
        listed = known.get(architecture.file.stem, frozenset())
        component = Component("denoiser", "", "", architecture, layout, keys=keys, shapes=shapes)
        forms = _forms(component.views("")) if listed else set()
        alike = len(forms & listed)
        if alike and alike >= LEAST_SHARED_NAMES * len(forms) and alike >= PRESENT * len(listed):
            # A layout that renames no tensor is not the model's: its names are canonical.
            hit = architecture, architecture.canonical if forms == _forms(keys) else layout
            hits += [hit] if hit not in hits else []
    return hits[0] if len(hits) == 1 else None


def _forms(names: Iterable[str]) -> set[str]:
    """Return the forms of names of parameters but biases."""
    return {of for name in names if not (of := form(name)).endswith(".bias")}


def labelled(networks: Iterable[Component]) -> list[Component]:
    """Return the networks, the denoiser first, with encoders called te, te1, te2 … as the denoiser's architecture calls
    them, else by their own numbers."""
    ordered = sorted(networks, key=lambda c: c.role != "denoiser")  # stable
    encoders = [c for c in ordered if c.kind]
    main = ordered[0].architecture if ordered and ordered[0].role == "denoiser" else None
    names = {kind: name for name, kind in reversed(list((main.text_encoders if main else {}).items()))}
    labels = {
        c.prefix: names.get(c.kind) or ("te" if len(encoders) == 1 else f"te{c.number or order}")
        for order, c in enumerate(encoders, 1)
    }
    return [replace(c, label=labels.get(c.prefix, c.label)) for c in ordered]
