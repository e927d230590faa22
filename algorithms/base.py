"""What an algorithm is: a row of facts and pure functions about one kind of adapter.

A formula sees `n` layers of equal shape at once. Weights arrive flattened to `[n, out, cols]`,
where `cols` is `in` for a linear layer and `in·kh·kw` for a convolution; vectors arrive as `[n,
out, 1]`. Nothing in this package reads files or chooses, moves or casts devices and dtypes. torch
is imported inside the functions that need it, because plans are made from shapes alone and must
start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from math import isfinite, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .bounds import SEED, Bounds, outside

if TYPE_CHECKING:
    from torch import Tensor

    Indices: TypeAlias = Tensor  # integers: arrive as int64, whatever is stored; never cast to the compute dtype
    Scalar: TypeAlias = Tensor  # [n, 1, 1], one number per layer, resolved by the plan (scale, limit …)

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]


class DoesNotFit(ValueError):
    """The adapter's tensors do not fit each other or the base; the message says which and how."""


@dataclass(frozen=True)
class Loaded:
    """What a library sees of one module when it loads an adapter, for slots that it makes then and no file holds.

    Everything is on the CPU. `read(slot)` gives a slot that the base or the file holds, in the fitted shape, or with ""
    the weight [out, cols]: in fp32, in fp64 if the base stores it so. `cast(values, dtype)` gives the same numbers as a
    dtype holds them, which is named as in files, in fp64 for F64 and else in fp32.
    """

    read: Callable[[str], Tensor]
    cast: Callable[[Tensor, str], Tensor]
    shapes: Shapes
    target: Shape
    settings: Mapping[str, Any]

    @classmethod
    def of_arrays(cls, read: Callable[[str], Any], cast: Callable[[Any, str], Any], *more: Any) -> Loaded:
        """For a caller whose functions give and take arrays of numpy; `more` are shapes, target and settings."""
        import torch

        def tensor(slot: str) -> Tensor:
            return torch.from_numpy(read(slot))

        return cls(tensor, lambda values, dtype: torch.from_numpy(cast(values.numpy(), dtype)), *more)


