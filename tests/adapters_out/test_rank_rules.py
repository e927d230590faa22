"""Rules for ranks against a search through all ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.adapters_out.rank_rules import RankRules, choose, parse, ranks_within
from lora_merge.errors import UsageError
from tests.kit.pairs import examples

SPECTRA = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9).map(lambda s: sorted(s, reverse=True))


def holds(name: str, x: float, s: list[float], k: int) -> bool:
    """The table's condition for rank k, computed anew."""
    energy = math.fsum(v * v for v in s[:k]) / math.fsum(v * v for v in s)
    share = math.fsum(s[:k]) / math.fsum(s)
    return {"energy": energy >= x - 1e-9, "fro": math.sqrt(energy) >= x - 1e-9, "sum": share >= x - 1e-9}[name]


@pytest.mark.parametrize("name", ["energy", "fro", "sum"])
@settings(max_examples=examples(15))
@given(spectrum=SPECTRA, x=st.floats(0.01, 0.999))
def test_share_gives_the_smallest_rank_that_reaches_it(name: str, spectrum: list[float], x: float) -> None:
    k = choose(parse(f"{name}:{x!r}"), spectrum)
    assert holds(name, x, spectrum, k)
    assert k == 1 or not holds(name, x + 2e-9, spectrum, k - 1)


@settings(max_examples=examples(15))
@given(spectrum=SPECTRA, x=st.floats(1, 100))
def test_thresholds_count_the_values_above_them(spectrum: list[float], x: float) -> None:
    assert choose(parse(f"ratio:{x!r}"), spectrum) == max(1, sum(v > spectrum[0] / x for v in spectrum))
    assert choose(parse(f"above:{x!r}"), spectrum) == max(1, sum(v > x for v in spectrum))


def test_number_is_a_ceiling_and_energy_1_is_everything() -> None:
    assert choose(parse(4), [3.0, 2.0]) == 2
    assert choose(parse("4", most=1), [3.0, 2.0]) == 1
    assert choose(parse("energy:1"), [1.0] * 7) == 7
    assert choose(parse("energy:0.5"), [2.0, 1.0], total=10.0) == 2
    assert choose(parse("same"), [1.0] * 7, same=3) == 3
    assert choose(parse("exact"), []) == 0


@pytest.mark.parametrize(
    "text", ["0", "-1", "x", "energy:0", "energy:1.1", "ratio:0.5", "above:nan", "energy:", "1_0", ""]
)
def test_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert refused.value.where == "--rank"


def test_size_goes_where_a_byte_saves_most() -> None:
    spectra = {"wide": [4.0, 3.0, 0.1], "thin": [2.0, 1.9, 1.8]}
    widths = {"wide": 40, "thin": 10}
    ranks = ranks_within(spectra, widths, 120)
    assert ranks == {"wide": 2, "thin": 3}
    best = max(
        (sum(v * v for name, k in (("wide", a), ("thin", b)) for v in spectra[name][:k]), a, b)
        for a in (1, 2, 3) for b in (1, 2, 3) if a * 40 + b * 10 <= 120
    )  # fmt: skip
    assert best[1:] == (2, 3)


def test_parts_and_kernels_have_rules_of_their_own() -> None:
    rules = RankRules.of(8, 2, None, [("te1", "4"), ("re:attn", "fro:0.5")])
    names = {"unet.x": "denoiser", "lora_te1_x": "te1", "lora_te1_attn": "te1"}
    rules = rules.on(None, [(name, network, [name]) for name, network in names.items()])
    assert rules.of_layer("unet.x", kernel=False).text == "8"
    assert rules.of_layer("unet.x", kernel=True).text == "2"
    assert rules.of_layer("lora_te1_x", kernel=False).text == "4"
    assert rules.of_layer("lora_te1_attn", kernel=False).text == "fro:0.5"
