"""The container of an output: GGUF where the base is one and its names are kept, else .safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..adapters.modules import AdapterFile, group
from ..disk.files import StoredTensor
from ..dtypes import DTYPES, FLOATS, FORMATS, GGUF_TYPES, Shape, spoken
from ..errors import FitError, InputError, UsageError
from ..files.checkpoint import Index
from ..files.encodings.base import Packing
from ..files.formats.base import NewWeight
from ..files.gguf.adapter import adapter_tensors, family_of, is_adapter
from ..files.gguf.container import ALIGNED
from ..files.gguf.diffusion import KINDS, DiffusionFile, diffusion_file, empty_header, plain_type
from ..files.gguf.layout import gguf_layout, new_layout
from ..files.gguf.names import FAMILIES
from ..files.gguf.types import TYPES
from ..files.gguf.view import ARCHITECTURE, as_plain
from ..files.safetensors import layout
from ..job import Job
from ..models.weights import Weight
from ..paths import typed
from ..text import Note, quoted
from .plan import OutputTensor

GGUF: Final = ".gguf"
GGUF_DTYPES: Final = ("keep", "fp32", "fp16", "bf16", *GGUF_TYPES)


def in_gguf(job: Job, base: Index) -> bool:
    """Return whether the output is GGUF. A diffusion model in GGUF becomes an ordinary checkpoint in another dtype."""
    if base.gguf is None:
        return job.dtype in GGUF_TYPES or job.output.suffix.lower() == GGUF
    return job.dtype in ("keep", *GGUF_TYPES) or base.gguf.language


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


def check_container(job: Job, base: Index) -> Job:
    """Return the job with the name that its output has by default; InputError or UsageError for what cannot be written.

    The default name of an output has the suffix of the base, since it is made before any file is read.
    """
    gguf = in_gguf(job, base)
    if gguf and job.dtype not in GGUF_DTYPES:
        raise UsageError("GGUF has no such type", f"--dtype {job.dtype}", f"use one of {', '.join(GGUF_DTYPES)}")
    if base.gguf is None:
        if not gguf:
            return job
        _check_new(job, base)
    elif base.path.is_dir():
        if not gguf:
            raise InputError("a folder of GGUF files with a diffusion model keeps its types", f"--dtype {job.dtype}",
                             "write --dtype keep")  # fmt: skip
        if job.output.suffix.lower() == GGUF:
            raise UsageError("the output is a folder with the parts of the base", f"-o {job.output}",
                             f"write -o {typed([str(job.output.with_suffix(''))])}")  # fmt: skip
        return job
    if gguf == (job.output.suffix.lower() == GGUF):
        return job
    if job.output.stem == "+".join([job.base.stem, *(a.path.stem for a in job.adapters)]):
        return replace(job, output=job.output.with_suffix(GGUF if gguf else ".safetensors"))
    what = "the output is GGUF" if gguf else "the output is an ordinary checkpoint"
    raise UsageError(what, str(job.output), f"name it {GGUF if gguf else '.safetensors'}")


def _check_new(job: Job, base: Index) -> None:
    """Raise UsageError for a base of which no GGUF file can be made."""
    where = f"{base.path}: {job.output.name}, --dtype {job.dtype}"
    if base.path.is_dir():
        raise UsageError("no GGUF file is made of a folder: a language model needs its tokenizer in it, and a "
                         "diffusion model the names of its own checkpoint", where,
                         "convert the base by llama.cpp's convert_hf_to_gguf.py and merge into that file; or give the "
                         "diffusion model as one file, as ComfyUI has it")  # fmt: skip
    if diffusion_file(base.tensors) is None:
        known = ", ".join(sorted(kind.name for kind in KINDS))
        raise UsageError("the names of the base are of no diffusion model that ComfyUI-GGUF loads", where,
                         f"name the output .safetensors; or give the model as ComfyUI has it, not as diffusers has it "
                         f"({known}); a language model is converted first by llama.cpp's convert_hf_to_gguf.py"
                         )  # fmt: skip
    if base.packed and job.dtype == "keep":
        raise UsageError("GGUF has no type for the quantised weights of the base", where,
                         f"write --dtype bf16, {', '.join(GGUF_TYPES)}")  # fmt: skip


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
    stated, own = values.get(ARCHITECTURE), base.gguf.architecture if base.gguf is not None else ""
    if stated and own and stated != own:
        note = Note(f"it states the architecture {quoted(str(stated))}, the base {quoted(own)}: merged by equal names")
        index = replace(index, notes=(*index.notes, note))
    return group(replace(index, tensors=adapter_tensors(adapter.path, index.stored, values, family, base.config)))


def stored_as(
    job: Job, base: Index, info: StoredTensor, weight: Weight, form: NewWeight | None
) -> tuple[str, Packing | None]:
    """Return dtype and packing of an output tensor; `info` is the base's, whose weight an adapter may replace.

    `form`: its new quantised form, if it gets one. In GGUF files of a language model vectors stay as they are.
    """
    packed = weight.packed or base.packed.get(info.name)
    if info.name not in base.tensors and packed is not None and packed.encoding.quantised:
        packed = None  # a head that was tied to embeddings of codes: it has no scales, loaders read plain numbers
    if form is not None and form.packing.codes is not None:
        return form.packing.codes.dtype, form.packing
    if job.dtype in FORMATS and (packed is None or in_gguf(job, base)):
        return info.dtype, packed
    if job.dtype in FORMATS:
        return "BF16", None  # a quantised weight of the base that keeps its precision
    if job.dtype == "keep" or (in_gguf(job, base) and len(weight.shape) < 2):
        return info.dtype, packed
    if info.dtype not in FLOATS and packed is None:
        return info.dtype, None
    made = DTYPES[job.dtype]
    return made, as_plain(packed, made) if packed is not None and in_gguf(job, base) else None


@dataclass(frozen=True)
class NewGguf:
    """A GGUF output whose base is no GGUF file."""

    file: DiffusionFile
    job: Job
    packed: Mapping[str, Packing]

    def holds(self, info: StoredTensor, *, changed: bool) -> bool:
        """Return whether a tensor of the base has a place in the output.

        Raises FitError if it has none and an adapter changes it, InputError if GGUF has no type for it.
        """
        if self.file.name(info.name) is None:
            if changed:
                raise FitError("an adapter changes a network that the GGUF file does not hold: a text encoder or VAE",
                               f"{info.file}: {info.name}",
                               "leave it out with --strength-for te=0, or name the output .safetensors")  # fmt: skip
            return False
        if info.dtype not in FLOATS and info.dtype not in TYPES and info.name not in self.packed:
            raise InputError(f"GGUF has no type for {spoken(info.dtype)}", f"{info.file}: {info.name}",
                             "name the output .safetensors")  # fmt: skip
        return True

    def named(self, info: StoredTensor) -> StoredTensor:
        """Return a tensor of the base with its name in the output."""
        return replace(info, stored=self.file.name(info.name) or info.name)

    def stored_as(self, info: StoredTensor, shape: Shape) -> tuple[str, None]:
        """Return (type, None for its packing) of a tensor that is not quantised; `info` is the base's."""
        packed = info.name in self.packed
        if info.dtype not in FLOATS and not packed:
            return info.dtype, None
        return plain_type(info.name, shape, DTYPES.get(self.job.dtype, "BF16" if packed else info.dtype)), None


