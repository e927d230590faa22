"""The recipe in the metadata of an output, checked.

Anybody may have written the file, so the recipe's size is bounded, and its names must not lead out of the folders that
are searched for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias

from ..adapters.modules import looks_like_adapter
from ..addresses import parse
from ..algorithms import COUNT
from ..disk.publish import NAME_LIMIT
from ..errors import AdapterAsBase, InputError, UsageError
from ..files.checkpoint import Index
from ..job import Adapter, Job, make_job
from ..models.names import names
from ..options import OPTIONS
from ..planning.recipe import KEY, parsed
from ..text import quoted, shown

MERGE_FROM_INPUTS: Final = "merge again from its base and adapters"
NAME_ADAPTERS: Final = "name its adapters"


@dataclass(frozen=True)
class Input:
    """One input as a recipe names it: its files by name inside it, size and SHA-256."""

    name: str
    files: tuple[tuple[str, int, str], ...]
    folder: bool
    config: str  # SHA-256 of the configuration that is read with it; empty in recipes without it
    stated: str  # SHA-256 of the file next to an adapter that states its scale; empty without one
    source: str = ""  # the pinned address that it came from; empty for a file of this machine

    @property
    def is_elsewhere(self) -> bool:
        """Whether it came from another machine: a recipe, which anybody may have written, makes no request to this
        one."""
        address = parse(self.source) if self.source else None
        return address is not None and not address.name.lower().startswith("http:")


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    version: str
    base: Input
    adapters: tuple[RecipeAdapter, ...]
    options: Mapping[str, Any]
    map_name: str
    map_text: str | None
    tokenizer: str  # the value of the option, of a path its last name; "" without one

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The base and the adapters."""
        return (self.base, *(a for a, _, _ in self.adapters))

    def job(self, paths: Sequence[Path], output: str | Path, **options: Any) -> Job:
        """Return the job that the recipe describes, for inputs at `paths`; UsageError for values that are invalid."""
        adapters = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths[1:], self.adapters, strict=True)]
        return make_job(paths[0], adapters, output, **{**self.options, **options})


def as_merged(index: Index) -> Index:
    """Return a checkpoint that adapters may be taken out of; InputError for an adapter."""
    if KEY not in index.metadata and looks_like_adapter(index):
        raise AdapterAsBase("an adapter, not a merged checkpoint", str(index.path),
                            "name the merged checkpoint first, and after it the adapters to take out")  # fmt: skip
    return index


def read_recipe(index: Index, instead: str = MERGE_FROM_INPUTS) -> Recipe:
    """Return the recipe of an output; InputError where it has none (`instead`: what to do then) or a damaged one."""
    text = index.metadata.get(KEY)
    if text is None:
        what = names(index).what
        where = f"{index.path}: {what}" if what.startswith(("a ", "an ")) else str(index.path)
        raise InputError("the file says nothing about how it was made", where,
                         f"only outputs of lora-merge carry a recipe; {instead}")  # fmt: skip
    return _checked(parsed(text), index.path)


def history(index: Index) -> list[Recipe]:
    """Return the recipe of a merge, then that of its base if a merge has written that too, and so on; [] without one.

    A damaged recipe, and those before it, are left out.
    """
    recipes: list[Recipe] = []
    value = parsed(index.metadata.get(KEY, ""))
    with suppress(InputError):
        while value is not None:
            recipes.append(_checked(value, index.path))
            value = value["base"].get("recipe")
    return recipes


def _checked(value: Any, path: Path) -> Recipe:
    """Return a recipe from its JSON value; InputError for one that is damaged, or of an adapter."""
    try:
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        if isinstance(command := value.get("command"), str):
            raise InputError(f"an adapter that {command} has written, not a merged checkpoint", str(path),
                             "verify and replay take an adapter alone; name a merged checkpoint")  # fmt: skip
        recipe = _recipe_of(value)
        recipe.job([path] * len(recipe.inputs), path)  # checks its values before a user adds others
        return recipe
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(path, str(e)) from e
    except UsageError as e:
        raise damaged(path, f"{e.what} ({e.where})") from e


