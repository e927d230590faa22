"""Same inputs, same bytes: whatever else a window holds, wherever tensors begin in memory, however many threads there
are and however much memory. `tests/kernels.py` runs this under each set of a processor's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.engine.fold import StackedPatch, new_weights
from lora_merge.engine.tensor_moves import CACHE_LINE
from lora_merge.job import Job
from tests.algorithms import row_files
from tests.kernels import SETTINGS, run
from tests.kit.files import save
from tests.kit.tensors import Tensors, rand

OF_ITS_BASE = ("adamss",)
"""Rows that take only what training from this very base gives; the files of these tests hold random numbers."""
ROWS = [row for row in ALGORITHMS if row not in OF_ITS_BASE]
SHIFTS = (0, 4, 20)
"""Bytes by which tensors of fp32 begin after a cache line."""


def written(row: str, folder: Path, modules: tuple[str, str]) -> Job:
    """The files of a row for two modules of these names."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "MODULES", modules)
        return row_files.write(row, folder)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The files of every row, each for two modules of its own."""
    folder = tmp_path_factory.mktemp("rows")
    return {
        row: written(row, folder / row, (f"m.layers.{2 * n}.a", f"m.layers.{2 * n + 1}.a"))
        for n, row in enumerate(ROWS)
    }


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A program that has set the number of threads of torch and of numpy's library."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        with threadpool_limits(limits=count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def shifted(tensors: Mapping[str, Tensor], by: int) -> Tensors:
    """The same tensors, each beginning so many bytes after a cache line."""
    found = {}
    for name, tensor in tensors.items():
        memory = torch.empty(tensor.nbytes + 2 * CACHE_LINE, dtype=torch.uint8)
        first = -memory.data_ptr() % CACHE_LINE + (by if tensor.dtype == torch.float32 else 0)
        found[name] = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return found


def test_every_formula_gets_one_weight_in_memory_of_its_own_on_one_core(
    jobs: Mapping[str, Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries round by the number of products in a call, by where they begin, and by the number of threads."""
    seen: list[tuple[bool, ...]] = []

    def checked(blocks: Sequence[Any], base: Tensor, stacks: Sequence[StackedPatch], *more: Any) -> Tensor:
        used = [t for s in stacks for t in tree_leaves([s.tensors._asdict(), s.strength, s.view, s.magnitude])]
        own = [t for t in used if isinstance(t, Tensor) and t.numel()]
        starts = [t.untyped_storage().data_ptr() % CACHE_LINE == 0 for t in own]
        alone = base.data_ptr() % CACHE_LINE == 0
        seen.append((len(base) == 1, alone, all(starts), torch.get_num_threads() == 1))
        return new_weights(blocks, base, stacks, *more)

    monkeypatch.setattr("lora_merge.engine.block_folder.new_weights", checked)
    joined = {row: job for row, job in jobs.items() if row not in row_files.STATED}
    base = {"0": torch.zeros(1, dtype=torch.uint8)} | {
        k: v for job in joined.values() for k, v in load_file(job.base).items()
    }
    save_file(base, tmp_path / "base.safetensors")
    with threads(2):
        adapters = [job.adapters[0].path for job in joined.values()]
        lora_merge.merge(
            tmp_path / "base.safetensors", adapters, tmp_path / "out.safetensors", device="cpu", verify=False
        )
        lora_merge.merge_state_dict(shifted(base, 20), adapters, device="cpu")
    assert len(seen) >= 4 * len(joined)
    assert {*seen} == {(True, True, True, True)}


@pytest.mark.slow
def test_neighbours_change_no_byte_of_any_formula(jobs: Mapping[str, Job], tmp_path: Path) -> None:
    joined = {row: job for row, job in jobs.items() if row not in row_files.STATED}
    base = {k: v for job in joined.values() for k, v in load_file(job.base).items()}
    together = lora_merge.merge_state_dict(
        shifted(base, 4), [job.adapters[0].path for job in joined.values()], device="cpu"
    )
    for job in jobs.values():
        options: dict[str, Any] = {"device": "cpu", "setting": job.setting, "verify": False}
        lora_merge.merge(job.base, job.adapters[0].path, tmp_path / "out", overwrite=True, **options)
        held, alone = load_file(job.base), load_file(tmp_path / "out")
        assert any(not value.equal(held[name]) for name, value in alone.items())
        for name, value in alone.items():
            assert name not in together or value.equal(together[name]), name


