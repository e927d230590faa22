"""Codecs compute where formulas do: a merge into a quantised base on a device gives what the CPU gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine import tensors
from lora_merge.files.encodings.arithmetic import CACHED_TABLES
from tests.files.quantised_forms import FORMS
from tests.kit import gguf_files as by_library
from tests.kit.files import load, save
from tests.kit.gguf_models import flux, style
from tests.kit.pretended_cuda import Pretended, pretended_cuda
from tests.kit.quantised import adapter, base

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
STOCHASTIC = ("ComfyUI int8 rows", "ComfyUI nvfp4", "bitsandbytes nf4")
CASES: list[tuple[str, dict[str, str]]] = [
    *((name, {"dtype": "bf16"} if form.decode_only else {}) for name, form in FORMS.items()),
    *((name, {"rounding": "stochastic"}) for name in STOCHASTIC),
]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pretended, set[str]]]:
    """A device, one that is not there on a machine without one, and the devices on which codecs computed."""
    used: set[str] = set()
    computing = tensors.computing

    def seen(device: torch.device) -> Any:
        used.add(str(device))
        return computing(device)

    for module in ("tensors", "requantisation"):
        monkeypatch.setattr(f"lora_merge.engine.{module}.computing", seen)
    if torch.cuda.is_available():
        yield Pretended(), used
        return
    try:
        with pretended_cuda(monkeypatch, 1) as found:
            yield found, used
    finally:
        monkeypatch.undo()
        for forget in CACHED_TABLES:
            forget()


def differing(a: torch.Tensor, b: torch.Tensor) -> float:
    """The share of bytes that differ: blocks go into a product together on a device, which may turn a last bit."""
    ours, theirs = (t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b))
    return float((ours != theirs).double().mean())


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "".join(v))
def test_codes_are_decoded_and_encoded_on_the_device(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = base(FORMS[name], tmp_path / "base")
    lora = save(adapter(), tmp_path / "lora.safetensors")
    last = "model.safetensors" if source.is_dir() else ""
    lora_merge.merge(source, lora, tmp_path / "want", device="cpu", verify=False, **options)
    with watched(monkeypatch) as (cuda, used):
        lora_merge.merge(source, lora, tmp_path / "got", device="cuda", verify=False, **options)
    got, want = load(tmp_path / "got" / last), load(tmp_path / "want" / last)
    assert list(got) == list(want)
    assert all(differing(got[key], tensor) < 0.01 for key, tensor in want.items())
    assert "cuda:0" in used and not cuda.races and not cuda.faults


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0", "Q3_K", "Q5_K", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0"])
def test_blocks_of_gguf_are_made_on_the_device(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = by_library.write(tmp_path / "base.gguf", "flux", flux(kind))
    lora = save(style(), tmp_path / "lora.safetensors")
    lora_merge.merge(source, lora, tmp_path / "want.gguf", device="cpu", verify=False)
    with watched(monkeypatch) as (cuda, used):
        lora_merge.merge(source, lora, tmp_path / "got.gguf", device="cuda", verify=False)
    got, want = (
        torch.frombuffer(bytearray((tmp_path / n).read_bytes()), dtype=torch.uint8) for n in ("got.gguf", "want.gguf")
    )
    assert differing(got, want) < 0.01
    assert "cuda:0" in used and not cuda.races and not cuda.faults
