"""On a machine with CUDA: `python -m pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lora_merge

from ..support import assert_rounded, load, rand, save
from .test_cuda import close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ALL = ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"max_vram": "64MiB"}, {"device": ALL}], ids=["one", "bounded", "all"])
def test_many_layers_of_equal_shape_are_the_rounded_fp64_result(
    tmp_path: Path, dtype: str, options: dict[str, str]
) -> None:
    base = {f"layer.{n}.weight": rand(300, 200 + n % 3, seed=n).to(torch.float16) for n in range(40)}
    adapter = {}
    for n in range(40):
        adapter[f"layer.{n}.lora_up.weight"] = rand(300, 8, seed=n)
        adapter[f"layer.{n}.lora_down.weight"] = rand(8, 200 + n % 3, seed=n)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        given = {"device": "cuda", **options}
        files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
        report = lora_merge.merge(*files, tmp_path / "o", dtype=dtype, **given)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert report.device.startswith("cuda") and not report.notes, "nothing was folded elsewhere"
    merged, exact = load(tmp_path / "o"), dict[str, torch.Tensor]()
    for n in range(40):
        up, down = adapter[f"layer.{n}.lora_up.weight"].double(), adapter[f"layer.{n}.lora_down.weight"].double()
        exact[f"layer.{n}.weight"] = base[f"layer.{n}.weight"].double() + up @ down
    if dtype == "fp32":
        for key, value in exact.items():
            assert_rounded(merged[key], value)
    else:
        close(merged, {key: value.float() for key, value in exact.items()})
