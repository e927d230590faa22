"""Matrices of one shape behind each other, each stored by itself: a bank of experts with scales for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...dtypes import StoredTensor
from .base import CODES, DRAW, Encoding, OutOfRange, Packing, PartValues, WeightPart

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ExpertStack(Encoding):
    """The values of another encoding, matrix after matrix; `group` is the size of one."""

    inner: Encoding = field(default_factory=lambda: Encoding((1, 1)))

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return self.inner.block_of_scale

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the values in fp32."""
        import torch

        each = self._each(parts, count)
        return torch.cat([self.inner.decode(parts_of, 0, self.group).reshape(-1) for parts_of in each])

    def encode(self, values: Tensor, parts: PartValues) -> PartValues:
        """Return codes and scales; those of a matrix are fitted again if they do not cover it."""
        import torch

        matrices = []
        for tensor, before in zip(values.view(-1, self.group), self._each(parts, values.numel()), strict=True):
            new = self.inner.encode(tensor, before)
            if new is None:
                grown = self.inner.refit(before, float(tensor.abs().max()))
                new = self.inner.encode(tensor, {**before, **grown})
                if new is None:
                    raise OutOfRange
                new = {**new, **grown}
            matrices.append({**{role: tensor for role, tensor in before.items() if role not in (CODES, DRAW)}, **new})
        stored = {
            role: [before[role].reshape(-1).view(parts[role].dtype) for before in matrices] for role in matrices[0]
        }
        return {role: torch.cat(tensors) for role, tensors in stored.items()}

    def _each(self, parts: PartValues, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield the parts of every matrix."""
        matrices = count // self.group
        for n in range(matrices):
            yield {role: values.view(matrices, -1)[n] for role, values in parts.items()}


def one_of(info: StoredTensor) -> StoredTensor:
    """Return the first of the matrices of a tensor, as its header would list it."""
    return replace(info, shape=info.shape[1:], nbytes=info.nbytes // info.shape[0])


def stacked(codes: StoredTensor, first: Packing | None, parts: Mapping[str, StoredTensor]) -> Packing | None:
    """Return how matrices are stored of which `first` is the first one; `parts`: its tensors, of all matrices."""
    if first is None:
        return None
    matrices = codes.shape[0]
    elements = first.encoding.count(codes.nbytes // matrices)
    whole = {role: WeightPart(info, elements, info.nbytes // matrices) for role, info in parts.items()}
    inner = first.encoding
    encoding = ExpertStack.shared(inner.unit, elements, label=inner.label, inner=inner)
    return Packing(encoding, codes, whole, first.marks)
