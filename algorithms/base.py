"""An algorithm is a row of facts and pure functions about one kind of adapter.

A formula sees `n` layers of equal shape at once. Weights arrive flattened to `[n, out, cols]`,
where `cols` is `in` for a linear layer and `in·kh·kw` for a convolution; vectors arrive as `[n,
out, 1]`. No module of this package reads a file or changes the device or dtype of a tensor. Functions
import torch themselves, because a plan is made from shapes alone and must start fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from math import isfinite, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from .bounds import SEED, Bounds, outside

if TYPE_CHECKING:
    from torch import Tensor

    Indices: TypeAlias = Tensor  # integers: arrive as int64, whatever is stored; never cast to the compute dtype
    Scalar: TypeAlias = Tensor  # [n, 1, 1], one number per layer, resolved by the plan (scale, limit …)

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

LAYER_SLOT: Final = "layer_"
"""Prefix of the slots `layer_0`, `layer_1` …: the weights of all layers that share a basis, in order."""

ON_CPU: Final = "taken as PEFT takes them when it loads the adapter on a CPU; on other devices it may find others"

Layout = Literal["out_in", "in_out", "table", "stored", "experts"]

SEEDED: Final[Mapping[str, Callable[[Shapes, Shape], Sequence[Bounds]]]] = MappingProxyType(
    {"seed": lambda _shapes, _target: [SEED]}
)
"""The bounds of rows whose only number is the seed of their random tensors."""


class DoesNotFit(ValueError):
    """The adapter's tensors do not fit each other or the base; the message says which and how."""


@dataclass(frozen=True)
class LoadedModule:
    """The input of `rebuild`: one module as a library sees it when it loads an adapter.

    All tensors are on the CPU. `read(slot)` returns a stored slot in its fitted shape, and `read("")` the weight
    [out, cols], in fp64 if the base stores fp64, else in fp32. `cast(values, dtype)` rounds values to a dtype, named as
    in files ("BF16"), and returns them in fp64 for F64, else in fp32.
    """

    read: Callable[[str], Tensor]
    cast: Callable[[Tensor, str], Tensor]
    shapes: Shapes
    target: Shape
    settings: Mapping[str, Any]

    @classmethod
    def of_arrays(cls, read: Callable[[str], Any], cast: Callable[[Any, str], Any], *more: Any) -> LoadedModule:
        """Return a `LoadedModule` from functions on numpy arrays; `more` are shapes, target and settings."""
        import torch

        def tensor(slot: str) -> Tensor:
            return torch.from_numpy(read(slot))

        return cls(tensor, lambda values, dtype: torch.from_numpy(cast(values.numpy(), dtype)), *more)


class Factorisation(NamedTuple):
    """The two factors whose product is ΔW."""

    rank: Callable[[Shapes, Shape], int]
    """(fitted shapes, weight shape) → the number of columns of L, an upper bound of the rank of ΔW."""
    factors: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
    """(base [n, out, cols], prepared tensors) → L [n, out, R] and R [n, R, cols] with ΔW = L R at strength 1."""

    def product(self, base: Tensor, tensors: Any) -> Tensor:
        """Return ΔW [n, out, cols] = L R."""
        left, right = self.factors(base, tensors)
        return left @ right


class Rebuild(NamedTuple):
    """Slots that the training library computes from the base when it loads an adapter."""

    slots: frozenset[str]
    """Optional slots, all of which are computed if a file lacks one."""
    tensors: Callable[[LoadedModule], Mapping[str, Tensor]]
    """(LoadedModule) → these slots, CPU tensors without n. The same steps in the same precision are needed, because the
    sign of a singular vector and the order of equal values depend on them. Raises DoesNotFit if this base does not
    give the tensors of the training."""
    note: str
    """A remark for the user on a file that lacks them."""
    of_relatives: bool = False
    """Whether they depend on the weights of all layers that share a basis, in the slots `layer_0` and so on."""


