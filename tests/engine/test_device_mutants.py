"""The stand-ins for GPUs are worth something: each of these faults, put into the code, is seen by one of their scenes."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine.devices import DeviceChoice
from lora_merge.engine.tensor_moves import DeviceStream, Placement, stage, upload
from lora_merge.engine.tensors import DeviceCache
from lora_merge.errors import DeviceFailed
from tests.kit import lanes as watched
from tests.kit.files import load, save
from tests.kit.pretended_cuda import Pretended, pretended_cuda
from tests.kit.tensors import Tensors, rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")

device = watched.device
Scene = Callable[[Any, Path, pytest.MonkeyPatch, Callable[[], None]], bool]
"""(stand-in, folder, patch, what puts the fault into the code) → whether all is right."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Two devices."""
    monkeypatch.setattr("lora_merge.engine.window_merger.choose", lambda plans: DeviceChoice(plans[0].job.device))
    with pretended_cuda(monkeypatch) as found:
        yield found


def mutated(place: str, old: str, new: str, patch: pytest.MonkeyPatch) -> None:
    """Let a function, "module:name" or "module:class.name", have other words in its source, wherever it is used."""
    module, _, name = place.partition(":")
    home: Any = importlib.import_module(f"lora_merge.{module}")
    function: Any = home
    for part in name.split("."):
        function = getattr(function, part)
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{place} has changed: {source}"
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), {**home.__dict__}, made)
    patch.setattr(function, "__code__", inspect.unwrap(made[function.__name__]).__code__)


