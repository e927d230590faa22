"""Node types of ComfyUI's V3 API: schemas with inputs, growing and dynamic ones included."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class ComfyExtension:
    async def get_node_list(self) -> list[type]:
        raise NotImplementedError


class ComfyNode:
    hidden = SimpleNamespace(dynprompt=None, unique_id=None)

    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError


@dataclass
class Schema:
    node_id: str
    display_name: str = ""
    category: str = ""
    description: str = ""
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    is_output_node: bool = False


class NodeOutput:
    def __init__(self, *values: Any, ui: Any = None) -> None:
        self.values, self.ui = values, ui


class Output:
    def __init__(self, kind: str, id: str) -> None:
        self.kind, self.id = kind, id


class Input:
    """An input of a node; `check` says what is wrong with a value, "" if nothing is."""

    kind = ""

    def __init__(
        self, id: str, *, tooltip: str = "", default: Any = None, optional: bool = False, lazy: bool = False
    ) -> None:
        self.id, self.tooltip, self.default, self.optional, self.lazy = id, tooltip, default, optional, lazy

    def check(self, value: Any) -> str:
        return ""


class Number(Input):
    def __init__(self, id: str, *, min: float, max: float, step: float = 1, **more: Any) -> None:
        super().__init__(id, **more)
        self.min, self.max = min, max

    def check(self, value: Any) -> str:
        return "" if self.min <= value <= self.max else f"{self.id}: {value} is out of range"


class Choice(Input):
    def __init__(self, id: str, *, options: list[str], **more: Any) -> None:
        super().__init__(id, **more)
        self.options = options

    def check(self, value: Any) -> str:
        return "" if value in self.options else f"{self.id}: {value!r} is not in {self.options}"


class Growing(Input):
    def __init__(self, id: str, *, template: TemplatePrefix) -> None:
        super().__init__(id)
        self.template = template


class TemplatePrefix:
    def __init__(self, input: Input, prefix: str, min: int = 1, max: int = 10) -> None:
        assert 0 <= min <= max <= 100  # as ComfyUI has it
        self.input, self.prefix, self.min, self.max = input, prefix, min, max


class Option:
    def __init__(self, key: str, inputs: list[Input]) -> None:
        self.key, self.inputs = key, inputs


class Dynamic(Input):
    def __init__(self, id: str, *, options: list[Option], tooltip: str = "") -> None:
        super().__init__(id, tooltip=tooltip)
        self.options = options


def custom(kind: str) -> Any:
    return SimpleNamespace(
        Input=type("Typed", (Input,), {"kind": kind}), Output=lambda id: Output(kind, id)
    )  # fmt: skip


io = SimpleNamespace(
    ComfyNode=ComfyNode, Schema=Schema, NodeOutput=NodeOutput, Custom=custom,
    Boolean=SimpleNamespace(Input=Input), Int=SimpleNamespace(Input=Number), Float=SimpleNamespace(Input=Number),
    String=SimpleNamespace(Input=Input, Output=lambda id: Output("STRING", id)),
    Combo=SimpleNamespace(Input=Choice),
    Model=custom("MODEL"), Hidden=SimpleNamespace(dynprompt="DYNPROMPT", unique_id="UNIQUE_ID"),
    Autogrow=SimpleNamespace(Input=Growing, TemplatePrefix=TemplatePrefix),
    DynamicCombo=SimpleNamespace(Input=Dynamic, Option=Option),
)  # fmt: skip


class PreviewText:
    def __init__(self, value: str) -> None:
        self.value = value

    def as_dict(self) -> dict[str, Any]:
        return {"text": (self.value,)}


ui = SimpleNamespace(PreviewText=PreviewText)
