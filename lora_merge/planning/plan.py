"""The plan of a merge: place and origin of every output byte. `make_plan.py` makes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm, prod
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from ..adapters.training_metadata import trigger_words
from ..disk.uploads import sink_of
from ..dtypes import Shape, StoredTensor, flat, spoken
from ..facts import Fact, line, rows_in_python
from ..files.checkpoint import Index, configuration
from ..files.encodings.base import Packing, plain
from ..files.file_uses import Folder
from ..job import Job, ResolvedJob
from ..matching.patch import Match, PatchPart
from ..models.fused_weights import together
from ..models.names import Names
from ..models.weights import Weight
from ..options import TOKENIZERS
from ..paths import input_name
from ..report import input_rows, output_rows
from ..text import Note, Shown, by_component, by_pattern
from .combination import ADDITION, Combination
from .quantisation import NO_QUANTISING, Quantising

CARD: Final = "README.md"
"""The name of the model card in a folder."""


class OutputTensor(NamedTuple):
    """One output tensor. `offset` counts from the start of its file; `uses` are the changes by adapters."""

    name: str
    stored: str  # its name in the file; in a pipeline `name` has the component in front
    dtype: str
    weight: Weight  # the weight before the changes
    offset: int
    nbytes: int
    uses: tuple[PatchPart, ...] = ()
    combination: Combination = ADDITION  # how its changes meet
    packed: Packing | None = None  # how its values are stored; None: plain

    @property
    def shape(self) -> Shape:
        """Its shape in the output."""
        return self.weight.shape

    @property
    def source(self) -> StoredTensor:
        """The stored tensor with the values before the changes."""
        return self.weight.stored

    @property
    def combines(self) -> bool:
        """Whether its changes become one change, which needs all of them as a whole."""
        return self.combination.method.combines

    @property
    def packing(self) -> Packing:
        """The form in which its values are stored in the output."""
        return self.packed or plain(self.dtype)

    @property
    def recoded(self) -> bool:
        """Whether its values are stored in another form than in the input."""
        return self.weight.packing.encoding is not self.packing.encoding

    @property
    def copied(self) -> bool:
        """Whether the output bytes equal the source's."""
        return not self.uses and not self.recoded

    @property
    def in_units(self) -> OutputTensor:
        """Return the same tensor of values in units of their common factor."""
        assert self.packed is not None, "it holds codes"
        return self._replace(
            weight=self.weight._replace(packed=self.weight.packing.in_units), packed=self.packed.in_units
        )

    @property
    def padding(self) -> int:
        """The bytes of stored rows behind those of the weight, which are copied."""
        if self.packed is None or self.recoded:
            return 0
        return max(0, self.nbytes - self.packed.encoding.nbytes(prod(self.shape)))

    @property
    def group(self) -> int:
        """The number of consecutive values that are decoded or encoded together."""
        if self.packed is None and self.weight.packed is None:
            return 1
        return lcm(self.weight.packing.encoding.group, self.packing.encoding.group)

    @property
    def row_group(self) -> int:
        """The number of rows that are decoded or encoded together; blocks end at such groups."""
        cols = max(self.matrix[1], 1)
        return lcm(self.group, cols) // cols

    @property
    def in_file(self) -> tuple[str, str, Shape]:
        """Name, dtype and shape of the tensor in its file."""
        codes = self.packed.codes if self.packed is not None else None
        return (self.stored, self.dtype, self.shape) if codes is None else (self.stored, codes.dtype, codes.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) as the uses see the tensor; without uses, axis 0 and the product of the others."""
        if self.uses:
            cols = self.uses[0].piece.cols
            return prod(self.shape) // max(cols, 1), cols
        return flat(self.shape)


@dataclass(frozen=True)
class OutputFile:
    """One output file. `name` is relative to the output folder, "" if the output is a single file."""

    name: str
    header: bytes  # planned: `final_headers` (header_entries.py) makes the final one, of the same length
    targets: tuple[OutputTensor, ...]
    entries: Mapping[str, str]  # metadata entries except our own: of the base's file, and of --title and --metadata
    alignment: int = 1  # every tensor begins at a multiple of it, and the file ends at one

    @cached_property
    def size(self) -> int:
        """Bytes of the finished file."""
        end = self.targets[-1].offset + self.targets[-1].nbytes if self.targets else len(self.header)
        return len(self.header) + -(-(end - len(self.header)) // self.alignment) * self.alignment


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """One merge, ready to run.

    Attributes:
        job: What was asked for, on this base.
        base: The tensors of the base.
        names: The names of its weights.
        adapters: For each adapter what it matches.
        files: The files that would be written, each with its tensors.
        weights: Name → the weight that formulas read.
        sides: Name in the output → file that is copied as it is.
        indexes: Name of every `*.index.json`.
        quantising: What the output's format does to the weights.
        folders: The files of every input folder: read, copied, or left out for a reason.
        replaces: Whether the output replaces something.

    Examples:
        >>> plan = lora_merge.plan("base.safetensors", ["style.safetensors", "detail.safetensors"])
        >>> plan.changed, plan.size
        (264, 2132696762)
    """

    job: ResolvedJob
    base: Index
    names: Names
    adapters: tuple[Match, ...]
    files: tuple[OutputFile, ...]
    weights: Mapping[str, Weight]
    sides: Mapping[str, Path] = field(default_factory=dict)
    indexes: tuple[str, ...] = ()
    quantising: Quantising = NO_QUANTISING
    folders: tuple[Folder, ...] = ()
    replaces: bool = False

    def with_notes(self, *notes: Note) -> Plan:
        """Return the same plan with further messages for the user.

        Parameters:
            notes: Sentences; without any the plan itself is returned.

        Returns:
            The plan; its base has the notes.
        """
        return replace(self, base=self.base.with_notes(*notes)) if notes else self

    def _heading(self) -> str:
        return f"Plan: {self.job.output.name}"

    def _facts(self) -> Iterator[Fact]:
        return rows_in_python(plan_rows(self))

    @property
    def architecture(self) -> str:
        """What the base is."""
        return self.names.title

    @property
    def size(self) -> int:
        """Bytes of all output files."""
        return sum(f.size for f in self.files)

    @property
    def targets(self) -> Sequence[OutputTensor]:
        """The tensors of all output files."""
        return [t for f in self.files for t in f.targets]

    @property
    def changed(self) -> int:
        """The number of output tensors that adapters change."""
        return len(self.changing)

    @property
    def changing(self) -> Sequence[OutputTensor]:
        """The output tensors that adapters change: by their formulas, or by a tensor that takes their place."""
        of_base = self.base.tensors
        new = {info.name for form in self.quantising.forms.values() for info in form.others}
        return [t for t in self.targets if t.uses or (t.source is not of_base.get(t.name) and t.name not in new)]

    @property
    def codes(self) -> Mapping[str, Any]:
        """Counts of the quantised weights: `formats` (format → weights), how many of these weights the merge encodes,
        the others being copied, and how many other matrices are plain values. Empty if nothing is quantised."""
        targets = self.targets
        coded = [t for t in targets if t.packed is not None and t.packed.encoding.quantised]
        if not coded:
            return {}
        weights = [t for t in targets if t.stored.endswith(".weight") or t.packed is not None]
        return {
            "formats": dict(Counter(t.packing.encoding.title for t in coded)),
            "encoded": len([t for t in coded if not t.copied]),
            "plain": len([t for t in weights if len(t.shape) == 2 and not t.packing.encoding.quantised]),
        }

    def resized(self, folder: str) -> dict[str, tuple[Shape, Shape]]:
        """Return tensor → (shape in the base, shape in the output) for the tensors of one folder that change shape.

        The shape in the base is () for a head that was tied to other weights there.

        Parameters:
            folder: A component's folder in the output; "" for a file.

        Returns:
            The shapes by the tensor's name in its file.
        """
        old, sizes = self.base.tensors, {}
        separated = {name for m in self.adapters for name in (*m.separated, m.untied)}
        files = [f for f in self.files if PurePosixPath(f.name).parent == PurePosixPath(folder)]
        for t in [t for f in files for t in f.targets]:
            before, shape = old.get(t.name), t.weight.shape
            if before is not None and before.shape is not shape and before.shape != shape:
                sizes[t.stored] = before.shape, shape
            if t.name in separated:
                sizes[t.stored] = (), t.shape
        return sizes

    @property
    def unpacked(self) -> bool:
        """Whether weights of the base that are quantised are plain values in the output."""
        return self.job.dtype != "keep" and bool(self.base.packed)

    @property
    def is_folder(self) -> bool:
        """Whether the output is a folder, as the base is one."""
        return self.base.path.is_dir()

    @property
    def contents(self) -> tuple[str, ...]:
        """Names of all files in an output folder."""
        card = [CARD] if self.has_card and CARD not in self.sides else []
        return (*(f.name for f in self.files), *self.indexes, *self.sides, *card)

    @property
    def has_card(self) -> bool:
        """Whether the output gets a model card: if it is requested, and by default with folders and repositories that
        name inputs."""
        sink = sink_of(self.job.output)
        whole = self.is_folder or (sink is not None and sink.card_of(self.job.output) is not None)
        return whole and not self.job.no_metadata if self.job.card is None else self.job.card

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Every input file with tensors: the base's first, then each adapter's."""
        return (*self.base.files, *self.adapter_files)

    @property
    def read(self) -> tuple[Path, ...]:
        """Every file that is read: the inputs, configurations of adapters, the name table. No output replaces one."""
        return (*self.inputs, *protected(self.job))

    @property
    def adapter_files(self) -> tuple[Path, ...]:
        """The files of each adapter that contain tensors."""
        return tuple(p for m in self.adapters for p in m.adapter.index.files)


