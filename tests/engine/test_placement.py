"""Any mixture of devices and dtypes: brought together in one place, before the formula, once.

CI has no GPU. Fake tensors know their device and refuse to meet one of another, so the whole fold is run
with fake cuda tensors; the numbers are checked on the CPU, over every mixture of dtypes.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.dtypes import StoredTensor
from lora_merge.engine.block_folder import BlockFolder
from lora_merge.engine.devices import DeviceChoice, place, places, precise, threads, unusable
from lora_merge.engine.fold import StackedPatch, fold
from lora_merge.engine.lanes import MemoryPolicy
from lora_merge.engine.patch_tensors import PatchTensors
from lora_merge.engine.tasks import FoldTask
from lora_merge.engine.tensor_moves import FILE_DTYPES, DeviceStream, Placement, as_scalars, convert, land, stage
from tests.kit.files import save
from tests.kit.oracles import assert_rounded
from tests.kit.package import nodes
from tests.kit.pairs import examples
from tests.kit.tensors import Tensors, rand

ROOT = Path(__file__).parents[2]
STORED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
SECOND = (
    "cuda:0" if torch.cuda.is_available() and torch.cuda.device_count() == 1 else "cuda:1"
)  # torch checks fakes too
OUTPUT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOVES = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "xpu", "mps"}


def sources() -> Iterator[Path]:
    yield from (ROOT / "algorithms").glob("*.py")
    yield from (ROOT / "lora_merge").rglob("*.py")


CASTS = {"to", "float", "double"}
ON_THE_HOST = {"encodings", "gguf", "adapters_out", "viewing"}
"""Rooms that compute on the host alone. They cast between stored numbers and fp32 or fp64, and move nothing."""


def moves(call: ast.Call) -> bool:
    """Whether a call of a cast names a device."""
    named = [a.attr for a in call.args if isinstance(a, ast.Attribute)]
    text = any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args)
    return "device" in named or text or any(k.arg == "device" for k in call.keywords)


def test_tensor_moves_alone_moves_or_casts_tensors() -> None:
    for path in sources():
        allowed = CASTS if ON_THE_HOST & {*path.relative_to(ROOT).parts} else set()
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
                cast = node.func.attr in allowed and not moves(node)
                assert path == ROOT / "lora_merge/engine/tensor_moves.py" or cast, f"{path.name}:{node.lineno}"


def linear(dtype: torch.dtype, out: int = 12, width: int = 10, rank: int = 3) -> Tensors:
    """LoRA, LoHa, GLoRA and a whole difference, one layer each, stored in `dtype`."""
    tensors = {
        "m.lora.lora_up.weight": rand(out, rank), "m.lora.lora_down.weight": rand(rank, width),
        "m.loha.hada_w1_a": rand(out, rank, seed=1), "m.loha.hada_w1_b": rand(rank, width, seed=1),
        "m.loha.hada_w2_a": rand(out, rank, seed=2), "m.loha.hada_w2_b": rand(rank, width, seed=2),
        "m.glora.a1.weight": rand(width, rank), "m.glora.a2.weight": rand(rank, width),
        "m.glora.b1.weight": rand(out, rank), "m.glora.b2.weight": rand(rank, width, seed=4),
        "m.full.diff": rand(out, width),
    }  # fmt: skip
    return {k: t.to(dtype) for k, t in tensors.items()}


def exact(base: Tensors, adapter: Tensors, strength: float) -> Tensors:
    """The four formulas in fp64 on the values as stored."""
    t = {k: v.double() for k, v in adapter.items()}
    w = {k: v.double() for k, v in base.items()}
    glora = w["m.glora.weight"] @ t["m.glora.a1.weight"] @ t["m.glora.a2.weight"]
    loha = (t["m.loha.hada_w1_a"] @ t["m.loha.hada_w1_b"]) * (t["m.loha.hada_w2_a"] @ t["m.loha.hada_w2_b"])
    deltas = {
        "m.lora.weight": t["m.lora.lora_up.weight"] @ t["m.lora.lora_down.weight"], "m.loha.weight": loha,
        "m.glora.weight": glora + t["m.glora.b1.weight"] @ t["m.glora.b2.weight"], "m.full.weight": t["m.full.diff"],
    }  # fmt: skip
    return {k: v + strength * deltas[k] for k, v in w.items()}


def model(dtype: torch.dtype) -> Tensors:
    names = ("lora", "loha", "glora", "full")
    return {f"m.{n}.weight": rand(12, 10, seed=i, scale=1.0).to(dtype) for i, n in enumerate(names)}


@given(
    base=st.sampled_from(STORED), adapter=st.sampled_from(STORED), output=st.sampled_from(sorted(OUTPUT)),
    compute=st.sampled_from(["fp32", "fp64"]), strength=st.sampled_from([1.0, -0.5, 0.3]),
)  # fmt: skip
@settings(max_examples=examples(80))
def test_every_mixture_of_dtypes_gives_the_rounded_exact_result(
    base: torch.dtype, adapter: torch.dtype, output: str, compute: str, strength: float
) -> None:
    weights, factors = model(base), linear(adapter)
    merged = lora_merge.merge_state_dict(weights, [(factors, strength)], dtype=output, compute_dtype=compute)
    for key, value in exact(weights, factors, strength).items():
        assert merged[key].dtype == OUTPUT[output]
        assert_rounded(merged[key], value)


@pytest.mark.few(1)
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_low_compute_precision_runs_on_every_mixture(compute: str) -> None:
    for base, adapter in product(STORED, STORED):
        merged = lora_merge.merge_state_dict(model(base), linear(adapter), compute_dtype=compute, dtype="fp32")
        for key, value in exact(model(base), linear(adapter), 1.0).items():
            assert (merged[key].double() - value).abs().max() < 0.1


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of a GPU, or of two, where there is one in truth: nothing is to open a stream there or pin memory for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("lora_merge.memory.state_index._in_memory", lambda _: True)  # fakes have no values
    monkeypatch.setattr("lora_merge.engine.tensor_moves.odd", lambda _: False)
    monkeypatch.setattr("lora_merge.engine.block_folder.stop_where", lambda _: None)
    monkeypatch.setattr("lora_merge.engine.change_sample.RowSample.measured", lambda *_, **__: ())


@pytest.mark.few(2)
@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize(("base_on", "adapter_on", "at"), list(product(["cpu", "cuda:0"], repeat=3)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_never_meet_on_two_devices(base_on: str, adapter_on: str, at: str, dtype: torch.dtype) -> None:
    """Each formula of `linear`, planned for real, folded on fake tensors of any mixture of devices."""
    with FakeTensorMode(allow_non_fake_inputs=False):
        weights = {k: torch.empty(12, 10, dtype=torch.bfloat16, device=base_on) for k in model(torch.float32)}
        factors = {k: torch.empty(t.shape, dtype=dtype, device=adapter_on) for k, t in _shapes().items()}
        intos = _fold(weights, factors, Placement(torch.device(at), torch.float32))
    assert all(into.device.type == "cpu" for into in intos)


def _shapes() -> Tensors:
    return {k: torch.empty(t.shape, device="meta") for k, t in linear(torch.float32).items()}


def _fold(weights: Tensors, factors: Tensors, at: Placement, output: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Plan from shapes, then fold the given tensors wherever they are."""
    from lora_merge.engine.row_blocks import blocks
    from lora_merge.job import make_job
    from lora_merge.memory.merge import _adapters  # the plan of merge_state_dict, without its fetching of values
    from lora_merge.memory.state_index import index_of
    from lora_merge.models.names import names
    from lora_merge.planning.changes import match
    from lora_merge.planning.inputs import Inputs
    from lora_merge.planning.make_plan import outputs

    base = index_of("state dict", weights)
    paths, files, _ = _adapters([factors])
    job = make_job("state dict", paths, "state dict")
    matched = match(Inputs(job, base, names(base), tuple(files)))
    everything = weights | factors
    folder = BlockFolder((at,), PatchTensors(lambda info: everything[info.name], matched.weights))
    intos = []
    for _, target in outputs(matched):
        for block in blocks(target):
            into = torch.empty(block.last - block.first, block.cols, dtype=output)
            folder.fold([FoldTask(block, weights[target.name].reshape(-1, block.cols), into)])
            intos.append(into)
    return intos


