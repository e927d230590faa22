"""The user's own command line with its mistake corrected, as the fix of an error: it can be pasted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..command import MERGE
from ..errors import AdapterAsBase, MergeError, NoAdapter
from ..paths import JOBS_ENDINGS, exists, expand, split_strength, typed, with_found_ending, words_of
from ..text import CODE, Lines, Message

if TYPE_CHECKING:
    from ..files.checkpoint import Index

LONGEST_LINE: Final = 400
"""Characters of a line that is printed; a longer one shows nothing that its fix does not show."""

STRENGTH_AFTER_BASE: Final = "a strength after the base"
"""The mistake of a line whose first word is an adapter with its strength, or a base with one."""

Refusal: TypeAlias = Callable[[Sequence[str]], MergeError | None]
"""Words of a line → the error with which the line is refused, or None if it is accepted."""

FEW: Final = 3
"""Words that are named as the wrong ones of a line; of more the line itself is wrong."""

UNMERGE: Final = "unmerge"

STRENGTH_OPTIONS: Final = frozenset({"-s", "--strength", "--strength-for", "--weights", "--scale"})
"""Options whose values may not be one for each adapter."""

PLACES: Final = {"BASE": False, "TUNED": False, "MODEL": False, "ADAPTER": True, "ADAPTER2": True}
"""Place for a file in a command → whether an adapter belongs there."""


def line(words: Sequence[str]) -> str:
    """Return words behind `lora-merge` as they are typed."""
    return typed(["lora-merge", *words])


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command of click: as it is typed → its parameter."""
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}


def takes_value(word: str, known: Mapping[str, Any]) -> bool:
    """Return whether a word is an option with a value behind it. `known`: the options of the command."""
    return word in known and not known[word].is_flag


