"""Every public function × arguments of wrong types and hostile values: a result or a MergeError, and no other exception.

Run: pytest tests/whole/test_hostile_arguments.py
"""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lora_merge
from lora_merge import MergeError
from lora_merge.errors import InputError, UsageError
from lora_merge.options import OPTIONS
from tests.kit.files import save


class NoPath(os.PathLike[str]):
    def __fspath__(self) -> str:
        raise ZeroDivisionError


class NoText:
    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


def broken() -> Iterator[str]:
    yield "a.safetensors"
    raise KeyError("row")


def closed() -> Any:
    with open(os.devnull) as file:  # noqa: PTH123
        return file


VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None, "-1": lambda: -1, "nan": lambda: float("nan"), "many digits": lambda: 10**400,
    "complex": lambda: 1j, "True": lambda: True, "no text": NoText, "no path": NoPath, "empty": lambda: "",
    "NUL": lambda: "a\0b", "surrogate": lambda: "\ud800", "long": lambda: "x" * 5000, "bytes": lambda: b"a",
    "folder": lambda: "folder", "Path": lambda: Path("a.safetensors"), "list": list, "nested": lambda: [[None]],
    "table": lambda: {1: 2}, "generator": broken, "range": lambda: range(3), "closed file": closed,
    "pair": lambda: ("a.safetensors", float("nan")), "adapter": lambda: lora_merge.Adapter(None),  # type: ignore[arg-type]
    "array": lambda: np.zeros(3), "numpy scalar": lambda: np.float32(0.5), "tensor": lambda: torch.zeros(3),
    "class": lambda: int, "module": lambda: nn.Linear(2, 2), "dtype": lambda: torch.float16,
}  # fmt: skip

OWN = ("no path", "no text")
"""Values of which the caller's own class fails, which a message says."""

FACTORS = {"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(6, 2)}
STATE = {"a.weight": torch.zeros(6, 4), "c.weight": torch.zeros(6, 4)}


def net(**more: Any) -> nn.Module:
    layers: dict[str, Any] = {"a": nn.Linear(4, 6, bias=False), "c": nn.Linear(4, 6, bias=False)}
    return nn.ModuleDict(layers | more).requires_grad_(requires_grad=False)


CALLS: Mapping[str, Mapping[str, Any]] = {
    "merge": {"base": "base", "adapters": "a"}, "plan": {"base": "base", "adapters": "a"},
    "unmerge": {"merged": "m", "adapters": "a"}, "replay": {"made": "m"}, "verify": {"output": "m"},
    "inspect": {"path": "base", "adapter": "a"}, "compare": {"a": "base", "b": "m"},
    "combine": {"adapters": ["a"]}, "resize": {"adapter": "a", "rank": 1}, "convert": {"adapter": "a", "to": "kohya"},
    "extract": {"base": "base", "tuned": "m"}, "average": {"adapters": ["a", "a"]}, "run_batch": {"jobs": []}, "plan_batch": {"jobs": []},
    "load_adapter": {"path": "a"}, "LoadedAdapter": {"path": "a"}, "merge_state_dict": {"state_dict": STATE, "adapters": FACTORS},
    "merge_into": {"model": None, "adapters": FACTORS},
    "OpenAdapter.delta": {"name": "a", "base_weight": STATE["a.weight"]}, "OpenAdapter.algorithm": {"name": "a"},
    "OpenAdapter.rank": {"name": "a"}, "OpenAdapter.spectrum": {"name": "a"}, "OpenAdapter.save": {"path": "out"},
    "AdapterSum.delta": {"name": "a", "base_weight": STATE["a.weight"]},
}  # fmt: skip
"""Public function or method → arguments of a call that works."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a base, an adapter, their merge, and a folder without files."""
    monkeypatch.chdir(tmp_path)
    save(STATE, tmp_path / "base.safetensors")
    save(FACTORS, tmp_path / "a.safetensors")
    lora_merge.merge("base", "a", "m")
    (tmp_path / "folder").mkdir()
    return tmp_path


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> MergeError | None:
    """The MergeError of a call, which has a text, and travels between processes; None if the call works."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(*args, **kwargs)
    except MergeError as e:
        assert str(e) and e._repr_html_() and str(pickle.loads(pickle.dumps(e))) == str(e)
        return e
    return None


def public(name: str) -> Callable[..., Any]:
    kind, _, method = name.partition(".")
    if not method:
        return getattr(lora_merge, name)  # type: ignore[no-any-return]
    adapter: Any = lora_merge.load_adapter("a")
    return getattr(adapter if kind == "OpenAdapter" else 0.5 * adapter, method)  # type: ignore[no-any-return]


def test_every_public_function_is_called_here() -> None:
    names = {n for n in lora_merge.__all__ if inspect.isfunction(getattr(lora_merge, n))}
    methods = {
        f"OpenAdapter.{n}" for n, f in inspect.getmembers(lora_merge.OpenAdapter, inspect.isfunction) if n[0] != "_"
    }
    assert names | methods <= CALLS.keys()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_merge_errors(name: str, folder: Path) -> None:
    function, given = public(name), {**CALLS[name], **({"model": net()} if name == "merge_into" else {})}
    parameters = inspect.signature(function).parameters
    for parameter in (p for p in parameters if p not in ("options", "progress")):
        for kind, value in VALUES.items():
            call = {
                **given,
                **({"output": f"{parameter}-{kind}"} if "output" in parameters and name != "verify" else {}),
            }
            error = attempt(function, **{**call, parameter: value()})
            assert error is None or "unexpected failure: " not in error.what or kind in OWN, (
                parameter,
                kind,
                error,
            )
    for error in (attempt(function), attempt(function, *range(30)), attempt(function, **given, nose=1)):
        assert isinstance(error, UsageError), error


@pytest.mark.few(3)
@pytest.mark.parametrize("option", OPTIONS)
def test_wrong_values_of_options_are_merge_errors(option: str, folder: Path) -> None:
    for kind, value in VALUES.items():
        for error in (
            attempt(lora_merge.plan, "base", "a", "out", **{option: value()}),
            attempt(lora_merge.merge_state_dict, STATE, FACTORS, **{option: value()}),
        ):
            assert error is None or "unexpected failure: " not in error.what or kind in OWN, (kind, error)


class Dispatched(Tensor):
    """A tensor of a library: every function of torch fails for it."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(function)


def freed() -> Tensor:
    tensor = torch.zeros(6, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(6, 4)


REFUSED: Mapping[str, Callable[[], Any]] = {
    "lazy": lambda: nn.LazyLinear(6).weight,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)]),
    "meta": lambda: torch.zeros(6, 4, device="meta"),
    "sparse": lambda: torch.zeros(6, 4).to_sparse(),
    "sparse rows": lambda: torch.ones(6, 4).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(6, 4), 0.1, 0, torch.qint8),
    "freed": freed,
    "fake": fake,
    "array": lambda: np.zeros((6, 4), np.float32),
    "dispatched": lambda: torch.zeros(6, 4).as_subclass(Dispatched),
}
PLAIN: Mapping[str, Callable[[], Any]] = {
    "gradient": lambda: torch.ones(6, 4, requires_grad=True),
    "result": lambda: torch.ones(6, 4, requires_grad=True) * 2,
    "transposed": lambda: torch.ones(4, 6).t(),
    "steps": lambda: torch.ones(6, 8)[:, ::2],
    "expanded": lambda: torch.ones(1, 4).expand(6, 4),
    "negative": lambda: torch._neg_view(torch.ones(6, 4)),
    "Parameter": lambda: nn.Parameter(torch.ones(6, 4)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "fake")) for k in (*REFUSED, *PLAIN)]
)  # imports
@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_tensors_without_plain_numbers_are_refused_and_all_others_are_used(kind: str, folder: Path) -> None:
    """As a tensor of the base or the adapter, in a state dict or a live model, merged or not, and as a base weight."""
    make = (REFUSED | PLAIN)[kind]
    adapter = lora_merge.load_adapter("a")
    errors = [attempt(lora_merge.merge_state_dict, {**STATE, name: make()}, FACTORS) for name in STATE]
    errors += [attempt(one.delta, "a", make()) for one in (adapter, 0.5 * adapter)]
    errors.append(attempt(lora_merge.merge_state_dict, STATE, {"a.diff": make()}))
    if isinstance(value := make(), Tensor) and kind not in ("expanded", "result", "gradient"):
        model = net(x=nn.Module())
        if isinstance(value, nn.Parameter):
            model.x.weight = value
        else:
            model.x.register_buffer("weight", value)
        errors.append(attempt(lora_merge.merge_into, model, FACTORS))
    if kind in PLAIN:
        wrong = [e for e in errors if e is not None and "exactly zero" not in str(e)]
        assert not wrong, wrong[0]
    else:
        assert all(isinstance(e, InputError | UsageError) for e in errors), errors


