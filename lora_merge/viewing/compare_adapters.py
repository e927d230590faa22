"""Similarity of two adapters: cosine, norms and common subspaces of ΔW, by block and by module, and the differences of
tensors that both store in place of the base's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..adapters.modules import AdapterFile, group
from ..adapters.network_settings import rules_of
from ..adapters.peft.rules import PeftRules
from ..adapters.suffixes import split_parameter
from ..adapters_out.groups import rank_of_change
from ..change_statistics import Groups
from ..disk.reader import Reader
from ..dtypes import StoredTensor
from ..engine.change_norms import Replacement, runs, values
from ..engine.module_change import NOISE_SHARE, ModuleChange
from ..engine.tensors import Fetch, TensorCache
from ..engine.torch_state import undisturbed
from ..errors import MergeError
from ..files.checkpoint import Index
from ..job import make_job
from ..models.blocks import groups
from ..models.inferred_base import Name, common_names, plain
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.make_plan import plan_job
from ..planning.plan import OutputTensor, Plan
from ..text import Note
from .adapter import model_facts, module_groups
from .compare_models import DifferenceSums, plain_sums
from .module_changes import ModuleChanges, changes, replaced_by, shape_of
from .pictures import OVERSAMPLING, evenly
from .pictures import pictures as pictured

ValueKey: TypeAlias = tuple[Name, str]
"""(network and name of a module, parameter), alike in all dialects of one layout."""

TOKENS_NEED_BASE: Final = "rows of trained tokens: name a base with --base"


class ChangeSums(NamedTuple):
    """Sums over two changes: of squares, and of products."""

    a: float = 0.0
    b: float = 0.0
    inner: float = 0.0


def compare_whole(a: AdapterFile, b: AdapterFile) -> dict[str, Any]:
    """Return how the values differ that both store: `equal`, `total`, `tensors` by A's names, `only_a`, `only_b`, and
    under `left` which tensors cannot be compared, and why."""
    left: dict[str, str] = {}
    first, other = dict(_values(a, left)), dict(_values(b, left))
    total, tensors = DifferenceSums(), dict[str, DifferenceSums]()
    with Reader([a.index, b.index]) as reader:
        for key, value in first.items():
            if (far := other.get(key)) is None:
                continue
            if value.shape != far.shape:
                left[value.name] = shape_difference(value.shape, far.shape)
                continue
            tensors[value.name] = plain_sums(value, far, reader)
            total.add(tensors[value.name])
    return {
        "equal": sum(sums.equal for sums in tensors.values()), "total": total.to_dict(),
        "tensors": {name: sums.to_dict() for name, sums in tensors.items()},
        "only_a": [value.name for key, value in first.items() if key not in other],
        "only_b": [far.name for key, far in other.items() if key not in first], "left": left,
    }  # fmt: skip


def shape_difference(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    """Return why two weights cannot be compared."""
    return f"other shapes: {list(a)} in A, {list(b)} in B"


def _values(file: AdapterFile, left: dict[str, str]) -> Iterator[tuple[ValueKey, StoredTensor]]:
    """Yield the tensors that take the place of the base's; the others come into `left`, with the reason."""
    known = rules_of(file)
    for info in file.strange:
        target = _target(info, known.of(info.name), left)
        name, parameter = split_parameter(target) if target else ("", "")
        if target:
            yield (plain(name or target), parameter), info


def _target(info: StoredTensor, known: PeftRules, left: dict[str, str]) -> str:
    """Return the name of the tensor that one takes the place of; "" for a tensor that is no such value."""
    try:
        value = known.stored_value(info.name)
    except MergeError as e:
        left[info.name] = e.what
        return ""
    if value is None:
        return info.name
    if value.kind != "value" or value.rows is not None:
        left[info.name] = TOKENS_NEED_BASE if value.kind == "value" else value.why
        return ""
    return value.target


def sums_of_changes(a: Replacement, b: Replacement, read: Fetch) -> ChangeSums:
    """Return the sums over V_A − W and V_B − W, which are read some values at a time. The shapes are equal."""
    sums = ChangeSums()
    for first, count in runs(a, 1):
        old = values(a.before, first, count, read)
        ours, other = (values(x.target.weight, first, count, read) - old for x in (a, b))
        sound = ours.isfinite() & other.isfinite()
        ours, other = ours[sound], other[sound]
        sums = ChangeSums(sums.a + float(ours @ ours), sums.b + float(other @ other), sums.inner + float(ours @ other))
    return sums


CommonSpaces: TypeAlias = tuple[Tensor, Tensor] | None
"""Orthonormal bases of a column space and a row space."""

OPPOSED: Final = -0.1
"""The cosine below which two changes fight: those of independent trainings are within a few hundredths of 0."""

NEEDS_BASE: Final = "its change depends on the weights: name a base with --base"


