"""Pages and plots: what a browser shows of them, and what a stranger's names cannot do there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.change_statistics import Measure, Measures
from lora_merge.facts import share_of
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.models.blocks import groups
from lora_merge.models.names import names
from lora_merge.report import merge_rows, size_of_change
from lora_merge.survival import judged
from lora_merge.viewing.compare import compare, compare_rows, compare_summary
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.inspect_rows import match_summary, rows, summary
from lora_merge.viewing.pages import page as pages
from lora_merge.viewing.pages import plot
from lora_merge.viewing.pages.content import PageContent, grid_places
from lora_merge.viewing.pages.output_pages import batch_page
from tests.kit.browser import shown
from tests.kit.command_line import run
from tests.kit.files import load, metadata, save
from tests.kit.tensors import rand
from tests.viewing.conftest import Scene


def content(html: str) -> Any:
    """The JSON that a page holds."""
    found = re.search(r'<script id="content" type="application/json">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.release
def test_browser_shows_the_numbers_of_the_report(scene: Scene, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "<b>out</b>.safetensors"
    code, text, _ = run(
        "merge", scene.base, f"{scene.ink}:0.5", scene.oil, "-o", out, "--json", "--json-tensors", "--html", page
    )
    assert code == 0
    report = json.loads(text)
    assert page.stat().st_size < 5_000_000
    dom = shown(page, tmp_path / "profile")
    seen = unescape(re.sub("<[^>]*>", "\n", dom.split("<footer")[0].split("<main")[1]))
    assert "<b>out</b>" in seen  # as text
    assert f"{report['changed']} of {report['tensors']} tensors" in seen
    numbers = report["numbers"]
    assert size_of_change(numbers, "the weights") in seen
    assert "heatmaplayer" in dom  # Plotly has drawn
    assert [*numbers["blocks"]] == ["unet B01", "unet B02", "te BASE"]  # in the model's order
    assert [*numbers["components"]] == ["unet", "te"]
    (heat,) = content(page.read_text(encoding="utf-8"))["heat_maps"]
    assert {name: row["change"] for name, row in heat["weights"].items()} == {
        name: row["change"] for name, row in numbers["tensors"].items()
    }
    assert json.loads(content(page.read_text(encoding="utf-8"))["commands"][-1]["text"]) == json.loads(
        metadata(out)["lora_merge.recipe"]
    )
    assert sorted(n for cell in heat["cells"] for n in cell["names"]) == sorted(numbers["tensors"])
    tags = re.sub("<script.*?</script>", "", dom, flags=re.S)
    assert not re.search(r'(?:src|href)="?(?:https?:)?//', tags)  # nothing is fetched
    assert "default-src 'none'" in tags


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["merge {base} {ink}:0.5 {oil}", "combine {ink} {oil}:0.5", "resize {ink} --rank 1", "convert {ink} --to kohya --base {base}",
                                   "average {ink} {ink}", "extract {base} {merged} --rank 2 --format kohya"])  # fmt: skip
def test_commands_of_a_page_can_be_typed(words: str, scene: Scene, tmp_path: Path) -> None:
    """The inputs lie in another folder; what is repeated has the same bytes."""
    merged, page, out = tmp_path / "first" / "merged.safetensors", tmp_path / "page.html", tmp_path / "out.safetensors"
    merged.parent.mkdir()
    assert run("merge", scene.base, scene.ink, "-o", merged).code == 0
    given = words.format(base=scene.base, ink=scene.ink, oil=scene.oil, merged=merged).split()
    assert run(*given, "-o", out, "--html", page).code == 0
    commands = [one["text"] for one in content(page.read_text(encoding="utf-8"))["commands"]]
    typed = [shlex.split(text) for text in commands if text.startswith("lora-merge")]
    assert [one[1] for one in typed] == ["replay", "verify", *["unmerge"] * words.startswith("merge")]
    for one in typed:
        code, _, said = run(*one[1:])
        assert code == 0, (one, said)
    assert (tmp_path / "out-again.safetensors").read_bytes() == out.read_bytes()
    assert json.loads(commands[-1]), "the recipe"


def test_cuts_and_warnings_of_the_page_are_those_of_the_report(scene: Scene, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out.safetensors"
    words = [f"{scene.ink}:1000000", "--dtype", "fp8_e4m3fn", "--on-overflow", "saturate", "--json", "--html", page]
    code, text, _ = run("merge", scene.base, *words, "-o", out)
    assert code == 0
    cut = sum(json.loads(text)["saturated"].values())
    summary = content(page.read_text(encoding="utf-8"))["summary"]
    assert any(name == "cut" and value.startswith(f"{cut} numbers") for name, value in summary)
    (tmp_path / "jobs.yaml").write_text(
        f"version: 1\njobs: [{{base: '{scene.base}', adapters: [{{path: '{scene.ink}', strength: 0.000001}}], output: o.safetensors}}]\n"
    )
    code, text, _ = run("batch", tmp_path / "jobs.yaml", "--json", "--html", page)
    assert code == 0
    (warned,) = json.loads(text)["report"]["verified"]["warnings"]
    assert any(line.endswith(warned) for line in content(page.read_text(encoding="utf-8"))["warnings"])


def test_share_of_an_adapter_is_that_of_all_its_numbers(scene: Scene, tmp_path: Path) -> None:
    """The proof beside it looks at a sample of rows."""
    page = tmp_path / "page.html"
    words = ["merge", scene.base, f"{scene.ink}:0.01", "--json", "--html", page, "-o", tmp_path / "out.safetensors"]
    code, text, _ = run(*words)
    assert code == 0
    (one,) = json.loads(text)["numbers"]["all"]["adapters"]
    (table,) = [t for t in content(page.read_text(encoding="utf-8"))["tables"] if t["title"] == "Adapters"]
    assert table["rows"][0][-2:] == [one["change"], pytest.approx(one["share"], rel=1e-5)]


@pytest.mark.release
def test_page_of_several_files_has_what_the_page_of_each_has(scene: Scene, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("inspect", scene.base, scene.ink, scene.oil, "--weights", "--html", page).code == 0
    made = content(page.read_text(encoding="utf-8"))
    names = [one.name for one in (scene.ink, scene.oil)]
    assert [one["title"].partition(":")[0] for one in made["heat_maps"]] == names
    dom = shown(page, tmp_path / "profile")
    assert dom.count("heatmaplayer") >= 2
    assert all(f"{name}: summary" in unescape(dom) for name in names)


def test_page_of_a_base_with_adapters_has_every_file_once_and_the_verdict_of_the_terminal(
    scene: Scene, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    wide = {
        k: rand(v.shape[0], 3 * v.shape[1]) if k.endswith("to_q.lora_down.weight") else v
        for k, v in load(scene.ink).items()
    }
    other = save(wide, tmp_path / "other.safetensors")
    code, out, _ = run("inspect", scene.base, scene.ink, other, "--html", page)
    made = content(page.read_text(encoding="utf-8"))
    assert (code, made["title"], made["verdict"]["level"]) == (4, "3 files", "bad")
    assert made["verdict"]["text"] == out.partition("\n")[0].removeprefix("verdict").strip()
    assert [row[0] for row in made["tables"][0]["rows"]] == [scene.base.name, scene.ink.name, other.name]
    assert [row[1:] for row in made["tables"][0]["rows"]][1:] == [
        ["adapter: fits", 20, 20],
        ["adapter: does not fit", 0, 20],
    ]
    titles = [one["title"] for one in made["tables"]]
    assert len(titles) == len({*titles}) and f"{scene.base.name}: summary" in titles
    assert run("inspect", scene.ink, scene.oil, "--html", page).code == 0
    made = content(page.read_text(encoding="utf-8"))
    assert [column["title"] for column in made["tables"][0]["columns"]][:5] == ["file", "what", "for", "rank", "size"]


def test_page_of_a_merge_that_is_taken_back_says_so(scene: Scene, tmp_path: Path) -> None:
    page, merged, out = (tmp_path / name for name in ("page.html", "m.safetensors", "u.safetensors"))
    assert run(scene.base, scene.ink, "-o", merged, "--quiet").code == 0
    assert run("unmerge", merged, scene.ink, "-o", out, "--html", page, "--quiet").code == 0
    made = content(page.read_text(encoding="utf-8"))
    assert made["kind"] == "Unmerge" and made["verdict"]["text"].startswith("Unmerged and verified: ")
    assert not any("unmerge" in str(one) for one in made["commands"])


def test_merge_that_cannot_be_is_not_offered(scene: Scene, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    other = save(
        {"lora_unet_nowhere.lora_up.weight": rand(4, 2), "lora_unet_nowhere.lora_down.weight": rand(2, 4)},
        tmp_path / "other.safetensors",
    )
    assert run("inspect", scene.base, other, "--html", page).code == 4
    assert content(page.read_text(encoding="utf-8"))["commands"] == []


@pytest.mark.release
def test_bar_below_a_share_is_as_long_as_the_share(scene: Scene, tmp_path: Path) -> None:
    """Half of the energy is half a bar, also where no row of the table has more."""
    page = tmp_path / "page.html"
    out = tmp_path / "made.safetensors"
    code, text, _ = run("resize", scene.ink, "--rank", "1", "-o", out, "--json", "--html", page)
    assert code == 0
    energies = [one["energy"] for one in json.loads(text)["numbers"]["blocks"].values()]
    assert max(energies) < 0.99
    dom = shown(page, tmp_path / "profile")
    by_block = dom.partition("By block")[2].partition("</table>")[0]
    widths = [float(found) / 100 for found in re.findall(r'class="bar"[^>]*width: ?([0-9.]+)%', by_block)]
    assert widths[1::2] == pytest.approx(energies, rel=1e-3)  # the other bars are below the norms


def test_names_of_a_stranger_stay_text(tmp_path: Path) -> None:
    """They stand in the page as JSON without `<`; its script sets them as text."""
    bad = "</script><img src=x onerror=alert(1)>\u202e\u200b.to_q"
    factors = {f"{bad}{n}.lora_{end}.weight": rand(2, 2) for n in range(2) for end in ("up", "down")}
    file = save(factors, tmp_path / "a.safetensors")
    page = tmp_path / "page.html"
    assert run("inspect", file, "--weights", "--html", page).code == 0
    html = page.read_text(encoding="utf-8")
    assert "<img" not in html
    assert html.count("</script>") == 3
    shown_as = bad.replace("\u202e", "\\u202e").replace("\u200b", "\\u200b")  # hidden, or it would turn what follows
    assert any(shown_as in name for name in content(html)["heat_maps"][0]["weights"])
    assert not {"\u202e", "\u200b"} & {*html.replace(pages.plotly(), "")}


KEYS = """
start().then(() => {
  document.querySelector("[role=application]").focus();
  for (const key of ["ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "Enter"]) {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  }
});
"""
"""What a person types on a page."""


@pytest.mark.release
def test_cell_is_reached_by_keyboard_and_shows_its_spectrum_and_histogram(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pages._text
    monkeypatch.setattr(pages, "_text", lambda name: re.sub(r"\nstart\(\);\n", KEYS, text(name)))
    found = inspect(scene.ink, weights=True, pictures=True)
    page = tmp_path / "page.html"
    page.write_text(pages.page(found), encoding="utf-8")
    dom = shown(page, tmp_path / "profile", "--blink-settings=preferredColorScheme=0")
    assert 'data-theme="dark"' in dom
    name = "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_k"
    (aloud,) = re.findall(r'class="unseen" aria-live="polite">(.*?)<', dom)
    assert aloud.startswith("denoiser IN02, attn1_to_k: ‖ΔW‖ ")
    assert f"{found['weights']['modules'][name]['norm']:.5g}" in aloud
    assert not re.search(r'<div class="plot-container plotly"(?![^>]*aria-hidden)', dom.split("singular values")[0]), (
        "read twice"
    )
    for picture in ("singular values", "elements of ΔW"):
        assert re.search(f'aria-label="{picture}[^"]* of {name}"', dom)


def test_script_that_is_not_the_pages_may_not_run(scene: Scene) -> None:
    html = pages.page(inspect(scene.ink))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert re.search(r"script-src( 'sha256-[\w+/]{43}='){2};", policy[1])
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy[1]


def test_spectrum_and_histogram_are_those_of_the_change(tmp_path: Path) -> None:
    up, down = rand(12, 3, scale=1.0), rand(3, 10, seed=1, scale=1.0)
    factors = {
        f"{place}.lora_{end}.weight": t for place in "ab" for end, t in (("up", up.clone()), ("down", down.clone()))
    }
    found = inspect(save(factors, tmp_path / "a.safetensors"), weights=True, pictures=True)["weights"]["modules"]["a"]
    delta = up.double() @ down.double()
    exact = torch.linalg.svdvals(delta)[:3]
    assert found["spectrum"] == pytest.approx(exact.tolist(), rel=1e-3)
    centres, counts = found["histogram"]["centres"], found["histogram"]["counts"]
    assert (sum(counts), len(centres), centres[15]) == (120, len(counts), 0)
    scaled = (delta / delta.square().mean().sqrt()).flatten()
    half = (centres[1] - centres[0]) / 2
    assert counts[15] == int((scaled.abs() < half).sum())


@pytest.mark.slow
def test_merge_and_a_fit_have_the_pictures_of_each_change(scene: Scene, tmp_path: Path) -> None:
    """Of one adapter, of two that change the same weights, and of one change that a method makes of both."""
    page, out = tmp_path / "page.html", tmp_path / "out.safetensors"
    for words in (
        ["inspect", scene.base, f"{scene.ink}:0.5", "--weights"],
        ["merge", scene.base, f"{scene.ink}:0.5", scene.oil, "-o", out, "--dtype", "fp32", "--overwrite"],
        ["merge", scene.base, scene.ink, scene.oil, "-o", out, "--dtype", "fp32", "--method", "ties", "--overwrite"],
    ):  # fmt: skip
        assert run(*words, "--html", page).code == 0
        if "inspect" in words:
            assert run("merge", *words[1:3], "-o", out, "--dtype", "fp32").code == 0
        before, after = load(scene.base), load(out)
        (heat_map,) = content(page.read_text(encoding="utf-8"))["heat_maps"]
        assert heat_map["weights"]
        for name, one in heat_map["weights"].items():
            delta = (after[name].double() - before[name].double()).flatten(1)
            exact = torch.linalg.svdvals(delta)
            assert one["spectrum"][0] == pytest.approx(float(exact[0]), rel=1e-3), name
            assert sum(v * v for v in one["spectrum"]) == pytest.approx(float(delta.square().sum()), rel=1e-3)
            assert one["rank"] == int((exact > 1e-4 * exact[0]).sum())
            scaled = (delta / delta.square().mean().sqrt()).flatten()
            centres = one["histogram"]["centres"]
            wanted = float((scaled.abs() < (centres[1] - centres[0]) / 2).double().mean())
            counts = one["histogram"]["counts"]  # of some rows
            assert counts[15] / sum(counts) == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(("rows", "cols"), [(24, 40), (600, 700), (3, 1)])
def test_pictures_of_a_difference_are_those_of_its_numbers(tmp_path: Path, rows: int, cols: int) -> None:
    """Also of a matrix whose singular values are not all computed, and where B stores it under another prefix."""
    before, change = rand(rows, cols), rand(rows, 3) @ rand(3, cols, seed=5)
    a, b = ({"model.layers.0.q.weight": before}, {"layers.0.q.weight": before + change})
    files = [save({**of, "norm": rand(7, seed=n)}, tmp_path / f"{n}.safetensors") for n, of in enumerate((a, b))]
    found = compare(*files, pictures=True)["tensors"]
    assert found["norm"].keys() >= {"histogram"}
    assert "spectrum" not in found["norm"]
    one = found["layers.0.q.weight"]
    exact = torch.linalg.svdvals(change.double())[:64]
    assert one["spectrum"] == pytest.approx(exact.tolist(), rel=1e-3, abs=float(exact[0]) * 1e-3)
    assert sum(one["histogram"]["counts"]) == min(rows, 64) * cols


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize(
    ("stored", "beside", "shown_as"),
    [
        (f"data:image/png;base64,{DOT}", "", f"data:image/png;base64,{DOT}"),
        ("", "a.png", f"data:image/png;base64,{DOT}"),
        ("", "a.preview.png", f"data:image/png;base64,{DOT}"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "", ""),
        ('data:image/png;base64,"><script>', "", ""),
        ("", "", ""),
    ],
)
def test_page_shows_the_preview_picture(stored: str, beside: str, shown_as: str, tmp_path: Path) -> None:
    """Of the metadata, or of a file beside the adapter; nothing that could be a program."""
    factors = {"a.lora_up.weight": rand(4, 2), "a.lora_down.weight": rand(2, 4)}
    file = save(factors, tmp_path / "a.safetensors", {"modelspec.thumbnail": stored} if stored else None)
    if beside:
        (tmp_path / beside).write_bytes(base64.b64decode(DOT))
    html = pages.page(inspect(file))
    assert content(html)["image"] == shown_as


@pytest.mark.parametrize("content_of", [b"my key", b"<svg/>", b"RIFF", b""])
def test_page_holds_no_file_that_is_not_a_picture(content_of: bytes, tmp_path: Path) -> None:
    """What has the name of a preview may lead to a key."""
    file = save({"a.lora_up.weight": rand(4, 2), "a.lora_down.weight": rand(2, 4)}, tmp_path / "a.safetensors")
    (tmp_path / "a.png").write_bytes(content_of)
    assert content(pages.page(inspect(file)))["image"] == ""


@pytest.mark.slow
def test_plots_show_no_hidden_character_and_no_formula(tmp_path: Path) -> None:
    bad = "\u202e\u200b\x1b[2J $\\frac{$"
    assert plot._text(bad) == "\\u202e\\u200b\\u001b[2J \\$\\frac{\\$"
    factors = {f"{bad}{n}.lora_{end}.weight": rand(2, 2) for n in range(2) for end in ("up", "down")}
    file = save(factors, tmp_path / f"{bad}.safetensors")
    assert run("inspect", file, "--weights", "--plot", tmp_path / "plot.svg").code == 0
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_page_of_an_adapter_shows_what_each_block_keeps(scene: Scene, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, text, _ = run(
        "resize", scene.ink, "--rank", "2", "-o", tmp_path / "o.safetensors", "--html", page, "--json", "--json-tensors"
    )
    assert code == 0
    layers = json.loads(text)["layers"]
    (table,) = [t for t in content(page.read_text(encoding="utf-8"))["tables"] if t["title"] == "By block"]
    (heat_map,) = content(page.read_text(encoding="utf-8"))["heat_maps"]
    for name, one in heat_map["weights"].items():  # a click on its cell shows what of it was written
        assert sum(v * v for v in one["spectrum"]) == pytest.approx(
            layers[name]["norm"] ** 2 * layers[name]["energy"], rel=1e-2
        )
        assert one["histogram"]["counts"]
    assert sum(row[1] for row in table["rows"]) == len(layers)
    assert sum(row[2] ** 2 for row in table["rows"]) == pytest.approx(sum(one["norm"] ** 2 for one in layers.values()))
    kept = sum(row[2] ** 2 * row[-1] for row in table["rows"])
    assert kept == pytest.approx(sum(one["norm"] ** 2 * one["energy"] for one in layers.values()), rel=1e-4)
    assert 0 < table["rows"][0][-1] < 1


@pytest.mark.slow
def test_pages_of_adapters_have_the_numbers_of_the_report(scene: Scene, tmp_path: Path) -> None:
    """Of extract those beside the weights, of combine those of each input; a share that is 1 everywhere is no column."""
    page, tuned = tmp_path / "page.html", tmp_path / "tuned.safetensors"
    lora_merge.merge(scene.base, [(scene.ink, 4.0)], tuned)
    words = (["extract", scene.base, tuned, "--rank", "2"], ["combine", scene.ink, f"{scene.oil}:0.5"],
             ["combine", scene.ink, scene.oil, "--method", "ties", "--density", "0.3", "--rank", "2"])  # fmt: skip
    for given, titles in zip(
        words, (["‖ΔW‖ / ‖W‖", "‖ΔW‖"], ["‖ΔW‖"], ["‖ΔW‖", "values that are not zero"]), strict=True
    ):
        code, text, _ = run(
            *given, "-o", tmp_path / f"{given[0]}{len(given)}.safetensors", "--html", page, "--json", "--json-tensors"
        )
        assert code == 0, text
        report, made = json.loads(text), content(page.read_text(encoding="utf-8"))
        (heat_map,), every = made["heat_maps"], report["numbers"]["all"]
        keys = {m["title"]: m["key"] for m in heat_map["metrics"]}
        assert [title for title in keys if title in ("‖ΔW‖ / ‖W‖", "‖ΔW‖", "values that are not zero")][
            : len(titles)
        ] == titles
        for name, layer in report["layers"].items():
            assert all(heat_map["weights"][name][key] == layer[key] for key in keys.values() if key != "rank_before")
        tables = {table["title"]: table for table in made["tables"]}
        columns = [column["title"] if isinstance(column, dict) else column for column in tables["By part"]["columns"]]
        rows = zip(tables["By part"]["rows"], report["numbers"]["components"].values(), strict=True)
        assert all(row[columns.index(title)] == part[keys[title]] for row, part in rows for title in titles)
        norms = [one["change"] for one in every.get("adapters", ())] or [every["norm"]]
        assert [row[4] for row in tables["Inputs"]["rows"]] == norms
        times = sum(seconds for one in made["stages"] for _, seconds in one["rows"])
        assert times == pytest.approx(report["seconds"], abs=0.02), "but for those of a moment"
        change = dict(made["summary"])["change"]
        assert ("of ‖W‖" in change) == ("ratio" in every)
        assert share_of(every["ratio"], "‖W‖") in change if "ratio" in every else change


def test_page_says_all_that_the_text_says(scene: Scene, tmp_path: Path) -> None:
    """Each fact in the same words; the rows of tables by their names. The page of a merge has the rows of its panel."""
    merged = tmp_path / "m.safetensors"
    report = lora_merge.merge(scene.base, [(scene.ink, 0.5)], merged)
    stranger = save(
        {"nowhere.lora_up.weight": rand(4, 2), "nowhere.lora_down.weight": rand(2, 4)}, tmp_path / "s.safetensors"
    )
    for found in (
        inspect(scene.ink), inspect(scene.ink, weights=True), inspect(merged, weights=True),
        inspect(scene.base, scene.ink, weights=True), inspect(scene.base, stranger),
        compare(scene.base, merged), compare(scene.ink, scene.oil),
    ):  # fmt: skip
        made = content(pages.page(found))
        told = [
            ["verdict", made["verdict"]["text"]],
            *made["summary"],
            *(["warning", w] for w in made["warnings"]),
            *(["note", n] for n in made["notes"]),
        ]
        every = json.dumps(made, ensure_ascii=False)
        text = [*(compare_rows(found) if "a" in found else rows(found))]
        head = {
            *(
                compare_summary(found)
                if "a" in found
                else (*summary(found), *match_summary(found["match"]))
                if "match" in found
                else summary(found)
            )
        }
        assert len(head) > 4
        for row in text:
            assert [row.name, row.value] in told or row not in head, row
            assert row.name or json.dumps(row.value.strip().partition("–")[0], ensure_ascii=False)[1:-1] in every, row
    told = dict(content(pages.page(inspect(merged)))["summary"])
    assert told["merged"].startswith("base.safetensors + ink.safetensors:0.5")
    facts = [*merge_rows(vars(report), verbose=True)]
    assert {"output", "adapter", "verified", "copied", "change"} <= {row.name for row in facts}
    assert [row.value for row in facts if row.name == "survives"]
    told = content(pages.page(json.loads(report.to_json())))["summary"]
    assert all([row.name, row.value] in told for row in facts if row.name)


@pytest.mark.release
def test_every_command_has_its_page(scene: Scene, tmp_path: Path) -> None:
    page, jobs = tmp_path / "page.html", tmp_path / "jobs.yaml"
    job = {"base": str(scene.base), "adapters": [str(scene.ink)], "output": str(tmp_path / "job.safetensors")}
    jobs.write_text(json.dumps({"version": 1, "jobs": [job]}))
    for words, kind in (
        (["inspect", scene.base, "--weights"], "Model"), (["inspect", scene.ink, scene.oil], "Files"),
        (["inspect", scene.base, scene.ink, "--weights"], "Model"), (["compare", scene.ink, scene.oil], "Comparison"),
        (["compare", scene.base, scene.base], "Comparison"), (["batch", jobs], "Batch"),
        (["compare", scene.base, tmp_path / "job.safetensors"], "Comparison"),
        (["compare", scene.ink, scene.oil, "--base", scene.base], "Comparison"),
        (["combine", scene.ink, scene.oil, "-o", tmp_path / "both.safetensors"], "Combined adapter"),
        (["unmerge", tmp_path / "job.safetensors", scene.ink, "-o", tmp_path / "before.safetensors"], "Unmerge"),
    ):  # fmt: skip
        page.unlink(missing_ok=True)
        assert run(*words, "--html", page).code == 0, words
        made = content(page.read_text(encoding="utf-8"))
        assert made["kind"] == kind
        assert made["summary"] or made["tables"]
        for one in (one for heat_map in made["heat_maps"] for one in heat_map["weights"].values()):
            assert one["spectrum"], words
            assert one["histogram"], words
    page.unlink()
    assert run("inspect", scene.ink, "--weights", "--plot", tmp_path / "x.png").code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert run("compare", scene.ink, scene.oil, "--plot", tmp_path / "x.svg").code == 0
    assert "<svg" in (tmp_path / "x.svg").read_text(encoding="utf-8")
    (tmp_path / "x.pdf").write_bytes(b"%PDF-1.4")  # of an earlier run
    assert run("compare", scene.ink, scene.oil, "--plot", tmp_path / "x.pdf").code == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("unit", "ends"), [("cosine", (-1, 1)), ("", (0.0, 0.5))])
def test_cosine_has_the_same_colour_in_every_plot(unit: str, ends: tuple[float, float]) -> None:
    """Two adapters that hardly agree are pale; other numbers have colours from 0, so that no noise looks like structure."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()
    cells = [{"row": 0, "column": n, "values": {"x": value}} for n, value in enumerate((0.25, 0.5))]
    metric = {"key": "x", "title": "x", "unit": unit}
    plot._heat_map(
        {"metrics": [metric], "rows": ["r"], "columns": ["a", "b"], "cells": cells, "title": "t"}, ax, figure
    )
    assert ax.images[0].get_clim() == ends
    ax = figure.subplots()
    plot._bars({"unit": unit, "rows": [["a", 0.001], ["b", -0.0005]], "title": "t"}, ax, figure)
    assert bool(ax.get_xlim()[1] > 1) is (unit == "cosine"), "nor has a small one a long bar"


def test_page_that_cannot_be_written_is_refused_before_the_work(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, base, other = tmp_path / "out.safetensors", scene.base.read_bytes(), tmp_path / "other.safetensors"
    shutil.copy(scene.base, other)
    shutil.copy(scene.base, tmp_path / "x.png")
    for words, what in (
        (["--html", scene.base], "would be written over an input"), (["--html", out], "would be written over an output"),
        (["--html", tmp_path / "none" / "x.html"], "cannot be written there"), (["--plot", "x.bmp"], "cannot be a .bmp"),
        (["--html", tmp_path / "x.html", "--dry-run"], "nothing to show"), (["--html", other], "a file of another kind"),
        (["--report", other], "a file of another kind"), (["--plot", tmp_path / "x.png"], "a file of another kind"),
        (["--html", "-"], "the report is a file, not a stream"), (["--report", "-"], "the report is a file, not a stream"),
    ):  # fmt: skip
        code, _, said = run("merge", scene.base, scene.ink, "-o", out, *words)
        assert code == 2, words
        assert what in said
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    pages.library.cache_clear()
    with pytest.raises(pages.UsageError, match="Plotly"):
        pages.library()
    pages.library.cache_clear()
    assert not out.exists()
    assert scene.base.read_bytes() == other.read_bytes() == base
    for command in (
        ["inspect", scene.ink],
        ["compare", scene.ink, scene.ink],
        ["resize", scene.ink, "--rank", "1", "-o", out],
    ):
        assert run(*command, "--html", other).code == 2
    assert other.read_bytes() == base
    assert load(scene.base)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q.weight", "attn1.to_q"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "attn1_to_q"),
        ("model.layers.31.self_attn.q_proj.weight", "self_attn.q_proj"),
        ("double_blocks.7.img_mlp.2.bias", "img_mlp.#.bias"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "mlp.experts.#.up_proj"),
    ],
)
def test_weight_has_its_row_and_its_column(name: str, kind: str) -> None:
    assert grid_places({name: "unet IN04"}) == {name: ("unet IN04", kind)}


def test_rows_are_in_the_order_of_the_models_blocks() -> None:
    """Those in no block come last."""
    names = {f"model.layers.{n}.self_attn.q_proj.weight": f"model L{n:02d}" for n in (10, 2, 1)}
    places = grid_places({"x.weight": "", **names}, ["model L01", "model L02", "model L10"])
    assert [block for block, _ in places.values()] == ["model L01", "model L02", "model L10", "(the rest)"]


def test_blocks_of_a_report_are_in_the_models_order(scene: Scene) -> None:
    """In whatever order the numbers of its tensors were known; a page keeps that order."""
    base, measures = open_checkpoint(scene.base), Measures()
    measures.tensors = dict.fromkeys(reversed([*base.tensors]), Measure(of=1, elements=1, weight=1.0))
    numbers = measures.to_dict(0, groups(names(base)))
    assert [*numbers["components"]] == ["unet", "te", "vae"]
    assert [*numbers["blocks"]] == ["unet BASE", "unet B00", "unet B01", "unet B02", "te BASE"]
    page = PageContent("Merge", "m")
    page.change(numbers, "t")
    assert [row[0] for row in page.data["tables"][-1]["rows"]] == [*numbers["blocks"]]


def test_page_of_jobs_links_to_the_outputs_that_are_there(scene: Scene, tmp_path: Path) -> None:
    page, jobs = tmp_path / "page.html", tmp_path / "jobs.yaml"
    text = ("version: 1\njobs: [{base: %s, adapters: [{path: %s, strength: 0.5}], output: a.safetensors},"
            " {base: %s, adapters: [none.safetensors], output: b.safetensors}]")  # fmt: skip
    jobs.write_text(text % (scene.base, scene.ink, scene.base))
    assert run("batch", jobs, "--html", page).code == 7
    made = content(page.read_text(encoding="utf-8"))
    (table,) = made["tables"]
    (_, link, status, adapters, size_, *_), (_, name, failed, *_) = table["rows"]
    assert (link["href"], status, adapters) == ((tmp_path / "a.safetensors").as_uri(), "merged", "ink.safetensors 0.5×")
    assert size_ == (tmp_path / "a.safetensors").stat().st_size
    assert (name, failed) == ("b.safetensors", "failed: file not found")
    assert made["warnings"] == ["b.safetensors: file not found"]


CLICKS = """
start().then(() => {
  document.querySelectorAll("tbody button.open").forEach((button) => button.click());
  [...document.querySelectorAll("thead button")].find((button) => button.textContent === "output").click();
  [...document.querySelectorAll("thead button")].find((button) => button.textContent === "output").click();
});
"""
"""Opens all rows and sorts them from the last output to the first."""


@pytest.mark.release
def test_row_of_a_batch_opens_to_the_numbers_of_its_job(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the table is sorted; those of a failure are its words."""
    text = pages._text
    monkeypatch.setattr(pages, "_text", lambda name: re.sub(r"\nstart\(\);\n", CLICKS, text(name)))
    page, jobs, report = tmp_path / "page.html", tmp_path / "jobs.json", tmp_path / "report.jsonl"
    merge = {"base": str(scene.base), "adapters": [str(scene.ink)], "output": "a.safetensors"}
    both = {"command": "combine", "adapters": [str(scene.ink), str(scene.oil)], "output": "b.safetensors"}
    jobs.write_text(json.dumps([merge, both, {**merge, "adapters": ["none.safetensors"], "output": "c.safetensors"}]))
    assert run("batch", jobs, "--html", page, "--report", report).code == 7
    told = {one["number"]: one for one in map(json.loads, report.read_text().splitlines())}
    dom = shown(page, tmp_path / "profile").split("<main")[1].split("<footer")[0]
    assert dom.count('aria-expanded="true"') == 3
    failed, combined, merged = dom.split('class="open"')[1:]
    assert "file not found" in unescape(failed) and "none.safetensors" in unescape(failed)
    assert judged(told[2]["report"]["energy"], "the change") in unescape(combined)
    assert "By block" in combined and "By block" in merged
    assert size_of_change(told[1]["report"]["numbers"], "the weights") in unescape(merged)
    assert "Numbers of job 3" in dom


def many_modules() -> dict[str, Any]:
    """An adapter with a picture of each of many modules."""
    picture = {"spectrum": [0.123456] * 64, "histogram": {"centres": [0.5] * 31, "counts": [1000] * 31}}
    one = {"norm": 1.5, "stable_rank": 2.0, "rank": 8, "largest": 1.0, **picture}
    modules = {f"model.layers.{n // 768}.mlp.experts.{n % 256}.{'abc'[n // 256 % 3]}_proj": one for n in range(2000)}
    numbers = {"norm": 1.0, "stable_rank": {"min": 1, "median": 1, "max": 2}, "modules": modules, "blocks": {}}
    return {
        "kind": "adapter",
        "path": "a",
        "bytes": 1,
        "tensors": 1,
        "schema": "lora-merge/inspect/2",
        "weights": numbers,
    }


def many_differences() -> dict[str, Any]:
    """A comparison in which each of many tensors differs."""
    one = {"relative": 0.1234567891, "difference": 1.123456789, "largest": 0.123456789, "changed": 1, "of": 2}
    tensors = {f"model.layers.{n}.self_attn.{'q' * (n % 9)}_proj.weight": one for n in range(3000)}
    blocks = {f"model.layers.{n}.{'x' * 99}": one for n in range(4000)}
    return {"schema": "lora-merge/compare/1", "kind": "checkpoints", "a": "a", "b": "b", "equal": 1, "compared": 2, "different": 1, "dtypes": {}, "only_b": [], "total": one, "change": one, "rounded": {}, "blocks": blocks,
            "tensors": tensors, "only_a": [f"{n}.{'y' * 200}" for n in range(3000)]}  # fmt: skip


def strangers_words() -> dict[str, Any]:
    """An adapter with megabytes of metadata."""
    return {"kind": "adapter", "path": "a", "bytes": 1, "tensors": 1, "schema": "lora-merge/inspect/2", "trained": {"description": "<" * 2_000_000},
            "notes": [f"{n} {'ä' * 400}" for n in range(1500)]}  # fmt: skip


def open_jobs() -> list[dict[str, Any]]:
    """A batch whose rows open to more than there is room for."""
    return [
        {
            "number": n,
            "status": "failed",
            "output": "o",
            "error": {"what": "w", "fix": "x" * 1900},
            "seconds": 0.0,
            "report": None,
            "schema": "lora-merge/job-report/1",
        }
        for n in range(400)
    ]


def many_jobs() -> list[dict[str, Any]]:
    """A batch whose jobs have all failed, at length."""
    return [
        {
            "number": n,
            "status": "failed",
            "output": f"{n}.safetensors",
            "error": {"what": f"{n} {'x' * 9000}"},
            "seconds": 0.0,
            "report": None,
            "schema": "lora-merge/job-report/1",
        }
        for n in range(500)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("found", "left"),
    [(many_modules(), "spectra and histograms"), (many_differences(), "rows of “Only in one”"),
     (strangers_words(), "notes"), (many_jobs(), "warnings"), (open_jobs(), "what the rows of tables open to")],
    ids=("modules", "differences", "metadata", "jobs", "rows"),
)  # fmt: skip
def test_page_keeps_its_size_and_says_what_it_leaves_out(
    found: Any, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = (
        len(pages.page({"kind": "adapter", "path": "a", "bytes": 1, "tensors": 1, "schema": "lora-merge/inspect/2"}))
        + 300_000
    )
    assert most < pages.MOST_PAGE_BYTES == 5_000_000
    monkeypatch.setattr(pages, "MOST_PAGE_BYTES", most)
    html = pages.page(found)
    assert most - 300_000 < len(html.encode()) <= most
    told = content(html)["notes"][0]
    assert "Left out" in told
    assert left in told


def test_page_with_room_leaves_nothing_out(scene: Scene) -> None:
    made = content(pages.page(inspect(scene.ink, weights=True, pictures=True)))
    (heat_map,) = made["heat_maps"]
    assert all(len(cell["names"]) == cell["count"] for cell in heat_map["cells"])
    assert all("spectrum" in weight for weight in heat_map["weights"].values())
    assert not any("Left out" in note for note in made["notes"])


def _page(path: Path) -> Any:
    return content(path.read_text(encoding="utf-8"))


def test_page_begins_with_its_verdict(scene: Scene, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / "o.safetensors"
    for words, level, text in (
        (["merge", scene.base, scene.ink, "-o", out], "good", "% of the change (good) survives"),
        (["merge", scene.base, f"{scene.ink}:0.000001", "-o", out], "warning", "Merged, but: "),
        (["resize", scene.ink, "--rank", "2", "-o", out], "warning", "Written, but: "),
        (["resize", scene.ink, "--rank", "4", "-o", out], "good", "100 % of the change (good) survives"),
        (["compare", scene.ink, scene.oil], "good", "Independent"),
        (["inspect", scene.base, scene.ink], "good", "ink.safetensors fits"),
    ):
        written = ["--overwrite"] if "-o" in words else []
        assert run(*words, "--html", page, *written).code == 0
        assert _page(page)["verdict"]["level"] == level and text in _page(page)["verdict"]["text"], words


def test_what_is_kept_and_what_is_lost_add_up(scene: Scene, tmp_path: Path) -> None:
    """One measure in all tables and pictures of a page: shares of ‖ΔW‖²."""
    page = tmp_path / "page.html"
    assert run("resize", scene.ink, "--rank", "2", "-o", tmp_path / "o.safetensors", "--html", page).code == 0
    made = _page(page)
    tables, bars = ({part["title"]: part for part in made[kind]} for kind in ("tables", "bars"))
    kept = {row[0]: row[-1] for row in tables["By block"]["rows"]}
    assert {name: pytest.approx(1 - lost) for name, lost in bars["Lost by block"]["rows"]} == kept
    assert not any(name == "residual" for name, _ in made["summary"])
    assert "residual" not in {metric["key"] for metric in made["heat_maps"][0]["metrics"]}


def test_curve_of_ranks_is_what_a_resize_keeps(scene: Scene, tmp_path: Path) -> None:
    facts = inspect(scene.ink, weights=True)
    (curve,) = pages.content(facts)["curves"]
    for rank, share in curve["rows"]:
        out = tmp_path / f"{rank}.safetensors"
        assert lora_merge.resize(scene.ink, out, rank=rank).energy == pytest.approx(share, abs=1e-3)
    assert curve["rows"][-1][0] == 4


def test_batch_is_a_grid_with_its_failures_in_red(scene: Scene, tmp_path: Path) -> None:
    """The reason is in the row, in the cell and once on top; a failed job has its adapters too."""
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    for lora in (scene.ink, scene.oil):
        (tmp_path / lora.name).write_bytes(lora.read_bytes())
    (tmp_path / "jobs.yaml").write_text(
        f"version: 1\njobs: [{{base: '{scene.base}', adapters: [{{path: '{{a}}.safetensors', strength: '{{s}}'}}], "
        "matrix: {a: [ink, oil, bad], s: [0.5, 1.0]}, output: 'out/{a}-{s}.safetensors'}]\n"
    )
    page = tmp_path / "page.html"
    assert run("batch", tmp_path / "jobs.yaml", "--html", page, "-q").code == 7
    made = _page(page)
    grid, jobs = made["tables"]
    why = "not a valid .safetensors file"
    assert made["verdict"] == {"level": "bad", "text": f"2 of 6 jobs failed: {why}"}
    assert len(made["warnings"]) == 1 and why in made["warnings"][0]
    assert [column["title"] for column in grid["columns"]] == ["adapter", "0.5×", "1×"]
    levels = {row[0]: [cell["level"] for cell in row[1:]] for row in grid["rows"]}
    assert levels == {"ink.safetensors": ["", ""], "oil.safetensors": ["", ""], "bad.safetensors": ["bad", "bad"]}
    failed = [row for row, mark in zip(jobs["rows"], jobs["marks"], strict=True) if mark == "bad"]
    assert [(row[2], row[3]) for row in failed] == [(f"failed: {why}", f"bad.safetensors {s}×") for s in ("0.5", "1")]


def test_trigger_words_and_hashes_are_chips(scene: Scene) -> None:
    made, facts = pages.content(inspect(scene.ink)), inspect(scene.ink)
    chips = [chip["text"] for chip in made["chips"]]
    assert chips == ["ohwx", *facts["hashes"].values()]


def test_matrix_of_jobs_is_a_grid_among_other_jobs() -> None:
    jobs = [{"number": n, "output": f"/{n}", "status": "merged", "report": None, "seconds": 1.0,
             "adapters": [{"name": name, "strength": strength}]}
            for n, (name, strength) in enumerate([("a", 0.5), ("a", 1.0), ("b", 0.5), ("b", 1.0), ("c", 0.7)], 1)]  # fmt: skip
    grid, rest = batch_page(jobs)["tables"]
    assert [row[0] for row in grid["rows"]] == ["a", "b"] and len(rest["rows"]) == 5
    assert [table["title"] for table in batch_page([*jobs, {**jobs[0], "number": 6}])["tables"]] == ["Jobs"]