# ------------------------------------------------ five failures of other tools, one test each


@pytest.mark.usefixtures("without_cuda")
def test_regression_weight_diff_moved_to_the_cpu_in_mid_expression() -> None:
    """LyCORIS: `weight + diff.detach().cpu()` with the weight still on the GPU. Here everything lands once, at the end."""
    with FakeTensorMode():
        base = torch.empty(2, 12, 10, device="cuda:0")
        row = ALGORITHMS["full"]
        diff = stage([torch.empty(12, 10, dtype=torch.float16)] * 2, Placement(torch.device("cuda:0"), torch.float32))
        strength = as_scalars([1.0, 0.5], Placement(torch.device("cuda:0"), torch.float32))
        merged = fold(base, [StackedPatch(row, row.tensors(diff), strength, slice(0, 12))])
        assert merged.device.type == "cuda"
        into = [torch.empty(12, 10, dtype=torch.bfloat16) for _ in range(2)]
        land(merged, into)
        assert all(t.device.type == "cpu" and not t.requires_grad for t in into)


def test_regression_glora_with_a_bf16_base_and_fp32_factors() -> None:
    """LyCORIS: "expected m1 and m2 to have the same dtype" on Flux; the shapes of its img_attn.qkv and linear2."""
    for out, width in ((9216, 3072), (3072, 15360)):
        weight = (rand(out // 16, width // 16) * 0.1).bfloat16()
        o, w = weight.shape
        factors = {
            "b.a1.weight": rand(w, 16),
            "b.a2.weight": rand(16, w),
            "b.b1.weight": rand(o, 16),
            "b.b2.weight": rand(16, w),
        }
        merged = lora_merge.merge_state_dict({"b.weight": weight}, factors)["b.weight"]
        f = {k.removeprefix("b."): v.double() for k, v in factors.items()}
        value = weight.double() + weight.double() @ f["a1.weight"] @ f["a2.weight"] + f["b1.weight"] @ f["b2.weight"]
        assert merged.dtype == torch.bfloat16
        assert_rounded(merged, value)


@pytest.mark.usefixtures("without_cuda")
def test_regression_cached_adapter_left_on_another_device_between_two_merges() -> None:
    """OneTrainer: the second merge met tensors cached on the first one's device. Here factors are staged anew each time."""
    with FakeTensorMode():
        weights = {k: torch.empty(12, 10, dtype=torch.bfloat16) for k in model(torch.float32)}
        cached = {k: torch.empty(t.shape) for k, t in _shapes().items()}
        for at in ("cuda:0", "cpu", SECOND, "cpu"):
            _fold(weights, cached, Placement(torch.device(at), torch.float32))
            assert {t.device.type for t in cached.values()} == {"cpu"}
    adapter, weights = linear(torch.float32), model(torch.bfloat16)
    first = lora_merge.merge_state_dict(weights, adapter)
    second = lora_merge.merge_state_dict(weights, adapter)
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.usefixtures("without_cuda")
def test_regression_inputs_handed_over_on_another_device_than_the_model() -> None:
    """AI-Toolkit: no central place for devices. One layer's up on the GPU, its down on the CPU, the base on a second GPU."""
    with FakeTensorMode():
        weights = {k: torch.empty(12, 10, device=SECOND) for k in model(torch.float32)}
        factors = {
            k: torch.empty(t.shape, device=("cuda:0", "cpu")[n % 2]) for n, (k, t) in enumerate(_shapes().items())
        }
        for at in ("cpu", "cuda:0", SECOND):
            intos = _fold(weights, factors, Placement(torch.device(at), torch.float32))
            assert {t.device.type for t in intos} == {"cpu"}


def test_regression_a_replaced_head_of_another_shape_arrives_in_the_right_dtype() -> None:
    """LLMs-from-scratch: a new classification head stayed on the CPU in fp32 while the model was elsewhere, in bf16."""
    weights = {"trf.weight": rand(12, 10).bfloat16(), "out_head.weight": rand(50, 10).bfloat16()}
    adapter = {
        "trf.lora_up.weight": rand(12, 2), "trf.lora_down.weight": rand(2, 10),
        "out_head.weight": rand(2, 10, seed=9),
    }  # fmt: skip
    merged = lora_merge.merge_state_dict(weights, adapter)
    assert merged["out_head.weight"].dtype == torch.bfloat16
    assert torch.equal(merged["out_head.weight"], adapter["out_head.weight"].bfloat16())
    assert merged["trf.weight"].shape == (12, 10)


def test_gradients_and_views_stay_outside() -> None:
    weights = {"m.a.weight": torch.nn.Parameter(rand(12, 20)[:, ::2])}
    adapter = {
        "m.a.lora_up.weight": rand(12, 3).requires_grad_(),
        "m.a.lora_down.weight": rand(20, 3).T[:, ::2].contiguous(),
    }
    before = weights["m.a.weight"].detach().clone()
    merged = lora_merge.merge_state_dict(weights, adapter)
    assert not merged["m.a.weight"].requires_grad
    assert torch.equal(weights["m.a.weight"], before)
    torch.testing.assert_close(
        merged["m.a.weight"], before + (adapter["m.a.lora_up.weight"] @ adapter["m.a.lora_down.weight"]).detach()
    )


def test_every_file_dtype_has_a_torch_dtype_and_back() -> None:
    assert {StoredTensor("a", name, (), Path(), 0, 0).dtype for name in FILE_DTYPES.values()} == set(
        FILE_DTYPES.values()
    )
    assert len(FILE_DTYPES) >= 18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_gpu_gives_the_numbers_of_the_cpu() -> None:
    for base, adapter in product(STORED[:4], STORED[:4]):
        weights = {k: t.cuda() for k, t in model(base).items()}
        merged = lora_merge.merge_state_dict(weights, linear(adapter), device="cuda", dtype="fp32")
        for key, value in exact(model(base), linear(adapter), 1.0).items():
            assert merged[key].device.type == "cpu"
            assert_rounded(merged[key], value)


# ------------------------------------------------ devices that cannot do everything, or nothing


class Metal(FakeTensorMode):
    """Refuses of fake tensors, on cuda, what Metal refuses: dtypes that it has not, and decompositions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                assert tensor.dtype not in {torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
                assert "linalg" not in str(func)
                self.seen = True
        return out


@pytest.mark.few(1)
@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize(("stored", "output"), list(zip(STORED, STORED[::-1], strict=True)))
def test_metal_is_given_only_what_it_holds(
    stored: torch.dtype, output: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensor_moves", "devices"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.FULL_DEVICES", {"cpu"})
    with Metal() as metal:
        for more in (linear(torch.float32), {"m.full.oft_blocks": torch.empty(3, 4, 4)}):
            factors = {k: torch.empty(t.shape, dtype=stored) for k, t in more.items()}
            weights = {k: torch.empty(12, 10, dtype=stored) for k in model(torch.float32)}
            intos = _fold(weights, factors, Placement(torch.device("cuda:0"), torch.float32), output)
            assert {t.device.type for t in intos} == {"cpu"}
        assert metal.seen


def test_decompositions_are_in_fp64_wherever_the_rest_is() -> None:
    for device, where in {"cpu": "cpu", "mps": "cpu", "xpu": "cpu", "cuda": "cuda"}.items():
        at = precise(Placement(torch.device(device), torch.float32))
        assert (at.device.type, at.dtype) == (where, torch.float64)


def test_decompositions_of_cuda_are_loaded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch fails where two make their first one at a time (pytorch#90613)."""
    calls = []

    def inv(tensor: object) -> None:
        calls.append(tensor)
        time.sleep(0.01)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lora_merge.engine.devices._loaded", [])
    monkeypatch.setattr(torch, "ones", lambda *_, device: device)
    monkeypatch.setattr(torch.linalg, "inv", inv)
    at = Placement(torch.device("cuda"), torch.float32)
    with ThreadPoolExecutor(3) as pool:
        assert {p.dtype for p in pool.map(precise, [at] * 6)} == {torch.float64}
    assert len(calls) == 1


def test_lanes_are_several_on_cuda_alone() -> None:
    for device, lanes in {"cuda:0": 3, "mps": 1, "xpu:0": 1}.items():
        assert threads([Placement(torch.device(device), torch.float32)]) == lanes
    assert threads([Placement(torch.device("cuda:0"), torch.float32)], 2**28) == 1, "too little memory for three"


def test_auto_passes_over_a_device_that_does_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_merge.engine.devices._count", lambda kind: int(kind in ("cpu", "cuda", "mps")))
    broken = {"cuda": "no kernel image is available for execution on the device"}
    monkeypatch.setattr("lora_merge.engine.devices.unusable", lambda where: broken.get(where.type, ""))
    assert place("auto", "F32").device.type == "mps"
    assert place("auto", "F64").device.type == "cpu"
    with pytest.raises(lora_merge.MergeError, match="no kernel image"):
        place("cuda", "F32")
    with pytest.raises(lora_merge.MergeError, match="fp64"):
        place("mps", "F64")
    weights, adapter = save(model(torch.float32), tmp_path / "b"), save(linear(torch.float32), tmp_path / "a")
    monkeypatch.setattr("lora_merge.engine.window_merger.choose", lambda plans: DeviceChoice(plans[0].job.device))
    report = lora_merge.merge(weights, adapter, tmp_path / "o", compute_dtype="fp64")
    assert report.device == "cpu"
    assert report.notes == (f"cuda is not used: {broken['cuda']}", "mps is not used: mps computes no fp64")


def test_device_that_is_listed_and_not_usable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, device: torch.device) -> Tensor:
        raise RuntimeError(f"{device} error: out of memory\nmore")

    monkeypatch.setattr(torch, "ones", ones)
    assert unusable(torch.device("cpu")) == ""
    assert unusable(torch.device("cuda")) == "cuda error: out of memory"


# ------------------------------------------------ several blocks at a time, several devices, too little memory


def _merge(folder: Path, name: str, **options: object) -> bytes:
    base = {f"layer.{n}.weight": rand(1100, 1000 + n % 2, seed=n).half() for n in range(6)}
    adapter = {
        f"layer.{n}.{slot}": t for n in range(6)
        for slot, t in {"lora_up.weight": rand(1100, 8), "lora_down.weight": rand(8, 1000 + n % 2)}.items()
    }  # fmt: skip
    files = save(base, folder / "b"), save(adapter, folder / "a")
    lora_merge.merge(*files, folder / name, verify=False, device="cpu", **options)
    return (folder / name).read_bytes()


def test_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for count, within in ((1, 1), (1, 2), (4, 1)):
        monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_, count=count: count)
        before = torch.get_num_threads()
        torch.set_num_threads(within)
        results.append(_merge(tmp_path, f"{count}-{within}"))
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


