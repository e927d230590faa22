"""On a machine with CUDA: `python -m pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kit.cuda import expect_layers_rounded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ALL = ",".join(f"cuda:{n}" for n in range(torch.cuda.device_count()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"max_vram": "64MiB"}, {"device": ALL}], ids=["one", "bounded", "all"])
def test_layers_of_equal_shape_are_the_rounded_fp64_result(tmp_path: Path, dtype: str, options: dict[str, str]) -> None:
    expect_layers_rounded(tmp_path, dtype, options)