@dataclass
class Similarity:
    """Sums over the modules that both adapters change."""

    a: float = 0.0  # squares
    b: float = 0.0
    inner: float = 0.0
    overlaps: list[float] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)  # of one module

    def add(self, other: Similarity) -> None:
        """Add the sums of other modules."""
        self.a, self.b, self.inner = self.a + other.a, self.b + other.b, self.inner + other.inner
        self.overlaps += other.overlaps

    def to_dict(self) -> dict[str, Any]:
        """Return norms, ⟨ΔA, ΔB⟩ / (‖ΔA‖ ‖ΔB‖), and the mean overlap of the spaces; None if it is undefined."""
        both = sqrt(max(self.a, 0.0) * max(self.b, 0.0))
        return {
            "a": sqrt(max(self.a, 0.0)), "b": sqrt(max(self.b, 0.0)), "cosine": self.inner / both if both else None,
            "overlap": sum(self.overlaps) / len(self.overlaps) if self.overlaps else None,
        }  # fmt: skip


@undisturbed()
def adapter_similarity(a: Index, b: Index, base: Path | None, *, pictures: bool = False) -> dict[str, Any]:
    """Return how alike the changes of two adapters are, at strength 1: 1 for parallel ones, 0 for independent ones, −1
    for changes that cancel each other.

    Without a base, modules are paired by their names, in the words of their model if the names show it. With one, each
    adapter's changes are those of a merge into it, and one that does not fit it is refused. `pictures`: with spectrum
    and histogram of both changes.
    """
    # Step 1: the pairs of modules, or of the weights that both change.
    files = group(a), group(b)
    shown = evenly([m.name for m in files[0].modules], 2) if pictures else frozenset()
    left: dict[str, str] = {}
    if base is None:
        model = module_groups(files[0])
        pairs = _by_name(*files, model, shown)
    else:
        plans = _plans(a, b, base, left)
        model = groups(plans[0].names)
        pairs = _on_base(plans, model, pictures=pictures)
    # Step 2: the sums, in all, by block and by module.
    total, rows, table = Similarity(), dict[str, Similarity](), dict[str, Any]()
    only: dict[str, list[str]] = {"a": [], "b": []}
    for name, block, likeness in pairs:
        if isinstance(likeness, Similarity):
            total.add(likeness)
            rows.setdefault(block, Similarity()).add(likeness)
            table[name] = {"block": block} | likeness.to_dict() | likeness.pictures
        elif likeness in only:
            only[likeness].append(name)
        else:
            left[name] = likeness
    # Step 3: what is not in both, and tensors that both store in place of the base's.
    notes = []
    if base is None and only["a"] and only["b"]:
        which = "not every module" if table else "no module"
        notes.append(Note(f"{which} has the same name in both; if they use different naming schemes, give --base"))
    whole = compare_whole(*files) if base is None else {}
    left |= whole.pop("left", {})
    for side, names in only.items():
        names += whole.pop(f"only_{side}", ())
    by_block = {name: rows[name].to_dict() for name in sorted(rows, key=model.place)}
    return {
        "common": len(table), "only_a": only["a"], "only_b": only["b"], "notes": notes, "total": total.to_dict(),
        "blocks": by_block, "modules": table, "not_compared": left,
        "fight": [name for name, row in by_block.items() if row["cosine"] is not None and row["cosine"] < OPPOSED],
        **({"whole": whole} if whole.get("tensors") else {}), "identical": _identical(a, b),
        "made_for": [model_facts(file)["made_for"] for file in files],
    }  # fmt: skip


def _identical(a: Index, b: Index) -> bool:
    """Return whether two adapters have the same tensors and the same configuration."""
    if a.config != b.config or {n: (t.dtype, t.shape) for n, t in a.tensors.items()} != {
        n: (t.dtype, t.shape) for n, t in b.tensors.items()
    }:
        return False
    with Reader([a, b]) as reader:
        return all(reader.read(info) == reader.read(b.tensors[name]) for name, info in a.tensors.items())


def _by_name(
    a: AdapterFile, b: AdapterFile, model: Groups, shown: frozenset[str]
) -> Iterator[tuple[str, str, Similarity | str]]:
    """Yield (module, block, sums) of modules in both; in place of the sums "a" or "b" for those in one, or why they
    cannot be compared.

    `shown`: modules of A that get pictures.
    """
    weights = ([m for m in file.modules if m.parameter == "weight"] for file in (a, b))
    mine, theirs = common_names(*({m.name: shape_of(m) for m in some} for some in weights))
    others = {(theirs.get(m.name, plain(m.name)), m.parameter): m for m in b.modules}
    with Reader([a.index, b.index]) as reader, torch.no_grad():
        first, second = ModuleChanges(a, reader), ModuleChanges(b, reader)
        for module in a.modules:
            other = others.pop((mine.get(module.name, plain(module.name)), module.parameter), None)
            pair = None if other is None else (first.of(module), second.of(other))
            sums = "a" if pair is None else _pair(*pair, pictures=module.where in shown)
            yield module.where, model.block(module.name), sums
        yield from ((m.where, "", "b") for m in others.values())


