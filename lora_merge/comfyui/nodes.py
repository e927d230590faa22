"""The nodes: what each asks for, and the job or call of the public Python API that it becomes.

A node that writes a file is one job of a jobs file, so a queue that runs again finds its output complete and does
nothing. No model is loaded into ComfyUI's memory, and nothing is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from .. import FormerPlans, inspect, run_batch, unmerge, verify
from ..adapter_arguments import factors_by_part
from ..adapters_out.dialects import DIALECTS
from ..adapters_out.report import AdapterReport, adapter_rows
from ..batch.templates import literal
from ..facts import aligned
from ..merge_methods import COMBINATIONS, DIVISORS, ELECTIONS, METHODS, MergeMethod, MethodParameters
from ..options import OPTIONS
from ..paths import exists, with_found_ending
from ..report import Report, merge_rows
from . import host
from .host import CHECKPOINTS, LORAS, io
from .loaders import MODEL, loaded
from .picture import picture

NodeValues: TypeAlias = Mapping[str, Any]
"""Input → value, as ComfyUI passes them to a node."""


class Result(NamedTuple):
    """What a node gives to the next ones, and its report."""

    value: Any
    text: str
    blocks: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """Numbers of each block, for its picture."""


ADAPTERS: Final = io.Custom("LORA_MERGE_ADAPTERS")
"""A list of adapters as a jobs file has them, with `path`, `strength` and `strength_for`; those of a stack have the
strengths for the `denoiser` and for the `encoders` in place of them."""

STACK: Final = io.Custom("LORA_STACK")
"""The stack of the loader packs: a list of (name, strength of the denoiser, strength of the text encoders)."""

ENCODER: Final = "te"
"""A text encoder, and the beginning of the names of several."""

NONE: Final = "none"
"""The choice of no file."""

WORDS: Final = {"elect": ELECTIONS, "normalise": DIVISORS}
"""Parameters of methods that are words."""

WHOLE: Final = {"seed": 0, "agree": 1}
"""Parameters of methods that are whole numbers, and the smallest."""


@dataclass(frozen=True)
class Node:
    """One node: its name and title in ComfyUI, its inputs, and what it does with their values."""

    name: str
    title: str
    about: str
    inputs: Callable[[], Sequence[Any]]
    run: Callable[[NodeValues], Result]
    files: Callable[[NodeValues], Sequence[Path]]
    """The files that it reads."""
    output: Callable[[NodeValues], Path] | None = None
    """The file that it writes."""
    gives_adapters: bool = False
    reads_workflow: bool = False
    """Whether `run` gets the `workflow`, and the node's name in it as `self`."""
    aliases: tuple[str, ...] = ()
    """Words by which people search for it."""


# Inputs.


def _file(name: str, kinds: tuple[str, ...], tip: str = "", *, optional: bool = False) -> Any:
    return io.Combo.Input(name, options=[*([NONE] if optional else ()), *host.files(kinds)], tooltip=tip)


def _outputs(name: str) -> list[Any]:
    """Return the inputs of every node that writes a file."""
    return [
        io.String.Input("name", default=name, tooltip="Name of the file to write, such as merged or styles/ink."),
        io.Boolean.Input("overwrite", default=False, tooltip="Replace a file of this name that was made otherwise."),
    ]


def _growing(smallest: int) -> Any:
    """Return an input for as many adapters as people connect."""
    one = ADAPTERS.Input("adapters", tooltip="From “LoRA to merge” or “LoRA stack to merge”.")
    return io.Autogrow.Input("adapters", template=io.Autogrow.TemplatePrefix(one, "adapter", min=smallest, max=50))


def _method(methods: Mapping[str, MergeMethod]) -> Any:
    """Return the choice of a method, which shows the parameters of the chosen one."""
    options = [io.DynamicCombo.Option(name, [_parameter(n) for n in row.takes]) for name, row in methods.items()]
    return io.DynamicCombo.Input("method", options=options, tooltip=OPTIONS["method"].help)


def _parameter(name: str) -> Any:
    tip, default = OPTIONS[name].help, getattr(MethodParameters(), name)
    if name in WORDS:
        return io.Combo.Input(name, options=[*WORDS[name]], default=default, tooltip=tip)
    if name in WHOLE:
        return io.Int.Input(name, default=WHOLE[name], min=WHOLE[name], max=2**31 - 1, tooltip=tip)
    return io.Float.Input(name, default=0.5 if default is None else default, min=0.0, max=1.0, step=0.01, tooltip=tip)


def _rank(default: str) -> Any:
    return io.String.Input("rank", default=default, tooltip="32, same, exact, energy:0.99, fro:0.9, size:50MiB …")


