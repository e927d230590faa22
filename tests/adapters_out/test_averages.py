"""Weights of averages by their recursion, and an average by the arithmetic of its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out import output_file
from lora_merge.adapters_out.average import average_weights
from lora_merge.errors import FitError, MergeError, UsageError
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.models import sd1


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


def test_average_changes_the_base_by_the_weighted_changes(tmp_path: Path) -> None:
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
def test_command_reads_its_numbers(tmp_path: Path, options: list[str]) -> None:
    """Options arrive as text, whatever their type."""
    save_file(kohya(sd1(), te=False), tmp_path / "a.safetensors")
    output = tmp_path / "out.safetensors"
    given = [str(tmp_path / "a.safetensors")] * 2
    found = run("average", *given, "-o", output, "-q", *options)
    assert found.code == 0, found.err
    assert output.exists()


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4), (4, 4), (2, 2, 1), ()])
def test_bias_is_a_vector_in_whatever_shape_its_change_is_stored(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Without a base. Written as it was stored, [4, 4] would be found again as no change of a bias: exit 6."""
    save_file({"b.diff_b": torch.ones(shape)}, tmp_path / "a.safetensors")
    save_file({"b.diff_b": torch.zeros(4)}, tmp_path / "b.safetensors")
    output = tmp_path / "mean.safetensors"
    done = run("average", *tmp_path.glob("*.safetensors"), "-o", output)
    if shape in ((4,), (4, 1)):
        assert torch.equal(load_file(output)["b.diff_b"].flatten(), torch.full((4,), 0.5)), done.err
    else:
        assert done.code == 4
        assert not output.exists()


def snapshots(folder: Path, dtype: torch.dtype = torch.float32, count: int = 3) -> list[Path]:
    """Write snapshots of one training: close to each other, with equal α."""
    base = sd1(torch.float32)
    first = kohya(base, te=False)
    noise = torch.Generator().manual_seed(7)
    paths = [folder / f"{n}.safetensors" for n in range(count)]
    for path in paths:
        save_file({name: v if name.endswith("alpha") else (v + 0.01 * torch.randn(v.shape, generator=noise)).to(dtype)
                   for name, v in first.items()}, path)  # fmt: skip
    return paths


def recursion(paths: list[Path], betas: list[float]) -> dict[str, torch.Tensor]:
    """Return what musubi-tuner's lora_post_hoc_ema.py makes: θ̄ ← θ̄β + θ(1 − β) in fp32, every tensor but α."""
    mean = {name: v.float() for name, v in load_file(paths[0]).items()}
    for beta, path in zip(betas, paths[1:], strict=True):
        for name, v in load_file(path).items():
            if not name.endswith(".alpha"):
                mean[name] = mean[name] * beta + v.float() * (1 - beta)
    return mean


@pytest.mark.few(2)
@pytest.mark.parametrize(("options", "betas"), [
    (["--ema", "0.9"], [0.9, 0.9]),
    (["--ema", "0.9", "--ema-to", "0.5"], [0.9, 0.5]),
    (["--sigma-rel", "0.2", "--setting", "musubi_t=true"], [0.0, 0.5**2.3079]),
])  # fmt: skip
def test_averaged_factors_are_those_of_musubi_bit_for_bit(
    options: list[str], betas: list[float], tmp_path: Path
) -> None:
    """γ for σ = 0.2: the root of γ³ + 7γ² + (16 − 25)γ + (12 − 25), from numpy, as musubi finds it."""
    if "--sigma-rel" in options:
        power = float(np.roots([1, 7, 16 - 25, 12 - 25]).real.max()) + 1
        betas = [(1 - 1 / t) ** power for t in (1, 2)]
    paths, output = snapshots(tmp_path), tmp_path / "mean.safetensors"
    given = [*map(str, paths), "-o", str(output), "--space", "factors", "-q", *options]
    assert run("average", *given).code == 0
    made = load_file(output)
    for name, value in recursion(paths, betas).items():
        assert torch.equal(made[name], value), name
    proof = lora_merge.verify(output)
    assert proof["proven"] and proof["same_bytes"] and "the same bytes" in proof.text
    again = tmp_path / "again.safetensors"
    assert lora_merge.replay(output, again).written == output.stat().st_size == again.stat().st_size


def test_room_for_averaged_factors_is_that_of_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """α stays as it is stored, whatever the dtype of the factors."""
    seen: list[int] = []
    monkeypatch.setattr(output_file, "require_space", lambda _, size: seen.append(size))
    output = tmp_path / "mean.safetensors"
    lora_merge.average(snapshots(tmp_path), output, space="factors", dtype="bf16")
    assert seen[0] == sum(t.nbytes for t in load_file(output).values())
    (tmp_path / "again").mkdir()
    lora_merge.replay(output, again := tmp_path / "again" / "mean.safetensors", search=[tmp_path])
    assert output.read_bytes() == again.read_bytes(), "the equal weights are no option of the recipe"


