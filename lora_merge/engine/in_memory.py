"""Merging and deltas in memory: the same plan and the same fold, on tensors that the caller holds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..adapters.file import AdapterFile, FileValues, Module, group
from ..adapters.peft.rules import rules
from ..algorithms import ALGORITHMS, flat
from ..arguments import a_list, unlike
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import COMPUTE_DTYPES
from ..errors import InputError, TooLarge, UsageError
from ..files.checkpoint import Index, open_checkpoint
from ..job import Adapter, expand, is_pair, make_job
from ..matching.choose import Patcher
from ..matching.orientation import Base, Place
from ..matching.patch import PatchPart
from ..models.names import Names, names
from ..models.tied_weights import tied
from ..models.weights import Weight, whole
from ..planning.make_plan import match, outputs
from ..planning.plan import OutputTensor, weights
from ..text import listed
from .blocks import BlockPart, blocks
from .bounds import WINDOW_BYTES
from .devices import fallback_device, place, places, release
from .fold import change
from .fold_blocks import BlockMerger, Item
from .overflow import settle
from .placement import FILE_DTYPES, TORCH_DTYPES, convert, finite, host, stage
from .tensors import DeviceCache, TensorCache, check_finite
from .torch_state import undisturbed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import MergeOptions

TIED: Final[Mapping[str, Any]] = {"architectures": ["ForCausalLM"], "tie_word_embeddings": True}
"""What a configuration says of a model whose head is its embeddings."""


@undisturbed()
def merge_state_dict(
    state_dict: Mapping[str, Tensor], adapters: Any, **options: Unpack[MergeOptions]
) -> dict[str, Tensor]:
    """A new state dict with the adapters merged in; the input is not changed.

    `adapters` as for `merge`; also state dicts of adapters themselves, and LoadedAdapter objects. Tensors may be
    of any mixture of dtypes and on any mixture of devices; what comes back is detached and on the CPU, in the
    dtype of the input (or `dtype`). Untouched tensors share memory with the input where they are on the CPU.
    Options as for `merge`, without those that concern files. Warns of tied entries that an adapter parts.
    """
    if wrong := sorted(options.keys() & {"base", "output"}):
        raise UsageError(f"no option is called {wrong[0]!r}", "merge_state_dict", "use `merge` for files")
    held = _Held()
    base = held.index("state dict", state_dict)
    paths, files = held.adapters(adapters)
    job = make_job("state dict", paths, "state dict", **options)
    at = places(job.device, COMPUTE_DTYPES[job.compute_dtype])
    lookup = names(base, job.map)
    base = held.tied(base, lookup)
    merged: dict[str, Tensor] = {}
    with ExitStack() as stack:
        reader = stack.enter_context(Reader([f.index for f in files if f.index.headers]))
        held.factors = TensorCache(reader, frozenset(p for f in files for p in f.index.files))
        matched = match(job, base, lookup, files, held)
        kept, saturated = DeviceCache(), Counter[str]()
        folder = BlockMerger(
            at, held.fetch, weights(base, matched), None, job.max_vram, kept,
            fallback_device=fallback_device(job.device, at), saturate=job.on_overflow == "saturate",
        )  # fmt: skip
        stack.callback(release, at)
        stack.callback(folder.leave)
        for some in _portions(target for _, target in outputs(job, base, matched)):
            merged |= _merged(some, held, folder, saturated)
            held.factors.forget()
            kept.clear()
    if saturated:
        warnings.warn(f"{sum(saturated.values())} numbers were too large for their dtype and were cut to its largest: "
                      f"{listed([f'{n} of {name}' for name, n in saturated.most_common()])}", stacklevel=3)  # fmt: skip
    parted = [tie for tie in held.ties if not torch.equal(*(merged[name] for name in tie))]
    for one, other in parted + held.head * any(m.untied for m in matched):
        warnings.warn(f"{one} and {other} were tied and now differ: load them into a model that does not tie them, "
                          "such as with tie_word_embeddings=False, or one is lost", stacklevel=3)  # fmt: skip
    return merged


def _portions(targets: Iterable[OutputTensor]) -> Iterator[list[OutputTensor]]:
    """Those that are merged at a time, as many as files have in a window: equal kinds are folded in one call."""
    some: list[OutputTensor] = []
    size = 0
    for target in targets:
        some.append(target)
        size += target.nbytes
        if size >= WINDOW_BYTES:
            yield some
            some, size = [], 0
    yield some


def _merged(
    targets: Sequence[OutputTensor], held: _Held, folder: BlockMerger, saturated: Counter[str]
) -> dict[str, Tensor]:
    """Output tensors, on the CPU; adds to tensor → how many of its numbers were cut."""
    merged, items = {}, []

    def put(name: str, base: Tensor, into: Tensor) -> None:
        source = host(base).reshape(-1)
        if not convert(source, into.view(-1)):
            saturated[name] += settle(name, source, into.view(-1), saturate=folder.saturate)

    for target in targets:
        dtype = TORCH_DTYPES[target.dtype]
        base = held.fetch(target.source)
        if not target.uses:
            merged[target.name] = host(base)
            if base.dtype != dtype:
                merged[target.name] = torch.empty(base.shape, dtype=dtype)
                put(target.name, base, merged[target.name])
            continue
        out = merged[target.name] = torch.empty(target.shape, dtype=dtype)
        for block in blocks(target):
            (first, count), low = block.stored, block.first * block.cols
            into = out.view(-1).narrow(0, low, block.elements).view(-1, block.cols)
            part = base.reshape(-1).narrow(0, first, count)
            part = part if target.weight.padded else part.view(-1, block.cols)
            if block.slices or target.weight.padded:
                items.append(Item(block, part, into))
            else:
                put(target.name, part, into)
    saturated += folder.fold(items)
    return merged


class _Held:
    """Tensors in the caller's memory, under made-up file names."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[Path, str], Tensor] = {}
        self.ties: list[tuple[str, str]] = []  # entries of the base that are one tensor
        self.head: list[tuple[str, str]] = []  # embeddings and head, if these are: the plan tells whether they stay one
        self.factors = TensorCache(Reader([]), frozenset())  # what reads those that are not here

    def index(self, name: str, tensors: Mapping[str, Tensor]) -> Index:
        """A state dict as a checkpoint; InputError for entries that are no plain tensors."""
        path, infos = Path(f"<{name}>"), {}
        if not isinstance(tensors, Mapping):
            raise unlike(tensors, name, "a table of names and tensors")
        for key, value in tensors.items():
            if not isinstance(key, str):
                raise unlike(key, f"a name in {path}", "a str")
            if not isinstance(value, Tensor) or value.dtype not in FILE_DTYPES or value.layout != torch.strided:
                raise InputError(f"a {type(value).__name__} that is no plain tensor", f"{path}: {key}", "leave it out")
            _check_values(value, f"{path}: {key}")
            dtype = FILE_DTYPES[value.dtype]
            infos[key] = StoredTensor(key, dtype, tuple(value.shape), path, 0, value.numel() * value.element_size())
            self._tensors[path, key] = value
        return Index(path, infos, {}, (path,))

    def tied(self, base: Index, lookup: Names) -> Index:
        """The base with what its configuration would say, if its head holds the values of its embeddings."""
        first: dict[tuple[Any, ...], str] = {}
        for (_, name), value in self._tensors.items():
            if name in base.tensors and value.numel():
                at = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
                if first.setdefault(at, name) != name:
                    self.ties.append((first[at], name))
        head = tied(lookup, base.tensors, TIED)
        if head is None or not head.stored or not self.same(head.info, base.tensors[head.stored]):
            return base
        self.head = [(head.info.name, head.stored)]
        self.ties = [tie for tie in self.ties if {*tie} != {*self.head[0]}]
        return replace(base, config=TIED)

    def adapters(self, given: Any) -> tuple[list[Any], list[AdapterFile]]:
        """The adapters as make_job takes them, and opened."""
        if isinstance(given, str | Path | Adapter | Mapping | LoadedAdapter) or is_pair(given):
            given = [given]
        given = a_list(given, "the list of adapters", "a path, a state dict, or a list of them,")
        refs: list[Any] = []
        files: list[AdapterFile] = []
        for number, one in enumerate(given):
            paired = isinstance(one, tuple) and len(one) == 2
            source, strength = one if paired else (one, 1.0)
            if isinstance(source, Mapping):
                files.append(group(self.index(f"adapter {number}", source)))
                ref: Any = f"adapter {number}"
            elif isinstance(source, LoadedAdapter):
                files.append(source.file)
                ref = source.path
            else:
                ref = source
                files.append(group(open_checkpoint(expand(ref.path if isinstance(ref, Adapter) else ref))))
            refs.append((ref, strength) if paired else ref)
        return refs, files

    def fetch(self, info: StoredTensor) -> Tensor:
        """The tensor where it is: in memory, on whatever device, or in a file."""
        found = self._tensors.get((info.file, info.name))
        if found is None:
            return self.factors.fetch(info)
        if info.file.name.startswith("<adapter"):
            check_finite(found, info)
        return found.detach()

    def numbers(self, info: StoredTensor) -> tuple[float, ...]:
        """All elements of a small tensor."""
        found = self._tensors.get((info.file, info.name))
        if found is None:
            return FileValues().numbers(info)
        return tuple(float(v) for v in found.detach().flatten().tolist())

    def same(self, a: StoredTensor, b: StoredTensor) -> bool:
        """Whether two tensors are equal."""
        x, y = (self._tensors.get((info.file, info.name)) for info in (a, b))
        if x is None or y is None:
            return FileValues().same(a, b)
        return (x.dtype, x.device) == (y.dtype, y.device) and torch.equal(x, y)

    def differing(self, copy: StoredTensor, own: StoredTensor) -> int:
        """How many rows of two tensors of one shape differ by more than the rounding to the copy's dtype."""
        theirs, mine = (self.fetch(info) for info in (copy, own))
        a, b = host(theirs, torch.float64), host(host(mine, theirs.dtype), torch.float64)
        return int(((a != b) & ~(a.isnan() & b.isnan())).reshape(len(a), -1).any(1).sum())

    def zero_outside(self, info: StoredTensor, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
        """Whether these rows of a tensor, seen as a matrix, have nothing but zeros outside of these columns."""
        matrix = self.fetch(info).reshape(info.shape[0] if info.shape else 1, -1)[slice(*rows)]
        left, right = host(matrix[:, : columns[0]], torch.float32), host(matrix[:, columns[1] :], torch.float32)
        return not (left.any() or right.any())


class LoadedAdapter:
    """An adapter file, opened: its modules, and ΔW of each on a given weight. Safe from several threads."""

    def __init__(self, path: str | Path) -> None:
        self.path = expand(path)
        self.file: AdapterFile = group(open_checkpoint(self.path))
        self._rules = rules(self.file.index.config, str(self.path), self.file.index.metadata)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that it changes, as the file spells them."""
        return tuple(dict.fromkeys(m.name for m in self.file.modules))

    def algorithm(self, name: str) -> str:
        """The row of ALGORITHMS that a module's tensors are."""
        module = self._module(name)
        complete = module.complete
        chosen = self._rules.of(name).algorithm(name, complete) or next(iter(complete), None)
        if chosen is None:
            raise InputError("the module is incomplete", f"{self.path}: {name}", "export the adapter again")
        return chosen

    @undisturbed()
    def delta(self, name: str, base_weight: Tensor, *, fan_in_fan_out: bool | None = None) -> Tensor:
        """F(W) − W at strength 1 for one module: fp32, on the CPU, in the base weight's shape.

        Which way round a weight is that a PEFT adapter changes, [out, in] or [in, out], its shape and its name tell, as
        in a merge into a base that has nothing but this weight; ShapeMismatch where they contradict the configuration.
        State `fan_in_fan_out` then, and for methods whose tensors fit any shape (FourierFT, WaveFT) of a Conv1D.
        """
        if not isinstance(base_weight, Tensor):
            raise unlike(base_weight, "the base's weight", "a tensor")
        _check_values(base_weight, "the base's weight")
        module, shape = self._module(name), tuple(base_weight.shape)
        rows, cols = flat(shape)
        view = whole("weight", shape)
        patcher = Patcher(0, self.file, self._rules, FileValues())
        patcher.orientation.given = fan_in_fan_out
        patcher.orientation.base = Base((), lambda _: False, lambda: [Place(module, view, None)])
        patch = patcher.patch(module, view, {"weight": view})
        at = place("cpu", "F64" if ALGORITHMS[patch.algorithm].decomposes else "F32")
        with Reader([self.file.index]) as reader, torch.no_grad():
            held = _Held()
            base = held.index("weight", {"weight": base_weight})
            held.factors = TensorCache(reader, frozenset(self.file.index.files))
            weight = Weight(shape, base.tensors["weight"])
            alone = OutputTensor("weight", "weight", "F32", weight, 0, 0)
            piece = patch.view.pieces[0]
            part = BlockPart(PatchPart(patch, piece, 0, 1.0), 0, rows, (0, piece.rows), None, alone)
            stack = BlockMerger((at,), held.fetch, {"weight": weight}).stack([part], at)
            made = change(stack, stage([base_weight.reshape(rows, cols)], at))[0]
            found = host((made.t() if piece.transposed else made).reshape(shape), torch.float32)
        if not finite(found).all() and finite(base_weight).all():
            raise TooLarge("a change is too large for fp32", f"{self.path}: {name}", "use another save of the adapter")
        return found

    def _module(self, name: str) -> Module:
        for module in self.file.modules:
            if isinstance(name, str) and module.name == name:
                return module
        raise UsageError(f"the adapter has no module {name!r}", str(self.path), "see .modules for the names")


def _check_values(tensor: Tensor, where: str) -> None:
    """InputError for a tensor that has a shape and no values."""
    if tensor.device.type == "meta":
        raise InputError("a tensor on the meta device holds no values", where, "load the model before merging")


def load_adapter(path: str | Path) -> LoadedAdapter:
    """Open an adapter file or PEFT folder; InputError if it is none."""
    return LoadedAdapter(path)
