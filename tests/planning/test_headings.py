"""What headers hold is what base and merge put there, and later changes of it are found. Run: pytest tests/planning/test_headings.py"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import VerificationFailed
from lora_merge.files.safetensors import parse_file
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


def sealed(folder: Path) -> Path:
    """An output of two adapters, of a base with an entry of its own."""
    base = save({"a.weight": rand(4, 4), "b": rand(3)}, folder / "b.safetensors", {"note": "kept", "format": "pt"})
    pair = [adapter(folder / f"a{n}.safetensors", n) for n in range(2)]
    out = folder / "out.safetensors"
    lora_merge.merge(base, pair, out)
    return out


def rewritten(path: Path, change: Callable[[dict[str, Any]], object], **how: Any) -> None:
    """The header changed as a tool does that leaves the data where they are."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, ensure_ascii=False, **{"separators": (",", ":"), **how}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edited(key: str, act: Callable[[str], str]) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update({key: act(header["__metadata__"][key])})


def in_recipe(act: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    def change(text: str) -> str:
        recipe = json.loads(text)
        act(recipe)
        return json.dumps(recipe)

    return edited(KEY, change)


def exchanged(recipe: dict[str, Any]) -> None:
    recipe["adapters"].reverse()


def reordered(header: dict[str, Any]) -> None:
    items = list(header.items())[::-1]
    header.clear()
    header.update(items)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "added": lambda h: h["__metadata__"].update(title="mine"),
    "added empty": lambda h: h["__metadata__"].update({"": ""}),
    "merged_from": edited("modelspec.merged_from", lambda text: text + "x"),
    "sd_merge_recipe": edited("sd_merge_recipe", lambda text: text.replace("1.0", "2.0")),
    "sd_merge_models": edited(MODELS, lambda text: text + " "),
    "seal": edited(SEAL, lambda text: text[::-1]),
    "seal cut": edited(SEAL, lambda text: text[:63]),
    "recipe: adapters exchanged": in_recipe(exchanged),
    "recipe: unmatched": in_recipe(lambda r: r.update(unmatched="skip")),
    "recipe: version": in_recipe(lambda r: r.update(version="0.0.9")),
    "recipe: compute_dtype": in_recipe(lambda r: r.update(compute_dtype="bf16")),
    "recipe: unknown": in_recipe(lambda r: r.update(more=1)),
    "order": reordered,
    "field": lambda h: h["a.weight"].update(more=1),
    **{f"without {key}": lambda h, key=key: h["__metadata__"].pop(key)  # type: ignore[misc]
       for key in OURS if key != KEY},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_header_that_was_changed_after_the_merge_is_found(tmp_path: Path, change: str) -> None:
    out = sealed(tmp_path)
    assert prove(out)["warnings"] == []
    rewritten(out, CHANGES[change])
    with pytest.raises(VerificationFailed, match="the weights are right, but the header was changed") as failure:
        prove(out)
    assert failure.value.exit_code == 6
    if change.startswith("without "):
        assert f"'{change.removeprefix('without ')}' taken out" in failure.value.where
    if change == "added":
        assert "'title' added" in failure.value.where


@pytest.mark.parametrize("how", [{"separators": (", ", ": ")}, {"indent": 1}])
def test_so_are_other_spaces(tmp_path: Path, how: dict[str, Any]) -> None:
    out = sealed(tmp_path)
    rewritten(out, lambda _: None, **how)
    with pytest.raises(VerificationFailed, match="header was changed"):
        prove(out)


@given(data=st.data())
@settings(max_examples=15)
def test_every_byte_of_the_header_counts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any one byte of the metadata's texts replaced by another that keeps the header valid."""
    out = sealed(tmp_path_factory.mktemp("m"))
    raw = bytearray(out.read_bytes())
    header = bytes(raw[: parse_file(out).data_offset])
    places = [at for at in range(8, len(header)) if chr(header[at]).isalnum() and at < header.index(b'},"a.weight"')]
    at = data.draw(st.sampled_from(places))
    raw[at] = ord("q") if raw[at] != ord("q") else ord("r")
    out.write_bytes(raw)
    with pytest.raises(lora_merge.MergeError) as failure:
        prove(out)
    assert failure.value.exit_code in (3, 6)


def test_an_output_of_an_earlier_version_is_proven_without_its_seal(tmp_path: Path) -> None:
    out = sealed(tmp_path)

    def unsealed(header: dict[str, Any]) -> None:
        del header["__metadata__"][SEAL]
        in_recipe(lambda recipe: recipe.pop("format"))(header)

    rewritten(out, unsealed)
    (warning,) = prove(out)["warnings"]
    assert "changes of the metadata cannot be found" in warning
    assert SEAL in warning


def test_every_shard_has_its_own_seal(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for key, name in zip("ab", names, strict=True):
        save_file({f"{key}.weight": rand(4, 4)}, folder / name)
    table = {f"{key}.weight": name for key, name in zip("ab", names, strict=True)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    out = tmp_path / "out"
    lora_merge.merge(folder, adapter(tmp_path / "a.safetensors"), out)
    assert prove(out)["warnings"] == []
    rewritten(out / names[1], CHANGES["added"])
    with pytest.raises(VerificationFailed, match="header was changed") as failure:
        prove(out)
    assert names[1] in failure.value.where


def test_a_merge_into_a_merge_is_sealed_anew(tmp_path: Path) -> None:
    first, second = sealed(tmp_path), tmp_path / "second.safetensors"
    lora_merge.merge(first, adapter(tmp_path / "a.safetensors", 5), second)
    assert prove(second)["warnings"] == []
    assert metadata(second)[SEAL] != metadata(first)[SEAL]
