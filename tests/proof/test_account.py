"""Every tensor of an adapter is used, or the report says why it changes nothing; and what it says is looked into.

That a lost module of every kind is found: tests/algorithms/test_lost_modules.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.adapters.modules import AdapterFile
from lora_merge.errors import VerificationFailed
from lora_merge.matching.conflicts import DuplicateCheck
from lora_merge.matching.patch import OFF, ZEROS, Match
from lora_merge.planning import changes, checkpoint_cache
from lora_merge.recipes.replay import prove
from lora_merge.report import proof_rows
from tests.kit.adapters import unread
from tests.kit.files import save
from tests.kit.planner_scenes import parted_scene
from tests.kit.tensors import Tensors, rand

BASE = {f"{name}.weight": rand(8, 8, seed=n) for n, name in enumerate(("m.a", "m.b", "m.lm_head"))}


def pair(module: str, seed: int = 5) -> Tensors:
    return {f"{module}.lora_up.weight": rand(8, 2, seed=seed), f"{module}.lora_down.weight": rand(2, 8, seed=seed + 1)}


def peft_pair(module: str, seed: int) -> Tensors:
    return {f"{module}.lora_B.weight": rand(8, 2, seed=seed), f"{module}.lora_A.weight": rand(2, 8, seed=seed + 1)}


def merged(folder: Path, adapter: Tensors, strength: float = 0.7, **options: Any) -> Mapping[str, Any]:
    """The account in the proof of a merge, the same as in a later one."""
    base = save(BASE, folder / "base.safetensors")
    path = save(adapter, folder / "adapter.safetensors")
    out = folder / "out.safetensors"
    report = lora_merge.merge(base, [(path, strength)], out, **options)
    assert report.verified is not None
    account = report.verified["account"]
    assert prove(out, full=True)["account"] == account
    facts = {**report.verified, "numbers": report.numbers}
    names = [row.name for row in proof_rows(facts)]
    assert names.count("unused") == bool(account["unused"])
    assert isinstance(account, dict)
    return account


def test_plain_adapter_is_used_whole(tmp_path: Path) -> None:
    assert merged(tmp_path, pair("m.a") | pair("m.b")) == {"tensors": 4, "used": 4, "unused": 0, "reasons": {}}


def test_tensors_that_change_nothing_are_named_with_their_reason(tmp_path: Path) -> None:
    """A module without a place, one whose strength is 0, a copy under another name, an embedding of a prompt."""
    adapter = pair("m.a") | pair("m.b") | pair("m.gone") | {"emb_params": rand(2, 2)}
    adapter |= {k.replace("m.a", "diffusion_model.m.a"): v.clone() for k, v in pair("m.a").items()}
    found = merged(tmp_path, adapter, unmatched="skip", strength_for=[("re:^m.b", 0.0)])
    assert (found["tensors"], found["used"], found["unused"]) == (9, 2, 7)


STEMS = ("m.a", "m.a.default", "m.a._orig_mod", "lycoris_m_a", "base_model.model.m.a.default")


READ = {"m.a", "lycoris_m_a"}
"""Names that the second reading knows."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stems", "equal"), [*((pair, True) for pair in combinations(STEMS, 2)), (STEMS[:2], False), (STEMS[2:4], False)]
)
def test_module_under_two_names(tmp_path: Path, stems: tuple[str, str], *, equal: bool) -> None:
    """Equal copies are applied once, and confirmed if the second reading knows a name; others are refused."""
    one, two = peft_pair(stems[0], 1), peft_pair(stems[1], 1 if equal else 2)
    if equal:
        assert merged(tmp_path, one | two)["unused"] == 2
        assert prove(tmp_path / "out.safetensors")["matching"]["proven"] == bool({*stems} & READ)
        return
    with pytest.raises(lora_merge.MergeError) as caught:
        merged(tmp_path, one | two)
    assert caught.value.exit_code == 3


def test_adapter_of_strength_0_is_accounted_for(tmp_path: Path) -> None:
    found = merged(tmp_path, pair("m.a"), 0.0)
    assert found == {"tensors": 2, "used": 0, "unused": 2, "reasons": dict.fromkeys(pair("m.a"), OFF)}


@pytest.mark.parametrize("why", [OFF, ZEROS])
def test_reason_that_does_not_hold_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    original = changes.match_adapter

    def match(*arguments: Any) -> Match:
        result = original(*arguments)
        left = next(m for m in result.adapter.modules if m.name == "m.b")
        unused = dict.fromkeys((info.name for info in left.slots.values()), why)
        return replace(result, uses={k: v for k, v in result.uses.items() if k != "m.b.weight"}, unused=unused)

    monkeypatch.setattr(changes, "match_adapter", match)
    with pytest.raises(VerificationFailed, match="for a reason that does not hold"):
        merged(tmp_path, unread("m.a", 8, 8) | unread("m.b", 8, 8, seed=5))


def test_false_copy_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a spelling of which the second reading knows nothing: the factors of the second module are its own."""
    monkeypatch.setattr(DuplicateCheck, "repeats", lambda self, patch: "m.b" in patch.module.name)
    with pytest.raises(VerificationFailed, match="for a reason that does not hold"):
        merged(tmp_path, unread("m.a", 8, 8) | unread("m.b", 8, 8, seed=5))


def test_part_of_a_place_that_is_not_written_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three weights below each other, one of which gets nothing."""
    original, lost = changes.match_adapter, "transformer_blocks.0.attn.to_k.weight"

    def match(*arguments: Any) -> Match:
        result = original(*arguments)
        return replace(result, uses={k: v for k, v in result.uses.items() if k != lost})

    base = parted_scene(tmp_path).base
    adapter = save(unread("lora_unet_double_blocks_0_img_attn_qkv", 48, 16), tmp_path / "adapter.safetensors")
    paths = base, adapter
    lora_merge.merge(*paths, tmp_path / "right.safetensors")
    monkeypatch.setattr(changes, "match_adapter", match)
    with pytest.raises(VerificationFailed, match="loses a part of an adapter's module"):
        lora_merge.merge(*paths, tmp_path / "wrong.safetensors")
    assert not (tmp_path / "wrong.safetensors").exists()


def test_tensor_that_the_reader_of_headers_overlooks_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library lists the file's tensors, not this project's own reader."""
    original = checkpoint_cache.group

    def group(index: Any) -> AdapterFile:
        rest = {name: info for name, info in index.tensors.items() if not name.startswith("m.b")}
        return original(replace(index, tensors=rest))

    monkeypatch.setattr(checkpoint_cache, "group", group)
    with pytest.raises(VerificationFailed, match="was not read"):
        merged(tmp_path, pair("m.a") | pair("m.b"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_tensors_of_every_container_are_listed(tmp_path: Path, name: str) -> None:
    """A pickle, which the library cannot open, and a shared tensor that no layer needs."""
    base = save(BASE, tmp_path / "base.safetensors")
    tensors = {f"base_model.model.m.{n}.vera_lambda_{s}": rand(*shape)
               for n in "ab" for s, shape in (("b", (8,)), ("d", (2,)))}  # fmt: skip
    tensors |= {"base_model.vera_A": rand(2, 8), "base_model.vera_B": rand(8, 2)}
    folder = tmp_path / "adapter"
    folder.mkdir()
    torch.save(tensors, folder / name) if name.endswith(".bin") else save(tensors, folder / name)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "VERA", "r": 2}))
    report = lora_merge.merge(base, folder, tmp_path / "out.safetensors")
    assert report.verified is not None
    assert report.verified["account"]["used"] == 6
