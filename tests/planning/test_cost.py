"""What a plan costs grows with the number of modules, whatever they are called: calls are counted, not seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lora_merge

from ..hostile_names import SHAPES, configured, flat, lora, some
from ..support import steps

LIMIT = 5_000  # bytes of each header
MOST = 2_100  # calls for one more module of any name, and for its tensors: 900 to 1830 today


def peft_names(kind: str) -> Iterator[str]:
    return (f"base_model.model.{n}" for n in SHAPES[kind]())


def planned(folder: Path, kind: str, limit: int = LIMIT) -> int:
    """The calls of a plan, or of its refusal, for a base and an adapter of PEFT with names of this kind."""
    stored = lora(peft_names(kind), limit, ".lora_B.weight", ".lora_A.weight")
    files = {"base": flat(some(SHAPES[kind](), limit)), **configured({"peft_type": "LORA", "r": 1}, stored)}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    def plan() -> None:
        with contextlib.suppress(lora_merge.MergeError):
            lora_merge.plan(folder / "base", folder / "a", output=folder / "out", unmatched="skip")

    return steps(plan)


def test_a_module_costs_as_much_whatever_it_is_called(tmp_path: Path) -> None:
    planned(tmp_path / "first", "layers")  # what is worked out once a process
    least = planned(tmp_path / "least", "layers", 400)
    for number, kind in enumerate(SHAPES):
        modules = len(some(peft_names(kind), LIMIT // 2, 90))
        assert planned(tmp_path / str(number), kind) - least < MOST * modules + 5_000, (kind, modules)
