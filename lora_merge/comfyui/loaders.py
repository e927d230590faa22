"""The LoRAs of loader nodes, read from the inputs of these nodes in a workflow: no LoRA and no model is loaded.

ComfyUI's own loaders (`nodes.py`), and those of rgthree-comfy (`py/power_lora_loader.py`, `py/lora_stack.py`), which
have no output for their LoRAs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Stacked: TypeAlias = tuple[str, float, float]
"""A LoRA as stacks have it: its name, its strength for the denoiser and for the text encoders."""

NodeInputs: TypeAlias = Mapping[str, Any]
"""Input of a node → its value, or [node, output] that it is connected to."""

MODEL: Final = "model"
"""The input by which loaders are chained."""


class Workflow(Protocol):
    """What runs, with the nodes that other nodes make while it runs."""

    def node(self, name: str) -> Mapping[str, Any] | None:
        """Return the `class_type` and the `inputs` of a node; None if there is no such node."""

    def gives_model(self, name: str, output: int) -> bool | None:
        """Return whether an output of a node is a model; None if it may be anything."""


class LoaderChain(NamedTuple):
    """The way through a workflow to a model."""

    loras: list[Stacked]
    """The LoRAs, in the order in which they are loaded."""
    others: list[str]
    """The other nodes on the way."""
    end: str
    """Why what comes before is not read; "" if nothing comes before."""


def loaded(workflow: Workflow, link: list[Any]) -> LoaderChain:
    """Return the way to an output of type MODEL, by its node and its number.

    ValueError if no LoRA is on it, or if one of their values comes from another node, which does not run here.
    """
    loras: list[Stacked] = []
    others: list[str] = []
    passed: set[str] = set()
    before, end = link, ""
    while before:
        place = str(before[0])
        node = workflow.node(place) if place not in passed else None
        if node is None:
            end = f"node {place} is not in the workflow"
            break
        name, inputs = node["class_type"], node["inputs"]
        passed.add(place)
        if name in LOADERS:
            loras = [*_typed(name, LOADERS[name](inputs)), *loras]
        else:
            others.append(name)
        before, end = _before(workflow, name, inputs)
    if not loras:
        why = f"; {end}" if end else ""
        raise ValueError(
            f"no LoRA is loaded on the way to this model ({', '.join(others)}{why}); connect the output of Load LoRA "
            "or of Power Lora Loader (rgthree)"
        )
    return LoaderChain(loras, others, end)


def _before(workflow: Workflow, name: str, inputs: NodeInputs) -> tuple[list[Any], str]:
    """Return the link of the model that a node passes through, [] if it takes none; and why it cannot be known."""
    links = {key: value for key, value in inputs.items() if isinstance(value, list)}  # a text is a file's name
    if MODEL in inputs:
        return links.get(MODEL, []), ""
    # Any name: the inputs that are models; without one, those that may be anything, as of a switch or a reroute.
    gives = {key: workflow.gives_model(str(link[0]), link[1]) for key, link in links.items()}
    models = [key for key, is_model in gives.items() if is_model]
    models = models or [key for key, is_model in gives.items() if is_model is None]
    if name in SWITCHES and (chosen := SWITCHES[name](inputs)) in models:
        models = [chosen]
    if len(models) > 1:
        return [], f"{name} takes several models ({', '.join(models)}), and what is before it is not read"
    return links[models[0]] if models else [], ""


def _typed(loader: str, entries: Iterator[tuple[Any, Any, Any]]) -> Iterator[Stacked]:
    """Yield the LoRAs that change something; ValueError for one whose values come from other nodes."""
    for name, denoiser, encoders in entries:
        if any(isinstance(value, list) for value in (name, denoiser, encoders)):
            raise ValueError(f"a value of {loader} comes from another node; type it into {loader} itself")
        if name and name != "None" and (denoiser or encoders):
            yield str(name), float(denoiser), float(encoders)


def _load_lora(inputs: NodeInputs) -> Iterator[tuple[Any, Any, Any]]:
    yield inputs["lora_name"], inputs["strength_model"], inputs.get("strength_clip", 0.0)


def _power_lora_loader(inputs: NodeInputs) -> Iterator[tuple[Any, Any, Any]]:
    for name, row in inputs.items():
        if name.lower().startswith("lora_") and isinstance(row, Mapping) and row.get("on"):
            strength, second = row["strength"], row.get("strengthTwo")
            encoders = strength if second is None else second
            yield row["lora"], strength, encoders if "clip" in inputs else 0.0  # without text encoders it loads none


def _lora_loader_stack(inputs: NodeInputs) -> Iterator[tuple[Any, Any, Any]]:
    for place in ("01", "02", "03", "04"):
        strength = inputs.get(f"strength_{place}", 0.0)
        yield inputs.get(f"lora_{place}"), strength, strength


LOADERS: Final[Mapping[str, Callable[[NodeInputs], Iterator[tuple[Any, Any, Any]]]]] = MappingProxyType(
    {
        "LoraLoader": _load_lora,
        "LoraLoaderModelOnly": _load_lora,
        "Power Lora Loader (rgthree)": _power_lora_loader,
        "Lora Loader Stack (rgthree)": _lora_loader_stack,
    }
)
"""Class of a loader node → the LoRAs of its inputs."""


def _by_truth(inputs: NodeInputs) -> str:
    switch = inputs.get("switch")
    return f"on_{str(switch).lower()}" if isinstance(switch, bool) else ""


def _first(inputs: NodeInputs) -> str:
    return min((name for name, value in inputs.items() if isinstance(value, list)), default="")


SWITCHES: Final[Mapping[str, Callable[[NodeInputs], str]]] = MappingProxyType(
    {"ComfySwitchNode": _by_truth, "ComfySoftSwitchNode": _by_truth, "Any Switch (rgthree)": _first}
)
"""Class of a node that passes one of several inputs through → which one; "" if that is known only when it runs."""
