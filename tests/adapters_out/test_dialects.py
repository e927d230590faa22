"""Every dialect for every architecture: its names lead back to the rows that they are written for, and from any dialect
to any other the rows stay. Generated from the table of dialects and the headers of full-size models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

import lora_merge
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.groups import Place, places
from lora_merge.models.inferred_base import (
    InferredParameter,
    OtherModel,
    UnknownBaseError,
    candidates,
    complete,
    inferred_base,
)
from lora_merge.models.names import Names
from lora_merge.models.weights import RowSlice, WeightView
from lora_merge.options import ADAPTER_OPTIONS, DIALECT_NAMES
from tests.kit.architectures import ALL
from tests.kit.dialects import EVERY, base, drawn, matrices, named

MODELS = [n for n in ALL if n.split("/")[0] in ("native", "diffusers") and "vae" not in n and "openclip" not in n]


@cache
def written(model: str, to: str) -> tuple[Place, ...]:
    found = base(model)
    return tuple(places(found, DIALECTS[to].of(found.known)))


WRITTEN = [(model, to) for model in MODELS for to in DIALECTS if model in EVERY or to == drawn(model, DIALECTS)]


@pytest.mark.few(7)
@pytest.mark.parametrize(("model", "to"), WRITTEN)
def test_name_leads_back_to_the_rows_that_it_is_written_for(model: str, to: str) -> None:
    """And every weight has a name for each of its rows, no row has two."""
    found, dialect = base(model), DIALECTS[to].of(base(model).known)
    rows: dict[str, list[RowSlice]] = {}
    modules = set()
    for place in written(model, to):
        name = named(dialect, place)
        assert (name, place.parameter) not in modules, name
        modules.add((name, place.parameter))
        for piece in place.view.row_slices:
            rows.setdefault(piece.key, []).append(piece)
        if len(place.view.shape) < 2 and model == "native/hunyuandit":
            continue  # its second and third norm change places between the layouts: such a name is refused when it is read
        view = found.find(name, place.parameter)
        assert view is not None, name
        assert view.row_slices == place.view.row_slices, name
    for key, pieces in rows.items():
        ends = [0, *(p.stop for p in sorted(pieces))]
        assert dialect.table or [p.start for p in sorted(pieces)] == ends[:-1], key
    assert dialect.table or rows.keys() == {key for part in found.parts for key in part.keys.values()}


def test_every_list_of_dialects_is_that_of_the_table() -> None:
    """The help of the options, the docstring of `convert`, the page of recipes, README and changelog."""
    assert sorted(DIALECTS) == sorted(DIALECT_NAMES)
    root = Path(lora_merge.__file__).parents[1]
    readme, changelog, page = (
        (root / name).read_text(encoding="utf-8")
        for name in ("README.md", "CHANGELOG.md", "configs/site/pages/recipes.md")
    )
    (trainers,) = (line for line in readme.splitlines() if line.startswith("| trainers |"))
    (after,) = re.findall(r"## An adapter for another program\n(.*?)\n## ", page, re.DOTALL)
    for text in (
        ADAPTER_OPTIONS["to"].help,
        ADAPTER_OPTIONS["format"].help,
        inspect.getdoc(lora_merge.convert),
        trainers,
        changelog,
        after,
    ):
        assert not [name for name in DIALECTS if name not in str(text).lower()], text


Rows = list[tuple[str, int, int]]
"""Rows of a weight: module of the adapter, first row, end; neighbours are joined."""


class Words:
    """An adapter's modules by the rows that they change."""

    def __init__(self, modules: Mapping[str, WeightView]) -> None:
        self.by_key: dict[str, list[tuple[RowSlice, str, int]]] = {}
        for name, view in modules.items():
            for piece, at in view.addresses():
                self.by_key.setdefault(piece.key, []).append((piece, name, at))

    def of(self, view: WeightView) -> Rows:
        """The rows of a view, as rows of the modules."""
        found: Rows = []
        for piece in view.row_slices:
            for own, name, at in sorted(self.by_key.get(piece.key, ())):
                low, high = max(piece.start, own.start), min(piece.stop, own.stop)
                first, end = at + low - own.start, at + high - own.start
                if low < high and found and found[-1][0] == name and found[-1][2] == first:
                    found[-1] = (name, found[-1][1], end)
                elif low < high:
                    found.append((name, first, end))
        return found


def alone(adapter: Mapping[str, WeightView], to: str) -> Iterator[dict[str, Rows]]:
    """What each model that the names fit makes of an adapter without a base."""
    changes = [InferredParameter(name, "weight", view.shape) for name, view in adapter.items()]
    for architecture in candidates(changes):
        with suppress(OtherModel):
            dialect = DIALECTS[to].of(architecture)
            parts = [complete(part, dialect.layout(part)) for part in inferred_base(changes, architecture)]
            found = Names(parts, {key: shape for part in parts for key, shape in part.shapes.items()})
            own = Words({c.module: view for c in changes if (view := found.find(c.module))})
            yield {name: own.of(view) for name, view in matrices(found, to).items()}


PAIRS = [("kohya", "diffusers"), ("diffusers", "comfy"), ("comfy", "kohya"), ("peft", "kohya"), ("onetrainer", "comfy"),
         ("lycoris", "diffusers"), ("kohya", "comfy")]  # fmt: skip
ALIKE = (
    "sd21",
    "sdxl-refiner",
    "animatediff",
    "sd35-large",
    "sky-reels-v2",
    "chrono-edit",
    "wan",
    "wan-t2v-14B",
    "xvla-0.4",
)
"""Models of the same names as others."""
UNKNOWN = ("ace-step", "bria", "cog-video-x", "cog-view4", "consis-id", "ernie-image", "glm-image", "joy-image-edit", "koala",
           "kandinsky6-sr", "kolors", "stable-audio-3", "long-cat-image", "motif-video", "ovis-image", "prx", "hidream-o1", "pi0", "wan-animate-14B")  # fmt: skip
"""Models whose adapters have no names of their own, so that a base has to be given."""


@pytest.mark.few(5)
@pytest.mark.parametrize(("model", "pair"), [(m, drawn(m, PAIRS)) for m in MODELS if not m.endswith(ALIKE)])
def test_rows_stay_without_a_base_or_it_is_asked_for(model: str, pair: tuple[str, str]) -> None:
    """An adapter for every matrix, from one dialect to another: the pairs change from model to model."""
    of, to = pair
    adapter = matrices(base(model), of)
    own = Words(adapter)
    wanted = {name: own.of(view) for name, view in matrices(base(model), to).items()}
    try:
        found = [*alone(adapter, to)]
    except UnknownBaseError:
        found = []
    if any(one != found[0] for one in found):  # convert refuses this
        found = []
    assert all(one == wanted for one in found)
    assert found or any(name in model for name in UNKNOWN), "it is refused"
