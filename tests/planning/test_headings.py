"""What headers hold is what base and merge put there. Run: pytest tests/planning/test_headings.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.files.seal import SEAL, ZEROS
from lora_merge.planning.recipe import KEY, MODELS, OURS
from lora_merge.proof.replay import prove

from ..support import load, metadata, rand, save, sha

Metadata = dict[str, str]

FORMER = "sha256:of-input-{:03d}".ljust(76, ".")
PLACES = [ZEROS, *(f"{n:064x}" for n in range(4)), *(FORMER.format(n)[:64] for n in range(3))]
"""What stands, or once stood, for a digest in a planned header."""

lookalikes = st.one_of(
    st.sampled_from(PLACES),
    st.builds(lambda a, b, c: f"{a} {b}{c}", st.sampled_from(PLACES), st.text(max_size=3), st.sampled_from(PLACES)),
    st.sampled_from(
        [f'"{SEAL}":"{ZEROS}"', f'{SEAL}":"', SEAL, KEY, MODELS, f'{{"{KEY}":"{ZEROS}"}}', "\\", '"', "}}"]
    ),
).filter(lambda text: "\0" not in text)


def adapter(path: Path, seed: int = 1) -> Path:
    return save({"a.lora_up.weight": rand(4, 2, seed=seed), "a.lora_down.weight": rand(2, 4, seed=seed)}, path)


@given(
    names=st.lists(lookalikes, max_size=4, unique=True),
    entries=st.dictionaries(lookalikes.filter(lambda k: k not in OURS), lookalikes, max_size=4),
    models=st.lists(st.sampled_from(PLACES), unique=True),
)
@settings(max_examples=20)
def test_no_text_of_the_base_is_taken_for_the_place_of_a_digest(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], entries: Metadata, models: list[str]
) -> None:
    """Names of tensors and metadata stay as they are; the digests stand in our own entries alone."""
    folder = tmp_path_factory.mktemp("m")
    listed = {MODELS: json.dumps({key: {"name": "earlier"} for key in models})} if models else {}
    tensors = {"a.weight": rand(4, 4), **{name: torch.full((1,), float(n)) for n, name in enumerate(names)}}
    base = save(tensors, folder / "b.safetensors", entries | listed | {"format": "pt"})
    lora, out = adapter(folder / "a.safetensors"), folder / "o.safetensors"
    lora_merge.merge(base, [lora, lora], out)
    found = metadata(out)
    assert {k: found[k] for k in entries} == entries
    assert found.keys() == {*entries, *OURS, "format"}
    assert load(out).keys() == tensors.keys()
    assert all(torch.equal(load(out)[name], tensors[name]) for name in names)
    digests = [sha(base), sha(lora)]
    recipe = json.loads(found[KEY])
    assert [recipe["base"]["files"][0]["sha256"], recipe["adapters"][1]["files"][0]["sha256"]] == digests
    assert json.loads(found[MODELS]).keys() == {*models, *digests}
    assert not prove(out, full=True)["warnings"]


def test_the_entries_have_the_names_that_the_contract_states(tmp_path: Path) -> None:
    """Other programs look for these names: no move of a module changes them."""
    out = tmp_path / "out.safetensors"
    lora_merge.merge(save({"a.weight": rand(4, 4)}, tmp_path / "b.safetensors"), adapter(tmp_path / "a"), out)
    names = {"lora_merge.recipe", "lora_merge.header_sha256", "modelspec.merged_from", "sd_merge_recipe", MODELS}
    assert names <= metadata(out).keys()
    assert MODELS == "sd_merge_models"


def test_nor_is_the_name_of_a_file(tmp_path: Path) -> None:
    """It stands in the recipe, between the digests."""
    for n, place in enumerate(PLACES):
        (tmp_path / str(n)).mkdir()
        base = save({"a.weight": rand(4, 4)}, tmp_path / str(n) / f"{place}.safetensors")
        out = tmp_path / str(n) / "out.safetensors"
        lora_merge.merge(base, adapter(tmp_path / str(n) / "a"), out)
        assert json.loads(metadata(out)[KEY])["base"]["name"] == base.name
        assert prove(out)["proven"]