def damaged(path: Path, why: str) -> InputError:
    """Return the error for a recipe in the file at `path` that cannot be followed."""
    return InputError(f"the recipe is damaged: {why}", f"{path}: {KEY}", MERGE_FROM_INPUTS)


def _recipe_of(value: Mapping[str, Any]) -> Recipe:
    adapters = uses_of(value["adapters"])
    options: dict[str, Any] = {
        o.name: text_of(value[o.name] if o.recorded == "always" else value.get(o.name, o.default))
        for o in OPTIONS.values()
        if o.recorded in ("always", "given") and o.words
    }
    if "setting" in value:
        options["setting"] = dict(value["setting"])
    kinds: dict[str, Callable[[Any], Any]] = {"whole": _count, "number": number_of}
    options |= {o.name: kinds[o.kind](value[o.name]) for o in OPTIONS.values() if o.kind in kinds and o.name in value}
    options |= {"keep_precision": [*map(text_of, value["keep_precision"])]} if "keep_precision" in value else {}
    options |= {"title": text_of(value["title"])} if "title" in value else {}
    options |= {"metadata": dict(value["metadata"])} if "metadata" in value else {}
    table = value.get("map", {"name": "", "text": None})
    map_text = None if table["text"] is None else text_of(table["text"])
    name = "" if map_text is None else _file_name(table["name"])
    tokenizer = _file_name(value["tokenizer"]) if "tokenizer" in value else ""
    return Recipe(text_of(value["version"]), input_of(value["base"]), adapters, options, name, map_text, tokenizer)


RecipeAdapter: TypeAlias = tuple["Input", float, tuple[tuple[str, float], ...]]
"""An adapter of a recipe: the input, its strength, and parts of the model with their factors."""


def uses_of(values: Sequence[Any]) -> tuple[RecipeAdapter, ...]:
    """Return the adapters that a recipe names; LookupError, TypeError or ValueError for other values."""
    uses = tuple(
        (input_of(a), number_of(a["strength"]), tuple((text_of(p), number_of(f)) for p, f in a["parts"]))
        for a in values
    )
    if not uses:
        raise ValueError("it names no adapter")
    return uses


def input_of(value: Mapping[str, Any]) -> Input:
    """Return an input that a recipe names; LookupError, TypeError or ValueError for other values."""
    files = tuple((_inside(f["name"]), _count(f["size"]), text_of(f["sha256"])) for f in value["files"])
    if not files:
        raise ValueError("an input without files")
    return Input(text_of(value["name"]), files, bool(value.get("folder")), text_of(value.get("config", "")),
                 text_of(value.get("stated", "")), _source(value.get("source", "")))  # fmt: skip


def _source(value: Any) -> str:
    """Return the address of an input; ValueError for what is no address."""
    text = text_of(value)
    if text and (":" not in text or parse(text) is None):
        raise ValueError(f"{quoted(text)} is not an address")
    return text


def text_of(value: Any) -> str:
    """Return a text of a recipe; TypeError or ValueError for another value."""
    if not isinstance(value, str):
        raise TypeError(f"{quoted(str(value))} is not a text")
    value.encode()  # ValueError for an unpaired surrogate
    return value


def _count(value: Any) -> int:
    if (size := COUNT.number(value)) is None:
        raise TypeError(f"{quoted(shown(value))} is not a size")
    return size


def number_of(value: Any) -> float:
    """Return a number of a recipe; TypeError for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{quoted(str(value))} is not a number")
    return float(value)


def _inside(value: Any) -> str:
    """Return a name of a file inside its input; ValueError for one that leads out of it."""
    path = PurePosixPath(text_of(value))
    if path.is_absolute() or ".." in path.parts or "\\" in value or "\0" in value or not path.parts:
        raise ValueError(f"{quoted(value)} is not a path inside the input")
    return str(path)


def _file_name(value: Any) -> str:
    """Return a name that a file in any folder can have."""
    if "/" in _inside(value) or len(value.encode()) > NAME_LIMIT or not value.isprintable():
        raise ValueError(f"{quoted(value)} is not the name of a file")
    return str(value)
