"""`inspect` and `compare` draw on a terminal of any width, and print plain lines everywhere else."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from lora_merge.cli import reports
from lora_merge.cli.charts import RAMP, SHADES, SIGNED_COLOURS, bars, colored, heat_map, number
from lora_merge.facts import Fact
from lora_merge.text import Lines
from lora_merge.viewing.compare import compare, compare_rows
from lora_merge.viewing.inspect import inspect
from tests.kit.adapters import kohya
from tests.kit.files import load, save
from tests.kit.inspected import lines
from tests.kit.models import sd1


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("seen")
    base = save(sd1(), folder / "base.safetensors")
    ink, oil = (save(kohya(sd1(), seed=n), folder / f"{n}.safetensors") for n in (100, 300))
    against = save({k: -v if "lora_up" in k else v for k, v in load(ink).items()}, folder / "against.safetensors")
    facts = [inspect(ink, weights=True), inspect(base, ink, weights=True), compare(ink, oil), compare(ink, against)]
    assert facts[-1]["fight"]
    return facts


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def printed(
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    width: int = 80,
    *,
    verbose: bool = False,
    **environment: str,
) -> str:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["lora-merge"])
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {
        "COLUMNS": str(width),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    if "a" in facts:
        reports.show_comparison(facts)
    else:
        reports.show_file(facts, verbose=verbose)
    return stream.getvalue()


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [60, 80, 160, 200])
def test_terminal_shows_every_cell_and_every_number_in_its_width(
    found: list[dict[str, Any]], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for facts in found:
        out = printed(monkeypatch, facts, width)
        told = [Text.from_ansi(line).plain for line in out.splitlines()]
        assert all(len(line) <= width or " " not in line for line in told)  # a hash stays whole
        assert re.search(r"\x1b\[[0-9;]*48;2;", out)  # cells are grounds in true colours
    text = "\n".join(told)
    assert "cosine  -1 " in text
    assert "█" in printed(monkeypatch, found[0], width)


@pytest.mark.parametrize("width", [60, 80])
def test_long_words_stay_in_the_column_of_the_values(
    width: int, found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of modules and settings are broken; a hash, which is copied, stays whole further left."""
    comparison = found[2] | {"only_a": ["lora_te_text_model_" + "x" * 90]}
    file = found[0] | {"trained": {"optimizer": "bitsandbytes.optim." + "x" * 90}}
    for facts, start in ((comparison, "only in A"), (file, "optimizer")):
        told = [Text.from_ansi(line).plain.rstrip() for line in printed(monkeypatch, facts, width).splitlines()]
        indent = max(len(m[0]) for line in told if (m := re.match(r"[a-z]+ +(?=\S)", line)))
        at = next(n for n, line in enumerate(told) if line.startswith(start))
        rows = [told[at], *(line for line in told[at + 1 : told.index("", at)] if "x" in line)]
        assert "".join(line[indent:] for line in rows).count("x") >= 90
        assert all(line[:indent].isspace() for line in rows[1:])
        assert max(map(len, rows)) <= width
    assert any(re.fullmatch(r" *[0-9a-f]{64}", line) for line in told)