def right(got: Tensors, want: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether two files hold the same numbers, and the same bytes where nothing is changed."""
    return got.keys() == want.keys() and all(
        torch.equal(got[k].view(torch.uint8), t.view(torch.uint8)) if k.endswith("bias")
        else bool(((got[k].double() - t.double()).abs() <= tolerance * (1 + t.double().abs())).all())
        for k, t in want.items()
    )  # fmt: skip


def lora(*names: str, seed: int = 0, out: int = 24, cols: int = 16) -> Tensors:
    return {f"{n}.lora_{k}.weight": rand(*s, seed=seed) for n in names for k, s in (("up", (out, 4)), ("down", (4, cols)))}  # fmt: skip


def model() -> Tensors:
    """Matrices and vectors in turn, of two dtypes."""
    kinds = (torch.float16, torch.bfloat16)
    base: Tensors = {f"m.{n}.weight": rand(24, 16, seed=n).to(kinds[n % 2]) for n in range(6)}
    return base | {f"m.{n}.bias": rand(3, seed=n).to(kinds[n % 2]) for n in range(6)}


def merges(*adapters: Tensors, base: Tensors | None = None, refused: bool = False, **options: Any) -> Scene:
    """A file is merged on the device to what it is on the CPU, by whole windows, without a race; no memory is kept."""

    def scene(cuda: Pretended, folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
        cuda.refuses_memory = refused
        first = save(model() if base is None else base, folder / "b")
        others = [save(adapter, folder / f"{n}") for n, adapter in enumerate(adapters)]
        for name in ("cpu", "cuda:1"):
            if name != "cpu":
                spoil()
            out = folder / name
            lora_merge.merge(first, others, out, device=name, verify=False, **options)
        faults = cuda.races or cuda.faults or cuda.registered
        return right(load(folder / "cuda:1"), load(folder / "cpu")) and not faults

    return scene


def wide(cuda: Pretended, folder: Path, patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """The same, in a program that lets products be inexact."""
    torch.set_float32_matmul_precision("high")
    try:
        return merges(lora("m.0"))(cuda, folder, patch, spoil)
    finally:
        torch.set_float32_matmul_precision("highest")


def held(cuda: Pretended, _folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """Tensors of the device that the caller's stream has yet to make."""
    want = lora_merge.merge_state_dict({k: t + 1 for k, t in model().items()}, lora("m.0", "m.3"), device="cpu")
    given = {k: t.to("cuda:0") + 1 for k, t in model().items()}
    spoil()
    got = lora_merge.merge_state_dict(given, lora("m.0", "m.3"), device="keep")
    found = {k: t.cpu() for k, t in got.items()}
    return right({k: t for k, t in found.items() if "weight" in k}, {k: t for k, t in want.items() if "weight" in k}) and not cuda.races  # fmt: skip


def carried(cuda: Pretended, _folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """Tensors of the host, merged on the device block by block."""
    want = lora_merge.merge_state_dict(model(), lora("m.0", "m.3"), device="cpu")
    spoil()
    return right(lora_merge.merge_state_dict(model(), lora("m.0", "m.3"), device="cuda:0"), want) and not cuda.races


def pieces(_cuda: Pretended, _folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """Two lanes upload by turns, through pinned memory, in pieces."""
    spoil()
    at = Placement(torch.device("cuda", 0), torch.float32)
    lanes = [DeviceStream(at, n) for n in range(2)]
    host = [torch.arange(40, dtype=torch.uint8) + n for n in range(2)]
    there = []
    for lane, own in zip(lanes, host, strict=True):
        with torch.cuda.device(at.device), torch.cuda.stream(lane.stream):  # type: ignore[arg-type]
            there.append(upload(own, lane, 8))
    for lane in lanes:
        lane.settle()
    return all(torch.equal(t.cpu(), own) for t, own in zip(there, host, strict=True))


def lanes(device: watched.Device, folder: Path, patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """Three lanes that share factors, whose memory is given back while others use them."""
    spoil()
    watched.expect_no_races("oft", 9, device, folder, patch)
    return not device.races


def freed(device: watched.Device, _folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """A tensor of one lane is given up by all but another lane, in and after the turn in which that lane uses it."""
    spoil()
    one, other = (DeviceStream(watched.META, n) for n in range(2))
    with one.turn():
        theirs = stage([torch.zeros(1, 4)], watched.META, one)
    with other.turn():
        other.hold(theirs).add(1)
        del theirs
        device.sweep()
    device.sweep()
    return not device.races


def shared(device: watched.Device, _folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """One lane makes a tensor that is kept for all, and another uses it at once."""
    spoil()
    one, other = (DeviceStream(watched.META, n) for n in range(2))
    with torch.cuda.stream(one.stream):  # type: ignore[arg-type]
        theirs = DeviceCache().get("", lambda: stage([torch.zeros(1, 4)], watched.META, one), one.settle)
    with other.turn():
        theirs.add(1)
    return not device.races


def hostile(_cuda: Pretended, folder: Path, _patch: pytest.MonkeyPatch, spoil: Callable[[], None]) -> bool:
    """An adapter with an index outside of the weight is refused before the device sees it."""
    base = save({"m.weight": rand(12, 10)}, folder / "b")
    tensors = {"shira_weight": rand(3), "shira_indices": torch.tensor([[0, 1, 12], [0, 1, 2]])}
    adapter = save({f"base_model.model.m.{k}": t for k, t in tensors.items()}, folder / "a")
    spoil()
    with pytest.raises(lora_merge.MergeError) as caught:
        lora_merge.merge(base, adapter, folder / "o", device="cuda:1")
    return not isinstance(caught.value, DeviceFailed)


DORA = {**lora("m.0"), "m.0.dora_scale": rand(24, 1).abs() + 1}
OFT = {"m.0.oft_blocks": rand(3, 8, 8) - rand(3, 8, 8).mT}
C3A = {"base_model.model.m.0.c3a_kernel": rand(3, 2, 8)}
TIES = 1 + torch.arange(384).double().view(24, 16) * 2**-10 + 2**-11 + 2**-30
NOTHING = {"m.0.lora_up.weight": torch.zeros(24, 4), "m.0.lora_down.weight": rand(4, 16)}
ROUNDED = merges(
    NOTHING | lora("m.1"),  # an adapter without any effect is refused
    base={"m.0.weight": TIES, "m.1.weight": model()["m.1.weight"]}, dtype="fp16", compute_dtype="fp64",
)  # fmt: skip
ENGINE = "engine.tensor_moves:DeviceStream"
OTHERS = (held,)
"""Scenes in which no fault of the table shows, and which must be right all the same."""

MUTANTS: dict[str, tuple[Scene, str, str, str]] = {
    "tensors of other lanes are not held": (freed, f"{ENGINE}.hold", "self._in_use.append(tensor)", "pass"),
    "a turn ends before its work": (freed, f"{ENGINE}.turn", "self.settle()", "pass"),
    "factors are shared before they are there": (shared, "engine.tensors:DeviceCache.get", "settle()", "pass"),
    "results are read before they are there": (carried, "engine.tensor_moves:land", "lane.settle()", "pass"),
    "the caller's work is not waited for": (lanes, f"{ENGINE}.turn", "self.stream.wait_stream(", "str("),
    "the stream's way back starts another device": (merges(lora("m.0")), f"{ENGINE}.turn", "torch.cuda.device(self.at.device), ", ""),
    "lanes share pinned memory": (pieces, f"{ENGINE}.__init__", "self._memory: dict[str, Tensor] = {}", "self._memory = globals().setdefault('_all', {})"),
    "a piece is overwritten on its way up": (pieces, "engine.tensor_moves:upload", "lane.settle()", "pass"),
    "lanes share a stream": (lanes, f"{ENGINE}.__init__", "_stream(at.device, number)", "_stream(at.device, 0)"),
    "TF32 is left on": (wide, "engine.torch_state:_make_exact", 'whole == "highest" and', "True or"),
    "fp64 is rounded twice": (ROUNDED, "engine.gpu_windows:DeviceWindows._at_once", "castable(batch.work, dtype)", "batch.work.float()"),
    "the base is overwritten under a second formula": (
        merges(lora("m.0", seed=3), DORA, dtype="fp32"), "engine.fold:fold", "base.clone() if any(s.reads_base and s.view is None for s in stacks[1:]) else base", "base"),
    "an index is made on the host": (merges(C3A), "algorithms.c3a:delta", ", device=base.device", ""),
    "a decomposition in fp32": (merges(OFT, dtype="fp32"), "engine.devices:_precise", "return Placement(", "return at or Placement("),
    "integers are not checked": (hostile, "algorithms.base:Checks.check_integers", "exceeded is None", "True"),
    "bytes of others are downloaded": (merges(lora(*(f"m.{n}" for n in range(6))), dtype="bf16"), "engine.gpu_windows:_runs", "bridged and", "True or"),
    "buffers stay registered": (merges(lora("m.0")), "engine.gpu_windows:RegisteredBuffers.close", "self._drop(key)", "pass"),
}  # fmt: skip
"""What is wrong → a scene that sees it, the function, and the words in its source that are replaced."""


def stand_in(scene: Scene, request: pytest.FixtureRequest) -> Any:
    """What the scene is played on."""
    return request.getfixturevalue("device" if scene in {lanes, freed, shared} else "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("scene", [*OTHERS, *dict.fromkeys(scene for scene, *_ in MUTANTS.values())])
def test_scene_without_a_fault_is_right(
    scene: Scene, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene(stand_in(scene, request), tmp_path, monkeypatch, lambda: None)


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", MUTANTS)
def test_fault_is_detected(
    fault: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, place, old, new = MUTANTS[fault]
    played = stand_in(scene, request)
    try:
        good = scene(played, tmp_path, monkeypatch, lambda: mutated(place, old, new, monkeypatch))
    except (RuntimeError, IndexError, AssertionError, lora_merge.MergeError) as e:
        assert "has changed" not in str(e), "the words are not in the source any more"
        good = False
    assert not good