def test_averaged_factors_show_how_far_they_are_from_averaged_changes(tmp_path: Path) -> None:
    """In bf16, and through a formula of more than two factors: Δ of the file against Σ wᵢΔWᵢ, by merging."""
    base, paths, output = sd1(torch.float32), snapshots(tmp_path, torch.bfloat16), tmp_path / "mean.safetensors"
    report = lora_merge.average(paths, output, weights=[0.5, 0.25, 0.25], space="factors")
    made = lora_merge.merge_state_dict(base, [output])
    wanted = lora_merge.merge_state_dict(base, list(zip(paths, (0.5, 0.25, 0.25), strict=True)))
    off = sum(float((made[n] - wanted[n]).square().sum()) for n in base)
    size = sum(float((wanted[n] - base[n]).square().sum()) for n in base)
    assert report.residual == pytest.approx((off / size) ** 0.5, rel=1e-2)
    assert report.residual > 1e-3
    assert report.verified and report.verified["recomputed"] == report.verified["layers"]


def test_plan_refuses_snapshots_that_are_not_alike_and_no_output_that_exists(tmp_path: Path) -> None:
    paths, output = snapshots(tmp_path), tmp_path / "mean.safetensors"
    output.write_bytes(b"")
    given = [*map(str, paths), "-o", str(output), "--space", "factors", "--dry-run"]
    assert run("average", *given).code == 0
    convert = ["convert", str(paths[0]), "-o", str(output), "--to", "keep", "--dtype", "bf16", "--dry-run"]
    assert run(*convert).code == 0
    one = load_file(paths[1])
    save_file({name: value for name, value in list(one.items())[3:]}, paths[1])
    assert run("average", *given).code == FitError.exit_code


@pytest.mark.parametrize("options", [{}, {"include": ["re:attn2"]}])
def test_snapshot_of_weight_0_leaves_the_others(options: dict[str, Any], tmp_path: Path) -> None:
    """A base has no place for changes of strength 0; the layers are then told from the snapshots that have one."""
    save_file(base := sd1(torch.float32), tmp_path / "base.safetensors")
    paths, output = snapshots(tmp_path, count=2), tmp_path / "mean.safetensors"
    given: Any = {"base": tmp_path / "base.safetensors", "space": "factors", "weights": [0, 1], **options}
    report, second, made = lora_merge.average(paths, output, **given), load_file(paths[1]), load_file(output)
    assert made.keys() == {name for name in second if not options or "attn2" in name}
    assert all(torch.equal(value, second[name]) for name, value in made.items())
    merged = lora_merge.merge_state_dict(base, [output])
    size = sum(float((merged[n] - base[n]).square().sum()) for n in base) ** 0.5
    assert report.residual == pytest.approx(0, abs=1e-6)
    assert report.numbers["all"]["norm"] == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("end", ["scale", "alpha_scale", "lora_alpha", "lora.alpha"])
def test_numbers_that_scale_a_change_are_not_averaged(end: str, tmp_path: Path) -> None:
    """Under any of their names: they stay to the bit, and those that differ are refused."""
    paths, output = snapshots(tmp_path), tmp_path / "mean.safetensors"
    for path in paths:
        tensors = {n.replace(".alpha", f".{end}"): v for n, v in load_file(path).items()}
        save_file(tensors | {n: torch.tensor(0.3) for n in tensors if n.endswith(end)}, path)
    lora_merge.average(paths, output, space="factors", dtype="bf16")
    kept = {n: v for n, v in load_file(output).items() if n.endswith(end)}
    assert kept and all(v.dtype == torch.float32 and v.equal(torch.tensor(0.3)) for v in kept.values())
    changed = load_file(paths[1])
    save_file(changed | {next(iter(kept)): torch.tensor(0.6)}, paths[1])
    with pytest.raises(MergeError, match="a number that scales a change differs"):
        lora_merge.average(paths, tmp_path / "other.safetensors", space="factors")


@pytest.mark.parametrize("wrong", ["shape", "alpha", "name", "rank", "space", "strength"])
def test_snapshots_that_are_not_alike_have_no_averaged_factors(wrong: str, tmp_path: Path) -> None:
    first, second = snapshots(tmp_path, count=2)
    held = load_file(second)
    name = next(n for n in held if n.endswith("alpha" if wrong == "alpha" else "lora_down.weight"))
    if wrong == "shape":
        other = name.replace("lora_down", "lora_up")
        held |= {name: held[name][:2].clone(), other: held[other][:, :2].clone()}
    if wrong == "alpha":
        held[name] = held[name] * 2
    if wrong == "name":
        held = {n: v for n, v in held.items() if not n.startswith(name.partition(".")[0])}
    save_file(held, second)
    options: dict[str, Any] = {"rank": {"rank": 4}, "space": {"space": "tensors"}}.get(wrong, {})
    given: Any = (second, 0.5) if wrong == "strength" else second
    with pytest.raises(MergeError) as raised:
        lora_merge.average([first, given], tmp_path / "mean.safetensors", **{"space": "factors", **options})
    assert raised.value.exit_code == (4 if wrong in ("shape", "alpha", "name") else 2)
    assert not (tmp_path / "mean.safetensors").exists()


def test_each_snapshot_is_needed_to_name_once(tmp_path: Path) -> None:
    """A pattern stands for its files, in the order of their names; weights are those of the files."""
    paths, output = snapshots(tmp_path), tmp_path / "out" / "mean.safetensors"
    output.parent.mkdir()
    found = run("average", tmp_path / "*.safetensors", "-o", output, "--weights", "1,0,0")
    assert found.code == 0, found.err
    base = sd1(torch.float32)
    one, other = (lora_merge.merge_state_dict(base, [p]) for p in (paths[0], output))
    assert all(torch.allclose(one[n], other[n], atol=1e-6) for n in base)
