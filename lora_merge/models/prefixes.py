"""What the first part of an adapter's module names says: which network they speak of. Tables; no torch.

Every tool has its own prefix, and some put theirs before another's, so what is taken off is tried in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from ..files.layouts import PEFT
from ..text import NUMBER

TRAINING: Final = r"(?:_forward_module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)"
"""Levels that training puts around layers (DeepSpeed, torch.compile, FSDP); they stay in states gathered by hand."""

PREFIXES: Final = (
    # names begin with             and speak of
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
    ("net.",                       "denoiser"),
    ("pipe.dit.",                  "denoiser"),  # DiffSynth-Studio, which leaves out what it is told to
    ("pipe.unet.",                 "denoiser"),
    ("pipe.vace.",                 "denoiser"),  # Wan's, a network of its own there
    ("text_encoder.",              "te1"),
    ("text_encoder_2.",            "te2"),
    ("text_encoder_3.",            "te3"),
    ("text_encoder_4.",            "te4"),
    ("vae.",                       "vae"),
    ("first_stage_model.",         "vae"),
    (PEFT,                         "any"),
    ("base_model.",                "any"),
    ("model.",                     "any"),
    ("model_",                     "any"),
)  # fmt: skip
"""Containers of adapter names (adapter-formats.md, section 1.1); taken off again and again, in any order."""

_BY_START: Final = {start: tuple((p, h) for p, h in PREFIXES if p[0] == start) for start in {p[0] for p, _ in PREFIXES}}

MOST_READINGS: Final = 32
"""Ways to take prefixes off one name; real names need six."""

ENCODER: Final = re.compile(r"text_encoders\.(\w+)\.(?:transformer\.)?")
"""ComfyUI's container of a text encoder, by the encoder's own name."""

DENOISERS: Final = ("denoiser", "transformer", "transformer_2", "prior")
"""What names may speak of that is a denoiser; all but the last expert may be the only one."""

COMPONENTS: Final = {
    hint: [
        prefix[:-1]
        for prefix, theirs in PREFIXES
        if theirs == hint or (hint in ("any", "denoiser") and theirs in DENOISERS) or (hint, theirs) == ("te", "te1")
    ]
    for hint in ("any", *dict(PREFIXES).values())
}
"""What a name speaks of → what a pipeline of diffusers may call that part."""


def prefixed(name: str) -> Iterator[tuple[str, str]]:
    """(what it speaks of, the rest) for the name as it is and with known prefixes taken off."""
    pending: list[tuple[str, str]] = [("any", name)]
    for at in range(MOST_READINGS):
        if at == len(pending):
            return
        hint, body = pending[at]
        if (hint, body) in pending[:at]:
            continue
        yield hint, body
        for prefix, speaks_of in _BY_START.get(body[:1], ()):
            if body.startswith(prefix):
                pending.append((speaks_of if speaks_of != "any" else hint, body[len(prefix) :]))
        if m := ENCODER.match(body):
            pending.append((f"={m[1]}", body[m.end() :]))


def numbers(prefixes: Iterable[str]) -> re.Pattern[str]:
    """Returns the pattern of the numbers by which names differ that are read alike: none that stands in a prefix."""
    kept = {
        f"(?<!{re.escape(prefix[: m.start()])})" if m.start() else f"(?!{re.escape(prefix)})"
        for prefix in (*prefixes, "text_encoders.0.")
        for m in NUMBER.finditer(prefix)
    }
    return re.compile("".join(sorted(kept)) + NUMBER.pattern)
