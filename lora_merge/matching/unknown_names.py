"""Adapters whose names are in no table: one change of all module names, pairs of factors of unknown names. No torch.

**Names of modules** (`common_change`). Trainers write an unknown word before all names, a level that the base lacks, or
another mark between the levels. Such a change is used only if, with it, all unmatched modules match weights by
name and shape, and no other change leads to other weights. A known prefix that names a network stays: what is for a
text encoder is not looked for in the denoiser.

**Endings** (`factor_pairs`). `layer.x` and `layer.y` are a LoRA if their product has the shape of the layer's weight:
B A, or the transpose of A B as in programs that compute x A B. If a weight is square both are possible, and the other
layers of the file decide whose tensors have the same last names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from ..adapters.modules import Module, two_of_a_kind
from ..adapters.suffixes import split_row_part
from ..algorithms.lora import LORA
from ..algorithms.lora_transposed import LORA_TRANSPOSED
from ..dtypes import StoredTensor
from ..errors import FitError, MergeError
from ..models.components import WITHIN
from ..models.names import Names
from ..models.prefixes import innermost
from ..models.weights import WeightView
from ..text import NUMBER, Note
from .formula import takes
from .orientation import known_types

SEPARATORS: Final = ("___lorahyphen___", "__", "--", "/", "::", ":")
"""Marks that replace the dots of a path. Source: https://github.com/meituan-longcat/LongCat-Video
longcat_video/modules/lora_utils.py; the others by analogy."""

MOST_NAME_PATTERNS: Final = 256
"""The most patterns of names that are tried; a mixture of experts has some thirty."""

MOST_TRIED_LEVELS: Final = 64
"""The most levels of the base's names that are tried as the one an adapter lacks."""

_BOUNDARY: Final = re.compile(r"[._]+")

UNCLEAR: Final = "two factors of each layer have no known names, and all their layers are square"

RENAME: Final = (
    "rename them: NAME.lora_B.weight and NAME.lora_A.weight if the change is the first times the second, NAME.lora.A "
    "and NAME.lora.B if it is the transpose of that"
)


class CommonChange(NamedTuple):
    """A change of all names of an adapter, behind the prefix that names their network."""

    take: str = ""  # the beginning that is taken off
    put: str = ""  # the level of the base that is put in its place
    separator: str = ""  # the mark between levels that is another one in the base's names
    mark: str = ""  # that one
    ending: str = ""  # marks at the end that are taken off

    def __call__(self, name: str) -> str:
        """Return a module's name with the change; the name itself if the change is not for it."""
        prefix, body = _parts(self._spelled(name))
        return prefix + self.put + body[len(self.take) :] if body.startswith(self.take) else name

    def _spelled(self, name: str) -> str:
        """Return a name with the base's marks between its levels, without marks at its end."""
        name = name.replace(self.separator, self.mark) if self.separator else name
        return name.rstrip(self.ending) if self.ending else name

    @property
    def note(self) -> Note:
        """What the change is, for the user."""
        steps = (
            f"with {self.mark!r} for {self.separator!r}" if self.separator else "",
            f"without {self.ending!r} at the end" if self.ending else "",
            f"without {self.take!r} at the beginning" if self.take else "",
            f"with {self.put!r} before them" if self.put else "",
        )
        return Note(f"names of the adapter match the base {' and '.join(filter(None, steps))}")


def common_change(
    names: Names, modules: Sequence[Sequence[Module]], called: Callable[[Module], str]
) -> CommonChange | None:
    """Return the change with which all of these modules match weights of the base by name and shape.

    None if no change does that, or if two changes lead to different weights. `modules`: the unmatched ones, in
    groups of names that differ only in numbers. `called`: the name under which a module is looked for.
    """
    if len(modules) > MOST_NAME_PATTERNS:
        return None
    # The simplest changes that lead to weights; none if several lead to different ones.
    samples = {called(some[0]): some[0] for some in modules}
    sizes = Counter(NUMBER.sub("#", key) for key in names.shapes)
    for changes in _by_simplicity([*samples], names):
        changes_by_views: dict[tuple[WeightView, ...], CommonChange] = {}
        for change in changes:
            views = _views(change, samples, names)
            if views and (not _moves_levels(change) or _covers(views, modules, sizes)):
                changes_by_views.setdefault(views, change)
        if changes_by_views:
            return next(iter(changes_by_views.values())) if len(changes_by_views) == 1 else None
    return None


def _parts(name: str) -> tuple[str, str]:
    """Return (prefix that names a network, rest); ("", name) for a name without such a prefix."""
    network, body = innermost(name)
    return ("", name) if network == "any" else (name.removesuffix(body), body)


def _by_simplicity(samples: Sequence[str], names: Names) -> Iterator[list[CommonChange]]:
    """Yield the changes to try, the simplest first: another spelling, less at the beginning, a level more."""
    ends = {name[len(name.rstrip("._")) :] for name in samples}
    ending = ends.pop() if len(ends) == 1 else ""
    marks = [("", ""), *((s, ".") for s in SEPARATORS), (".", "_")]
    spellings = [CommonChange("", "", *pair, ending) for pair in marks if all(pair[0] in n for n in samples)]
    yield [change for change in spellings if any(change)]
    bodies = {change: [_parts(change(name))[1] for name in samples] for change in spellings}
    cuts = {change: [*_beginnings(some)] for change, some in bodies.items()}
    yield [change._replace(take=cut) for change in spellings for cut in cuts[change]]
    levels = _levels(names)
    yield [
        change._replace(take=cut, put=level)
        for change in spellings
        for cut in ("", *(c for c in cuts[change] if innermost(c + "#") == ("any", "#")))
        for level in levels
    ]


