"""What a plan costs grows with the number of modules, whatever they are called: calls are counted, not seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lora_merge
from lora_merge.adapters.suffixes import SUFFIXES
from tests.kit.cost import steps
from tests.kit.hostile_inputs import Files, tensors, yaml
from tests.kit.hostile_names import SHAPES, configured, flat, lora, some

LIMIT = 5_000  # bytes of each header
MOST = 2_100  # calls for one more module of any name, and for its tensors: 900 to 1830 today


def peft_names(kind: str) -> Iterator[str]:
    return (f"base_model.model.{n}" for n in SHAPES[kind]())


def planned(folder: Path, kind: str, limit: int = LIMIT) -> int:
    """The calls of a plan, or of its refusal, for a base and an adapter of PEFT with names of this kind."""
    stored = lora(peft_names(kind), limit, ".lora_B.weight", ".lora_A.weight")
    files = {"base": flat(some(SHAPES[kind](), limit)), **configured({"peft_type": "LORA", "r": 1}, stored)}
    return calls(folder, files)


def written(folder: Path, files: Files) -> Path:
    """The folder, with these files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def calls(folder: Path, files: Files) -> int:
    """The calls of a plan with these files, or of its refusal."""
    written(folder, files)

    def plan() -> None:
        with contextlib.suppress(lora_merge.MergeError):
            lora_merge.plan(folder / "base", folder / "a", output=folder / "out", unmatched="skip")

    return steps(plan)


