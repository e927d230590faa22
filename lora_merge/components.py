"""Cuts a checkpoint into its networks: denoiser, text encoders, VAE; each recognised from its own keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .algorithms import Shape
from .aliases import Component
from .architectures import Architecture, recognise, shipped
from .errors import InputError

CONTAINERS: Final = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        #  keys begin with                                                       what is inside
        (r"model\.diffusion_model\.|diffusion_model\.", "denoiser"),
        (r"(?P<name>unet|transformer(?:_\d)?|prior|decoder|controlnet)/", "denoiser"),
        (r"cond_stage_model\.(?:transformer|model)\.", "te"),
        (r"conditioner\.embedders\.(?P<zero>\d+)\.(?:transformer|model)\.", "te"),
        (r"conditioner\.conditioners\.prompt\.(?:model\.)?", "te"),
        (r"text_encoders\.\w+\.(?:logit_scale|spiece_model|tokenizer)", "other"),
        (r"text_encoders\.(?P<id>\w+)\.(?:transformer\.)?", "te"),
        (r"text_encoder(?:_(?P<one>\d+))?[./](?:model\.(?=diffusion|text))?", "te"),
        (r"first_stage_model\.|vae[./]|vqgan[./]|pretransform\.model\.", "vae"),
        (
            r"(?P<name>image_encoder|safety_checker|connectors|text_conditioner|scheduler)[./]",
            "other",
        ),
        (r"model_ema\.", "ignored"),
    )
)
"""Prefixes that say what a network is, whatever its keys."""

LOOSE: Final = (
    "",
    "model.model.",
    "net.",
    "model.",
    "transformer.",
    "unet.",
    "prior.",
    "vit.",
    "bert.",
)
"""Prefixes that only count if a known model is under them: many models have such a level of their own."""

CLIP_WIDTHS: Final = {768: "clip_l", 1024: "clip_h", 1280: "clip_g"}
ENCODER_IDS: Final = {
    "t5xxl": "t5",
    "t5base": "t5",
    "pile_t5xl": "t5",
    "umt5xxl": "t5",
    "mt5xl": "t5",
}

UNSURE: Final = ("clip", "unknown")
"""Kinds of encoders that nothing but their place in the checkpoint tells apart."""


def components(shapes: Mapping[str, Shape], config: Mapping[str, Any], extra: Architecture | None) -> list[Component]:
    """All networks of a base, the denoiser (or only network) first; name tables not built yet."""
    found: dict[tuple[str, str], Component] = {}
    numbers: dict[str, int] = {}
    loose: dict[str, str] = {}
    for key in shapes:
        for pattern, role in CONTAINERS:
            if m := pattern.match(key):
                prefix = m[0]
                if (role, prefix) not in found:
                    named = m.groupdict()
                    label = named.get("name") or role
                    kind = named.get("id") or ""
                    found[role, prefix] = Component(label, prefix, None, "as stored", {},
                                                    ENCODER_IDS.get(kind, kind))  # fmt: skip
                    numbers[prefix] = _number(named)
                found[role, prefix].keys[key[len(prefix) :]] = key
                break
        else:
            loose[key] = key
    made = [_identified(c, role, shapes, extra) for (role, _), c in found.items() if role != "ignored"]
    if loose:
        denoised = any(c.denoiser for c in made if c.label != "other")
        made.append(_rest(loose, shapes, config, extra, aside=denoised))
    if extra is not None and all(c.architecture is not extra for c in made):
        raise InputError(f"the map is for {extra.title}, which this base is not", str(extra.file),
                         "correct what it says under layouts, or leave --map out")  # fmt: skip
    made.sort(key=lambda c: not c.denoiser)  # stable
    _label(made, numbers)
    return made


def _number(named: Mapping[str, str | None]) -> int:
    """1 for the first text encoder; 0 where the prefix does not count."""
    if zero := named.get("zero"):
        return int(zero) + 1
    return int(named.get("one") or 0)


def _identified(component: Component, role: str, shapes: Mapping[str, Shape], extra: Architecture | None) -> Component:
    """The component with its architecture, kind and label filled in."""
    keys = component.keys

    def shape_of(body: str) -> Shape | None:
        key = keys.get(body)
        return None if key is None else shapes[key]

    among = [a for a in shipped() if _role(a) == role]
    if hit := _one(shape_of, among, extra):
        component.architecture, component.layout = hit
        if role == "denoiser" and component.label == "denoiser":
            component.label = hit[0].component
        component.kind = component.kind or kind_of(hit[0], component, shapes)
    elif component.label == "denoiser":
        component.label = "model"
    if role == "te" and not component.kind:
        component.kind = "unknown"
    return component


def _role(architecture: Architecture) -> str:
    if architecture.kind:
        return "te"
    return "vae" if architecture.component == "vae" else "denoiser"


def kind_of(architecture: Architecture, component: Component, shapes: Mapping[str, Shape]) -> str:
    """clip_l, clip_h or clip_g by the width of the embeddings; else what the architecture says."""
    if architecture.kind != "clip":
        return architecture.kind
    name = next((k for b, k in component.keys.items() if b.endswith("token_embedding.weight")), None)
    width = shapes[name][-1] if name else 0
    return CLIP_WIDTHS.get(width, "clip")


def _rest(
    loose: dict[str, str], shapes: Mapping[str, Shape], config: Mapping[str, Any],
    extra: Architecture | None, *, aside: bool,
) -> Component:  # fmt: skip
    """The component that the keys without a telling prefix make up; `aside` if there is a denoiser already."""
    for prefix in () if aside else LOOSE:

        def shape_of(body: str, prefix: str = prefix) -> Shape | None:
            return shapes.get(prefix + body)

        if hit := _one(shape_of, shipped(), extra):
            keys = {k.removeprefix(prefix): k for k in loose}
            made = Component(hit[0].component, prefix, *hit, keys)
            made.kind = kind_of(hit[0], made, shapes)
            return made
    title = str(next(iter(config.get("architectures") or ()), ""))
    made = Component("other" if aside else "model", "", None, "transformers" if title else "as stored", loose)
    heads = Counter(k.split(".", 1)[0] for k in loose)
    head, count = heads.most_common(1)[0]
    if count == len(loose) and len(heads) == 1 and f"{head}." in LOOSE:
        made.prefix, made.keys = f"{head}.", {k.removeprefix(f"{head}."): k for k in loose}
    return made


def _one(
    shape_of: Callable[[str], Shape | None],
    among: Sequence[Architecture],
    extra: Architecture | None,
) -> tuple[Architecture, str] | None:
    """The architecture that fits, the user's first. Two that fit would be a bug in our files: tests rule it out."""
    hits = recognise(shape_of, (extra,) if extra else ()) or recognise(shape_of, among)
    return hits[0] if len(hits) == 1 else None


def _label(made: Sequence[Component], numbers: Mapping[str, int]) -> None:
    """te, te1, te2 … by what the denoiser's architecture calls its encoders, else by their own numbers."""
    encoders = [c for c in made if c.kind]
    main = made[0].architecture if made and made[0].denoiser else None
    names = {kind: name for name, kind in reversed(list((main.text_encoders if main else {}).items()))}
    for order, c in enumerate(encoders, 1):
        number = numbers.get(c.prefix) or order
        c.label = names.get(c.kind) or ("te" if len(encoders) == 1 else f"te{number}")
