"""The user's own command line with its mistake corrected, as the fix of an error: it can be pasted."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..command import MERGE
from ..errors import AdapterAsBase, MergeError, NoAdapter
from ..paths import exists, expand, split_strength, typed, with_found_ending, words_of
from ..text import CODE, Lines, Message
from .terminal import without_global_options

LONGEST_LINE: Final = 400
"""Characters of a line that is printed; a longer one shows nothing that its fix does not show."""

STRENGTH_AFTER_BASE: Final = "a strength after the base"
"""The mistake of a line whose first word is an adapter with its strength, or a base with one."""

PLACE: Final = re.compile(r"\b(?:BASE|ADAPTER)\b")
"""The place for a file in a command."""


def line(words: Sequence[str]) -> str:
    """Return words behind `lora-merge` as they are typed."""
    return typed(["lora-merge", *words])


def flags(parameters: Sequence[Any]) -> dict[str, bool]:
    """Return option → whether it has no value, from the parameters of a command."""
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    return {name: option.is_flag for option in options for name in (*option.opts, *option.secondary_opts)}


def split_words(words: Sequence[str], known: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the words that are no options, and the options with their values. `known`: see `flags`."""
    plain, options, value = list[str](), list[str](), False
    for word in words:
        is_option = word.startswith("-") and len(word) > 1 and not value
        (options if is_option or value else plain).append(word)
        value = is_option and "=" not in word and not known.get(word, True)
    return plain, options


def _name_adapter(error: NoAdapter) -> None:
    """Put an adapter from the folder of the model into the fix of an error."""
    from ..planning.checkpoint_cache import missing_input

    place = "ADAPTER"
    lookup = missing_input(Path(error.where).with_name(place), adapter=True)
    near = next((Path(file) for file in lookup.suggestion[1:]), Path(place))
    adapter = near.name if near.parent in (Path(), Path.cwd()) else str(near)
    if near.name != place:
        fix = error.fix.written
        error.reword(lambda text: f"{fix}{lookup.fix.written.removeprefix('check the path')}" if text == fix else text)
    error.instead(error.where, error.where, f"{adapter}:0.8")


def correct(error: BaseException, commands: Mapping[str, Any]) -> None:
    """Put the user's own line into the fix of an error, if the error shows what was meant. `commands`: by name."""
    words = without_global_options(sys.argv[1:], checked=False)
    if not isinstance(error, MergeError) or not words:
        return
    if isinstance(error, NoAdapter):
        _name_adapter(error)
    command, rest = (words[0], words[1:]) if words[0] in commands else (MERGE, words)
    as_base = isinstance(error, AdapterAsBase) or (error.what == STRENGTH_AFTER_BASE and _is_adapter_file(error.where))
    if as_base and command == MERGE:
        known = {name: flags(commands[name].params) for name in (MERGE, "combine")}
        fix = _in_order(rest, known)
    else:
        parameters = commands[command].params
        right = [[*_corrected(words, error.suggestion)]] if len(error.suggestion) > 1 else []
        changes = _changes(error.fix, parameters, first=not right)
        right += [_with_options(words, change, parameters) for change in changes]
        right = [new for new in right if new != words and not _names_twice(new, words)]
        lines = {frozenset(new): line(new) for new in reversed(right)}  # the first of two that differ in the order
        fix = f"write {('; then ' if len(changes) > 1 else '; or ').join(reversed(lines.values()))}"
        if not lines:
            fix = _filled(error.fix, rest, parameters)
        elif len(changes) < 2 and not _says_as_much(right[0], error.fix):
            fix = f"{error.fix}{'' if error.fix.endswith('?') else ';'} {fix}"
    if fix and len(fix) < LONGEST_LINE + len(error.fix):
        error.reword(lambda text: fix if text == error.fix.written else text)


def _filled(fix: Message | Lines, words: Sequence[str], parameters: Sequence[Any]) -> str:
    """Return a fix with the user's own files in the place of BASE, ADAPTER and ADAPTER2 of its commands; without the
    other purposes ("to …") for which the line has no file, or none that fits."""
    if not any(map(PLACE.search, CODE.findall(fix.written))):
        return ""
    plain, _ = split_words(words, flags(parameters))
    paths = {word: split_strength(word.partition(",")[0])[0] or word for word in plain}
    files = {path: with_found_ending(path) for path in paths.values()}
    paths = {word: path for word, path in paths.items() if exists(files[path])}
    adapters = [word for word, path in paths.items() if is_adapter(path)]
    models = [path for word, path in paths.items() if word not in adapters]
    by_user = {str(expand(files[path])): path for path in paths.values()}

    def fill(match: re.Match[str]) -> str:
        command = [by_user.get(word, word) for word in words_of(match[1])]
        free = [model for model in models if model not in command]
        if command[1:3] == ["extract", "BASE"]:
            free = [model for model in free if all(_are_alike(model, other) for other in models if other in command)]
        files = {"BASE": free[:1], "ADAPTER": adapters[:1], "ADAPTER2": adapters[1:2]}
        filled = [file for word in command for file in files.get(word.partition(":")[0]) or [word]]
        return f"`{typed(filled)}`" if filled != words_of(match[1]) else match[0]

    ways = CODE.sub(fill, fix.written).split("; ")
    return "; ".join(way for way in ways if not (way.startswith("to ") and any(map(PLACE.search, CODE.findall(way)))))


