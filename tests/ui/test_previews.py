"""What the page asks for again is not read again: each file is opened once, whatever is asked about it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.planning import checkpoint_cache
from lora_merge.ui.library import Library
from lora_merge.ui.previews import Previews
from lora_merge.ui.runs import Queue
from tests.kit.files import save
from tests.kit.forms import TINY, TUNED, A, form
from tests.kit.models import sd1
from tests.ui.__main__ import models

SECONDS = 1.0
"""Bound on a look at files of full size: five times of what an idle core of 2024 needs."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Path]]:
    """How often each file is opened."""
    counts, whole = Counter[Path](), checkpoint_cache.open_checkpoint

    def counted(path: Path, *, adapter: bool = False) -> object:
        counts[path] += 1
        return whole(path, adapter=adapter)

    monkeypatch.setattr(checkpoint_cache, "open_checkpoint", counted)
    return counts


def previews(folder: Path) -> Previews:
    """Those of a page for a folder."""
    return Previews(Library([folder]), Queue(pictures=False))


def test_each_file_is_opened_once(comfy: Path, opened: Counter[Path]) -> None:
    page, filled = previews(comfy), form("merge", comfy)
    base, (first, second) = filled["base"], filled["adapters"]
    for adapters in ([], [first], [first, second]):
        asked = {**filled, "adapters": adapters}
        assert all("error" not in row for row in page.files(asked)["files"])
        assert page.preview(asked)["plan"]["error"] is None or not adapters
        page.parts(base)
    combined = page.preview({**form("combine", comfy), "base": base, "adapters": [first, second], "options": {}})
    assert combined["plan"]["error"] is None
    assert opened == {Path(path): 1 for path in (base, first["path"], second["path"])}


def test_warm_up_looks_at_a_base_and_an_adapter(comfy: Path, opened: Counter[Path]) -> None:
    page = previews(comfy)
    page.warm_up()
    assert len(opened) == 2
    before = opened.copy()
    page.files({"base": str(comfy / "models" / TINY), "adapters": [{"path": str(comfy / "models" / A)}]})
    page.warm_up()
    assert before.total() <= opened.total() <= before.total() + 2


def test_chosen_base_has_its_names_before_an_adapter_is_chosen(comfy: Path, opened: Counter[Path]) -> None:
    """The names of adapters are worked out while somebody looks for an adapter, with one that fits."""
    page, base = previews(comfy), str(comfy / "models" / TINY)
    page.files({"base": base})
    page._ahead[base, ""].join()
    assert opened[Path(base)] == 1 and len(opened) == 2 and page._facts.cache_info().misses == 3
    page.files({"base": base})
    assert len(page._ahead) == 1 and page._facts.cache_info().misses == 3


def test_chosen_adapter_has_its_names_before_a_base_is_chosen(comfy: Path, opened: Counter[Path]) -> None:
    """They are those of every base with the same tensors, whichever is chosen then."""
    page, adapter = previews(comfy), str(comfy / "models" / A)
    page.files({"adapters": [{"path": adapter}]})
    page._ahead["", adapter].join()
    tiny, tuned = (comfy / f"models/checkpoints/{name}.safetensors" for name in ("tiny", "tuned"))
    assert opened[tiny] + opened[tuned] == 1
    for base in (tiny, tuned):
        assert page.files({"base": str(base), "adapters": [{"path": adapter}]})["files"][-1]["fits"]
    assert page._former.opened.names(tiny) is page._former.opened.names(tuned)


def test_error_names_the_field_that_it_is_about(comfy: Path) -> None:
    page, models = previews(comfy), comfy / "models"
    filled = form("merge", comfy)
    second = [filled["adapters"][0], {**filled["adapters"][1], "strength_for": {}, "parts": "unet=1; te9=0.5,"}]
    for change, field in (
        ({"options": {"seed": "x"}}, "seed"),
        ({"options": {"method": "ties", "density": "7"}}, "density"),
        ({"options": {"map": "/etc/hostname"}}, "map"),
        ({"output": "../x"}, "output"),
        ({"output": TINY, "base": str(models / TUNED), "overwrite": False}, None),
        ({"output": f"models/{TINY}"}, "output"),
        ({"base": str(models / A)}, "base"),
        ({"base": str(models / "checkpoints/sd3.safetensors"), "adapters": filled["adapters"][:1]}, "adapters.0"),
        ({"adapters": second}, "adapters.1"),
        ({"adapters": [second[0], {**second[0], "strength": None}]}, "adapters.1"),
        ({"command": "delete"}, ""),
    ):  # fmt: skip
        assert page.preview({**filled, "options": {}, **change}).get("at") == field, change


def test_changed_configuration_is_read_again(tmp_path: Path) -> None:
    base, folder, former = sd1(), tmp_path / "adapter", lora_merge.FormerPlans()
    name = next(key for key in base if key.endswith("attn1.to_q.weight"))
    out, inner = base[name].shape
    module = f"base_model.model.{name.removesuffix('.weight')}"
    factors = {f"{module}.lora_A.weight": torch.ones(2, inner), f"{module}.lora_B.weight": torch.ones(out, 2)}
    folder.mkdir()
    save(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    save(base, tmp_path / "base.safetensors")

    def effective() -> object:
        return lora_merge.inspect(tmp_path / "base.safetensors", folder, hashes=None, former=former)["match"][
            "effective"
        ]

    before, file = effective(), folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_alpha": 7 * config["lora_alpha"]}))
    assert effective() != before
    assert effective() == lora_merge.inspect(tmp_path / "base.safetensors", folder, hashes=None)["match"]["effective"]


@pytest.mark.slow
def test_look_at_files_of_full_size_is_quick(tmp_path: Path) -> None:
    models(tmp_path)
    page = previews(tmp_path)
    base, ink, detail = (
        str(tmp_path / "models" / name)
        for name in ("checkpoints/sdxl.safetensors", "loras/ink.safetensors", "loras/detail.safetensors")
    )
    page.files({"base": base, "adapters": [{"path": ink}]})  # what the server does before the page is open
    start = time.process_time()
    _, row = page.files({"base": base, "adapters": [{"path": detail}]})["files"]
    assert time.process_time() - start < SECONDS
    assert row["fits"] and row["total"] == 743
    start = time.process_time()
    page.files({"base": base, "adapters": [{"path": ink}, {"path": detail}]})
    assert time.process_time() - start < SECONDS / 10