# Values of inputs.


def _checkpoint(name: str) -> Callable[[NodeValues], Path]:
    return lambda values: host.path(values[name], CHECKPOINTS)


_base, _tuned, _merged = _checkpoint("base"), _checkpoint("tuned"), _checkpoint("merged")


def _lora(values: NodeValues) -> Path:
    return host.path(values["adapter"], LORAS)


def _known_base(values: NodeValues) -> list[Path]:
    """Return the base, if one is chosen."""
    return [] if values["base"] == NONE else [_base(values)]


def _connected(values: NodeValues, base: Path | None) -> list[dict[str, Any]]:
    """Return the adapters of all inputs, in order. `base`: the checkpoint that they change, if it is known."""
    former = FormerPlans()
    connected = (adapter for adapters in values.get("adapters", {}).values() for adapter in adapters or ())
    return [_of_stack(a, base, former) if "encoders" in a else a for a in connected]


def _of_stack(adapter: Mapping[str, Any], base: Path | None, former: FormerPlans) -> dict[str, Any]:
    """Return an adapter of a stack with factors for the parts that it has: a loader ignores the strength of others."""
    path, denoiser, encoders = Path(adapter["path"]), adapter["denoiser"], adapter["encoders"]
    strength = denoiser or encoders  # the factors multiply it
    by_part: dict[str, float] = {}
    if encoders != denoiser:
        facts = inspect(path, hashes=None) if base is None else inspect(base, path, hashes=None, former=former)
        parts = facts["parts"] if base is None else facts["match"].get("components") or ()
        for part in parts:
            by_part[part] = (encoders if part.startswith(ENCODER) else denoiser) / strength
    return {"path": str(path), "strength": strength, "strength_for": {part: s for part, s in by_part.items() if s != 1}}


def _next_to(name: str) -> Callable[[NodeValues], Path]:
    """Return the function for an output in the model folder of a checkpoint."""
    return lambda values: host.location(values["name"], values[name].split("/", 1)[0])


def _in_loras(values: NodeValues) -> Path:
    return host.location(values["name"], LORAS[0])


def _searched() -> list[str]:
    """Return the folders in which the inputs of a recipe are searched."""
    return host.folders((*LORAS, *CHECKPOINTS))


# Jobs.


def _job(
    output: Callable[[NodeValues], Path], fields: Callable[[NodeValues], NodeValues]
) -> Callable[[NodeValues], Result]:
    """Return the function that runs a node as one job of a jobs file. `fields`: all of the job but its output."""

    def run(values: NodeValues) -> Result:
        job = literal({**fields(values), "output": str(output(values))})
        with host.RunProgress() as progress:
            (report,) = run_batch([job], overwrite=values["overwrite"], progress=progress)
        if report.error is not None:
            raise report.error
        if report.report is None:
            return Result(report.output, f"{report.output} is there already, by the same recipe")
        return _reported(report.report)

    return run


def _reported(report: Report | AdapterReport) -> Result:
    """Return the path of an output, with its report."""
    rows = merge_rows(vars(report)) if isinstance(report, Report) else adapter_rows(vars(report))
    return Result(report.output, "\n".join(aligned(rows)), report.numbers.get("blocks", {}))


def _with_base(values: NodeValues) -> dict[str, str]:
    return {"base": str(_base(values))} if _known_base(values) else {}


_bake = _job(_next_to("base"), lambda v: {
    "base": str(_base(v)), "adapters": _connected(v, _base(v)), "dtype": v["dtype"], "unmatched": v["unmatched"],
    **v["method"],
})  # fmt: skip
_combine = _job(_in_loras, lambda v: {
    "command": "combine", "adapters": _connected(v, next(iter(_known_base(v)), None)), "rank": v["rank"],
    **v["method"], **_with_base(v),
})  # fmt: skip
_resize = _job(_in_loras, lambda v: {
    "command": "resize", "adapters": [str(_lora(v))], "rank": v["rank"], **_with_base(v),
})  # fmt: skip
_convert = _job(_in_loras, lambda v: {
    "command": "convert", "adapters": [str(_lora(v))], "to": v["to"], **_with_base(v),
})  # fmt: skip
_extract = _job(_in_loras, lambda v: {
    "command": "extract", "base": str(_base(v)), "adapters": [str(_tuned(v))], "rank": v["rank"],
})  # fmt: skip
_unmerge = _job(_next_to("merged"), lambda v: {
    "command": "unmerge", "base": str(_merged(v)), "adapters": _connected(v, _merged(v)),
})  # fmt: skip


# Other calls.


