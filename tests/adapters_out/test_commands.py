"""The rows of the commands that write adapters: what a recipe records of them, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.command import Command
from lora_merge.errors import UsageError
from lora_merge.options import OF_MERGE, OPTIONS
from lora_merge.recipes import commands
from tests.kit.files import save
from tests.kit.tensors import rand

COMMANDS = {name: row for name, row in commands.COMMANDS.items() if not row.merges}

VALUES: dict[str, Any] = {
    "rank": 3, "conv_rank": 2, "max_rank": 9, "rank_for": {"unet": 2}, "algorithm": "auto", "alpha": 4.0,
    "to": "comfy", "include": ("unet",), "exclude": ("te",), "compute_dtype": "fp32", "format": "comfy", "factor": 4,
    "others": "skip", "space": "factors", "method": "ties", "density": 0.5, "gamma": 0.1, "epsilon": 0.1, "t": 0.5,
    "elect": "count", "normalise": "weight", "agree": 1, "scale": 2.0, "seed": 3, "ema": 0.5, "ema_to": 0.7,
    "sigma_rel": 0.1, "musubi_t": True,
}  # fmt: skip
"""A value of every option that no command has as its default."""

NEEDED: dict[str, dict[str, Any]] = {
    "conv_rank": {"rank": 5}, "max_rank": {"rank": 5}, "rank_for": {"rank": 5}, "ema_to": {"ema": 0.5},
    "density": {"method": "ties"}, "gamma": {"method": "breadcrumbs", "density": 0.5},
    "epsilon": {"method": "della", "density": 0.5}, "t": {"method": "slerp"}, "elect": {"method": "ties"},
    "normalise": {"method": "ties"}, "agree": {"method": "consensus"}, "scale": {"method": "ties"},
    "musubi_t": {"sigma_rel": 0.1},
}  # fmt: skip
"""Option → the others without which it means nothing."""

OWN = [(row, name) for row in COMMANDS.values() for name in row.options if name not in (*OF_MERGE, "weights")]


def recorded(command: Command, options: dict[str, Any]) -> dict[str, Any]:
    """What the recipe of a job with these options records."""
    if {"ema", "sigma_rel"} & options.keys():
        options = {"space": "factors", **options}  # else the weights say it
    if options.get("method"):
        options = {"algorithm": "full", **options}
    rank = {"rank": 5} if command.options["rank"].required else {}
    adapters = ["a", "b"] if command.several else ["a"]
    return dict(command.job(adapters, "out.safetensors", "base", {**rank, **options}).options)


@pytest.mark.parametrize(("command", "name"), OWN, ids=lambda v: getattr(v, "name", v))
def test_recipe_records_each_option_of_a_row(command: Command, name: str) -> None:
    value = VALUES[name]
    assert recorded(command, {**NEEDED.get(name, {}), name: value})[name] == value


DEFAULTS = [
    (row, other, name)
    for row in COMMANDS.values()
    for other in COMMANDS.values()
    for name in ("rank", "alpha")
    if row.options[name].default != other.options[name].default is not None
]


@pytest.mark.parametrize(("command", "other", "name"), DEFAULTS, ids=lambda v: getattr(v, "name", v))
def test_recipe_records_the_default_of_another_command(command: Command, other: Command, name: str) -> None:
    """`convert --alpha rank` is not `convert`, though α = rank is what `combine` does anyway."""
    value = other.options[name].default
    if value == "same" and command.inputs == "checkpoints":
        pytest.skip("a checkpoint has no rank")
    assert recorded(command, {name: value})[name] == value


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_option_of_another_command_is_refused(command: Command) -> None:
    for name in {n for row in COMMANDS.values() for n in row.options} - command.options.keys() - {*OF_MERGE}:
        with pytest.raises(UsageError):
            recorded(command, {name: VALUES.get(name, [0.5, 0.5])})


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_row_holds_options_of_the_tables(command: Command) -> None:
    assert {name for name in command.options if name in OF_MERGE} <= OPTIONS.keys()
    assert all(option.name == name for name, option in command.options.items())


def test_work_of_a_report_is_that_of_its_progress(tmp_path: Path) -> None:
    """In bytes of weights in fp64, whatever the dtypes, and twice for a rule that looks at all layers first."""
    name, size = "lora_unet_mid_block_attentions_0_proj_in", 6 * 5 * 8
    for n, dtype in enumerate((torch.float16, torch.bfloat16)):
        pair = {f"{name}.lora_down.weight": rand(2, 5, seed=n), f"{name}.lora_up.weight": rand(6, 2, seed=n + 9)}
        save({key: t.to(dtype) for key, t in pair.items()}, tmp_path / f"a{n}.safetensors")
        save({"layers.0.up_proj.weight": rand(6, 5, seed=n).to(dtype)}, tmp_path / f"b{n}.safetensors")
    a, b, *bases = (tmp_path / f"{file}.safetensors" for file in ("a0", "a1", "b0", "b1"))
    steps: list[lora_merge.Step] = []
    how: dict[str, Any] = {"progress": steps.append, "overwrite": True}
    for times, run in (
        (1, lambda: lora_merge.combine([a, b], tmp_path / "o", **how)),
        (1, lambda: lora_merge.average([a, a], tmp_path / "o", space="factors", **how)),
        (2, lambda: lora_merge.resize(a, tmp_path / "o", rank="size:100B", **how)),
        (1, lambda: lora_merge.convert(a, tmp_path / "o", dtype="fp32", **how)),
        (1, lambda: lora_merge.extract(*bases, tmp_path / "o", rank=1, format="kohya", **how)),
    ):
        report = run()
        made = [step for step in steps if step.stage == "make"]
        assert report.weights == made[0].total == sum(step.done for step in made) == times * size
        steps.clear()
