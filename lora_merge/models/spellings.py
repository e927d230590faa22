"""One network of a base, with all names that adapters may use for its tensors."""

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
    label: str  # the name for users: unet, transformer, te1 …
    prefix: str  # of its keys in the base
    architecture: Architecture | None = None
    layout: str = "as stored"
    kind: str = ""  # of a text encoder: clip_l, clip_g, t5 …
    number: int = 0  # of a text encoder, if the base numbers its encoders
    title: str = ""  # its class by the base's configuration
    inner: str = ""  # first level of names in a model with a head, absent in the model without the head
    sharded: bool = False  # whether several files hold the network
    keys: dict[str, str] = field(default_factory=dict)  # body → key in the base
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # of the whole base, by key

    def knows(self, module: str, parameter: str) -> bool:
        """Return whether this name is known with some numbers, perhaps with others than its own."""
        return self._table.knows(f"{module}.{parameter}".strip(".")) or self._table.knows(_flat(module, parameter))

    def find(self, module: str, parameter: str) -> tuple[WeightView | None, bool]:
        """Return (view or None, whether the name is known); dotted names first, then flat ones."""
        found = self._table.dotted(f"{module}.{parameter}".strip("."))
        return found if found[1] else self._table.flat(_flat(module, parameter))

    def dotted(self, name: str) -> WeightView | None:
        """Return the view of a parameter by its path in any spelling; None if no place or several fit."""
        return self._table.dotted(name)[0]

    @property
    def other_in_shards(self) -> bool:
        """Whether the names mean other rows if the network is stored in several files."""
        return self.architecture is not None and self.layout + IN_SHARDS in self.architecture.tables

    def cut(self, piece: RowSlice) -> tuple[int, ...]:
        """Return the rows of every layer in a range of rows of a tensor; () if the layers do not fill the range."""
        layers = self._table.layers(piece.key.removeprefix(self.prefix))
        inside = [p for p in layers if piece.start <= p.start and p.stop <= piece.stop]
        bounds = [piece.start, *(p.stop for p in inside)]
        return tuple(p.rows for p in inside) if bounds == [*(p.start for p in inside), piece.stop] else ()

    @cached_property
    def _table(self) -> NameTable:
        """The names; made on first use, because `inspect` and encoders without an adapter need none."""
        spellings = self.architecture.spellings if self.architecture else {}
        spellings = {name: table.settled(self.keys) for name, table in spellings.items()}
        shards = {name: spellings.pop(name) for name in [*spellings] if name.endswith(IN_SHARDS)}
        stored = shards.get(self.layout + IN_SHARDS) if self.sharded else None
        native = stored or spellings.get(self.layout, NO_TABLE)
        return NameTable(self.keys, self.shapes, native, [*spellings.values()], self.inner)


def _flat(module: str, parameter: str) -> str:
    return f"{module.replace('.', '_')}.{parameter}"
