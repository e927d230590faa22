"""Large changes that become one are computed some rows at a time: the numbers are the same, the memory is the base's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.engine import row_blocks, row_matrix
from lora_merge.engine.fold import StackedPatch
from tests.kit.methods import FUSED, KINDS, MODULES, flux, module
from tests.kit.tensors import rand

NUMBERS: dict[str, dict[str, Any]] = {
    "ties": {"density": 0.4},
    "dare": {"density": 0.4, "seed": 3},
    "della": {"density": 0.4, "epsilon": 0.2},
    "model_stock": {},
}
BY_ROWS = ("lora", "dora out", "diff", "glora")
"""Kinds whose formulas give each row by itself."""


@pytest.mark.pairs
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", NUMBERS)
def test_changes_by_rows_are_the_whole_changes(
    method: str,
    kind: str,
    fused: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows at a time; the second adapter changes some rows of a fused weight, from a row on that no block ends
    at."""
    base, part = flux(fused=fused), list(MODULES)[2]
    given = [(module(kind, FUSED, 0), 1.0), (module(kind, part, 30), 0.6), (module("lora", FUSED, 60), -0.5)]
    options: Any = {"method": method, "compute_dtype": "fp64", **NUMBERS[method]}
    whole = lora_merge.merge_state_dict(base, given, **options)
    cuts, cut = [], StackedPatch.part
    monkeypatch.setattr(StackedPatch, "part", lambda self, some: cuts.append(some) or cut(self, some))
    monkeypatch.setattr(row_blocks, "BY_ROWS", 0)
    monkeypatch.setattr(row_matrix, "BLOCK_VALUES", 3 * 8)
    got = lora_merge.merge_state_dict(base, given, **options)
    for key, value in whole.items():
        torch.testing.assert_close(got[key], value, rtol=1e-11, atol=1e-13, msg=key)
    assert cuts or kind not in BY_ROWS


OUT, COLS = 8192, 2048
BASE = OUT * COLS * 8 >> 20
"""MiB of the weight in fp64."""

CODE = """if True:
    import json, re, sys
    from pathlib import Path
    import lora_merge, torch
    import lora_merge.engine.merge
    status = Path("/proc/self/status")
    told = lambda name: int(re.search(name + r":\\s+(\\d+)", status.read_text())[1]) >> 10
    torch.ones(64, 64, dtype=torch.float64) @ torch.ones(64, 64, dtype=torch.float64)
    folder, found = Path(sys.argv[1]), {}
    for verify in (False, True):
        Path("/proc/self/clear_refs").write_text("5")  # the peak until now is forgotten
        before = told("VmRSS")
        lora_merge.merge(folder / "base.safetensors", [folder / f"{n}.safetensors" for n in range(4)],
                         folder / "out.safetensors", method="ties", density=0.2, device="cpu", overwrite=True,
                         max_memory=sys.argv[2], verify=verify)
        found[str(verify)] = told("VmHWM") - before
    print(json.dumps(found))
"""
"""A process of its own: how many MiB a merge takes, without and with its proof."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_large_weight_takes_the_memory_of_its_base_however_many_change_it(tmp_path: Path) -> None:
    """The changes of four adapters would take four times as much, and the proof of them more; the limit has no room for
    two."""
    save_file({"a.weight": rand(OUT, COLS, seed=9).bfloat16()}, tmp_path / "base.safetensors")
    for n in range(4):
        down, up = rand(4, COLS, seed=n).bfloat16(), rand(OUT, 4, seed=20 + n).bfloat16()
        save_file({"a.lora_down.weight": down, "a.lora_up.weight": up}, tmp_path / f"{n}.safetensors")
    made = subprocess.run([sys.executable, "-c", CODE, str(tmp_path), f"{int(2.6 * BASE)}MiB"], capture_output=True,
                          text=True, check=True)  # fmt: skip
    grown = json.loads(made.stdout)
    assert max(grown.values()) < 3 * BASE, grown
