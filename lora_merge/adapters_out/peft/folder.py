"""The folder of a PEFT adapter: `adapter_config.json` beside `adapter_model.safetensors`. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...errors import UsageError

if TYPE_CHECKING:
    from ..conversion.kept import Kept


BIASED: Final = "lora_bias"
"""The entry of PEFT's configuration that says whether up factors have biases."""


def expect_one(components: Iterable[str], what: str) -> None:
    """Raise UsageError for several components, which one folder cannot hold; `what` says where they are from."""
    found = sorted({*components})
    if len(found) > 1:
        raise UsageError(f"a folder of PEFT is for one component, {what} {', '.join(found)}", "--include",
                         f"choose one: --include {found[0]}")  # fmt: skip


def config(made: Sequence[Kept], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration: the most frequent rank, patterns for the others; only entries that PEFT 0.13 knows."""
    ranks = {m.place.module: m.layer.rank for m in made if m.layer.rank}
    usual = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {f"^{re.escape(name)}$": rank for name, rank in ranks.items() if rank != usual}
    whole = {m.place.module for m in made if not m.layer.rank}
    return {
        "peft_type": "LORA", "task_type": before.get("task_type"), "inference_mode": True,
        "base_model_name_or_path": before.get("base_model_name_or_path"), "revision": None,
        "r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others,
        "target_modules": sorted(ranks), "modules_to_save": sorted(whole - ranks.keys()) or None,
        "use_rslora": False, "use_dora": any("magnitude" in e for m in made for e in m.tensors), "bias": "none",
        "lora_dropout": 0.0, "fan_in_fan_out": any(m.place.view.row_slices[0].transposed for m in made),
        "init_lora_weights": True,
        **({BIASED: True} if any(".lora_B.bias" in m.tensors for m in made) else {}),
    }  # fmt: skip
