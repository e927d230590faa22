"""One language: what users read has the words of the field. CONTRIBUTING.md says which words are used instead."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import lora_merge
from lora_merge.cli.help import COMMAND_GROUPS
from lora_merge.options import ADAPTER_OPTIONS, OPTIONS
from tests.kit.package import nodes
from tests.kit.readme import ROOT
from tests.kit.typed_fixes import commands

INSTEAD: Final = {
    r"tells?|told": "show, report, say, contain",
    r"stands?|stood|lies?": "is, belongs, means",
    r"besides?": "next to, with, compared with",
    r"where": "if, when; it is for places",
    r"those (?:that|who|whose)|none of": "which, no",
    r"whoever|nobody|anybody|everybody|of which|so many": "a subject and a verb: anyone, no file, this many",
    r"wanted": "required, needed",
    r"folders? of (?:PEFT|transformers|diffusers)|torch for CPUs": "PEFT folder, CPU-only torch",
    r"of (?:(?:the|a|an|its|this|all) )?[\w-]+ of (?:(?:the|a|an|its|this|all) )?[\w-]+": "compounds",
}
"""Words that strings do not have → what to write."""

ALLOWED: Final = (
    "where: ", "the site wanted a login", "Where it fits", "where two models", "where they differ",
    "where it differs", "Where they differ", "Where it was", "‖Δ‖, where Δ̂", "`where`", "where Δ̂", "Where the original",
    "Where is the output", "| where |", "goes on where it stopped", "Where to add", "None of an output", "where a weight is",
    "where you are", "Where.",
)  # fmt: skip
"""Phrases in which such a word is right: places, and columns and fields of that name."""

LONGEST: Final = 900  # characters of a string that is prose; a longer one is code or a page


def strings(path: Path) -> Iterator[str]:
    """The strings of a module that are sentences, without docstrings; `…` for what is filled in."""
    apart = {id(n.value) for n in nodes(path) if isinstance(n, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.value


def docstrings() -> Iterator[tuple[str, str]]:
    """The names of the public API and of its methods, with their documentation."""
    for name in lora_merge.__all__:
        thing = getattr(lora_merge, name)
        yield name, inspect.getdoc(thing) or ""
        for inner, member in vars(thing).items() if isinstance(thing, type) else ():
            if not inner.startswith("_") and (callable(member) or isinstance(member, property)):
                yield f"{name}.{inner}", inspect.getdoc(member) or ""


def descriptions(value: Any) -> Iterator[str]:
    """The texts of a JSON schema."""
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        if name in ("description", "title") and isinstance(inner, str):
            yield inner
        yield from descriptions(inner)


def wrong(text: str) -> list[str]:
    """The words of a text that belong to no language but ours, with what to write instead."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    text = re.sub(r"`[^`]*`", "", text)
    return [f"{found[0]!r}: write {right}" for word, right in INSTEAD.items() for found in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE)]  # fmt: skip


MODULES: Final = [p for room in ("lora_merge", "algorithms") for p in sorted((ROOT / room).rglob("*.py"))]
PAGES: Final = [ROOT / name for name in ("README.md", "CHANGELOG.md", "configs/README.md")]
PAGES += [*sorted((ROOT / "configs" / "site" / "pages").glob("*.md")), ROOT / "lora_merge" / "cli" / "README.md"]


def test_strings_have_the_words_of_the_field() -> None:
    prose = [
        (path, text) for path in MODULES for text in strings(path) if len(text.split()) > 2 and len(text) < LONGEST
    ]
    assert len(prose) > 1500
    found = [f"{path.relative_to(ROOT)}: {text!r}: {word}" for path, text in prose for word in wrong(text)]
    assert not found, "\n".join(found)


def test_documentation_of_the_api_has_the_words_of_the_field() -> None:
    found = [f"{name}: {word}" for name, text in docstrings() for word in wrong(text)]
    assert not found, "\n".join(found)


def test_schemas_have_the_words_of_the_field() -> None:
    files = sorted((ROOT / "lora_merge" / "viewing" / "schemas").glob("*.json"))
    found = [f"{file.name}: {text}: {word}" for file in files for text in descriptions(json.loads(file.read_text(encoding="utf-8"))) for word in wrong(text)]  # fmt: skip
    assert files and not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_have_the_words_of_the_field(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    found = [f"{page.name}:{number}: {word}" for number, line in lines for word in wrong(line)]
    assert not found, "\n".join(found)


def test_help_of_commands_has_the_words_of_the_field() -> None:
    found = [f"{name}: {word}" for name, command in commands().items() for word in wrong(command.help or "")]
    assert not found, "\n".join(found)


VERBS: Final = frozenset(
    [
        "Add",
        "Allow",
        "Append",
        "Average",
        "Bring",
        "Change",
        "Check",
        "Combine",
        "Compute",
        "Convert",
        "Count",
        "Decide",
        "Divide",
        "Draw",
        "Drop",
        "Extract",
        "Hash",
        "Install",
        "Interpolate",
        "Keep",
        "Leave",
        "Limit",
        "List",
        "Merge",
        "Multiply",
        "Open",
        "Plan",
        "Print",
        "Read",
        "Repeat",
        "Replace",
        "Require",
        "Resize",
        "Round",
        "Run",
        "Scale",
        "Search",
        "Seed",
        "Serve",
        "Set",
        "Show",
        "Stop",
        "Store",
        "Supply",
        "Take",
        "Test",
        "Use",
        "Vary",
        "Verify",
        "Weight",
        "Write",
    ]
)
"""First words of the help of options: what the option does."""


def test_help_of_an_option_begins_with_a_verb() -> None:
    texts = {f"{name} {option.opts[-1]}": option.help or "" for name, command in commands().items()
             for option in command.params if option.param_type_name == "option"}  # fmt: skip
    texts |= {row.flag: row.help for row in (*OPTIONS.values(), *ADAPTER_OPTIONS.values())}
    assert len(texts) > 200
    assert not {name: text for name, text in texts.items() if text.partition(" ")[0] not in {*VERBS, "Show"}}


def test_every_command_is_in_a_group_of_the_help() -> None:
    shown = {name for name, command in commands().items() if not command.hidden}
    assert shown == {name for names in COMMAND_GROUPS.values() for name in names}