def _says_as_much(words: Sequence[str], fix: str) -> bool:
    """Return whether a line has all words of a fix, such as "use bf16", so that the line alone is enough."""
    order = re.fullmatch("(?:use|write|name it) ([^;?]+)", fix)
    stated = {part for word in words for part in (word, *word.split("=", 1))}
    with suppress(ValueError):  # a quote in a sentence
        return order is not None and {*words_of(order[1])} <= stated
    return False


def _changes(fix: Message | Lines, parameters: Sequence[Any], *, first: bool) -> list[list[tuple[str, str]]]:
    """Return the options of a command with which its line is right, each with its value ("" for a switch): those of the
    first way, or of each step of a fix with "then". `first`: only if that is the first way of a fix; a switch, such
    as --overwrite, may also be another one."""
    before, *pieces = CODE.split(fix.written)
    known, changes = flags(parameters), list[list[tuple[str, str]]]()
    for piece in pieces[::2] if ", then " in pieces[1::2] else pieces[:1]:
        words = words_of(piece)
        change = [*zip(words[::2], words[1::2], strict=False)]
        if len(words) == 1 and known.get(words[0]):
            changes.append([(words[0], "")])
        elif change and not (first and " or " in before) and all(known.get(flag) is False for flag, _ in change):
            changes.append(change)
    return changes


def _with_options(words: Sequence[str], stated: Sequence[tuple[str, str]], parameters: Sequence[Any]) -> list[str]:
    """Return the words with these options in place of those of the same name; the words as they are if they have other
    mistakes, or an option that may be repeated, of which any may be the wrong one."""
    known = flags(parameters)
    names = {name: {*p.opts} for p in parameters if p.param_type_name == "option" for name in p.opts}
    repeatable = {name for p in parameters if p.multiple for name in p.opts}
    typed_options = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not typed_options <= known.keys() or typed_options & repeatable & {flag for flag, _ in stated}:
        return [*words]
    replaced = {name for flag, _ in stated for name in names[flag]}
    replaced |= {"--overwrite"} if "-o" in replaced else set()  # the new name is free
    kept, is_value = list[str](), False
    for word in words:
        flag, equals, _ = word.partition("=")
        kept += [word] * (not is_value and flag not in replaced)
        is_value = flag in replaced and not equals and not known[flag]
    return [*kept, *(word for option in stated for word in option if word)]


def _corrected(words: Sequence[str], suggestion: tuple[str, ...]) -> Iterator[str]:
    """Yield the words with those of a suggestion in place of its first one: a word, a value or a path."""
    wrong, *right = suggestion
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if flag == wrong:
            yield f"{right[0]}{equals}{value}"
        elif new := right[0] if value == wrong else _path(value, wrong, right[0]):
            yield f"{flag}{equals}{new}"
            yield from right[1:]
            right = right[:1]
        else:
            yield word


def _names_twice(new: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a line names one file twice in place of two, such as the base in the place of an adapter."""
    kinds = ({with_found_ending(split_strength(word.partition(",")[0])[0]) for word in line} for line in (new, words))
    return len(next(kinds)) < len(next(kinds))


def _path(word: str, wrong: str, right: str) -> str:
    """Return a word with another path in it, its strength and parts as they are; "" if it has not the wrong path."""
    path = split_strength(word.partition(",")[0])[0]
    with suppress(MergeError):  # a word of another kind
        if path and Path(wrong).is_absolute() and wrong in (str(expand(path)), str(expand(with_found_ending(path)))):
            new = path if right == wrong else str(Path(path).with_name(Path(right).name))
            return f"{new}{word[len(path) :]}"
    return ""


def _in_order(words: Sequence[str], known: Mapping[str, Mapping[str, bool]]) -> str:
    """Return the fix for a merge whose first word is an adapter: the model first, or `combine`."""
    plain, options = split_words(words, known[MERGE])
    paths = {word: split_strength(word.partition(",")[0])[0] or word for word in plain[1:]}
    models = [word for word, path in paths.items() if exists(with_found_ending(path)) and not is_adapter(path)]
    if models:
        first, *rest = [word for word in plain if word != models[0]]
        strength = models[0].removeprefix(paths[models[0]])  # a base has none: the adapter's is meant
        first += strength if split_strength(first.partition(",")[0])[1] is None else ""
        return f"name the base first: {line([paths[models[0]], first, *rest, *options])}"
    if len(plain) < 2:
        return f"name the base first: {line(['BASE', *plain, *options])}"
    both = options if {*options} & {"-o", "--output"} else [*options, "-o", "both.safetensors"]
    all_known = all(word.partition("=")[0] in known["combine"] for word in options if word.startswith("-"))
    joined = line(["combine", *plain, *(both if all_known else ["-o", "both.safetensors"])])
    return f"name the base first: {line(['BASE', *words])}; or combine the adapters: {joined}"


def _are_alike(one: str, other: str) -> bool:
    """Return whether two models have one architecture, so that the difference of them can be an adapter."""
    from ..files.checkpoint import open_checkpoint
    from ..models.names import names

    try:
        first, second = (names(open_checkpoint(expand(with_found_ending(word)))) for word in (one, other))
    except MergeError:
        return False
    return first.architecture == second.architecture


def _is_adapter_file(word: str) -> bool:
    """Return whether a word is an adapter's file with a strength."""
    path = split_strength(word)[0]
    return exists(with_found_ending(path)) and is_adapter(path)


def is_adapter(word: str) -> bool:
    """Return whether a word names an adapter, or a file that cannot be read."""
    from ..adapters.modules import looks_like_adapter
    from ..files.checkpoint import open_checkpoint

    try:
        return looks_like_adapter(open_checkpoint(expand(with_found_ending(word)), adapter=True))
    except MergeError:  # the merge itself reports it
        return True
