"""`merge_into`: merges adapters into a live model, in place, and restores its exact bytes on request.

The tensors of a live model or pipeline have the names that its saved files would have.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Buffer, Module, Parameter
from typing_extensions import Self, Unpack

from ..boundary import public
from ..engine.tensor_moves import host
from ..engine.tensors import as_bytes, raw
from ..engine.torch_state import undisturbed
from ..errors import DeviceFailed, FitError, InputError, UsageError
from ..files.checkpoint import Index
from ..files.formats.unread import OF_OTHERS
from ..planning.plan import OutputTensor
from ..progress import Progress, watched
from ..text import Shown, listed, plural, with_article
from ..typed_options import PythonOptions
from .merge import KEEP_DEVICE, MemoryAdapters, prepare, warn_of
from .state_index import codes, index_of, repeats, shared

TENSOR_CLASSES: Final = (Tensor, Parameter, Buffer)
"""Classes of tensors whose bytes are the values; libraries of quantisation and sharding have classes of their own."""

FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)

PLAIN_MODEL: Final = "give the unquantised model, or merge into its files with `merge`"


class LivePipeline(Protocol):
    """A diffusers pipeline, or another object with named parts, some of which are torch modules."""

    @property
    def components(self) -> Mapping[str, object]:
        """Name → part, such as "unet", "text_encoder", "scheduler"."""


Original: TypeAlias = Callable[[str], Tensor]
"""Function that returns the tensor of a name with the values that it had before the merge."""


def live_model(model: object, tensors: dict[str, Tensor], original: Original) -> Index:
    """Return a torch module, or the modules of a diffusers pipeline, as a checkpoint; adds its tensors to `tensors`.

    A tensor that several layers share has the name of the first one, as in files. Raises UsageError for other objects,
    and InputError for tensors that cannot be changed in place.
    """
    label = type(model).__name__
    if isinstance(model, Module):
        tensors.update(_tensors(model, label))
        return replace(index_of(label, tensors, original), config=_config(model))
    modules = _modules(model)
    if not modules:
        fix = "give a torch.nn.Module, a diffusers pipeline, or a model of transformers"
        fix = "for a state dict use merge_state_dict()" if isinstance(model, Mapping) else fix
        fix = "for a file use merge()" if isinstance(model, str | Path) else fix
        raise UsageError(f"{label} has no weights that can be changed", "merge_into", fix)
    components = {}
    for part, module in modules.items():
        part_tensors = _tensors(module, f"{label}: {part}")
        tensors.update({f"{part}.{name}": tensor for name, tensor in part_tensors.items()})
        components[part] = replace(index_of(label, part_tensors), config=_config(module))
    return replace(index_of(label, tensors, original), config={"_class_name": label}, components=components)


def live_tensors(model: object, *, aliases: bool = False) -> dict[str, Tensor]:
    """Return the tensors that a model or pipeline has now, under the names that `live_model` gives them.

    `aliases`: also under all other names that they have.
    """
    if isinstance(model, Module):
        return _all(model, aliases=aliases)
    return {f"{part}.{name}": tensor for part, module in _modules(model).items()
            for name, tensor in _all(module, aliases=aliases).items()}  # fmt: skip


def _modules(pipeline: object) -> dict[str, Module]:
    parts = getattr(pipeline, "components", None)
    return {k: v for k, v in parts.items() if isinstance(v, Module)} if isinstance(parts, Mapping) else {}


def _all(module: Module, *, aliases: bool = False) -> dict[str, Tensor]:
    tensors = module.named_parameters, module.named_buffers
    return {name: tensor for named in tensors for name, tensor in named(remove_duplicate=not aliases)}


def _tensors(module: Module, where: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name; InputError for classes that are not plain values."""
    tensors = _all(module)
    for name, tensor in tensors.items():
        if not _is_plain(tensor) or codes(tensor):
            raise InputError(
                f"{with_article(type(tensor).__name__)} cannot be changed in place", f"{where}: {name}", PLAIN_MODEL
            )
    if any(tensor.dtype in FP8_DTYPES for tensor in tensors.values()):
        _expect_no_scales(module, where)
    return tensors