@dataclass(frozen=True)
class Checks:
    """The conditions for integers and settings of a file, which are checked before a formula reads them."""

    bounds: Mapping[str, Callable[[Shapes, Shape], Sequence[Bounds]]] = field(default_factory=dict)
    """Integer slot or setting → function of (fitted shapes, weight shape) → the allowed range of its values: one range
    for all, or one for each entry of the slot's first axis. Every integer slot that a file can store has a range."""
    integers: Callable[[Mapping[str, Tensor], Shapes, Shape], None] | None = None
    """(integer slots as int64 on the CPU, fitted shapes, weight shape): raises DoesNotFit if integers within
    their bounds contradict each other or the shapes."""
    settings: Callable[[Mapping[str, Any], Shapes, Shape], None] | None = None
    """(settings from the adapter's configuration, fitted shapes, weight shape): raises DoesNotFit for
    settings that cannot be merged or do not belong to these shapes."""

    def check_integers(self, stored: Mapping[str, Tensor], shapes: Shapes, target: Shape) -> None:
        """Raise DoesNotFit for integer slots (int64 on the CPU, fitted shapes) outside their bounds, which would make
        a formula read or write outside the weight, and for integers that contradict the shapes."""
        for slot, values in stored.items():
            exceeded = outside(values, self.bounds[slot](shapes, target))
            expect(holds=exceeded is None, otherwise=f"{slot} has numbers outside of {exceeded}")
        if self.integers is not None:
            self.integers(stored, shapes, target)

    def check_settings(self, settings: Mapping[str, Any], shapes: Shapes, target: Shape) -> None:
        """Raise DoesNotFit for settings that cannot be merged or do not belong to these shapes."""
        for name in self.bounds.keys() & settings.keys():
            (allowed,) = self.bounds[name](shapes, target)
            holds = allowed.number(settings[name]) is not None
            expect(holds=holds, otherwise=f"{name} is no whole number from {allowed}")
        if self.settings is not None:
            self.settings(settings, shapes, target)


@dataclass(frozen=True)
class Bypass:
    """What LyCORIS' argument `bypass_mode` makes of a formula: it then changes the output of a layer, not its weight.

    `bypass_forward` in lycoris/modules/*.py.
    """

    with_bias: bool = False
    """Whether the bias is changed too, because the formula is applied to the whole output."""
    no_magnitude: bool = False
    """Whether DoRA's magnitude has no effect."""
    groups: Literal["same", "other", "off", "mixed"] = "same"
    """What it computes in a convolution with groups: the same as without the mode, another change, the same because
    LyCORIS turns the mode off there, or a change that mixes the outputs of different groups."""
    input_groups: Callable[[Shapes, Shape], int] = lambda _shapes, _target: 0
    """(fitted shapes, weight shape) → number of groups of inputs that the factors belong to. Only this mode can train
    factors of the inputs of several groups."""


