"""Prefixes of an adapter's module names, the network that each prefix means, and the levels that training leaves in a
base's names (wrappers). Tables; no torch.

Every tool has its own prefix, and some tools add theirs to another's, so prefixes are removed in any order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from ..files.folder_layouts import PEFT_PREFIX
from ..text import NUMBER, Note, listed

TRAINING_WRAPPERS: Final = r"(?:_forward_module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)"
"""Levels of wrappers around layers (DeepSpeed, torch.compile, FSDP), left in states that were gathered by hand."""

PREFIXES: Final = (
    # prefix                       network
    ("lora_unet_",                 "denoiser"),  # kohya, musubi, OneTrainer
    ("lora_unet__",                "denoiser"),  # Wan-Fun
    ("oft_unet_",                  "denoiser"),
    ("lora_transformer_",          "denoiser"),  # OneTrainer, ai-toolkit
    ("lora_prior_unet_",           "prior"),  # Stable Cascade
    ("lora_prior_te_",             "te"),
    ("lora_te_",                   "te"),
    ("lora_te1_",                  "te1"),
    ("lora_te2_",                  "te2"),
    ("lora_te3_",                  "te3"),
    ("lora_te4_",                  "te4"),
    ("lora_vae_",                  "vae"),
    ("lycoris_",                   "any"),  # whatever LyCORIS wrapped
    ("unet.",                      "denoiser"),
    ("transformer.",               "transformer"),
    ("transformer_2.",             "transformer_2"),
    ("prior.",                     "prior"),
    ("model.diffusion_model.",     "denoiser"),
    ("diffusion_model.",           "denoiser"),
    ("conditional_transformer.",   "denoiser"),
    ("connectors.",                "denoiser"),  # LTX-2 in diffusers, pipelines/ltx2/connectors.py
    ("net.",                       "denoiser"),
    ("pipe.dit.",                  "denoiser"),  # DiffSynth-Studio, which has an option to omit it
    ("pipe.unet.",                 "denoiser"),
    ("pipe.vace.",                 "denoiser"),  # Wan's, a network of its own there
    ("text_encoder.",              "te1"),
    ("text_encoder_2.",            "te2"),
    ("text_encoder_3.",            "te3"),
    ("text_encoder_4.",            "te4"),
    ("vae.",                       "vae"),
    ("first_stage_model.",         "vae"),
    (PEFT_PREFIX,                         "any"),
    ("base_model.",                "any"),
    ("model.",                     "any"),
    ("model_",                     "any"),
)  # fmt: skip
"""Prefixes of adapter names; several may follow each other, in any order."""

_BY_START: Final = {start: tuple((p, h) for p, h in PREFIXES if p[0] == start) for start in {p[0] for p, _ in PREFIXES}}

_STARTS: Final = (*(prefix for prefix, _ in PREFIXES), "text_encoders.")
"""What every name with a prefix begins with: a fast first test."""

MOST_READINGS: Final = 32
"""The most readings of one name; real names have at most six."""

ENCODER: Final = re.compile(r"text_encoders\.(\w+)\.(?:transformer\.)?")
"""ComfyUI's prefix of a text encoder, with the encoder's own name."""

DENOISERS: Final = ("denoiser", "transformer", "transformer_2", "prior")
"""Networks that are denoisers. A name for one of these means the only denoiser of a base; `transformer_2` does not."""

COMPONENTS: Final = {
    hint: [
        prefix[:-1]
        for prefix, network in PREFIXES
        if network == hint or (hint in ("any", "denoiser") and network in DENOISERS) or (hint, network) == ("te", "te1")
    ]
    for hint in ("any", *dict(PREFIXES).values())
}
"""Network that a name means → possible names of that component in a pipeline of diffusers."""

WRAPPER_SIGNS: Final = ("_wrapped_module.", "_orig_mod.", "_forward_module.", "module.", "base_layer.", PEFT_PREFIX)
"""Texts of which every name with a wrapper contains one: a fast first test."""

_LEVEL: Final = re.compile(rf"^{re.escape(PEFT_PREFIX)}|(?:(?<=\.)|^)(?:{TRAINING_WRAPPERS}|module|base_layer)\.")

LEVELS_LEFT: Final = (
    "its names contain levels that training leaves ({levels}): modules are found without them, and they stay; a "
    "program that cannot load the base for its names (from_pretrained) cannot load the result either"
)
ATTACHED: Final = (
    "it was saved with an adapter attached: {count} tensors of that adapter ({names}) are copied and not merged; a "
    "program that loads them adds their effect; without another adapter a merge of this model applies it"
)


@lru_cache(maxsize=2**14)
def prefixed(name: str) -> tuple[tuple[str, str], ...]:
    """Return (network that the prefix means, rest) for the name itself and with known prefixes removed."""
    readings: list[tuple[str, str]] = []
    pending: list[tuple[str, str]] = [("any", name)]
    for at in range(MOST_READINGS):
        if at == len(pending):
            break
        hint, body = pending[at]
        if (hint, body) in pending[:at]:
            continue
        readings.append((hint, body))
        for prefix, network in _BY_START.get(body[:1], ()):
            if body.startswith(prefix):
                pending.append((network if network != "any" else hint, body[len(prefix) :]))
        if m := ENCODER.match(body):
            pending.append((f"={m[1]}", body[m.end() :]))
    return tuple(readings)


@lru_cache(maxsize=2**14)
def innermost(name: str) -> tuple[str, str]:
    """Return (network, rest) of a name without any of its prefixes."""
    if not name.startswith(_STARTS):
        return "any", name
    readings = prefixed(name)
    return max((hint for hint, _ in readings), key=lambda hint: hint != "any"), min((b for _, b in readings), key=len)


def numbers(prefixes: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of the numbers of layers in names: all numbers but those in a prefix (`te1`)."""
    patterns = {
        f"(?<!{re.escape(prefix[: m.start()])})" if m.start() else f"(?!{re.escape(prefix)})"
        for prefix in (*prefixes, "text_encoders.0.")
        for m in NUMBER.finditer(prefix)
    }
    return re.compile("(?=[0-9])" + "".join(sorted(patterns)) + NUMBER.pattern)  # the first test decides fast


def unwrapped(keys: Iterable[str]) -> dict[str, str]:
    """Return name without wrappers → key; empty if no key has a wrapper, or if two keys would get the same name."""
    every = list(keys)
    text = "\n".join(every)
    if not any(level in text for level in WRAPPER_SIGNS):
        return {}
    inner = {_LEVEL.sub("", key): key for key in every}
    return inner if len(inner) == len(every) and any(name != key for name, key in inner.items()) else {}


def wrapper_notes(stored: Mapping[str, str]) -> Sequence[Note]:
    """Return notes for the user on a base with wrappers. `stored`: name without wrappers → key."""
    levels = {level.rstrip(".") for key in stored.values() for level in _LEVEL.findall(key)}
    notes = [Note(LEVELS_LEFT.format(levels=listed(sorted(levels))))]
    if "base_layer" in levels:
        layers = {key.partition(".base_layer.")[0] for key in stored.values() if ".base_layer." in key}
        left = [key for key in stored.values() if _is_attached(key, layers)]
        if left:
            notes.append(Note(ATTACHED.format(count=len(left), names=listed(left, 2))))
    return notes


def _is_attached(key: str, layers: Collection[str]) -> bool:
    """Return whether a tensor is in a wrapped layer next to the layer itself, as an attached adapter does."""
    parts = key.split(".")
    inside = any(".".join(parts[:i]) in layers for i in range(1, len(parts)))
    return inside and ".base_layer." not in key
