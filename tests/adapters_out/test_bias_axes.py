"""A bias of several axes, such as [1, out, 1, 1], is one whole difference in every command that writes adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lora_merge
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.tensors import rand

MODULE = "model.diffusion_model.input_blocks.1.1.proj_in"
SHAPES = [(1, 12, 1, 1), (3, 4), (12, 1), (12,)]


def files(folder: Path, shape: tuple[int, ...]) -> tuple[Path, Path]:
    """A base, and an adapter with factors for its weight and a difference of its bias."""
    base = {f"{MODULE}.weight": rand(12, 6), f"{MODULE}.bias": rand(*shape, seed=1)}
    adapter = {
        f"{MODULE}.lora_up.weight": rand(12, 1, seed=2),
        f"{MODULE}.lora_down.weight": rand(1, 6, seed=3),
        f"{MODULE}.diff_b": rand(*shape, seed=4),
    }
    return save(base, folder / "base.safetensors"), save(adapter, folder / "adapter.safetensors")


@pytest.mark.few(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("command", "options", "with_base"),
    [
        ("resize", ["--rank", "1"], False),
        ("resize", ["--rank", "1"], True),
        ("combine", ["-s", "0.5", "-s", "0.5"], False),
        ("combine", ["-s", "0.5", "-s", "0.5"], True),
        ("combine", ["--method", "ties", "--density", "1", "--rank", "1"], False),
        ("combine", ["--method", "ties", "--density", "1", "--rank", "1"], True),
        ("average", ["--rank", "1"], False),
        ("average", ["--rank", "1"], True),
        ("convert", ["--to", "kohya"], True),
        ("convert", ["--to", "comfy", "--rank", "1"], True),
    ],
)
def test_output_changes_the_base_as_its_input_does(
    command: str, options: list[str], shape: tuple[int, ...], tmp_path: Path, *, with_base: bool
) -> None:
    base, adapter = files(tmp_path, shape)
    inputs = [adapter] if command in ("resize", "convert") else [adapter, adapter]
    on = ["--base", base] if with_base else []
    code, _, said = run(command, *inputs, "-o", tmp_path / "made.safetensors", *options, *on)
    assert code == 0, said
    for name, used in (("made", tmp_path / "made.safetensors"), ("same", adapter)):
        lora_merge.merge(base, [used], tmp_path / f"merged-{name}.safetensors")
    made, same = (load_file(tmp_path / f"merged-{name}.safetensors") for name in ("made", "same"))
    for key, value in same.items():
        assert torch.allclose(made[key], value, rtol=0, atol=1e-5), key
    stored = load_file(tmp_path / "made.safetensors")
    assert next(t.shape for key, t in stored.items() if key.endswith(".diff_b")) == shape


@pytest.mark.parametrize("to", ["peft", "diffusers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_biases_of_several_axes_are_whole_values_or_have_no_place(
    to: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """PEFT and diffusers keep the change in the bias of the layer lora_B, which is [out]; PEFT has new values too."""
    base, adapter = files(tmp_path, shape)
    output = tmp_path / ("made" if to == "peft" else "made.safetensors")
    code, _, said = run("convert", adapter, "--to", to, "--base", base, "-o", output)
    if shape[0] == 12 or to == "peft":
        assert code == 0, said
        if shape[0] != 12:
            stored = load_file(output / "adapter_model.safetensors")
            assert stored["base_model.model.input_blocks.1.1.proj_in.base_layer.bias"].shape == shape
        return
    assert code == 4, said
    assert MODULE.removeprefix("model.diffusion_model.") in said
    assert ".part" not in said
    assert not output.exists()
