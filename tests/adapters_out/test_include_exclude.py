"""`--include`, `--exclude` and `--compute-dtype` mean the same for every command that writes an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lora_merge
from lora_merge.errors import UsageError
from lora_merge.recipes.commands import COMMANDS as ROWS
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1

COMMANDS: dict[str, tuple[str, ...]] = {
    "combine": ("a", "b"), "resize": ("a", "--rank", "2"), "convert": ("a", "--to", "lycoris"),
    "average": ("a", "b"), "average factors": ("a", "b", "--space", "factors"), "extract": ("base", "tuned", "--rank", "2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("chosen")
    save(sd1(), there / "base.safetensors")
    for name, seed in (("a", 100), ("b", 300)):
        save(kohya(sd1(), seed=seed), there / f"{name}.safetensors")
    lora_merge.merge(there / "base.safetensors", there / "a.safetensors", there / "tuned.safetensors")
    return there


def made(files: Path, output: Path, command: str, *more: object) -> dict[str, torch.Tensor]:
    name, *given = (command.partition(" ")[0], *COMMANDS[command])
    paths = [str(files / f"{word}.safetensors") if word in ("a", "b", "base", "tuned") else word for word in given]
    code, _, told = run(name, *paths, "-o", output, "--overwrite", *more)
    assert code == 0, told
    return load_file(output)


def modules(tensors: dict[str, Any]) -> set[str]:
    return {key.partition(".")[0] for key in tensors}


@pytest.mark.few(2)
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_chosen_modules_are_written_as_they_are_among_all(
    command: str, files: Path, tmp_path: Path, *, base: bool
) -> None:
    if command == "convert":
        base = True  # the shapes of so small a model do not tell which it is
    more = ("--base", files / "base.safetensors") if base and command != "extract" else ()
    out = tmp_path / "o.safetensors"
    whole = made(files, out, command, *more)
    te = made(files, out, command, *more, "--include", "te")
    assert 0 < len(te) < len(whole)
    assert all(value.equal(whole[key]) for key, value in te.items()), "nothing else changes"
    rest = made(files, out, command, *more, "--exclude", "te")
    assert modules(rest) | modules(te) == modules(whole) and not modules(rest) & modules(te)
    some = made(files, out, command, *more, "--include", r"re:attn2[._]to_k", "--exclude", "te")
    assert modules(some) == {name for name in modules(rest) if "attn2_to_k" in name} != set()


@pytest.mark.few(2)
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "average factors"])
def test_formulas_compute_in_the_dtype_that_is_asked_for(command: str, files: Path, tmp_path: Path) -> None:
    one, other = (made(files, tmp_path / "o.safetensors", command, "--compute-dtype", dtype, "--dtype", "fp32",
                       *(() if command == "extract" else ("--base", files / "base.safetensors")))
                  for dtype in ("fp32", "fp64"))  # fmt: skip
    assert one.keys() == other.keys()
    for key in one:
        if key.endswith("up.weight"):
            down = key.replace("up.weight", "down.weight")
            a, b = (t[key].flatten(1).double() @ t[down].flatten(1).double() for t in (one, other))
            assert float((a - b).norm()) <= 1e-5 * float(b.norm()), key


def test_output_of_a_choice_is_replayed_and_proven(files: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "o.safetensors", tmp_path / "p.safetensors"
    made(files, out, "combine", "--include", "te", "--compute-dtype", "fp64")
    for step in (("verify", out, "--search", files), ("replay", out, "-o", again, "--search", files)):
        code, _, told = run(*step)
        assert code == 0, told
    assert out.read_bytes() == again.read_bytes()


def test_every_command_takes_the_choice() -> None:
    assert all({"include", "exclude", "compute_dtype"} <= {*row.options} for row in ROWS.values() if not row.merges)


@pytest.mark.parametrize(("options", "told"), [({"include": ["nose"]}, "without effect"), ({"exclude": ["re:("]}, "regular expression"),
                                               ({"include": ["re:nowhere"]}, "without effect"), ({"include": [7]}, "include must be"),
                                               ({"compute_dtype": "bf16"}, "not computed in bf16")])  # fmt: skip
def test_wrong_choice_is_refused(options: Any, told: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told.split()[0]) as failure:
        lora_merge.combine([files / "a.safetensors", files / "b.safetensors"], tmp_path / "o.safetensors", **options)
    assert told in str(failure.value)
    assert not (tmp_path / "o.safetensors").exists()
