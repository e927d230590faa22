"""A call of the program as plain data, and what comes of it: files, the plan and the report."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lora_merge
from tests.kit.command_line import run

IN_MEMORY = ("merge_state_dict", "merge_into")
"""Functions for tensors in memory; all others are commands."""

PLANNED = ("merge", "unmerge", "combine", "resize", "convert", "extract", "average")
"""Commands that have a plan."""

VARYING = frozenset({"seconds", "stages", "peak_memory", "version", "free", "lora_merge.header_sha256"})
"""Entries of reports and of metadata that differ from run to run, from machine to machine or with the version."""

OF_TENSORS = ("merge", "replay", "unmerge", "verify")
"""The commands whose reports have the values of every tensor on request."""

DRAFT = re.compile(r"\.([^/ ]+)\.[0-9a-f]{12}\.lora-merge\.part")
"""The name of an output before it is complete, which has a random part."""


@dataclass(frozen=True)
class Call:
    """One call. Inputs are names in the scene's folder, `NAME:STRENGTH` for adapters; `{in}` in options is that folder."""

    name: str
    function: str
    inputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str = "out.safetensors"
    """Name of the output; "" for commands that only print."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Call:
        """The call of plain data, as `asdict` returns it."""
        return cls(**{**data, "inputs": tuple(data["inputs"])})

    def result(self, scene: Path, folder: Path) -> dict[str, Any]:
        """Call, write the output to a new folder, and return the plan and the report as JSON."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.function in IN_MEMORY:
            plan, report = None, self._in_memory(scene, folder)
        else:
            words = [*self._words(scene), *(["-o", folder / self.output] if self.output else []), "--json"]
            words += ["--json-tensors"] if self.function in OF_TENSORS else []
            plan = printed(*words, "--dry-run") if self.function in PLANNED else None
            report = printed(*words)
        return {"plan": normalised(plan, scene, folder), "report": normalised(report, scene, folder)}

    def _words(self, scene: Path) -> Iterator[str]:
        yield self.function
        yield from (str(scene / name) for name in self.inputs)
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                yield f"--{flag}" if value else f"--no-{flag}"
                continue
            pairs = value.items() if isinstance(value, dict) else ()
            values = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in pairs] if pairs else (
                value if isinstance(value, list) else [value]
            )  # fmt: skip
            for one in values:
                yield from (f"--{flag}", str(one).replace("{in}", str(scene)))

    def _in_memory(self, scene: Path, folder: Path) -> Any:
        """The report of a call in Python; the tensors become a file."""
        base, *others = self.inputs
        tensors = load_file(scene / base)
        adapters = [(str(scene / n.partition(":")[0]), float(n.partition(":")[2] or 1)) for n in others]
        report: dict[str, Any] = {}
        try:
            if self.function == "merge_state_dict":
                merged = lora_merge.merge_state_dict(tensors, adapters, **self.options)
            else:
                model = module(tensors)
                handle = lora_merge.merge_into(model, adapters, **self.options)
                merged = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
                handle.undo()
                report = {"changed": sorted(handle.changed), "restored": same(model.state_dict(), tensors)}
        except lora_merge.MergeError as error:
            return refusal(type(error).__name__, error.exit_code)
        save_file({name: tensor.contiguous() for name, tensor in merged.items()}, folder / self.output)
        return report


def printed(*words: object) -> Any:
    """What a command prints as JSON; of a refusal its kind and its exit code, as words may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = run(*words)
            report = json.loads(answer.out)
        except Exception as error:  # noqa: BLE001  # it is compared, and `record` prints it
            return {"crashed": f"{type(error).__name__}: {error}"}
    error = report.get("error") if isinstance(report, dict) else None
    return report if error is None else refusal(error["kind"], answer.code)


def refusal(kind: str, code: int) -> dict[str, Any]:
    """What is compared of a refusal."""
    return {"refused": kind, "exit_code": code}


def outcome(report: Any) -> str:
    """Whether a call was refused or crashed, or did what it was asked for."""
    return next((word for word in ("refused", "crashed") if isinstance(report, dict) and word in report), "done")


def module(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A live model with these parameters."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        layer = model
        for part in path:
            if part not in layer._modules:
                layer.add_module(part, nn.Module())
            layer = layer._modules[part] or layer
        if tensor.is_floating_point():
            layer.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
        else:
            layer.register_buffer(leaf, tensor.clone())
    return model


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same bytes."""
    return a.keys() == b.keys() and all(
        torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a[name], b[name]))) for name in a
    )


def normalised(value: Any, scene: Path, folder: Path) -> Any:
    """JSON without what varies, and with short names for the folders of a call."""
    if isinstance(value, dict):
        named = {normalised(k, scene, folder): v for k, v in value.items() if k not in VARYING}
        return {k: normalised(v, scene, folder) for k, v in named.items()}
    if isinstance(value, list):
        return [normalised(v, scene, folder) for v in value]
    if isinstance(value, str):
        return DRAFT.sub(r"\1", value.replace(str(scene), "{in}").replace(str(folder), "{out}"))
    return value
