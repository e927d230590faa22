"""Counts and shares in words: what text, terminals and pages say of one thing, and of changes that rounding enlarges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.survival import judged
from lora_merge.viewing.compare import compare, compare_rows
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.pages.page import content
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.inspected import lines
from tests.kit.measured import survival_of
from tests.kit.tensors import rand

KEY = "model.layers.0.self_attn.q_proj"
WRONG = re.compile(
    r"\b1 (?:of 1 )?(?:modules|tensors|blocks|layers|weights|rows|numbers|entries|images|files|jobs|merged)s?\b"
)
"""A count of one with a word for several; "1 of 1 merged tensor" is right."""


def test_count_of_one_is_in_the_singular(tmp_path: Path) -> None:
    base = save({f"{KEY}.weight": rand(8, 8)}, tmp_path / "base.safetensors")
    meta = {"ss_dataset_dirs": json.dumps({"1_x": {"n_repeats": 1, "img_count": 1}})}
    one = save(
        {f"{KEY}.lora_A.weight": rand(2, 8), f"{KEY}.lora_B.weight": rand(8, 2)}, tmp_path / "a.safetensors", meta
    )
    other = save(
        {f"{KEY}.lora_A.weight": rand(2, 8, seed=3), f"{KEY}.lora_B.weight": rand(8, 2)}, tmp_path / "b.safetensors"
    )
    facts = [inspect(one, weights=True), inspect(base, lora_merge.Adapter(one, 1.0), weights=True), compare(one, other)]
    told = [*lines(facts[0]), *lines(facts[1]), *map(str, compare_rows(facts[2]))]
    told += [json.dumps(content(found), ensure_ascii=False) for found in facts]
    code, _, text = run("merge", base, one, "-o", tmp_path / "out.safetensors")
    assert code == 0
    told += [*text.splitlines(), str(lora_merge.plan(base, one)), repr(lora_merge.verify(tmp_path / "out.safetensors"))]
    assert not [line for line in told if (found := WRONG.search(line)) and "merged" not in found[0]]
    assert "1 of 1 module " in "\n".join(told)
    assert any(
        re.fullmatch(r"stable rank   [0-9.]+: the number of directions that carry a module's change", line)
        for line in told
    )


@pytest.mark.parametrize("largest", [1e-4, 0.0045])
def test_share_of_a_change_below_the_steps_of_the_dtype_has_one_reading(largest: float, tmp_path: Path) -> None:
    """A change that is below half a step of bf16 beside 1 is lost; where it is above in one number in a thousand, these
    cross to the next one that bf16 has: JSON, text and page of a look, of a merge and of its proof agree."""
    change = torch.full((64, 64), 1e-4)
    change[0, :4] = largest
    base = save({f"{KEY}.weight": torch.ones(64, 64).bfloat16()}, tmp_path / "base.safetensors")
    adapter = save({f"{KEY}.diff": change}, tmp_path / "a.safetensors")
    facts = inspect(base, lora_merge.Adapter(adapter, 1.0), weights=True)
    report = lora_merge.merge(base, adapter, tmp_path / "out.safetensors")
    assert report.verified is not None
    want = survival_of(change, (1 + change).bfloat16() - 1.0 - change.double())
    assert want["share"] == (0.0 if largest < 1e-3 else pytest.approx(0.62, abs=0.01))
    for numbers in (facts["match"]["numbers"], report.numbers):
        every = numbers["all"], *numbers["all"]["adapters"], *numbers["blocks"].values(), *numbers["tensors"].values()
        assert [{entry: row[entry] for entry in want} for row in every] == [
            pytest.approx(want, rel=1e-3, abs=1e-12)
        ] * 4
    (row,), (proven,) = report.survival, report.verified["retained"]
    assert (row["share"], row["grade"]) == (pytest.approx(want["share"], rel=1e-3), "poor")
    assert proven["retained"] == pytest.approx(want["retained"], rel=1e-3)
    page, words = content(json.loads(report.to_json())), judged(row["share"], "it")
    assert page["tables"][0]["rows"][0][-1] == pytest.approx(row["share"], rel=1e-3)
    assert words == ("62 % of it (poor)" if row["share"] else "nothing of it (lost in rounding)")
    assert f"{words} survives in the base's dtype" in "\n".join(lines(facts))