def coverage(plan: Plan) -> Mapping[str, Any]:
    """Return, by each adapter's file name or path, how many modules have their place, and what is left out and why."""
    by_name: dict[str, Any] = {}
    for m in plan.adapters:
        path = m.adapter.path
        named = input_name(path)
        namesakes = {o.adapter.path for o in plan.adapters if input_name(o.adapter.path) == named}
        name = named if len(namesakes) == 1 else str(path)
        name = name if name not in by_name else f"{name} ({len(by_name) + 1})"
        by_name[name] = {
            "matched": m.modules, "total": m.total, "components": dict(m.components),
            "strengths": by_component(m.strengths),
            "patterns": {pattern: len(names) for pattern, names in by_pattern(m.matched).items()},
            "skipped": m.unmatched, "ignored": dict(m.adapter.ignored), "notes": [*m.adapter.notes, *m.notes],
            "trigger_words": [*trigger_words(m.adapter.index)],
        }  # fmt: skip
    return by_name


def plan_rows(plan: Plan, *, verbose: bool = False) -> Iterator[Fact]:
    """Yield what a plan does, in words; `verbose`: with patterns of names, files of folders and all tensors."""
    matches = coverage(plan)
    values = {
        "base": plan.job.base, "architecture": plan.architecture, "notes": plan.base.notes, "coverage": matches,
        "output": plan.job.output_name, "dtype": plan.job.dtype, "changed": plan.changed, "codes": plan.codes,
        "tensors": sum(len(file.targets) for file in plan.files), "method": plan.job.method,
    }  # fmt: skip
    formulas = {name: ", ".join(match.algorithms) for name, match in zip(matches, plan.adapters, strict=True)}
    yield from input_rows(values, formulas, verbose=verbose)
    yield from output_rows(values, plan.size)
    for folder in plan.folders if verbose else ():
        yield line("files", f"{folder.role} {folder.path}")
        yield from (Fact("", row) for row in folder.lines())
    for target in plan.targets if verbose else ():
        changed = " <- " + ", ".join(use.patch.module.name for use in target.uses) if target.uses else ""
        yield Fact("", f"{target.name} {spoken(target.dtype)} {list(target.shape)}{changed}")


