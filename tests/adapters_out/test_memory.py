"""Memory: the changes of one large layer are never in memory as a whole, and no byte depends on the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lora_merge.adapters_out.form import svd_bytes
from lora_merge.adapters_out.rank_rules import Rule
from tests.kit.tensors import rand

OUT, COLS = 3072, 768
MOST = 2 * OUT * COLS * 8 // 2**20
"""MiB of two changes in fp64, in which the output and what waits are too."""

CODE = """if True:
    import json, re, sys
    from pathlib import Path
    import lora_merge, torch
    import lora_merge.adapters_out.combine, lora_merge.adapters_out.matrix_modules, lora_merge.adapters_out.extract.run
    status = Path("/proc/self/status")
    peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1]) >> 10
    now = lambda: int(re.search(r"VmRSS:\\s+(\\d+)", status.read_text())[1]) >> 10
    folder = Path(sys.argv[1])
    torch.linalg.eigh(torch.randn(64, 64) @ torch.randn(64, 64))
    path = lambda one: str(folder / f"{one}.safetensors")
    told = {}
    for name, (command, given, options) in json.loads(sys.argv[2]).items():
        given = [[path(n) for n in one] if isinstance(one, list) else path(one) for one in given]
        run = lambda to, limit: getattr(lora_merge, command)(
            *given, path(to), max_memory=limit, device="cpu", overwrite=True, **options)
        Path("/proc/self/clear_refs").write_text("5")  # the peak until now is forgotten
        before = now()
        run("small", "32MiB")
        grown = peak() - before
        run("large", "1GiB")
        told[name] = grown, Path(path("small")).read_bytes() == Path(path("large")).read_bytes()
    print(json.dumps(told))
"""
"""A process of its own: how much memory each run takes, and whether its bytes are those of a run with more memory."""

PAIR = ["a", "b"]
THIN = {"density": 0.5, "algorithm": "full"}
RUNS: dict[str, tuple[str, list[object], dict[str, object]]] = {
    "sum": ("combine", [PAIR], {"algorithm": "full"}),
    "ties": ("combine", [PAIR], {"method": "ties", **THIN}),
    "breadcrumbs": ("combine", [PAIR], {"method": "breadcrumbs", "gamma": 0.1, **THIN}),
    "della": ("combine", [PAIR], {"method": "della", "epsilon": 0.1, **THIN}),
    "karcher": ("combine", [PAIR], {"method": "karcher", "algorithm": "full"}),
    "ties, rank": ("combine", [PAIR], {"method": "ties", "density": 0.5, "rank": 4}),
    "a whole change": ("convert", ["full"], {"algorithm": "full", "dtype": "fp16"}),
    "convert": ("convert", ["a"], {"algorithm": "full"}),
    "resize": ("resize", ["full"], {"rank": 4}),
    "extract": ("extract", ["base", "tuned"], {"algorithm": "full", "format": "kohya"}),
}
"""Name → command, inputs and options. Whole changes took up to four times as much as `MOST`."""


WHOLE_RANK: dict[str, tuple[str, list[object], dict[str, object]]] = {
    "noise": ("extract", ["base", "tuned"], {"rank": "noise", "format": "kohya"}),
}
"""Runs whose numbers decide for all ranks: their factors are larger than the matrix."""


def measured(folder: Path, runs: Mapping[str, object]) -> dict[str, tuple[int, bool]]:
    """How many MiB each run takes, and whether its bytes do not depend on the limit."""
    told = subprocess.run([sys.executable, "-c", CODE, str(folder), json.dumps(runs)], capture_output=True, text=True,
                          check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"})  # what is freed goes back at once  # fmt: skip
    found: dict[str, tuple[int, bool]] = json.loads(told.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path
    name = "lora_unet_mid_block_attentions_0_proj_in"
    for n, file in enumerate(PAIR):
        down, up = rand(4, COLS, seed=n).bfloat16(), rand(OUT, 4, seed=9 + n).bfloat16()
        save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}, found / f"{file}.safetensors")
    save_file({f"{name}.diff": rand(OUT, COLS, seed=4).bfloat16()}, found / "full.safetensors")
    base = rand(OUT, COLS, seed=5)
    for file, value in (("base", base), ("tuned", base + 0.1 * rand(OUT, COLS, seed=6))):
        save_file({"model.layers.0.mlp.up_proj.weight": value.bfloat16()}, found / f"{file}.safetensors")
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_large_layer_is_worked_at_by_rows(folder: Path) -> None:
    """`algorithms/test_same_bytes.py` has the bytes of each command at two limits."""
    found = measured(folder, RUNS)
    assert {name: same for name, (_, same) in found.items()} == dict.fromkeys(RUNS, True)
    assert {name: grown for name, (grown, _) in found.items() if grown > MOST} == {}, found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_decomposition_of_whole_rank_takes_no_more_than_its_plan_says(folder: Path) -> None:
    ((grown, same),) = measured(folder, WHOLE_RANK).values()
    assert same
    read = OUT * COLS * 2  # of both checkpoints, a window each
    assert grown <= (svd_bytes((OUT, COLS), Rule("above")) + 2 * read) >> 20
