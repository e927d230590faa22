"""Names by pattern. Run: pytest tests/test_text.py"""

from __future__ import annotations

import json
import pickle
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_merge.errors import UsageError
from lora_merge.facts import percent, run_label, runs, share_of
from lora_merge.report import moved, too_large
from lora_merge.text import (
    CODE,
    Lines,
    Message,
    Shown,
    by_pattern,
    by_reason,
    counted,
    done_of,
    html_table,
    json_text,
    one_line,
    rate,
    with_article,
)
from tests.kit.pairs import WHOLE

NAMES = st.lists(
    st.from_regex(r"([a-z]{1,3}[0-9]?|[0-9]{1,3})([._]([a-z]{1,3}[0-9]?|[0-9]{1,3})){0,4}", fullmatch=True), unique=True
)


@given(NAMES)
def test_every_name_is_in_one_pattern_and_in_order(names: list[str]) -> None:
    found = by_pattern(names)
    assert sorted(n for of in found.values() for n in of) == sorted(names)
    for pattern, of in found.items():
        assert of == [n for n in names if n in of]
        assert {n.count(".") for n in of} == {pattern.count(".")}


def test_numbers_that_count_something_are_taken_out() -> None:
    assert [*by_pattern(["0.attn1.to_out.0", "x_12_y2", "lora_te1_layers_3_fc1", "a/1", "12"])] == [
        "{i}.attn1.to_out.{i}", "x_{i}_y2", "lora_te1_layers_{i}_fc1", "a/{i}", "{i}",
    ]  # fmt: skip


@given(NAMES)
def test_texts_on_many_names_count_all_of_them(names: list[str]) -> None:
    patterns = by_pattern(names)
    text = counted(patterns, 2)
    shown = sum(len(of) for of in [*patterns.values()][:2])
    assert ("more" in text) == (shown < len(names))
    if shown < len(names):
        assert text.endswith(f" and {len(names) - shown} more")


def test_thousand_names_are_one_line() -> None:
    left = {f"layers.{n}.mlp.experts.{e}.up_proj": "no such module" for n in range(10) for e in range(100)}
    left["proj_out"] = "no such module"
    assert [*by_reason(left)] == [
        ("layers.{i}.mlp.experts.{i}.up_proj × 1000, e.g. layers.0.mlp.experts.0.up_proj", "no such module"),
        ("proj_out", "no such module"),
    ]  # fmt: skip


def test_amounts_have_three_digits_and_a_unit_once() -> None:
    gib = 2**30
    assert done_of(int(1.3 * gib), int(6.41 * gib)) == "1.30 of 6.41 GiB"
    assert done_of(gib // 2, gib) == "512 MiB of 1.00 GiB"
    assert (done_of(400, 500), rate(0)) == ("400 of 500 B", "0 B/s")
    assert (rate(int(51.2 * 2**20)), rate(1023 * 2**20)) == ("51.2 MiB/s", "1023 MiB/s")


def test_small_share_is_not_shown_as_none() -> None:
    shares = {0.0: "0 %", 4.924e-9: "0.000000492 %", 0.0143: "1.43 %", 0.02: "2 %", 1.99: "199 %", 140.2: "140 times"}
    assert {share: percent(share) for share in shares} == shares
    assert [share_of(share, "the weights") for share in (1.99, 1e5)] == [
        "200 % of the weights",
        "100000 times the weights",
    ]


def test_change_as_large_as_the_weights_is_a_warning() -> None:
    """Some rows of a change show about its size."""

    def numbers(ratio: float | None, read: int) -> dict[str, Any]:
        return {"all": {"ratio": ratio, "elements": read, "of": 10}}

    assert moved(numbers(0.0193, 4)) == ", by about 1.9 % of their weights"
    assert moved(numbers(0.02, 10)) == ", by 2 % of their weights"
    assert not [*too_large({}), *too_large(numbers(None, 4)), *too_large(numbers(0.5, 4))]
    (warning,) = too_large(numbers(141.2, 4))
    assert warning.startswith("the change is about 140 times the weights")


def test_names_that_count_on_are_one_where_their_values_are_equal() -> None:
    rows = [*((f"IN{n:02d}", "a") for n in range(3)), ("IN03", "b"), ("IN05", "b"), *((f"x.{n}", "b") for n in (9, 10))]
    assert [run_label(names) for names, _ in runs(rows)] == ["IN00–IN02", "IN03", "IN05", "x.9–10"]


def test_articles_are_those_that_are_spoken() -> None:
    assert [*map(with_article, ("int", "ndarray", "tensor", "NoneType", "Upscaler"))] == [
        "an int", "an ndarray", "a tensor", "a NoneType", "an Upscaler",
    ]  # fmt: skip


INVISIBLE = ["\u034f", "\u115f", "\u3164", "\ufe0f", "\uffa0", "\U000e0101", "\U000e01f0", "\U000e0fff"]
"""Ignorable by default, in other categories: joiners, fillers and selectors of variants."""

PLANES = (range(0x110000),) if WHOLE else (range(0x20000), range(0xE0000, 0xE1000))
"""All of Unicode; in the fast lane the planes that have hidden characters."""

EVERY = "".join(c for plane in PLANES for c in map(chr, plane) if unicodedata.category(c) != "Cs")
HIDDEN = [c for c in EVERY if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\t"]
"""Controls, directions of writing, zero widths, tags and line ends, as Python's Unicode has them."""


def test_hidden_characters_are_escaped_and_others_stay() -> None:
    shown = one_line(EVERY)
    assert not {*HIDDEN, *INVISIBLE} & {*shown}
    assert one_line("Größe 大きさ Δ\tй 🎨 a\u0301 \u00a0") == "Größe 大きさ Δ\tй 🎨 a\u0301 \u00a0"


def test_json_has_no_hidden_character_and_the_true_value() -> None:
    for indent in (None, 2):
        text = json_text({EVERY: [EVERY, float("nan")]}, indent=indent)
        assert not {*HIDDEN, *INVISIBLE} - {"\n"} & {*text}
        assert json.loads(text) == {EVERY: [EVERY, None]}


def test_objects_in_notebooks_show_no_hidden_character() -> None:
    class Named(Shown):
        def __init__(self) -> None:
            self.name = "".join(HIDDEN)

    for text in (repr(Named()), Named()._repr_html_(), html_table("".join(HIDDEN), [])):
        assert not {*HIDDEN} & {*text}


def test_message_shows_its_code_without_backticks() -> None:
    """Options and commands are code; other words in backticks are not, and a backtick inside a name is no end."""
    message = Message("write `--dtype bf16`, or `-o 'a`b'` with `ray logs`: `lora-merge parts BASE`")
    assert message == "write --dtype bf16, or -o 'a`b' with `ray logs`: lora-merge parts BASE"
    assert CODE.findall(message.written) == ["--dtype bf16", "-o 'a`b'", "lora-merge parts BASE"]
    assert Message(message).written == pickle.loads(pickle.dumps(message)).written == message.written
    assert Lines.of(["`--json`"]) == "`--json`"


def test_error_has_its_code_in_all_its_forms() -> None:
    """Passed on, reworded, and from another process."""
    error = UsageError("a", "`--dtype x`", "write `--dtype bf16`")
    for same in (pickle.loads(pickle.dumps(error)), UsageError(error.what, error.where, error.fix), error.reword(str)):
        assert (same.where, same.fix) == ("--dtype x", "write --dtype bf16")
        assert same.fix.written == "write `--dtype bf16`"
