"""Two factors of unknown spellings below one layer, recognised by their shapes. No torch.

`layer.x` and `layer.y` are a LoRA where their product has the shape of the layer's weight: B A, or the transpose of
A B as in programs that compute x A B. Where a weight is square both fit, and the other layers of the file decide whose
tensors have the same last names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from ..adapters.modules import Module, two_of_a_kind
from ..algorithms.lora import LORA
from ..algorithms.lora_transposed import LORA_TRANSPOSED
from ..dtypes import StoredTensor
from ..errors import FitError, MergeError
from ..models.names import Names

UNCLEAR: Final = "two factors of each layer have no known names, and all their layers are square"
RENAME: Final = (
    "rename them: NAME.lora_B.weight and NAME.lora_A.weight if the change is the first times the second, NAME.lora.A "
    "and NAME.lora.B if it is the transpose of that"
)


def pairs(names: Names, strange: Sequence[StoredTensor], path: Path) -> tuple[list[Module], list[StoredTensor]]:
    """Return the modules that such pairs are, and the tensors that are left; FitError if nothing shows which factor
    reads the inputs."""
    factors: dict[str, tuple[StoredTensor, StoredTensor, tuple[bool, bool]]] = {}
    for left, right in two_of_a_kind(strange):
        placed = ((module, _weight(names, module)) for module in _above(left.name, right.name))
        module, weight = next(((m, w) for m, w in placed if w is not None), ("", None))
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


def _weight(names: Names, module: str) -> tuple[int, ...] | None:
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