@dataclass(frozen=True)
class Algorithm:
    """One row of the table.

    The fields of the named tuple `tensors` say what the formula needs, by annotation: `Tensor` /
    `Tensor | None` is a slot filled from the file (required / optional), `Indices` an integer slot,
    `Scalar` a number per layer, anything else a setting that is equal for the whole stack.
    """

    name: str
    tensors: type[Any]
    fitted_shapes: Callable[[Shapes, Shape], Shapes]
    """(stored shape of each slot, shape of the weight) → shape of each slot as the formula reads it,
    without n; same number of elements.

    Raises DoesNotFit for every combination of shapes that `delta` cannot compute.
    """
    delta: Callable[[Tensor, Any], Tensor]
    """(base [n, out, cols], prepared tensors) → ΔW [n, out, cols] at strength 1; inputs untouched."""
    paper: str
    scalars_from: Callable[[float | None, Shapes, Shape], Mapping[str, float]] = lambda _a, _s, _t: {}
    """(stored alpha or None, fitted shapes, weight shape) → value per `Scalar` field."""
    row_axes: Mapping[str, int] | None = None
    """Slot with one entry per output row → the axis of its fitted shape that counts the rows. Some rows
    of ΔW then need only their own entries, and their own rows of the base. Rows that share an entry,
    as those of one expert do, are computed together. None: ΔW can only be computed whole."""
    not_sliceable_with: frozenset[str] = frozenset()
    """Names of optional slots, settings and scalars. If such a slot is stored, such a setting is true or such a
    scalar is finite, ΔW can only be computed whole, despite `row_axes`."""
    reads_base: bool = False
    """Whether ΔW depends on the values of the base."""
    shared: frozenset[str] = frozenset()
    """Required slots that a file may hold once for all modules."""
    base_slots: Mapping[str, str] = field(default_factory=dict)
    """Slot that no file stores → parameter of the same module. The slot gets the base's values of that parameter,
    [n, out, cols], or [n, out, 1] for a vector. A required slot needs the parameter; an optional slot is None if the
    base does not have it."""
    value: str = ""
    """The optional slot for the trained value of the parameter, where an adapter stores that value with the tensors
    of the formula, and the formula changes the trained value instead of the base's."""
    decomposes: bool = False
    """Whether the formula inverts, factorises or transforms a weight. torch cannot do that in 16-bit floats, and
    float32 loses digits, so the caller passes float64 (float32 on devices without), whatever the compute dtype."""
    prepare: Callable[[Any], Any] | None = None
    """(tensors) → the argument that `delta` takes in their place, for formulas that invert only small tensors: the
    caller runs `prepare` in float64 and `delta` in the compute dtype."""
    also_bias: bool = False
    """Whether the formula also changes the bias of the module, where the base has one."""
    accumulate: Callable[[Tensor, Any, Tensor], None] | None = None
    """(acc [n, out, cols], tensors, strength [n, 1, 1]): adds strength · ΔW to acc in place, without
    storing ΔW. If ΔW depends on the base, acc is the untouched base."""
    low_rank: Factorisation | None = None
    """The factors of ΔW. None: ΔW has no factors that are smaller than itself."""
    weight_shape: Callable[[Shapes], Shape | None] | None = None
    """(stored shape of each slot) → shape of the weight; None if the slots do not show it. Ask `shown_shape`."""
    derive: Callable[[Shapes, Shape, Mapping[str, Any]], Mapping[str, Tensor]] | None = None
    """(fitted shapes, weight shape, settings) → slots that the file does not store, such as indices drawn
    from a seed; CPU tensors without n."""
    rebuild: Rebuild | None = None
    """The slots that follow from the base if a file lacks them."""
    parameter: str = "weight"
    """The parameter of the module that the tensors change, where their keys do not name it."""
    stores: Literal["", "factors", "change"] = ""
    """What `delta` does not compute but finds in the slots: two factors up to the scale, or ΔW."""
    layout: Layout = "out_in"
    """The weight that the tensors are factors of: `out_in` [out, in]; `in_out` the layer computes x A B, so that A is
    [in, r] and ΔW is the transpose of A B; `table` an embedding [vocabulary, dim], which is never transposed; `stored`
    the tensors have the shape in which the weight is stored, [out, in] or [in, out]; `experts` one module changes all
    experts of a layer, [E, out, in]."""
    without_start: str = ""
    """For trainers that subtract the initial product of the factors from the weight before training: the row for the
    same factors on a weight from which it is subtracted already. "" for all other formulas."""
    scale_from_config: bool = False
    """Whether only the adapter's configuration gives the scale."""
    checks: Checks = field(default_factory=Checks)
    part_of_lora: bool = False
    """Whether it is a part of the LoRA of the same module: its scale is that of the module's factors, and PEFT adds it
    to a value of the parameter in the same file."""
    in_peft: Literal["method", "any", "never"] = "method"
    """The PEFT files that hold its tensors: those of the methods that name the row, those of any method, or none,
    though another trainer spells the tensors as PEFT does."""
    bypass: Bypass = field(default_factory=Bypass)
    scale_words: frozenset[str] = frozenset()
    """Words of a trainer's metadata with which the same tensors were trained at another scale (adapters/kohya_args)."""
    alpha_as_limit: tuple[str, float] | None = None
    """(beginning of a module's name, α): together the sign of a trainer whose α is the limit of the norm itself."""
    kernel_note: str = ""
    """A remark for the user on the formula for a weight with a kernel."""

    def prepared(self, tensors: Any) -> Any:
        """Return the second argument of `delta` for these tensors."""
        return tensors if self.prepare is None else self.prepare(tensors)

    def derived(self, shapes: Shapes, target: Shape, settings: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Return the slots that `derive` computes, or nothing if the file stores all slots."""
        if self.derive is None or all(slot in shapes for slot in self.slots):
            return {}
        return self.derive(shapes, target, settings)

    def is_rebuilt(self, shapes: Shapes) -> bool:
        """Return whether a file with these slots lacks one that `rebuild` computes."""
        return self.rebuild is not None and not self.rebuild.slots <= shapes.keys()

    def rebuilt(self, loaded: LoadedModule) -> Mapping[str, Tensor]:
        """Return the slots that `rebuild` computes, or nothing if the file stores all of them."""
        return self.rebuild.tensors(loaded) if self.rebuild and self.is_rebuilt(loaded.shapes) else {}

    @property
    def module(self) -> str:
        """The Python module of the formula."""
        return (self.low_rank.factors if self.low_rank is not None else self.delta).__module__

    @property
    def starts_in_base(self) -> bool:
        """Whether the trainer subtracted the initial product of the factors from the weight before training."""
        return bool(self.without_start)

    def shown_shape(self, stored: Shapes) -> Shape | None:
        """Return the shape of the weight as the stored shapes show it; None if they do not, or a tensor has fewer
        axes than the formula needs."""
        try:
            return self.weight_shape(stored) if self.weight_shape is not None else None
        except IndexError:
            return None

    @property
    def rank(self) -> Callable[[Shapes], int] | None:
        """Function (fitted shapes) → rank r, if the scale is α / r; else None."""
        return self.scalars_from.rank if isinstance(self.scalars_from, AlphaOverRank) else None

    @property
    def takes_one_number(self) -> bool:
        """Whether `accumulate` multiplies a factor by the scalars and the strength: each may then be one number for all
        layers, without axes, on the host, whatever the device."""
        return self.accumulate is not None and self.low_rank is not None and not self.reads_base

    @cached_property
    def annotations(self) -> Mapping[str, str]:
        """Field of `tensors` → its annotation."""
        kinds = self.tensors.__annotations__
        return {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in kinds.items()}

    @cached_property
    def slots(self) -> Mapping[str, bool]:
        """Slot → whether it is required, from the annotations of `tensors`."""
        kinds = {"Tensor": True, "Indices": True, "Tensor | None": False, "Indices | None": False}
        return MappingProxyType({name: kinds[kind] for name, kind in self.annotations.items() if kind in kinds})

    @cached_property
    def required(self) -> frozenset[str]:
        """Slots without which the formula cannot be computed."""
        return frozenset(slot for slot, must in self.slots.items() if must)

    @cached_property
    def integer_slots(self) -> frozenset[str]:
        """Slots whose tensors stay integers."""
        return frozenset(name for name, kind in self.annotations.items() if kind.startswith("Indices"))

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Fields that hold one number per layer."""
        return frozenset(name for name, kind in self.annotations.items() if kind == "Scalar")

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Setting → default, or MISSING if the adapter's configuration must give a value."""
        defaults = self.tensors._field_defaults
        names = (name for name in self.annotations if name not in self.slots and name not in self.scalars)
        return MappingProxyType({name: defaults.get(name, MISSING) for name in names})

    def missing_settings(self, stated: Mapping[str, Any]) -> list[str]:
        """Return the settings without a default that are not in `stated`."""
        return [name for name, default in self.settings.items() if default is MISSING and name not in stated]


def of_factors(
    name: str,
    tensors: type[Any],
    fitted_shapes: Callable[[Shapes, Shape], Shapes],
    low_rank: Factorisation,
    paper: str,
    **more: Any,
) -> Algorithm:
    """Return the row of a formula whose ΔW is the product of its two factors."""
    return Algorithm(name, tensors, fitted_shapes, low_rank.product, paper, low_rank=low_rank, **more)


def flat(shape: Shape) -> tuple[int, int]:
    """Return (rows, cols) of a weight: axis 0, and all other axes flattened; a vector is a column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def same_inputs(stored: Shape, target: Shape) -> bool:
    """Return whether two input shapes (all axes but the first) agree: they are equal apart from axes of
    length one, or one of them is flattened. A 3×5 kernel is not a 5×3 kernel, though both have 15 columns."""
    a, b = (tuple(size for size in side if size != 1) for side in (stored, target))
    return a == b or (prod(a) == prod(b) and min(len(a), len(b)) <= 1)


def other_inputs(slot: str, stored: Shape, target: Shape) -> str:
    """Return the sentence on a factor whose input shape is not the weight's."""
    ours, theirs = ("×".join(map(str, side)) for side in (stored, target))
    return f"{slot} reads {ours} inputs, the weight of the base has {theirs}"


def length(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return ‖values‖₂ over these axes, kept with length 1; NaN if the norm overflows, because dividing by infinity
    would give 0 without any error."""
    import torch

    norm: Tensor = torch.linalg.vector_norm(values, dim=axes, keepdim=True)
    return norm.masked_fill_(norm.isinf(), torch.nan)


def tucker(core: Tensor, inner: Tensor) -> Tensor:
    """Return Σ_j core[i, j, k] inner[j, c] as [n, i, c·k], for core [n, i, j, k] and inner [n, j, c].

    The caller multiplies the outer factor from the left. einsum would choose a slower order."""
    (n, rank, inner_rank, kernel), cols = core.shape, inner.shape[2]
    rows = core.permute(0, 1, 3, 2).reshape(n, rank * kernel, inner_rank)
    return (rows @ inner).reshape(n, rank, kernel, cols).transpose(2, 3).reshape(n, rank, cols * kernel)


def rank_of(slot: str, axis: int = 0) -> Callable[[Shapes, Shape], int]:
    """Return the rule for `Factorisation.rank` that reads an axis of a fitted slot."""
    return lambda shapes, _: shapes[slot][axis]


def shape_of_pair(shapes: Shapes) -> Shape | None:
    """Return the shape of the weight of up [out, r, …] and down [r, in, …], with a Tucker core `mid` or without."""
    up, down, mid = shapes["up"], shapes["down"], shapes.get("mid")
    if len(up) < 2 or len(down) < 2:
        return None
    return (up[0], *down[1:]) if mid is None else (up[0], down[1], *mid[2:])


def expect(*, holds: bool, otherwise: str) -> None:
    """Raise DoesNotFit with that message unless the condition holds."""
    if not holds:
        raise DoesNotFit(otherwise)


def expect_shapes(shapes: Shapes, want: Shapes) -> Shapes:
    """Return the wanted shapes; raise DoesNotFit if a stored shape differs."""
    for slot, shape in want.items():
        expect(holds=shapes[slot] == shape, otherwise=f"{slot} is {list(shapes[slot])}, not {list(shape)}")
    return want


def factor_pair(shapes: Shapes, rows: int, cols: int) -> dict[str, Shape]:
    """Return the shapes of up (rows, r) and down (r, cols), the factors of a weight of this size."""
    (out, rank), (down_rank, width) = flat(shapes["up"]), flat(shapes["down"])
    expect(holds=rank == down_rank, otherwise=f"up has rank {rank}, down has rank {down_rank}")
    expect(holds=(out, width) == (rows, cols), otherwise=f"up × down is {out}×{width}, the weight {rows}×{cols}")
    return {"up": (out, rank), "down": (rank, width)}


def extra_pair(shapes: Shapes, target: Shape) -> dict[str, Shape]:
    """Return the shapes of up (out, r) and down (r, cols), or nothing if the file has no such pair."""
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
    """The rule scale = α / r; the scale is 1 without an α, and for α = 0, which trainers read as α = r."""

    rank: Callable[[Shapes], int] = lambda _: 0
    """(fitted shapes) → r, or 0 if only the adapter's configuration gives the scale."""

    def __call__(self, alpha: float | None, shapes: Shapes, _: Shape) -> Mapping[str, float]:
        """Return {"scale": α / r}; raise DoesNotFit if α is NaN or infinite."""
        expect(holds=alpha is None or isfinite(alpha), otherwise=f"alpha is {alpha}")
        r = self.rank(shapes)
        return {"scale": alpha / r if alpha and r else 1.0}


def alpha_over(slot: str, axis: int = 0) -> AlphaOverRank:
    """Return the rule α / r, with r from an axis of a fitted slot."""
    return AlphaOverRank(lambda shapes: shapes[slot][axis])
