"""GGUF bases in plain numbers, or in other types, become GGUF of a type; the library reads them, and quantises too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import save_file

import lora_merge
from lora_merge.dtypes import GGUF_TYPES
from lora_merge.recipes.replay import prove
from tests.kit import gguf_files as by_library
from tests.kit.gguf_models import LAYERS, TOUCHED, change, flux, style

THEIRS = {"q8_0", "q5_1", "q5_0", "q4_1", "q4_0"}
"""Types that the library quantises too."""

UNTOUCHED = next(name for name in LAYERS if name not in TOUCHED)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_diffusion_model_is_quantised_on_the_way_out(kind: str, tmp_path: Path) -> None:
    save_file(style(), tmp_path / "style.safetensors")
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("F16"), {"general.file_type": 1})
    out = tmp_path / "out.gguf"
    report = lora_merge.merge(base, tmp_path / "style.safetensors", out, dtype=kind)
    assert report.changed == 2
    assert prove(out, full=True)["full"]
    old, new = by_library.read(base), by_library.read(out)
    assert old.keys() == new.keys()
    assert by_library.fields(out)["general.file_type"] != 1
    for name, (values, was) in old.items():
        found, now = new[name]
        stem = name.removesuffix(".weight")
        if stem not in LAYERS or not name.endswith("weight"):
            assert now == was
            np.testing.assert_array_equal(found, values)
            continue
        assert now == kind.upper()
        exact = values + (change(stem) if stem in TOUCHED else 0)
        error = np.sqrt(np.mean((found - exact) ** 2))
        if kind in THEIRS:
            number = GGMLQuantizationType[now]
            codes = quants.quantize(exact.astype(np.float32), number)
            theirs = np.sqrt(np.mean((quants.dequantize(codes, number) - exact) ** 2))
            assert error < 1.05 * theirs
        else:
            assert error < {"q2_k": 0.4, "q3_k": 0.2, "q6_k": 0.04}.get(kind, 0.15) * np.sqrt(np.mean(exact**2))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
@pytest.mark.parametrize("was", ["Q4_K", "IQ4_XS", "NVFP4"])
def test_codes_of_the_scale_0_become_zeros_of_another_type(was: str, kind: str, tmp_path: Path) -> None:
    save_file(style(), tmp_path / "style.safetensors")
    base, out = by_library.write(tmp_path / "flux.gguf", "flux", flux(was)), tmp_path / "out.gguf"
    _, size = quants.GGML_QUANT_SIZES[GGMLQuantizationType[was]]
    for tensor in GGUFReader(base, "r+").tensors:
        if tensor.tensor_type.name == was:
            tensor.data.reshape(len(tensor.data), -1, size)[::2, :, :4] = 0
    lora_merge.merge(base, tmp_path / "style.safetensors", out, dtype=kind)
    assert prove(out, full=True)["full"]
    zeros, others = (by_library.read(out)[f"{UNTOUCHED}.weight"][0][n::2] for n in (0, 1))
    assert others.any() and not zeros.any()


def test_codes_that_keep_their_precision_are_those_of_the_base(tmp_path: Path) -> None:
    save_file(style(), tmp_path / "style.safetensors")
    base, out = by_library.write(tmp_path / "flux.gguf", "flux", flux("Q8_0")), tmp_path / "out.gguf"
    lora_merge.merge(base, tmp_path / "style.safetensors", out, dtype="q4_0", keep_precision=[UNTOUCHED])
    (values, was), (found, now) = (by_library.read(path)[f"{UNTOUCHED}.weight"] for path in (base, out))
    assert now == was == "Q8_0"
    np.testing.assert_array_equal(found, values)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "iq4_nl"])
def test_stochastic_rounding_is_right_on_average(kind: str, tmp_path: Path) -> None:
    save_file(style(), tmp_path / "style.safetensors")
    base = by_library.write(tmp_path / "flux.gguf", "flux", flux("F16"))
    found = []
    for seed in range(2):
        out = tmp_path / f"{seed}.gguf"
        lora_merge.merge(base, tmp_path / "style.safetensors", out, dtype=kind, rounding="stochastic", seed=seed)
        assert prove(out, full=True)["full"]
        found.append(by_library.read(out)[f"{TOUCHED[0]}.weight"][0])
    exact = by_library.read(base)[f"{TOUCHED[0]}.weight"][0] + change(TOUCHED[0])
    errors = [(f - exact).ravel() for f in found]
    assert abs(np.mean(errors[0])) < 4 * np.std(errors[0]) / np.sqrt(exact.size)
    assert abs(np.corrcoef(*errors)[0, 1]) < 0.7
