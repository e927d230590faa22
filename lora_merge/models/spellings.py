"""One network of a base, and all names under which adapters may speak of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from ..algorithms import Shape
from .architectures import IN_SHARDS, Architecture
from .architectures.notation import Table
from .forms import NameTable
from .weights import RowSlice, WeightView

NO_TABLE: Final = Table(())


@dataclass
class Component:
    """One network of a checkpoint: a denoiser, a text encoder, a VAE."""

    role: str  # denoiser, te, vae, other
    label: str  # what users call it: unet, transformer, te1 …
    prefix: str  # of its keys in the base
    architecture: Architecture | None = None
    layout: str = "as stored"
    kind: str = ""  # of a text encoder: clip_l, clip_g, t5 …
    number: int = 0  # of a text encoder, where the base counts them
    title: str = ""  # what the base's configuration calls it
    inner: str = ""  # first level of names in a model with a head, of which the model without it knows nothing
    sharded: bool = False  # whether it lies in several files
    keys: dict[str, str] = field(default_factory=dict)  # body → key in the base
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of the whole base, by key

    def knows(self, module: str, parameter: str) -> bool:
        """Return whether it has a parameter of this name, but perhaps for other numbers."""
        return self._table.knows(f"{module}.{parameter}".strip(".")) or self._table.knows(_flat(module, parameter))

    def find(self, module: str, parameter: str) -> tuple[WeightView | None, bool]:
        """(the place or None, whether the name is known); dotted names first, then flat ones."""
        found = self._table.dotted(f"{module}.{parameter}".strip("."))
        return found if found[1] else self._table.flat(_flat(module, parameter))

    def dotted(self, name: str) -> WeightView | None:
        """Return the place of a parameter by its path, in any spelling; None if it has none, or several."""
        return self._table.dotted(name)[0]

    @property
    def other_in_shards(self) -> bool:
        """Whether its names mean other rows where it lies in several files."""
        return self.architecture is not None and self.layout + IN_SHARDS in self.architecture.tables

    def cut(self, piece: RowSlice) -> tuple[int, ...]:
        """Return the rows of every layer that rows of a tensor hold, in order; () if no layers fill them one after the
        other.
        """
        layers = self._table.layers(piece.key.removeprefix(self.prefix))
        there = [p for p in layers if piece.start <= p.start and p.stop <= piece.stop]
        bounds = [piece.start, *(p.stop for p in there)]
        return tuple(p.rows for p in there) if bounds == [*(p.start for p in there), piece.stop] else ()

    @cached_property
    def _table(self) -> NameTable:
        """Made on first use: `inspect`, and text encoders that no adapter speaks of, need none."""
        spellings = self.architecture.spellings if self.architecture else {}
        spellings = {name: table.settled(self.keys) for name, table in spellings.items()}
        shards = {name: spellings.pop(name) for name in [*spellings] if name.endswith(IN_SHARDS)}
        stored = shards.get(self.layout + IN_SHARDS) if self.sharded else None
        native = stored or spellings.get(self.layout, NO_TABLE)
        return NameTable(self.keys, self.shapes, native, [*spellings.values()], self.inner)


def _flat(module: str, parameter: str) -> str:
    return f"{module.replace('.', '_')}.{parameter}"
