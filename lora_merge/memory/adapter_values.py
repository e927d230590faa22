"""Adapters as values: `0.5 * a + b`, the rank and the spectrum of each change, and saving them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..adapters_out.change import Evaluator, cache_of
from ..adapters_out.delta import combine as combined
from ..adapters_out.delta import spectrum
from ..adapters_out.dialects import stated_dialect
from ..adapters_out.factors import decomposing
from ..adapters_out.groups import OutputModule, layers_of_weights
from ..adapters_out.input_adapters import InputAdapters, body_of, joined, open_adapters
from ..adapters_out.rank_rules import EXACT, Rule
from ..adapters_out.report import AdapterReport
from ..addresses import downloads_in
from ..boundary import public
from ..command import Request
from ..disk.reader import Reader
from ..engine.devices import place as placement
from ..engine.tensor_moves import host
from ..engine.torch_state import undisturbed
from ..errors import UsageError
from ..job import AdapterValue
from ..options import KEEP, factor
from ..recipes.commands import COMMANDS, run_request
from ..text import Shown
from ..typed_options import AdapterReading
from .loaded_adapter import LoadedAdapter
from .state_index import check_weight

Term = tuple[LoadedAdapter, float]
EVERYTHING = Rule("energy", 1.0)


class Changes(AdapterValue):
    """Σ sᵢΔWᵢ of opened adapters: one adapter, or a sum."""

    terms: tuple[Term, ...]

    def __add__(self, other: object) -> AdapterSum:
        if isinstance(other, int | float) and other == 0:  # where `sum` begins
            return AdapterSum(self.terms)
        return AdapterSum((*self.terms, *other.terms)) if isinstance(other, Changes) else NotImplemented

    __radd__ = __add__

    def __mul__(self, strength: float) -> AdapterSum:
        if not isinstance(strength, int | float):
            return NotImplemented
        strength = factor(strength, "the strength of an adapter")
        return AdapterSum(tuple((adapter, s * strength) for adapter, s in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> AdapterSum:
        return self * (1 / number) if isinstance(number, int | float) and number else NotImplemented

    def __neg__(self) -> AdapterSum:
        return self * -1.0

    def __sub__(self, other: object) -> AdapterSum:
        return self + -other if isinstance(other, Changes) else NotImplemented

    @public
    def spectrum(self, name: str, *, base: str | Path | None = None) -> list[float]:
        """Return the singular values of the change of one module, the largest first, without rounding errors.

        Parameters:
            name: As `modules` has it.
            base: The model that the adapters were trained on, if a formula reads it, or dialects differ.

        Returns:
            One number for each direction, as many as `rank` says.

        Raises:
            UsageError: The adapter has no such module.
        """
        with torch.no_grad(), undisturbed():
            return self._spectrum(name, None if base is None else str(base))

    @public
    def rank(self, name: str, *, base: str | Path | None = None) -> int:
        """Return the rank of the change of one module: how many singular values are no rounding errors.

        Parameters:
            name: As `modules` has it.
            base: As for `spectrum`.

        Returns:
            A number from 0 on.

        Raises:
            UsageError: The adapter has no such module.
        """
        return len(self.spectrum(name, base=base))

    @public
    def save(
        self, path: str | Path, *, format: str = KEEP, rank: str | int = EXACT,
        base: str | Path | None = None, **options: Unpack[AdapterReading],
    ) -> AdapterReport:  # fmt: skip
        """Write the changes as one adapter: as `combine` does, or in another dialect as `convert` does.

        Parameters:
            path: The file or folder to write.
            format: A dialect of `convert`; "keep": that of the first adapter.
            rank: A number or a rule, as for `combine`.
            base: The model.

        Returns:
            An `AdapterReport`.

        Raises:
            MergeError: As for `combine` and `convert`.
        """
        adapters = [(adapter.path, strength) for adapter, strength in self.terms]
        stated_dialect(format, "--format")
        command, form = "combine", dict[str, Any](rank=rank, format=format)
        if format != KEEP and len(adapters) == 1:
            command, form = "convert", {"rank": None if rank == EXACT else rank, "to": format}
        report: AdapterReport = run_request(Request(COMMANDS[command], adapters, path, base, {**form, **options}))
        return report

    @cached_property
    def _opened(self) -> dict[str | None, InputAdapters]:
        return {}

    def _spectrum(self, name: str, base: str | None) -> list[float]:
        job = COMMANDS["combine"].job([(a.path, s) for a, s in self.terms], "sum.safetensors", base, {})
        if base not in self._opened:
            self._opened[base] = open_adapters(job)
        inputs = self._opened[base]
        body, modules = body_of(str(name)), layers_of_weights(inputs.targets)
        modules = [m for m in modules if name == m.place.label or body_of(_without_parameter(m)) == body]
        modules.sort(key=lambda module: module.place.label != name)  # a module's weight, before a bias of it
        if not modules:
            raise UsageError(f"the adapter has no module {name!r}", "its spectrum", "see .modules for the names")
        place, (part,) = modules[0].place, modules[0].parts
        with Reader(inputs.indexes) as reader:
            cache = cache_of(job, reader, inputs)
            changes = [c for c in Evaluator(inputs, cache, placement("cpu", "F64")).changes(part.target) if c.strength]
            if not changes:
                return []
            combined_change = combined(job, part.target, changes, [""] * len(self.terms)).of(part)
            with decomposing(place.name):
                return [float(s) for s in spectrum(combined_change, EVERYTHING, 0.0).values]


def _without_parameter(module: OutputModule) -> str:
    """Return the name of a module, also of stacked experts, whose parameters are named like modules."""
    return module.place.module.removesuffix(f".{module.place.key.rpartition('.')[2]}")


class OpenAdapter(LoadedAdapter, Changes):
    """An opened adapter file. It can be scaled and added to others: `0.5 * a + b`.

    Examples:
        >>> a, b = (lora_merge.load_adapter(f"{name}.safetensors") for name in ("style", "detail"))
        >>> both = (0.5 * a + b).save("both.safetensors")
        >>> a.rank(a.modules[0])
        32
    """

    @property
    def terms(self) -> tuple[Term, ...]:  # type: ignore[override]
        """The adapter at strength 1."""
        return ((self, 1.0),)


class AdapterSum(Shown, Changes):
    """A sum of adapters with strengths. Nothing is computed before it is asked for.

    Attributes:
        terms: Pairs of an opened adapter and its strength.

    Examples:
        >>> both = 0.5 * lora_merge.load_adapter("a.safetensors") + lora_merge.load_adapter("b.safetensors")
        >>> both.save("both.safetensors", rank=32).written
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Yield the sum as it is typed."""
        yield "Σ", " + ".join(f"{s:g} * {a.path.name}" for a, s in self.terms)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that any of the adapters changes, as the first of them that has it spells it."""
        return tuple(self._named.values())

    @cached_property
    def _named(self) -> dict[str, str]:
        """Name without its prefix → the name of the module in the first adapter that has it."""
        names: dict[str, str] = {}
        for name in (name for adapter, _ in self.terms for name in adapter.modules):
            names.setdefault(body_of(name), name)
        return names

    @public
    def delta(self, name: str, base_weight: Tensor | None = None) -> Tensor:
        """Return Σ sᵢ(Fᵢ(W) − W) for one module: fp32, on the CPU, in the base weight's shape.

        Parameters:
            name: As `modules` has it.
            base_weight: The weight that the module changes. None: as no formula reads it.

        Returns:
            A tensor of the base weight's shape.

        Raises:
            UsageError: No adapter has such a module, or they name the weights of a model in different words.
            MergeError: As for `merge`.
        """
        if base_weight is not None:
            check_weight(base_weight)
        self._expect_one_layout()
        body = body_of(str(name))
        if body not in self._named:
            raise UsageError(f"the adapters have no module {name!r}", "a sum of adapters", "see .modules for the names")
        total: Tensor | None = None
        for adapter, strength in self.terms:
            for module in (m for m in adapter.modules if body_of(m) == body):
                change = strength * host(adapter.delta(module, base_weight), torch.float64)
                total = change if total is None else total + change
        assert total is not None, "an adapter has such a module"
        return host(total, torch.float32)

    def _expect_one_layout(self) -> None:
        """Raise UsageError where names alone do not show which modules of the adapters are the same."""
        try:
            joined([adapter.file for adapter, _ in self.terms])
        except UsageError as e:
            raise UsageError(e.what, e.where, "save the sum with a base, and open that") from e


@public
def load_adapter(path: str | Path, *, cache: str | Path | None = None) -> OpenAdapter:
    """Open an adapter: the names of its modules, the ΔW, rank and spectrum of each; add, scale and save it.

    Parameters:
        path: An adapter file, or a PEFT folder; or an address.
        cache: As for `merge`.

    Returns:
        An `OpenAdapter`; `merge_state_dict` takes it as an adapter too, and `0.5 * a + b` is a sum with the same
        methods.

    Raises:
        InputError: The adapter is missing, damaged or of a kind that is not supported.

    Examples:
        >>> adapter = lora_merge.load_adapter("style.safetensors")
        >>> adapter.modules[0]
        'lora_unet_down_blocks_0_attentions_0_proj_in'
        >>> (0.5 * adapter + lora_merge.load_adapter("detail.safetensors")).save("both.safetensors").written
    """
    with downloads_in(cache):
        return OpenAdapter(path)
