"""`combine` of factors in 16 bits: without torch, with the numbers of numpy in fp64."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.factors import stacked
from lora_merge.adapters_out.values import Distinct, is_finite, narrowed, products
from lora_merge.errors import InputError, ResourceError, TooLarge
from tests.kit.cost import steps
from tests.kit.files import strays
from tests.kit.pairs import examples
from tests.kit.tensors import rand

SHAPES = {"lora_unet_a": (12, 7), "lora_unet_b": (5, 9), "lora_unet_c": (6, 4, 3, 3)}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def stored(path: Path, dtype: torch.dtype, rank: int, scale: float, seed: int) -> Path:
    found = {}
    for n, (name, shape) in enumerate(SHAPES.items()):
        ones = (1,) * len(shape[2:])
        found[f"{name}.lora_up.weight"] = (rand(shape[0], rank, *ones, seed=seed + n) * scale).to(dtype)
        found[f"{name}.lora_down.weight"] = rand(rank, *shape[1:], seed=seed + n + 50).to(dtype)
        found[f"{name}.alpha"] = torch.tensor(1.5)
    save_file(found, path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[Path, float]]]:
    yield [(stored(tmp_path / "a.safetensors", torch.float16, 2, 1.0, 1), 0.7),
           (stored(tmp_path / "b.safetensors", torch.float16, 3, 1.0, 9), -1.25)]  # fmt: skip


def deltas(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    tensors, found = {k: v.double().numpy() for k, v in load_file(path).items()}, {}
    for name in SHAPES:
        up, down = tensors[f"{name}.lora_up.weight"], tensors[f"{name}.lora_down.weight"]
        rank = len(down)
        found[name] = float(tensors[f"{name}.alpha"]) / rank * up.reshape(-1, rank) @ down.reshape(rank, -1)
    return found


def norm(change: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(change))


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5, 3e4])
@pytest.mark.parametrize("method", ["sum", "mean"])
def test_file_and_report_are_those_of_numpy_in_fp64(dtype: str, scale: float, method: str, tmp_path: Path) -> None:
    inputs = [stored(tmp_path / f"{n}.safetensors", DTYPES[dtype], n + 2, scale, 7 * n) for n in range(3)]
    weights = [0.7, -1.25, 0.1] if method == "sum" else [0.5, 1.0, 2.5]
    total = 1.0 if method == "sum" else sum(weights)
    out = tmp_path / "out.safetensors"
    report = lora_merge.combine([*zip(inputs, weights, strict=True)], out, method=method)
    output, changes = deltas(out), [deltas(path) for path in inputs]
    assert load_file(out).keys() == load_file(inputs[0]).keys()
    for name, change in output.items():
        terms = [(w / total) * c[name] for w, c in zip(weights, changes, strict=True)]
        exact = np.sum(terms, 0)
        size, residual = norm(exact), norm(change - exact) / norm(exact)
        assert residual < 2.0 ** -(11 if dtype == "fp16" else 8)
        layer, rank = report.layers[name], min(2 + 3 + 4, *exact.shape)
        assert layer == {
            "block": "denoiser BASE", "algorithm": "lora", "rank": rank, "rank_before": 4, "alpha": rank, "of": exact.size, "elements": exact.size,
            "norm": pytest.approx(size, rel=1e-5),
            "largest": pytest.approx(float(np.abs(exact).max()), rel=1e-5),
            "residual": pytest.approx(residual, rel=1e-2, abs=1e-6),
            "energy": pytest.approx(1 - residual**2, abs=1e-6),
            "adapters": [{"change": pytest.approx(abs(w) * norm(c[name]), rel=1e-5)}
                         for w, c in zip(weights, changes, strict=True)],
        }  # fmt: skip


def test_no_torch_is_imported(pair: list[tuple[Path, float]], tmp_path: Path) -> None:
    code = """
import sys, lora_merge
inputs, (first, _) = sys.argv[1:], sys.argv[1:]
reports = [lora_merge.combine(inputs, "c.safetensors"), lora_merge.combine(inputs, "d.safetensors", rank=2),
           lora_merge.combine(inputs, "e.safetensors", method="slerp", t=0.5, dtype="fp32"), lora_merge.resize(first, "f.safetensors", rank="energy:0.9"),
           lora_merge.resize(first, "g.safetensors", rank="size:200"), lora_merge.average([first, first], "h.safetensors"),
           lora_merge.average([first, first], "i.safetensors", space="factors")]
