"""Windows on a device: few transfers, the bytes between changed tensors untouched, and a way back where it cannot be done."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lora_merge
from lora_merge.cli.reports import plain_lines
from lora_merge.engine import devices
from lora_merge.engine.admission import plan_merge
from lora_merge.engine.gpu_adapters import AdaptersOnDevice
from lora_merge.engine.windows import buffer_bytes, pinned_bytes
from lora_merge.job import make_job
from lora_merge.planning.plan import Plan
from lora_merge.report import merge_rows
from tests.bench import host, inputs
from tests.kit.files import load, save
from tests.kit.flux import flux
from tests.kit.pretended_cuda import Pretended, There, pretended_cuda
from tests.kit.tensors import Tensors, rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")

LAYERS = 12


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Plans for SDXL and a LoRA of full size, as holes."""
    folder = tmp_path_factory.mktemp("sdxl")
    base = inputs.hole(folder / "base.safetensors", inputs.weights("sdxl", "F16"))
    tensors: inputs.Table = {
        f"{layer.name}.{slot}": ("F16", size)
        for layer in inputs.layers("sdxl") for slot, size in inputs.SLOTS["lora"](layer.shape, 32).items()
    }  # fmt: skip
    loras = [inputs.hole(folder / f"{n}.safetensors", tensors) for n in range(2)]

    @cache
    def plan(adapters: int = 1, **options: Any) -> Plan:
        return plan_merge(make_job(base, [(a, 0.7) for a in loras[:adapters]], folder / "out", **options))

    return plan


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with vectors between its matrices, of three dtypes, and NaN in what no adapter changes."""
    folder = tmp_path_factory.mktemp("device")
    base: Tensors = {}
    for n in range(LAYERS):
        kind = (torch.float16, torch.bfloat16, torch.float32)[n % 3]
        base |= {f"m.{n}.weight": rand(48, 32 + n % 2, seed=n).to(kind), f"m.{n}.bias": rand(5, seed=n).to(kind)}
        base[f"m.{n}.bias"][0] = float("nan")
    adapter: Tensors = {}
    for n in range(LAYERS):
        adapter |= {f"m.{n}.lora_up.weight": rand(48, 4, seed=n), f"m.{n}.lora_down.weight": rand(4, 32 + n % 2, seed=n)}  # fmt: skip
        adapter[f"m.{n}.alpha"] = torch.tensor(2.0)
    return save(base, folder / "b"), save(adapter, folder / "a")


def alike(got: Path, want: Path) -> None:
    """Both files hold the same bytes where nothing is changed, and the same numbers, but for their rounding, elsewhere."""
    ours, theirs = load(got), load(want)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if name.endswith("bias"):
            assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
        else:
            torch.testing.assert_close(ours[name].double(), tensor.double(), rtol=1e-2, atol=1e-3)
            assert (ours[name] != tensor).double().mean() < 0.02, name


@pytest.mark.few(2)
@pytest.mark.parametrize("memory", ["registered", "refused"])
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32"])
def test_window_goes_up_and_down_once(
    memory: str, dtype: str, files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    """Whatever its tensors; also where no memory of the host can be registered, and with conversions in between."""
    cuda.refuses_memory = memory == "refused"
    options: Any = {"dtype": dtype, "verify": False}
    lora_merge.merge(*files, tmp_path / "want", device="cpu", **options)
    report = lora_merge.merge(*files, tmp_path / "got", device="cuda", **options)
    alike(tmp_path / "got", tmp_path / "want")
    assert not cuda.races and not cuda.registered and not report.notes
    assert bool(cuda.counts["registered"]) is (memory == "registered")
    parts = 1 if dtype == "keep" else 2  # tensors that keep their dtype, and others
    assert cuda.counts["up"] == 1 + parts, "the adapter, and the windows"
    if dtype == "keep":
        assert cuda.counts["down"] == 1 + 3 + 1 + 1, (
            "the adapter's extremes, those of each dtype, what was measured, the window"
        )
        assert cuda.counts["down and waited for"] == 0


def test_device_is_not_started_to_give_up_memory(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ends a merge has device 0 as its current one, and CUDA starts the current device for any call."""
    with pretended_cuda(monkeypatch, 2) as cuda:
        lora_merge.merge(*files, tmp_path / "got", device="cuda:1", verify=False)
        assert cuda.counts["registered"] and not cuda.registered
        assert cuda.started == {1}


