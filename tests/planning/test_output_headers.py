"""What headers hold is what base and merge put there. Run: pytest tests/planning/test_output_headers.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lora_merge
from lora_merge.files.safetensors import SEAL, ZERO_HASH
from lora_merge.planning.recipe import KEY, MODELS, OURS
from lora_merge.recipes.replay import prove
from tests.kit.files import load, metadata, save, sha
from tests.kit.pairs import examples
from tests.kit.tensors import rand

Metadata = dict[str, str]

FORMER = "sha256:of-input-{:03d}".ljust(76, ".")
PLACES = [ZERO_HASH, *(f"{n:064x}" for n in range(4)), *(FORMER.format(n)[:64] for n in range(3))]
"""What stands, or once stood, for a digest in a planned header."""

lookalikes = st.one_of(
    st.sampled_from(PLACES),
    st.builds(lambda a, b, c: f"{a} {b}{c}", st.sampled_from(PLACES), st.text(max_size=3), st.sampled_from(PLACES)),
    st.sampled_from(
        [f'"{SEAL}":"{ZERO_HASH}"', f'{SEAL}":"', SEAL, KEY, MODELS, f'{{"{KEY}":"{ZERO_HASH}"}}', "\\", '"', "}}"]
    ),
).filter(lambda text: "\0" not in text)


def adapter(path: Path, seed: int = 1) -> Path:
    return save({"a.lora_up.weight": rand(4, 2, seed=seed), "a.lora_down.weight": rand(2, 4, seed=seed)}, path)


@pytest.mark.slow
@given(
    names=st.lists(lookalikes, max_size=4, unique=True),
    entries=st.dictionaries(lookalikes.filter(lambda k: k not in OURS), lookalikes, max_size=4),
    models=st.lists(st.sampled_from(PLACES), unique=True),
)
@settings(max_examples=examples(20))
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


def test_entries_have_the_names_that_the_contract_states(tmp_path: Path) -> None:
    """Other programs look for these names: no move of a module changes them."""
    out = tmp_path / "out.safetensors"
    lora_merge.merge(save({"a.weight": rand(4, 4)}, tmp_path / "b.safetensors"), adapter(tmp_path / "a"), out)
    names = {"lora_merge.recipe", "lora_merge.header_sha256", "modelspec.merged_from", "sd_merge_recipe", MODELS}
    assert names <= metadata(out).keys()
    assert MODELS == "sd_merge_models"


def test_name_of_a_file_is_not_taken_for_the_place_of_a_digest(tmp_path: Path) -> None:
    """It stands in the recipe, between the digests."""
    for n, place in enumerate(PLACES):
        (tmp_path / str(n)).mkdir()
        base = save({"a.weight": rand(4, 4)}, tmp_path / str(n) / f"{place}.safetensors")
        out = tmp_path / str(n) / "out.safetensors"
        lora_merge.merge(base, adapter(tmp_path / str(n) / "a"), out)
        assert json.loads(metadata(out)[KEY])["base"]["name"] == base.name
        assert prove(out)["proven"]


def sharded(folder: Path, count: int) -> Path:
    """A base of so many files."""
    folder.mkdir()
    names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    keys = ["a.weight", *(f"b.{n}.weight" for n in range(1, count))]
    for key, name in zip(keys, names, strict=True):
        save({key: rand(4, 4)}, folder / name)
    table = {"metadata": {}, "weight_map": dict(zip(keys, names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    return folder


def recipe_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(metadata(path)[KEY])
    return found


def test_first_shard_names_all_files_of_the_base_and_every_other_its_own(tmp_path: Path) -> None:
    base, out, lora = sharded(tmp_path / "base", 3), tmp_path / "out", adapter(tmp_path / "a.safetensors")
    table = tmp_path / "names.yaml"
    table.write_text("title: mine\nlayouts: {native: [a.weight]}\n")
    lora_merge.merge(base, [lora], out, map=table)
    files = sorted(base.glob("*.safetensors"))
    first, *others = [recipe_in(out / f.name) for f in files]
    assert [f["name"] for f in first["base"]["files"]] == [f.name for f in files]
    assert first["map"]["text"] == table.read_text()
    for file, other in zip(files[1:], others, strict=True):
        assert other["base"]["files"] == [{"name": file.name, "size": file.stat().st_size, "sha256": sha(file)}]
        assert other["whole_in"] == files[0].name
        assert other["adapters"] == first["adapters"]
        assert "map" not in other
    assert prove(out)["proven"]


@pytest.mark.slow
def test_headers_grow_with_the_number_of_shards_and_no_faster(tmp_path: Path) -> None:
    """Each holds a recipe, and the recipe names files of the base, and of those an earlier merge was made of."""
    sizes = {}
    for count in (4, 40):
        base, once, twice = (tmp_path / f"{name}-{count}" for name in ("base", "once", "twice"))
        lora = adapter(tmp_path / "a.safetensors")
        lora_merge.merge(sharded(base, count), [lora], once)
        lora_merge.merge(once, [lora, lora], twice)
        sizes[count] = sum(len(text) for f in twice.glob("*.safetensors") for text in metadata(f).values())
        assert prove(twice)["proven"]
    assert sizes[40] < 12 * sizes[4]
