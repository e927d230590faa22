"""The mutator itself: each of its mistakes is a module that Python reads, with one place changed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit.mistakes import mistakes
from tests.mutate import AREAS, NAMED, ROOT, files, named

SOURCE = '''
def law(a: int, é: "x | None" = None) -> int:
    """Ä docstring."""
    if a < 1 and é:
        raise ValueError(f"{a + 1}")
    é.append(a)
    return pair(a - 2, é)
'''


def test_every_mistake_is_one_change_of_one_place() -> None:
    found = {m.applied(SOURCE) for m in mistakes("law.py", SOURCE)}
    changed = {
        "if a < 1 and é:": {"if (a >= 1) and é:", "if (a < 1 or é):", "if not (a < 1 and é):", "if a < 2 and é:"},
        'raise ValueError(f"{a + 1}")': {"pass"},
        "é.append(a)": {"pass"},
        "return pair(a - 2, é)": {"return None", "return (pair(é, a - 2))", "return pair((a + 2), é)", "return pair(a - 3, é)"},
    }  # fmt: skip
    assert found == {SOURCE.replace(old, new) for old, texts in changed.items() for new in texts}


@pytest.mark.release
def test_every_mistake_in_the_product_can_be_read() -> None:
    source = (ROOT / "lora_merge/proof/sample.py").read_text(encoding="utf-8")
    found = [m.applied(source) for m in mistakes("lora_merge/proof/sample.py", source)]
    assert len({ast.dump(ast.parse(text)) for text in [source, *found]}) == len(found) + 1 > 50


def test_areas_and_named_mistakes_are_in_the_tree() -> None:
    assert all((ROOT / path).is_file() for path in files([*AREAS]))
    for path, old, new in NAMED:
        source = Path(ROOT, path).read_text(encoding="utf-8")
        ast.parse(named(path, old, new).applied(source))
