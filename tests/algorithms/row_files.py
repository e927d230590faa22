"""A base and an adapter as files for every row of ALGORITHMS: two modules of that kind, as trainers name their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_merge.adapters.peft.methods import MLX, PEFT_METHODS, SHARED_SLOTS_OF_ROW
from lora_merge.adapters.suffixes import SUFFIXES
from lora_merge.algorithms import ALGORITHMS
from lora_merge.job import Job, make_job
from tests.algorithms.adapter_examples import Example
from tests.algorithms.peft_examples import ALL_EXAMPLES

MODULES = ("m.layers.0.a", "m.layers.1.a")

PEFT: Mapping[str, dict[str, Any]] = {
    "lora_bias": {"peft_type": "BEFT"},
    "lora_experts": {"peft_type": "LORA", "r": 2, "target_parameters": ["a.weight"]},
    "lora_experts_transposed": {
        "peft_type": "LORA",
        "r": 2,
        "target_parameters": ["a.weight"],
        "base_model_name_or_path": "gpt_oss",
    },
    "bdlora": {"use_bdlora": {"nblocks": 2}},
    **{name: {"init_lora_weights": name} for name in ("pissa", "olora")},
    "kasa": {"kasa_config": {"beta": 0.1}},
    "adalora": {"init_r": 3, "lora_alpha": 6},
    "peft_ia3_out": {"feedforward_modules": []},
    "peft_ia3_in": {"feedforward_modules": ["a"]},
    **{row: {"use_cayley_neumann": True} for row in ("peft_oft", "peft_oft_embedding")},
    "road": {"group_size": 4},
    "peanut": {"scaling": 1.0},
    "tinylora": {"weight_tying": 0.5},
    "lora_embedding": {"r": 3},
}
"""Row → what the configuration says beside the peft_type."""

PLAIN = frozenset({"lora", "lora_sparse", "lora_sparse_tucker", "loha", "lokr"})
"""Rows that PEFT has too, and other trainers write without a configuration."""

STATED: Mapping[str, dict[str, Any]] = {
    "lora_fused": {"parts": ((0, 6), (12, 16)), "lora_alpha": 6.0},
    "lora_transposed": {"lora_alpha": 6.0},
    "lora_switch": {"lora_alpha": 6.0},
    "tlora": {"algo": "tlora"},
}
"""Row → settings that the user states, because no file tells them."""

ENDINGS: Mapping[tuple[str, str], str] = {
    **{
        (row, slot): f".lora_{x}.weight"
        for row in ("pissa", "olora", "kasa", "bdlora", "lora_experts_transposed")
        for slot, x in (("up", "B"), ("down", "A"))
    },
    ("lora_bias", "diff"): ".beft_bias",
    **{("full_rank", slot): ending for slot, ending in {"down": ".lora_down.weight"}.items()},
    **{("lora_switch", slot): f".lora_{x}" for slot, x in (("up", "b"), ("down", "a"))},
    **{("lora_transposed", slot): f".lora_{x}" for slot, x in (("up", "b"), ("down", "a"))},
    **{("lora_fused", slot): f".lora_{x}" for slot, x in (("up", "B"), ("down", "A"))},
}
"""(row, slot) → its ending, where the table has several that other rows have too."""


EXAMPLES = {"lora_experts_transposed": Example("square", (3, 8, 8), {"up": (8, 6), "down": (6, 8)})}
"""Where the first example of a row is read as another one from a file."""


def kind(row: str) -> str:
    """The peft_type of a row's files; "" for those of other trainers."""
    if row in PLAIN:
        return ""
    return str(
        PEFT.get(row, {}).get("peft_type")
        or next((m.name for m in PEFT_METHODS.values() if row in m.algorithms and m.name != MLX), "")
    )


def write(row: str, folder: Path) -> Job:
    """The job that merges two modules of this row, each with numbers of its own."""
    example, told, stated = EXAMPLES.get(row) or ALL_EXAMPLES[row][0], kind(row), STATED.get(row, {})
    parameter = "bias" if len(example.target) == 1 else "weight"
    base, adapter = {}, {}
    for n, module in enumerate(MODULES):
        weight, stored = example.layer(torch.Generator().manual_seed(n), torch.float32)
        beside = {slot: of for slot, of in ALGORITHMS[row].base_slots.items() if slot in stored}
        base[f"{module}.weight"] = (
            stored["weight"] if "weight" in beside else weight if parameter == "weight" else torch.ones(len(weight), 3)
        )
        if parameter == "bias" or "bias" in beside:
            base[f"{module}.bias"] = weight if parameter == "bias" else stored["bias"]
        for slot, tensor in stored.items():
            if slot not in beside and not _is_rebuilt(row, slot):
                adapter[_key(row, slot, module, peft=bool(told))] = tensor.contiguous()
    save_file(base, folder / "base.safetensors")
    path = _save(adapter, told, example, row, folder)
    return make_job(folder / "base.safetensors", [path], folder / "out.safetensors", setting=stated)


def _is_rebuilt(row: str, slot: str) -> bool:
    """Whether no file has it: PEFT makes it when it loads the adapter."""
    return (row, slot) in {("adamss", "order"), ("psoft", "left"), ("psoft", "right")}


def _key(row: str, slot: str, module: str, *, peft: bool) -> str:
    """The name that a slot's tensor has in a file."""
    if slot in SHARED_SLOTS_OF_ROW.get(row, {}):
        return "base_model." + SHARED_SLOTS_OF_ROW[row][slot].format(kind="a", group=0)
    prefix = "base_model.model." if peft else ""
    if (row, slot) in ENDINGS:
        return prefix + module + ENDINGS[row, slot]
    endings = [s.ending for s in SUFFIXES if s.slot == slot and row in s.algorithms]
    named = [e for e in endings if peft == any(word in e for word in ("lora_A", "lora_B", "glora", "beft"))]
    return prefix + module + (named or endings)[0]


def _save(adapter: dict[str, Tensor], told: str, example: Example, row: str, folder: Path) -> Path:
    if not told:
        save_file(adapter, folder / "adapter.safetensors")
        return folder / "adapter.safetensors"
    (folder / "adapter").mkdir()
    save_file(adapter, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": told, **PEFT.get(row, {})}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder / "adapter"
