"""Demands of PEFT on all modules together: bias factors for every layer or for none, whole modules with all parameters,
and embeddings under names of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ...algorithms import ALGORITHMS
from ...engine.placement import TORCH_DTYPES
from ...errors import FitError
from ..conversion.made import Made, as_value
from ..dialects import Dialect
from ..job import WHOLE
from ..outcome.layer import Kept, Layer
from ..places import Place, Share
from .biases import KOHYA, factors_of_zeros
from .experts import together
from .folder import EXPERT, whole_modules
from .magnitudes import magnitudes

TABLE: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens(?:_per_layer)?|embed_positions|embed_in|wte|wpe|shared|tok_embeddings|embeddings?"
    r"|(?:\w+_)?(?:word|position|token|token_type)_embeddings?|(?:row|column|lang|rel|entity|segment)_embeddings"
    r"|tokens_embed|positions_embed|input_embeds_layer|position_embeds_layer|(?:global_)?relative_attention_bias)$"
)
"""Names of `nn.Embedding` in language models and text encoders; PEFT has names of its own for their factors."""


def completed(
    made: Sequence[Kept], there: Iterable[Place], to: Dialect, value: Callable[[Place], Tensor] | None,
    keep: Callable[[Made], Kept],
) -> list[Kept]:  # fmt: skip
    """Return the modules with what PEFT asks for in addition; FitError where it has no place for them.

    `there`: all parameters in the words of the dialect. `value`: gives that of a parameter that did not change; None
    where the base is not known. `keep`: lets the bytes of an added one wait.
    """
    bias = to.endings.get("up_bias")
    if bias is None:
        return list(made)
    own = {(p.module, p.parameter): p for p in there}
    factored = {m.place.module for m in made if m.layer.rank}
    biased = {m.place.module for m in made if bias in m.tensors}
    added = [keep(one) for one in factors_of_zeros(made, own, to)]
    for module in sorted(factored - biased) if biased else ():
        place = own.get((module, "bias"), own[module, "weight"])  # PEFT's own factor needs none in the model
        added.append(keep(_plain(place, bias, torch.zeros(place.view.matrix[0], dtype=_dtype(made, bias)))))
    added += [keep(one) for one in magnitudes(made, own, to, value)]
    whole = whole_modules(made, own.values())
    if one := next((m for m in sorted(whole) if to.whole and EXPERT.search(m)), None):
        raise FitError(f"{to.name} has no module for whole values of one expert: transformers stacks all of them", one,
                       "give --rank, or write another format, such as kohya")  # fmt: skip
    if both := next((m for m in sorted(whole & factored)), None):
        raise FitError(f"{to.name} stores a layer as factors or as whole tensors; this one needs both", both, KOHYA)
    stored = {(m.place.module, m.place.parameter) for m in made if _stores_value(m)}
    for key, place in own.items():
        if key[0] in whole and key not in stored and value is not None:
            added.append(keep(_plain(place, f".{key[1]}", as_value(place, value(place)))))
    return together([*made, *added], own.values(), to, keep)


def _stores_value(made: Kept) -> bool:
    return f".{made.place.parameter}" in made.tensors


def _plain(place: Place, ending: str, tensor: Tensor) -> Made:
    tensors = {ending: tensor}
    return Made(place, tensors, Layer(tensors, WHOLE, 0, 0, None, 0.0, 0.0))


def _dtype(made: Sequence[Kept], bias: str) -> torch.dtype:
    return next(TORCH_DTYPES[m.tensors[bias].dtype] for m in made if bias in m.tensors)


def is_table(place: Place, shares: Sequence[Share] = (), tables: Collection[str] = ()) -> bool:
    """Return whether a parameter is a table of embeddings: an adapter has factors of one, or its name is that of one.

    `tables`: the modules of the adapter that are known to be tables."""
    own = (s.patch for s in shares)
    trained = any(ALGORITHMS[p.algorithm].of_table or p.module.name in tables for p in own)
    return len(place.view.shape) == 2 and (trained or TABLE.search(place.module) is not None)


def as_table(made: Made, to: Dialect, *, table: bool) -> Made:
    """Return the factors of an embedding as PEFT stores them: both transposed, under other endings. FitError for a
    dialect without such endings, whose loader puts factors on layers alone. `table`: whether they are those of one."""
    down, up = to.endings.get("down", ""), to.endings.get("up", "")
    if "up_bias" not in to.endings or up not in made.tensors or not table:
        return made
    if "table_up" not in to.endings:
        raise FitError(f"{to.name} has no place for factors of an embedding", made.place.label,
                       "use kohya or comfy, or leave it out; extract does with --exclude re:embedding")  # fmt: skip
    others = {ending: value for ending, value in made.tensors.items() if ending not in (down, up)}
    turned: Mapping[str, Tensor] = {
        to.endings["table_down"]: made.tensors[up].mT.contiguous(),
        to.endings["table_up"]: made.tensors[down].mT.contiguous(),
        **others,
    }
    return Made(made.place, turned, made.layer)