def low_rank(out: int, width: int, rank: int, seed: int, algorithm: str) -> Tensors:
    """The tensors of one module."""
    shapes = {
        "lora": {"lora_up.weight": (out, rank), "lora_down.weight": (rank, width)},
        "loha": {f"hada_{w}_{x}": s for w in ("w1", "w2") for x, s in (("a", (out, rank)), ("b", (rank, width)))},
        "glora": {"a1.weight": (width, rank), "a2.weight": (rank, width), "b1.weight": (out, rank), "b2.weight": (rank, width)},
        "dora": {"lora_up.weight": (out, rank), "lora_down.weight": (rank, width), "dora_scale": (out, 1)},
        "lokr": {"lokr_w1": (1, 1), "lokr_w2_a": (out, rank), "lokr_w2_b": (rank, width)},
    }[algorithm]  # fmt: skip
    return {name: rand(*shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}


ALGORITHM = ("lora", "loha", "glora", "dora", "lokr")


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", ALGORITHM)
def test_shapes_places_and_threads_change_no_byte(algorithm: str) -> None:
    differ(algorithm, [(33, 17), (16, 1000), (1, 64), (64, 1)], (1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHM)
def test_any_shape_place_and_number_of_threads_changes_no_byte(algorithm: str) -> None:
    sides = (1, 2, 15, 16, 17, 31, 48, 63, 100, 127, 320, 777)
    for out in sides:
        differ(algorithm, [(out, width) for width in sides], (1, 2, 5, 16, 33))
    differ(algorithm, [(1280, 1280), (2000, 1111), (1111, 2000)], (1, 4, 32))


def differ(algorithm: str, shapes: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
    """Merge several modules of each shape together, and the first of each alone, beginning at other places."""
    base, factors, first = {}, {}, []
    for n, ((out, width), rank) in enumerate(itertools.product(shapes, ranks)):
        for k in range(2):
            base[f"m.{n}_{k}.weight"] = rand(out, width, seed=n + k)
            factors |= {f"m.{n}_{k}.{name}": t for name, t in low_rank(out, width, rank, n + k, algorithm).items()}
        first.append(f"m.{n}_1.")
    together = lora_merge.merge_state_dict(base, factors, device="cpu")
    own = [{k: v for k, v in tensors.items() if k.startswith(tuple(first))} for tensors in (base, factors)]
    for by, count in zip(SHIFTS, (2, 1, 2), strict=True):
        with threads(count):
            apart = lora_merge.merge_state_dict(*(shifted(tensors, by) for tensors in own), device="cpu")
        assert len(apart) == len(first)
        for name, value in apart.items():
            assert not value.equal(base[name])
            assert value.equal(together[name]), (name, value.shape, by, count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base of several windows of the smallest size, and two adapters; some shapes are odd, and most come several times."""
    folder = tmp_path_factory.mktemp("model")
    shapes = [(1100, 333), (640, 640), (33, 17), (640, 640), (33, 17), (1100, 333), (64, 96), (64, 96), (800, 701)]
    base = {f"layers.{n}.q.weight": rand(*shape, seed=n) for n, shape in enumerate(shapes)}
    adapters = [
        {f"layers.{n}.q.{name}": t for n, (out, width) in enumerate(shapes)
         for name, t in low_rank(out, width, rank, 10 * number + n, "lora").items()}
        for number, rank in enumerate((1, 8))
    ]  # fmt: skip
    single = {name: value.bfloat16() for name, value in base.items()}
    save(single, folder / "16.safetensors")
    save(
        {name: value + rand(*value.shape, seed=100 + n) for n, (name, value) in enumerate(base.items())},
        folder / "other.safetensors",
    )
    return (
        save(base, folder / "base.safetensors"), save(adapters[0], folder / "a.safetensors"),
        save(adapters[1], folder / "b.safetensors"),
    )  # fmt: skip


def outputs(model: tuple[Path, Path, Path], folder: Path, memory: str) -> dict[str, bytes]:
    """What each command writes."""
    base, a, b = model
    small = base.with_name("16.safetensors")
    options: dict[str, Any] = {"verify": False, "overwrite": True, "max_memory": memory, "device": "cpu"}
    both = [a, (b, 0.5)]
    runs: dict[str, Callable[[Path], object]] = {
        "16 bits": lambda o: lora_merge.merge(small, both, o, **options),
        "fp32": lambda o: lora_merge.merge(base, both, o, **options),
        "ties": lambda o: lora_merge.merge(small, both, o, method="ties", **options),
        "fp8_scaled": lambda o: lora_merge.merge(small, both, o, dtype="fp8_scaled", **options),
        "combine": lambda o: lora_merge.combine(both, o, **options),
        "combine at a rank": lambda o: lora_merge.combine(both, o, rank=3, **options),
        "combine by ties": lambda o: lora_merge.combine(both, o, base=base, method="ties", rank=4, **options),
        "combine whole": lambda o: lora_merge.combine(both, o, base=base, algorithm="full", **options),
        "resize": lambda o: lora_merge.resize(b, o, rank="energy:0.9", **options),
        "convert": lambda o: lora_merge.convert(b, o, to="diffusers", base=base, **options),
        "extract": lambda o: lora_merge.extract(base, base.with_name("other.safetensors"), o, rank=4, **options),
        "average": lambda o: lora_merge.average([b, b], o, **options),
    }
    found = {}
    for name, command in runs.items():
        command(out := folder / f"{name.replace(' ', '_')}.safetensors")
        found[name] = out.read_bytes()
    return found


def test_memory_and_threads_change_no_byte_of_any_command(model: tuple[Path, Path, Path], tmp_path: Path) -> None:
    results = []
    for memory, count in (("32MiB", 2), ("1GiB", 1)):
        with threads(count):
            results.append(outputs(model, tmp_path, memory))
    for name in results[0]:
        assert results[0][name] == results[1][name], name


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: " ".join(setting.values()) or "none")
def test_bytes_are_the_same_with_every_set_of_kernels(setting: Mapping[str, str]) -> None:
    done = run(setting)
    assert not done.returncode, done.stdout
