"""Commands, paths and words as other programs and texts spell them, each refused with the right form."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..adapter_arguments import right_form
from ..errors import AdapterAsBase, UsageError
from ..paths import exists, expand, split_strength, typed, with_found_ending
from .argument_values import completed
from .corrected_line import is_adapter, line, path_of, split_words, takes_value
from .terminal import before_dashes

PROGRAM_OPTIONS: Final = MappingProxyType(
    {"-h": "--help", "-V": "--version", "version": "--version", "/?": "--help", "/help": "--help"}
)
"""Words for the options of the program itself → the option."""

FOREIGN_COMMANDS: Final = {
    word: command
    for command, words in {
        "inspect": "info show view check ls list metadata show_metadata interrogator",
        "compare": "difference cmp",
        "merge": "run apply bake cp fuse add join merge_lora merge_and_unload export apply_lora export_lora "
        "llama_export_lora sdxl_merge_lora flux_merge_lora convert_lora_safetensor_to_diffusers",
        "extract": "svd subtract extract_lora_from_models extract_lora extract_locon flux_extract_lora "
        "mergekit_extract_lora",
        "resize": "shrink rank prune resize_lora",
        "combine": "svd_merge_lora svd_merge add_weighted_adapter",
        "unmerge": "unfuse unload revert",
        "average": "ema mean",
        "parts": "blocks layers components",
        "verify": "validate prove test",
    }.items()
    for word in words.split()
}
"""Command of another program → the one that does this here."""

SHORT_COMMANDS: Final = MappingProxyType({"diff": "extract --algorithm full", "plan": "merge --dry-run"})
"""Word → the words that it is short for."""


def check_dashes(args: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for an option with a long dash, as texts and web pages have it, with too few hyphens, or with
    the slash of Windows."""
    for before, word in zip(("", *args), args, strict=False):
        slash = "" if before.startswith("-") else "|/"
        name = re.sub(f"^(?:[–—−]+{slash})(?=[A-Za-z])", "-", word).partition("=")[0]
        right = name if name in known else f"-{name}"
        long = len(name) > 2 or name in known  # -t is no --t
        if name[0:1] == "-" and long and right in known and right != word.partition("=")[0] and not exists(word):
            raise UsageError("an option begins with hyphens", word, f"write {right}").instead(
                word, right + word[len(word.partition("=")[0]) :]
            )
        if (parts := re.fullmatch("(--[a-z-]+?)([0-9][0-9.,]*%?)", word)) and parts[1] in known and word not in known:
            raise UsageError("an option needs a space before its value", word, f"write {parts[1]}={parts[2]}").instead(
                word, f"{parts[1]}={parts[2]}"
            )
        if re.match("-[A-Za-z]=.", word) and word[:2] in known and not exists(word):
            raise UsageError(
                "a short option needs a space before its value",
                word,
                f"write {word[:2]} {right_form(word[3:]) or word[3:]}",
            )


def check_spaces(args: Sequence[str]) -> None:
    """Raise UsageError for words that together are one: a file with its strength, a size, a name that needs quotes."""
    if any(word and re.match(r"\s+-|\s*[\\^`]?\s*$", word) for word in args):  # of several lines
        words = [word.strip() for word in args if word.strip() not in ("", "\\", "^", "`")]
        raise UsageError("a break in the line", " ".join(args)[:200], f"write {line(words)}")
    for at, word in enumerate(args):
        if word.startswith("-") or exists(with_found_ending(word)):
            continue
        before = args[at - 1] if at else ""
        if word.startswith(":") and split_strength(before + word)[1] is not None and exists(with_found_ending(before)):
            raise _one_word("a space before a strength", args, slice(at - 1, at + 1))
        of_option = " ".join(args[max(at - 2, 0) : at])
        if re.fullmatch("[KMGTkmgt]i?[Bb]?", word) and re.search(r"(^| )--\S+[ =][0-9.,]+$", of_option):
            raise _one_word("a space in a size", args, slice(at - 1, at + 1))
        if word.endswith(":") and exists(with_found_ending(word[:-1])) and any(map(right_form, args[at + 1 : at + 2])):
            raise _one_word("a space before a strength", args, slice(at, at + 2))
        for end in range(at + 2, min(at + 8, len(args)) + 1):
            if exists(with_found_ending(split_strength(" ".join(args[at:end]))[0])):
                raise _one_word("a name with spaces needs quotes", args, slice(at, end), " ")


