"""Every branch of every reference formula is held against the product's, and a mistake in one would be noticed.

The product's formulas are held against the source libraries (test_every_row.py says by which test). A reference that
is not asked agrees with everything: so all examples of all rows are computed both ways, and then every operator, number
and branch of the reference is made wrong, one at a time.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lora_merge.algorithms import ALGORITHMS, DoesNotFit
from lora_merge.algorithms.peanut import ACTIVATION_FUNCTIONS
from lora_merge.proof.reference import REFERENCE, FormulaInput
from tests.algorithms.adapter_examples import Example, stacked
from tests.algorithms.peft_examples import ALL_EXAMPLES
from tests.algorithms.pipeline import Stacked
from tests.mutator import Change, changes

MODULES = ("lycoris", "peft", "rotations")


EXTRA: dict[str, list[Example]] = {
    "lora_fused": [Example("three parts", (18, 10), {"up": (10, 3), "down": (9, 10)}, alpha=6.0,
                           settings={"parts": ((1, 4), (6, 10), (13, 16))})],
    "bora": [Example("short rows", (12, 2), {"up": (12, 1), "down": (1, 2), "rows": (12,), "columns": (2,)})],
    "lora_switch": [Example("not over the rank", (3, 8, 10), {"up": (3, 8, 2), "down": (3, 2, 10)},
                            settings={"lora_alpha": 4.0, "over_rank": False})],
    "tlora": [Example("middle", (10, 12), {"p": (10, 3), "q": (3, 12), "lambdas": (1, 3)},
                      settings={"algo": "tlora", "sig_type": "middle"})],
    "diag_oft": [Example("two blocks", (12, 10), {"blocks": (2, 6, 6)})],
    "onetrainer_oft": [
        Example("two blocks", (12, 24), {"skew": (2, 66)}),
        Example("blocks of two", (12, 24), {"skew": (12, 1), "scaled": ()}, {"scaled": lambda _: torch.tensor(1)}),
    ],
    "pissa": [Example("rank one", (12, 10), {"up": (12, 1), "down": (1, 10)})],
    "delora": [Example("short, of rank one", (12, 10), {"up": (12, 1), "down": (1, 10), "length": (1,), "norms": (10,)},
                       spread=0.1)],
    "shira": [Example("in the first row", (12, 10), {"values": (2,), "places": (2, 2)},
                      {"places": lambda _: torch.tensor([[0, 11], [3, 4]])})],
    "peft_oft": [Example(f"{n} terms{', of old' * old}", (10, 24), {"skew": (4, 15)}, spread=0.3,
                         settings={"terms": n, "doubled_last": old}) for n in range(1, 7) for old in (False, True)],
    "peft_oft2": [Example("bounded by height", (11, 24), {"blocks": (4, 6, 6), "rows": (11, 1)},
                          settings={"limit": 0.02})],
    "peft_boft": [Example("four stages", (10, 32), {"blocks": (4, 8, 4, 4), "rows": (10, 1)})],
    "psoft": [Example(f"{n} terms", (12, 10), {"turn": (3,), "left": (12, 3), "right": (3, 10)},
                      settings={"terms": n, "limit": 0.3}) for n in (1, 2, 3)],
    "frod": [Example("singular", (12, 10), {"diagonal": (10,), "values": (1,), "basis": (10, 10), "places": (2, 1)},
                     {"places": lambda _: torch.tensor([[3], [4]]),
                      "basis": lambda _: torch.diag(torch.tensor([9.0] * 9 + [0.0], dtype=torch.float64))})],
    "peanut": [Example(name, (12, 10), {"down": (3, 12), "up": (12, 3)}, settings={"activation": name}, spread=3.0)
               for name in ACTIVATION_FUNCTIONS],
}  # fmt: skip
"""Branches that the examples of the product's laws leave out."""


def given(name: str, example: Example, made: Stacked, rows: np.ndarray | None = None) -> FormulaInput:
    """The first layer as a reference formula takes it."""
    row = ALGORITHMS[name]
    held = made.tensors._asdict()
    tensors = {s: held[s][0].numpy() for s in row.slots if isinstance(held.get(s), torch.Tensor)}
    numbers = {n: float(held[n].reshape(-1)[0]) for n in row.scalars}
    base = made.base[0].numpy()

    def read(slot: str, entries: np.ndarray | None) -> np.ndarray:
        return tensors[slot] if entries is None else tensors[slot][entries]

    settings = {**row.settings, **example.settings}
    chosen = np.arange(len(base)) if rows is None else rows
    return FormulaInput(read, lambda some: base if some is None else base[some], frozenset(tensors), numbers, settings,
                 example.target, chosen, base.shape)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One example, what the product's formula gives for it, and some of its rows."""

    name: str
    given: FormulaInput
    some: FormulaInput
    want: np.ndarray


