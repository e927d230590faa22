"""What threads queue on streams of one device, watched for races: a stand-in for compute-sanitizer where there is no GPU.

The device is `meta`. Each lane's work stays queued until its stream is synchronised, which nobody else waits for, and
memory that is freed goes to whoever allocates next on the stream that made it, as CUDA's allocator of torch has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lora_merge
from lora_merge.engine import block_folder  # noqa: F401  it keeps the functions that tests replace: load it before
from lora_merge.engine.device_memory import SPILLED, WORKSPACE
from lora_merge.engine.fold import StackedPatch, fold
from lora_merge.engine.lanes import MemoryPolicy
from lora_merge.engine.row_blocks import Block
from lora_merge.engine.tensor_moves import DeviceStream, Placement, _pinned, land, stage
from tests.kit import lanes
from tests.kit.files import load, save
from tests.kit.lanes import META, Device, Event, expect_no_races
from tests.kit.tensors import rand

device = lanes.device

LORA = {"lora_up.weight": (64, 4), "lora_down.weight": (4, 32)}


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "most"), [("lora", 9), ("oft", 9), ("lora", 1)])
def test_lanes_share_factors_without_races(
    kind: str, most: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge whose windows end, and give their factors' memory back, at the worst moment: while others use them.
    Also where calls are made again, smaller, as numbers of more than `most` blocks do not fit."""
    expect_no_races(kind, most, device, tmp_path, monkeypatch)


SLOTS = {
    "lora": lambda out, cols: {"lora_up.weight": (out, 64), "lora_down.weight": (64, cols)},
    "dora": lambda out, cols: {"lora_up.weight": (out, 4), "lora_down.weight": (4, cols), "dora_scale": (out, 1)},
    "loha": lambda out, cols: {"hada_w1_a": (out, 4), "hada_w1_b": (4, cols), "hada_w2_a": (out, 4), "hada_w2_b": (4, cols)},
    "full": lambda out, cols: {"diff": (out, cols)},
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("lora", {"dtype": "fp32"}), ("dora", {}), ("loha", {"dtype": "fp32"}), ("full", {"compute_dtype": "fp64"})],
)
def test_devices_memory_in_use_stays_within_the_bound(
    kind: str, options: dict[str, str], device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors, temporaries and adapters included, and what cuBLAS keeps for every lane."""
    compute = torch.float64 if options.get("compute_dtype") == "fp64" else torch.float32
    at = Placement(torch.device("meta"), compute)
    monkeypatch.setattr("lora_merge.engine.window_merger.places", lambda *_: (at,))
    of, bound = {"lora": (3, 3 * 2**26), "full": (1, 3 * 2**26)}.get(kind, (1, 2**27))
    monkeypatch.setattr("lora_merge.engine.device_memory.lane_count", lambda *_: of)
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: of)
    shape = (2048, 1024)
    base = {f"layer.{n}.weight": torch.zeros(shape, dtype=torch.bfloat16) for n in range(4)}
    adapter = {f"layer.{n}.{k}": torch.ones(s) for n in range(4) for k, s in SLOTS[kind](*shape).items()}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    lora_merge.merge(*files, tmp_path / "o", verify=False, device="cpu", max_vram=bound, **options)
    assert 2**20 < device.peak <= bound - of * WORKSPACE
    assert not device.races


@pytest.mark.few(1)
@pytest.mark.parametrize("bound", [2**27, 2**26])
def test_weight_larger_than_a_lanes_share_is_folded_alone_and_one_larger_than_the_bound_on_the_cpu(
    bound: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A magnitude for each column needs the whole weight at once."""
    alone = bound > 2**26
    monkeypatch.setattr("lora_merge.engine.window_merger.places", lambda *_: (META,))
    monkeypatch.setattr("lora_merge.engine.device_memory.lane_count", lambda *_: 3)
    monkeypatch.setattr("lora_merge.engine.lanes.lane_count", lambda *_: 3)
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: 3)
    shapes = {"lora_up.weight": (4096, 4), "lora_down.weight": (4, 1024), "dora_scale": (1, 1024)}
    base = {f"layer.{n}.weight": rand(4096, 1024, seed=n).bfloat16() for n in range(4)}
    adapter = {f"layer.{n}.{k}": torch.ones(s) for n in range(4) for k, s in shapes.items()}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    report = lora_merge.merge(*files, tmp_path / "o", verify=not alone, device="cpu", max_vram=bound)
    assert device.peak <= bound and bool(device.peak) is alone and not device.races
    note = "meta was short of memory: a block that needs more than max_vram was folded on the CPU"
    assert tuple(n for n in report.notes if "short of memory" in n) == (() if alone else (note,))


