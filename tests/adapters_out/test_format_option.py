"""`--format` of combine, resize and average: the same change in the words of another program, with its recipe."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out import combine as combine_module
from lora_merge.adapters_out.combine import plan
from lora_merge.adapters_out.input_adapters import InputAdapters
from lora_merge.adapters_out.job import AdapterJob
from lora_merge.errors import UsageError
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.progress import unwatched
from lora_merge.recipes.commands import COMMANDS
from tests.kit.command_line import run
from tests.kit.files import metadata
from tests.kit.flux import flux, of_flux


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("formats")
    save_file(flux(), made / "base.safetensors")
    save_file(of_flux(), made / "a.safetensors")
    save_file({k: v if k.endswith("alpha") else -0.5 * v.flip(0) for k, v in of_flux().items()}, made / "b.safetensors")
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("to", ["diffusers", "comfy", "peft"])
def test_result_is_written_in_another_dialect_and_reproduced(folder: Path, to: str, tmp_path: Path) -> None:
    base, out = folder / "base.safetensors", tmp_path / ("out" if to == "peft" else "out.safetensors")
    given = [(folder / "a.safetensors", 0.5), (folder / "b.safetensors", 2.0)]
    report = lora_merge.combine(given, out, base=base, format=to, dtype="fp32")
    assert report.format == to and report.verified and report.written > 0
    before = load_file(base)
    wanted, made = (lora_merge.merge_state_dict(before, g, compute_dtype="fp64") for g in (given, [out]))
    assert all(torch.allclose(wanted[n], made[n], atol=1e-5) for n in before)
    planned = plan(COMMANDS["combine"].job(given, out, base, {"format": to, "dtype": "fp32"}))
    assert {n: x["rank"] for n, x in planned.layers.items()} == {n: x["rank"] for n, x in report.layers.items()}
    assert 0 <= planned.written - report.written <= 2 * 4096
    keys = load_file(out / "adapter_model.safetensors" if to == "peft" else out)
    first = {"diffusers": "transformer.", "comfy": "diffusion_model.", "peft": "base_model.model."}[to]
    assert all(key.startswith(first) for key in keys)
    assert all(
        key.startswith(tuple(f"{'base_model.model.' * (to == 'peft')}{n}." for n in report.layers)) for key in keys
    )
    assert lora_merge.verify(out, search=[folder])["same_bytes"]
    assert [*folder.glob(".lora-merge-*")] == [*tmp_path.glob(".lora-merge-*")] == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("command", "more"), [("resize", ["--rank", "2"]), ("average", []), ("combine", ["--rank", "4"])]
)
def test_commands_take_it(folder: Path, command: str, more: list[str], tmp_path: Path) -> None:
    words: list[Any] = [command, folder / "a.safetensors", "--base", folder / "base.safetensors", *more]
    code, _, told = run(*words, "--format", "diffusers", "-o", tmp_path / "out.safetensors")
    assert code == 0, told
    assert any("transformer_blocks.0.attn.to_q.lora_A" in key for key in load_file(tmp_path / "out.safetensors"))


@pytest.mark.few(2)
@pytest.mark.parametrize(("command", "options"), [
    ("combine", {}), ("combine", {"rank": 2}), ("resize", {"rank": 2}), ("combine", {"method": "ties", "rank": 2}),
    ("combine", {"algorithm": "full"}),
])  # fmt: skip
def test_modules_that_are_only_renamed_have_the_numbers_that_they_have_in_the_words_of_the_first_adapter(
    folder: Path, command: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """They are rounded once, and α and its recipe are the same too."""
    adapters = [folder / "a.safetensors", folder / "b.safetensors"][: 1 if command == "resize" else 2]
    row, outputs = COMMANDS[command], list[dict[str, torch.Tensor]]()
    for to in ("keep", "comfy"):
        output = tmp_path / f"{to}.safetensors"
        given = {"dtype": "bf16", "format": to, **options}
        report = row.run(row.job(adapters, output, folder / "base.safetensors", given), unwatched, None)
        assert json.loads(metadata(output)["lora_merge.recipe"])["residual"] == pytest.approx(report.residual, rel=1e-5)
        assert all("weight" in layer and "largest" in layer for layer in report.layers.values())
        outputs.append(load_file(output))
    endings = {".lora_A.weight": ".lora_down.weight", ".lora_B.weight": ".lora_up.weight"}
    renamed = {}
    for key, value in outputs[1].items():
        stem, _, end = key.removeprefix("diffusion_model.").partition(".lora_")
        stem, end = (stem, f".lora_{end}") if end else (stem.rpartition(".")[0], f".{stem.rpartition('.')[2]}")
        renamed["lora_unet_" + stem.replace(".", "_") + endings.get(end, end)] = value
    assert renamed.keys() == outputs[0].keys()
    assert all(torch.equal(renamed[key], value) for key, value in outputs[0].items())


def test_plan_says_nothing_of_files_that_only_it_would_see(tmp_path: Path) -> None:
    """A folder of PEFT as the first adapter."""
    factors = {"layer.lora_A.weight": torch.randn(2, 6), "layer.lora_B.weight": torch.randn(8, 2)}
    save_file({"layer.weight": torch.randn(8, 6)}, tmp_path / "base.safetensors")
    (tmp_path / "style").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (tmp_path / "style" / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{key}": value for key, value in factors.items()},
              tmp_path / "style" / "adapter_model.safetensors")  # fmt: skip
    job = COMMANDS["combine"].job([tmp_path / "style"], tmp_path / "out.safetensors", tmp_path / "base.safetensors",
                                  {"format": "kohya"})  # fmt: skip
    assert plan(job).notes == COMMANDS["combine"].run(job, unwatched, None).notes == ()


def test_format_that_does_not_exist_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        lora_merge.combine([tmp_path / "none.safetensors"], tmp_path / "out.safetensors", format="sdnext")


def test_changes_that_the_loader_ignores_are_noted(tmp_path: Path) -> None:
    """diffusers ignores .diff_b and .alpha in silence; PEFT loads folders."""
    base = {"layer.weight": torch.randn(8, 6), "layer.bias": torch.randn(8)}
    factors = {"layer.lora_A.weight": torch.randn(2, 6), "layer.lora_B.weight": torch.randn(8, 2)}
    save_file(base, tmp_path / "base.safetensors")
    save_file(factors | {"layer.lora_B.bias": torch.randn(8)}, tmp_path / "a.safetensors")
    save_file({f"base_model.model.{key}": value for key, value in factors.items()}, tmp_path / "p.safetensors")
    out, given = tmp_path / "out.safetensors", {"base": tmp_path / "base.safetensors", "overwrite": True}
    for adapter, note in (("a", "diffusers silently leaves out"), ("p", "PEFT loads a folder")):
        report = lora_merge.combine(tmp_path / f"{adapter}.safetensors", out, alpha=7, **given)  # type: ignore[arg-type]
        assert any(note in str(one) for one in report.notes)
        assert not any(key.endswith(".alpha") for key in load_file(out))
        before = load_file(tmp_path / "base.safetensors")
        one, other = (lora_merge.merge_state_dict(before, [p]) for p in (tmp_path / f"{adapter}.safetensors", out))
        assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in before)


def test_alpha_of_a_file_between_is_not_reported(folder: Path, tmp_path: Path) -> None:
    given = {"base": folder / "base.safetensors", "format": "diffusers"}
    report = lora_merge.combine(folder / "a.safetensors", tmp_path / "one.safetensors", **given)  # type: ignore[arg-type]
    assert not any("no alpha is stored" in str(note) for note in report.notes)


def test_numbers_are_rounded_once_whatever_the_dialect_does_with_alpha(folder: Path, tmp_path: Path) -> None:
    """diffusers has no α: one that is not the rank was folded into factors that were rounded already."""
    found = []
    for alpha in ("rank", 7):
        out = tmp_path / f"{alpha}.safetensors"
        given = [folder / "a.safetensors", folder / "b.safetensors"]
        lora_merge.combine(
            given, out, base=folder / "base.safetensors", format="diffusers", dtype="bf16", rank=2, alpha=alpha
        )
        found.append(load_file(out))
    one, other = found
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("to", ["keep", "comfy"])
def test_stage_that_loads_is_the_time_in_which_inputs_are_opened(
    folder: Path, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = combine_module.open_adapters

    def slowly(job: AdapterJob, cache: CheckpointCache) -> InputAdapters:
        time.sleep(0.05)
        return opened(job, cache)

    monkeypatch.setattr(combine_module, "open_adapters", slowly)
    report = lora_merge.combine([folder / "a.safetensors"], tmp_path / "out.safetensors", format=to, device="cpu")
    assert report.stages["load"] >= 0.05
    assert sum(report.stages.values()) == pytest.approx(report.seconds)


@pytest.mark.parametrize("options", [{}, {"rank": 2}])
def test_stated_alpha_is_stored_in_a_dialect_that_has_it_though_the_input_has_none(
    folder: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    without, out = tmp_path / "without.safetensors", tmp_path / "out.safetensors"
    given: dict[str, Any] = {"base": folder / "base.safetensors"}
    lora_merge.convert(folder / "a.safetensors", without, to="diffusers", **given)
    report = lora_merge.combine([without], out, format="kohya", alpha=7, **given, **options)
    assert {v.item() for k, v in load_file(out).items() if k.endswith(".alpha")} == {7.0}
    assert not any("has no effect" in note for note in report.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("to", ["diffusers", "peft"])
def test_stated_alpha_without_effect_is_noted(folder: Path, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if to == "peft" else "out.safetensors")
    given: dict[str, Any] = {"base": folder / "base.safetensors", "alpha": 7, "overwrite": True}
    reports = [lora_merge.convert(folder / "a.safetensors", out, to=to, **given),
               lora_merge.combine([folder / "a.safetensors"], out, format=to, **given),
               lora_merge.resize(out, tmp_path / ("again" + out.suffix), rank=1, **given),
               plan(COMMANDS["combine"].job([folder / "a.safetensors"], out, given["base"],
                                     {"format": to, "alpha": 7, "overwrite": True}))]  # fmt: skip
    for report in reports:
        assert any(re.match("(alpha=|--alpha )7 has no effect", note) for note in report.notes), report