@dataclass(frozen=True)
class Algorithm:
    """One row of the table.

    The fields of the `tensors` dataclass say what the formula needs, by annotation: `Tensor` /
    `Tensor | None` is a slot filled from the file (required / optional), `Indices` an integer slot,
    `Scalar` a number per layer, anything else a setting that is equal for the whole stack.
    """

    name: str
    tensors: type[Any]
    fitted_shapes: Callable[[Shapes, Shape], Shapes]
    """(stored shape per slot, shape of the weight) → shape per slot as the formula wants it,
    without n.

    Checks everything there is to check; raises DoesNotFit. Only reshapes: numel is kept.
    """
    delta: Callable[[Tensor, Any], Tensor]
    """(base [n, out, cols], prepared tensors) → ΔW [n, out, cols] at strength 1; inputs untouched."""
    paper: str
    scalars_from: Callable[[float | None, Shapes, Shape], Mapping[str, float]] = lambda _a, _s, _t: {}
    """(stored alpha or None, fitted shapes, weight shape) → value per `Scalar` field."""
    row_axes: Mapping[str, int] | None = None
    """Slots that hold one entry per output row, and on which axis of the fitted shape; rows of ΔW
    then need only those entries (and those rows of the base). Where an entry serves several rows,
    as that of one expert does, they are formed together. None: ΔW can only be formed whole."""
    not_sliceable_with: frozenset[str] = frozenset()
    """Optional slots, settings, and numbers where they are finite, with which it can only be formed whole all the
    same."""
    reads_base: bool = False
    """Whether ΔW depends on the values of the base."""
    shared: frozenset[str] = frozenset()
    """Required slots that a file may hold once for all modules."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Slots that no file holds: slot → the parameter of the same module whose values in the base it is, as a matrix
    [n, out, cols] (a vector [n, out, 1]). A required one must be there, an optional one is None where the base has no
    such parameter."""
    value: str = ""
    """The optional slot for the parameter's trained value, where the adapter stores that whole beside the formula's
    tensors and the formula works on it."""
    decomposes: bool = False
    """Whether it inverts, factorises or transforms, where torch knows no 16-bit floats and float32 loses
    digits: the caller hands over float64 (float32 on devices without), whatever the compute dtype."""
    prepare: Callable[[Any], Any] | None = None
    """(tensors) → what `delta` takes in their place, where only small tensors have to be inverted: the caller does
    this part in float64, and the rest, on the weight, in the compute dtype."""
    also_bias: bool = False
    """Whether the formula holds for the module's bias as well, where the base has one."""
    accumulate: Callable[[Tensor, Any, Tensor], None] | None = None
    """(acc [n, out, cols], tensors, strength [n, 1, 1]): acc += strength · ΔW in place, without
    forming ΔW. Where ΔW depends on the base, acc is the untouched base."""
    derive: Callable[[Shapes, Shape, Mapping[str, Any]], Mapping[str, Tensor]] | None = None
    """(fitted shapes, weight shape, settings) → further slots that the file does not store (seeded
    indices …), CPU tensors without n."""
    rebuild: Callable[[Loaded], Mapping[str, Tensor]] | None = None
    """What the library makes of the base when it loads the adapter → the slots `rebuilds`, CPU tensors without n, by
    the library's own steps in its own precision: singular vectors have a sign, and equal numbers an order, that no
    file tells. DoesNotFit if this base does not give what was trained on."""
    rebuilds: frozenset[str] = frozenset()
    """Optional slots that a file may lack; then `rebuild` makes all of them."""
    bounds: Mapping[str, Callable[[Shapes, Shape], Sequence[Bounds]]] = field(default_factory=dict)
    """Integer slot or setting → (fitted shapes, weight shape) → between which ends its numbers lie: one for all of
    them, or one for each entry of the slot's first axis. Every integer slot that a file may hold has its own."""
    parameter: str = "weight"
    """What its tensors change of a module, where no key tells."""
    stacked: bool = False
    """Whether it is one of all experts of a layer, whose weights [E, out, in] are one matrix to others."""
    in_out: bool = False
    """Whether its factors are those of x A B, so that A is [in, r] and the weight seen as [in, out]."""
    of_table: bool = False
    """Whether it is one of embeddings, whose weights are [vocabulary, dim] and are not turned."""
    as_stored: bool = False
    """Whether its tensors have the shape of the weight, whichever way round that is stored."""
    starts_in_base: bool = False
    """Whether its start was taken out of the weight when the layer was wrapped."""
    scale_from_config: bool = False
    """Whether its scale follows from no tensor, and is 1 in no file."""
    check: Callable[[Mapping[str, Tensor], Shapes, Shape], None] | None = None
    """(integer slots as int64 on the CPU, fitted shapes, weight shape): raises DoesNotFit where integers inside of
    their bounds contradict each other or the shapes, which `fitted_shapes` cannot see."""
    check_settings: Callable[[Mapping[str, Any], Shapes, Shape], None] | None = None
    """(settings given by the adapter's configuration, fitted shapes, weight shape): raises
    DoesNotFit for those that cannot be merged or do not belong to these shapes."""

    def check_integers(self, stored: Mapping[str, Tensor], shapes: Shapes, target: Shape) -> None:
        """Raise DoesNotFit for integer slots (int64 on the CPU, in the fitted shapes) that a formula would read or
        write outside of the weight with, or that make no sense."""
        for slot, found in stored.items():
            left = outside(found, self.bounds[slot](shapes, target))
            expect(holds=left is None, otherwise=f"{slot} has numbers outside of {left}")
        if self.check is not None:
            self.check(stored, shapes, target)

    def check_given(self, settings: Mapping[str, Any], shapes: Shapes, target: Shape) -> None:
        """Raise DoesNotFit for settings that cannot be merged or do not belong to these shapes."""
        for name in self.bounds.keys() & settings.keys():
            (allowed,) = self.bounds[name](shapes, target)
            holds = allowed.number(settings[name]) is not None
            expect(holds=holds, otherwise=f"{name} is no whole number from {allowed}")
        if self.check_settings is not None:
            self.check_settings(settings, shapes, target)

    def prepared(self, tensors: Any) -> Any:
        """Return the tensors as `delta` takes them."""
        return tensors if self.prepare is None else self.prepare(tensors)

    def derived(self, shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the slots that `derive` gives, if the file lacks any."""
        if self.derive is None or all(slot in shapes for slot in self.slots):
            return {}
        return self.derive(shapes, target, settings)

    def is_rebuilt(self, shapes: Shapes) -> bool:
        """Return whether a file with slots of these shapes lacks some that `rebuild` gives."""
        return not self.rebuilds <= shapes.keys()

    def rebuilt(self, loaded: Loaded) -> Mapping[str, Tensor]:
        """Return the slots that `rebuild` gives, if the file lacks any."""
        return self.rebuild(loaded) if self.rebuild is not None and self.is_rebuilt(loaded.shapes) else {}

    @property
    def rank(self) -> Callable[[Shapes], int] | None:
        """(fitted shapes) → the rank r of the tensors, where α / r is their scale."""
        return self.scalars_from.rank if isinstance(self.scalars_from, AlphaOverRank) else None

    @cached_property
    def slots(self) -> Mapping[str, bool]:
        """Slot → whether it is required, read off the dataclass."""
        kinds = {"Tensor": True, "Indices": True, "Tensor | None": False, "Indices | None": False}
        return MappingProxyType({f.name: kinds[str(f.type)] for f in fields(self.tensors) if str(f.type) in kinds})

    @cached_property
    def integer_slots(self) -> frozenset[str]:
        """Slots whose tensors stay integers."""
        return frozenset(f.name for f in fields(self.tensors) if str(f.type).startswith("Indices"))

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Fields that hold one number per layer."""
        return frozenset(f.name for f in fields(self.tensors) if str(f.type) == "Scalar")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Setting → default (MISSING where the adapter's configuration must give it)."""
        taken = set(self.slots) | self.scalars
        return MappingProxyType({f.name: f.default for f in fields(self.tensors) if f.name not in taken})

    def missing_settings(self, given: Mapping[str, Any]) -> list[str]:
        """Settings without a default that were not given."""
        return [name for name, default in self.settings.items() if default is MISSING and name not in given]


SEEDED: Final[Mapping[str, Callable[[Shapes, Shape], Sequence[Bounds]]]] = MappingProxyType(
    {"seed": lambda _shapes, _target: [SEED]}
)
"""The bounds of rows whose only number is the seed of what they draw."""


def flat(shape: Shape) -> tuple[int, int]:
    """(rows, cols) of a weight: axis 0 kept, the rest flattened; vectors are columns."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def same_inputs(stored: Shape, target: Shape) -> bool:
    """Return whether two input sides (all axes but the first) mean the same: equal but for axes of length
    one, or one of them flattened. A 3×5 kernel is no 5×3 kernel, though both have 15 columns."""
    a, b = (tuple(size for size in side if size != 1) for side in (stored, target))
    return a == b or (prod(a) == prod(b) and min(len(a), len(b)) <= 1)


def length(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """‖values‖₂ over these axes, which stay with length 1; NaN where it overflows, because what is divided by an
    infinite length becomes 0, and nobody sees it."""
    import torch

    found: Tensor = torch.linalg.vector_norm(values, dim=axes, keepdim=True)
    return found.masked_fill_(found.isinf(), torch.nan)


def tucker(core: Tensor, inner: Tensor) -> Tensor:
    """Σ_j core[i, j, k] inner[j, c] as [n, i, c·k], for core [n, i, j, k] and inner [n, j, c];
    without einsum's choice of order, the small side first. The caller multiplies the outer factor
    from the left."""
    n, rank, inner_rank, kernel = core.shape
    rows = core.permute(0, 1, 3, 2).reshape(n, rank * kernel, inner_rank)
    return (rows @ inner).reshape(n, rank, kernel, -1).transpose(2, 3).reshape(n, rank, -1)


def expect(*, holds: bool, otherwise: str) -> None:
    """Raise DoesNotFit with that message unless the condition holds."""
    if not holds:
        raise DoesNotFit(otherwise)


def expect_shapes(shapes: Shapes, want: Shapes) -> Shapes:
    """Return the wanted shapes; DoesNotFit where a stored one is another."""
    for slot, shape in want.items():
        expect(holds=shapes[slot] == shape, otherwise=f"{slot} is {list(shapes[slot])}, not {list(shape)}")
    return want


def extra_pair(shapes: Shapes, target: Shape) -> dict[str, Shape]:
    """Return the shapes of up (out, r) and down (r, cols) where the file has such a pair beside its other tensors."""
    if "down" not in shapes and "up" not in shapes:
        return {}
    (out, cols), down, up = flat(target), shapes.get("down", ()), shapes.get("up", ())
    expect(
        holds=len(down) == 2 and down[1] == cols and up == (out, down[0]),
        otherwise=f"up is {list(up)}, down {list(down)}, the weight {out}×{cols}",
    )
    return {"down": down, "up": up}


@dataclass(frozen=True)
class AlphaOverRank:
    """scale = α / r; 1 without an alpha, and for α = 0, which no trainer writes: they take it for "α = r"."""

    rank: Callable[[Shapes], int]
    """(fitted shapes) → r; 0: only a configuration tells the scale."""

    def __call__(self, alpha: float | None, shapes: Shapes, _: Shape) -> Mapping[str, float]:
        """{"scale": …}; DoesNotFit for NaN and infinity."""
        expect(holds=alpha is None or isfinite(alpha), otherwise=f"alpha is {alpha}")
        r = self.rank(shapes)
        return {"scale": alpha / r if alpha and r else 1.0}


def alpha_over(slot: str, axis: int = 0) -> AlphaOverRank:
    """α / r, with r read off a fitted slot."""
    return AlphaOverRank(lambda shapes: shapes[slot][axis])


def alpha_by(rank: Callable[[Shapes], int] = lambda _: 0) -> AlphaOverRank:
    """α / r, with r computed from the fitted shapes."""
    return AlphaOverRank(rank)