sys.exit("torch" in sys.modules or not all(report.verified["ok"] for report in reports))
"""
    ran = subprocess.run([sys.executable, "-c", code, *(str(path) for path, _ in pair)], cwd=tmp_path, check=False)
    assert ran.returncode == 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused_by_name(
    value: float, pair: list[tuple[Path, float]], tmp_path: Path
) -> None:
    held = load_file(pair[1][0])
    held["lora_unet_b.lora_up.weight"].view(-1)[-1] = value
    save_file(held, pair[1][0])
    with pytest.raises(InputError, match=r"NaN or infinite[\s\S]*lora_unet_b.lora_up.weight"):
        lora_merge.combine(pair, tmp_path / "c.safetensors")
    assert not strays(tmp_path)


def test_sum_beyond_the_dtype_and_a_device_that_is_not_there_are_refused(
    pair: list[tuple[Path, float]], tmp_path: Path
) -> None:
    with pytest.raises(TooLarge):
        lora_merge.combine([(pair[0][0], 1e30)], tmp_path / "c.safetensors")
    with pytest.raises(ResourceError):
        lora_merge.combine(pair, tmp_path / "c.safetensors", device="cuda:7")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_terms_that_cancel_are_left_to_the_general_way(pair: list[tuple[Path, float]], tmp_path: Path) -> None:
    """B and B plus a little, with down factors that differ in one number."""
    held = load_file(pair[0][0])
    held["lora_unet_a.lora_down.weight"][0, 0] += 2.0**-9
    save_file(held, tmp_path / "b.safetensors")
    report = lora_merge.combine([(pair[0][0], 1), (tmp_path / "b.safetensors", -1)], tmp_path / "c.safetensors")
    assert report.layers.keys() == {"lora_unet_a"}
    wanted = deltas(pair[0][0])["lora_unet_a"] - deltas(tmp_path / "b.safetensors")["lora_unet_a"]
    assert report.layers["lora_unet_a"]["norm"] == pytest.approx(float(np.linalg.norm(wanted)), rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(
    arrays.arrays(
        np.float32, 6, elements=st.floats(-70000, 70000, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)
    )
)
def test_numbers_are_rounded_to_the_nearest_of_16_bits(numbers: np.ndarray[Any, Any]) -> None:
    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        wanted = torch.from_numpy(numbers).to(kind)
        found = narrowed(numbers, dtype)
        assert is_finite(found, dtype) == bool(wanted.isfinite().all())
        assert torch.equal(torch.from_numpy(found).view(kind), wanted)


@pytest.mark.parametrize("weight", [1.0, 0.5, -0.7, 1e-3, 3.0, 0.0])
def test_products_are_looked_up_by_the_bits_of_a_number(weight: float) -> None:
    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        every = torch.arange(2**16).to(torch.uint16).view(kind)
        wanted = (every.double() * weight).float().to(kind)
        found = torch.from_numpy(products(dtype, weight)).view(kind)
        assert torch.equal(found[every.isfinite()], wanted[every.isfinite()])


@pytest.mark.parametrize("command", ["combine", "convert"])
def test_disk_without_room_is_reported_before_anything_is_computed(
    command: str, pair: list[tuple[Path, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_merge.disk.writer.free_bytes", lambda _: 10)
    stages: list[str] = []
    given: Any = pair if command == "combine" else pair[0][0]
    options: dict[str, Any] = {} if command == "combine" else {"dtype": "bf16"}
    with pytest.raises(ResourceError, match=r"no space left on the disk: .* needed, 10 B free"):
        getattr(lora_merge, command)(given, tmp_path / "c.safetensors", **options,
                                     progress=lambda step: stages.append(step.stage))  # fmt: skip
    assert "make" not in stages
    assert not strays(tmp_path)


def test_equal_factors_share_their_rows_and_the_product_is_the_sum() -> None:
    rights = [rand(2, 6, seed=n).double() for n in range(40)]
    factors = [(rand(8, 2, seed=n).double(), rights[n % 40].clone()) for n in range(60)]
    left, right = stacked(factors)
    assert len(right) == 80
    np.testing.assert_allclose(left @ right, sum(a @ b for a, b in factors), rtol=1e-7, atol=1e-7)
    distinct, data = Distinct(), memoryview(bytes(range(12)))
    assert [distinct.first(n, data, shape) for n, shape in enumerate(((2, 6), (6, 2), (2, 6)))] == [0, 1, 0]


def test_equal_factors_are_found_in_linear_time() -> None:
    def search(count: int) -> int:
        factors = [memoryview(bytes([n % 256, n // 256]) * 6) for n in range(count)]
        distinct = Distinct()
        return steps(lambda: [distinct.first(n, factor, (2, 6)) for n, factor in enumerate(factors)])

    assert search(800) < 2.1 * search(400)
