"""algorithms/README.md: its example is run as an algorithm of our own, its table of accuracy is measured."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, floor, log10
from pathlib import Path
from types import MappingProxyType, ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from lora_merge import algorithms
from lora_merge.adapters import suffixes as conventions
from lora_merge.algorithms import ALGORITHMS, Algorithm
from lora_merge.engine.tensor_moves import Placement, move
from tests.algorithms.adapter_examples import Example
from tests.algorithms.peft_examples import ALL_EXAMPLES, unseen
from tests.algorithms.pipeline import stack

README = Path(__file__).parents[2] / "algorithms" / "README.md"
TABLE = re.compile(r"(?<=<!-- accuracy -->\n).*(?=<!-- /accuracy -->)", re.DOTALL)
COLUMNS = ("fp32", "bf16", "fp16")
LIMITS = {"fp32": 2e-6, "bf16": 1e-3, "fp16": 1e-3}


@pytest.fixture
def example_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    code = re.search(r"<!-- example -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 30
    module = ModuleType("gain")
    monkeypatch.setitem(sys.modules, "gain", module)  # dataclasses look themselves up
    exec(compile(code[1], "algorithms/README.md", "exec"), vars(module))
    return module


def test_example_merges_a_file(example_module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = example_module.GAIN
    table = MappingProxyType({**ALGORITHMS, "gain": row})
    for name, module in list(sys.modules.items()):
        if name.startswith("lora_merge.") and getattr(module, "ALGORITHMS", None) is ALGORITHMS:
            monkeypatch.setattr(module, "ALGORITHMS", table)
    monkeypatch.setattr(algorithms, "ALGORITHMS", table)
    rows = {f".{slot}": conventions.Suffix(f".{slot}", slot, ("gain",)) for slot in row.slots}
    monkeypatch.setattr(conventions, "_BY_ENDING", {**conventions._BY_ENDING, **rows})
    monkeypatch.setattr(conventions, "_FIRST", conventions._FIRST | row.slots.keys())
    weight, gain, shift = torch.randn(12, 10), torch.randn(12), torch.randn(12)
    save_file({"a.b.weight": weight, "a.c.weight": weight.clone()}, tmp_path / "base.safetensors")
    save_file({"a.b.gain": gain, "a.b.shift": shift, "a.c.gain": gain.clone()}, tmp_path / "gain.safetensors")

    lora_merge.merge(
        tmp_path / "base.safetensors", tmp_path / "gain.safetensors", tmp_path / "out.safetensors",
        device="cpu", verify=False,  # the independent recomputation has to know a row as well
    )  # fmt: skip
    merged = load_file(tmp_path / "out.safetensors")
    torch.testing.assert_close(merged["a.b.weight"], gain[:, None] * weight + shift[:, None])
    torch.testing.assert_close(merged["a.c.weight"], gain[:, None] * weight)


@pytest.mark.parametrize("shape", [(11,), (13,), (12, 2), (1,), ()])
def test_example_refuses_what_does_not_fit(example_module: ModuleType, shape: tuple[int, ...]) -> None:
    stored = {"gain": torch.zeros(shape)}
    with pytest.raises(algorithms.DoesNotFit, match="gain is"):
        stack(example_module.GAIN, [(torch.zeros(12, 10), stored)])


def worst(name: str, examples: list[Example]) -> dict[str, float]:
    """The largest error of the row's examples, and the share of elements that round otherwise."""
    found = dict.fromkeys(COLUMNS, 0.0)
    for example in examples:
        layers = [_near_neutral(example, seed) for seed in range(64)]
        row = ALGORITHMS[name]
        exact, single = (
            stack(row, [_cast(layer, dtype) for layer in layers], example.alpha, example.settings)
            for dtype in (torch.float64, torch.float64 if row.decomposes else torch.float32)
        )
        if row.prepare is not None:  # in float64, the rest in float32
            there = move(row.prepare(exact.tensors), Placement(torch.device("cpu"), torch.float32))
            single = replace(single, row=replace(row, prepare=None), tensors=there)
        want, got = exact.base + exact.delta(), single.base + single.delta()
        found["fp32"] = max(found["fp32"], float((want - got).abs().max() / want.abs().max()))
        for column, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            apart = (want.to(dtype).double() - got.to(dtype).double()).abs()
            unit = _unit(torch.maximum(exact.base.abs(), want.abs()), dtype)
            assert (apart <= unit).all(), (name, example.label, column)
            found[column] = max(found[column], float((apart != 0).double().mean()))
    return found


def _near_neutral(example: Example, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A layer in float32 as training leaves it: the adapter that changes nothing, plus noise."""
    g = torch.Generator().manual_seed(seed)
    weight, stored = example.layer(g, torch.float64)
    weight = weight + torch.randn(weight.shape, generator=g) * 0.01  # more digits than bf16 has
    zeros = {s: torch.zeros_like(t) for s, t in stored.items() if s not in example.values}
    start = zeros if example.neutral in (None, unseen) else {**zeros, **example.neutral(weight, stored)}
    trained = {
        s: t.reshape(stored[s].shape) + stored[s] + 0.01 * torch.randn(stored[s].shape, generator=g)
        for s, t in start.items()
    }
    return weight.float(), {s: trained[s].float() if s in trained else t for s, t in stored.items()}


def _cast(layer: tuple[Tensor, dict[str, Tensor]], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    weight, stored = layer
    cast = {s: t.to(dtype) if t.is_floating_point() else t for s, t in stored.items()}
    return weight.to(dtype), cast


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place at x; where ΔW cancels W, the result cannot be better than W was."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.full_like(x, torch.finfo(dtype).eps), exponent - 1)


def _ceiling(value: float, column: str, row: Algorithm) -> str:
    """Doubled and rounded up to one digit, for other processors sum in another order; at most the limit."""
    if row.decomposes:
        return "0"
    doubled = max(2 * value, LIMITS[column] / 5)
    digit = floor(log10(doubled))
    return f"{min(ceil(doubled / 10**digit - 1e-9) * 10**digit, LIMITS[column]):.0e}"


def _table(measured: Mapping[str, Mapping[str, float]]) -> str:
    lines = [f"| algorithm | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, found in measured.items():
        ceilings = (_ceiling(found[c], c, ALGORITHMS[name]) for c in COLUMNS)
        lines.append(f"| {name} | {' | '.join(ceilings)} |")
    return "\n".join(lines) + "\n"


@pytest.mark.release
def test_accuracy_is_as_the_table_says() -> None:
    measured = {name: worst(name, ALL_EXAMPLES[name]) for name in ALGORITHMS}
    for name, found in measured.items():
        assert all(found[c] <= LIMITS[c] for c in COLUMNS), (name, found)
    text = README.read_text(encoding="utf-8")
    if os.environ.get("LORA_MERGE_TABLE") == "write":
        README.write_text(TABLE.sub(_table(measured), text), encoding="utf-8")
        return
    found_table = TABLE.search(text)
    assert found_table is not None
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found_table[0].splitlines()[2:]]
    assert [row[0] for row in rows] == list(ALGORITHMS)
    for name, *ceilings in rows:
        for column, ceiling in zip(COLUMNS, ceilings, strict=True):
            assert measured[name][column] <= float(ceiling), (name, column)
