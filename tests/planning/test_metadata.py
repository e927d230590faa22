"""`--title`, `--metadata` and `--no-metadata`: what the header of an output holds, and what can be proven with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lora_merge
from lora_merge.errors import InputError, UsageError, VerificationFailed
from lora_merge.files.formats.unread import METADATA_FORMATS
from lora_merge.job import make_job
from lora_merge.option_texts import metadata_entry
from lora_merge.planning.header_entries import NEEDED
from lora_merge.planning.recipe import KEY, OURS, STALE
from lora_merge.recipes.replay import plan_again, prove
from tests.kit.adapters import kohya
from tests.kit.files import metadata, save
from tests.kit.models import sd1_sample

OLD = {"format": "pt", "modelspec.title": "Old", "modelspec.architecture": "stable-diffusion-v1", "ss_tag": "secret"}


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[Path, Path]:
    return save(sd1_sample(), tmp_path / "b.safetensors", OLD), save(kohya(sd1_sample()), tmp_path / "a.safetensors")


def test_title_and_entries_are_in_the_header_and_come_back_by_replay(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    entries = [metadata_entry(text) for text in ("a.b=c=d", "ss_tag=")]
    lora_merge.merge(*inputs, out, title="Ink", metadata=entries)
    found = metadata(out)
    assert {**OLD, "modelspec.title": "Ink", "a.b": "c=d", "ss_tag": ""}.items() <= found.items()
    recipe = json.loads(found[KEY])
    assert (recipe["title"], recipe["metadata"]) == ("Ink", {"a.b": "c=d", "ss_tag": ""})
    assert prove(out)["warnings"] == []
    again = plan_again(out, tmp_path / "again.safetensors")
    assert again.job.title == "Ink"
    assert dict(again.job.metadata) == recipe["metadata"]


def test_no_metadata_writes_no_name_and_no_hash(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """Also none of an earlier merge, whose output is the base here."""
    first, second = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    lora_merge.merge(*inputs, first)
    assert {*OURS} <= metadata(first).keys()
    lora_merge.merge(first, inputs[1], second, no_metadata=True, metadata={"note": "mine"})
    assert metadata(second) == {k: v for k, v in OLD.items() if k in NEEDED} | {"note": "mine"}
    with pytest.raises(InputError, match="nothing about how it was made"):
        prove(second)
    proof = prove(second, first, [inputs[1]])
    assert proof["proven"]
    assert any("no recipe" in warning for warning in proof["warnings"])
    with pytest.raises(VerificationFailed):
        prove(second, inputs[0], [inputs[1]])


@pytest.mark.few(3)
@pytest.mark.parametrize("key", [*OURS, *STALE, *METADATA_FORMATS])
def test_entries_that_only_a_merge_can_write_are_refused(key: str, inputs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="writes this entry itself"):
        lora_merge.plan(*inputs, tmp_path / "o.safetensors", metadata={key: "x"})


@pytest.mark.parametrize("options", [{"title": 3}, {"title": "\ud800"}, {"metadata": {"a": 1}}, {"metadata": "a=b"}])
def test_entries_that_no_header_can_hold_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        make_job("base", "adapter", "output", **options)


def test_jobs_file_takes_them(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    job = {"base": "b.safetensors", "adapters": ["a.safetensors:{s}"], "output": "{s}.safetensors",
           "matrix": {"s": [0.5]}, "title": "Ink {s}", "metadata": {"modelspec.author": "me"}}  # fmt: skip
    (tmp_path / "jobs.yaml").write_text(json.dumps({"version": 1, "jobs": [job]}))
    for status in ("merged", "skipped"):
        (report,) = lora_merge.run_batch(tmp_path / "jobs.yaml")
        assert report.status == status, report.error
    found = metadata(tmp_path / "0.5.safetensors")
    assert (found["modelspec.title"], found["modelspec.author"]) == ("Ink 0.5", "me")
