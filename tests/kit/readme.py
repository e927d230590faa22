"""Writes the generated tables of the READMEs from the code: python -m tests.kit.readme. A test checks that they are current."""

from __future__ import annotations

import re
from pathlib import Path

from lora_merge.algorithms import ALGORITHMS
from lora_merge.cli.tables import known_algorithms
from lora_merge.models.architectures import shipped

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (ROOT / "algorithms" / "README.md", ROOT / "lora_merge" / "models" / "README.md")
"""Pages that hold generated tables."""


def algorithms() -> str:
    """File, names and first words of every formula."""
    lines = ["| names | what | paper | file |", "|---|---|---|---|"]
    for row in known_algorithms():
        file = ALGORITHMS[row["names"][0]].module.rpartition(".")[2] + ".py"
        listed = ", ".join(f"`{n}`" for n in row["names"])
        what = row["what"].replace("|", chr(92) + "|")
        lines.append(f"| {listed} | {what} | {', '.join(row['papers'])} | [`{file}`]({file}) |")
    return "\n".join(lines)


def architectures() -> str:
    """Titles of all known models, one sentence."""
    return ", ".join(sorted({a.title for a in shipped()}, key=str.lower)) + "."


TABLES = {"algorithms": algorithms, "architectures": architectures}


def current(text: str) -> str:
    """The text of a page with its tables as the code has them now."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page.read_text(encoding="utf-8")), encoding="utf-8")