def _one_word(what: str, args: Sequence[str], parts: slice, between: str = "") -> UsageError:
    """Return the error for words of a line that are one."""
    right = [*args[: parts.start], between.join(args[parts]), *args[parts.stop :]]
    return UsageError(what, " ".join(args[parts])[:200], f"write {line(right)}")


def check_base(args: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise AdapterAsBase for a merge of adapters alone, if each has a strength. `known`: its options."""
    plain, options = split_words(args, known)
    strengths = [option for option in options if option.partition("=")[0] in ("-s", "--strength")]
    if 1 < len(plain) == len(strengths) and all(path_of(word) and is_adapter(word) for word in plain):
        raise AdapterAsBase("the base is itself an adapter", path_of(plain[0]), "name the base first")


def check_format(command: str, args: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise UsageError for the name of a format that has no option before it. `known`: the options of the command."""
    flag = next((option for option in ("--to", "--format") if option in known), "")
    plain, options = split_words(args, known)
    stated = {option.partition("=")[0] for option in options if option.startswith("-")}
    if not flag or flag in stated or not stated <= known.keys():
        return
    from ..adapters_out.dialects import dialect

    for word in plain:
        if not exists(with_found_ending(word)) and dialect(word) is not None:
            right = [command, *(other for other in plain if other != word), *options, flag, word.lower()]
            raise UsageError("a format has an option", word, f"write {line(right)}")


def check_values(args: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise UsageError for an option without its value, before another option, and for a value after an option that has
    none. `known`: the options of the command."""
    before = before_dashes(args)
    for word, after in pairwise(before):
        if takes_value(word, known) and after.startswith("--") and after.partition("=")[0] in known:
            raise UsageError(
                f"{word} has no value", f"{word} {after}", f"write its value after {word}, or leave it out"
            )
    for word in before:
        flag, equals, value = word.partition("=")
        if equals and flag in known and known[flag].is_flag:
            right = ["--report", value] if flag == "--json" and "--report" in known else [flag]
            raise UsageError(f"{flag} takes no value", word, f"write {typed(right)}").instead(word, *right)


def check_once(args: Sequence[str], known: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that is given twice with a value, as one of the two would not count. `known`: the
    options of the command."""
    values: dict[str, list[str]] = {}
    for word, after in pairwise([*before_dashes(args), ""]):
        flag, _, value = word.partition("=")
        if takes_value(flag, known) and not known[flag].multiple:
            values.setdefault(max(known[flag].opts, key=len), []).append(value or after)
    for flag, stated in values.items():
        if len(stated) > 1:
            raise UsageError(f"{flag} is given {len(stated)} times", " ".join(args)[:200],
                             f"give it once: `{flag} {typed(stated[-1:])}`")  # fmt: skip


def check_command(word: str, commands: Mapping[str, str], *, alone: bool) -> None:
    """Raise UsageError for a first word that is neither a command nor a file. `commands`: name → what it does; `alone`:
    whether no other word follows."""
    if exists(word) or not (word in FOREIGN_COMMANDS or re.fullmatch(r"[A-Za-z][A-Za-z-]*", word)):
        return
    if completed(word) != word:
        return
    near = get_close_matches(word, commands, 1, 0.7) or [FOREIGN_COMMANDS[w] for w in (word,) if w in FOREIGN_COMMANDS]
    near = near or [name for name in commands if len(word) > 2 and name.startswith(word)]
    from ..planning.fitting_files import missing_input

    files = [Path(path).name for path in missing_input(expand(word), adapter=False).suggestion[1:]]
    fix = f"name a base, or one of the commands: {', '.join(commands)}"
    if near or files:
        suggestions = [f"lora-merge {command} … ({_first_letter_small(commands[command])})" for command in near]
        fix = "did you mean " + " or ".join([*suggestions, *files]) + "?"
    error = UsageError("there is neither such a command nor such a file", word, fix)
    raise error.instead(word, *(() if alone else near[:1])) if near else error.instead(word, *files)


def _first_letter_small(text: str) -> str:
    return f"{text[:1].lower()}{text[1:]}".rstrip(".")