def _pair(
    a: ModuleChange | None,
    b: ModuleChange | None,
    of: tuple[OutputTensor | None, OutputTensor | None] = (None, None),
    *,
    pictures: bool = False,
) -> Similarity | str:
    """Return the sums of two changes of one weight, or why there are none; `of`: the weights of two plans whose changes
    they are."""
    if a is None or b is None:
        return NEEDS_BASE
    if a.matrix != b.matrix:
        return shape_difference(a.matrix, b.matrix)
    first, other = a.inner(a), b.inner(b)
    known = first > 0 and other > 0  # zeros span no space
    overlaps = [*_overlap(_spaces(a, of[0]), _spaces(b, of[1]))] if known else []
    return Similarity(first, other, a.inner(b), overlaps, _both(pictured(a), pictured(b)) if pictures else {})


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pictures of two changes: kind → {"a": …, "b": …}."""
    return {kind: {"a": a.get(kind), "b": b.get(kind)} for kind in sorted({*a, *b})}


def _overlap(first: CommonSpaces, other: CommonSpaces) -> Iterator[float]:
    """Yield the mean squared cosine of the principal angles between the column spaces, and between the row spaces:
    ‖Q₁ᵀ Q₂‖² / min(r₁, r₂). Björck and Golub 1973, doi:10.1090/S0025-5718-1973-0348991-3."""
    if first is None or other is None:
        return
    for p, q in zip(first, other, strict=True):
        if count := min(p.shape[1], q.shape[1]):
            yield float((p.T @ q).square().sum()) / count


def _spaces(delta: ModuleChange, target: OutputTensor | None) -> CommonSpaces:
    """Return orthonormal bases of the column space and the row space of a change; None where it is not known to be a
    product of few columns.

    Of a whole matrix, a product with random columns, a few more than the rank, spans the same space. Halko, Martinsson
    and Tropp 2011, doi:10.1137/090771806, section 4.1.
    """
    if delta.whole is None:
        return delta.spaces()
    change = delta.dense()
    ranks = [rank_of_change(use.patch) for use in target.uses] if target is not None else []
    if not ranks or None in ranks:
        return None
    rank = min(sum(rank or 0 for rank in ranks), *change.shape)
    random = torch.Generator().manual_seed(0)
    spaces = []
    for matrix in (change, change.T):
        sketch = matrix @ torch.randn(matrix.shape[1], rank + OVERSAMPLING, generator=random)
        columns, sizes, _ = torch.linalg.svd(sketch, full_matrices=False)
        spaces.append(columns[:, sizes > NOISE_SHARE * sizes[:1]][:, :rank])
    return spaces[0], spaces[1]


def _plans(a: Index, b: Index, base: Path, left: dict[str, str]) -> list[Plan]:
    """Return the plans to merge each adapter into the base; `left` gets what matches nothing there, with the reason."""
    opened = CheckpointCache()
    plans = [plan_job(make_job(base, [index.path], base, unmatched="skip"), opened) for index in (a, b)]
    for match in (m for plan in plans for m in plan.adapters):
        left |= {**match.unused, **match.unmatched}
    return plans


def _on_base(plans: Sequence[Plan], model: Groups, *, pictures: bool) -> Iterator[tuple[str, str, Similarity | str]]:
    """Yield (tensor of the base, block, how alike the changes are); for a tensor that one adapter alone changes,
    "" as its block and then the side, "a" or "b"."""
    with Reader([p.base for p in plans[:1]] + [m.adapter.index for p in plans for m in p.adapters]) as reader:
        whole = [{r.target.name: r for r in replaced_by(plan)} for plan in plans]
        first, second = (
            {t.name: t for t in p.targets if t.uses or t.name in target_names}
            for p, target_names in zip(plans, whole, strict=True)
        )
        change_a, change_b = (changes(plan, reader) for plan in plans)
        shown = evenly([*first], 2) if pictures else frozenset()
        read = TensorCache(reader, frozenset()).read
        for name, target in first.items():
            if name not in second:
                yield name, "", "a"
                continue
            block = model.block(name)
            if target.shape != second[name].shape:
                yield name, block, shape_difference(target.shape, second[name].shape)
            elif all(name in target_names for target_names in whole):
                sums = sums_of_changes(whole[0][name], whole[1][name], read)
                yield name, block, Similarity(sums.a, sums.b, sums.inner)
            else:
                pair = _pair(change_a(target), change_b(second[name]), (target, second[name]), pictures=name in shown)
                yield name, block, pair
        yield from ((name, "", "b") for name in second if name not in first)
