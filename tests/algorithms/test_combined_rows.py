"""`combine` of rows that need a setting of the user, and its methods on every kind of change; test_rows_written.py has
the laws of all other rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lora_merge
from lora_merge.job import Job
from tests.algorithms.row_files import STATED, write

KEPT = ("dtype", "compute_dtype", "setting")


def merged(job: Job, adapters: list[tuple[Path, float]], name: str, *, told: bool = True) -> dict[str, object]:
    out = job.output.parent / name
    kept = {k: getattr(job, k) for k in KEPT if told or k != "setting"}
    lora_merge.merge(job.base, adapters, out, verify=False, **kept)
    return load_file(out)


@pytest.mark.parametrize("row", sorted(STATED))
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


@pytest.mark.few(2)
@pytest.mark.parametrize("row", ["lora_experts_transposed", "lora_fused", "lora_embedding", "glora"])
def test_method_meets_every_kind_of_change_as_combine_does(row: str, tmp_path: Path) -> None:
    """Twice the same adapter, of whose entries other ones are drawn; rows that are joined, transposed, or read W."""
    job = replace(write(row, tmp_path), dtype="fp32")
    twice = [(job.adapters[0].path, 1.0), (job.adapters[0].path, -0.4)]
    options = {"method": "dare", "density": 0.5, "seed": 5, "setting": job.setting}
    lora_merge.merge(job.base, twice, tmp_path / "one.safetensors", dtype="fp32", **options)
    assert lora_merge.verify(tmp_path / "one.safetensors", full=True)["proven"]
    lora_merge.combine(twice, tmp_path / "c.safetensors", base=job.base, algorithm="full", dtype="fp32", **options)
    lora_merge.merge(job.base, tmp_path / "c.safetensors", tmp_path / "two.safetensors", dtype="fp32")
    one, two, base = (load_file(p) for p in (tmp_path / "one.safetensors", tmp_path / "two.safetensors", job.base))
    assert any(not one[key].equal(base[key].float()) for key in one)
    for key, value in one.items():
        assert (value - two[key]).abs().max() <= 1e-6 * value.abs().max(), key
