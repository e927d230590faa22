"""A heat map on a narrow screen, and by keyboard: names of rows stay in view, every cell is reached."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import pytest

from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.pages import page as pages
from tests.kit.browser import shown
from tests.viewing.conftest import Scene

WALK = """
start().then(async () => {
  const pause = () => new Promise((done) => setTimeout(done, 300));
  await pause();
  const plot = document.querySelector("[role=application]"), holder = plot.closest(".scroll"), names = holder.querySelector(".rows");
  const inView = () => names.getBoundingClientRect().left >= holder.getBoundingClientRect().left - 1;
  const said = new Set(), told = { wide: holder.scrollWidth > holder.clientWidth, views: [] };
  for (const at of [0, 100, 10000]) { holder.scrollLeft = at; told.views.push([holder.scrollLeft, inView()]); }
  const rows = [...names.children].map((one) => one.getBoundingClientRect().top);
  const { t, h } = plot._fullLayout._size, top = plot.getBoundingClientRect().top;
  told.apart = Math.max(...rows.map((y, n) => Math.abs(y - top - t - (n + 0.5) * h / rows.length)));
  told.names = [...names.children].map((one) => one.textContent);
  plot.focus();
  for (const turn of ["ArrowRight", "ArrowDown", "ArrowLeft", "ArrowDown"].flatMap((key) => Array(24).fill(key))) {
    plot.dispatchEvent(new KeyboardEvent("keydown", { key: turn }));
    said.add(document.querySelector("[aria-live]").textContent.split(":")[0]);
    await Promise.resolve();
  }
  told.said = [...said];
  told.hidden = inView();
  document.documentElement.dataset.told = JSON.stringify(told);
});
"""


@pytest.fixture(scope="module")
def told(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("narrow")
    text = pages._text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_text", lambda name: re.sub(r"\nstart\(\);\n", WALK, text(name)))
        page = folder / "page.html"
        page.write_text(pages.page(inspect(scene.ink, weights=True)), encoding="utf-8")
    dom = shown(page, folder / "profile", "--window-size=500,900")
    (found,) = re.findall(r'data-told="([^"]*)"', dom)
    return json.loads(unescape(found))


@pytest.mark.release
def test_names_of_rows_stay_in_view_while_a_heat_map_is_scrolled(told: Any) -> None:
    assert told["wide"]
    assert [seen for _, seen in told["views"]] == [True] * 3
    assert told["views"][-1][0] > 0
    assert told["apart"] < 2  # each stands where its row is drawn
    assert told["names"] == ["denoiser IN01", "denoiser IN02", "te BASE"]


@pytest.mark.release
def test_arrow_keys_lead_from_one_network_to_the_other(told: Any) -> None:
    """Their cells share no row and no column."""
    rows = {cell.split(", ")[0] for cell in told["said"]}
    assert rows == {*told["names"]}
    assert told["hidden"] is True
