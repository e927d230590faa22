"""`merge_into`: merges adapters into a live model, in place, and restores its exact bytes on request."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import Self, Unpack

from ..boundary import public
from ..engine.tensor_moves import host
from ..engine.tensors import as_bytes, raw
from ..engine.torch_state import undisturbed
from ..errors import DeviceFailed, FitError, InputError, UsageError
from ..planning.plan import OutputTensor
from ..progress import Progress, watched
from ..text import Shown, listed, plural
from ..typed_options import PythonOptions
from .live_model import LivePipeline, live_model, live_tensors
from .merge import KEEP_DEVICE, MemoryAdapters, prepare, warn_of
from .spans import repeats, shared

Keep: TypeAlias = Literal["host", "device", "compressed"]

Restore: TypeAlias = Callable[[Tensor], Tensor | None]
"""Function of a tensor with merged numbers that returns its original bytes, flat; None if it needs the merged numbers
and the tensor has others."""

_numbers: Final = count()
_merges: Final[WeakSet[MergedModel]] = WeakSet()
_lock: Final = Lock()  # for `_merges`, and the memory that each of them works on

ZLIB_LEVEL: Final = 1  # of zlib: the next levels take twice as long for one or two per cent


class MergedModel(Shown):
    """A live model with adapters merged in, and the original bytes of every changed tensor.

    As a context manager, it restores the model at the end of the block.

    Examples:
        >>> with lora_merge.merge_into(pipe, ["style.safetensors"]) as merged:
        ...     image = pipe("a lighthouse").images[0]
        >>> merged.changed
        ()
    """

    def __init__(self, model: object, tensors: Mapping[str, Tensor], keep: Keep) -> None:
        self._model, self._tensors, self._keep = model, tensors, keep
        self._originals: dict[str, Restore] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._number = 0
        self._works: dict[object, tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]] = {}
        """Block of `_alone` → its thread, and the tensors that it writes and reads."""
        with _lock:
            _merges.add(self)
        self.numbers: Mapping[str, Any] = {}
        """The effect of the merge on the weights, as `numbers` of a report."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the tensors that hold merged numbers; () after `undo`."""
        return tuple(self._originals)

    @public
    def undo(self) -> None:
        """Restore the exact bytes of every changed tensor. A second call does nothing.

        Merges into the same memory, of one model or of several, are undone in reverse order: the last one first.

        Raises:
            UsageError: If a later merge into the memory of a changed tensor is not undone, a tensor has another dtype
                or shape now, or another merge uses its memory now: then nothing is restored. Also for numbers that were
                changed since, if only a difference from the merged ones is kept; all other tensors are restored.
            InputError: If a tensor shares memory with another changed one now: then nothing is restored.
        """
        changed, failed = self._changed(), list[str]()
        with self._alone(changed, changed):
            changed = {name: tensor for name, tensor in changed.items() if name in self._originals}
            self._check(changed)
            for name, tensor in changed.items():
                data = self._originals[name](tensor)
                if data is None:
                    failed.append(name)
                    continue
                self._originals[name] = partial(
                    _unchanged, data
                )  # if this is interrupted now, `undo` can be called again
                _write(tensor, data)
                del self._originals[name]
        if failed:
            raise UsageError("values were changed after the merge, and only their difference from the old ones is kept",
                             listed(failed), "load the model again; with keep='host' all values are kept")  # fmt: skip

    def _changed(self) -> dict[str, Tensor]:
        """Return the tensors that the model has now under the names of the changed ones, the last one first."""
        now = live_tensors(self._model)
        return {name: now.get(name, self._tensors[name]) for name in reversed([*self._originals])}

    @contextmanager
    def _alone(self, written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> Iterator[None]:
        """Read and write these tensors in this block; UsageError if another merge changes or reads their memory now."""
        thread, block = get_ident(), object()
        with _lock:
            for merge in _merges:
                for other, writes, reads in merge._works.values():
                    nested = merge is self and other == thread  # a merge that failed takes its changes back
                    if not nested and any(chain(shared(written, reads), shared(read, writes))):
                        raise UsageError("another merge, or its undo, uses this memory now", type(self._model).__name__,
                                         "merge into a model, and undo that, one after the other")  # fmt: skip
            self._works[block] = thread, written, read
        try:
            yield
        finally:
            with _lock:
                del self._works[block]

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise UsageError unless the original bytes can be written into these tensors."""
        with _lock:
            later = [m for m in _merges if m._number > self._number]
        if names := [other for merge in later for _, other in shared(tensors, merge._changed())]:
            raise UsageError("a later merge into this memory is not undone yet", listed(names), "undo that merge first")
        _check_apart(tensors, tensors)
        for name, tensor in tensors.items():
            if (tensor.dtype, tensor.shape) != self._kinds[name] or tensor.is_meta:
                was, now = (str(kind).removeprefix("torch.") for kind in (self._kinds[name][0], tensor.dtype))
                what = "is on the meta device" if tensor.is_meta else f"{was} became {now}, {list(tensor.shape)}"
                raise UsageError("a tensor is not what it was after the merge", f"{name}: {what}",
                                 "bring it back, and undo then; or load the model again")  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def _heading(self) -> str:
        return "Merged into a live model"

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know first."""
        yield "changed", plural(len(self._originals), "tensor")
        yield "undo", f"handle.undo() restores the bytes that are kept: {self._keep}"

    def replace(self, name: str, merged: Tensor) -> None:
        """Write merged numbers into a tensor of the model, and keep its original bytes.

        Parameters:
            name: Of the tensor, as in the model's state dict.
            merged: Its new numbers, of the same shape and dtype.
        """
        tensor = self._tensors[name]
        old = _KEEPERS[self._keep](tensor, merged)
        self._kinds[name] = tensor.dtype, tensor.shape
        self._originals[name] = _on_host(tensor, merged) if self._keep == "compressed" else old  # until that is written
        _write(tensor, as_bytes(merged))
        self._originals[name] = old

    def original(self, name: str) -> Tensor:
        """Return a tensor of the model with its original numbers.

        Parameters:
            name: As in the model's state dict.

        Returns:
            The tensor itself if it was not changed, else a copy.
        """
        tensor, original = self._tensors[name], self._originals.get(name)
        data = original(tensor) if original is not None else None
        return tensor if data is None else data.view(tensor.dtype).view(tensor.shape)


@public
@undisturbed()
def merge_into(
    model: Module | LivePipeline,
    adapters: MemoryAdapters,
    *,
    keep: Keep = "host",
    progress: bool | Progress = False,
    **options: Unpack[PythonOptions],
) -> MergedModel:
    """Merge adapters into a live model, in place; the returned handle restores its exact bytes.

    Every result is made on the device of its tensor and written into that tensor, so that all references to it stay
    valid. If the merge fails, the model is as it was before.

    Parameters:
        model: A torch module (a model of transformers or diffusers, or your own), or a diffusers pipeline. Names that
            PEFT, FSDP and torch.compile give to wrapped layers (such as `.base_layer.`) are understood.
        adapters: As for `merge_state_dict`.
        keep: Where the original numbers of changed tensors are kept for `undo`: "host", "device" (that of each tensor),
            or "compressed" (on the host, as the compressed difference from the merged numbers, which must then still
            be in the model: half the memory or less, and a second for every few hundred MB).
        progress: As for `merge`.

    Returns:
        A `MergedModel` with `undo()` and `changed`; also a context manager that undoes the merge.

    Raises:
        MergeError: As `merge_state_dict`. Also FitError for adapters that add or resize tensors, or separate a tied
            head, which needs another model; InputError for quantised and sharded parameters, and for tensors that share
            memory and are both changed; and UsageError while another merge uses the model's memory.

    Warns:
        UserWarning: Tensors share memory with merged ones, and changed with them.

    Examples:
        >>> with lora_merge.merge_into(pipe, [("style.safetensors", 0.8)]):
        ...     image = pipe("a lighthouse").images[0]
    """
    if not isinstance(keep, str) or keep not in _KEEPERS:
        raise UsageError(f"unknown value {keep!r}", "keep", f"use one of: {', '.join(_KEEPERS)}")
    if options.get("dtype", "keep") != "keep":
        raise UsageError("a live model keeps its dtypes", "dtype", "cast the model, or leave the option out")
    live: dict[str, Tensor] = {}
    merged = MergedModel(model, live, keep)
    index = live_model(model, live, merged.original)
    options.setdefault("device", KEEP_DEVICE)
    merge = prepare(index, adapters, options, live, "merge_into")
    written = {}
    for target in merge.targets():
        _check_fits(target, live)
        if not (target.copied and merge.of_base(target)):
            written[target.name] = live[target.name]
    _check_apart(written, written | dict(merge.lent))
    names = live_tensors(model, aliases=True)
    aliases = [f"{other} with {name}" for name, other in shared(written, names) if other not in written]

    def give(target: OutputTensor, tensor: Tensor) -> None:
        if target.name in written:
            merged.replace(target.name, tensor)

    with merged._alone(written, live | dict(merge.lent)):
        merged._number = next(_numbers)
        try:
            with watched(progress) as watcher:
                facts = merge.run(give, watcher)
            merged.numbers = facts.numbers
            warn_of(facts)
            if aliases:
                warnings.warn("tensors share memory with merged ones, and changed with them: "
                              f"{listed(aliases)}; clone them before the merge if they are other weights",
                              stacklevel=4)  # fmt: skip
        except BaseException:
            with suppress(DeviceFailed):  # the first error is the one to report
                merged.undo()
            raise
    return merged


def _check_fits(target: OutputTensor, live: Mapping[str, Tensor]) -> None:
    """Raise FitError for a result that the live model has no tensor for."""
    parameter = live.get(target.name)
    if parameter is None:
        what, where = "the adapter adds a tensor that the live model lacks", target.name
    elif tuple(parameter.shape) != tuple(target.shape):
        what = "the adapter resizes a tensor of the live model"
        where = f"{target.name}: {list(parameter.shape)} becomes {list(target.shape)}"
    else:
        return
    raise FitError(what, where, "merge into the model's files with `merge`, and load the result")


def _check_apart(written: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Raise InputError if a number that is written shares its memory with another one of these tensors."""
    for name, tensor in written.items():
        if repeats(tensor):
            raise InputError("values of this tensor share their memory and cannot be changed one by one", name,
                             "give the layer a tensor of its own: .contiguous()")  # fmt: skip
    if pair := next((pair for pair in shared(written, others) if pair[0] != pair[1]), None):
        raise InputError("one of these tensors is changed by a merge, and shares memory with the other, which must "
                         "have its own numbers", " and ".join(pair), "give each a copy: .clone()")  # fmt: skip


def _write(tensor: Tensor, data: Tensor) -> None:
    """Replace the numbers of a live tensor by those with these bytes."""
    with torch.inference_mode(tensor.is_inference()):  # else torch refuses to change tensors made in that mode
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def _unchanged(data: Tensor, _: Tensor) -> Tensor:
    return data


def _on_host(tensor: Tensor, _: Tensor) -> Restore:
    return partial(_unchanged, as_bytes(host(tensor)).clone())


def _on_device(tensor: Tensor, _: Tensor) -> Restore:
    return partial(_unchanged, as_bytes(tensor.detach().resolve_neg()).clone())


def _compressed(tensor: Tensor, merged: Tensor) -> Restore:
    """Keep the bits in which the original and the merged numbers differ: most numbers differ in few of them."""
    new = as_bytes(host(merged))
    different = as_bytes(host(tensor)) ^ new
    wide = different.view(-1, tensor.element_size())  # bytes of equal weight together: the upper ones are mostly zero
    return partial(_restored, zlib.compress(raw(wide.t()), ZLIB_LEVEL), zlib.crc32(raw(new)))


def _restored(compressed: bytes, checksum: int, tensor: Tensor) -> Tensor | None:
    """Return the original bytes from the merged numbers and the compressed difference; None if the numbers do not have
    this checksum."""
    merged = as_bytes(host(tensor))
    if zlib.crc32(raw(merged)) != checksum:
        return None
    different = torch.frombuffer(bytearray(zlib.decompress(compressed)), dtype=torch.uint8)
    wide = different.view(tensor.element_size(), -1).t()
    return as_bytes(wide) ^ merged


_KEEPERS: Final[Mapping[str, Callable[[Tensor, Tensor], Restore]]] = {
    "host": _on_host,
    "device": _on_device,
    "compressed": _compressed,
}
"""Value of `keep` → function that keeps a tensor's original numbers; it is given the tensor and its new numbers."""
