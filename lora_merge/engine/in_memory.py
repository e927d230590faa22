"""The Python API for tensors in memory; it shares the plan and the fold with the API for files."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..adapters.file import AdapterFile, FileValues, Module, group
from ..adapters.peft.rules import rules
from ..algorithms import ALGORITHMS, flat
from ..disk.files import Memory, StoredTensor
from ..disk.reader import Reader
from ..disk.spool import PartBytes
from ..dtypes import COMPUTE_DTYPES
from ..errors import InputError, TooLarge, UsageError
from ..files.checkpoint import Index, open_checkpoint
from ..files.pickles import raw_bytes
from ..job import SETTING, Adapter, is_pair, make_job
from ..matching.choose import choose
from ..matching.context import AdapterContext
from ..matching.orientation import Base, Place
from ..matching.patch import PatchPart
from ..models.names import Names, names
from ..models.tied_weights import tied
from ..models.weights import Weight, whole
from ..options import a_list, unlike
from ..paths import expand
from ..planning.make_plan import Inputs, check_stored, match, outputs
from ..planning.plan import OutputTensor, weights
from ..text import listed
from .blocks import Block, BlockPart, blocks
from .buffers import Outcome
from .devices import place, places, release
from .fold import change
from .fold_blocks import BlockMerger, Item, made_again
from .patch_tensors import PatchTensors
from .placement import FILE_DTYPES, TORCH_DTYPES, DeviceStream, convert, finite, host, settle, stage
from .tensors import TensorCache, as_bytes, decoded, new_parts, refitted, stored_numbers
from .torch_state import undisturbed
from .windows import WINDOW_BYTES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..options import MergeOptions

TIED: Final[Mapping[str, Any]] = {"architectures": ["ForCausalLM"], "tie_word_embeddings": True}
"""The configuration of a model whose head shares the tensor of its embeddings."""


@undisturbed()
def merge_state_dict(
    state_dict: Mapping[str, Tensor], adapters: Any, **options: Unpack[MergeOptions]
) -> dict[str, Tensor]:
    """Return a new state dict with the adapters merged in; the input is not changed.

    Tensors may have different dtypes and lie on different devices. Warns of tied entries that differ after the merge.
    The options are those of `merge`; `overwrite`, `max_memory` and `verify`, which concern files, have no effect.

    Parameters:
        state_dict: Name → tensor, as `model.state_dict()` gives it.
        adapters: As for `merge`; also state dicts of adapters, and LoadedAdapter objects.

    Returns:
        Name → tensor: detached, on the CPU, in the dtype of the input, or in `dtype`. Untouched tensors that are on the
        CPU share memory with the input.

    Raises:
        MergeError: As `merge`, except for errors of the output file and the disk.

    Example:
        >>> merged = lora_merge.merge_state_dict(model.state_dict(), [("style.safetensors", 0.8)])
        >>> model.load_state_dict(merged)
        <All keys matched successfully>
    """
    if wrong := sorted(options.keys() & {"base", "output"}):
        raise UsageError(f"there is no option {wrong[0]!r}", "merge_state_dict", "use `merge` for files")
    base = _index("state dict", state_dict).recognised()
    paths, files = _adapters(adapters)
    job = make_job("state dict", paths, "state dict", **options)
    at = places(job.device, COMPUTE_DTYPES[job.compute_dtype])
    lookup = names(base, job.map)
    head = _tied_head(base, lookup)
    merged: dict[str, Tensor] = {}
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(f.index for f in files))
        factors = TensorCache(reader, frozenset(p for f in files for p in f.index.files))
        base = replace(base, config=TIED) if head else base
        found = match(Inputs(job, base, lookup, tuple(files)))
        check_stored(found)
        matched = found.adapters
        tensors, saturated = PatchTensors(factors.fetch, weights(base, matched)), Counter[str]()
        parts: list[PartBytes] = []
        folder = BlockMerger.of(job, at, tensors)
        stack.callback(release, at)
        stack.callback(folder.leave)
        for some in _portions(target for _, target in outputs(job, base, matched)):
            made, more = _merged(some, folder, saturated)
            merged |= made
            parts += more
            factors.forget()
            tensors.kept.clear()
        _amend(merged, parts)
    if saturated:
        warnings.warn(f"{sum(saturated.values())} numbers were too large for their dtype and were cut to its largest: "
                      f"{listed([f'{n} of {name}' for name, n in saturated.most_common()])}", stacklevel=3)  # fmt: skip
    parted = [tie for tie in _ties(state_dict) if {*tie} != {*head} and not torch.equal(*(merged[k] for k in tie))]
    for first, second in parted + [head] * (bool(head) and any(m.untied for m in matched)):
        warnings.warn(f"{first} and {second} were tied and now differ: load them into a model that does not tie them, "
                          "such as with tie_word_embeddings=False, or one is lost", stacklevel=3)  # fmt: skip
    return merged


def _portions(targets: Iterable[OutputTensor]) -> Iterator[list[OutputTensor]]:
    """Yield lists of targets, about a window's bytes each, as for files: equal kinds are folded in one call."""
    portion: list[OutputTensor] = []
    size = 0
    for target in targets:
        portion.append(target)
        size += target.nbytes
        if size >= WINDOW_BYTES:
            yield portion
            portion, size = [], 0
    yield portion


