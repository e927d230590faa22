"""The LoRAs of loader nodes, read from the inputs of these nodes in a workflow: no LoRA and no model is loaded.

ComfyUI's own loaders (`nodes.py`), and those of rgthree-comfy (`py/power_lora_loader.py`, `py/lora_stack.py`), which
have no output for their LoRAs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

Stacked: TypeAlias = tuple[str, float, float]
"""A LoRA as stacks have it: its name, its strength for the denoiser and for the text encoders."""

Inputs: TypeAlias = Mapping[str, Any]
"""Input of a node → its value, or [node, output] that it is connected to."""

MODEL: Final = "model"
"""The input by which loaders are chained."""


def loaded(workflow: Mapping[str, Mapping[str, Any]], link: list[Any]) -> tuple[list[Stacked], list[str]]:
    """Return the LoRAs on the way to an output of type MODEL, in the order in which they are loaded, and the other
    nodes on that way. `workflow`: node → `class_type` and `inputs`; `link`: the node and its output.

    ValueError if there is none, or if one of their values comes from another node, which does not run here.
    """
    stack: list[Stacked] = []
    others: list[str] = []
    before: Any = link
    while isinstance(before, list) and (node := workflow.get(str(before[0]))) is not None:  # a text is a file's name
        name, inputs = node["class_type"], node["inputs"]
        if name in LOADERS:
            stack = [*_typed(name, LOADERS[name](inputs)), *stack]
        else:
            others.append(name)
        before = inputs.get(MODEL)
    if not stack:
        raise ValueError(
            f"no LoRA is loaded on the way to this model ({', '.join(others)}); connect the output of Load LoRA or of "
            "Power Lora Loader (rgthree)"
        )
    return stack, others


def _typed(loader: str, entries: Iterator[tuple[Any, Any, Any]]) -> Iterator[Stacked]:
    """Yield the LoRAs that change something; ValueError for one whose values come from other nodes."""
    for name, denoiser, encoders in entries:
        if any(isinstance(value, list) for value in (name, denoiser, encoders)):
            raise ValueError(f"a value of {loader} comes from another node; type it into {loader} itself")
        if name and name != "None" and (denoiser or encoders):
            yield str(name), float(denoiser), float(encoders)


def _load_lora(inputs: Inputs) -> Iterator[tuple[Any, Any, Any]]:
    yield inputs["lora_name"], inputs["strength_model"], inputs.get("strength_clip", 0.0)


def _power_lora_loader(inputs: Inputs) -> Iterator[tuple[Any, Any, Any]]:
    for name, row in inputs.items():
        if name.lower().startswith("lora_") and isinstance(row, Mapping) and row.get("on"):
            strength, second = row["strength"], row.get("strengthTwo")
            encoders = strength if second is None else second
            yield row["lora"], strength, encoders if "clip" in inputs else 0.0  # without text encoders it loads none


def _lora_loader_stack(inputs: Inputs) -> Iterator[tuple[Any, Any, Any]]:
    for place in ("01", "02", "03", "04"):
        strength = inputs.get(f"strength_{place}", 0.0)
        yield inputs.get(f"lora_{place}"), strength, strength


LOADERS: Final[Mapping[str, Callable[[Inputs], Iterator[tuple[Any, Any, Any]]]]] = MappingProxyType(
    {
        "LoraLoader": _load_lora,
        "LoraLoaderModelOnly": _load_lora,
        "Power Lora Loader (rgthree)": _power_lora_loader,
        "Lora Loader Stack (rgthree)": _lora_loader_stack,
    }
)
"""Class of a loader node → the LoRAs of its inputs."""
