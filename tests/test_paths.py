"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_merge.paths import expand


def test_steps_upwards_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    assert expand("../a/b/../x.safetensors") == tmp_path / "a" / "x.safetensors"
    assert expand("..") == tmp_path
    assert expand("b/../..") == tmp_path


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_step_upwards_out_of_a_link_leads_where_the_link_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "inner")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "far" / "x").write_text("this")
    monkeypatch.chdir(tmp_path)
    assert expand("link/../x").read_text() == "this"
    assert expand("loop/../x").name == "x"
