"""Names are worked out form by form; the result is that of all names at once."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.algorithms import Shape
from lora_merge.errors import AmbiguousName
from lora_merge.models.name_table import (
    INNER,
    NORM_PARAMETERS,
    NameTable,
    Views,
    canonical,
    form,
    other_names,
    put,
    spelled,
)
from lora_merge.models.names import Names, names, written
from lora_merge.models.network import Component
from lora_merge.models.prefixes import PREFIXES
from lora_merge.models.weights import WeightView
from tests.kit.files import index
from tests.kit.pairs import examples

HEADERS = Path(__file__).parents[1] / "headers"
USUAL = ("model.", "transformer.", "bert.", "vit.", "deit.")


def shapes(name: str) -> dict[str, Shape]:
    table = json.loads(gzip.decompress((HEADERS / f"{name}.json.gz").read_bytes()))
    return {key: tuple(shape) for key, shape in table.items()}


def others(path: str, inner: tuple[str, ...]) -> Iterator[str]:
    module, _, leaf = path.rpartition(".")
    if leaf not in ("weight", "bias"):
        yield f"{path}.weight"
        if leaf in NORM_PARAMETERS:
            yield f"{module}.{NORM_PARAMETERS[leaf]}"
        yield from (f"{path[: -len(e) - 1]}.{e}" for e in ("weight", "bias") if leaf.endswith(f"_{e}"))
    if path.startswith(inner):
        yield path.split(".", 1)[1]


def flattened(found: Views) -> Views:
    flat: Views = {}
    for path, view in found.items():
        module, dot, leaf = path.rpartition(".")
        put(flat, f"{module.replace('.', '_')}{dot}{leaf}", view)
    return flat


def all_at_once(t: NameTable, heads: tuple[str, ...] = ()) -> tuple[Views, Views]:
    """Every dotted and every flat name, by the definition: strong names, then weaker ones, where they are not taken."""
    whole, own = canonical(t._keys, t._keys, t._shapes, t._native)
    strong = dict(whole)
    for name, view in [*own, *spelled(whole, t._spellings)]:
        put(strong, name, view)
    inner = (*(USUAL[:1] if any(n.startswith("model.") for n in strong) else USUAL), *heads)
    weak: Views = {}
    for path, view in strong.items():
        for other in others(path, inner):
            put(weak, other, view)
    return weak | strong, flattened(weak) | flattened(strong)


def check(t: NameTable, dotted: Names, flat: Views, asked: list[str]) -> None:
    for name in asked:
        assert t.dotted(name) == (dotted.get(name), name in dotted), name
        assert t.flat(name) == (flat.get(name), name in flat), name


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    ["transformers/gpt2", "transformers/phi3-mini", "transformers/falcon-7b", "transformers/t5-small",
     "transformers/mixtral-8x7b.in-memory", "transformers/gpt-oss-20b", "native/sd3", "native/zimage-fused",
     "diffusers/lumina2"],
)  # fmt: skip
def test_every_name_is_where_it_is_in_the_whole_table(name: str) -> None:
    random = Random(name)
    for part in names(index(shapes(name))).parts:
        dotted, flat = all_at_once(part._table)
        some = [n for table in (dotted, flat) for n in random.sample(sorted(table), min(200, len(table)))]
        moved = [n.replace("0", random.choice("0127")) for n in some]
        check(part._table, dotted, flat, [*some, *moved])


WORDS = st.sampled_from(
    ["model", "transformer", "layers", "0", "1", "12", "1234567890", "#", "norm1", "3_weight", "mlp", "experts", "scale",
     "gamma", "gate_proj", "up_proj", "gate_up_proj", "block_sparse_moe", "w1", "x_weight", "a_b", "weight", "bias", ""]
)  # fmt: skip
PATHS = st.lists(WORDS, min_size=1, max_size=6).map(".".join)


@settings(max_examples=examples(60), deadline=None)
@given(keys=st.sets(PATHS, max_size=12), asked=st.lists(PATHS, max_size=8), inner=st.sampled_from(["", "mlp.", "0."]))
def test_odd_names_too(keys: set[str], asked: list[str], inner: str) -> None:
    llm = names(index({"model.embed_tokens.weight": (4, 2), "model.layers.0.input_layernorm.weight": (2,)})).parts[0]
    own = {key: key for key in sorted(keys)}
    part = Component("denoiser", "model", "", llm.architecture, llm.layout, inner=inner, keys=own,
                     shapes=dict.fromkeys(own, (2, 2)))  # fmt: skip
    dotted, flat = all_at_once(part._table, (inner,) if inner else ())
    check(part._table, dotted, flat, [*asked, *dotted, *flat])


def one_by_one(found: Names, module: str, parameter: str) -> Any:
    """What `find` gives, by the definition: every reading of this one name, looked up in every component."""
    for name in written(module):
        views: list[WeightView | None] = []
        for hint, body in found._readings(name):
            places = [(part.role, *part.find(body, parameter)) for part in found.hinted(hint)]
            denoisers = [view for role, view, known in places if known and role == "denoiser"]
            views += denoisers or [view for _, view, known in places if known]
        if views:
            one = None not in views and all(view == views[0] for view in views)
            one = one and not found._twins_of(views[0], module)
            return found.as_stored(views[0]) if one else AmbiguousName
    return None


def by_pattern(found: Names, module: str, parameter: str) -> Any:
    try:
        return found.find(module, parameter)
    except AmbiguousName:
        return AmbiguousName


def asked(found: Names, random: Random, count: int) -> Iterator[tuple[str, str]]:
    """Names of every spelling, dotted and flat, behind all kinds of prefixes, with numbers that there are or are not."""
    starts = [*(p for p, _ in found._prefixes), *sorted(dict(PREFIXES)), "text_encoders.t5."]
    for part in found.parts:
        forms = sorted({*part._table._sources, *part._table._weak_forms})
        for of in random.sample(forms, min(count, len(forms))):
            for _ in range(3):
                name = re.sub("#", lambda _: random.choice(["0", "0", "1", "2", "7", "19"]), of)
                module, _, parameter = name.rpartition(".")
                start = random.choice(["", part.prefix, random.choice(starts)])
                start = random.choice(["", "", random.choice(starts)]) + start
                module = random.choice([module, module.replace(".", "_"), f"{module}.default", f"module.{module}"])
                yield f"{start}{module}", parameter


TABLES = sorted(str(p.relative_to(HEADERS))[: -len(".json.gz")] for p in HEADERS.rglob("*.json.gz"))


def check_patterns(table: str, count: int) -> None:
    found, random = names(index(shapes(table))), Random(table)
    for module, parameter in asked(found, random, count):
        assert by_pattern(found, module, parameter) == one_by_one(found, module, parameter), (module, parameter)


@pytest.mark.few(3)
@pytest.mark.parametrize("table", TABLES)
def test_name_found_by_its_pattern_is_where_it_is_by_itself(table: str) -> None:
    check_patterns(table, 8)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_names_of_all_forms_are_where_they_are_by_themselves(table: str) -> None:
    check_patterns(table, 1_000_000)


def test_numbers_of_a_prefix_are_no_part_of_a_pattern() -> None:
    """Names of two encoders that differ in that number alone are two patterns."""
    found = names(index({f"conditioner.embedders.{n}.transformer.text_model.encoder.layers.{layer}.mlp.fc1.weight": (4, n + 1)
                         for n in (0, 1) for layer in (0, 1)}))  # fmt: skip
    for start in ("text_encoder_{}.", "text_encoders.{}.", "conditioner.embedders.{}.transformer.",
                  "conditioner_embedders_{}_transformer_", "lora_te{}_"):  # fmt: skip
        for number in (1, 2, 0, 3):
            for rest in ("text_model.encoder.layers.1.mlp.fc1", "text_model_encoder_layers_0_mlp_fc1"):
                module = start.format(number) + rest
                assert by_pattern(found, module, "weight") == one_by_one(found, module, "weight"), module


def test_form_is_the_name_with_its_numbers_taken_out() -> None:
    assert form("layers.12.norm1.experts.0.w") == "layers.#.norm1.experts.#.w"
    assert form("0.1.2") == "#.#.#" == form(form("0.1.2"))
    assert form("a.1234567890.b.3") == "a.1234567890.b.#"  # too long for a number
    assert form("a.².b.٣") == "a.².b.٣"


def test_impossible_forms_are_not_worked_out() -> None:
    """Of ten thousand experts' names none is put into a table for an adapter of the attention, or of an expert."""
    base: dict[str, Shape] = {"model.embed_tokens.weight": (4, 2), "model.layers.0.input_layernorm.weight": (2,)}
    for layer in range(4):
        base[f"model.layers.{layer}.self_attn.q_proj.weight"] = (2, 2)
        for expert in range(32):
            for slot in ("gate_proj", "up_proj", "down_proj"):
                base[f"model.layers.{layer}.mlp.experts.{expert}.{slot}.weight"] = (2, 2)
    found = names(index(base))
    table = found.parts[0]._table
    for module in (
        "model.layers.1.self_attn.q_proj",
        "layers.2.mlp.experts.3.down_proj",
        "layers_3_mlp_experts_31_up_proj",
        "model.layers.9.self_attn.x",
    ):
        found.find(module)
    assert not table._by_form
    stack = found.find("model.layers.2.mlp.experts", "gate_up_proj")
    assert stack is not None and len(stack.row_slices) == 64 and len(table._by_form) == 1


@pytest.mark.parametrize("inner", INNER)
def test_first_level_that_names_lack_is_a_whole_one(inner: str) -> None:
    assert [*other_names(f"{inner}x.weight", INNER)] == ["x.weight"]
    for longer in (f"{inner[:-1]}s.", f"{inner[:-1]}_2.", f"my{inner}"):
        assert not [*other_names(f"{longer}x.weight", INNER)]
        assert names(index({f"{longer}x.weight": (4, 4)})).find("x") is None


def test_parameter_at_the_end_of_a_last_level_is_a_whole_word() -> None:
    assert "m.gate.weight" in other_names("m.gate_weight", ())
    assert [*other_names("m.gateweight", ())] == ["m.gateweight.weight"]