@cache
def cases() -> tuple[Case, ...]:
    made = []
    for name, examples in ALL_EXAMPLES.items():
        for example in (*examples, *EXTRA.get(name, ())):
            layers = stacked(name, example, n=1)
            rows = np.array(sorted({0, len(layers.base[0]) // 2, len(layers.base[0]) - 1}))
            want = layers.delta()[0].numpy()
            made.append(Case(name, given(name, example, layers), given(name, example, layers, rows), want))
    return tuple(made)


def is_right(formula: Any, case: Case) -> bool:
    """Whether a formula gives what the product's does, whole and for some rows."""
    size = max(1.0, float(np.abs(case.want).max()))
    for asked in (case.given, case.some):
        found = formula(asked)
        want = case.want[asked.rows]
        if np.shape(found) != want.shape or not np.allclose(found, want, rtol=1e-7, atol=1e-8 * size):
            return False
    return True


@pytest.mark.few(9)
@pytest.mark.parametrize("name", ALL_EXAMPLES)
def test_reference_agrees_on_every_example(name: str) -> None:
    mine = [case for case in cases() if case.name == name]
    assert mine
    for case in mine:
        assert is_right(REFERENCE[name].formula, case)


def emptied(example: Example) -> Iterator[Example]:
    """The example with rank 0 in the place of each of its ranks: a size that two slots share and the weight lacks."""
    sizes = [size for shape in example.slots.values() for size in set(shape)]
    for rank in sorted({size for size in sizes if sizes.count(size) > 1 and size not in example.target}):
        slots = {slot: tuple(0 if n == rank else n for n in shape) for slot, shape in example.slots.items()}
        yield replace(example, slots=slots)


@pytest.mark.few(17)
@pytest.mark.parametrize("name", ALL_EXAMPLES)
def test_rank_zero_is_refused_or_computed_by_both(name: str) -> None:
    """Neither takes the last 0 rows for all rows, divides by the rank or cannot tell the shape of nothing."""
    for example in (empty for full in ALL_EXAMPLES[name] for empty in emptied(full)):
        try:
            layers = stacked(name, example, n=1)
        except DoesNotFit:
            continue
        want = layers.delta()[0].numpy()
        case = Case(name, given(name, example, layers), given(name, example, layers, np.array([0])), want)
        assert is_right(REFERENCE[name].formula, case), example.slots


def test_every_line_of_every_reference_formula_is_run() -> None:
    run: dict[str, set[int]] = {name: set() for name in MODULES}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        module = str(frame.f_globals.get("__name__", "")).rpartition(".")[2]
        if module not in run or "lora_merge.proof.reference" not in str(frame.f_globals.get("__name__")):
            return None
        if event == "line":
            run[module].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for case in cases():
            is_right(REFERENCE[case.name].formula, case)
    finally:
        sys.settrace(before)
    missed = [f"{name}.py:{line}" for name in MODULES for line in sorted(statements(name) - run[name])]
    assert not missed


def statements(name: str) -> set[int]:
    """First lines of the statements in the functions of a module, but for docstrings."""
    tree = ast.parse(source(name))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = set()
    for function in functions:
        for node in ast.walk(function):
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ImportFrom)) and not docstring:
                found.add(node.lineno)
    return found


def source(name: str) -> str:
    file = import_module(f"lora_merge.proof.reference.{name}").__file__
    assert file is not None
    return Path(file).read_text(encoding="utf-8")


def table(module: ModuleType | Mapping[str, Any]) -> Mapping[str, Any]:
    """The rows of a module of formulas."""
    names = vars(module) if isinstance(module, ModuleType) else module
    return next(v for k, v in names.items() if k.isupper() and hasattr(v, "keys"))


def noticed(module: ModuleType, change: Change, mine: list[Case]) -> bool:
    """Whether an example shows a mistake, made in the module itself and taken back."""
    scope, rows = vars(module), table(module)
    right = scope[change.function]
    exec(compile(ast.Module([change.code], []), "mistake.py", "exec"), scope)
    try:
        with np.errstate(all="ignore"):
            return not all(
                is_right(scope[change.function] if (f := rows[case.name].formula) is right else f, case)
                for case in mine
            )
    except Exception:  # noqa: BLE001  # a formula that fails is noticed
        return True
    finally:
        scope[change.function] = right


def users(name: str) -> dict[str, list[Case]]:
    """Function of a module → the cases that run it."""
    found: dict[str, list[Case]] = {}
    rows = table(import_module(f"lora_merge.proof.reference.{name}"))
    for case in (c for c in cases() if c.name in rows):
        seen: set[str] = set()

        def trace(frame: FrameType, _event: str, _: Any, seen: set[str] = seen) -> None:
            if frame.f_globals.get("__name__") == f"lora_merge.proof.reference.{name}":
                seen.add(frame.f_code.co_name)

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            is_right(rows[case.name].formula, case)
        finally:
            sys.settrace(before)
        for function in seen:
            found.setdefault(function, []).append(case)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_mistake_in_a_reference_formula_is_noticed(name: str) -> None:
    module, by_function, missed, count = import_module(f"lora_merge.proof.reference.{name}"), users(name), [], 0
    lines = source(name).splitlines()
    for change in changes(source(name)):
        count += 1
        told = f"{change.function}: {change.what} in {lines[change.line - 1].strip()}"
        if not any(mark in told for mark in EQUAL) and not noticed(
            module, change, by_function.get(change.function, [])
        ):
            missed.append(told)
    assert count > 10
    assert not missed


EQUAL = (
    # why nothing can be seen of them
    "wrapped=2**16",  # where no index is negative; those that are have tests of their own (test_bounds.py)
    'places("on_input"',  # a bound on what the file says (test_bounds.py)
    "8 * stored.shape[1]",  # rounded: some of the numbers are not needed for small blocks
    'settings.get("limit", 0.0)', 'settings.get("terms", 5)', 'settings.get("top", 2)',  # the rows have these defaults
    "np.swapaxes(blocks, -1, -2)",  # the axes of square blocks, counted from the other end
    "largest - largest.max",  # a softmax is the same for numbers that are all larger
    "taps) - 2, count))", "len(whole) - cut",  # rows that are cut off later
    "g.out > 1",  # of a single row
    "_turned_rows: − → + in b =", "series: − → + in power,",  # the other axis of
    "inputs_turned: − → + in b =", "miss_bat: 1 → 2 in rank =", "peft_oft1: 1 → 2 in b =", "1 → 2 in side =", "− → + in side =",  # square
    "delora: − → + in return",  # blocks, and one number as [1]
)  # fmt: skip
"""What the lines of changes hold that change nothing that can be seen."""


def test_butterflies_of_several_stages_are_those_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT trains more than one stage on a GPU alone; its matrices are the same everywhere."""
    peft = pytest.importorskip("peft")
    from peft.tuners.boft import layer as boft

    monkeypatch.setattr(boft, "get_fbd_cuda", lambda: True)
    for factor in (2, 3, 4):
        model = torch.nn.Sequential(torch.nn.Linear(64, 10, bias=False)).double()
        weight = model[0].weight.detach().clone()
        config = peft.BOFTConfig(
            boft_block_size=4, boft_n_butterfly_factor=factor, target_modules=["0"], init_weights=False
        )
        layer = peft.get_peft_model(model, config).double().base_model.model[0]
        blocks, size = layer.boft_R["default"].detach(), layer.boft_s["default"].detach().reshape(-1, 1)
        count, pairs = layer.boft_P.double(), layer.cayley_batch(blocks.reshape(-1, 4, 4)).view(blocks.shape)
        whole = torch.eye(64, dtype=torch.float64)
        for swap, stage in zip(count, pairs, strict=True):
            whole = swap @ torch.block_diag(*stage) @ swap.T @ whole
        want = size * (whole @ weight.T).T - weight
        stored = {"blocks": blocks.numpy(), "rows": size.numpy()}
        w = weight.numpy()
        asked = FormulaInput(lambda s, e, t=stored: t[s] if e is None else t[s][e], lambda e, w=w: w if e is None else w[e],
                      frozenset(stored), {}, {}, (10, 64), np.arange(10), (10, 64))  # fmt: skip
        np.testing.assert_allclose(REFERENCE["peft_boft"].formula(asked), want.numpy(), rtol=1e-9, atol=1e-9)