SHORT = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GiB, max allowed: 18.13 GiB)."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("error", SHORT, ids=["torch", "mps", "cublas", "driver"])
def test_smaller_batches_are_used_when_the_device_is_short_of_memory(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _merge(tmp_path, "whole")
    monkeypatch.setattr(MemoryPolicy, "most", lambda *_: 8)  # a CPU in a device's place
    failed = []

    def short(base: Tensor, stacks: list[StackedPatch]) -> Tensor:
        if base.numel() > 2**21 + 2**20 // 2:
            failed.append(len(base))
            raise error
        return fold(base, stacks)

    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": short})
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: 1)
    assert _merge(tmp_path, "parts") == whole
    assert len(failed) == 1, "the size that fits is found once"
    options = {"device": "cpu", "verify": False, "overwrite": True}
    report = lora_merge.merge(tmp_path / "b", tmp_path / "a", tmp_path / "parts", **options)
    assert report.notes == ("cpu was short of memory: smaller batches were used",)

    def never(base: Tensor, stacks: list[StackedPatch]) -> Tensor:
        raise error

    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": never})
    with pytest.raises(lora_merge.MergeError, match="out of memory") as caught:
        lora_merge.merge(tmp_path / "b", tmp_path / "a", tmp_path / "parts", **options)
    assert caught.value.exit_code == 5
    assert str(error).splitlines()[0] in caught.value.where