def _merged(
    targets: Sequence[OutputTensor], folder: BlockMerger, saturated: Counter[str]
) -> tuple[dict[str, Tensor], tuple[PartBytes, ...]]:
    """Return name → output tensor on the CPU, and what changes beside codes; adds to the counts of cut numbers."""
    merged, items, fetch = {}, [], folder.tensors.fetch

    def put(target: OutputTensor, block: Block, numbers: Tensor, into: Tensor) -> None:
        values = decoded(numbers, target.weight, *block.stored, fetch).view(into.shape) if target.recoded else numbers
        if not convert(values, into):
            saturated[target.name] += settle(target.name, values, into, saturate=folder.saturate)

    for target in targets:
        padded, (name, dtype, shape) = target.weight.padded, target.in_file
        if target.copied:
            merged[name] = fetch(replace(target.source, dtype=dtype, shape=shape))
            continue
        out = merged[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        for block in blocks(target):
            numbers, into = stored_numbers(target.weight, *block.stored, fetch), _rows(out, target, block)
            numbers = numbers if padded or target.weight.packed else numbers.view(into.shape)
            if block.slices or padded:
                items.append(Item(block, numbers, into))
            else:
                put(target, block, numbers, into)
    outcome = folder.fold(items)
    saturated += outcome.cut
    for target in (t for t in targets if t.name in outcome.largest):
        new = refitted(target, outcome.largest[target.name], fetch)
        for block, codes, again in made_again(new, folder):
            _rows(merged[target.stored], target, block).copy_(codes)
            outcome += Outcome(parts=again.parts)
        outcome += Outcome(parts=tuple(new_parts(new)))
    return merged, outcome.parts


def _amend(merged: dict[str, Tensor], parts: Sequence[PartBytes]) -> None:
    """Write new bytes of parts into copies of their tensors, which share memory with the input."""
    for name in dict.fromkeys(part.name for part in parts):
        merged[name] = merged[name].clone()
    for name, first, data in parts:
        into = as_bytes(merged[name])[first : first + len(data)]
        into.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _rows(out: Tensor, target: OutputTensor, block: Block) -> Tensor:
    """Return the stored numbers of a block in an output tensor: [rows, cols], or codes as flat bytes."""
    if target.packed is None:
        return out.view(-1).narrow(0, block.first * block.cols, block.elements).view(-1, block.cols)
    size = target.packing.encoding.nbytes
    low = size(block.first * block.cols)
    return as_bytes(out)[low : low + size(block.elements)]


def _index(name: str, tensors: Mapping[str, Tensor]) -> Index:
    """Return a state dict as a checkpoint with a made-up file name; InputError for entries that are not tensors."""
    path, infos = Path(f"<{name}>"), {}
    if not isinstance(tensors, Mapping):
        raise unlike(tensors, name, "a table of names and tensors")

    @lru_cache(maxsize=4)  # a tensor on a GPU is copied to the host once, also if it is read in pieces
    def content(value: Tensor) -> memoryview:
        return raw_bytes(host(value))

    for key, value in tensors.items():
        if not isinstance(key, str):
            raise unlike(key, f"a name in {path}", "a str")
        if not isinstance(value, Tensor) or value.dtype not in FILE_DTYPES or value.layout != torch.strided:
            fix = "give strided tensors of dtypes that .safetensors has, and leave out all other entries"
            raise InputError(f"a {type(value).__name__} is not a plain tensor", f"{path}: {key}", fix)
        _check_values(value, f"{path}: {key}")
        source, nbytes = Memory(path, partial(content, value)), value.numel() * value.element_size()
        infos[key] = StoredTensor(key, FILE_DTYPES[value.dtype], tuple(value.shape), source, 0, nbytes)
    return Index(path, infos, {}, (path,))


def _ties(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of names of which both are the same tensor."""
    first: dict[tuple[Any, ...], str] = {}
    found = []
    for name, value in tensors.items():
        at = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        if value.numel() and first.setdefault(at, name) != name:
            found.append((first[at], name))
    return found


def _tied_head(base: Index, lookup: Names) -> tuple[str, ...]:
    """Return the names of embeddings and head if both hold the same values; else ()."""
    head = tied(lookup, base.tensors, TIED)
    same = head is not None and head.stored and FileValues().same(head.info, base.tensors[head.stored])
    return (head.info.name, head.stored) if head is not None and same else ()


def _adapters(given: Any) -> tuple[list[Any], list[AdapterFile]]:
    """Return the adapters in the form that `make_job` takes, and the opened files."""
    if isinstance(given, str | Path | Adapter | Mapping | LoadedAdapter) or is_pair(given):
        given = [given]
    given = a_list(given, "the list of adapters", "a path, a state dict, or a list of them")
    refs: list[Any] = []
    files: list[AdapterFile] = []
    for number, item in enumerate(given):
        paired = isinstance(item, tuple) and len(item) == 2
        source, strength = item if paired else (item, 1.0)
        if isinstance(source, Mapping):
            files.append(group(_index(f"adapter {number}", source)))
            ref: Any = f"adapter {number}"
        elif isinstance(source, LoadedAdapter):
            files.append(source.file)
            ref = source.path
        else:
            ref = source
            files.append(group(open_checkpoint(expand(ref.path if isinstance(ref, Adapter) else ref))))
        refs.append((ref, strength) if paired else ref)
    return refs, files


class LoadedAdapter:
    """An opened adapter file: its modules, and ΔW of each module for a given weight. Several threads may share it."""

    def __init__(self, path: str | Path) -> None:
        self.path = expand(path)
        self.file: AdapterFile = group(open_checkpoint(self.path))
        self._rules = rules(self.file.index.config, str(self.path), self.file.index.metadata)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that the adapter changes, as the file spells them."""
        return tuple(dict.fromkeys(m.name for m in self.file.modules))

    def algorithm(self, name: str) -> str:
        """Return the name of the algorithm of a module's tensors, a row of ALGORITHMS."""
        module = self._module(name)
        complete = module.complete
        chosen = self._rules.of(name).algorithm(name, complete) or next(iter(complete), None)
        if chosen is None:
            raise InputError("the module is incomplete", f"{self.path}: {name}", "export the adapter again")
        return chosen

    @undisturbed()
    def delta(self, name: str, base_weight: Tensor, *, fan_in_fan_out: bool | None = None) -> Tensor:
        """Return F(W) − W at strength 1 for one module: fp32, on the CPU, in the base weight's shape.

        Whether the weight is [out, in] or [in, out] is found from its shape and the module's name, as in a merge into a
        base with this weight alone; ShapeMismatch if that contradicts the configuration. Pass `fan_in_fan_out` then,
        and for a Conv1D with methods whose tensors fit any shape (FourierFT, WaveFT).
        """
        if not isinstance(base_weight, Tensor):
            raise unlike(base_weight, "the base's weight", "a tensor")
        _check_values(base_weight, "the base's weight")
        module, shape = self._module(name), tuple(base_weight.shape)
        rows, cols = flat(shape)
        view = whole("weight", shape)
        given = {} if fan_in_fan_out is None else {SETTING: fan_in_fan_out}
        layers = Base((), lambda _: False, lambda: [Place(module, view, None)])
        context = AdapterContext(0, self.file, self._rules, FileValues(), given=given, base=layers)
        patch = choose(module, view, context, {"weight": view}).patch
        at = place("cpu", "F64" if ALGORITHMS[patch.algorithm].decomposes else "F32")
        with Reader([self.file.index]) as reader, torch.no_grad():
            factors = TensorCache(reader, frozenset(self.file.index.files))
            weight = Weight(shape, _index("weight", {"weight": base_weight}).tensors["weight"])
            alone = OutputTensor("weight", "weight", "F32", weight, 0, 0)
            piece = patch.view.pieces[0]
            part = BlockPart(PatchPart(patch, piece, 0, 1.0), 0, rows, (0, piece.rows), None, alone)
            stack = PatchTensors(factors.fetch, {"weight": weight}).stack([part], at, DeviceStream(at))
            made = change(stack, stage([base_weight.reshape(rows, cols)], at))[0]
            found = host((made.t() if piece.transposed else made).reshape(shape), torch.float32)
        if not finite(found).all() and finite(base_weight).all():
            raise TooLarge("ΔW is too large for fp32", f"{self.path}: {name}", "use another checkpoint of the adapter")
        return found

    def _module(self, name: str) -> Module:
        for module in self.file.modules:
            if isinstance(name, str) and module.name == name:
                return module
        raise UsageError(f"the adapter has no module {name!r}", str(self.path), "see .modules for the names")


def _check_values(tensor: Tensor, where: str) -> None:
    """Raise InputError for a tensor that has a shape but no values."""
    if tensor.device.type == "meta":
        raise InputError("a tensor on the meta device has no values", where, "load the model before merging")


def load_adapter(path: str | Path) -> LoadedAdapter:
    """Open an adapter to read the names of its modules, and to compute the ΔW of each.

    Parameters:
        path: An adapter file, or a PEFT folder.

    Returns:
        A `LoadedAdapter`; `merge_state_dict` takes it as an adapter too.

    Raises:
        InputError: The adapter is missing, damaged or of a kind that is not supported.

    Example:
        >>> adapter = lora_merge.load_adapter("style.safetensors")
        >>> adapter.modules[0]
        'lora_unet_down_blocks_0_attentions_0_proj_in'
    """
    return LoadedAdapter(path)