@pytest.mark.slow
def test_module_costs_as_much_whatever_it_is_called(tmp_path: Path) -> None:
    for kind in ("layers", "biases"):  # what is worked out once a process: patterns of other files' names are compiled
        planned(tmp_path / f"first {kind}", kind)
    least = planned(tmp_path / "least", "layers", 400)
    for number, kind in enumerate(SHAPES):
        modules = len(some(peft_names(kind), LIMIT // 2, 90))
        assert planned(tmp_path / str(number), kind) - least < MOST * modules + 5_000, (kind, modules)


# ------------------------------------------------------------------ many modules of which each could look at all others

PEFT = {"peft_type": "LORA", "r": 1}
PAIR = (".lora_A.weight", ".lora_B.weight")
TIED = {"model_type": "llama", "tie_word_embeddings": True}


def of(modules: Iterator[str], endings: tuple[str, ...] = PAIR) -> list[str]:
    return [f"base_model.model.{m}{end}" for m in modules for end in endings]


def named(form: str, n: int) -> Iterator[str]:
    return (form.replace("#", str(i)) for i in range(n))


def peft(n: int, form: str, config: Mapping[str, Any], endings: tuple[str, ...] = PAIR) -> Files:
    """An adapter of PEFT for n modules, and their base."""
    stored = flat(of(named(form, n), endings))
    return {"base": flat(f"{m}.weight" for m in named(form, n)), **configured({**PEFT, **config}, stored)}


def tied(n: int, form: str, config: Mapping[str, Any], *more: str) -> Files:
    """An adapter with n modules or values, for a base whose head is its embeddings."""
    base = {"base/model.safetensors": flat(["model.embed_tokens.weight"]), "base/config.json": yaml(TIED)}
    return {**base, **configured(config, flat([*named(form, n), *more]))}


def unalike(n: int) -> Files:
    """n modules of which no two have tensors of the same slots."""
    rows = [row for row in SUFFIXES if row.parameter == "weight" and not row.ending.startswith(".weight")]
    sets = itertools.islice(itertools.combinations(rows, 2), n)
    return {"base": flat(["x.weight"]), "a": flat(f"m{i}{row.ending}" for i, some in enumerate(sets) for row in some)}


def components(n: int) -> Files:
    config = {f"c{i}.{k}": v for i in range(n) for k, v in PEFT.items()}
    stored = {f"c{i}.x{end}": [1, 1] for i in range(n) for end in PAIR}
    entries = {"lora_adapter_metadata": json.dumps(config)}
    return {"base": flat(f"c{i}.x.weight" for i in range(n)), "a": tensors(stored, "BF16", entries, b"\x80?")}


WAYS: dict[str, Callable[[int], Files]] = {
    "copies": lambda n: peft(n, "m#", {}, (*PAIR, ".base_layer.weight")),
    "last names": lambda n: peft(n, "m.x#", {}),
    "trained tokens": lambda n: peft(n, "m#", {"trainable_token_indices": [0]}, (".token_adapter.trainable_tokens_delta",)),
    "both ends": lambda n: peft(n, "m#.lm_head", {"ensure_weight_tying": True}, PAIR) | configured({**PEFT, "ensure_weight_tying": True}, flat(of(itertools.chain(["lm_head", "embed_tokens"], named("m#.lm_head", n), named("m#.embed_tokens", n))))),
    "heads of mlx-lm": lambda n: tied(n, "m#.lm_head.lora_a", {"lora_parameters": {"rank": 1, "scale": 1.0}}, *named("m#.lm_head.lora_b", n)),
    "values of heads": lambda n: tied(n, "base_model.model.m#.lm_head.weight", PEFT, *of(iter(["model.embed_tokens"]))),
    "tokens of heads": lambda n: tied(n, "base_model.model.m#.lm_head.token_adapter.trainable_tokens_delta", {**PEFT, "trainable_token_indices": [0]}),
    "bases": lambda n: peft(n, "layers.0.q#", {"peft_type": "FROD", "save_projection": False}, (".frod_lambda_l", ".frod_lambda_s_values")),
    "one vector": lambda n: peft(n, "layers.#.q", {"peft_type": "TINYLORA", "save_projection": False, "weight_tying": 0.5}, (".tinylora_A", ".tinylora_B")),
    "kinds": unalike,
    "components": components,
    "parts": lambda n: {"base": tensors({"layers.0.q.weight": [n, 1]}, "BF16"), "a": flat(f"layers.0.q.lora_{x}.{i}.weight" for i in range(n) for x in ("up", "down"))},
    "experts": lambda n: {"base": tensors({"layers.0.mlp.experts.down_proj": [n, 1, 1]}, "BF16"), "a": flat(f"layers.0.mlp.experts.{i}.down_proj{end}" for i in range(n) for end in PAIR)},
    "wrapped": lambda n: {"base": flat(named("m#.weight", n)), "a": flat([*named("x#", n), *(f"m{i}.linear.{end}" for i in range(n) for end in ("lora.A", "lora.B", "weight"))])},
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_cost_of_a_module_does_not_grow_with_their_number(tmp_path: Path, way: str) -> None:
    _, one, two, four = (calls(tmp_path / str(n), WAYS[way](n)) for n in (5, 40, 80, 160))
    assert four - two < 2.6 * (two - one)


PROVED: dict[str, Callable[[int], Files]] = {
    "components": components,
    "patterns": lambda n: peft(n, "m#", {"alpha_pattern": {f"q{i}": 2 for i in range(n * 100)}}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", PROVED)
def test_cost_of_a_module_in_a_merge_and_its_proof_does_not_grow(tmp_path: Path, way: str) -> None:
    out = tmp_path / "out.safetensors"

    def merged(n: int) -> int:
        folder = written(tmp_path / str(n), PROVED[way](n))
        return steps(lambda: lora_merge.merge(folder / "base", [folder / "a"], out, device="cpu", overwrite=True))

    _, one, two, four = map(merged, (5, 10, 20, 40))
    assert four - two < 2.6 * (two - one)


def test_basis_of_more_layers_than_any_model_has_is_refused(tmp_path: Path) -> None:
    """Each of them would be computed from all."""
    config, endings = {"peft_type": "FROD", "save_projection": False}, (".frod_lambda_l", ".frod_lambda_s_values")
    for name, content in peft(257, "layers.#.q", config, endings).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(lora_merge.MergeError, match="257 layers share a basis"):
        lora_merge.plan(tmp_path / "base", tmp_path / "a", output=tmp_path / "out")


# ------------------------------------------------------------------ rows that an adapter replaces

TOKENS = ".token_adapter.trainable_tokens_delta"


def tokens(rows: Sequence[int], modules: int = 1, height: int | None = None) -> Files:
    """An adapter that trained these rows of each of some embeddings, all of them to 2."""
    stored = {f"base_model.model.m{i}{TOKENS}": [len(rows), 1] for i in range(modules)}
    base = {f"m{i}.weight": [height or max(rows) + 1, 1] for i in range(modules)}
    config = {**PEFT, "trainable_token_indices": list(rows)}
    return {"base": tensors(base, "BF16", fill=b"\x80?"), **configured(config, tensors(stored, "BF16", fill=b"\x00@"))}


def test_cost_of_a_row_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """Rows that do not follow each other, in the whole merge with its proof; and each of them is replaced."""
    out = tmp_path / "out.safetensors"

    def merged(n: int) -> int:
        folder = written(tmp_path / str(n), tokens([n * 2 - 2 * i for i in range(n)]))
        return steps(lambda: lora_merge.merge(folder / "base", [folder / "a"], out, device="cpu", overwrite=True))

    _, one, two, four = map(merged, (10, 50, 100, 200))
    assert four - two < 2.6 * (two - one)
    assert load_file(out)["m0.weight"].flatten().tolist() == [1.0, *[1.0, 2.0] * 200]


def test_rows_that_follow_each_other_cost_as_much_as_one(tmp_path: Path) -> None:
    few, many = (calls(tmp_path / str(n), tokens(range(3, n))) for n in (10, 5000))
    assert many - few < 10 * 5000  # each number of the list is checked


@pytest.mark.few(1)
@pytest.mark.parametrize("table", ["alpha_pattern", "rank_pattern"])
def test_table_of_patterns_is_not_gone_through_for_every_module(tmp_path: Path, table: str) -> None:
    """Neither by the plan nor by the second reading of the proof."""

    def merged(patterns: int) -> int:
        config = {table: {f"other{i}": 1 for i in range(patterns)}}
        folder = written(tmp_path / str(patterns), peft(40, "m#", config))
        out = tmp_path / f"{patterns}.safetensors"
        return steps(lambda: lora_merge.merge(folder / "base", [folder / "a"], out, device="cpu"))

    _, few, many = map(merged, (150, 200, 2000))
    assert many - few < 20 * 1800


def test_list_of_rows_is_not_gone_through_for_every_module(tmp_path: Path) -> None:
    """Each of thousands of small tensors may mean as many rows as a list of the configuration has."""
    files = tokens(range(0, 20_002, 2), 3) | {"base": tokens([0], 3)["base"]}
    folder = written(tmp_path, files)
    with pytest.raises(lora_merge.MergeError, match="more than 10000 separate runs of rows"):
        lora_merge.plan(folder / "base", folder / "a", output=folder / "out")
    few, many = (calls(tmp_path / str(n), tokens([0, *range(2, n)], 40, 4)) for n in (30, 9000))
    assert many - few < 10 * 9000