def test_block_that_does_not_fit_beside_others_is_folded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with room for one block at a time, under four lanes."""
    alone, used = _merge(tmp_path, "alone"), Lock()

    def short(base: Tensor, stacks: list[StackedPatch]) -> Tensor:
        if not used.acquire(blocking=False):
            raise SHORT[0]
        try:
            time.sleep(0.01)
            return fold(base, stacks)
        finally:
            used.release()

    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": short})
    monkeypatch.setattr("lora_merge.engine.window_merger.threads", lambda *_: 4)
    assert _merge(tmp_path, "together") == alone
    options = {"device": "cpu", "verify": False, "overwrite": True}
    report = lora_merge.merge(tmp_path / "b", tmp_path / "a", tmp_path / "together", **options)
    assert "cpu was short of memory: a block did not fit next to the work of others" in report.notes


def test_errors_of_other_kinds_are_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(base: Tensor, stacks: list[StackedPatch]) -> Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("lora_merge.engine.fold.FOLD_RULES", {"sum": broken})
    with pytest.raises(lora_merge.MergeError, match="unexpected failure: RuntimeError: an illegal") as caught:
        lora_merge.merge_state_dict(model(torch.float32), linear(torch.float32))
    assert type(caught.value) is lora_merge.MergeError and type(caught.value.__cause__) is RuntimeError


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(16, 16), (33, 17), (5, 333), (1, 64), (64, 1), (7, 7), (2, 5), (16, 1000)])
def test_bytes_do_not_depend_on_the_window(shape: tuple[int, int]) -> None:
    """Blocks in one call give what each gives alone."""
    rows, cols = shape
    torch.manual_seed(rows * cols)
    base = {f"layers.{i}.q.weight": torch.randn(rows, cols) for i in range(5)}
    for rank in (1, 8):
        pairs = {f"layers.{i}.q.lora_up.weight": torch.randn(rows, rank) for i in range(5)}
        pairs |= {f"layers.{i}.q.lora_down.weight": torch.randn(rank, cols) for i in range(5)}
        together = lora_merge.merge_state_dict(base, pairs)
        for i in (1, 4):
            one = f"layers.{i}.q"
            alone = lora_merge.merge_state_dict(
                {k: v for k, v in base.items() if k.startswith(one)},
                {k: v for k, v in pairs.items() if k.startswith(one)},
            )
            assert torch.equal(alone[f"{one}.weight"], together[f"{one}.weight"])


@pytest.mark.parametrize("device", ["cpu,cpu", "cpu,cuda:0", "cuda:0,cuda:0", "nonsense,cpu"])
def test_lists_of_devices_that_cannot_share_the_work_are_refused(device: str) -> None:
    with pytest.raises(lora_merge.MergeError):
        places(device, "F32")


def test_lazy_negation_is_carried_out() -> None:
    """Its bits are the opposite of its values; what writes tensors to files takes the bits."""
    values = torch.tensor([[1.0, -2.0]])
    lazy = torch._neg_view(-values)
    assert lazy.is_neg()
    got = lora_merge.merge_state_dict({"a.weight": lazy, "b.weight": values.clone()}, {
        "b.lora_up.weight": torch.ones(1, 1), "b.lora_down.weight": torch.ones(1, 2)
    })["a.weight"]  # fmt: skip
    assert not got.is_neg() and got.equal(values)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_stored_fp8_becomes_the_bits_of_the_cast_of_torch(stored: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    for some in (codes, codes[codes.float().isfinite()]):
        lane = DeviceStream(Placement(torch.device("cpu"), torch.float32))
        assert torch.equal(stage([some], lane.at, lane).view(torch.int32)[0], some.float().view(torch.int32))
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            into = torch.empty(len(some), dtype=dtype)
            convert(some, into)
            assert torch.equal(into.view(torch.uint8), some.to(dtype).view(torch.uint8)), dtype
