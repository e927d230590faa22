"""Laws of the commands that write adapters, for every row of ALGORITHMS at once: all rows change one base together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.errors import FitError, MergeError
from lora_merge.job import Job
from tests.algorithms import row_files

OF_ITS_BASE = ("adamss",)
"""Rows that take only what training from this very base gives; the files of these tests hold random numbers."""
ROWS = [row for row in ALGORITHMS if row not in OF_ITS_BASE]

Folder = tuple[Path, list[Path]]


def written(row: str, folder: Path, modules: tuple[str, str]) -> Job:
    """The files of a row for two modules of these names."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "MODULES", modules)
        return row_files.write(row, folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A base with two modules of every row, and the adapter of each row that needs no setting of the user."""
    folder, base, adapters = tmp_path_factory.mktemp("rows"), {}, []
    for n, row in enumerate(row for row in ROWS if row not in row_files.STATED):
        job = written(row, folder / row, (f"m.layers.{2 * n}.a", f"m.layers.{2 * n + 1}.a"))
        base |= load_file(job.base)
        adapters.append(job.adapters[0].path)
    save_file(base, folder / "base.safetensors")
    return folder / "base.safetensors", adapters


def merged(base: Path, adapters: list[tuple[Path, float]], **options: object) -> dict[str, torch.Tensor]:
    out = base.parent / "merged.safetensors"
    lora_merge.merge(base, adapters, out, dtype="fp32", compute_dtype="fp64", verify=False, overwrite=True, **options)
    return load_file(out)


def expect_same(base: Path, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float) -> None:
    before = load_file(base)
    for key, value in one.items():
        change = (value.double() - before[key].double()).norm()
        assert (value.double() - other[key].double()).norm() <= within * change + 1e-6, key
    assert sum(not one[key].equal(before[key]) for key in one) > len(one) // 3


@pytest.mark.few(1)
@pytest.mark.parametrize("rank", ["exact", "energy:1"])
def test_strengths_add_up_and_the_order_of_the_adapters_does_not_matter(
    files: Folder, rank: str, tmp_path: Path
) -> None:
    """Twice each adapter, at 0.3 and at −0.8, is once at −0.5; factors side by side and found anew mean the same."""
    base, adapters = files
    twice = [*((a, 0.3) for a in adapters), *((a, -0.8) for a in reversed(adapters))]
    out = tmp_path / "c.safetensors"
    report = lora_merge.combine(twice, out, base=base, rank=rank, algorithm="auto", dtype="fp32")
    assert report.verified is not None
    expect_same(base, merged(base, [(a, -0.5) for a in adapters]), merged(base, [(out, 1.0)]), 3e-5)


def test_average_of_all_rows_is_their_average(files: Folder, tmp_path: Path) -> None:
    """Weights −1.5 and 1 of the same snapshots add up to −0.5; the rank stays that of the snapshots."""
    base, adapters = files
    for row in ("loha", "adalora", "lora_experts", "glora"):
        path = next(a for a in adapters if row == a.parent.name)
        out = tmp_path / f"{row}.safetensors"
        lora_merge.average([path, path], out, base=base, weights=[-1.5, 1.0], rank="energy:1", dtype="fp32")
        expect = merged(base, [(path, -0.5)]), merged(base, [(out, 1.0)])
        before = load_file(base)
        for key, value in expect[0].items():
            assert (value - expect[1][key]).abs().max() <= 3e-5 * (value - before[key]).abs().max() + 1e-7, key


def factored(adapters: list[Path]) -> list[Path]:
    """The adapters but those of stacked experts, for whose weights no format has factors."""
    return [a for a in adapters if "experts" not in a.parent.name]


@pytest.mark.slow
def test_method_sees_the_change_and_not_how_a_row_factors_it(files: Folder, tmp_path: Path) -> None:
    """Every row, and the same changes as whole matrices, which no method tells from each other."""
    base, adapters = files[0], factored(files[1])
    dense, one, other = (tmp_path / f"{name}.safetensors" for name in ("dense", "one", "other"))
    options = {"base": base, "dtype": "fp32", "verify": False}
    lora_merge.combine(adapters, dense, algorithm="full", **options)  # type: ignore[arg-type]
    for given, out in ((adapters, one), ([dense], other)):
        lora_merge.combine(given, out, method="ties", density=0.4, rank=3, **options)  # type: ignore[arg-type]
    expect_same(base, merged(base, [(one, 1.0)]), merged(base, [(other, 1.0)]), 1e-4)


@pytest.mark.slow
def test_resize_of_a_resize_is_one_to_the_smaller_rank(files: Folder, tmp_path: Path) -> None:
    """Every row: cut to 3 and then to 2 is cut to 2, and no larger rank comes back."""
    base, adapters = files[0], factored(files[1])
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("two", "three", "again", "back")}
    made = {"base": base, "dtype": "fp32", "verify": False}
    for name, rank in (("two", 2), ("three", 3)):
        lora_merge.combine(adapters, paths[name], rank=rank, **made)  # type: ignore[arg-type]
    lora_merge.resize(paths["three"], paths["again"], rank=2, dtype="fp32", verify=False)
    lora_merge.resize(paths["again"], paths["back"], rank=3, dtype="fp32", verify=False)
    wanted = merged(base, [(paths["two"], 1.0)])
    for name in ("again", "back"):
        expect_same(base, wanted, merged(base, [(paths[name], 1.0)]), 1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("row", [r for r in ROWS if not row_files.kind(r)])
def test_row_in_its_own_words_means_the_same_at_a_strength_or_is_refused(row: str, tmp_path: Path) -> None:
    """A copied formula whose α cannot hold a strength, such as a rotation, is refused before a proof has to find it."""
    job, out = row_files.write(row, tmp_path), tmp_path / "kept.safetensors"
    path, told = job.adapters[0].path, {"setting": job.setting}
    for strength, options in ((1.0, {}), (-0.5, {}), (-0.5, {"algorithm": "full"})):
        out.unlink(missing_ok=True)
        try:
            report = lora_merge.convert((path, strength), out, base=job.base, dtype="fp32", **options, **told)
        except FitError:
            assert strength != 1
            assert not options
            continue
        again = told if any("when the output is merged or converted" in note for note in report.notes) else {}
        expect = merged(job.base, [(path, strength)], **told)
        expect_same(job.base, expect, merged(job.base, [(out, 1.0)], **again), 3e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("row", [r for r in ROWS if row_files.kind(r)][::6])
def test_formulas_of_a_configuration_become_factors_or_matrices_and_are_never_copied(row: str, tmp_path: Path) -> None:
    """Their tensors alone would be read as another formula."""
    job, out = row_files.write(row, tmp_path), tmp_path / "kohya.safetensors"
    path, told = job.adapters[0].path, {"setting": job.setting}
    try:
        lora_merge.convert(path, out, to="kohya", base=job.base, dtype="fp32", **told)
    except MergeError as e:
        assert e.exit_code == 4
        lora_merge.convert(path, out, to="kohya", base=job.base, dtype="fp32", algorithm="full", **told)
    expect_same(job.base, merged(job.base, [(path, 1.0)], **told), merged(job.base, [(out, 1.0)]), 3e-5)
