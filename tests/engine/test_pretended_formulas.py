"""Every formula on a GPU that is not there (pretended_cuda.py): block by block, and in whole windows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lora_merge.algorithms import ALGORITHMS
from lora_merge.engine.block_folder import BlockFolder
from lora_merge.engine.devices import places
from lora_merge.engine.gpu_windows import DeviceWindows
from lora_merge.engine.patch_tensors import PatchTensors
from lora_merge.engine.row_blocks import blocks
from lora_merge.engine.windows import Fold
from tests.kit import cuda as gpu
from tests.kit.pretended_cuda import Pretended, pretended_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """One device, and layers that are few."""
    monkeypatch.setattr(gpu, "LAYERS", 3)
    with pretended_cuda(monkeypatch, 1) as found:
        yield found


@pytest.mark.few(2)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_formula_gives_what_it_gives_on_the_cpu(name: str, cuda: Pretended) -> None:
    layers = gpu.Layers(name, "F16")
    want = layers.folded("cpu", "F64")
    for staged in (gpu.STAGED, gpu.FEW):
        before = cuda.counts["up"] + cuda.counts["up and waited for"]
        got = layers.folded("cuda:0", "F32", staged)
        assert cuda.counts["up"] + cuda.counts["up and waited for"] > before and not cuda.races
        assert (got - want).abs().max() <= 2e-4 * want.abs().max()

    at = places("cuda:0", "F32")
    whole = DeviceWindows(BlockFolder(at, PatchTensors(lambda i: layers.tensors[i.name], layers.base)), None, 2**20)  # type: ignore[arg-type]
    base, folds, offset = [], list[Fold](), 0
    for target in layers.targets:
        stored = layers.tensors[target.name]
        base.append(stored.contiguous().view(torch.uint8).flatten())
        for b in blocks(target):
            folds.append(Fold(b, offset + b.first * b.cols * 2, offset * 2 + b.first * b.cols * 4, apart=True))
        offset += stored.nbytes
    lane = whole.blocks.lanes.lane()
    with torch.no_grad(), lane.turn():
        made = whole._merged(folds, torch.cat(base).to("cuda:0"), 0, lane)
    assert not cuda.races
    place = {f.at: values for f, values in zip(made.folds, made.work.cpu().split(made.sizes), strict=True)}
    found = torch.cat([place[f.at] for f in folds]).view(want.shape)
    assert (found - want).abs().max() <= 2e-4 * want.abs().max()
