"""Patterns of strangers: what Python's engine says, in a bounded number of steps."""

from __future__ import annotations

import contextlib
import json
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge import safe_regex
from lora_merge.adapters.peft.module_patterns import Ends
from lora_merge.adapters.peft.rules import rules
from lora_merge.errors import InputError, UsageError
from lora_merge.job import Adapter
from lora_merge.models.names import Names
from lora_merge.models.part_factors import Strengths
from lora_merge.safe_regex import Refused, Steps, pattern
from tests.kit.command_line import run
from tests.kit.cost import slowness

atoms = st.sampled_from(
    [*("a", "b", "ab", ".", "_", r"\.", r"\d", r"\w", r"\s", r"\W", r"\D", r"\S", "[ab]", "[^a]", "[a-c0-9]", r"[^\w.]"),
     *("^", "$", r"\b", r"\B", r"\A", r"\Z", "A", "(?=a)", "(?!b)", "(?<=a)", "(?<!ab)", "\n", "1", "é", "[é-ü]", "(?!)")]
)  # fmt: skip
loops = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "*?", "+?", "??", "{2,}", "{3,7}?", "{0}"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"(?:{'|'.join(some)})"),
        st.builds("({})".format, inner),
        st.builds("({}{})".format, st.sampled_from(["?i:", "?s:", "?m:", "?=", "?!"]), inner),
        st.builds("(?:{}){}".format, inner, loops),
    ),
    max_leaves=10,
)
names = st.text("aabbAB._1 \né٣", max_size=9)


@given(expressions, st.lists(names, min_size=1, max_size=3), st.sampled_from(["match", "search"]))
def test_pattern_matches_what_pythons_engine_matches(text: str, searched: list[str], how: str) -> None:
    """Both ways: through sets of places alone, and as it is, where simple ones go to Python's engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled = re.compile(text)
        except re.error:
            with pytest.raises(Refused):
                pattern(text)
            return
    mine, anywhere = pattern(text), how == "search"
    for name in searched:
        want = (compiled.search if anywhere else compiled.match)(name) is not None
        assert mine.matches(name, Steps(), anywhere=anywhere) == want
        start = (2 << len(name)) - 1 if anywhere else 1
        walked = safe_regex._Walk(name, Steps(), {}).through(mine.tree, start, mine.flags)
        assert (walked != 0) == want


REAL = (
    r"^(language_model|multi_modal_projector)(?!.*(lm_head|output|emb|wte|shared)).*",
    r".*(?:vision|image|visual|patch|vit)?.*(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*(?:q_proj|k_proj)$",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn).*?(?:q_proj|k_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp)",
    r"model\.language_model(?=\.).*\.(up_proj|down_proj)",
    r"layers\.(1[0-9]|2[0-4])\.", r"(?i)ATTN", r".*\.(?:to_q|to_k|to_v|to_out\.0)$", r"(?P<a>q|k)_proj\.(?P=a)?",
)  # fmt: skip


@pytest.mark.parametrize("text", REAL)
def test_expressions_of_real_configurations(text: str) -> None:
    paths = [
        "language_model.model.layers.3.self_attn.q_proj", "language_model.lm_head", "model.layers.12.mlp.down_proj",
        "model.language_model.layers.0.mlp.up_proj", "visual.blocks.0.attn.qkv", "transformer.attn1.to_out.0", "q_proj.q",
    ]  # fmt: skip
    for path in paths:
        for anywhere in (False, True):
            want = (re.search if anywhere else re.match)(text, path) is not None
            assert pattern(text).matches(path, Steps(), anywhere=anywhere) == want


pieces = st.lists(st.sampled_from([*"ab._-", r"\.", r"\-"]), min_size=1, max_size=5).map("".join)
keys = st.lists(
    st.builds("{}{}{}".format, st.sampled_from(["", "", "^"]), pieces,
              st.sampled_from(["", "", "", "$", ".*", "+", "|b"])), min_size=1, max_size=6, unique=True,
)  # fmt: skip


@given(keys, st.text("ab..._\n", min_size=1, max_size=10))
def test_first_key_is_pefts(keys: list[str], path: str) -> None:
    first = next((key for key in keys if re.match(rf"(.*\.)?({key})$", path)), None)
    assert Ends(keys).first(path, Steps()) == first


ENDLESS = {
    "options": ("a?" * 40 + "a" * 40 + "b", "a" * 60),
    "alternatives": ("(?:a|a)" * 45 + "b", "a" * 60),
    "options of alternatives": ("(?:a?|aa?)" * 30 + "b", "a" * 80),
    "loop in a loop": ("(a+)+$", "a" * 80 + "b"),
    "four levels": ("(((a*)*)*)*b", "a" * 400),
    "overlap": ("(?:(?:(?:a|aa)+)+)+b", "a" * 300),
    "numbers": ("(?:a{0,1000000}){0,1000000}b", "a" * 100),
    "huge numbers": ("(?:(?:a{4000000000}){4000000000}|a?){4000000000}b", "a" * 100),
    "many dots": (".*" * 30 + "b", "a" * 300),
    "looking ahead": ("(?=(?=(?=a*)*)*)*" * 5 + "b", "a" * 100),
    "looking at each place": ("(?:(?=.*x)a|a)*b", "a" * 500),
    "many alternatives": ("(?:" + "|".join("a" * (i % 50) + "b" for i in range(2000)) + ")*c", "a" * 200),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ENDLESS)
def test_no_pattern_takes_long(name: str) -> None:
    """Each would take Python's engine longer than anyone waits, or most of them."""
    text, path = ENDLESS[name]
    started, steps = time.process_time(), Steps()
    for anywhere in (False, True):
        assert not pattern(text).matches(path, steps, anywhere=anywhere)
        assert Ends([text]).first(path, steps) is None
    assert time.process_time() - started < 2
    assert steps.left > 0.5 * safe_regex.MOST_STEPS


