"""Builds PEFT models with random trained weights, saves them, and merges their files by the rules
alone."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import lora_merge
from lora_merge.adapters.peft.rules import PeftRules, bare, rules
from lora_merge.adapters.suffixes import split
from lora_merge.algorithms import ALGORITHMS, DoesNotFit, LoadedModule
from lora_merge.algorithms.dora import rescale
from lora_merge.disk.reader import Reader
from lora_merge.engine.patch_tensors import cast
from lora_merge.job import make_job
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from lora_merge.proof.account import account
from lora_merge.proof.second_reading.comparison import read_again


class Layers(nn.Module):
    """One layer of every kind that PEFT wraps; called one by one, never as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(24, 36)
        self.tall = nn.Linear(36, 24, bias=False)
        self.square = nn.Linear(24, 24)
        self.conv = nn.Conv2d(4, 6, 3)
        self.point = nn.Conv2d(4, 6, 1)
        self.line = nn.Conv1d(4, 6, 3)
        self.volume = nn.Conv3d(2, 4, 3)
        self.table = nn.Embedding(30, 24)
        self.gpt = Conv1D(36, 24)
        self.gpt_square = Conv1D(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        """PEFT wants one."""
        return self.wide(x)


INPUTS = {
    "wide": (5, 24), "tall": (5, 36), "square": (5, 24), "conv": (2, 4, 7, 6), "point": (2, 4, 7, 6), "line": (2, 4, 9),
    "volume": (2, 2, 5, 4, 6), "gpt": (5, 24), "gpt_square": (5, 24), "norm": (5, 24),
}  # fmt: skip


def inputs(name: str) -> Tensor:
    """Something to feed the layer of that name with."""
    if name == "table":
        return torch.arange(30).reshape(5, 6)
    return torch.randn(*INPUTS[name], generator=torch.Generator().manual_seed(7))


def train(config: Any, spread: float = 0.3, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    """(the untouched model, the PEFT model with every trainable number drawn anew)."""
    from peft import get_peft_model

    torch.manual_seed(11)
    base = Layers() if model is None else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if p.requires_grad:
                one = 1.0 if name.endswith(("ia3_l.default", "boft_s.default", "w_norm.default")) else 0.0
                p.copy_(one + spread * torch.randn(p.shape))
    return base, tuned.eval()


def save(tuned: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, configuration) as PEFT writes and we read them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned.save_pretrained(str(folder))
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def merged(base: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """State dict of the merged model in float64: what a plan does, without its care for speed and errors."""
    return Merge(base, tensors, rules(config, "adapter_config.json")).run()


class Merge:
    """A plan in small."""

    def __init__(self, base: nn.Module, tensors: Mapping[str, Tensor], rules: PeftRules) -> None:
        self.rules, self.tensors = rules, tensors
        self.state = {name: value.double() for name, value in base.state_dict().items()}
        self.flipped = {f"{name}.weight" for name, module in base.named_modules() if isinstance(module, Conv1D)}

    def run(self) -> dict[str, Tensor]:
        """The merged state dict."""
        groups: dict[tuple[str, str], dict[str, tuple[Tensor, tuple[str, ...]]]] = {}
        result = dict(self.state)
        for key, value in self.tensors.items():
            if (meant := self.rules.stored_value(key)) is not None:
                if meant.kind == "value":
                    _put(result, bare(meant.target), value.double(), meant.rows)
                continue
            if self.rules.holds_for_all(key):
                continue
            parts = split(key)
            if parts is None or parts[1].ending == ".weight":
                _put(result, bare(key), value.double(), None)
                continue
            module, row = parts
            groups.setdefault((module, row.parameter), {})[row.slot] = (value, row.algorithms)
        for (module, parameter), slots in groups.items():
            if module != "base_model" and (parameter == "weight" or self.has(module, parameter)):
                for target, change in self.changes(module, parameter, slots).items():
                    result[target] = result[target] + change
        return result

    def has(self, module: str, parameter: str) -> bool:
        """Whether the base has that parameter."""
        return f"{bare(module)}.{parameter}" in self.state

    def changes(
        self, module: str, parameter: str, slots: Mapping[str, tuple[Tensor, tuple[str, ...]]]
    ) -> dict[str, Tensor]:
        """Parameter → its change, by the first algorithm that fits."""
        magnitude = slots.get("magnitude")
        trained = {slot: value for slot, (value, _) in slots.items() if slot != "magnitude"}
        allowed = [set(names) for slot, (_, names) in slots.items() if slot != "magnitude"]
        candidates = [
            name
            for name, row in ALGORITHMS.items()
            if all(name in names for names in allowed)
            and all(slot in {*trained, *row.shared, *row.base_slots} for slot, needed in row.slots.items() if needed)
            and all(slot in row.slots for slot in trained)
        ]
        chosen = self.rules.algorithm(module, candidates)
        targets = self.rules.targets(module) if parameter == "weight" else (f"{bare(module)}.{parameter}",)
        target = next(t for t in targets if t in self.state)
        why: list[str] = []
        for name in [chosen] if chosen else candidates:
            bias = [target.removesuffix("weight") + "bias"] if ALGORITHMS[name].also_bias else []
            shared = {s: self.tensors[key] for s, key in self.rules.shared(name, module).items() if key in self.tensors}
            try:
                near = {slot: f"{bare(module)}.{of}" for slot, of in ALGORITHMS[name].base_slots.items()}
                near_values = {slot: self.state[key] for slot, key in near.items() if key in self.state}
                values = {**trained, **shared, **near_values}
                done = {t: self.change(name, module, values, t) for t in [target, *bias] if t in self.state}
            except DoesNotFit as e:
                why.append(f"{name}: {e}")
                continue
            if magnitude is not None:
                done[target] = self.dora(name, target, done[target], magnitude[0])
            return done
        raise DoesNotFit(f"{module}: {why or candidates}")

    def change(self, name: str, module: str, tensors: Mapping[str, Tensor], target: str) -> Tensor:
        """ΔW of one parameter by one algorithm."""
        row, flip = ALGORITHMS[name], target in self.flipped
        weight = self.state[target].mT if flip else self.state[target]
        settings = dict(self.rules.settings(name, module))
        if "widest" in row.settings:
            settings["widest"] = (36, 36)
        fitted = dict(
            row.fitted_shapes({slot: tuple(value.shape) for slot, value in tensors.items()}, tuple(weight.shape))
        )
        numbers = {**row.scalars_from(None, fitted, tuple(weight.shape)), **self.rules.scalars(name, module, fitted)}
        missing = any(slot not in tensors for slot in row.slots)
        derived = dict(row.derive(fitted, tuple(weight.shape), settings) if row.derive and missing else {})
        loaded = {"": weight, **{slot: value.reshape(fitted[slot]) for slot, value in tensors.items()}}
        derived |= row.rebuilt(
            LoadedModule(lambda slot: loaded[slot].float(), cast, fitted, tuple(weight.shape), settings)
        )
        fields = {
            slot: (value.long() if slot in row.integer_slots else value.double()).reshape(
                1, *fitted.get(slot, value.shape)
            )
            for slot, value in {**tensors, **derived}.items()
        }
        scalars = {k: torch.tensor([[[v]]], dtype=torch.float64) for k, v in numbers.items()}
        rows = weight.flatten(0, 1) if "experts" in name else weight.reshape(weight.shape[0], -1)
        change = row.delta(rows[None], row.prepared(row.tensors(**fields, **scalars, **settings))).reshape(weight.shape)
        return change.mT if flip else change

    def dora(self, name: str, target: str, change: Tensor, magnitude: Tensor) -> Tensor:
        """The change with the magnitude applied: of an embedding by columns, else by rows."""
        flip = target in self.flipped
        weight, change = (x.mT if flip else x for x in (self.state[target], change))
        axis, shape = ("in", (1, 1, -1)) if name == "lora_embedding" else ("out", (1, -1, 1))
        rows, moved = (x.reshape(1, x.shape[0], -1) for x in (weight, change))
        done = rescale(rows, moved, magnitude.double().reshape(shape), axis).reshape(weight.shape)
        return done.mT if flip else done


def _put(state: dict[str, Tensor], name: str, value: Tensor, rows: tuple[int, ...] | None) -> None:
    if rows is None:
        assert state[name].shape == value.shape
        state[name] = value
    else:
        state[name] = state[name].index_copy(0, torch.tensor(rows), value)


def assert_same_function(base: nn.Module, tuned: Any, state: Mapping[str, Tensor], names: list[str]) -> None:
    """Every layer with the merged weights answers as the PEFT layer does."""
    plain = copy.deepcopy(base)
    plain.load_state_dict(dict(state))
    for name in names:
        x = inputs(name)
        with torch.no_grad():
            expected, got = (
                tuned.base_model.model.get_submodule(name)(x),
                plain.get_submodule(name)(x),
            )
            before = base.get_submodule(name)(x)
        assert_close(got, expected, f"{name}: forward")
        assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3), f"{name}: the adapter does nothing"


def assert_same_merge(tuned: Any, state: Mapping[str, Tensor]) -> None:
    """PEFT's own merged weights are ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = copy.deepcopy(tuned).merge_and_unload().state_dict()
    for name, value in theirs.items():
        assert_close(state[name], value, f"{name}: merge")


def assert_close(got: Tensor, expected: Tensor, what: str, bound: float = 1e-5) -> None:
    """Equal to within what float32 leaves, relative to the largest number."""
    worst = (got.double() - expected.double()).abs().max().item() / max(expected.abs().max().item(), 1e-9)
    assert worst < bound, f"{what}: off by {worst:.1e} of the largest"


def assert_tool_agrees(base: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
    """The tool itself, given PEFT's folder, writes the same."""
    done = lora_merge.merge_state_dict(base.state_dict(), folder, compute_dtype="fp64")
    assert_read_again(base, folder)
    for name, value in state.items():
        assert_close(done[name], value, f"{name}: tool", bound=1e-6)


def assert_read_again(base: nn.Module, folder: Path) -> None:
    """The proof's own reading of PEFT's files contradicts the plan nowhere, and every tensor is accounted for."""
    path = folder.with_name(f"{folder.name}-base.safetensors")
    save_file({name: value.contiguous() for name, value in base.state_dict().items()}, path)
    plan = plan_job(make_job(path, [folder], folder.with_name("never-written")), CheckpointCache())
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        read_again(plan, reader)
        account(plan, reader)
