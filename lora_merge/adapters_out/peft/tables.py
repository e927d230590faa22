"""Embeddings, which PEFT has names of their own for: what is one, and how its factors are stored. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from ...algorithms import ALGORITHMS
from ...errors import FitError
from ...models.chosen import or_leave_out
from ..dialects import Dialect
from ..places import Place, Share

TABLE: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens(?:_per_layer)?|embed_positions|embed_in|wte|wpe|shared|tok_embeddings|embeddings?"
    r"|(?:\w+_)?(?:word|position|token|token_type)_embeddings?|(?:row|column|lang|rel|entity|segment)_embeddings"
    r"|tokens_embed|positions_embed|input_embeds_layer|position_embeds_layer|(?:global_)?relative_attention_bias)$"
)
"""Names of `nn.Embedding` in language models and text encoders; PEFT has names of its own for their factors."""


def is_table(place: Place, shares: Sequence[Share] = (), tables: Collection[str] = ()) -> bool:
    """Return whether a parameter is a table of embeddings: an adapter has factors of one, or its name is that of one.

    `tables`: the modules of the adapter that are known to be tables."""
    own = (s.patch for s in shares)
    trained = any(ALGORITHMS[p.algorithm].of_table or p.module.name in tables for p in own)
    return len(place.view.shape) == 2 and (trained or TABLE.search(place.module) is not None)


def expect_table(place: Place, to: Dialect) -> None:
    """Raise FitError for a dialect that has no place for factors of an embedding: its loader puts factors on layers
    alone."""
    if "up_bias" in to.endings and "table_up" not in to.endings:
        raise FitError(f"{to.name} has no place for factors of an embedding", place.label,
                       or_leave_out("use kohya or comfy", place.keys))  # fmt: skip