def test_row_of_a_table_is_one_line(found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of an adapter's modules are longer than the room for them, and are cut."""
    text = printed(monkeypatch, found[1], 70, verbose=True)
    out = [Text.from_ansi(line).plain.rstrip() for line in text.splitlines()]
    rows = [line for line in out if re.search(r"  × \d+$", line)]
    assert len(rows) == len(found[1]["match"]["patterns"])
    assert {len(row) for row in rows} == {70}


def test_second_cell_is_wrapped_where_a_short_name_leaves_no_room() -> None:
    row = Fact("", "te…layers_0–1", "4 modules, rank 4, alpha 2 each")
    first, *rest = reports.table_row(row, 36).plain.split("\n")
    assert first.startswith("  …layers_0–1   4 modules")
    assert all(line.startswith(" " * first.index("4 modules")) for line in rest)
    assert max(map(len, (first, *rest))) <= 36
    assert " ".join((first, *(line.strip() for line in rest))).endswith(row.right)


def test_tables_without_colours_have_shades(found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for facts in found:
        out = printed(monkeypatch, facts, NO_COLOR="1")
        assert "\x1b" not in out
        colours = printed(monkeypatch, facts)
        assert len(out.splitlines()) == len(colours.splitlines())
        assert ("·" in out) == ("·" in colours)
        assert any(shade in out for shade in SHADES[0][:3])
        monkeypatch.setattr(Terminal, "encoding", "ascii")
        assert "░" not in printed(monkeypatch, facts, NO_COLOR="1")
        monkeypatch.setattr(Terminal, "encoding", "utf-8")
        plain = Lines.of(map(str, compare_rows(facts)) if "a" in facts else lines(facts)) + "\n"
        assert printed(monkeypatch, facts, TERM="dumb") == plain


def test_colours_are_those_of_the_scale() -> None:
    for ramp in (RAMP, SIGNED_COLOURS):
        for at, share in ((0, -1.0), (0, 0.0), (-1, 1.0), (-1, 2.0)):
            ground = colored(share, ramp).bgcolor
            assert ground is not None
            assert ground.get_truecolor() == ramp[at]


def test_cells_without_a_number_are_dots_and_long_pictures_are_broken() -> None:
    cells = [{"row": 0, "column": n, "values": {"v": float(n)}} for n in range(0, 40, 2)]
    picture = {"title": "t", "rows": ["block.0"], "columns": [f"kind{n}" for n in range(40)], "cells": cells,
               "metrics": [{"key": "v", "title": "v", "unit": ""}]}  # fmt: skip
    told = list(heat_map(picture, 60))
    assert max(len(line.plain) for line in told) <= 60
    rows = [line for line in told if line.plain.startswith("block.0")]
    assert len(rows) > 1
    assert sum(line.plain.count("·") for line in rows) == 20
    grounds = [s for line in rows for s in line.spans if getattr(s.style, "bgcolor", None)]
    assert len(grounds) == 20
    assert all(f"{n + 1} kind{n}" in " ".join(line.plain for line in told) for n in range(40))


def test_picture_that_is_broken_shows_the_rows_that_it_has_cells_of() -> None:
    cells = [{"row": n // 20, "column": n, "values": {"v": 1.0 + n}} for n in range(40)]
    picture = {"title": "t", "rows": ["first.0", "other.0"], "columns": [f"k{n}" for n in range(40)], "cells": cells,
               "metrics": [{"key": "v", "title": "v", "unit": ""}]}  # fmt: skip
    rows = [line.plain.split()[0] for line in heat_map(picture, 78) if re.match(r"(first|other)\.0", line.plain)]
    assert rows == ["first.0", "other.0", "other.0"]  # of 23 columns, and of 17


@pytest.mark.parametrize(
    ("value", "told"), [(0.95, "0.950"), (6.0006, "6.00"), (-1.0, "-1"), (12.5, "12.5"), (123.4, "123"), (0.0, "0")]
)
def test_numbers_beside_bars_have_three_digits(value: float, told: str) -> None:
    assert number(value) == told


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [(0.00167, "%", "0.167%"), (0.0533, "%", "5.33%"), (0.5, "%", "50.0%"), (1.0, "%", "100%"), (4.6, "%", "460%"),
     (-0.00036, "cosine", "0.000"), (-0.5, "cosine", "-0.500"), (-1.0, "cosine", "-1")],
)  # fmt: skip
def test_shares_have_three_digits_and_cosines_three_decimals(value: float, unit: str, told: str) -> None:
    """Blocks whose changes are 0.167% and 0.174% of the weights are not alike."""
    assert number(value, unit) == told


def test_bars_below_zero_have_another_colour_and_the_longest_fills_the_room() -> None:
    picture = {"title": "t", "unit": "", "rows": [["a", 0.5], ["b", -1.0], ["c", None], ["\x1b[2J", 0.25]]}
    told = [line.plain for line in bars(picture, 60)]
    assert [line.count("█") for line in told[1:3]] == [told[2].count("█") // 2, max(line.count("█") for line in told)]
    assert len(told) == 4
    assert "\x1b" not in "".join(told)
    styles = [{str(s.style) for s in line.spans} for line in [*bars(picture, 60)][1:3]]
    assert styles[0] != styles[1]


def test_bar_of_a_cosine_is_full_at_1_alone() -> None:
    """Two adapters that hardly have a direction in common have no long bars."""
    picture = {"title": "t", "unit": "cosine", "rows": [["a", 0.001], ["b", -1.0]]}
    small, whole = (line.plain.count("█") for line in [*bars(picture, 60)][1:])
    assert small == 0 < whole
    picture["rows"] = [["a", 0.001], ["b", -0.0005]]
    assert not any("█" in line.plain for line in bars(picture, 60))


def test_bars_below_zero_without_colours_have_another_letter() -> None:
    picture = {"title": "t", "unit": "cosine", "rows": [["a", 1.0], ["b", -1.0]]}
    for shades in SHADES:
        above, below = (line.plain.split()[1] for line in [*bars(picture, 60, shades)][1:])
        assert len(above) == len(below) and {*above} != {*below} and len({*above}) == 1


@pytest.mark.parametrize("width", [80, 160])
def test_each_fact_has_its_name_and_blocks_that_are_alike_one_row(
    found: list[dict[str, Any]], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --weights a base with an adapter has a hint, which stands in the column of values."""
    facts = {**found[1], "match": {k: v for k, v in found[1]["match"].items() if k != "numbers"}}
    told = [Text.from_ansi(line).plain.rstrip() for line in printed(monkeypatch, facts, width).splitlines()]
    (kept,) = [line for line in told if "run with --weights" in line]
    assert kept.startswith("survives ")
    told = [Text.from_ansi(line).plain.split() for line in printed(monkeypatch, found[0], width).splitlines()]
    assert ["te", "BASE", "5", "modules,", "rank", "4,", "alpha", "2"] in told


@pytest.mark.parametrize("width", [50, 60, 80, 160])
def test_hash_is_one_word_whatever_the_names_beside_it(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be copied; the terminal alone breaks a line that is too long for it."""
    facts = inspect(save(kohya(sd1()), tmp_path / "a.safetensors", {"ss_num_train_images": "7"}))
    told = [Text.from_ansi(line).plain for line in printed(monkeypatch, facts, width).splitlines()]
    assert any(line.split() == ["images", "with", "repeats", "7"] for line in told)
    (line,) = [line for line in told if facts["hashes"]["sha256"] in line]
    assert len(line) <= max(width, 64)
    assert any(line.split()[:2] == ["hash", "SHA-256"] for line in told)


@pytest.mark.slow
def test_pipe_does_not_load_rich(tmp_path: Path) -> None:
    import subprocess

    file = save(kohya(sd1()), tmp_path / "a.safetensors")
    code = f"import sys; sys.argv = ['x', 'inspect', {str(file)!r}]\ntry:\n    from lora_merge.cli.main import main; main()\nexcept SystemExit: pass\nassert 'rich.console' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
