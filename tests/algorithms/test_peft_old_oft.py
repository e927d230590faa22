"""Files of OFT as PEFT 0.13, 0.15 and 0.17 wrote them, against their forward passes, written down here anew.

The installed PEFT cannot read these files; the originals (0.13.2, 0.15.2, 0.17.1) were asked once, and their forward
passes are those of the weights merged here to 3e-7 in float32, but for 0.17.1 on kernels, as in later versions. Dense block-diagonal matrices and a power series, unlike the formulas.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import lora_merge


def cayley(skew: Tensor) -> Tensor:
    """(I − S)(I + S)⁻¹ of one block."""
    eye = torch.eye(len(skew), dtype=skew.dtype)
    return (eye - skew) @ torch.linalg.inv(eye + skew)


def bounded(x: Tensor, limit: float) -> Tensor:
    return x if x.norm() <= limit else limit * x / x.norm()


def whole(x: Tensor, count: int, limit: float) -> Tensor:
    """diag(R) of the first two generations; X is bounded before it is made skew."""
    x = x.expand(count, *x.shape[1:])
    blocks = [bounded(b, limit) for b in x]
    return torch.block_diag(*[cayley((b - b.T) / 2) for b in blocks])


def saved(at: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    save_file({f"base_model.model.m.{k}": v.float() for k, v in tensors.items()}, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT", **config}))
    return at


def ours(weight: Tensor, folder: Path) -> Tensor:
    merged = lora_merge.merge_state_dict({"m.weight": weight}, folder, compute_dtype="fp64")
    return merged["m.weight"]


CONSTRAINTS = [{}, {"coft": True, "eps": 0.003}]


@pytest.mark.parametrize("told", CONSTRAINTS, ids=["free", "constrained"])
@pytest.mark.parametrize(("shape", "r", "shared"), [
    ((24, 10), 4, False), ((24, 10), 4, True), ((22, 10), 4, False), ((24, 4, 3, 3), 4, False),
])  # fmt: skip
def test_first_generation_turns_outputs(
    shape: tuple[int, ...], r: int, shared: bool, told: dict[str, Any], tmp_path: Path,  # noqa: FBT001
) -> None:  # fmt: skip
    out, size = shape[0], math.ceil(shape[0] / r)
    weight = torch.randn(shape, dtype=torch.float64)
    x = (torch.randn(1 if shared else r, size, size) * 0.3).double()
    limit = told.get("eps", math.inf) * size**2 / math.sqrt(len(x))
    rotation = whole(x, r, limit)[:out, :out]
    want = (rotation.T @ weight.flatten(1)).reshape(shape)
    got = ours(weight, saved(tmp_path, {"oft_r": x}, r=r, block_share=shared, **told))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got, weight, atol=1e-3)


@pytest.mark.parametrize("told", CONSTRAINTS, ids=["free", "constrained"])
@pytest.mark.parametrize(("shape", "r", "shared"), [
    ((10, 24), 4, False), ((10, 24), 4, True), ((10, 4, 3, 2), 4, False),
])  # fmt: skip
def test_second_generation_turns_inputs_and_scales_outputs(
    shape: tuple[int, ...], r: int, shared: bool, told: dict[str, Any], tmp_path: Path,  # noqa: FBT001
) -> None:  # fmt: skip
    size = math.prod(shape[1:]) // r
    weight = torch.randn(shape, dtype=torch.float64)
    x = (torch.randn(1 if shared else r, size, size) * 0.3).double()
    rows = (1 + torch.randn(shape[0], 1) * 0.1).double()
    limit = told.get("eps", math.inf) * math.ceil(shape[0] / r) ** 2 / math.sqrt(len(x))
    want = ((weight.flatten(1) @ whole(x, r, limit).T) * rows).reshape(shape)
    got = ours(weight, saved(tmp_path, {"oft_r": x, "oft_s": rows}, r=r, block_share=shared, **told))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.few(9)
@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("version", ["0.16.0", "0.17.1", None])
def test_third_generation_doubles_the_last_term(terms: int, version: str | None, tmp_path: Path) -> None:
    weight = torch.randn(10, 24, dtype=torch.float64)
    triangle = (torch.randn(4, 15) * 0.1).double()
    blocks = []
    for row in triangle:
        skew = torch.zeros(6, 6, dtype=torch.float64)
        skew[tuple(torch.triu_indices(6, 6, 1))] = row
        skew = skew - skew.T
        blocks.append(
            torch.eye(6, dtype=torch.float64) + sum(2 * torch.linalg.matrix_power(skew, k) for k in range(1, terms))
        )
    want = weight @ torch.block_diag(*blocks).T
    told = {"use_cayley_neumann": True, "num_cayley_neumann_terms": terms, "peft_version": version}
    got = ours(weight, saved(tmp_path, {"oft_R.weight": triangle}, r=0, **told))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
