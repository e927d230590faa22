"""What other programs read in place of options: configurations, nodes of ComfyUI, Python. Each becomes options of them.

Configurations are those of Axolotl and LLaMA-Factory, and of mergekit if they name adapters; calls in Python are those
of diffusers and PEFT.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from ..adapter_arguments import right_form
from ..errors import MergeError, UsageError
from ..paths import ENDINGS, exists, expand, is_file
from ..text import from_json
from .corrected_line import is_adapter
from .foreign_names import Role, meaning_of
from .typed_file import looks_like_path, names_file
from .typed_line import OWN_STRENGTHS

NAME_THE_FILES: Final = "name the files: `lora-merge BASE ADAPTER`"
OF_PYTHON: Final = "this is Python"
OF_NODES: Final = "these are inputs of another program"
OF_CONFIGURATION: Final = "this is a configuration of another program"
OF_FILES: Final = frozenset({Role.BASE, Role.ADAPTERS, Role.MODEL, Role.TUNED, "-o {}"})
"""The roles of options whose values name files."""
PYTHON: Final = re.compile(r"(?:\w+ *= *)?[A-Za-z_][\w.]*\(|(?:from|import) \w")
"""How a line of Python begins."""
WIDGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "CheckpointLoaderSimple": ("ckpt_name",), "UNETLoader": ("unet_name",), "UnetLoaderGGUF": ("unet_name",),
    "LoraLoader": ("lora_name", "strength_model", "strength_clip"),
    "LoraLoaderModelOnly": ("lora_name", "strength_model"),
    "CheckpointSave": ("filename_prefix",), "ModelSave": ("filename_prefix",),
}  # fmt: skip
"""Type of a node of ComfyUI → the names of its widgets, in order (ComfyUI's nodes.py, city96's ComfyUI-GGUF)."""
OFF: Final = (2, 4)
"""The modes of a node that does nothing: muted, bypassed (ComfyUI's frontend)."""


class OptionLine(NamedTuple):
    """A line with such inputs as options."""

    words: list[str]
    typed: list[str]
    """The words that were inputs."""
    what: str
    """What they are."""


def with_options(args: Sequence[str]) -> OptionLine:
    """Return a line with the inputs in it as options. UsageError for a configuration of a program that does not merge
    adapters."""
    configurations = [word for word in args if word.endswith((".yaml", ".yml")) and exists(word)]
    stated = {_role(arg) for arg in args if configurations and arg.startswith("-")}
    words, typed, what, of_option = list[str](), list[str](), "", False
    script = [word for word in args if _is_python(word)]
    for word in _with_whole_inputs(word for word in args if word not in script):
        options, kind = [*_of_configuration(word, stated)] if word in configurations else [], OF_CONFIGURATION
        if not (options or of_option or word.startswith("-")):
            options, kind = _of_word(word)
        words += options or [word]
        if options:
            typed, what = [*typed, word], kind
        of_option = word.startswith("-") and "=" not in word
    if script:
        words, typed, what = [*words, *of_python("\n".join(script))], [*typed, *script], OF_PYTHON
    return OptionLine(words, typed, what)


def _is_python(word: str) -> bool:
    is_file = word.endswith(ENDINGS) or word.partition("(")[0].endswith(ENDINGS) or exists(word)
    return PYTHON.match(word) is not None and not is_file


def _with_whole_inputs(args: Iterable[str]) -> list[str]:
    """Return a line with `lora_name: style` as one word, `lora_name=style`."""
    words = list[str]()
    for word in args:
        if words and re.fullmatch("[a-z]+(?:_[a-z]+)+:", words[-1]) and _is_input(words[-1][:-1]):
            words[-1] = f"{words[-1][:-1]}={word}"
        else:
            words.append(word)
    return words


def _of_word(word: str) -> tuple[list[str], str]:
    """Return the options that a word means, and what it is; no options and "" for a word of ours."""
    name, equals, value = word.partition("=")
    if exists(word):
        return [f"--{name}={value}" for name, value in _of_workflow(word)], OF_NODES
    if equals and re.fullmatch("[a-z]+(?:_[a-z0-9]+)+", name) and _is_input(name):
        return [f"--{name}={value}"], OF_NODES
    if word.lstrip().startswith("{"):
        with suppress(ValueError):
            return [f"--{name}={value}" for name, value in _of_nodes(from_json(word))], OF_NODES
    return [], ""


def _is_input(name: str) -> bool:
    """Return whether a name is that of an input of a node that matters for a merge."""
    meaning = meaning_of(f"--{name}")
    return f"--{name}" in OWN_STRENGTHS or (meaning is not None and Role.LEFT_OUT not in meaning.forms)


def _of_workflow(path: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the inputs in a workflow of ComfyUI, as it saves or exports one; nothing for others."""
    if not path.endswith(".json") or not is_file(expand(path)):
        return
    from ..files.file_signatures import LONGEST_BEGINNING
    from ..files.yaml_source import read_text

    with suppress(ValueError, OSError, MergeError):  # the command itself reports it
        text = read_text(expand(path), LONGEST_BEGINNING)
        if "class_type" in text or "widgets_values" in text:
            yield from _of_nodes(from_json(text))


def _of_nodes(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of the inputs of nodes, whatever the level; of nodes that are off nothing."""
    if isinstance(value, list):
        for item in value:
            yield from _of_nodes(item)
    elif not isinstance(value, dict):
        if name and _is_input(name):
            yield name, value
    elif value.get("on", True) and value.get("mode") not in OFF:
        kind = str(value.get("class_type", value.get("type", "")))
        widgets = value.get("widgets_values", ())
        if kind in WIDGETS and isinstance(widgets, list):
            yield from zip(WIDGETS[kind], widgets, strict=False)
        elif not re.search("Image|Sampler|Encode", kind):
            for key, item in value.items():
                yield from _of_nodes(item, str(key))
        if kind == "LoraLoaderModelOnly":
            yield "strength_clip", 0


class _Calls:
    """What calls in Python load, scale and save."""

    def __init__(self) -> None:
        self.files = dict[str, float | None]()
        """File → its strength; None for a base, or if none is stated."""
        self.names = dict[str, str]()
        """Name of an adapter in the calls → its file."""
        self.adapters: list[str] = []
        self.options: list[str] = []
        self.scale = 1.0

    def take(self, name: str, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Take one call."""
        texts = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        numbers = [item for item in texts if isinstance(item, int | float) and not isinstance(item, bool)]
        texts = [item for item in texts if isinstance(item, str) and item]
        if name in ("set_adapters", "set_adapter", "add_weighted_adapter"):
            stated = keywords.pop("adapters", keywords.pop("adapter_names", texts))
            weights = keywords.pop("adapter_weights", keywords.pop("weights", numbers))
            weights = weights if isinstance(weights, list | tuple) else [weights]
            chosen = [self.names.get(text, text) for text in stated]
            chosen = [file for file in chosen if file in self.files or names_file(file)]
            for unused in {*self.adapters} - {*chosen}:
                del self.files[unused]
            self.files |= dict(
                zip(chosen, [*weights, *weights[-1:] * len(chosen)] or [None] * len(chosen), strict=False)
            )
            self.adapters = chosen
        elif name.startswith("save"):
            self.options += [f"--save-to={text}" for text in texts[:1]]
        elif name.startswith(("load_lora", "load_adapter", "from_")):
            of_adapter, inner = name.startswith("load"), keywords.pop("weight_name", "")
            alias = keywords.pop("adapter_name", texts[1] if of_adapter and texts[1:] else "")
            files = [str(PurePosixPath(text, inner)) for text in texts[: 1 if of_adapter else None]]
            self.files |= dict.fromkeys(files)
            self.adapters += files * of_adapter
            self.names |= dict.fromkeys([alias], files[0]) if alias and files else {}
        else:
            self.files |= dict.fromkeys(text for text in texts if names_file(text) or text.endswith(ENDINGS))
            self.scale *= float(right_form(f"{keywords.pop('lora_scale', 1)}") or 1)
            self.options += [f"--weights={','.join(map(str, numbers))}"] * bool(numbers)
        values = {key: value for key, value in keywords.items() if value is not None}
        self.options += [
            f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
        ]

    @property
    def words(self) -> list[str]:
        """The files and options of a line."""
        words = list[str]()
        for file, strength in self.files.items():
            of_adapter = strength is not None or (file in self.adapters and self.scale != 1)
            words.append(f"{file}:{(1 if strength is None else strength) * self.scale:g}" if of_adapter else file)
        return [*words, *self.options]


def of_python(text: str) -> list[str]:
    """Return calls in Python as words: strings that name files, with strengths, and keywords as options."""
    calls = _Calls()
    with suppress(SyntaxError, ValueError):  # a placeholder, or a line that is cut
        nodes = [node for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Call)]
        for call in sorted(nodes, key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            calls.take(name, [*map(_value, call.args)], {k.arg: _value(k.value) for k in call.keywords if k.arg})
    return calls.words


def _value(node: ast.expr) -> Any:
    """Return the value of an expression; of `torch.float16` its last word; None if it is not stated."""
    if isinstance(node, ast.Attribute):
        return node.attr
    with suppress(ValueError):
        return ast.literal_eval(node)
    return None


def _of_configuration(path: str, stated: set[str]) -> Iterator[str]:
    """Yield the files, the output and the device of a configuration as options, but those of which the line has one;
    nothing for another file. UsageError for one of a program that does not merge adapters."""
    from ..files.file_signatures import LONGEST_BEGINNING, is_mergekit, of_mergekit, top_fields
    from ..files.yaml_source import parse, read_text

    try:
        names, text = top_fields(expand(path)), read_text(expand(path), LONGEST_BEGINNING)
        ours = {"jobs", "base", "adapters"} & names
        of_files = is_mergekit(names) or any(_role(f"--{name}") for name in names)
        fields = parse(text, path).value if of_files and not ours else {}
    except (OSError, MergeError):  # the command itself reports it
        return
    if {"job", "config"} <= names:
        raise UsageError("this is a configuration of AI-Toolkit, which merges into no model", path, NAME_THE_FILES)
    if not isinstance(fields, dict):
        return
    if is_mergekit({*fields}):
        if not (words := [*_of_mergekit(fields)]):
            raise of_mergekit(path)
        yield from words
        return
    roles = {name: _role(f"--{name}") for name, value in fields.items() if isinstance(value, str)}
    roles = {name: role for name, role in roles.items() if role in OF_FILES - stated}
    outputs = [name for name, role in roles.items() if role == "-o {}"]
    paths = [n for n in roles if n not in (*outputs, "adapter") and looks_like_path(fields[n])]  # adapter: a kind
    yield from (f"--{name}={fields[name]}" for name in paths)
    for name in [name for name in outputs if name.startswith("export")] or outputs:
        output, of_training = fields[name].rstrip("/"), name == "output_dir"  # of Axolotl
        yield f"--output_dir={output}{'/merged' * of_training}"
        no_adapter = Role.ADAPTERS not in {*(roles[path] for path in paths), *stated}
        if of_training and no_adapter and exists(output) and is_adapter(output):
            yield f"--lora={output}"
    yield from (f"--{name}={fields[name]}" for name in ("export_device",) if name in fields)


def _role(option: str) -> str:
    """Return the role of an option of another program for a merge; "" for none."""
    forms = meaning.forms if (meaning := meaning_of(option)) else ()
    return next((form for form in forms if form in OF_FILES), "")


def _of_mergekit(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that a configuration of mergekit means if its models are one base with adapters,
    `model+adapter`; nothing for others."""
    models = [model for model in fields.get("models") or () if isinstance(model, dict)]
    pairs = [(str(model.get("model")).partition("+"), model.get("parameters") or {}) for model in models]
    bases = {str(fields.get("base_model", "")).partition("+")[0], *(base for (base, _, _), _ in pairs)} - {""}
    adapters = [(adapter, parameters) for (_, _, adapter), parameters in pairs if adapter]
    if len(bases) != 1 or not adapters or not all(isinstance(parameters, dict) for _, parameters in adapters):
        return
    yield f"--base={bases.pop()}"
    for adapter, parameters in adapters:
        yield f"{adapter}{':' * ('weight' in parameters)}{parameters.get('weight', '')}"
    yield from (f"--{name}={fields[name]}" for name in ("merge_method", "dtype") if name in fields)
