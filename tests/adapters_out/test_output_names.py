"""Layers that the first adapter lacks get names in its dialect; adapters in the words of two layouts need a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.input_adapters import expect_one_layout
from lora_merge.errors import UsageError
from lora_merge.models.inferred_base import InferredParameter
from tests.kit.adapters import kohya
from tests.kit.dialects import EVERY, base, matrices
from tests.kit.flux import flux, of_flux
from tests.kit.models import sd1
from tests.kit.tensors import Tensors

WORDS = ("kohya", "comfy", "diffusers", "onetrainer")


def modules(tensors: Tensors) -> set[str]:
    return {key.partition(".lora_")[0].removesuffix(".alpha").removesuffix(".diff") for key in tensors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, each with an adapter in several dialects: of every second module, and of all."""
    made = tmp_path_factory.mktemp("words")
    for name, model, adapter in (("sd1", sd1(torch.float32), kohya(sd1())), ("flux", flux(), of_flux())):
        save_file(model, made / f"{name}.safetensors")
        save_file(adapter, made / f"{name}-all.safetensors")
        names = sorted({key.partition(".")[0] for key in adapter})[::2]
        save_file({k: v for k, v in adapter.items() if k.partition(".")[0] in names}, made / f"{name}-some.safetensors")
        for which in ("all", "some"):
            for to in WORDS:
                source, out = made / f"{name}-{which}.safetensors", made / f"{name}-{which}-{to}.safetensors"
                lora_merge.convert(source, out, to=to, base=made / f"{name}.safetensors")
    return made


PAIRS = [(model, first, second) for model in ("sd1", "flux") for first in WORDS for second in WORDS]


@pytest.mark.few(3)
@pytest.mark.parametrize("options", [{}, {"algorithm": "full"}, {"rank": 2}], ids=["exact", "full", "rank"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_all_layers_are_in_the_dialect_of_the_first_adapter(
    pair: tuple[str, str, str], options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Also those that only the second one has, in other words, fused or apart."""
    model, first, second = pair
    whole, out = folder / f"{model}.safetensors", tmp_path / "out.safetensors"
    given = [folder / f"{model}-some-{first}.safetensors", folder / f"{model}-all-{second}.safetensors"]
    report = lora_merge.combine(given, out, base=whole, dtype="fp32", **options)
    assert modules(load_file(out)) == modules(load_file(folder / f"{model}-all-{first}.safetensors"))
    tensors = load_file(whole)
    wanted = lora_merge.merge_state_dict(tensors, given, compute_dtype="fp64")
    found = lora_merge.merge_state_dict(tensors, [out], compute_dtype="fp64")
    off, size = (sum(float((a[k] - b[k]).square().sum()) for k in tensors if tensors[k].is_floating_point())
                 for a, b in ((wanted, found), (wanted, tensors)))  # fmt: skip
    assert off**0.5 <= (report.residual * 1.01 + 1e-5) * size**0.5


@pytest.mark.few(2)
@pytest.mark.parametrize("model", EVERY)
def test_words_of_two_layouts_are_distinguished_without_a_base(model: str) -> None:
    """No two adapters in one dialect are refused, whatever modules they have."""
    changes = {to: [InferredParameter(name, "weight", view.shape) for name, view in matrices(base(model), to).items()]
               for to in DIALECTS if to != "xlabs"}  # fmt: skip
    for own in changes.values():
        expect_one_layout([("a", own[::2]), ("b", own[1::3]), ("c", own[:5])])
    bodies = {to: {c.module.split("_", 2)[-1] for c in changes[to]} for to in ("kohya", "onetrainer")}
    if bodies["kohya"] != bodies["onetrainer"]:
        with pytest.raises(UsageError, match="in different words"):
            expect_one_layout([("a", changes["kohya"]), ("b", changes["onetrainer"][::2])])
