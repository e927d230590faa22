"""The folder of a PEFT adapter: `adapter_config.json` beside `adapter_model.safetensors`. No torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...disk.publish import replacing
from ...disk.writer import require_space
from ...files.headers import layout
from ..job import AdapterJob
from ..written import Entry

if TYPE_CHECKING:
    from ..converting import Made

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONTENTS: Final = (CONFIG, WEIGHTS)


def config(made: Sequence[Made], before: Mapping[str, Any]) -> dict[str, Any]:
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
        **({"lora_bias": True} if any(".lora_B.bias" in m.tensors for m in made) else {}),
    }  # fmt: skip


def write_folder(
    job: AdapterJob, inputs: Sequence[Path], own: Mapping[str, Any],
    content: tuple[Sequence[Entry], Mapping[str, str]], prove: Callable[[Path], None],
) -> int:  # fmt: skip
    """Write the folder under a temporary name, call `prove` with its path, and name it. Returns its bytes."""
    entries, told = content
    text = json.dumps(own, indent=2, sort_keys=True).encode()
    header = layout([(e.name, e.dtype, e.shape) for e in entries], told, 0)
    size = len(header) + sum(e.data.nbytes for e in entries) + len(text)
    with replacing(job.output, inputs, overwrite=job.inputs.overwrite, folder=True, contents=CONTENTS) as part:
        require_space(part, size)
        with (part / WEIGHTS).open("xb") as f:
            f.write(header)
            for e in entries:
                f.writelines(e.pieces())
        (part / CONFIG).write_bytes(text)
        prove(part)
    return size
