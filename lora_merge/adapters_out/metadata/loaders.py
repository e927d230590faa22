"""`lora_adapter_metadata`: what diffusers' loader takes for the configuration of an adapter, instead of looking at its
tensors. Fact: diffusers 0.42, loaders/lora_base.py and utils/peft_utils.py."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

BIASED: Final = "lora_bias"
"""The entry of PEFT's configuration that says whether up factors have biases."""

COMPONENT: Final = re.compile(r"(unet|transformer(?:_2)?|text_encoder(?:_[23])?)\.(.+)\.(lora_[AB]\.weight|lora_B\.bias"
                              r"|lora_magnitude_vector)")  # fmt: skip
"""Keys of diffusers' dialect: component, module, tensor."""


CLIP_LEVEL: Final = "text_model."
"""The level of the layers of CLIP that transformers has until 5.5. diffusers takes it from keys where the encoder lacks
it, but not from this entry; PEFT finds a target without it by the end of its name."""


class Named(Protocol):
    """One tensor of a file."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def adapter_metadata(tensors: Iterable[Named]) -> str:
    """Return the entry for a file in diffusers' dialect, where α is the rank; "" for another file."""
    parts_of: dict[str, dict[str, int]] = {}
    more: dict[str, set[str]] = {}
    for tensor in tensors:
        if (m := COMPONENT.fullmatch(tensor.name)) is None:
            return ""
        more.setdefault(m[1], set()).add(m[3])
        if m[3] == "lora_A.weight":
            parts_of.setdefault(m[1], {})[m[2]] = tensor.shape[0]
    parts = ((part, _config(ranks, more[part])) for part, ranks in parts_of.items())
    return json.dumps(dict(_prefixed(parts)), sort_keys=True) if parts_of else ""


def _config(ranks: dict[str, int], kinds: set[str]) -> dict[str, Any]:
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {_pattern(name): rank for name, rank in ranks.items() if rank != usual}
    targets = sorted(name.removeprefix(CLIP_LEVEL) for name in ranks)
    return {"r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others,
            "target_modules": targets, "use_dora": "lora_magnitude_vector" in kinds,
            BIASED: "lora_B.bias" in kinds}  # fmt: skip


def _pattern(name: str) -> str:
    """Return the pattern of a module with or without the level."""
    level = f"(?:{re.escape(CLIP_LEVEL)})?" if name.startswith(CLIP_LEVEL) else ""
    return f"^{level}{re.escape(name.removeprefix(CLIP_LEVEL))}$"


def _prefixed(parts: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    for part, config in parts:
        yield from ((f"{part}.{name}", value) for name, value in config.items())
