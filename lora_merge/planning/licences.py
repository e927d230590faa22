"""The licences of models and adapters, as model hubs name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

ENTRIES: Final = ("license", "license_name", "license_link")
"""Entries of a card's front matter that state a licence. Source: https://huggingface.co/docs/hub/repositories-licenses."""

OTHER: Final = "other"

KNOWN: Final = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma
    """.split()  # noqa: SIM905  # a list of words
)
"""The words for a licence that hubs accept, besides `unknown` and `other`; they refuse cards with another word. Source:
the table of https://huggingface.co/docs/hub/repositories-licenses on 22 August 2026 (hub-docs 242f4a1)."""

SAME: Final = {"creativeml-open-rail-m": "creativeml-openrail-m", "creativeml-open-rail++-m": "openrail++"}
"""Names of licences in the metadata of adapters → a hub's words."""


def stated(front: Mapping[str, Any]) -> str:
    """Return the licence that the front matter of a card states; "" without one."""
    found = front.get("license")
    named = front.get("license_name") if found == OTHER else None
    return next((one for one in (named, found) if isinstance(one, str)), "")


def word(licence: str) -> str:
    """Return a licence in small letters, with a hub's word for it if there is one."""
    name = re.sub(r"[\s_]+", "-", re.sub(r"\s*licen[cs]e\s*$", "", licence.strip().lower()))
    return SAME.get(name, name) or licence.strip().lower()


def entries(licences: Iterable[str], front: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that state the licence of a merge of inputs with these licences, "" for none stated.

    If all inputs agree, the output has their licence, with its name and link from `front`, the base's card. If they do
    not, it has `other`, and the text of the card names the licences. {} if no input states any.
    """
    every = {word(one) for one in licences}
    if every == {""}:
        return {}
    (agreed,) = every if len(every) == 1 else ("",)
    if not agreed:
        return {"license": OTHER}
    if word(stated(front)) == agreed and front["license"] in (OTHER, *KNOWN):
        return {name: front[name] for name in ENTRIES if name in front}
    return {"license": agreed} if agreed in KNOWN else {"license": OTHER, "license_name": agreed}
