"""The proof of a written adapter shares no arithmetic with the run: a fault of the run's own is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters.modules import group
from lora_merge.adapters_out import averaged_tensors, pipeline
from lora_merge.adapters_out.dialects import Dialect
from lora_merge.adapters_out.extract import run as extract_run
from lora_merge.adapters_out.extract.extract_modules import Side
from lora_merge.adapters_out.module_tensors import StoredModule
from lora_merge.adapters_out.output_file import Entry
from lora_merge.adapters_out.output_modules import entries_of
from lora_merge.adapters_out.proof import _change_of as change_of
from lora_merge.algorithms import loha
from lora_merge.algorithms.base import AlphaOverRank
from lora_merge.disk.reader import Reader
from lora_merge.engine import module_change
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.models.weights import RowSlice, whole
from tests.kit.command_line import run
from tests.kit.files import save, strays
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import rand

SIDES: Final = {"up": (8, 2), "down": (2, 8)}

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tmp_path_factory.mktemp("proof")
    save_file(flux(), files / "base.safetensors")
    for name, options in {"lora": {}, "dora": {"dora": True}, "loha": {"loha": True}}.items():
        save_file(of_flux(**options), files / f"{name}.safetensors")
    tuned = lora_merge.merge_state_dict(load_file(files / "base.safetensors"), [files / "lora.safetensors"])
    save_file({k: v.clone() for k, v in tuned.items()}, files / "tuned.safetensors")
    return files


def product(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loha._halves
    monkeypatch.setattr(loha, "_halves", lambda t: [(2 * a, b) for a, b in right(t)])


def magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module_change.change
    monkeypatch.setattr(module_change, "change", lambda *args: 2 * right(*args))


def scale(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AlphaOverRank.__call__

    def wrong(self: AlphaOverRank, alpha: float | None, *shapes: Any) -> Mapping[str, float]:
        return right(self, None if alpha is None else 2 * alpha, *shapes)

    monkeypatch.setattr(AlphaOverRank, "__call__", wrong)


def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Side._piece

    def wrong(self: Side, piece: RowSlice) -> torch.Tensor:
        return 2 * right(self, piece)

    monkeypatch.setattr(Side, "_piece", wrong)


def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Side._piece
    monkeypatch.setattr(Side, "_piece", lambda self, piece: right(self, piece).flip(0))


@pytest.mark.few(4)
@pytest.mark.parametrize(("fault", "line"), [
    (product, ["convert", "loha", "--to", "kohya", "--rank", "4"]),
    (product, ["convert", "loha", "--to", "peft", "--rank", "4"]),
    (magnitude, ["convert", "dora", "--to", "kohya", "--rank", "4"]),
    (magnitude, ["convert", "dora", "--to", "kohya", "--algorithm", "full"]),
    (scale, ["convert", "lora", "--to", "ai-toolkit"]),
    (scale, ["convert", "lora", "--to", "ai-toolkit", "--rank", "2"]),
    (numbers, ["extract", "tuned", "--rank", "exact"]), (numbers, ["extract", "tuned", "--algorithm", "full"]),
    (rows, ["extract", "tuned", "--rank", "2"]), (rows, ["extract", "tuned", "--algorithm", "lokr"]),
])  # fmt: skip
def test_fault_in_the_arithmetic_of_a_run_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Plant, line: list[str]
) -> None:
    """The formulas in torch, the scale by α, the stored numbers and the order of their rows: one is wrong, the proof
    computes it otherwise, and nothing is written."""
    command, name, *options = line
    base, file = folder / "base.safetensors", folder / f"{name}.safetensors"
    inputs = [base, file] if command == "extract" else [file, "--base", base]
    right, wrong = (tmp_path / f"{n}{'' if 'peft' in options else '.safetensors'}" for n in ("right", "wrong"))
    code, _, text = run(command, *inputs, *options, "-o", right)
    assert code == 0, text
    fault(monkeypatch)
    code, _, text = run(command, *inputs, *options, "-o", wrong)
    assert code == 6, text
    assert not wrong.exists() and not strays(tmp_path)


@pytest.mark.parametrize("options", [["--weights", "0.75,0.25"], ["--ema", "0.875"]])
def test_fault_in_the_average_of_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """A run that is wrong by 1 % of one snapshot, of a moving average or of a sum."""
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, file in enumerate(files):
        save_file({f"lora_unet_q.lora_{s}.weight": rand(*SIDES[s], seed=seed) for s in SIDES}, file)
    line, right = ("average", *files, *options, "--space", "factors", "-o"), averaged_tensors.averaged
    code, _, text = run(*line, tmp_path / "right.safetensors")
    assert code == 0, text
    monkeypatch.setattr(averaged_tensors, "averaged", lambda some, *more: right(some, *more) + some[0] / 100)
    code, _, text = run(*line, tmp_path / "wrong.safetensors")
    assert code == 6, text
    assert not (tmp_path / "wrong.safetensors").exists() and not strays(tmp_path)


@pytest.mark.parametrize("command", ["convert", "extract"])
def test_change_of_a_weight_that_is_not_expected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    base = {f"blocks.{i}.a.weight": rand(8, 8, seed=i) for i in range(2)}
    lora = {f"lora_unet_blocks_0_a.lora_{slot}.weight": rand(*shape) for slot, shape in SIDES.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(lora, tmp_path / "lora.safetensors")
    save_file({**base, "blocks.0.a.weight": rand(8, 8, seed=9)}, tmp_path / "tuned.safetensors")

    def wrong(to: Dialect, modules: Sequence[StoredModule]) -> list[Entry]:
        entries, ones = entries_of(to, modules), memoryview(np.ones(16, np.float32).tobytes())
        name = entries[-1].name.partition(".lora_")[0]
        other = name.replace("0", "1")
        return entries + [Entry(f"{other}.lora_{slot}.weight", "F32", shape, ones) for slot, shape in SIDES.items()]

    for module in (pipeline, extract_run):
        monkeypatch.setattr(module, "entries_of", wrong)
    sources = ["lora", "--dtype", "bf16", "--to", "kohya"] if command == "convert" else ["base", "tuned", "--rank", "1"]
    files = [tmp_path / f"{s}.safetensors" if s in ("lora", "base", "tuned") else s for s in sources]
    more = ["--base", tmp_path / "base.safetensors"] if command == "convert" else []
    code, _, text = run(command, *files, *more, "-o", tmp_path / "o.safetensors")
    assert code == 6 and "blocks.1.a.weight" in text, text


@pytest.mark.parametrize(
    ("numbers", "factor"),
    [({}, 1.0), ({"alpha": 3.0}, 1.5), ({"scale": 0.375}, 0.375), ({"alpha": 3.0, "scale": 0.375}, 0.375)],
)
def test_proof_of_a_combination_reads_the_scale_of_the_file(
    numbers: Mapping[str, float], factor: float, tmp_path: Path
) -> None:
    """α / r, or webui's `scale` in its place."""
    up, down = rand(*SIDES["up"], seed=1), rand(*SIDES["down"], seed=2)
    tensors = {"lora_unet_q.lora_up.weight": up, "lora_unet_q.lora_down.weight": down}
    tensors |= {f"lora_unet_q.{name}": torch.tensor(value) for name, value in numbers.items()}
    index = open_checkpoint(save(tensors, tmp_path / "a.safetensors"))
    (module,) = group(index).modules
    with Reader([index]) as reader:
        changes = change_of(module, reader, whole("q.weight", (8, 8)))
        assert changes is not None
        assert changes(slice(0, 8)) == pytest.approx((factor * up.double() @ down.double()).numpy(), rel=1e-6)
