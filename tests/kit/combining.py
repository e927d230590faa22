"""Changes of one weight by several adapters, and one method that combines them."""

from __future__ import annotations

import torch

from lora_merge.engine.combination import combined
from lora_merge.merge_methods import MethodParameters

SHAPE = (12, 20)


def changes(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(count)]


def run(method: str, changes: list[torch.Tensor], strengths: list[float], **numbers: object) -> torch.Tensor:
    return combined(
        method,
        [t.clone() for t in changes],
        strengths,
        MethodParameters(**numbers),
        [f"seed {n}" for n in range(len(changes))],
    )  # type: ignore[arg-type]
