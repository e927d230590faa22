"""Laws of `combine` for every row: merging its output is merging its inputs, at any strength, with or without factors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from row_files import write
from safetensors.torch import load_file

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.job import Job

KEPT = ("dtype", "compute_dtype", "setting")


def merged(job: Job, adapters: list[tuple[Path, float]], name: str, *, told: bool = True) -> dict[str, object]:
    out = job.output.parent / name
    kept = {k: getattr(job, k) for k in KEPT if told or k != "setting"}
    lora_merge.merge(job.base, adapters, out, verify=False, **kept)
    return load_file(out)


OF_ITS_BASE = ("adamss",)
"""Rows that take only what training from this very base gives; the files of these tests hold random numbers."""


@pytest.mark.parametrize("row", sorted(set(ALGORITHMS) - {*OF_ITS_BASE}))
def test_merging_the_output_is_merging_the_input(row: str, tmp_path: Path) -> None:
    job = write(row, tmp_path)
    job = replace(job, dtype="fp32", compute_dtype="fp64")
    (ref,) = job.adapters
    out = tmp_path / "combined.safetensors"
    report = lora_merge.combine(
        [(ref.path, -0.5)], out, base=job.base, algorithm="auto", dtype="fp32", setting=job.setting
    )
    assert report.verified is not None
    one, other = (
        merged(job, [(ref.path, -0.5)], "one.safetensors"),
        merged(job, [(out, 1.0)], "other.safetensors", told=False),
    )
    base = load_file(job.base)
    assert any(not one[k].equal(base[k]) for k in base)
    for key, value in one.items():
        assert (value.double() - other[key].double()).abs().max() <= 2e-5 * (
            value.double() - base[key].double()
        ).abs().max(), key