def test_memory_is_given_back_to_the_device_whole(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is freed later stays with torch, on streams that no other work of the program uses."""
    gc.collect()
    others, left = {id(o) for o in gc.get_objects() if isinstance(o, There)}, list[int]()

    def emptied() -> None:
        left.append(sum(isinstance(o, There) and id(o) not in others for o in gc.get_objects()))

    monkeypatch.setattr(torch.cuda, "empty_cache", emptied)
    lora_merge.merge(*files, tmp_path / "got", device="cuda", verify=False)
    assert left == [0] and cuda.counts["up"]


def test_layers_of_different_scales_and_strengths_wait_for_nothing_more(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    """Their numbers are uploaded once for the whole merge, not for every call, with a wait for each."""
    waits = []
    for name, step in (("alike", 0.0), ("other", 0.25)):
        adapter = load(files[1]) | {f"m.{n}.alpha": torch.tensor(2.0 + step * n) for n in range(LAYERS)}
        adapters, options = [save(adapter, tmp_path / "a")], {"strength_for": {f"re:m.{n}[.]": 1 - step * n / 4 for n in range(LAYERS)}}  # fmt: skip
        for device in ("cpu", "cuda"):
            before = cuda.counts["waits"]
            lora_merge.merge(files[0], adapters, tmp_path / f"{name}-{device}", device=device, verify=False, **options)  # type: ignore[arg-type]
        waits.append(cuda.counts["waits"] - before)
        alike(tmp_path / f"{name}-cuda", tmp_path / f"{name}-cpu")
    assert waits[0] == waits[1] and not cuda.races


@pytest.mark.slow
def test_gigabyte_of_sdxl_takes_at_most_300_operations(sdxl: Callable[..., Plan]) -> None:
    """Kernels and copies, the numbers of the report among them; counted on a device that computes nothing."""
    plan = sdxl()
    assert 0 < host.figures(plan.base.path, plan.adapters[0].adapter.index.path, rounds=0)["operations"] <= 300


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["ties", "della", "karcher"])
def test_method_chooses_the_same_entries_on_every_device(
    method: str, files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    """Changes are computed in fp64, and draws depend on their place alone, so that the bytes are the same."""
    options: Any = {"method": method, "verify": False}
    options |= {} if method == "karcher" else {"density": 0.5, "seed": 1, "epsilon": 0.1 if method == "della" else None}
    for name in ("cpu", "cuda"):
        lora_merge.merge(files[0], [(files[1], 1.0), (files[1], -0.3)], tmp_path / name, device=name, **options)
    want, got = load(tmp_path / "cpu"), load(tmp_path / "cuda")
    for key, value in want.items():
        assert torch.equal(got[key].view(torch.uint8), value.view(torch.uint8)), key
    assert not cuda.races


def test_strengths_of_one_base_are_merged_beside_each_other(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    jobs = [
        {"base": str(files[0]), "adapters": [{"path": str(files[1]), "strength": s}], "output": f"{s}.safetensors"}
        for s in (0.5, 1.0, 2.0)
    ]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": jobs, "defaults": {"device": "cuda"}}))
    results = lora_merge.run_batch(tmp_path / "jobs.yaml")
    assert [r.error for r in results] == [None] * 3
    assert cuda.counts["up"] == 2, "the adapter and the base, once for all"
    for s in (0.5, 1.0, 2.0):
        lora_merge.merge(files[0], [(files[1], s)], tmp_path / "want", device="cpu", overwrite=True)
        alike(tmp_path / f"{s}.safetensors", tmp_path / "want")
    assert not cuda.races and not cuda.registered


def test_number_that_is_not_finite_in_the_base_is_merged_as_on_the_cpu(tmp_path: Path, cuda: Pretended) -> None:
    base = {f"m.{n}.weight": rand(48, 32, seed=n).half() for n in range(4)}
    base["m.1.weight"][3, 5] = float("inf")
    adapter = {f"m.{n}.lora_{k}.weight": rand(*s) for n in range(4) for k, s in (("up", (48, 4)), ("down", (4, 32)))}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    lora_merge.merge(*files, tmp_path / "want", device="cpu")
    lora_merge.merge(*files, tmp_path / "got", device="cuda")
    alike(tmp_path / "got", tmp_path / "want")


@pytest.mark.parametrize("large", [torch.float16, torch.float8_e5m2])
def test_number_too_large_for_one_dtype_of_a_window_is_detected_beside_others(
    large: torch.dtype, tmp_path: Path, cuda: Pretended
) -> None:
    """Each dtype has extremes of its own, whichever comes last."""
    kinds = (torch.float16, torch.float8_e5m2)
    base = {f"m.{n}.weight": rand(48, 32, seed=n).to(kinds[n]) for n in range(2)}
    adapter = {f"m.{n}.lora_{k}.weight": rand(*s) for n in range(2) for k, s in (("up", (48, 4)), ("down", (4, 32)))}
    adapter[f"m.{kinds.index(large)}.lora_up.weight"] *= 1e6
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    with pytest.raises(lora_merge.MergeError, match="a number is too large"):
        lora_merge.merge(*files, tmp_path / "got", device="cuda", verify=False)
    assert cuda.counts["up"]


def test_adapter_with_nan_is_named(files: tuple[Path, Path], tmp_path: Path, cuda: Pretended) -> None:
    adapter = load(files[1])
    adapter["m.7.lora_up.weight"][3, 1] = float("nan")
    with pytest.raises(lora_merge.MergeError, match=r"NaN or infinite values(?s:.*)m\.7\.lora_up\.weight"):
        lora_merge.merge(files[0], save(adapter, tmp_path / "a"), tmp_path / "got", device="cuda")
    assert not (tmp_path / "got").exists() and not cuda.registered


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [(16, {}, "cpu"), (4, {}, "cpu"), (1, {}, "auto"), (16, {"device": "cuda:0"}, "cuda:0"),
     (16, {"adapters": 2, "method": "ties", "density": 0.2}, "auto")],
)  # fmt: skip
def test_auto_takes_a_gpu_only_where_it_is_faster(
    case: tuple[int, dict[str, Any], str], sdxl: Any, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, options, device = case
    monkeypatch.setattr(devices, "threads", lambda _: cores)
    plan = sdxl(**options)
    found = devices.choose([plan])
    assert found.device == device
    assert bool(found.why) is ("device" not in options)
    monkeypatch.setattr(devices, "started", lambda _: True)
    assert devices.choose([plan]).device == device
    assert not cuda.counts, "nothing is started to choose"


def test_auto_takes_the_cpu_for_a_small_merge_in_memory_and_starts_nothing(
    files: tuple[Path, Path], cuda: Pretended
) -> None:
    base, adapter = map(load, files)
    found = lora_merge.merge_state_dict(base, adapter)
    assert not cuda.counts
    for name, tensor in lora_merge.merge_state_dict(base, adapter, device="cpu").items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
    lora_merge.merge_state_dict(base, adapter, device="cuda")
    assert cuda.counts


def test_report_says_why_a_device_was_taken(files: tuple[Path, Path], tmp_path: Path, cuda: Pretended) -> None:
    report = lora_merge.merge(*files, tmp_path / "o")
    assert report.device == "cpu" and "on cuda with its start" in report.device_choice
    assert not cuda.counts
    lines = plain_lines(merge_rows(vars(report), verbose=True))
    assert any(line.startswith("device   cpu: about 0.0 s on the CPU") for line in lines)


def test_pinned_memory_and_windows_stay_within_max_memory(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    """Where the device cannot use the windows itself, they go through memory that counts; also blocks that go alone."""
    base = {f"m.{n}.weight": torch.zeros(1024, 640, dtype=torch.float16) for n in range(4)}
    adapter = {f"m.{n}.lora_{k}.weight": rand(*s) for n in range(4) for k, s in (("up", (1024, 4)), ("down", (4, 640)))}
    inputs = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    cuda.refuses_memory = True
    for options in ({"dtype": "fp32"}, {"rounding": "stochastic", "dtype": "bf16"}):
        job = make_job(
            inputs[0], [(inputs[1], 1.0)], tmp_path / "o", device="cuda", max_memory="16MiB", overwrite=True, **options
        )  # type: ignore[arg-type]
        cuda.most_pinned = 0
        plan = plan_merge(job)
        lora_merge.merge(
            *inputs, tmp_path / "o", device="cuda", max_memory="16MiB", overwrite=True, verify=False, **options
        )  # type: ignore[arg-type]
        assert 0 < cuda.most_pinned <= pinned_bytes(job)
        assert buffer_bytes(plan) + cuda.most_pinned <= job.max_memory
    assert not cuda.races


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3fn", "keep"])
def test_stochastic_rounding_is_that_of_the_cpu_and_made_for_windows_as_a_whole(
    dtype: str, files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    """Draws depend on names and places alone, so devices make the same; sums may differ in their last bit."""
    options: dict[str, Any] = {"rounding": "stochastic", "dtype": dtype, "seed": 5, "on_overflow": "saturate"}
    lora_merge.merge(*files, tmp_path / "want", device="cpu", verify=False, **options)
    lora_merge.merge(*files, tmp_path / "got", device="cuda", verify=False, **options)
    ours, theirs = load(tmp_path / "got"), load(tmp_path / "want")
    for name, tensor in theirs.items():
        assert (ours[name].double() != tensor.double()).logical_and(tensor.double().isfinite()).double().mean() < 0.01
    assert not cuda.races and cuda.counts["up"] <= 4, "one for the adapter, one for the window"


@pytest.mark.parametrize("dtype", ["bf16", "fp8_scaled"])
def test_rows_that_no_adapter_changes_are_drawn_as_on_the_cpu(dtype: str, tmp_path: Path, cuda: Pretended) -> None:
    """Of a fused weight of which an adapter changes one part, and in numbers no sums decide."""
    base = {name: w.repeat(4, 4) if w.ndim > 1 else w for name, w in flux().items()}
    key = "double_blocks.0.img_attn.qkv.weight"
    rows, cols = base[key].shape
    layer = "transformer.transformer_blocks.0.attn.to_k"
    lora = {f"{layer}.lora_A.weight": rand(4, cols), f"{layer}.lora_B.weight": rand(rows // 3, 4)}
    files, found = (save(base, tmp_path / "b"), save(lora, tmp_path / "a")), []
    for device in ("cpu", "cuda"):
        report = lora_merge.merge(*files, tmp_path / device, device=device, dtype=dtype, rounding="stochastic")
        found.append((load(tmp_path / device)[key].view(torch.uint8), report.numbers["tensors"]))
    (want, ours), (got, theirs) = found
    for part in (np.s_[: rows // 3], np.s_[-rows // 3 :]):
        assert torch.equal(got[part], want[part])
    assert ours[key]["of"] == theirs[key]["of"]
    assert not cuda.races


@pytest.mark.few(2)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("rows", [2048, 1280])
def test_numbers_of_a_report_are_those_of_the_cpu_however_windows_cut_weights(
    rows: int, rounding: str, tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks and a fifth one do not fit a window: one block, or two, lie in the next beside another weight."""
    for module in ("row_blocks", "device_memory", "patch_tensors"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.BLOCK_ELEMENTS", 2**18)
    base = {"a.weight": rand(rows, 512).bfloat16(), "b.weight": rand(512, 512, seed=1).bfloat16()}
    adapter: Tensors = {"b.lora_up.weight": 3 * rand(512, 4), "b.lora_down.weight": rand(4, 512)}
    adapter |= {"a.lora_up.weight": rand(rows, 4), "a.lora_down.weight": rand(4, 512)}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    found = [
        lora_merge.merge(*files, tmp_path / device, device=device, rounding=rounding, max_memory="16MiB", verify=False)
        for device in ("cpu", "cuda")
    ]
    for name in base:
        want, got = (report.numbers["tensors"][name] for report in found)
        assert got["of"] == want["of"] == base[name].numel()
        for key in ("weight", "change", "retained"):
            assert got[key] == pytest.approx(want[key], rel=0.1), key
    assert cuda.counts["up"] > 2 and not cuda.races


def test_blocks_that_are_folded_one_by_one_are_counted_once(
    tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second window a number is too large, so that its blocks go alone; those of the first go together."""
    for module in ("row_blocks", "device_memory", "patch_tensors"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.BLOCK_ELEMENTS", 2**18)
    base = save({"a.weight": rand(2560, 512).half()}, tmp_path / "b")
    up = rand(2560, 4)
    up[2000] = 1e6
    adapter = save({"a.lora_up.weight": up, "a.lora_down.weight": rand(4, 512)}, tmp_path / "a")
    options: Any = {"on_overflow": "saturate", "max_memory": "16MiB", "verify": False}
    found = [lora_merge.merge(base, adapter, tmp_path / name, device=name, **options) for name in ("cpu", "cuda")]
    assert found[0].saturated == found[1].saturated != {}
    assert [report.numbers["tensors"]["a.weight"]["of"] for report in found] == [2560 * 512] * 2
    assert cuda.counts["up"] > 1 and not cuda.races


EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "fp8_e5m2", "fp8_scaled"])
def test_device_that_rounds_to_8_bits_wrongly_leaves_that_to_the_host(
    dtype: str, tmp_path: Path, cuda: Pretended
) -> None:
    """As torch for CUDA 13.2 did; whole windows, and codecs."""
    cuda.rounds_wrongly = True
    base = {f"m.{n}.weight": rand(48, 32, seed=n).half() for n in range(4)}
    adapter = {f"m.{n}.lora_{k}.weight": rand(*s) for n in range(4) for k, s in (("up", (48, 4)), ("down", (4, 32)))}
    files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
    for device in ("cpu", "cuda"):
        lora_merge.merge(*files, tmp_path / device, device=device, dtype=dtype)
    ours, theirs = load(tmp_path / "cuda"), load(tmp_path / "cpu")
    for name, tensor in theirs.items():
        one, other = (t.reshape(-1).view(torch.uint8) for t in (ours[name], tensor))
        assert (one != other).double().mean() < 0.02, name
    assert cuda.counts["aten::baddbmm_"] and not cuda.races


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("dtype", ["keep", "fp16", "fp8_e4m3fn"])
def test_devices_of_other_kinds_get_what_they_have(
    kind: str, dtype: str, tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has streams here; Metal has no fp64 either, and both leave fp8 and decompositions to the host."""
    cuda.lacks = frozenset({*EIGHT, *({torch.float64} if kind == "mps" else ())})
    monkeypatch.setattr("lora_merge.engine.tensor_moves.queues", lambda _: False)
    for module in ("tensor_moves", "devices"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.FULL_DEVICES", {"cpu"})
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: 1)
    kinds = (torch.float16, torch.float64, *EIGHT)
    base = {f"m.{n}.weight": rand(24, 16, seed=n).to(kinds[n % 4]) for n in range(8)}
    adapter: Tensors = {}
    for n in range(8):
        skew = rand(3, 8, 8, seed=n)
        slots = (
            {"oft_blocks": skew - skew.mT}
            if n < 4
            else {"lora_up.weight": rand(24, 4), "lora_down.weight": rand(4, 16)}
        )
        adapter |= {f"m.{n}.{slot}": t.to(torch.float64 if n == 5 else t.dtype) for slot, t in slots.items()}
    files, options = (save(base, tmp_path / "b"), save(adapter, tmp_path / "a")), {"verify": False, "dtype": dtype}
    lora_merge.merge(*files, tmp_path / "want", device="cpu", **options)  # type: ignore[arg-type]
    lora_merge.merge(*files, tmp_path / "got", device="cuda", **options)  # type: ignore[arg-type]
    ours, theirs = load(tmp_path / "got"), load(tmp_path / "want")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].double(), tensor.double(), rtol=0.13 if tensor.dtype in EIGHT else 2e-3, atol=2e-3)  # fmt: skip
        assert (ours[name].double() != tensor.double()).double().mean() < 0.05 or tensor.dtype == torch.float64
    assert cuda.counts["up and waited for"] and not cuda.counts["registered"] and not cuda.races


def test_adapters_that_do_not_fit_a_device_are_uploaded_for_each_window(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is full is told; one with a small bound is not even tried."""
    lora_merge.merge(*files, tmp_path / "want", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("lora_merge.engine.device_memory.WORKSPACE", 0)
        report = lora_merge.merge(*files, tmp_path / "got", device="cuda", max_vram="300KiB")
    alike(tmp_path / "got", tmp_path / "want")
    assert not report.notes and cuda.counts["aten::baddbmm_"]

    def full(*_: object) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(AdaptersOnDevice, "_upload", full)
    report = lora_merge.merge(*files, tmp_path / "again", device="cuda")
    alike(tmp_path / "again", tmp_path / "want")
    assert report.notes == ("cuda:0 was short of memory: smaller batches were used",)
    assert not cuda.races
