"""Later changes of a header are found and named; the same entries in other bytes are no fault of the weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import lora_merge
from lora_merge.errors import VerificationFailed
from lora_merge.files.safetensors import SEAL, parse_file
from lora_merge.planning.recipe import KEY, MODELS, OURS
from lora_merge.recipes.replay import plan_again, prove
from lora_merge.viewing.inspect import inspect
from tests.kit.files import metadata, save
from tests.kit.pairs import examples
from tests.kit.tensors import rand


def adapter(path: Path, seed: int = 1) -> Path:
    return save({"a.lora_up.weight": rand(4, 2, seed=seed), "a.lora_down.weight": rand(2, 4, seed=seed)}, path)


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
    "field": lambda h: h["a.weight"].update(more=1),
    **{f"without {key}": lambda h, key=key: h["__metadata__"].pop(key)  # type: ignore[misc]
       for key in OURS if key != KEY},
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES)
def test_header_that_was_changed_after_the_merge_is_detected(tmp_path: Path, change: str) -> None:
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


NAMED = {
    "added": "'title' added",
    "added empty": "'' added",
    "merged_from": "'modelspec.merged_from' edited",
    "sd_merge_recipe": "'sd_merge_recipe' edited",
    "sd_merge_models": "'sd_merge_models' edited",
    "seal": f"{KEY} or {SEAL} edited: all else is what the recipe gives",
    "recipe: unmatched": f"{KEY} or {SEAL} edited: all else is what the recipe gives",
    "recipe: adapters exchanged": f"edited so that '{KEY}' contradicts 'modelspec.merged_from', 'sd_merge_recipe'",
    "recipe: unknown": f"'{KEY}' edited",
    "field": "more than dtype, shape and place of 'a.weight'",
    "the base's": "'note' edited",
    "the base's, gone": "'note' taken out",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("change", NAMED)
def test_header_change_is_named_and_the_remedy_fits(tmp_path: Path, change: str) -> None:
    out = sealed(tmp_path)
    more = {"the base's": edited("note", lambda text: text + "!"),
            "the base's, gone": lambda h: h["__metadata__"].pop("note")}  # fmt: skip
    rewritten(out, {**CHANGES, **more}[change])
    with pytest.raises(VerificationFailed, match="the weights are right") as failure:
        prove(out)
    assert NAMED[change] in failure.value.where
    assert "disk" not in failure.value.fix


def moved(path: Path) -> None:
    """As a program saves it that lays tensors out in its own order."""
    with safetensors.safe_open(str(path), "pt") as f:
        tensors, told = {key: f.get_tensor(key) for key in reversed(f.keys())}, f.metadata()
    save_file(dict(sorted(tensors.items(), reverse=True)), path, told)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how",
    [lambda path: rewritten(path, lambda _: None, separators=(", ", ": ")), lambda path: rewritten(path, lambda _: None, indent=1),
     lambda path: rewritten(path, lambda h: h.update(__metadata__=dict(sorted(h["__metadata__"].items())))),
     lambda path: rewritten(path, reordered), moved],
    ids=["spaces", "lines", "entries in order", "tensors in another order", "data in another order"],
)  # fmt: skip
def test_same_entries_in_other_bytes_are_reported_and_not_blamed(tmp_path: Path, how: Callable[[Path], None]) -> None:
    out = sealed(tmp_path)
    how(out)
    for full in (False, True):
        (warning,) = prove(out, full=full)["warnings"]
        assert "with the same entries in other bytes: out.safetensors" in warning
    assert plan_again(out, tmp_path / "again.safetensors").base.notes == ()


def test_recipe_that_was_edited_is_not_taken_for_wrong_weights(tmp_path: Path) -> None:
    """It says another strength now, by which the weights are others."""
    out = sealed(tmp_path)
    rewritten(out, in_recipe(lambda r: r["adapters"][0].update(strength=0.5)))
    with pytest.raises(
        VerificationFailed, match="the header was changed after the merge, and by what it says now"
    ) as failure:
        prove(out, full=True)
    contradiction = f"edited so that '{KEY}' contradicts 'sd_merge_recipe'"
    assert contradiction in failure.value.where
    assert "put the header back" in failure.value.fix
    (note,) = plan_again(out, tmp_path / "again.safetensors").base.notes
    assert contradiction in note


def test_base_entry_of_a_file_without_recipe_is_compared(tmp_path: Path) -> None:
    """Such a file may lack entries, but what it has must be the base's."""
    out = sealed(tmp_path)
    named = {"base": tmp_path / "b.safetensors", "adapters": [(tmp_path / f"a{n}.safetensors", 1.0) for n in range(2)]}
    rewritten(out, lambda h: h.update(__metadata__={"format": "pt"}))
    assert prove(out, **named)["proven"]
    rewritten(out, lambda h: h["__metadata__"].update(note="other"))
    with pytest.raises(VerificationFailed, match=r"(?s)the weights are right.*'note' edited"):
        prove(out, **named)


@pytest.mark.few(3)
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_inspect_says_that_the_header_was_changed(tmp_path: Path, change: str | None) -> None:
    out = sealed(tmp_path)
    if change is not None:
        rewritten(out, CHANGES[change])
    found = [note for note in inspect(out)["notes"] if "edited or written anew" in note]
    assert len(found) == (change is not None)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=examples(15))
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


def test_output_of_an_earlier_version_is_proven_without_its_seal(tmp_path: Path) -> None:
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
    rewritten(out / names[1], edited("modelspec.merged_from", lambda text: text + "x"))
    with pytest.raises(VerificationFailed, match="header was changed") as failure:
        prove(out)
    assert f"{names[1]}: 'modelspec.merged_from' edited" in failure.value.where


def test_merge_into_a_merge_is_sealed_anew(tmp_path: Path) -> None:
    first, second = sealed(tmp_path), tmp_path / "second.safetensors"
    lora_merge.merge(first, adapter(tmp_path / "a.safetensors", 5), second)
    assert prove(second)["warnings"] == []
    assert metadata(second)[SEAL] != metadata(first)[SEAL]


def test_output_with_a_changed_header_is_not_skipped(tmp_path: Path) -> None:
    out = sealed(tmp_path)
    pair = [str(tmp_path / f"a{n}.safetensors") for n in range(2)]
    jobs = {"version": 1, "jobs": [{"base": str(tmp_path / "b.safetensors"), "adapters": pair, "output": str(out)}]}
    assert [job.status for job in lora_merge.run_batch(jobs)] == ["skipped"]
    rewritten(out, edited("note", lambda text: text + "!"))
    (job,) = lora_merge.run_batch(jobs)
    assert job.error is not None and "was changed after it was made: the header of out.safetensors" in job.error.what
