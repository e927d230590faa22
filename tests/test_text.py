"""Names by pattern. Run: pytest tests/test_text.py"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_merge.text import by_pattern, by_reason, counted

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


def test_only_numbers_that_count_something_are_taken_out() -> None:
    assert [*by_pattern(["0.attn1.to_out.0", "x_12_y2", "lora_te1_layers_3_fc1", "a/1", "12"])] == [
        "{i}.attn1.to_out.{i}", "x_{i}_y2", "lora_te1_layers_{i}_fc1", "a/{i}", "{i}",
    ]  # fmt: skip


@given(NAMES)
def test_what_is_said_of_many_names_counts_all_of_them(names: list[str]) -> None:
    patterns = by_pattern(names)
    text = counted(patterns, 2)
    shown = sum(len(of) for of in [*patterns.values()][:2])
    assert ("more" in text) == (shown < len(names))
    if shown < len(names):
        assert text.endswith(f" and {len(names) - shown} more")


def test_a_thousand_names_are_one_line() -> None:
    left = {f"layers.{n}.mlp.experts.{e}.up_proj": "no such module" for n in range(10) for e in range(100)}
    left["proj_out"] = "no such module"
    assert [*by_reason(left)] == [
        ("layers.{i}.mlp.experts.{i}.up_proj × 1000, e.g. layers.0.mlp.experts.0.up_proj", "no such module"),
        ("proj_out", "no such module"),
    ]  # fmt: skip