def test_auto_folds_on_the_cpu_what_no_gpu_has_room_for(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who names the device is told."""
    files = (
        save({f"m.{n}.weight": rand(64, 32, seed=n) for n in range(12)}, tmp_path / "b"),
        save({f"m.{n}.{k}": rand(*s) for n in range(12) for k, s in LORA.items()}, tmp_path / "a"),
    )
    tries: list[int] = []
    lora_merge.merge(*files, tmp_path / "want", device="cpu")

    def full(base: Tensor, stacks: Sequence[StackedPatch]) -> Tensor:
        if base.is_meta:
            tries.append(len(base))
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return fold(base, stacks)

    monkeypatch.setattr("lora_merge.engine.window_merger.places", lambda *_: (META,))
    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": full})
    report = lora_merge.merge(*files, tmp_path / "o")
    assert "meta was short of memory: a block was folded on the CPU" in report.notes
    assert len(tries) <= 1 + 2 * (SPILLED + 2), "after a few blocks the others are not tried"
    assert load(tmp_path / "o").keys() == load(tmp_path / "want").keys()
    assert all(torch.equal(t, load(tmp_path / "want")[k]) for k, t in load(tmp_path / "o").items())
    with pytest.raises(lora_merge.MergeError, match="the device is out of memory"):
        lora_merge.merge(*files, tmp_path / "p", device="cuda")
    assert not device.races


def test_watch_sees_what_it_is_for(device: Device) -> None:
    """Memory freed under another lane's work, read before it is made, overwritten on its way up, read on its way down."""
    one, other = DeviceStream(META), DeviceStream(META, 1)
    host = torch.zeros(1, 4)

    def made(lane: DeviceStream) -> Tensor:
        with torch.cuda.stream(lane.stream):  # type: ignore[arg-type]
            return stage([host], META, lane)

    theirs = made(one)
    one.settle()
    with torch.cuda.stream(other.stream):  # type: ignore[arg-type]
        used = theirs + 1
        del theirs
        assert not device.races
        device.sweep()
        assert device.races == ["what comes after its release meets aten.add.Tensor"]
    device.races.clear()
    early = made(one)
    with torch.cuda.stream(other.stream):  # type: ignore[arg-type]
        early.add_(used)
        assert len(device.races) == 1
    one.settle()
    other.settle()
    device.races.clear()
    up = made(one)
    made(one)
    assert any("aten.copy_" in r for r in device.races)
    device.races.clear()
    with one.turn():
        land(up, [host], one)
        assert not device.races
        one.host("down", (1, 4), torch.float32).copy_(up, non_blocking=True)
        one.host("down", (1, 4), torch.float32).add_(1)
        assert len(device.races) == 1


def test_turn_leaves_the_device_before_the_stream_could_start_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream's own way back, from another device's, starts that device up: half a gigabyte for nothing."""
    order: list[str] = []

    @contextmanager
    def recorded(what: str, _at: object) -> Iterator[None]:
        order.append(what)
        yield
        order.append(f"{what} left")

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda at, name=name: recorded(name, at))
    lane = DeviceStream(Placement(torch.device("cpu"), torch.float32))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lane.stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)  # type: ignore[assignment]
    with lane.turn():
        order.append("work")
    assert order == ["device", "stream", "work", "stream left", "device left"]


def test_streams_are_used_by_one_merge_after_the_other(device: Device) -> None:
    """cuBLAS keeps a workspace for every stream that it has seen."""
    for _ in range(3):
        lanes = [DeviceStream(META, n) for n in range(3)]
    assert len({id(lane.stream) for lane in lanes}) == 3
    assert len(device.streams) == 4, "the caller's, and three"


class Logged(TorchDispatchMode):
    """Where tensors are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [t.device.type for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out


def test_tensors_on_the_device_never_come_down_to_go_up_again(device: Device) -> None:
    for kept, dtype in ((torch.float16, torch.float32), (torch.float32, torch.float32)):
        given = [torch.empty(4, 6, dtype=kept, device="meta") for _ in range(2)]
        with Logged() as log:
            staged = stage(given, Placement(torch.device("meta"), dtype), DeviceStream(META))
            assert "cpu" not in log.made
        assert (staged.shape, staged.dtype) == ((2, 4, 6), dtype)
        one = stage(given[:1], Placement(torch.device("meta"), dtype))
        assert one.untyped_storage()._cdata != given[0].untyped_storage()._cdata, "folds overwrite it"


def test_memory_that_is_not_pinned_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.empty

    def none(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return made(*shape, **options)

    monkeypatch.setattr(torch, "empty", none)
    assert _pinned(5, torch.float16).shape == (5,)


def test_factor_in_memory_goes_up_once_for_all_blocks_and_bounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[tuple[int, ...]] = []
    bounds: list[object] = []

    def counted(tensors: Sequence[Tensor], *more: Any) -> Tensor:
        staged.extend(tuple(t.shape) for t in tensors)
        return stage(tensors, *more)

    def sized(policy: MemoryPolicy, block: Block) -> int:
        bounds.append((block.last - block.first, block.cols))
        return most(policy, block)

    most = MemoryPolicy.most
    monkeypatch.setattr("lora_merge.engine.patch_tensors.stage", counted)
    monkeypatch.setattr(MemoryPolicy, "most", sized)
    factors = {"m.lora_up.weight": rand(3072, 4), "m.lora_down.weight": rand(4, 1024)}
    lora_merge.merge_state_dict({"m.weight": rand(3072, 1024)}, factors, max_vram="64MiB", device="cpu")
    assert [staged.count(tuple(t.shape)) for t in factors.values()] == [1, 1]
    assert set(bounds) == {(1024, 1024)}