def uses(path: Path) -> Iterator[Callable[[], Any]]:
    yield lambda: lora_merge.load_adapter(path)
    if attempt(lora_merge.load_adapter, path):
        return
    adapter = lora_merge.load_adapter(path)
    yield lambda: adapter.delta("a", STATE["a.weight"])
    yield lambda: (2 * adapter).delta("a", STATE["a.weight"])
    yield lambda: adapter.rank("a")
    yield lambda: adapter.spectrum("a", base="base")
    yield lambda: adapter.algorithm("a")
    yield lambda: adapter.save("copy")
    yield lambda: lora_merge.merge_state_dict(STATE, adapter)
    yield lambda: lora_merge.merge_into(net(), path)
    yield lambda: lora_merge.average([path, path], "average", space="factors", base="base")


def test_broken_indices_and_factors_are_merge_errors(folder: Path) -> None:
    files: dict[str, dict[str, Tensor]] = {
        "fraction": {"a.weight": torch.ones(6), "a.on_input": torch.tensor(0.5)},
        "whole factors": {n: t.to(torch.int32) for n, t in FACTORS.items()},
        "complex": {n: t.to(torch.complex64) for n, t in FACTORS.items()},
        "nan": {n: t * torch.nan for n, t in FACTORS.items()},
        "no numbers": {n: t[:0] for n, t in FACTORS.items()},
        "a vector": {n: t[0] for n, t in FACTORS.items()},
        "half": {"a.lora_A.weight": torch.ones(2, 4)},
    }
    for name, tensors in files.items():
        path = save(tensors, folder / f"{name}.safetensors")
        for call in uses(path):
            error = attempt(call)
            assert error is None or "unexpected failure: " not in error.what, (name, error)


def test_formula_reads_the_base_where_factors_are_averaged(folder: Path) -> None:
    glora = {
        f"a.{n}.weight": torch.randn(s) for n, s in (("a1", (1, 4)), ("a2", (4, 1)), ("b1", (1, 4)), ("b2", (6, 1)))
    }
    save({"a.weight": torch.randn(6, 4)}, folder / "b.safetensors")
    save(glora, folder / "g.safetensors")
    lora_merge.average(["g", "g"], "mean", base="b", space="factors")
    state = {"a.weight": torch.randn(6, 4)}
    made, want = (
        lora_merge.merge_state_dict(state, name)["a.weight"] for name in ("mean.safetensors", "g.safetensors")
    )
    torch.testing.assert_close(made, want)
