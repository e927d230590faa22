"""The container of an output: .safetensors, a GGUF file made of one, or a new GGUF file. It is chosen once a merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from ..adapters.modules import AdapterFile, group
from ..dtypes import DTYPES, FLOATS, GGUF_TYPES, QUANTISED_DTYPES, StoredTensor, spoken
from ..errors import FitError, InputError, UsageError
from ..files.checkpoint import Index
from ..files.encodings.base import Packing
from ..files.formats.base import NewWeight
from ..files.formats.output import FILE_FORMATS
from ..files.gguf.adapter import adapter_tensors, family_of, is_adapter
from ..files.gguf.container import DEFAULT_ALIGNMENT
from ..files.gguf.diffusion import (
    DIFFUSION_MODELS,
    DiffusionFile,
    diffusion_file,
    empty_header,
    missing_signs,
    plain_type,
)
from ..files.gguf.layout import gguf_layout, new_layout
from ..files.gguf.names import ARCHITECTURE, FAMILIES
from ..files.gguf.types import GGML_TYPES
from ..files.gguf.view import as_plain
from ..files.safetensors import layout
from ..job import Job
from ..models.weights import Weight
from ..options import nearest_in_bits
from ..paths import nearest, typed
from ..text import Note, quoted
from .plan import OutputTensor

GGUF: Final = ".gguf"
GGUF_DTYPES: Final = ("keep", "fp32", "fp16", "bf16", *GGUF_TYPES)
SIMPLE_TYPES: Final = ("q8_0", "q4_0")
"""Types of GGUF that are proposed for a quantised dtype of other files: they have blocks of 32 values."""


@dataclass(frozen=True)
class OutputContainer(ABC):
    """The container of the output of one job on its base: which tensors it holds, in which form, and its header."""

    job: Job
    base: Index
    suffix: ClassVar[str]

    @property
    def output(self) -> Path:
        """The path of the output. A name by default has the suffix of the base, since it is made before any file is
        read; here it gets that of the container."""
        output = self.job.output
        default = output.stem == "+".join([self.job.base.stem, *(a.path.stem for a in self.job.adapters)])
        return output.with_suffix(self.suffix) if default and not self.fits(output) else output

    def fits(self, output: Path) -> bool:
        """Return whether an output may have this name."""
        return self.base.path.is_dir() or self.is_gguf == (output.suffix.lower() == GGUF)

    @property
    def is_gguf(self) -> bool:
        """Whether it is GGUF."""
        return self.suffix == GGUF

    def holds(self, info: StoredTensor, *, changed: bool) -> bool:
        """Return whether a tensor of the base has a place in the output. Raises FitError or InputError for one that
        has none and is needed. `changed`: whether an adapter changes it."""
        return True

    def named(self, info: StoredTensor) -> StoredTensor:
        """Return a tensor of the base with its name in the output."""
        return info

    def stored_as(self, info: StoredTensor, weight: Weight, form: NewWeight | None) -> tuple[str, Packing | None]:
        """Return dtype and packing of an output tensor; `info` is the base's, whose weight an adapter may replace.

        `form`: its new quantised form, if it gets one. In GGUF files of a language model vectors stay as they are.
        """
        dtype, packed = self.job.dtype, weight.packed or self.base.packed.get(info.name)
        if info.name not in self.base.tensors and packed is not None and packed.encoding.quantised:
            packed = None  # a head that was tied to embeddings of codes: it has no scales, loaders read plain values
        if form is not None and form.packing.codes is not None:
            return form.packing.codes.dtype, form.packing
        if dtype in QUANTISED_DTYPES and (packed is None or self.is_gguf):
            return info.dtype, packed
        if dtype in QUANTISED_DTYPES:
            return "BF16", None  # a quantised weight of the base that keeps its precision
        if dtype == "keep" or (self.is_gguf and len(weight.shape) < 2):
            return info.dtype, packed
        if info.dtype not in FLOATS and packed is None:
            return info.dtype, None
        plain = DTYPES[dtype]
        return plain, as_plain(packed, plain) if packed is not None and self.is_gguf else None

    def check_tensors(self, targets: Iterable[OutputTensor]) -> None:  # noqa: B027  most containers hold all
        """Raise FitError if the container cannot hold one of the output's tensors."""

    @abstractmethod
    def entries(self, path: Path) -> Mapping[str, str]:
        """Return the metadata that the output of one file of the base begins with."""

    @abstractmethod
    def header(self, path: Path, targets: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
        """Return the planned header of the output of one file of the base, and the alignment of its tensors."""


@dataclass(frozen=True)
class SafetensorsOutput(OutputContainer):
    """An ordinary checkpoint."""

    suffix = ".safetensors"

    def entries(self, path: Path) -> Mapping[str, str]:
        """Return the metadata of the base's file, unless that is GGUF."""
        return self.base.headers[path].metadata if self.base.gguf is None else {}

    def header(self, path: Path, targets: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
        """Return the header, without an alignment."""
        return layout([t.in_file for t in targets], metadata, self.base.headers[path].data_offset), 1


@dataclass(frozen=True)
class GgufOfGguf(OutputContainer):
    """A GGUF file made of a GGUF file: the same entries, and tensors of the same names and sizes."""

    suffix = GGUF

    def check_tensors(self, targets: Iterable[OutputTensor]) -> None:
        """Raise FitError for a tensor that the base lacks, or one of another size."""
        base, model = self.base, self.base.gguf
        fix, name = "merge into the original checkpoint", self.output.with_suffix(".safetensors").name
        if model is not None and not model.language and not base.path.is_dir():
            fix = f"write an ordinary checkpoint: `--dtype bf16 -o {typed([name])}`"
        for t in targets:
            info, where = base.tensors.get(t.name), f"{base.path}: {t.stored}"
            if info is None:
                raise FitError("an adapter needs a tensor that the GGUF file lacks", where, fix)
            if info.shape != t.shape:
                what = "an adapter changes the size of a tensor, and the entries of the GGUF file state the old one"
                raise FitError(what, where, fix)

    def entries(self, path: Path) -> Mapping[str, str]:
        """Return the metadata of the base's file."""
        return self.base.headers[path].metadata

    def header(self, path: Path, targets: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
        """Return the header with the entries of the base's file, and its alignment."""
        before = self.base.headers[path]
        return gguf_layout(path, before.data_offset, [t.in_file for t in targets], metadata), before.alignment


@dataclass(frozen=True)
class NewGguf(OutputContainer):
    """A GGUF file of a diffusion model, as ComfyUI-GGUF loads it, made of a checkpoint."""

    suffix = GGUF
    file: DiffusionFile

    def holds(self, info: StoredTensor, *, changed: bool) -> bool:
        """Return whether a tensor of the base is one of the diffusion model.

        Raises FitError if it is none and an adapter changes it, InputError if GGUF has no type for it.
        """
        if self.file.name(info.name) is None:
            if changed:
                raise FitError("an adapter changes a network that the GGUF file lacks: a text encoder or VAE",
                               f"{info.file}: {info.name}",
                               "leave it out with `--strength-for te=0`, or name the output .safetensors")  # fmt: skip
            return False
        if info.dtype not in FLOATS and info.dtype not in GGML_TYPES and info.name not in self.base.packed:
            raise InputError(f"GGUF has no type for {spoken(info.dtype)}", f"{info.file}: {info.name}",
                             "name the output .safetensors")  # fmt: skip
        return True

    def named(self, info: StoredTensor) -> StoredTensor:
        """Return a tensor of the base with its name in the GGUF file."""
        return replace(info, stored=self.file.name(info.name) or info.name)

    def stored_as(self, info: StoredTensor, weight: Weight, form: NewWeight | None) -> tuple[str, Packing | None]:
        """Return dtype and packing; a tensor that is not quantised has a plain type of GGUF."""
        if form is not None:
            return OutputContainer.stored_as(self, info, weight, form)
        packed = info.name in self.base.packed
        if info.dtype not in FLOATS and not packed:
            return info.dtype, None
        dtype = DTYPES.get(self.job.dtype, "BF16" if packed else info.dtype)
        return plain_type(info.name, weight.shape, dtype), None

    def entries(self, path: Path) -> Mapping[str, str]:
        """Return the entry that names the architecture."""
        return {ARCHITECTURE: self.file.kind.name}

    def header(self, path: Path, targets: Sequence[OutputTensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
        """Return the header of a new file, and the alignment of GGUF."""
        rows = [t.in_file for t in targets]
        shapes = {t.stored: t.shape for t in targets if t.in_file[2] != t.shape}
        return new_layout(empty_header(self.file.kind, rows, shapes), rows, metadata), DEFAULT_ALIGNMENT


def container_of(job: Job, base: Index) -> OutputContainer:
    """Return the container of the output of a job; UsageError for a GGUF file that cannot be made.

    A language model in GGUF stays GGUF; a diffusion model in GGUF becomes an ordinary checkpoint in another dtype. A
    checkpoint becomes GGUF if the dtype or the output's name asks for it.
    """
    if base.gguf is None:
        gguf = job.dtype in GGUF_TYPES or job.output.suffix.lower() == GGUF
    else:
        gguf = job.dtype in ("keep", *QUANTISED_DTYPES) or base.gguf.language
    if not gguf:
        return SafetensorsOutput(job, base)
    file = _new_file(job, base) if base.gguf is None else None
    if job.dtype not in GGUF_DTYPES:
        right = next(iter(nearest_in_bits(job.dtype, SIMPLE_TYPES)), SIMPLE_TYPES[0])
        fix = f"write `--dtype {right}`"
        if not base.path.is_dir() and job.output.suffix.lower() != GGUF:
            fix = f"write `--dtype {right} -o {typed([nearest(str(job.output.with_suffix(GGUF)))])}`"
        raise UsageError("GGUF has no such type", f"`--dtype {job.dtype}`", fix)
    return GgufOfGguf(job, base) if file is None else NewGguf(job, base, file)


def check_name(container: OutputContainer) -> None:
    """Raise InputError or UsageError for a name of the output, or a dtype, that its container cannot have."""
    job, base, output = container.job, container.base, container.output
    if base.gguf is not None and base.path.is_dir():
        if not container.is_gguf:
            raise InputError("a folder of GGUF files with a diffusion model keeps its types", f"`--dtype {job.dtype}`",
                             "write `--dtype keep`")  # fmt: skip
        if output.suffix.lower() == GGUF:
            raise UsageError("the output is a folder with the parts of the base", f"`-o {output}`",
                             f"write `-o {typed([str(output.with_suffix(''))])}`")  # fmt: skip
    if not container.fits(output):
        right, kind = output.with_suffix(container.suffix), "GGUF" if container.is_gguf else "safetensors"
        what = f"a {kind} file cannot be named {output.suffix}" if output.suffix else f"a {kind} file needs an ending"
        plain = output.with_suffix(".safetensors")
        named = "" if output == plain else f" -o {typed([str(plain)])}"
        other = (
            f", or write `--dtype bf16{named}` for .safetensors" if container.is_gguf and base.gguf is not None else ""
        )
        error = UsageError(what, str(output), f"name it {container.suffix}{other}")
        raise error.instead(str(output), str(right))


def check_names(job: Job, base: Index, adapters: Sequence[AdapterFile]) -> None:
    """Raise InputError for an adapter whose names are others than those of a language model in GGUF files."""
    model = base.gguf
    if model is None or not model.language or model.family is not None or job.map is not None:
        return
    if other := next((a for a in adapters if not is_adapter(a.index.entries or {})), None):
        what = f"only an adapter in GGUF has the names of the GGUF architecture {quoted(model.architecture)}"
        where = f"{base.path}: {other.path.name} has others, which are known for {', '.join(FAMILIES)}"
        raise InputError(what, where, "merge into its original .safetensors checkpoint, convert the adapter "
                         "by llama.cpp's convert_lora_to_gguf.py, or give the names by --map")  # fmt: skip


def _new_file(job: Job, base: Index) -> DiffusionFile:
    """Return the GGUF file that is made of a base; UsageError for a base of which none can be made."""
    where = f"{base.path}: {job.output.name}, `--dtype {job.dtype}`"
    if base.path.is_dir():
        raise UsageError("a folder cannot be converted to GGUF: a language model needs its tokenizer in it, and a "
                         "diffusion model the names of its own checkpoint", where,
                         "convert the base by llama.cpp's convert_hf_to_gguf.py and merge into that file; or give the "
                         "diffusion model as one file, as ComfyUI has it")  # fmt: skip
    file = diffusion_file(base.tensors)
    if file is None:
        raise _no_names(job, base)
    if base.packed and job.dtype == "keep":
        raise UsageError("GGUF has no type for the quantised weights of the base", where,
                         f"write `--dtype bf16`, {', '.join(GGUF_TYPES)}")  # fmt: skip
    return file


def _no_names(job: Job, base: Index) -> UsageError:
    """Return the error for a base whose names ComfyUI-GGUF does not know: what it looks for, and what is missing."""
    right = job.output.with_suffix(SafetensorsOutput.suffix)
    named = f" -o {typed([nearest(str(right))])}" * (right != job.output)
    of_files = job.dtype in ("keep", *DTYPES, *FILE_FORMATS)  # other dtypes are those of GGUF and of folders
    plain = "name the output .safetensors" if of_files else f"write `--dtype bf16{named}`"
    if alike := missing_signs(base.tensors):
        kind, missing = alike
        why = f"it recognises {kind.name} by {' and '.join(missing)}: not in the base"
        fix = f"{plain}; or give a complete checkpoint"
    else:
        known = ", ".join(sorted(kind.name for kind in DIFFUSION_MODELS))
        why = f"it loads {known}"
        fix = (f"{plain}; or give the model as ComfyUI has it, not as diffusers has it; a language model is converted "
               "first by llama.cpp's convert_hf_to_gguf.py")  # fmt: skip
    error = UsageError("ComfyUI-GGUF loads no model with the names of this base", f"{base.path}: {why}", fix)
    return error.instead(str(job.output), str(right)) if of_files else error


def with_names_of(base: Index, adapter: AdapterFile) -> AdapterFile:
    """Return an adapter with the names and the order of rows of a base; only a GGUF adapter may have others.

    Raises InputError for a GGUF adapter whose names are not known in a base of another container.
    """
    index, values = adapter.index, adapter.index.entries or {}
    if not is_adapter(values):
        return adapter
    family = base.gguf.family if base.gguf is not None else family_of(values)
    if base.gguf is None and family is None:
        raise InputError("the names of a GGUF adapter are those of the GGUF model, and the base is another container",
                         f"{adapter.path}, for the architecture {quoted(str(values.get(ARCHITECTURE, '')))}",
                         "merge into the model in GGUF, or merge the adapter that it was converted from")  # fmt: skip
    stated, architecture = values.get(ARCHITECTURE), base.gguf.architecture if base.gguf is not None else ""
    if stated and architecture and stated != architecture:
        note = Note(
            f"it states the architecture {quoted(str(stated))}, the base {quoted(architecture)}: merged by equal names"
        )
        index = index.with_notes(note)
    return group(replace(index, tensors=adapter_tensors(adapter.path, index.stored, values, family, base.config)))
