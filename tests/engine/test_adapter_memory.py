"""What a merge keeps of its adapters depends on the memory limit, not on their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.disk.reader import Reader
from lora_merge.dtypes import StoredTensor
from lora_merge.engine.row_blocks import BLOCK_ELEMENTS, blocks
from lora_merge.engine.tensors import CACHE_SHARE, RECENT_TENSORS, DeviceCache, TensorCache
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.job import make_job
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from tests.kit.files import load, save
from tests.kit.tensors import rand

LIMIT = 8 * 2**20


def test_tensors_of_a_window_are_kept_up_to_a_share_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window of small weights needs an adapter of many times its size: factors of a rank above that of the
    weight."""
    names, kept, keep = [f"m.{n}" for n in range(24)], list[int](), TensorCache._keep
    base = save({f"{name}.weight": rand(64, 64, seed=n).half() for n, name in enumerate(names)}, tmp_path / "b.st")
    factors = {f"{name}.lora_up.weight": rand(64, 2048) for name in names}
    adapter = save(factors | {f"{name}.lora_down.weight": rand(2048, 64) for name in names}, tmp_path / "a.safetensors")

    def noted(self: TensorCache, key: Any, tensor: torch.Tensor) -> None:
        keep(self, key, tensor)
        kept.append(sum(t.nbytes for t in [*self._tensors.values()]))

    monkeypatch.setattr(TensorCache, "_keep", noted)
    lora_merge.merge(base, adapter, tmp_path / "o.safetensors", max_memory=LIMIT, device="cpu", verify=False)
    one = 64 * 2048 * 4
    assert adapter.stat().st_size > 3 * LIMIT / 2
    assert LIMIT // CACHE_SHARE - one < max(kept) <= max(LIMIT // CACHE_SHARE, RECENT_TENSORS * one)


def test_tensors_used_last_are_kept_whatever_their_size(tmp_path: Path) -> None:
    tensors = {f"t{n}": rand(100, seed=n) for n in range(RECENT_TENSORS + 1)}
    index = open_checkpoint(save(tensors, tmp_path / "a.safetensors"))
    with Reader([index]) as reader:
        cache = TensorCache(reader, frozenset(), room=1)
        first, *rest = [index.tensors[name] for name in tensors]
        before = cache.fetch(first)
        for info in rest[:-1]:
            cache.fetch(info)
        assert cache.fetch(first).data_ptr() == before.data_ptr()
        cache.fetch(rest[-1])  # rest[0] was used longest ago
        assert cache.fetch(first).data_ptr() == before.data_ptr()
        assert {key[1] for key in cache._tensors} == {first.offset, *(info.offset for info in rest[1:])}


def test_large_tensor_is_read_by_the_rows_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols, sizes, view = 4 * BLOCK_ELEMENTS // 1024 + 8, 1024, dict[str, int](), Reader.view
    base = save({"m.a.weight": rand(rows, cols).half()}, tmp_path / "b.safetensors")
    adapter = save({"m.a.diff": rand(rows, cols, seed=1)}, tmp_path / "a.safetensors")

    def noted(self: Reader, info: StoredTensor) -> memoryview:
        sizes[info.name] = max(sizes.get(info.name, 0), info.nbytes)
        return view(self, info)

    monkeypatch.setattr(Reader, "view", noted)
    lora_merge.merge(base, adapter, tmp_path / "o.safetensors", dtype="fp32", device="cpu", verify=False)
    assert sizes == {"m.a.diff": 4 * BLOCK_ELEMENTS}
    exact = load(base)["m.a.weight"].float() + load(adapter)["m.a.diff"]
    torch.testing.assert_close(load(tmp_path / "o.safetensors")["m.a.weight"], exact, rtol=0, atol=0)


def test_large_factors_of_a_block_count_as_memory_of_its_thread(tmp_path: Path) -> None:
    base = save({"m.a.weight": rand(2048, 2048).half(), "m.b.weight": rand(64, 64)}, tmp_path / "b.safetensors")
    factors = {"m.a.lora_up.weight": rand(2048, 512), "m.a.lora_down.weight": rand(512, 2048),
               "m.b.lora_up.weight": rand(64, 4), "m.b.lora_down.weight": rand(4, 64)}  # fmt: skip
    job = make_job(base, [(save(factors, tmp_path / "a.safetensors"), 1.0)], tmp_path / "o.safetensors")
    plan = plan_job(job, CheckpointCache())
    room = {t.name: {b.room for b in blocks(t)} for f in plan.files for t in f.targets}
    assert room == {"m.a.weight": {8 * 512 * 2048}, "m.b.weight": {0}}  # the rows of `up` are read block by block


def test_device_cache_keeps_no_more_than_its_numbers() -> None:
    cache = DeviceCache(10)
    made = [cache.get(n, lambda: torch.zeros(6), lambda: None) for n in range(4)]
    again = [cache.get(n, lambda: torch.zeros(6), lambda: None) for n in range(4)]
    assert [a is b for a, b in zip(made, again, strict=True)] == [True, True, False, False]
