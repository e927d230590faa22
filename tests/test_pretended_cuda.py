"""Whole merges through streams and pinned memory of a GPU that is not there (pretended_cuda.py), values and all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.devices import _loaded
from lora_merge.placement import _stream

from .pretended_cuda import Pretended, Stream, pretended_cuda
from .support import Tensors, load, rand, save

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_cuda.py")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """Two devices."""
    _stream.cache_clear()
    with pretended_cuda(monkeypatch) as found:
        yield found
    _stream.cache_clear()
    _loaded.clear()


def model() -> Tensors:
    return {f"m.{n}.weight": rand(96, 64, seed=n).half() for n in range(24)} | {"other.weight": rand(8, 8)}


def adapter() -> Tensors:
    """LoRA, DoRA, LoHa, OFT in turn."""
    found: Tensors = {}
    for n in range(24):
        up, down = rand(96, 4, seed=n), rand(4, 64, seed=n + 50)
        lora = {"lora_up.weight": up, "lora_down.weight": down}
        skew = rand(12, 8, 8, seed=n)
        mine = [
            lora, lora | {"dora_scale": rand(96, 1, seed=n).abs() + 1},
            {"hada_w1_a": up, "hada_w1_b": down, "hada_w2_a": up + 1, "hada_w2_b": down - 1},
            {"oft_blocks": skew - skew.mT},
        ][n % 4]  # fmt: skip
        found |= {f"m.{n}.{k}": t for k, t in mine.items()}
    return found


def close(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(
        got[k].shape == t.shape and bool(((got[k].double() - t.double()).abs() <= 2e-3 * t.double().abs() + 1e-3).all())
        for k, t in want.items()
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return save(model(), tmp_path / "b"), save(adapter(), tmp_path / "a")


@pytest.mark.parametrize("device", ["auto", "cuda:1", "cuda:0,cuda:1"])
@pytest.mark.parametrize("options", [{}, {"dtype": "fp32", "compute_dtype": "fp64"}], ids=["kept", "fp64"])
def test_merges_are_what_they_are_on_the_cpu(
    device: str, options: dict[str, str], files: tuple[Path, Path], tmp_path: Path, cuda: Pretended
) -> None:
    lora_merge.merge(*files, tmp_path / "want", device="cpu", **options)  # type: ignore[arg-type]
    assert not cuda.counts
    report = lora_merge.merge(*files, tmp_path / "got", device=device, **options)  # type: ignore[arg-type]
    assert report.device == ("cuda:0" if device == "auto" else device)
    assert not report.notes
    assert close(load(tmp_path / "got"), load(tmp_path / "want"))
    assert not cuda.races
    assert cuda.counts["aten::baddbmm_"] <= 3, "six layers of LoRA in one call, or a window's"
    assert cuda.counts["down"] <= 8, "one for a kind, and none that is waited for"
    assert not cuda.counts["down and waited for"]


def test_what_is_read_before_it_is_there_is_seen(
    files: tuple[Path, Path], tmp_path: Path, cuda: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in is worth something: where nobody waits for a stream, results are no numbers."""
    monkeypatch.setattr("lora_merge.devices.unusable", lambda _: "")
    monkeypatch.setattr("lora_merge.devices._load_decompositions", lambda _: None)
    monkeypatch.setattr(Stream, "synchronize", lambda _: None)
    with pytest.raises(lora_merge.MergeError, match="no number"):
        lora_merge.merge(*files, tmp_path / "got", device="cuda:0")
    assert cuda.counts