def files(plan: Plan) -> list[dict[str, object]]:
    """Return for each input folder its files: read, copied, or left out and why."""
    return [folder.to_dict() for folder in plan.folders]


def sources(job: Job) -> tuple[Path, ...]:
    """Return all paths that a job reads: the base, and the paths of `protected`."""
    base = job.base.parent if job.base.suffix == ".json" else job.base  # the index of a folder
    return base, *protected(job)


def protected(job: Job) -> tuple[Path, ...]:
    """Return the paths that no output may replace: adapters, their configurations, the name table, the tokenizer."""
    adapters = [ref.path for ref in job.adapters]
    tokenizer = None if job.tokenizer in (None, *TOKENIZERS) else Path(job.tokenizer or "")
    paths = (*adapters, *map(configuration, adapters), job.map, tokenizer)
    return tuple(path for path in paths if path is not None)


def partners(targets: Iterable[OutputTensor]) -> dict[str, tuple[OutputTensor, ...]]:
    """Return name of a weight → the weights that servers join, such as q, k and v, itself included, if their format has
    one scale of the whole weight.

    vLLM and SGLang keep one scale for all of them, the largest, so different ones make wrong values there.
    https://github.com/vllm-project/vllm, model_executor/layers/quantization: compressed_tensors/schemes, modelopt.py.
    """
    by_name = {target.name: target for target in targets if target.packing.encoding.joint_scale}
    return {name: tuple(by_name[other] for other in group) for name, group in together(by_name).items()}