def split_words(words: Sequence[str], known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words that are no options, and the options with their values."""
    plain, options, value = list[str](), list[str](), False
    for word in words:
        is_option = word.startswith("-") and len(word) > 1 and not value
        (options if is_option or value else plain).append(word)
        value = is_option and takes_value(word, known)
    return plain, options


def is_clear(words: Sequence[str], known: Mapping[str, Any]) -> bool:
    """Return whether a line has no other reading: it has models, adapters and options of the command alone, and no
    option for strengths."""
    plain, options = split_words(words, known)
    names = {word.partition("=")[0] if word.startswith("--") else word for word in options if word.startswith("-")}
    files = all(path_of(word) and "," not in word and not word.endswith((*JOBS_ENDINGS, ".json")) for word in plain)
    return files and names <= known.keys() - STRENGTH_OPTIONS


def correct(error: MergeError, words: Sequence[str], commands: Mapping[str, Any]) -> None:
    """Put the user's own line into the fix of an error, if the error shows what was meant. `words`: of the line,
    without options of the program itself; `commands`: by name."""
    if not words:
        return
    command, rest = (words[0], words[1:]) if words[0] in commands else (MERGE, words)
    known = options_of(commands[command])
    if isinstance(error, NoAdapter) and (bases := _twice(words, known)):
        words = [word for n, word in enumerate(words) if _file(word) not in bases & {*map(_file, words[:n])}]
        others = split_words(words, known)[0][1 + (words[0] in commands) :]
        texts = {error.what.written: "the base is named twice"}
        texts |= {error.fix.written: f"leave the second one out: {line(words)}"} if others else {}
        error.reword(lambda text: texts.get(text, text))
        if others:
            return
    as_base = isinstance(error, AdapterAsBase) or (error.what == STRENGTH_AFTER_BASE and path_of(error.where))
    if as_base and command == MERGE:
        fix = _in_order(rest, known, options_of(commands["combine"]))
    elif as_base and (ordered := _models_first(words, known)):
        fix = f"{error.fix.partition(',')[0]}: {line(ordered)}"
    else:
        right = [[*_corrected(words, error.suggestion)]] if len(error.suggestion) > 1 else []
        changes = _changes(error.fix, known, first=not right)
        right += [_with_options(words, change, known) for change in changes]
        right = [in_places(new, known) for new in right or [[*words]]]
        right = [new for new in right if new not in ([], words) and not _twice(new, known) - _twice(words, known)]
        lines = {frozenset(new): line(new) for new in reversed(right)}  # the first of two that differ in the order
        fix = f"write {('; then ' if len(changes) > 1 else '; or ').join(reversed(lines.values()))}"
        if not lines:
            fix = _filled(error.fix, rest[:: -1 if command == UNMERGE else 1], known)  # the tuned model is first
        elif len(changes) < 2 and not _says_as_much(right[0], error.fix):
            fix = f"{error.fix}{'' if error.fix.endswith('?') else ';'} {fix}"
    if fix and len(fix) < LONGEST_LINE + len(error.fix):
        error.reword(lambda text: fix if text == error.fix.written else text)


def check_fix(error: MergeError, refusal: Refusal, rounds: int = 3) -> bool:
    """Name in a fix what is wrong with the line in it, and replace the line by the one that its own error has. Return
    whether the line is accepted. `refusal`: see `Refusal`; `rounds`: mistakes in a line that are looked for."""
    text = error.fix.written
    before, _, rest = text.rpartition("lora-merge ")
    with suppress(ValueError):  # a quote in a sentence
        words = words_of(rest)
        if "lora-merge " in before or "lora-merge " not in text or line(words) != f"lora-merge {rest}":
            return False
        if not rounds or any(re.match("[A-Z]{4}", word) and not exists(word) for word in words):  # BASE
            return False
        if (refused := refusal(words)) is None:
            return True
        mistake = f"{refused.what.written}; {refused.fix.written}"
        if accepted := check_fix(refused, refusal, rounds - 1):
            right = words_of(refused.fix.written.rpartition("lora-merge ")[2])
            wrong = [word for word in words if word not in right]
            of_words = f"{' '.join(wrong)}: " if 0 < len(wrong) < FEW else ""
            mistake = f"{of_words}{refused.what.written}; {refused.fix.written}"
            same = refused.what == error.what  # in another word
            fix = f"{before}{line(right)}" if same else f"{before.removesuffix('write ')}{mistake}"
        else:
            missing = next((f"{word}: " for word in words if str(expand(_bare(word))) == refused.where), "")
            fix = f"{text}; that line has a mistake, too: {missing}{mistake}"
        error.reword(lambda words: fix if words == text else words)
        return accepted
    return False


def _filled(fix: Message | Lines, words: Sequence[str], known: Mapping[str, Any]) -> str:
    """Return a fix with files in the places of its commands: the user's own ones, or those of the folder that fit. Of a
    command without a file that fits only what is before it stays, and nothing of another purpose ("to …")."""
    if "`lora-merge " not in fix.written:
        return ""
    ways, (plain, _) = list[str](), split_words(words, known)
    files = {word: path for word in plain if (path := path_of(word))}
    by_user = {path: word for word, path in files.items()}
    for way in fix.written.split("; "):
        pieces, unfilled, purpose = CODE.split(way), False, way.startswith("to ")
        for n, command in enumerate(pieces[1::2]):
            typed_words = words_of(command)
            command_words = [by_user.get(word, word) for word in typed_words]
            filled = in_places(command_words, known, [*files], folders=not purpose)
            if filled != command_words:  # places; otherwise the order is what the fix changes
                filled = _in_typed_order(filled, [*files])
            if not filled and not purpose:  # a usage line with some of the files is better than none
                filled = _with_first(command_words, known, [*files])
            unfilled |= not filled
            pieces[2 * n + 1] = f"`{command if filled in ([], typed_words) else typed(filled)}`"
        if not unfilled or not files:
            ways += ["".join(pieces)] * (not (unfilled and purpose))
        elif not purpose:
            ways.append(pieces[0].removesuffix(": ") if pieces[0].endswith(": ") else way)
    return "; ".join(ways)


def _in_typed_order(words: Sequence[str], stated: Sequence[str]) -> list[str]:
    """Return a command with its models in the order in which the user has them."""
    models = [word for word in stated if word in words and not is_adapter(path_of(word))]
    ordered = iter(models)
    return [next(ordered, word) if word in models else word for word in words]


def _with_first(words: Sequence[str], known: Mapping[str, Any], stated: Sequence[str]) -> list[str]:
    """Return a command with a file of the user in the first of its places alone; [] if none belongs there."""
    first, *others = [n for n, word in enumerate(words) if _place(word)] or [len(words)]
    end = others[0] if others else len(words)
    of_models = not any(PLACES.get(_place(words[n])) for n in others)  # an adapter has a strength, which is not known
    filled = in_places(words[:end], known, stated) if stated and first < end and of_models else []
    return [*filled, *words[end:]] if {*filled} & {*stated} else []


def in_places(
    words: Sequence[str], known: Mapping[str, Any], stated: Sequence[str] = (), *, folders: bool = True
) -> list[str]:
    """Return a command with files in the places BASE, ADAPTER …; [] without files that fit together.

    `stated`: the files to choose from; `folders`: whether one of the folder may be chosen for a role that has no
    file.
    """
    at = next((n for n, word in enumerate(words) if _place(word)), None)
    if at is None:
        return [*words]
    place, colon, strength = words[at].partition(":")
    partners = [path for word in split_words(words, known)[0] if (path := path_of(word))]
    for file in _of_role(partners, stated, adapter=PLACES[place], folders=folders):
        word = file if path_of(file) in map(path_of, stated) else f"{file}{colon}{strength}"
        if filled := in_places([*words[:at], word, *words[at + 1 :]], known, stated, folders=folders):
            return filled
    return []


def _of_role(partners: Sequence[str], stated: Sequence[str], *, adapter: bool, folders: bool) -> list[str]:
    """Return the files that may be in the place of a model or an adapter next to its partners."""
    from ..planning.fitting_files import fit, fitting

    others, of_role = [Path(path) for path in partners], False
    chosen = list[str]()
    for word in stated:
        if is_adapter(path := path_of(word)) is adapter:
            of_role = True
            free = Path(path) not in others and all(fit(Path(path), other) for other in others)
            chosen += [word if adapter else _bare(word)] * free  # a base has no strength
    if of_role or (stated and not folders):
        return chosen
    folder = others[0].parent if others else Path.cwd()
    return [_here(str(file)) for file in fitting(folder, others, adapter=adapter)]


def _here(path: str) -> str:
    """Return a path as it is typed in the current folder."""
    return Path(path).name if Path(path).parent == Path.cwd() else path


def _place(word: str) -> str:
    """Return the place for a file that a word of a command is; "" if it is none."""
    name = word.partition(":")[0]
    return name if name in PLACES and not exists(word) else ""


def path_of(word: str) -> str:
    """Return the path of the file that a word names, with its strength or without; "" if there is none."""
    path = with_found_ending(_bare(word))
    return str(expand(path)) if exists(path) else ""


def _bare(word: str) -> str:
    """Return the path in a word, without strength and parts."""
    return split_strength(word.partition(",")[0])[0] or word


def _says_as_much(words: Sequence[str], fix: str) -> bool:
    """Return whether a line has all words of a fix, such as "use bf16", so that the line alone is enough."""
    order = re.fullmatch("(?:use|write|name it) ([^;?]+)", fix)
    stated = {part for word in words for part in (word, *word.split("=", 1))}
    with suppress(ValueError):  # a quote in a sentence
        return order is not None and {*words_of(order[1])} <= stated
    return False


def _changes(fix: Message | Lines, known: Mapping[str, Any], *, first: bool) -> list[list[tuple[str, str]]]:
    """Return the options of a command with which its line is right, each with its value ("" for a switch): those of the
    first way, or of each step of a fix with "then". `first`: only if that is the first way of a fix; a switch, such
    as --overwrite, may also be another one."""
    before, *pieces = CODE.split(fix.written)
    changes = list[list[tuple[str, str]]]()
    for piece in pieces[::2] if ", then " in pieces[1::2] else pieces[:1]:
        words = words_of(piece)
        change = [*zip(words[::2], words[1::2], strict=False)]
        if len(words) == 1 and words[0] in known and known[words[0]].is_flag:
            changes.append([(words[0], "")])
        elif change and not (first and " or " in before) and all(takes_value(flag, known) for flag, _ in change):
            changes.append(change)
    return changes


def _with_options(words: Sequence[str], stated: Sequence[tuple[str, str]], known: Mapping[str, Any]) -> list[str]:
    """Return the words with these options in place of those of the same name; the words as they are if they have other
    mistakes, or an option that may be repeated, of which any may be the wrong one."""
    after = zip(["", *words], words, strict=False)  # the value of an option may begin with a hyphen, too
    options = {word.partition("=")[0] for before, word in after if word[:1] == "-" and not takes_value(before, known)}
    if not options <= known.keys() or any(known[flag].multiple for flag, _ in stated if flag in options):
        return [*words]
    replaced = {name for flag, _ in stated for name in known[flag].opts}
    replaced |= {"--overwrite"} if "-o" in replaced else set()  # the new name is free
    values = {value for _, value in stated if value}  # such as an output without its option
    right, is_value = list[str](), False
    for word in words:
        flag, equals, _ = word.partition("=")
        right += [word] * (not is_value and flag not in replaced and word not in values)
        is_value = flag in replaced and not equals and takes_value(flag, known)
    return [*right, *(word for option in stated for word in option if word)]


def _corrected(words: Sequence[str], suggestion: tuple[str, ...]) -> Iterator[str]:
    """Yield the words with those of a suggestion in place of its first one: a word, a value or a path."""
    wrong, *right = suggestion
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if equals and word == wrong:  # --json=FILE
            yield from right
        elif flag == wrong:
            yield f"{right[0]}{equals}{value}"
        elif new := right[0] if value == wrong else _path(value, wrong, right[0]) or _part(value, wrong, right[0]):
            yield f"{flag}{equals}{new}"
            yield from map(_here, right[1:])
            right = right[:1]
        else:
            yield word


def _twice(words: Sequence[str], known: Mapping[str, Any]) -> set[str]:
    """Return the files that a line names twice, such as a base that is also in the place of an adapter."""
    files = [*map(_file, split_words(words, known)[0])]
    return {file for file in files if files.count(file) > 1}


def _file(word: str) -> str:
    """Return the file that a word names, with its ending."""
    return with_found_ending(_bare(word))


def _path(word: str, wrong: str, right: str) -> str:
    """Return a word with another path in it, its strength and parts as they are; "" if it has not the wrong path."""
    path = split_strength(word.partition(",")[0])[0]
    with suppress(MergeError):  # a word of another kind
        if path and Path(wrong).is_absolute() and wrong in (str(expand(path)), str(expand(with_found_ending(path)))):
            new = path if right == wrong else str(Path(path).with_name(Path(right).name))
            return f"{new}{word[len(path) :]}"
    return ""


def _part(word: str, wrong: str, right: str) -> str:
    """Return a word with another part of a model in it, or another factor of one; "" if it has not the wrong part."""
    before = "(?<![^,:])" if right else "[,:]"  # a part that is left out has no comma
    new = re.sub(rf"{before}{re.escape(wrong)}(?=[=,]|$)", lambda _: right, word) if "=" in word else word
    return new if new != word else ""


def _in_order(words: Sequence[str], known: Mapping[str, Any], of_combine: Mapping[str, Any]) -> str:
    """Return the fix for a merge whose first word is an adapter, or a base with a strength: the model first, or
    `combine`, with its options."""
    plain, options = split_words(words, known)
    model = next((word for word in plain if (path := path_of(word)) and not is_adapter(path)), "")
    if model:
        # A base has no strength: that of the first adapter without one is meant.
        adapters, strength = [word for word in plain if word != model], model.removeprefix(_bare(model))
        free = [n for n, word in enumerate(adapters) if split_strength(word.partition(",")[0])[1] is None]
        for n in free[: bool(strength)]:
            adapters[n] = f"{_bare(adapters[n])}{strength}{adapters[n].removeprefix(_bare(adapters[n]))}"
        right = in_places([_bare(model), *(adapters or [f"ADAPTER{strength}"]), *options], known)
        way = "a base has no strength" if model == plain[0] else "name the base first"
        way += f", so {strength} is left out" if strength and adapters and not free else ""
        return f"{way}: {line(right)}" if right else way
    filled = in_places(["BASE", *words], known)
    first = f"name the base first: {line(filled)}" if filled else "name the base first"
    if len(plain) < 2:
        return first
    both = options if {*options} & {"-o", "--output"} else [*options, "-o", "both.safetensors"]
    all_known = all(word.partition("=")[0] in of_combine for word in options if word.startswith("-"))
    joined = line(["combine", *plain, *(both if all_known else ["-o", "both.safetensors"])])
    return f"{first}; or combine the adapters: {joined}"


def _models_first(words: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Return a line with its models before its adapters; [] without a model."""
    (command, *files), options = split_words(words, known)
    models = [word for word in files if path_of(word) and not is_adapter(path_of(word))]
    return [command, *models, *(word for word in files if word not in models), *options] if models else []


def is_adapter(word: str) -> bool:
    """Return whether a word names an adapter, or a file that cannot be read."""
    from ..adapters.modules import looks_like_adapter

    file = opened(word)
    return file is None or looks_like_adapter(file)


def opened(word: str) -> Index | None:
    """Return the adapter or model that a word names; None if it cannot be read, which the command itself reports."""
    from ..files.checkpoint import open_checkpoint

    try:
        return open_checkpoint(expand(with_found_ending(word)), adapter=True)
    except MergeError:
        return None
