"""The plain fp64 arithmetic that results are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kit.adapters import kohya_names
from tests.kit.tensors import Tensors, ulp


def lora_delta(tensors: Tensors, name: str, alpha: float | None = None) -> Tensor:
    """α / r · B A in fp64, flattened to [out, cols]."""
    up = tensors[f"{name}.lora_up.weight"].double().flatten(1)
    down = tensors[f"{name}.lora_down.weight"].double().flatten(1)
    alpha = float(tensors[f"{name}.alpha"]) if alpha is None else alpha
    return alpha / down.shape[0] * (up @ down)


def expected(base: Tensors, adapters: list[tuple[Tensors, float]]) -> Tensors:
    """The merged checkpoint in fp64."""
    names = {key: name for name, key in kohya_names(base).items()}
    merged = {}
    for key, weight in base.items():
        exact = weight.double() if weight.is_floating_point() else weight
        for tensors, strength in adapters:
            if f"{names.get(key)}.lora_up.weight" in tensors:
                exact = exact + strength * lora_delta(tensors, names[key]).reshape(weight.shape)
        merged[key] = exact
    return merged


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """interface.md, accuracy: 16-bit outputs differ from the rounded fp64 value in 0.1 % at most, by one ulp at most; a
    number that is left of larger ones, which cancel, has the digits of these in fp32, on each processor other ones."""
    if not got.is_floating_point():
        assert torch.equal(got, exact)
    elif got.dtype.itemsize >= 4:
        assert (got.double() - exact).abs().max() <= 2e-6 * exact.abs().max()
    else:
        rounded = exact.float().to(got.dtype)
        differ = got != rounded
        assert differ.sum() <= max(1, got.numel() // 1000)
        room = ulp(rounded) + 2**-22 * exact.abs().max()
        near = (got.double() - exact).abs() <= 1.01 * (rounded.double() - exact).abs() + room
        assert bool(near.all())
