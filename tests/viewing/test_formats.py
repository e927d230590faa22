"""`inspect` tells of a quantised base the format, the block of a scale, the bits of a number, and what is not quantised."""

from __future__ import annotations

from pathlib import Path

import pytest

import lora_merge
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.viewing.inspect import inspect
from tests.files.quantised_forms import FORMS
from tests.kit import gguf_files as by_library
from tests.kit.files import save
from tests.kit.gguf_models import flux
from tests.kit.inspected import lines
from tests.kit.quantised import adapter, base
from tests.kit.tensors import rand

TOLD = {
    "ComfyUI nvfp4": ("nvfp4", [1, 16], 4.8), "ComfyUI fp8 rows": ("fp8_scaled", [1, 192], 8.17),
    "block fp8": ("block fp8", [128, 128], 8.0), "ModelOpt fp8": ("ModelOpt fp8", None, 8.0),
    "compressed-tensors mxfp8": ("compressed-tensors mxfp8", [1, 32], 8.25),
    "compressed-tensors int4": ("compressed-tensors int4", [1, 64], 4.5), "bitsandbytes nf4": ("bitsandbytes nf4", [1, 64], 4.52),
    "mlx 4 bit": ("mlx 4 bit", [1, 64], 4.5), "GPTQ": ("GPTQ", [1, 64], 4.51),
    "AWQ": ("AWQ", [1, 64], 4.31), "AQLM": ("AQLM", [1, 192], 3.15), "ComfyUI awq_w4a16": ("awq_w4a16", [1, 64], 4.5),
}  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("name", TOLD)
def test_formats_are_reported_with_blocks_and_bits(name: str, tmp_path: Path) -> None:
    source, tensors = base(FORMS[name], tmp_path / "base")
    file = source / "model.safetensors" if source.is_dir() else source
    extra = {"model.layers.0.mlp.up_proj.weight": rand(8, 8), "model.layers.1.mlp.up_proj.weight": rand(8, 8)}
    save({**tensors, **extra}, file)
    facts = inspect(source)
    form, block, bits = TOLD[name]
    (told,) = facts["formats"]
    assert (told["format"], told["weights"], told.get("block")) == (form, 3, block)
    assert told["bits"] == pytest.approx(bits, abs=0.02)
    assert facts["not_quantised"] == {"model.layers.*.mlp.up_proj.weight": 2}
    assert facts["parameters"] == 3 * 160 * 192 + 8 + 2 * 64, "scales and marks are no parameters"
    text = [*lines(facts)]
    assert any(line.startswith("format") and f"{told['bits']:g} bits per value" in line for line in text)
    assert any(line.startswith("not quantised") and "model.layers.*.mlp.up_proj.weight (2)" in line for line in text)


def test_types_of_gguf_are_reported_too_and_plain_models_have_no_formats(tmp_path: Path) -> None:
    facts = inspect(by_library.write(tmp_path / "flux.gguf", "flux", flux("Q4_K")))
    assert facts["formats"] == [{"format": "Q4_K", "weights": 4, "bits": 4.5, "block": [1, 256]}]
    assert facts["not_quantised"] == {"img_in.weight": 1, "final_layer.linear.weight": 1}
    assert "formats" not in inspect(save({"a.weight": rand(8, 8)}, tmp_path / "plain.safetensors"))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FORMS)
def test_quantised_model_has_the_numbers_of_the_same_model_without_quantisation(name: str, tmp_path: Path) -> None:
    """Scales and marks are neither weights nor tensors that only one of the two has."""
    source, _ = base(FORMS[name], tmp_path / "base")
    nothing = [(save(adapter(), tmp_path / "adapter.safetensors"), 0.0)]
    plain = tmp_path / ("plain" if source.is_dir() else "plain.safetensors")
    lora_merge.merge(source, nothing, plain, dtype="fp32")
    for one, other in ((source, plain), (plain, source)):
        found = lora_merge.compare(one, other)
        assert (found["only_a"], found["only_b"], found["other_shapes"]) == ([], [], {})
        assert found["compared"] == 4
        assert found["total"]["relative"] == pytest.approx(0, abs=1e-6)
    facts, wanted = (inspect(path, weights=True) for path in (source, plain))
    assert facts["parameters"] == wanted["parameters"] == sum(facts["components"].values())
    assert facts["blocks"] == wanted["blocks"]
    assert facts["sizes"]["all"] == pytest.approx(wanted["sizes"]["all"], rel=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q4_0"])
def test_changes_of_gguf_are_reported_as_those_of_plain_numbers(kind: str, tmp_path: Path) -> None:
    """Both files store integers."""
    source = by_library.write(tmp_path / "flux.gguf", "flux", flux(kind))
    names = [key for key in open_checkpoint(source).tensors if key.endswith(".weight")][:2]
    shapes = {key: open_checkpoint(source).tensors[key].shape for key in names}
    lora = {f"{key.removesuffix('weight')}lora_{end}.weight": rand(*size, seed=n, scale=0.3)
            for n, (key, (rows, cols)) in enumerate(shapes.items()) for end, size in (("up", (rows, 4)), ("down", (4, cols)))}  # fmt: skip
    change = save(lora, tmp_path / "adapter.safetensors")
    lora_merge.merge(source, [change], tmp_path / "merged.gguf")
    for name in ("flux", "merged"):
        lora_merge.merge(tmp_path / f"{name}.gguf", [(change, 0.0)], tmp_path / f"{name}.safetensors", dtype="fp32")
    found, wanted = (lora_merge.compare(*(tmp_path / f"{n}{end}" for n in ("flux", "merged"))) for end in (".gguf", ".safetensors"))  # fmt: skip
    assert wanted["total"]["difference"] > 0.1
    assert found["total"] == pytest.approx(wanted["total"], rel=1e-5)