def new_gguf(job: Job, base: Index) -> NewGguf | None:
    """Return the GGUF output whose base is no GGUF file; None for all other outputs."""
    file = diffusion_file(base.tensors) if base.gguf is None and in_gguf(job, base) else None
    return NewGguf(file, job, base.packed) if file is not None else None


def check_tensors(job: Job, base: Index, targets: Iterable[OutputTensor]) -> None:
    """Raise FitError if a GGUF output would hold a tensor that the base lacks, or one of another size."""
    if base.gguf is None or not in_gguf(job, base):
        return
    fix, name = "merge into the original checkpoint", job.output.with_suffix(".safetensors").name
    if not base.gguf.language and not base.path.is_dir():
        fix = f"write an ordinary checkpoint: --dtype bf16 -o {typed([name])}"
    for t in targets:
        own, where = base.tensors.get(t.name), f"{base.path}: {t.stored}"
        if own is None:
            raise FitError("an adapter needs a tensor that the GGUF file lacks", where, fix)
        if own.shape != t.shape:
            what = "an adapter changes the size of a tensor, and the entries of the GGUF file state the old one"
            raise FitError(what, where, fix)


def header_of(
    job: Job, base: Index, path: Path, targets: Sequence[OutputTensor], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the planned header of the output of one file of the base, and the alignment of its tensors."""
    end, rows = base.headers[path].data_offset, [t.in_file for t in targets]
    if (new := new_gguf(job, base)) is not None:
        shapes = {t.stored: t.shape for t in targets if t.in_file[2] != t.shape}
        return new_layout(empty_header(new.file.kind, rows, shapes), rows, metadata), ALIGNED
    if in_gguf(job, base):
        return gguf_layout(path, end, rows, metadata), base.headers[path].alignment
    return layout(rows, metadata, end), 1
