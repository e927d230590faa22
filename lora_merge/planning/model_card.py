"""The model card of an output: front matter for model hubs, and a section that says what was merged.

The text and the entries of the base's card stay. Our section, between two marks, is added, and those entries are
replaced that would claim that the output is the base. Licences have the words of model hubs; the output has one if all
inputs agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeGuard

from ..disk.files import FileState, open_regular
from ..disk.uploads import sink_of
from ..errors import MergeError
from ..facts import times
from ..paths import WEIGHT_SUFFIXES, input_name
from ..text import one_line, plural, stored
from .header_entries import TITLE
from .plan import CARD, Plan

LICENCE_ENTRIES: Final = ("license", "license_name", "license_link")
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
"""The words for a licence that hubs accept next to `unknown` and `other`; they refuse cards with another word. Source:
the table of https://huggingface.co/docs/hub/repositories-licenses on 22 August 2026 (hub-docs 242f4a1)."""

LICENCE_ALIASES: Final = {"creativeml-open-rail-m": "creativeml-openrail-m", "creativeml-open-rail++-m": "openrail++"}
"""Names of licences in the metadata of adapters → a hub's words."""

BEGIN: Final = "<!-- lora-merge: begin -->"
CARD_END: Final = "<!-- lora-merge: end -->"

MOST_CARD_BYTES: Final = 1 << 20  # bytes of a card; longer ones stay as they are
FRONT: Final = 1 << 14  # characters of front matter; hubs show a hundred lines