def _take_out(values: NodeValues) -> Result:
    """Take the connected adapters out; without any, those of the recipe."""
    if any(values.get("adapters", {}).values()):
        return _unmerge(values)
    with host.RunProgress() as progress:
        report = unmerge(
            _merged(values), (), str(_next_to("merged")(values)), search=_searched(), overwrite=values["overwrite"],
            progress=progress,
        )  # fmt: skip
    return _reported(report)


def _inspect(values: NodeValues) -> Result:
    base, lora = _known_base(values), _lora(values)
    return Result(str(lora), (inspect(base[0], lora) if base else inspect(lora)).text)


def _verify(values: NodeValues) -> Result:
    merged = _merged(values)
    with host.RunProgress() as progress:
        facts = verify(merged, search=_searched(), full=values["every_value"], progress=progress)
    return Result(str(merged), facts.text)


def _adapter(values: NodeValues) -> Result:
    """Return one adapter with its strengths."""
    factors: dict[str, Any] = {} if values["text_encoders"] == 1 else {"te": values["text_encoders"]}
    factors |= factors_by_part(values["parts"])
    entry = {"path": str(_lora(values)), "strength": values["strength"], "strength_for": factors}
    return Result([entry], f"{values['adapter']}: {values['strength']:g} {factors or ''}")


def _stack(values: NodeValues) -> Result:
    """Return the adapters of a stack, and of the loaders on the way to a model."""
    stack, remarks = [*(values.get("stack") or ())], list[str]()
    workflow = values["workflow"]
    inputs = (workflow.node(values["self"]) or {}).get("inputs", {})
    if isinstance(link := inputs.get(MODEL), list):
        loras, others, end = loaded(workflow, link)
        stack += loras
        remarks += [f"on the way, without LoRAs: {', '.join(others)}"] if others else []
        remarks += [f"the way ends: {end}"] if end else []
    if not stack:
        raise ValueError("nothing is connected; connect a LORA_STACK, or the model after LoRA loaders")
    adapters = [
        {"path": str(host.path(name, LORAS)), "denoiser": denoiser, "encoders": encoders}
        for name, denoiser, encoders in stack if denoiser or encoders
    ]  # fmt: skip
    lines = [f"{a['path']}: {a['denoiser']:g}, text encoders {a['encoders']:g}" for a in adapters]
    return Result(adapters, "\n".join([*lines, *remarks]))


NODES: Final = (
    Node("LoRA", "LoRA to merge", "A LoRA or another adapter, with its strengths.", lambda: [
        _file("adapter", LORAS),
        io.Float.Input("strength", default=1.0, min=-20.0, max=20.0, step=0.05),
        io.Float.Input("text_encoders", default=1.0, min=-20.0, max=20.0, step=0.05,
                       tooltip="Multiplies the strength for text encoders."),
        io.String.Input("parts", default="", tooltip="Factors by part or block: unet=0.5, IN04-IN08=0, lbw=MIDD"),
    ], _adapter, lambda v: [_lora(v)], gives_adapters=True, aliases=("adapter", "lycoris", "lora strength")),
    Node("Stack", "LoRA stack to merge", "The LoRAs of a stack, as the loader packs have it.", lambda: [
        STACK.Input("stack", optional=True),
        io.Model.Input(MODEL, optional=True, lazy=True, tooltip="The model behind Load LoRA or Power Lora Loader "
                       "(rgthree): their LoRAs are read from the workflow, and nothing is loaded."),
    ], _stack, lambda _: host.paths(LORAS), gives_adapters=True, reads_workflow=True,
         aliases=("lora stack", "rgthree", "power lora loader")),
    Node("Bake", "Bake LoRAs into a checkpoint file", "Writes a checkpoint with the LoRAs merged, and verifies it.",
         lambda: [
        _file("base", CHECKPOINTS), _growing(1), _method(METHODS),
        io.Combo.Input("dtype", options=[*OPTIONS["dtype"].words], default="keep", tooltip=OPTIONS["dtype"].help),
        io.Combo.Input("unmatched", options=[*OPTIONS["unmatched"].words], default=OPTIONS["unmatched"].words[0],
                       tooltip=OPTIONS["unmatched"].help),
        *_outputs("merged"),
    ], _bake, lambda v: [_base(v)], _next_to("base"), aliases=("merge lora", "save checkpoint", "fuse lora")),
    Node("Combine", "Combine LoRAs into one", "Writes one LoRA that makes the changes of several.", lambda: [
        _growing(1), _method(COMBINATIONS), _rank("exact"), _file("base", CHECKPOINTS, optional=True),
        *_outputs("combined"),
    ], _combine, _known_base, _in_loras, aliases=("merge loras", "lora merger", "ties", "dare")),
    Node("Resize", "Resize a LoRA", "Writes a LoRA at another rank.", lambda: [
        _file("adapter", LORAS), _rank("32"), _file("base", CHECKPOINTS, optional=True), *_outputs("resized"),
    ], _resize, lambda v: [_lora(v), *_known_base(v)], _in_loras, aliases=("lora rank", "shrink lora")),
    Node("Convert", "Convert a LoRA", "Writes a LoRA with the names of another program.", lambda: [
        _file("adapter", LORAS), io.Combo.Input("to", options=[*DIALECTS], default="comfy"),
        _file("base", CHECKPOINTS, optional=True), *_outputs("converted"),
    ], _convert, lambda v: [_lora(v), *_known_base(v)], _in_loras, aliases=("kohya", "diffusers", "lora format")),
    Node("Extract", "Extract a LoRA from two checkpoints", "Writes the difference of two checkpoints as a LoRA.",
         lambda: [
        _file("base", CHECKPOINTS, "Before the training."), _file("tuned", CHECKPOINTS, "After the training."),
        _rank("32"), *_outputs("extracted"),
    ], _extract, lambda v: [_base(v), _tuned(v)], _in_loras, aliases=("lora extract", "difference")),
    Node("Inspect", "Inspect a LoRA against a base", "Shows what a LoRA is, and if it fits a base.", lambda: [
        _file("adapter", LORAS), _file("base", CHECKPOINTS, optional=True),
    ], _inspect, lambda v: [_lora(v), *_known_base(v)], aliases=("lora info", "trigger words")),
    Node("Verify", "Verify a merged file", "Recomputes a merged file from its recipe and its inputs.", lambda: [
        _file("merged", CHECKPOINTS),
        io.Boolean.Input("every_value", default=False, tooltip="Compare every value, not a sample."),
    ], _verify, lambda v: [_merged(v)], aliases=("check", "proof")),
    Node("TakeOut", "Take LoRAs out again", "Writes a merged checkpoint without its LoRAs.", lambda: [
        _file("merged", CHECKPOINTS), _growing(0), *_outputs("without"),
    ], _take_out, lambda v: [_merged(v)], _next_to("merged"), aliases=("unmerge", "subtract lora")),
)  # fmt: skip
"""All nodes of the pack."""


