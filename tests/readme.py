"""Writes the generated tables of the READMEs from the code: python -m tests.readme. A test checks that they are current."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lora_merge.algorithms import ALGORITHMS
from lora_merge.models.architectures import shipped

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (ROOT / "algorithms" / "README.md", ROOT / "lora_merge" / "models" / "README.md")
"""Pages that hold generated tables."""


def algorithms() -> str:
    """File, names and first words of every formula."""
    files: dict[str, list[str]] = {}
    for row in ALGORITHMS.values():
        files.setdefault(row.delta.__module__, []).append(row.name)
    lines = ["| names | what | paper | file |", "|---|---|---|---|"]
    for module, names in files.items():
        text = (sys.modules[module].__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        first = re.split(r"\. (?=[A-Z])", text)[0].rstrip(". ")
        paper = ", ".join(dict.fromkeys(ALGORITHMS[n].paper for n in names))
        file = module.rpartition(".")[2] + ".py"
        listed = ", ".join(f"`{n}`" for n in names)
        lines.append(f"| {listed} | {first.replace('|', chr(92) + '|')} | {paper} | [`{file}`]({file}) |")
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
