"""Runs workflows of ComfyUI (its API format) on the host of `comfy_host`, with ComfyUI's cache and its nested inputs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOST = Path(__file__).parent / "comfy_host"
MODULES = ("comfy", "comfy_api", "folder_paths", "nodes", "lora_merge.comfyui.host", "lora_merge.comfyui.nodes")
KINDS = ("checkpoints", "diffusion_models", "text_encoders", "loras")

Workflow = Mapping[str, Mapping[str, Any]]
"""Node → its class and its inputs; a list [node, number] is the output of another node."""


class Host:
    """ComfyUI's queue: runs the nodes of a workflow in order, and none whose inputs and files are as before."""

    def __init__(self, models: Path, extension: Any) -> None:
        self.models = models
        self.nodes = {node.define_schema().node_id: node for node in asyncio.run(extension.get_node_list())}
        self.runs: list[str] = []  # nodes that have run, of the last workflow
        self._cache: dict[str, tuple[str, Any]] = {}

    def post(self, workflow: Workflow, expanded: Workflow | None = None) -> dict[str, Any]:
        """The output of each node of a workflow. `expanded`: nodes that other nodes create while it runs."""
        outputs: dict[str, Any] = {}
        self.runs = []
        for name, entry in {**workflow, **(expanded or {})}.items():
            if entry["class_type"] not in self.nodes:  # only lazy inputs lead to it, which do not make it run
                continue
            node = self.nodes[entry["class_type"]]
            lazy = {item.id for item in node.define_schema().inputs if getattr(item, "lazy", False)}
            assert not lazy or node.check_lazy_status(**dict.fromkeys(lazy)) == []
            inputs = {key: value for key, value in entry["inputs"].items() if key not in lazy}
            ancestors = [entry["inputs"][key] for key in lazy if key in entry["inputs"]]
            node.hidden = SimpleNamespace(dynprompt=DynamicPrompt(workflow, expanded or {}), unique_id=name)
            constants = {key: value for key, value in inputs.items() if not isinstance(value, list)}
            print_of = node.fingerprint_inputs(**nested(node, constants))
            key = f"{entry['class_type']} {inputs} {print_of} {ancestors and workflow} {[outputs[v[0]].values for v in inputs.values() if isinstance(v, list)]}"
            if self._cache.get(name, ("",))[0] != key or print_of != print_of:
                values = {k: outputs[v[0]].values[v[1]] if isinstance(v, list) else v for k, v in inputs.items()}
                self._cache[name] = key, node.execute(**nested(node, values, check=True))
                self.runs.append(name)
            outputs[name] = self._cache[name][1]
        return outputs


class DynamicPrompt:
    """What ComfyUI passes to nodes that ask for DYNPROMPT."""

    def __init__(self, workflow: Workflow, expanded: Workflow) -> None:
        self._nodes = {**workflow, **expanded}

    def has_node(self, name: str) -> bool:
        return name in self._nodes

    def get_node(self, name: str) -> Mapping[str, Any]:
        return self._nodes[name]


def nested(node: Any, values: Mapping[str, Any], *, check: bool = False) -> dict[str, Any]:
    """The values of a node's inputs, those of growing and dynamic ones in tables: `method.density` of `method`."""
    known: dict[str, Any] = {}
    for item in node.define_schema().inputs:
        if hasattr(item, "template"):
            names = [f"{item.template.prefix}{n}" for n in range(item.template.max)]
            known |= {f"{item.id}.{name}": (item.id, name, item.template.input) for name in names}
        elif hasattr(item, "options") and item.options and hasattr(item.options[0], "key"):
            known[item.id] = item.id, item.id, item
            chosen = next(option for option in item.options if option.key == values.get(item.id, item.options[0].key))
            known |= {f"{item.id}.{inner.id}": (item.id, inner.id, inner) for inner in chosen.inputs}
        else:
            known[item.id] = "", item.id, item
    assert set(values) <= set(known), set(values) - set(known)
    result: dict[str, Any] = {}
    for key, value in values.items():
        table, name, item = known[key]
        if check and (wrong := item.check(value)):
            raise ValueError(wrong)
        (result.setdefault(table, {}) if table else result)[name] = value
    return result


@contextmanager
def comfyui(folder: Path) -> Iterator[Host]:
    """A host with empty model folders, and the pack loaded."""
    forget()
    sys.path.insert(0, str(HOST))
    try:
        import folder_paths  # of the host

        for kind in KINDS:
            (folder / kind).mkdir(parents=True, exist_ok=True)
            folder_paths.roots[kind] = [str(folder / kind)]
        folder_paths.temp[:] = [str(folder / "temp")]
        from lora_merge.comfyui.nodes import Pack

        yield Host(folder, Pack())
    finally:
        sys.path.remove(str(HOST))
        forget()


def forget() -> None:
    """Unload the host and the modules that import it."""
    for name in [m for m in sys.modules if m in MODULES or m.startswith(("comfy.", "comfy_api."))]:
        del sys.modules[name]
    package = sys.modules.get("lora_merge.comfyui")
    for name in ("host", "nodes"):
        if package is not None and hasattr(package, name):
            delattr(package, name)


def lora(name: str, strength: float = 1.0, text_encoders: float = 1.0, parts: str = "") -> dict[str, Any]:
    """A node “LoRA to merge”."""
    return node("LoRA", adapter=name, strength=strength, text_encoders=text_encoders, parts=parts)


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node of the pack; `__` in the names of inputs is a point."""
    return {"class_type": f"LoraMerge{kind}", "inputs": {key.replace("__", "."): v for key, v in inputs.items()}}
