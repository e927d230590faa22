"""Layers of every formula on a device, and how near its results must be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import lora_merge
from lora_merge.adapters.modules import Module
from lora_merge.algorithms import ALGORITHMS
from lora_merge.dtypes import StoredTensor
from lora_merge.engine import row_blocks
from lora_merge.engine.block_folder import BlockFolder, FoldOptions
from lora_merge.engine.devices import places
from lora_merge.engine.lanes import STAGED, MemoryLimits
from lora_merge.engine.patch_tensors import PatchTensors
from lora_merge.engine.tasks import FoldTask
from lora_merge.engine.tensor_moves import FILE_DTYPES, TORCH_DTYPES
from lora_merge.matching.formula import Patch
from lora_merge.matching.patch import PatchPart
from lora_merge.models.weights import RowSlice, Weight, WeightView
from lora_merge.planning.plan import OutputTensor
from lora_merge.proof.examples import EXAMPLES, tensors, weight
from tests.kit.files import load, save
from tests.kit.oracles import assert_rounded
from tests.kit.tensors import Tensors, rand


def close(got: Tensors, want: Tensors) -> None:
    """16 bits as near as rounding allows to the exact values, which `want` holds in fp32."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        exact, rounded = value.double(), value.to(got[key].dtype)
        error, least = (got[key].double() - exact).abs(), (rounded.double() - exact).abs()
        assert (error <= least + 4e-6 * exact.abs().max()).all(), key
        assert (got[key] != rounded).sum() <= rounded.numel() // 500, key


DEVICE = "cuda"

LAYERS = 24  # of one shape each: eight for every lane, in batches


FEW = 2**11  # bytes of one call, with which few layers go into it


def held(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), Path("memory"), 0, tensor.nbytes)


class Layers:
    """An example's weight and factors many times over, each layer's numbers scaled otherwise."""

    def __init__(self, name: str, stored: str) -> None:
        example, row = EXAMPLES[name], ALGORITHMS[name]
        whole, slots = weight(example), tensors(name, example)
        if ALGORITHMS[name].layout == "experts":
            whole = whole.reshape(-1, example.shape[2])
        self.tensors: Tensors = {}
        self.targets: list[OutputTensor] = []
        for n in range(LAYERS):
            mine = {
                slot: torch.from_numpy(t if slot in row.integer_slots else t * (1 - n / 99))
                for slot, t in slots.items()
            }
            mine = {s: t if s in row.integer_slots else t.to(TORCH_DTYPES[stored]) for s, t in mine.items()}
            base = torch.from_numpy(np.roll(whole, n)).to(TORCH_DTYPES[stored])
            self.tensors |= {f"{n}.base": base, **{f"{n}.{slot}": t for slot, t in mine.items()}}
            module = Module(str(n), "weight", {s: held(f"{n}.{s}", t) for s, t in mine.items()}, {}, (name,))
            piece, info = RowSlice(f"{n}.base", 0, *whole.shape), held(f"{n}.base", base)
            shapes = {s: tuple(t.shape) for s, t in mine.items()}
            settings = tuple(sorted(example.settings.items()))
            patch = Patch(0, module, name, shapes, example.scalars, settings, WeightView((piece,), example.shape))
            self.targets.append(
                OutputTensor(
                    f"{n}.base",
                    f"{n}.base",
                    "F32",
                    Weight(info.shape, info),
                    0,
                    base.numel() * 4,
                    (PatchPart(patch, piece, 0, 0.7),),
                )
            )
        self.base = {t.name: t.weight for t in self.targets}

    def folded(self, device: str, compute: str, staged: int = STAGED) -> Tensor:
        """[layers, rows, cols] in fp32, by three threads. `staged`: the bytes of one call."""
        merged = [torch.empty(self.tensors[t.name].shape) for t in self.targets]
        with ThreadPoolExecutor(3) as pool:
            at = places(device, compute)
            tensors = PatchTensors(lambda info: self.tensors[info.name], self.base)
            folder = BlockFolder(at, tensors, pool, FoldOptions(limits=MemoryLimits(staged=staged)))
            folder.fold([
                FoldTask(b, self.tensors[t.name][b.first : b.last], into[b.first : b.last])
                for t, into in zip(self.targets, merged, strict=True) for b in row_blocks.blocks(t)
            ])  # fmt: skip
        assert not folder.memory.notes, "nothing was folded elsewhere"
        return torch.stack(merged)


def oft(n: int, out: int) -> Tensors:
    blocks_of = 8
    skew = rand(out // blocks_of, blocks_of, blocks_of, seed=n)
    return {f"layer.{n}.oft_blocks": skew - skew.transpose(1, 2)}


def lora(n: int, out: int, width: int) -> Tensors:
    return {
        f"layer.{n}.lora_up.weight": rand(out, 8, seed=n),
        f"layer.{n}.lora_down.weight": rand(8, width, seed=n + 50),
    }


def expect_windows_apart(files: tuple[Path, Path], tmp_path: Path, dtype: str, memory: str) -> None:  # fmt: skip
    """Factors are kept for a window and dropped while the next one is folded; on a GPU kernels may still want them."""
    lora_merge.merge(*files, tmp_path / "want.safetensors", device="cpu", compute_dtype="fp64", dtype="fp32")
    want = load(tmp_path / "want.safetensors")
    for n in range(3):
        out = tmp_path / f"{n}.safetensors"
        report = lora_merge.merge(*files, out, device=DEVICE, dtype=dtype, max_memory=memory)
        assert report.device.startswith(DEVICE) and report.verified is not None
        close(load(out), want)


def expect_layers_rounded(tmp_path: Path, dtype: str, options: dict[str, str]) -> None:
    base = {f"layer.{n}.weight": rand(300, 200 + n % 3, seed=n).to(torch.float16) for n in range(40)}
    adapter = {}
    for n in range(40):
        adapter[f"layer.{n}.lora_up.weight"] = rand(300, 8, seed=n)
        adapter[f"layer.{n}.lora_down.weight"] = rand(8, 200 + n % 3, seed=n)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        arguments = {"device": "cuda", **options}
        files = save(base, tmp_path / "b"), save(adapter, tmp_path / "a")
        report = lora_merge.merge(*files, tmp_path / "o", dtype=dtype, **arguments)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert report.device.startswith("cuda") and not report.notes, "nothing was folded elsewhere"
    merged, exact = load(tmp_path / "o"), dict[str, torch.Tensor]()
    for n in range(40):
        up, down = adapter[f"layer.{n}.lora_up.weight"].double(), adapter[f"layer.{n}.lora_down.weight"].double()
        exact[f"layer.{n}.weight"] = base[f"layer.{n}.weight"].double() + up @ down
    if dtype == "fp32":
        for key, value in exact.items():
            assert_rounded(merged[key], value)
    else:
        close(merged, {key: value.float() for key, value in exact.items()})