# ComfyUI's classes.


def _schema(node: Node) -> Any:
    first = ADAPTERS.Output("adapters") if node.gives_adapters else io.String.Output("path")
    return io.Schema(
        node_id=f"LoraMerge{node.name}", display_name=node.title, category="lora-merge", description=node.about,
        inputs=[*node.inputs()], outputs=[first, io.String.Output("report")],
        hidden=[io.Hidden.dynprompt, io.Hidden.unique_id] if node.reads_workflow else [],
        is_output_node=not node.gives_adapters, **host.search_words(node.aliases),
    )  # fmt: skip


def _fingerprint(node: Node, values: NodeValues) -> Any:
    """Return a value that changes if the node has to run again: with the files that it reads; always if its output is
    missing."""
    if node.output is not None and not exists(with_found_ending(str(node.output(values)))):
        return float("nan")
    return str([(str(path), *_state(path)) for path in node.files(values)])


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does; nothing for a link that leads nowhere, which ComfyUI lists too."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


def _class(node: Node) -> Any:
    """Return ComfyUI's class of a node."""

    def execute(cls: Any, /, **values: Any) -> Any:
        if node.reads_workflow:
            values |= {"workflow": host.ComfyWorkflow(cls.hidden.dynprompt), "self": str(cls.hidden.unique_id)}
        result = node.run(values)
        drawn = node.reads_workflow or not node.gives_adapters
        shown = host.preview(result.text, partial(picture, result.text, result.blocks) if drawn else None)
        return io.NodeOutput(result.value, result.text, ui=shown)

    return type(f"LoraMerge{node.name}", (io.ComfyNode,), {
        "__doc__": node.about,
        "define_schema": classmethod(lambda _: _schema(node)),
        "execute": classmethod(execute),
        "check_lazy_status": classmethod(lambda _, **__: []),  # a model is connected, and never loaded
        "fingerprint_inputs": classmethod(lambda _, **values: _fingerprint(node, values)),
    })  # fmt: skip


class Pack(host.ComfyExtension):  # type: ignore[misc]  # ComfyUI is not installed where types are checked
    """The pack, as ComfyUI loads it."""

    async def get_node_list(self) -> list[Any]:
        """Return the classes of the nodes."""
        return [_class(node) for node in NODES]


async def comfy_entrypoint() -> Pack:
    """Return the pack: the function that ComfyUI calls when it loads a custom node."""
    return Pack()
