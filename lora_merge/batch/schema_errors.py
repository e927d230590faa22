"""What is wrong in a jobs file, in sentences: the mistakes that pydantic finds, and the error that names them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from ..errors import UsageError
from ..files.yaml_source import Place
from ..job import MOST_ADAPTERS
from ..options import alike
from ..text import Lines
from .schema import LONGEST_PATH, AdapterEntry, Glob, JobDefaults, JobEntry, JobsFile

_SENTENCES: Final = {
    "model_type": "should be a table of fields, in YAML or JSON: version: 1, and jobs",
    "dict_type": "should be a table of names and values",
    "list_type": 'should be a list: [a, b]; of files: {glob: "loras/*.safetensors"}',
    "string_type": "should be text; quote it",
    "bool_type": "should be true or false",
    "too_short": "should not be empty; write one entry or more",
    "string_too_short": "should not be empty",
    "string_too_long": f"should have at most {LONGEST_PATH} characters",
    "too_long": f"should have at most {MOST_ADAPTERS} entries",
}

SHAPE: Final = "write version: 1 and jobs: [{base: FILE, adapters: [FILE], output: FILE}]"

MERGEKIT: Final = frozenset({"merge_method", "models", "slices", "base_model", "tokenizer_source"})
"""Fields that a mergekit configuration begins with."""

REQUIRED: Final = {
    "version": "write version: 1 in the first line",
    "jobs": SHAPE,
    "base": "write base: FILE, here or under defaults",
    "adapters": "write adapters: [FILE], here or under defaults",
    "output": "write output: FILE",
}
"""Required field → how it is written."""

STRENGTH_WORDS: Final = dict.fromkeys(
    ("strength", "strengths", "weight", "ratio"), "write it after the adapter: style.safetensors:0.8"
)
"""Field of a job or of the defaults that people mean a strength by → how it is written."""

FIELD_WORDS: Final = {
    **STRENGTH_WORDS,
    **dict.fromkeys(("model", "checkpoint", "ckpt"), "did you mean base?"),
    **dict.fromkeys(("loras", "adapter"), "did you mean adapters?"),
    **dict.fromkeys(("out", "save_to", "name"), "did you mean output?"),
    "precision": "did you mean dtype?",
}
"""Field of a job that people write from habit → what it is called here."""


def failure(value: Any, name: str, lines: Sequence[str], count: int) -> UsageError:
    """Return the error for the mistakes in a jobs file; of one mistake, how to correct it may follow "; ".

    `lines`: where each is and what it is, as far as they are listed; `count`: all of them.
    """
    fields = value.keys() if isinstance(value, Mapping) else frozenset()
    if "jobs" not in fields and MERGEKIT & fields:
        return UsageError("a mergekit configuration, which merges checkpoints, not a jobs file", name, SHAPE)
    what, where = (f"{count} mistakes" if count > 1 else "a mistake"), [*lines]
    fix = f"correct {'them' if count > 1 else 'it'}; lora-merge schema jobs prints what is allowed"
    if not isinstance(value, Mapping):
        fix = "lora-merge batch --init OTHER.yaml writes a first one"
    elif "jobs" not in fields and JobEntry.model_fields.keys() & fields:
        fix = f"the fields of a job belong below jobs: {SHAPE}"
    elif count == 1 and (head := lines[0].rpartition("; "))[2].startswith(
        ("write ", "did you mean ", "check ", "download ")
    ):
        where[0], _, fix = head
    return UsageError(f"{what} in the jobs file", Lines.of(where), fix)


MOST_SUGGESTED: Final = 200  # mistakes that come with the nearest right name


def problems(error: ValidationError) -> Iterator[tuple[Place, str]]:
    """Return where each mistake is, and what it is in one sentence, with the nearest right name."""
    for n, e in enumerate(error.errors(include_url=False)):
        place: Place = e["loc"]
        if len(place) > 4 and place[2] == "matrix" and place[3] != "exclude":
            place = (*place[:4], *place[5:])  # pydantic names the kind of axis there
        kind, context = e["type"], e.get("ctx", {})
        if kind == "extra_forbidden":
            model, word = _model(place), str(place[-1])
            known = FIELD_WORDS if model is JobEntry else STRENGTH_WORDS if model is JobDefaults else {}
            near = f"; {known[word]}" if word in known else ""
            near = near or (nearest(word, model.model_fields) if n < MOST_SUGGESTED else "")
            yield place, f"no field is called {word!r}{near}"
        elif kind == "missing":
            yield place, f"this field is required{f'; {how}' if (how := REQUIRED.get(str(place[-1]))) else ''}"
        elif kind == "literal_error":
            allowed = str(context["expected"])
            options = [o.strip(" '") for o in allowed.replace(" or ", ",").split(",")]
            near = nearest(str(e["input"]), options, every=False) if n < MOST_SUGGESTED else ""
            yield place, f"should be {allowed}, not {e['input']!r}{near}"
        elif kind == "value_error":
            yield place, str(context["error"])
        else:
            yield place, _SENTENCES.get(kind, e["msg"])


def _model(place: Place) -> type[BaseModel]:
    """Return the model that an unknown field at `place` was meant for."""
    if len(place) <= 3:
        return (JobsFile, JobDefaults, JobEntry)[len(place) - 1]
    return Glob if place[2] == "matrix" else AdapterEntry


def nearest(word: str, known: Iterable[str], *, every: bool = True) -> str:
    """Return "; did you mean X?", or what there is; empty where nothing helps."""
    names = [k for k in known if k != word]
    matches = difflib.get_close_matches(word, alike(word, names), n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]}?"
    return f"; there are {', '.join(names)}" if every and names else ""
