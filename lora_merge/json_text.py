"""`from_json(text)`: parses JSON from untrusted files, with a limit on its depth."""

from __future__ import annotations

import json
from typing import Any, Final

DEEPEST: Final = 100  # levels of lists and objects; functions elsewhere recurse once per level
TOO_DEEP: Final = "nested too deeply"


def from_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if the text is not JSON or nested too deeply.

    The library's own limit depends on the version of Python: 990 levels in 3.11, thousands from 3.12 on.
    """
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise ValueError(TOO_DEEP) from e
    level = [value]
    for _ in range(DEEPEST):
        level = [item for v in level if isinstance(v, dict | list) for item in (v.values() if type(v) is dict else v)]
        if not level:
            return value
    raise ValueError(TOO_DEEP)