@given(expressions, st.lists(loops, min_size=1, max_size=5), st.integers(1, 300))
def test_steps_are_bounded_whatever_is_nested(text: str, outer: list[str], size: int) -> None:
    for loop in outer:
        text = f"(?:{text}|a?){loop}"
    started = time.process_time()
    with contextlib.suppress(Refused):
        pattern(f"{text}x").matches("a" * size, Steps(), anywhere=True)
    assert time.process_time() - started < 5


def test_patterns_that_are_not_run_are_refused_with_their_field() -> None:
    for key, why in (
        (r"(a+)+\1b", "groupref and loops"),
        ("(", "not valid: "),
        ("(" * 5000 + ")" * 5000, "not valid: |too"),
        ("a" * 200_000 + "+", "longer than"),
    ):
        told = rules({"peft_type": "LORA", "alpha_pattern": {key: 3}}, "the file")
        with pytest.raises(InputError, match=f"alpha_pattern holds a pattern that is.*({why})") as caught:
            told.scalars("lora", "base_model.model.a", {"down": (2, 4), "up": (4, 2)})
        assert caught.value.where == "the file: alpha_pattern"


@pytest.mark.slow
def test_patterns_of_one_file_share_their_steps() -> None:
    """Ten thousand patterns about ten thousand modules are a hundred million questions."""
    told = rules({"peft_type": "LORA", "rank_pattern": {f"(a|b)*{i}": 3 for i in range(3000)}}, "the file")
    started = time.process_time()
    with pytest.raises(InputError, match="rank_pattern holds a pattern that is too complex"):
        for i in range(10_000):
            told.fields.pattern("rank_pattern", f"m.{'ab' * 40}.{i}x", 8)
    assert time.process_time() - started < 10


