"""`convert` where no number changes: without torch, with the bytes of the input."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.values import WIDEN, is_finite
from lora_merge.disk.draft import Draft, DraftBytes
from lora_merge.errors import InputError, VerificationFailed
from tests.kit.files import strays
from tests.kit.flux import flux, of_flux
from tests.kit.pairs import examples

LAYER = "lora_unet_double_blocks_0_img_attn_proj"
BLOCKS = {"double": "D00", "single": "S00", "final": "OUT", "img": "IN", "txt": "IN", "vector": "IN"}
"""The first word of a layer → its block."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_file(flux(), made := tmp_path_factory.mktemp("base") / "base.safetensors")
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [("comfy", 1.0), ("keep", 1.0), ("comfy", 1e-6), ("comfy", 1e15)])
def test_factors_keep_their_bytes_and_norms_are_those_of_numpy(
    base: Path, dtype: torch.dtype, case: tuple[str, float], tmp_path: Path
) -> None:
    (to, scale), path, out = case, tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    adapter = {k: v if k.endswith("alpha") else (v.double() * scale).clamp(-6e4, 6e4).to(dtype)
               for k, v in of_flux().items()}  # fmt: skip
    save_file(adapter, path, {"ss_network_dim": "4", "sshs_model_hash": "old"})
    report = lora_merge.convert(path, out, base=base, to=to, alpha="keep")
    output = {kohya_key(key): value for key, value in load_file(out).items()}
    assert output.keys() == adapter.keys()
    for key, value in adapter.items():
        assert output[key].dtype == value.dtype
        assert torch.equal(output[key], value)
    assert report.residual == 0
    assert {kohya_key(name) for name in report.layers} == {key.partition(".")[0] for key in adapter}
    for name, layer in report.layers.items():
        slots = [adapter[f"{kohya_key(name)}.lora_{slot}.weight"].double().numpy() for slot in ("up", "down")]
        norm = float(np.linalg.norm(slots[0] @ slots[1])) * 1.5 / 3
        block = f"transformer {BLOCKS[kohya_key(name).split('_')[2]]}"
        assert layer == {"block": block, "algorithm": "lora", "rank": 3, "rank_before": 3, "alpha": 1.5, "energy": 1,
                         "residual": 0, "norm": pytest.approx(norm, rel=1e-5)}  # fmt: skip
    with safe_open(out, "np") as file:
        metadata = file.metadata()
    assert metadata["ss_network_dim"] == "3"
    assert metadata["sshs_model_hash"] != "old"


def kohya_key(key: str) -> str:
    """Return a key, or the name of a module, of ComfyUI's dialect as sd-scripts writes it."""
    if key.startswith("lora_unet_"):
        return key
    module, slot = re.fullmatch(r"diffusion_model\.(.*?)((?:\.alpha|\.lora_[AB]\.weight)?)", key).groups()
    slot = slot.replace("lora_A", "lora_down").replace("lora_B", "lora_up")
    return f"lora_unet_{module.replace('.', '_')}{slot}"


@pytest.mark.slow
def test_no_torch_is_imported(base: Path, tmp_path: Path) -> None:
    save_file(of_flux(), tmp_path / "a.safetensors")
    code = ("import sys, lora_merge; "
            "done = lora_merge.convert('a.safetensors', 'b.safetensors', to='comfy', base=sys.argv[1]); "
            "sys.exit('torch' in sys.modules or not done.verified['ok'])")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, str(base)], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.few(3)
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


def test_fault_of_the_output_is_detected(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one factor."""
    save_file(of_flux(), tmp_path / "a.safetensors")
    put, seen = Draft.put, list[int]()

    def faulty(self: Draft, data: memoryview) -> DraftBytes:
        seen.append(data.nbytes)
        if len(seen) == 8:
            raw = bytearray(data)
            raw[1] ^= 0x40
            data = memoryview(raw)
        return put(self, data)

    monkeypatch.setattr(Draft, "put", faulty)
    with pytest.raises(VerificationFailed, match="not what the report says"):
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