_SECTION: Final = re.compile(re.escape(BEGIN) + ".*?" + re.escape(CARD_END) + "\n*", re.DOTALL)
_FRONT: Final = re.compile(r"\A---\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_HUB: Final = re.compile(r"[\w.-]+/[\w.-]+")
NOT_STATED: Final = "not stated"
LICENCES: Final = ("modelspec.license", "general.license")
"""Entries of the metadata of safetensors and of GGUF that state a licence."""
_LIBRARIES: Final = (("model_index.json", "diffusers"), ("config.json", "transformers"))


def _stated_licence(front: Mapping[str, Any]) -> str:
    """Return the licence that the front matter of a card states; "" without one."""
    licence = front.get("license")
    named = front.get("license_name") if licence == OTHER else None
    return next((name for name in (named, licence) if isinstance(name, str)), "")


def _licence_word(licence: str) -> str:
    """Return a licence in small letters, with a hub's word for it if there is one."""
    name = re.sub(r"[\s_]+", "-", re.sub(r"\s*licen[cs]e\s*$", "", licence.strip().lower()))
    return LICENCE_ALIASES.get(name, name) or licence.strip().lower()


def _licence_entries(licences: Iterable[str], front: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that state the licence of a merge of inputs with these licences, "" for none stated.

    If all inputs agree, the output has their licence, with its name and link from `front`, the base's card. If they do
    not, it has `other`, and the text of the card names the licences. {} if no input states any.
    """
    every = {_licence_word(licence) for licence in licences}
    if every == {""}:
        return {}
    (agreed,) = every if len(every) == 1 else ("",)
    if not agreed:
        return {"license": OTHER}
    if _licence_word(_stated_licence(front)) == agreed and front["license"] in (OTHER, *KNOWN):
        return {name: front[name] for name in LICENCE_ENTRIES if name in front}
    return {"license": agreed} if agreed in KNOWN else {"license": OTHER, "license_name": agreed}


def card_path(plan: Plan) -> Path:
    """Return the path of the card: README.md in a folder and in a repository of the hub, NAME.md next to a file."""
    if plan.is_folder:
        return plan.job.output / CARD
    sink = sink_of(plan.job.output)
    return (sink and sink.card_of(plan.job.output)) or plan.job.output.with_suffix(".md")


def has_section(path: Path) -> bool:
    """Return whether a card has our section."""
    return _SECTION.search(read_card(path) or "") is not None


def card(plan: Plan, earlier: Path | None) -> bytes | None:
    """Return the card of the output of a plan, in UTF-8; None if the earlier one cannot be read and has to stay.

    `earlier`: the card that gets our section and entries: that of the base, or an older one of the output.
    """
    old = "" if earlier is None else read_card(earlier)
    if old is None:
        return None
    front, body = _split(old)
    if front is None:
        return None
    rest = _SECTION.sub("", body).strip("\n")
    parts = [
        f"---\n{_edited(old, front, _entries(plan, front))}---",
        "\n".join([BEGIN, *_section(plan), CARD_END]),
        rest,
    ]
    return ("\n\n".join(part for part in parts if part) + "\n").encode("utf-8", "replace")


def read_card(path: Path) -> str | None:
    """Return the text of a card, "" if there is none; None if it is too long, or not text."""
    if not path.is_file():
        return ""
    try:
        with open_regular(path) as f:
            return f.read().decode("utf-8-sig") if FileState.of(f.fileno()).size <= MOST_CARD_BYTES else None
    except (OSError, ValueError, MergeError):
        return None


def _split(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return (front matter, rest) of a card; None for front matter that is too long or not a table."""
    match = _FRONT.match(text)
    if match is None:
        return {}, text
    if len(match[1]) > FRONT:
        return None, text
    import yaml

    try:
        front = yaml.safe_load(match[1]) or {}
    except (yaml.YAMLError, RecursionError, ValueError):
        return None, text
    return (front if isinstance(front, dict) else None), text[match.end() :]


def _edited(card: str, front: Mapping[str, Any], ours: dict[str, Any]) -> str:
    """Return the front matter of a card with our entries; the others stay letter by letter, with their comments, as
    programs do not agree on what `language: no` or `1.10` mean."""
    import yaml

    edited_entries = {name: value for name, value in front.items() if name not in LICENCE_ENTRIES} | ours
    match = _FRONT.match(card)
    text = match[1].replace("\r\n", "\n") if match else ""
    root = yaml.compose(text, yaml.SafeLoader)
    keys = [key for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    starts = [0, *(key.start_mark.index for key in keys[1:]), len(text)]
    lines = {key.value: text[a:b] for key, (a, b) in zip(keys, pairwise(starts), strict=False)}
    edited = "".join(_yaml({name: ours[name]}) if name in ours else lines.get(name, "") for name in edited_entries)
    try:
        return edited if yaml.safe_load(edited) == edited_entries else _yaml(edited_entries)
    except yaml.YAMLError:  # in braces, or with a word in place of an entry that is gone
        return _yaml(edited_entries)


def _yaml(front: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True))


def _entries(plan: Plan, front: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that say what the output is. https://huggingface.co/docs/hub/model-cards."""
    tags = front.get("tags")
    before = [str(tag) for tag in (tags if isinstance(tags, list) else [tags]) if isinstance(tag, str | int | float)]
    library = next((name for file, name in _LIBRARIES if plan.is_folder and (plan.base.path / file).is_file()), None)
    ours = {
        "base_model": list(dict.fromkeys(_hub_names(plan))), "base_model_relation": "merge",
        "tags": list(dict.fromkeys([*before, "merge", "lora-merge"])),
        **({"library_name": library} if library and "library_name" not in front else {}),
        **_licence_entries((licence for _, licence in _licences(plan)), _front_of(plan.base.path)),
    }  # fmt: skip
    return {name: _shown(value) for name, value in ours.items()}


def _shown(value: Any) -> Any:
    """Return an entry with hidden characters of its texts escaped."""
    if isinstance(value, dict):
        return {name: _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return one_line(value) if isinstance(value, str) else value


def _hub_names(plan: Plan) -> Iterator[str]:
    """Yield the names of the base and of the adapters on a hub; the names of their files if these are not known.

    If the base's configuration does not state its name, those of the adapters, or their cards, may state it.
    """
    yield next(filter(_is_hub_name, (plan.base.config.get("_name_or_path"), _trained_on(plan))), _stem(plan.job.base))
    for ref, m in zip(plan.job.adapters, plan.adapters, strict=True):
        name = str(m.adapter.index.config.get("_name_or_path", ""))
        yield name if _HUB.fullmatch(name) else _stem(ref.path)


def _is_hub_name(name: Any) -> TypeGuard[str]:
    return isinstance(name, str) and _HUB.fullmatch(name) is not None


def _trained_on(plan: Plan) -> str:
    """Return the base that the adapters name; of several, the one with the name of the base's file; "" for none."""
    named: dict[str, None] = {}
    for ref, m in zip(plan.job.adapters, plan.adapters, strict=True):
        base_model = _front_of(ref.path).get("base_model")
        of_card = base_model[0] if isinstance(base_model, list) and len(base_model) == 1 else base_model
        names = (m.adapter.index.config.get("base_model_name_or_path"), of_card)
        named |= dict.fromkeys([name for name in names if _is_hub_name(name)][:1])
    alike = [name for name in named if name.rpartition("/")[2].lower() == _stem(plan.job.base).lower()]
    return next(iter(named if len(named) == 1 else alike), "")


def _stem(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _licences(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (input, its licence) by its card or its metadata; "" if neither states one."""
    for path, metadata in (
        (plan.job.base, plan.base.metadata),
        *((ref.path, m.adapter.index.metadata) for ref, m in zip(plan.job.adapters, plan.adapters, strict=True)),
    ):
        of_file = (metadata.get(key, "") for key in LICENCES)
        yield path.name, _stated_licence(_front_of(path)) or next(filter(None, of_file), "")


def _front_of(path: Path) -> dict[str, Any]:
    """Return the front matter of the card in a folder or next to a file; {} if there is none that can be read.

    README.md counts as the card of a file if that is the only file of weights in its folder, as on hubs.
    """
    card = path / CARD if path.is_dir() else path.with_suffix(".md")
    if not path.is_dir() and not card.is_file():
        weights = [file for file in path.parent.iterdir() if file.suffix.lower() in WEIGHT_SUFFIXES]
        card = path.parent / CARD if len(weights) == 1 else card
    return _split(read_card(card) or "")[0] or {}


def _section(plan: Plan) -> Iterator[str]:
    """Yield our section, line by line."""
    job = plan.job
    yield f"# {_plain(job.title or dict(job.metadata).get(TITLE) or job.output.stem)}"
    yield ""
    base = f"{_code(input_name(job.base))} ({_plain(plan.architecture)})"
    yield f"This is {base} with these adapters merged in by lora-merge:"
    yield ""
    for ref, m in zip(job.adapters, plan.adapters, strict=True):
        counts = [(part, s, n) for part, by_strength in m.strengths.items() for s, n in by_strength.items()]
        parts = [f"{times(s)}× {_plain(part)} ({plural(n, 'module')})" for part, s, n in counts]
        what = ", ".join(m.algorithms) or "no change"
        yield f"* {_code(input_name(ref.path))}: {what}, strength {times(ref.strength)}: {', '.join(parts)}"
    yield ""
    dtype = stored(job.dtype)
    yield f"{plural(plan.changed, 'tensor')} changed; {dtype}; method {job.method}, computed in {job.compute_dtype}."
    licences = [*_licences(plan)]
    if len({_licence_word(licence) for _, licence in licences}) > 1:
        yield ""
        yield f"Licences: {'; '.join(f'{_code(name)}: {_plain(text) or NOT_STATED}' for name, text in licences)}."
    if not job.no_metadata:
        yield ""
        yield "The metadata of the weights hold the recipe: `lora-merge verify` proves it, `replay` repeats it."


def _plain(text: str) -> str:
    """Return a text as one line, without the characters that Markdown and HTML interpret."""
    return one_line(re.sub(r"[\x00-\x1f<>`*#&~\\\[\]|]", " ", text)[:200].strip())


def _code(name: str) -> str:
    """Return the name of a file in backquotes, in which Markdown interprets nothing."""
    plain = re.sub(r"[\x00-\x1f<>`]", " ", name)[:200].strip()
    return f"`{one_line(plain)}`"