def _beginnings(bodies: Sequence[str]) -> Iterator[str]:
    """Yield the beginnings, up to a dot or an underscore, that all names share."""
    same = takewhile(lambda letters: len({*letters}) == 1, zip(*bodies, strict=False))
    shared = "".join(letters[0] for letters in same)
    cuts = (shared[: m.end()] for m in _BOUNDARY.finditer(shared) if m.end() < min(map(len, bodies)))
    yield from (cut for cut in cuts if not NUMBER.search(cut) and not cut.replace(".", "_").startswith(_heads()))


@cache
def _heads() -> tuple[str, ...]:
    """Return the first levels of transformers models with a head, flat, each of which names one kind of model.

    If the base is of this kind, its names are known without the level (models/components.py); else it is another.
    """
    levels = {kind.replace("-", "_") for kind in known_types()} | {level.removesuffix(".") for level in WITHIN.values()}
    return tuple(f"{level}_" for level in sorted(levels))


def _levels(names: Names) -> list[str]:
    """Return the first levels of the base's names, and the first two, that hold several tensors."""
    bodies = (body.split(".")[:3] for part in names.parts for body in part.keys)
    counts = Counter(".".join(levels[:n]) + "." for levels in bodies for n in range(1, len(levels)))
    common = [level for level, count in counts.items() if count > 1 and not NUMBER.search(level.rstrip("."))]
    return common if len(common) <= MOST_TRIED_LEVELS else []


def _views(change: CommonChange, samples: Mapping[str, Module], names: Names) -> tuple[WeightView, ...]:
    """Return the weights that modules match with a change, by name and shape; () unless all of them match."""
    views = []
    for name, module in samples.items():
        view = names.only(change(name), module.parameter)
        if view is None or not (_fits(module, view) or split_row_part(module.name)[1] is not None):
            return ()
        views.append(view)
    return tuple(views)


def _fits(module: Module, view: WeightView) -> bool:
    """Return whether the shapes of a module's tensors are those of some formula on a weight."""
    return any(takes(formula, module, view) for formula in module.complete)


def _moves_levels(change: CommonChange) -> bool:
    """Return whether a change takes off or puts on a level, which may name another network."""
    return bool(change.put) or "." in (*change.take, change.separator)


def _covers(views: Sequence[WeightView], modules: Sequence[Sequence[Module]], sizes: Mapping[str, int]) -> bool:
    """Return whether the modules of some pattern are as many as the weights of the base that they match.

    Another network's layers seldom have the number of these; a trainer that changes all layers writes all of them.
    """
    return any(
        len({m.name for m in some}) >= sizes.get(NUMBER.sub("#", view.row_slices[0].key), 1)
        for view, some in zip(views, modules, strict=True)
    )


def factor_pairs(names: Names, strange: Sequence[StoredTensor], path: Path) -> tuple[list[Module], list[StoredTensor]]:
    """Return the modules that such pairs are, and the tensors that are left; FitError if nothing shows which factor
    reads the inputs."""
    factors: dict[str, tuple[StoredTensor, StoredTensor, tuple[bool, bool]]] = {}
    for left, right in two_of_a_kind(strange):
        shapes = ((module, _matrix_shape(names, module)) for module in _above(left.name, right.name))
        module, weight = next(((m, w) for m, w in shapes if w is not None), ("", None))
        product = left.shape[0], right.shape[1]
        if weight is not None and product in (weight, weight[::-1]):
            factors[module] = left, right, (product == weight, product == weight[::-1])
    known = {(_leaf(m, a), _leaf(m, b)): fits for m, (a, b, fits) in factors.items() if not all(fits)}
    modules = []
    for name, (left, right, fits) in factors.items():
        upright, turned = known.get((_leaf(name, left), _leaf(name, right)), fits)
        if upright and turned:
            raise FitError(UNCLEAR, f"{path}: {left.name} and {right.name}", RENAME)
        slots = {"up": left, "down": right} if upright else {"down": left, "up": right}
        row = LORA if upright else LORA_TRANSPOSED
        modules.append(Module(name, "weight", slots, {}, (row.name,)))
    used = {info.name for module in modules for info in module.tensors}
    return modules, [info for info in strange if info.name not in used]


def _matrix_shape(names: Names, module: str) -> tuple[int, ...] | None:
    try:
        view = names.find(module)
    except MergeError:
        return None
    return view.shape if view is not None and len(view.shape) == 2 else None


def _above(first: str, second: str) -> Iterator[str]:
    """Yield the paths that two names share, the longest first."""
    levels = takewhile(lambda both: both[0] == both[1], zip(first.split("."), second.split("."), strict=False))
    shared = [level for level, _ in levels]
    yield from (".".join(shared[:n]) for n in range(len(shared), 0, -1))


def _leaf(module: str, info: StoredTensor) -> str:
    return info.name[len(module) :]
