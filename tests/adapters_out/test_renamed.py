"""`convert` where no number changes: without torch, and with the result of the way that computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out import convert
from lora_merge.adapters_out.outcome.single import WIDEN, is_finite
from lora_merge.disk.draft import Draft, Drafted
from lora_merge.errors import InputError, VerificationFailed
from tests.kit.files import strays
from tests.kit.flux import flux, of_flux
from tests.kit.pairs import examples

LAYER = "lora_unet_double_blocks_0_img_attn_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_file(flux(), made := tmp_path_factory.mktemp("base") / "base.safetensors")
    return made


def computed(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> Any:
    """Return the result of the way through torch."""
    with monkeypatch.context() as patched:
        patched.setattr(convert, "all_factors", lambda *_: [])
        return act()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [("comfy", 1.0), ("keep", 1.0), ("comfy", 1e-6), ("comfy", 1e15)])
def test_the_file_and_the_report_are_those_of_the_other_way(
    base: Path, dtype: torch.dtype, case: tuple[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, one, other = (tmp_path / f"{name}.safetensors" for name in "abc")
    to, scale = case
    save_file({k: v if k.endswith("alpha") else (v.double() * scale).clamp(-6e4, 6e4).to(dtype)
               for k, v in of_flux().items()}, path, {"ss_network_dim": "4", "sshs_model_hash": "old"})  # fmt: skip
    own = lora_merge.convert(path, one, base=base, to=to, alpha="keep", title="t")
    their = computed(monkeypatch, lambda: lora_merge.convert(path, other, base=base, to=to, alpha="keep", title="t"))
    assert one.read_bytes() == other.read_bytes()
    assert own.residual == their.residual == 0
    assert own.layers.keys() == their.layers.keys()
    for name, layer in own.layers.items():
        assert layer["norm"] == pytest.approx(their.layers[name]["norm"], rel=1e-5)
        assert {**layer, "norm": 0} == {**their.layers[name], "norm": 0}


def test_no_torch_is_imported(base: Path, tmp_path: Path) -> None:
    save_file(of_flux(), tmp_path / "a.safetensors")
    code = ("import sys, lora_merge; "
            "done = lora_merge.convert('a.safetensors', 'b.safetensors', to='comfy', base=sys.argv[1]); "
            "sys.exit('torch' in sys.modules or not done.verified['ok'])")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, str(base)], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.few(6)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slot", ["up", "down"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    base: Path, value: float, dtype: torch.dtype, slot: str, tmp_path: Path
) -> None:
    name = f"{LAYER}.lora_{slot}.weight"
    held = {k: v.to(dtype) if v.ndim else v for k, v in of_flux().items()}
    held[name].view(-1)[-1] = value
    save_file(held, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="NaN or infinite") as raised:
        lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", base=base, to="comfy")
    assert name in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_fault_of_the_output_is_seen(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one factor."""
    save_file(of_flux(), tmp_path / "a.safetensors")
    put, seen = Draft.put, list[int]()

    def faulty(self: Draft, data: memoryview) -> Drafted:
        seen.append(data.nbytes)
        if len(seen) == 8:
            raw = bytearray(data)
            raw[1] ^= 0x40
            data = memoryview(raw)
        return put(self, data)

    monkeypatch.setattr(Draft, "put", faulty)
    with pytest.raises(VerificationFailed, match="otherwise than the input"):
        lora_merge.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", base=base, to="comfy")
    assert seen[7] > 4, "a factor, and no α"
    assert not strays(tmp_path)
    assert not (tmp_path / "b.safetensors").exists()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40))
def test_bits_of_16_become_the_same_numbers_in_fp32(bits: list[int]) -> None:
    raw = bytearray(np.array(bits, np.uint16).tobytes())
    halves = np.frombuffer(raw, np.float16).astype(np.float32)
    finite = np.isfinite(halves)
    found = WIDEN["F16"](raw)
    assert np.array_equal(found[finite].view(np.uint32), halves[finite].view(np.uint32))
    assert is_finite(raw, "F16") == finite.all()
    wide = torch.frombuffer(raw, dtype=torch.bfloat16).float().numpy()
    assert np.array_equal(WIDEN["BF16"](raw).view(np.uint32), wide.view(np.uint32))
    assert is_finite(raw, "BF16") == np.isfinite(wide).all()


def test_factors_that_cancel_are_measured_by_the_other_way(base: Path, tmp_path: Path) -> None:
    held = of_flux()
    up, down = (held[f"{LAYER}.lora_{slot}.weight"] for slot in ("up", "down"))
    held[f"{LAYER}.lora_up.weight"] = torch.cat((up[:, :1], -up[:, :1], up[:, 2:] * 2.0**-9), 1)
    held[f"{LAYER}.lora_down.weight"] = torch.cat((down[:1], down[:1], down[2:]))
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(held, path)
    report = lora_merge.convert(path, out, base=base, to="kohya")
    stored = load_file(out)
    left, right = (stored[f"{LAYER}.lora_{slot}.weight"].double() for slot in ("up", "down"))
    wanted = float((left @ right).norm()) * float(stored[f"{LAYER}.alpha"]) / len(right)
    name = LAYER.removeprefix("lora_unet_")
    norms = [layer["norm"] for key, layer in report.layers.items() if key.replace(".", "_").endswith(name)]
    assert norms == [pytest.approx(wanted, rel=1e-9)]
