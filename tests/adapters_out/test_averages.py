"""Weights of averages by their recursion, and an average by the arithmetic of its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import lora_merge
from lora_merge.adapters_out.average.weights import average_weights
from lora_merge.cli.main import app
from lora_merge.errors import MergeError, UsageError
from tests.support import kohya, sd1


@pytest.mark.parametrize(("sigma", "power"), [(12**-0.5, 0.0), (0.1, 6.94), (0.05, 16.97)])
def test_post_hoc_weights_are_those_of_the_power_function(sigma: float, power: float) -> None:
    """γ for σ = 0.1 and 0.05: arXiv:2312.02696, section 3.1. The recursion is done in full."""
    weights = average_weights(6, sigma_rel=sigma)
    for snapshot in range(6):
        mean = float(snapshot == 0)
        for i in range(1, 6):
            beta = (1 - 1 / (i + 1)) ** (power + 1)
            mean = beta * mean + (1 - beta) * (snapshot == i)
        assert weights[snapshot] == pytest.approx(mean, abs=2e-3)
    assert sum(weights) == pytest.approx(1) and weights[0] > 0


def test_moving_averages_keep_the_share_of_each_step() -> None:
    assert average_weights(3, ema=0.5) == pytest.approx([0.25, 0.25, 0.5])
    assert average_weights(3, ema=0.5, ema_to=0.25) == pytest.approx([0.125, 0.125, 0.75])
    assert average_weights(4) == [0.25] * 4


@pytest.mark.parametrize("wrong", [{"ema": 1.0}, {"ema_to": 0.5}, {"sigma_rel": 0.3}, {"weights": [1.0]},
                                   {"ema": 0.5, "sigma_rel": 0.1}, {"weights": [float("nan"), 1.0]}])  # fmt: skip
def test_weights_that_mean_nothing_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError):
        average_weights(2, **wrong)


def test_an_average_changes_the_base_by_the_weighted_changes(tmp_path: Path) -> None:
    """Close snapshots: they share the down factors, so that their own rank holds the average."""
    base, paths = sd1(torch.float32), []
    for n in range(3):
        snapshot = kohya(base, te=False, seed=100 + n)
        downs = kohya(base, te=False)
        snapshot |= {name: value for name, value in downs.items() if name.endswith("lora_down.weight")}
        paths.append(tmp_path / f"{n}.safetensors")
        save_file(snapshot, paths[-1])
    output = tmp_path / "mean.safetensors"
    report = lora_merge.average(paths, output, ema=0.75)
    assert {layer["rank"] for layer in report.layers.values()} == {4}
    weights = average_weights(3, ema=0.75)
    wanted = lora_merge.merge_state_dict(base, list(zip(paths, weights, strict=True)))
    for name, value in lora_merge.merge_state_dict(base, [output]).items():
        assert torch.allclose(value.float(), wanted[name].float(), atol=1e-6), name


@pytest.mark.parametrize("options", [["--sigma-rel", "0.1"], ["--ema", "0.5"], ["--weights", "0.25,0.75"]])
def test_the_command_reads_its_numbers(tmp_path: Path, options: list[str]) -> None:
    """Options arrive as text, whatever their type."""
    save_file(kohya(sd1(), te=False), tmp_path / "a.safetensors")
    output = tmp_path / "out.safetensors"
    given = [str(tmp_path / "a.safetensors")] * 2
    found = CliRunner().invoke(app, ["average", *given, "-o", str(output), "-q", *options])
    assert found.exit_code == 0, found.exception
    assert output.exists()


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 4), (2, 2, 1), ()])
def test_a_bias_is_a_vector_in_whatever_shape_its_change_is_stored(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Without a base. Written as it was stored, [4, 4] would be found again as no change of a bias: exit 6."""
    save_file({"b.diff_b": torch.ones(shape)}, tmp_path / "a.safetensors")
    save_file({"b.diff_b": torch.zeros(4)}, tmp_path / "b.safetensors")
    output = tmp_path / "mean.safetensors"
    done = CliRunner().invoke(app, ["average", *map(str, tmp_path.glob("*.safetensors")), "-o", str(output)])
    if shape in ((4,), (4, 1)):
        assert torch.equal(load_file(output)["b.diff_b"].flatten(), torch.full((4,), 0.5)), done.output
    else:
        assert isinstance(done.exception, MergeError)
        assert done.exception.exit_code == 4
        assert not output.exists()
