"""Merges tensors in memory: the plan and the fold of `merge`, without files for the base and the output. With
`merge_state_dict`, which returns a new state dict.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from numbers import Real
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..adapter_arguments import adapter_path
from ..adapters.modules import AdapterFile, group
from ..addresses import downloads_in
from ..boundary import public
from ..change_statistics import Measures
from ..disk.reader import Reader
from ..disk.scale_spool import PartBytes
from ..dtypes import COMPUTE_DTYPES, QUANTISED_DTYPES
from ..engine.block_folder import BlockFolder, FoldOptions
from ..engine.change_effect import check_effect
from ..engine.change_norms import replaced_measures, replacements
from ..engine.devices import fastest, one_core, places, threads
from ..engine.patch_tensors import PatchTensors
from ..engine.quantised_output import refolded
from ..engine.requantisation import new_parts, refitted
from ..engine.row_blocks import Block, blocks, portions
from ..engine.tasks import FoldResult, FoldTask
from ..engine.tensor_moves import TORCH_DTYPES, Placement, convert, settle
from ..engine.tensors import Fetch, TensorCache, as_bytes, decoded, stored_values
from ..engine.torch_state import undisturbed
from ..engine.windows import WINDOW_BYTES
from ..errors import InputError, UsageError
from ..files.checkpoint import Index, open_checkpoint
from ..job import Adapter, AdapterValue, Job, OneAdapter, is_pair, make_job, pair_in, summands, wrong_adapter
from ..models.blocks import groups
from ..models.names import names
from ..option_texts import in_python
from ..options import a_list
from ..planning.changes import Matches, check_stored, match
from ..planning.downloads import downloaded_paths
from ..planning.inputs import Inputs
from ..planning.make_plan import outputs
from ..planning.plan import OutputTensor
from ..progress import Progress, counted, watched
from ..text import listed, number_of, one_line, plural
from ..typed_options import PythonOptions
from .loaded_adapter import LoadedAdapter
from .state_index import TIED_CONFIG, index_of, tied_head, ties

KEEP_DEVICE: Final = "keep"
"""The value of `device` with which results stay where the tensors of the base are."""

MemoryAdapter: TypeAlias = (
    OneAdapter | Mapping[str, Tensor] | LoadedAdapter | tuple[Mapping[str, Tensor], float] | tuple[LoadedAdapter, float]
)
MemoryAdapters: TypeAlias = MemoryAdapter | Sequence[MemoryAdapter] | Mapping[str, float] | Mapping[Path, float]
"""The adapters that functions on tensors take: paths, state dicts and opened adapters, each also with a strength."""

Give = Callable[[OutputTensor, Tensor], None]


class MergeFacts(NamedTuple):
    """The facts of a merge in memory, without its tensors."""

    saturated: Counter[str]  # tensor → values that were cut to the largest of their dtype
    numbers: Mapping[str, Any]  # what the merge did to the weights, as in a report
    lost: tuple[str, ...]  # warnings of changes that are lost in the rounding


@dataclass(frozen=True)
class MemoryMerge:
    """A matched merge of tensors in memory."""

    matched: Matches
    at: tuple[Placement, ...]
    base_tensors: Mapping[str, Tensor]
    """Name → tensor of the base whose result is made on the device of that tensor; empty: all results on the CPU."""
    lent: Mapping[str, Tensor]
    """Tensors of adapters that the caller holds."""
    head: tuple[str, ...]
    """The names of embeddings and head, if a state dict holds the same values under both."""

    @property
    def job(self) -> Job:
        """Return the job."""
        return self.matched.inputs.job

    def of_base(self, target: OutputTensor) -> bool:
        """Return whether a target starts from a tensor of the base, and not from one of an adapter that replaces it."""
        return target.source.file == self.matched.inputs.base.path

    def targets(self) -> Iterator[OutputTensor]:
        """Yield every tensor of the result."""
        return (target for _, target in outputs(self.matched))

    def _base_tensor(self, name: str) -> Tensor:
        """Return the base's tensor of this name; no values, on the device of its weight, for a new bias."""
        tensor = self.base_tensors.get(name)
        return self.base_tensors[name.removesuffix("bias") + "weight"].new_empty(0) if tensor is None else tensor

    def _pool(self, stack: ExitStack) -> ThreadPoolExecutor | None:
        """Return the threads that fold on a CPU, each on one core, as the number of threads of one operation changes
        bytes: as many as the caller lets torch use."""
        if self.at[0].device.type != "cpu":
            return None
        count = min(threads(self.at), torch.get_num_threads())
        return stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="fold", initializer=one_core))

    def run(self, give: Give, progress: Progress) -> MergeFacts:
        """Pass every target with its result to `give`.

        The tensors of `Packing.parts` come last, as they are known when all weights are merged.
        """
        # Step 1: what reads the adapters and folds.
        inputs, saturated, measures = self.matched.inputs, Counter[str](), Measures()
        report = counted(progress, "merge", "", sum(target.nbytes for target in self.targets()))
        with ExitStack() as stack:
            reader = stack.enter_context(Reader(f.index for f in inputs.adapters))
            factors = TensorCache(reader, frozenset(p for f in inputs.adapters for p in f.index.files))
            tensors = PatchTensors(factors.fetch, self.matched.weights)
            folder = BlockFolder(self.at, tensors, self._pool(stack), FoldOptions.of(self.job, self.at))
            stack.callback(folder.lanes.leave)
            # Step 2: some tensors at a time; scales and tables wait until all weights are merged.
            late = inputs.base.packing_names
            results: dict[str, tuple[OutputTensor, Tensor]] = {}
            parts: list[PartBytes] = []
            for some in portions(self.targets(), attrgetter("nbytes"), WINDOW_BYTES):
                in_memory = {
                    t.name: self._base_tensor(t.source.name) for t in some if self.base_tensors and self.of_base(t)
                }
                merged_tensors, merged = _merged(some, folder, in_memory, saturated)
                parts += merged.parts
                measures.take(merged.measures)
                measures.know(folder.norms(some).norms)
                for target in some:
                    name = target.in_file[0]
                    if name in late:
                        results[name] = target, merged_tensors[name]
                    else:
                        give(target, merged_tensors[name])
                factors.forget()
                tensors.cache.clear()
                report(sum(target.nbytes for target in some))
            # Step 3: the replaced tensors, the check that each adapter has an effect, and what has waited.
            whole = replacements(self.targets(), inputs.base, self.matched.adapters)
            measures.take(replaced_measures(whole, factors.read))
            check_effect(self.matched.adapters, measures, reader)
            _amend(results, parts)
            for target, result in results.values():
                give(target, result)
        measures.in_order(target.name for target in self.targets())
        numbers = measures.to_dict(len(self.job.adapters), groups(inputs.names), saturated)
        return MergeFacts(saturated, numbers, (*measures.lost(self.job),))