MACHINE_MADE = {
    "names": lambda module: module,
    "whole names": lambda module: f"^{module}",
    "escaped": re.escape,
    "escaped and whole": lambda module: f"^{re.escape(module)}$",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("written", MACHINE_MADE)
def test_key_for_each_module_is_no_burden(written: str) -> None:
    modules = [f"model.layers.{i}.experts.{e}.{p}_proj" for i in range(40) for e in range(40) for p in ("up", "down")]
    table = {MACHINE_MADE[written](m): n for n, m in enumerate(modules)}
    told = rules({"peft_type": "LORA", "rank_pattern": table}, "the file")
    started = time.process_time()
    assert [told.fields.pattern("rank_pattern", m, -1) for m in modules] == [*range(len(modules))]
    assert time.process_time() - started < 5


TABLES = {
    "each with two names": lambda i: rf"model\.layers\.{i}\.self_attn\.(q|k)_proj",
    "each with a loop": lambda i: f"(a|b)*{i}",
    "each with options": lambda i: "(a?)" * 20 + str(i),
    "each with hundreds of loops": lambda i: "(a|b)*" * 300 + str(i),
    "each with other dots": lambda i: "".join("a."[i >> k & 1] for k in range(20)),
    "each with one more": lambda i: "." * (i % 40) + str(i),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", TABLES)
def test_table_of_thousands_of_keys_is_asked_about_in_seconds_or_refused(kind: str) -> None:
    """What takes time is to parse them, which a module's path would do for each of them once more."""
    table = {TABLES[kind](i): 3 for i in range(1000)}
    told, started = rules({"peft_type": "LORA", "rank_pattern": table}, "the file"), time.process_time()
    with contextlib.suppress(InputError):
        for i in range(750):
            told.fields.pattern("rank_pattern", f"model.layers.{i}.self_attn.q_proj", 8)
    assert time.process_time() - started < 4 * slowness()  # 3 of "loop", 0.3 of most


@pytest.mark.slow
def test_pattern_is_parsed_once_for_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    parse = safe_regex.pattern
    monkeypatch.setattr(safe_regex, "pattern", lambda text: asked.append(text) or parse(text))
    table = Ends([rf"layers\.{i}\.(q|k)" for i in range(3000)])
    steps = Steps()
    for i in range(20):
        table.first(f"model.layers.{i}.v", steps)
    assert len(asked) == 3000


@pytest.mark.slow
def test_parts_of_a_recipe_share_theirs() -> None:
    """Those of all its adapters."""
    base, steps = names_of_nothing(), Steps()
    parts = [tuple((f"re:(?:a|b)*{n}.{i}x", 0.5) for i in range(100)) for n in range(5)]
    adapters = [Strengths(Adapter(Path("a"), 1.0, some), base, steps) for some in parts]
    started = time.process_time()
    with pytest.raises(UsageError, match="too complex to run safely"):
        for i in range(10_000):
            for adapter in adapters:
                adapter.factor(f"model.layers.{'ab' * 30}.{i}", "model")
    assert time.process_time() - started < 10


def names_of_nothing() -> Names:
    return cast("Names", SimpleNamespace(parts=()))  # asked only for parts, and for the blocks that a part names


@pytest.mark.few(3)
@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern", "feedforward_modules", "target_modules"])
@pytest.mark.parametrize("evil", ["options", "alternatives", "loop in a loop"])
def test_command_answers(tmp_path: Path, field: str, evil: str) -> None:
    """Stopped where it hangs."""
    text = ENDLESS[evil][0]
    module, folder = "x." + "a" * 60, tmp_path / "adapter"
    folder.mkdir()
    save_file({f"{module}.weight": torch.zeros(4, 4)}, tmp_path / "base")
    ia3 = field == "feedforward_modules"
    pair = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(4, 2)}
    stored = {"ia3_l": torch.ones(4, 1)} if ia3 else pair
    save_file({f"base_model.model.{module}.{k}": v for k, v in stored.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "IA3" if ia3 else "LORA", "r": 2, field: {text: 3} if "pattern" in field else text}
    if field == "target_modules":
        config["target_parameters"] = ["weight"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert run(tmp_path / "base", folder, "-o", tmp_path / "o", "--device", "cpu", "--dry-run").code == 0


@pytest.mark.parametrize(
    ("table", "noted"),
    [
        ({"q": 4, "attn.q": 2}, True),
        ({"q": 4, r"blocks\.0\..*": 2}, True),
        ({r".*\.(q|k)": 2, "q": 4}, True),
        ({"q": 4, "attn.q": 4.0}, False),
        ({"q": 4, "k": 2, "attn.k": 2}, False),
        ({"q": 4, "tn.q": 2, "blocks.1.attn.q": 2, "(?=(a+)+$)q": 2}, False),
    ],
)
def test_alpha_that_the_order_of_the_entries_decides_is_noted(
    table: dict[str, float],
    noted: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """PEFT takes the first entry that fits, and sorts the entries when it saves them."""
    name = "blocks.0.attn.q"
    factors = {f"base_model.model.{name}.lora_A.weight": torch.ones(2, 4), f"base_model.model.{name}.lora_B.weight": torch.ones(4, 2)}  # fmt: skip
    adapter = tmp_path / "a"
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "alpha_pattern": table}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"{name}.weight": torch.zeros(4, 4)}, tmp_path / "b.safetensors")
    report = lora_merge.merge(tmp_path / "b.safetensors", adapter, tmp_path / "o.safetensors")
    merged = load_file(tmp_path / "o.safetensors")[f"{name}.weight"]
    assert torch.equal(merged, torch.full((4, 4), float(next(iter(table.values())))))
    assert ("several entries of alpha_pattern" in str(report.coverage)) is noted
