"""The words that call up what an adapter was trained on, by its metadata. Anybody may have written it, so nothing in
it is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..files.checkpoint import Index
from ..text import from_json, is_finite

TRIGGERS: Final = ("modelspec.trigger_phrase", "ss_trigger_words", "trigger_word", "trigger_words", "trigger_phrase")
"""Metadata entries that may hold trigger words."""

NO_VALUES: Final = ("", "None", "null", "{}", "[]")
"""Texts that say that there is no value."""


def trigger_words(index: Index) -> Iterator[str]:
    """Yield the trigger words that the metadata states: of the specification, ai-toolkit and others."""
    words_before = set(NO_VALUES)
    texts = [index.metadata.get(key, "") for key in TRIGGERS]
    if "training_info" in index.metadata:  # ai-toolkit notes its trigger word as the only tag
        texts += tag_counts(index)
    for text in texts:
        if text not in words_before:
            words_before.add(text)
            yield text


def tag_counts(index: Index) -> Counter[str]:
    """Return how often the captions have each tag, over all folders of the data set."""
    counts: Counter[str] = Counter()
    tables = entry(index, "ss_tag_frequency")
    for table in tables.values() if isinstance(tables, Mapping) else ():
        for tag, count in table.items() if isinstance(table, Mapping) else ():
            if is_finite(count) and 0 <= count < 2**53:
                counts[str(tag).strip()] += int(count)
    return counts


def entry(index: Index, key: str) -> Any:
    """Return the value of an entry that holds JSON; None without such an entry, or for text that is not JSON."""
    try:
        return from_json(index.metadata.get(key, "null"))
    except ValueError:
        return None