def prepare(
    base: Index, adapters: MemoryAdapters, options: PythonOptions, live: Mapping[str, Tensor], called: str
) -> MemoryMerge:
    """Match adapters with a base in memory.

    `live`: the tensors of the base. `called`: the public function, for errors. A base without a configuration is a
    state dict: its values show if its head is tied.
    """
    keep = isinstance(asked := options.get("device"), str) and asked == KEEP_DEVICE
    if keep:
        options = {**options, "device": _device(live.values())}
    with downloads_in(options.get("cache")):
        paths, files, lent = _adapters(adapters)
    if not files:
        raise UsageError("no adapter is named", called, "give at least one path, state dict or opened adapter")
    job = make_job(str(base.path)[1:-1], paths, str(base.path)[1:-1], **options)
    if job.dtype in QUANTISED_DTYPES or job.keep_precision:
        raise UsageError("tensors in memory are not quantised", f"{called}: dtype {job.dtype}",
                         "use `merge`, which writes the file that loaders read")  # fmt: skip
    lookup = names(base, job.map)
    head = () if base.config else tied_head(base, lookup)
    matched = match(Inputs.joined(job, replace(base, config=TIED_CONFIG) if head else base, lookup, files))
    check_stored(matched)
    targets = (t for _, t in outputs(matched)) if job.device == "auto" else ()
    device = fastest(job.device, targets, 0.0, torch.get_num_threads()).device
    at = places(device, COMPUTE_DTYPES[job.compute_dtype])
    return MemoryMerge(matched, at, live if keep else {}, lent, head)