def _expect_no_scales(module: Module, where: str) -> None:
    """Raise InputError if a layer multiplies its fp8 codes by a scale that is an attribute, no parameter or buffer:
    those are recognised by their names, as in files."""
    for path, layer in module.named_modules():
        if any(p.dtype in FP8_DTYPES for p in layer.parameters(recurse=False)):
            for name, value in vars(layer).items():
                scale = value is not None and isinstance(value, Tensor | float) and "scale" in name
                if scale and not OF_OTHERS.search(name) and not _is_one(value):
                    raise InputError("a weight in fp8 has a scale of its own", f"{where}: {path}.{name}", PLAIN_MODEL)


def _is_one(scale: Tensor | float) -> bool:
    return bool((scale == 1).all()) if isinstance(scale, Tensor) else scale == 1


def _is_plain(tensor: Tensor) -> bool:
    try:
        return type(tensor) in TENSOR_CLASSES or type(tensor.data) in TENSOR_CLASSES
    except RuntimeError:  # of a class that refuses what it does not know
        return False


def _config(module: Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers or diffusers, as its config.json has it."""
    config = getattr(module, "config", None)
    if config is None:
        return {"architectures": [type(module).__name__]}
    value = config.to_dict() if hasattr(config, "to_dict") else config
    entries = dict(value) if isinstance(value, Mapping) else {}
    return {**entries, "architectures": entries.get("architectures") or [type(module).__name__]}


Keep: TypeAlias = Literal["host", "device", "compressed"]

Restore: TypeAlias = Callable[[Tensor], Tensor | None]
"""Function of a tensor with merged values that returns its original bytes, flat; None if it needs the merged values
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
        """The names of the tensors that hold merged values; () after `undo`."""
        return tuple(self._originals)

    @public
    def undo(self) -> None:
        """Restore the exact bytes of every changed tensor. A second call does nothing.

        Merges into the same memory, of one model or of several, are undone in reverse order: the last one first.

        Raises:
            UsageError: If a later merge into the memory of a changed tensor is not undone, a tensor has another dtype
                or shape now, or another merge uses its memory now: then nothing is restored. Also for values that were
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
        """Write merged values into a tensor of the model, and keep its original bytes.

        Parameters:
            name: Of the tensor, as in the model's state dict.
            merged: Its new values, of the same shape and dtype.
        """
        tensor = self._tensors[name]
        old = _KEEPERS[self._keep](tensor, merged)
        self._kinds[name] = tensor.dtype, tensor.shape
        self._originals[name] = _on_host(tensor, merged) if self._keep == "compressed" else old  # until that is written
        _write(tensor, as_bytes(merged))
        self._originals[name] = old

    def original(self, name: str) -> Tensor:
        """Return a tensor of the model with its original values.

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
        keep: Where the original values of changed tensors are kept for `undo`: "host", "device" (that of each tensor),
            or "compressed" (on the host, as the compressed difference from the merged values, which must then still
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
    # Step 1: the model as a checkpoint, matched with the adapters.
    live: dict[str, Tensor] = {}
    merged = MergedModel(model, live, keep)
    index = live_model(model, live, merged.original)
    options.setdefault("device", KEEP_DEVICE)
    merge = prepare(index, adapters, options, live, "merge_into")
    # Step 2: the tensors that are written, whose memory no other one may share.
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

    # Step 3: the merge, which is taken back if it fails.
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
    """Replace the values of a live tensor by those with these bytes."""
    with torch.inference_mode(tensor.is_inference()):  # else torch refuses to change tensors made in that mode
        tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def _unchanged(data: Tensor, _: Tensor) -> Tensor:
    return data


def _on_host(tensor: Tensor, _: Tensor) -> Restore:
    return partial(_unchanged, as_bytes(host(tensor)).clone())


def _on_device(tensor: Tensor, _: Tensor) -> Restore:
    return partial(_unchanged, as_bytes(tensor.detach().resolve_neg()).clone())


def _compressed(tensor: Tensor, merged: Tensor) -> Restore:
    """Keep the bits in which the original and the merged values differ: most values differ in few of them."""
    new = as_bytes(host(merged))
    different = as_bytes(host(tensor)) ^ new
    wide = different.view(-1, tensor.element_size())  # bytes of equal weight together: the upper ones are mostly zero
    return partial(_restored, zlib.compress(raw(wide.t()), ZLIB_LEVEL), zlib.crc32(raw(new)))


def _restored(compressed: bytes, checksum: int, tensor: Tensor) -> Tensor | None:
    """Return the original bytes from the merged values and the compressed difference; None if the values do not have
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
"""Value of `keep` → function that keeps a tensor's original values; it is given the tensor and its new values."""