def warn_of(facts: MergeFacts) -> None:
    """Warn the caller of a public function of values that were cut to the largest of their dtype, and of changes that
    are lost in the rounding."""
    for text in facts.lost:
        warnings.warn(one_line(in_python(text)), stacklevel=5)
    if saturated := facts.saturated:
        were = plural(sum(saturated.values()), "number was", "numbers were")
        names = listed([f"{n} of {name}" for name, n in saturated.most_common()])
        warnings.warn(one_line(f"{were} too large for the dtype and cut to its largest: {names}"), stacklevel=5)


def _device(tensors: Iterable[Tensor]) -> str:
    """Return the device on which all tensors are; "auto" if they are on several."""
    devices = {str(tensor.device) for tensor in tensors}
    return devices.pop() if len(devices) == 1 else "auto"


@torch.no_grad()
@torch.inference_mode(mode=False)  # a mode of the calling thread alone, with tensors that no other thread may write
def _merged(
    targets: Sequence[OutputTensor], folder: BlockFolder, live: Mapping[str, Tensor], saturated: Counter[str]
) -> tuple[dict[str, Tensor], FoldResult]:
    """Return (name → result, parts of codes and measures); adds to the counts of cut values."""
    tensors, tasks, fetch = {}, [], folder.tensors.fetch

    def put(target: OutputTensor, block: Block, stored: Tensor, into: Tensor) -> None:
        values = decoded(stored, target.weight, *block.stored, fetch).view(into.shape) if target.recoded else stored
        if not convert(values, into):
            saturated[target.name] += settle(target.name, values, into, saturate=folder.options.saturate)

    # Step 1: each tensor: copied, converted, or its blocks to fold.
    for target in targets:
        padded, (name, dtype, shape) = target.weight.padded, target.in_file
        value = live.get(target.name)
        if target.copied:
            tensors[name] = fetch(replace(target.source, dtype=dtype, shape=shape)) if value is None else value.detach()
            continue
        device = "cpu" if value is None else value.device
        out = tensors[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
        _copy_padding(target, out, fetch)
        for block in blocks(target):
            if value is None or target.weight.packed:
                stored = stored_values(target.weight, *block.stored, fetch)
            else:
                stored = value.detach().resolve_neg().reshape(-1).narrow(0, *block.stored)
            into = _rows(out, target, block)
            stored = stored if padded or target.weight.packed else stored.view(into.shape)
            if block.folded(drawn=folder.options.draw is not None):
                tasks.append(FoldTask(block, stored, into))
            else:
                put(target, block, stored, into)
    # Step 2: the blocks are folded; a scale that does not cover the result is fitted anew.
    merged = folder.fold(tasks)
    saturated += merged.cut
    for target in (t for t in targets if t.name in merged.uncovered):
        new = refitted(target, merged.uncovered[target.name], fetch)
        merged = replace(merged, measures=tuple(m for m in merged.measures if m.tensor != target.name))
        for block, codes, again in refolded(new, folder):
            _rows(tensors[target.stored], target, block).copy_(codes)
            merged += again
        merged += FoldResult(parts=tuple(new_parts(new)))
    return tensors, merged


def _copy_padding(target: OutputTensor, out: Tensor, fetch: Fetch) -> None:
    """Copy the stored rows behind those of a weight of codes."""
    if rest := target.padding:
        at = target.source.offset + target.nbytes - rest
        as_bytes(out)[-rest:].copy_(fetch(replace(target.source, dtype="U8", shape=(rest,), offset=at, nbytes=rest)))


def _amend(results: dict[str, tuple[OutputTensor, Tensor]], parts: Sequence[PartBytes]) -> None:
    """Write new bytes of parts into copies of their tensors, which share memory with the input."""
    for name in dict.fromkeys(part.name for part in parts):
        target, tensor = results[name]
        results[name] = target, tensor.clone()
    for name, first, data in parts:
        into = as_bytes(results[name][1])[first : first + len(data)]
        into.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _rows(out: Tensor, target: OutputTensor, block: Block) -> Tensor:
    """Return the stored values of a block in an output tensor: [rows, cols], or codes as flat bytes."""
    if target.packed is None:
        return out.view(-1).narrow(0, block.first * block.cols, block.elements).view(-1, block.cols)
    size = target.packing.encoding.nbytes
    low = size(block.first * block.cols)
    return as_bytes(out)[low : low + size(block.elements)]


def _adapters(adapters: MemoryAdapters) -> tuple[list[Any], list[AdapterFile], dict[str, Tensor]]:
    """Return the adapters in the form that `make_job` takes, the opened files, and the tensors of state dicts."""
    items: Any = adapters
    if isinstance(adapters, Mapping) and adapters and all(isinstance(value, Real) for value in adapters.values()):
        items = [*adapters.items()]
    elif isinstance(adapters, str | PathLike | Adapter | Mapping | LoadedAdapter | AdapterValue) or is_pair(adapters):
        items = [adapters]
    items = a_list(items, "the list of adapters", "a path, a state dict, or a list of them")
    refs: list[Any] = []
    files: list[AdapterFile] = []
    lent: dict[str, Tensor] = {}
    for number, item in enumerate(summands(items)):
        paired = isinstance(item, tuple) and len(item) == 2
        source, strength = item if paired else (item, 1.0)
        known = isinstance(source, str | PathLike | Adapter | Mapping | LoadedAdapter)
        if not known or number_of(strength) is not None or pair_in(source):
            raise wrong_adapter(item, in_memory=True)
        if isinstance(source, Mapping):
            files.append(group(index_of(f"adapter {number}", source)))
            ref: Any = f"adapter {number}"
            lent |= {f"{ref}: {key}": tensor for key, tensor in source.items()}
        elif isinstance(source, LoadedAdapter):
            files.append(source.file)
            ref = source.path
        else:
            path = adapter_path(source.path if isinstance(source, Adapter) else source)
            path = downloaded_paths([], [path])[path]
            ref = replace(source, path=path) if isinstance(source, Adapter) else path
            files.append(group(open_checkpoint(path, adapter=True)))
        refs.append((ref, strength) if paired else ref)
    return refs, files, lent


@public
@undisturbed()
def merge_state_dict(
    state_dict: Mapping[str, Tensor],
    adapters: MemoryAdapters,
    *,
    numbers: dict[str, object] | None = None,
    progress: bool | Progress = False,
    **options: Unpack[PythonOptions],
) -> dict[str, Tensor]:
    """Return a new state dict with the adapters merged in; the input is not changed.

    Tensors may have different dtypes and be on different devices. Warns of tied entries that differ after the merge.
    The options are those of `merge`; `overwrite`, `max_memory` and `verify`, which concern files, have no effect.

    Parameters:
        state_dict: Name → tensor, as `model.state_dict()` gives it.
        adapters: As for `merge`; also state dicts of adapters, and LoadedAdapter objects.
        numbers: A table that gets what the merge did to the weights: `numbers` of a `Report`.
        progress: As for `merge`.
        device: As for `merge`. "keep": every result is made and stays on the device of its tensor.

    Returns:
        Name → tensor: detached, on the CPU (see `device`), in the dtype of the input, or in `dtype`. Untouched tensors
        that are there already share memory with the input.

    Raises:
        MergeError: As `merge`, except for errors of the output file and the disk.

    Examples:
        >>> merged = lora_merge.merge_state_dict(model.state_dict(), [("style.safetensors", 0.8)])
        >>> model.load_state_dict(merged)
        <All keys matched successfully>
    """
    index = index_of("state dict", state_dict)
    if not index.tensors:
        raise InputError("the state dict is empty", "state_dict", "give model.state_dict()")
    base = index.recognised()
    merge = prepare(base, adapters, options, state_dict, "merge_state_dict")
    merged: dict[str, Tensor] = {}
    with watched(progress) as watcher:
        facts = merge.run(lambda target, tensor: merged.__setitem__(target.in_file[0], tensor), watcher)
    warn_of(facts)
    if numbers is not None:
        numbers.update(facts.numbers)
    changed = {target.in_file[0] for target in merge.targets() if target.uses}
    parted = [
        tie for tie in ties(state_dict)
        if {*tie} != {*merge.head} and not changed.isdisjoint(tie) and merged.keys() >= {*tie}
        and not (_alike(*(state_dict[k] for k in tie)) and torch.equal(*(merged[k] for k in tie)))
    ]  # fmt: skip
    untied = bool(merge.head) and any(m.untied for m in merge.matched.adapters)
    for tie in parted + [merge.head] * untied:
        first, second = map(one_line, tie)
        warnings.warn(f"{first} and {second} were tied and now differ: load them into a model that does not tie them, "
                      "such as with tie_word_embeddings=False, or one is lost", stacklevel=4)  # fmt: skip
    return merged


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors that share memory are the same values in the same order."""
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())
