"""The preview picture of an adapter: from its metadata, or from a file beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..training import THUMBNAIL

LARGEST: Final = 1_000_000  # bytes of a picture in a page
STORED: Final = re.compile(r"data:image/(?:png|jpeg|webp|gif|avif);base64,[A-Za-z0-9+/]+={0,2}")
"""A picture in the metadata. Kinds that are programs, such as SVG, are not shown."""
KINDS: Final = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}


def preview(found: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Return a picture as an address that holds it; "" if there is none, or it is too large for a page."""
    if found.get("in") == THUMBNAIL:
        text = metadata.get(THUMBNAIL, "")
        return text if len(text) <= LARGEST * 4 // 3 and STORED.fullmatch(text) else ""
    path = Path(str(found.get("in", "")))
    kind = KINDS.get(path.suffix.lower())
    try:
        if kind is None or not path.is_file() or path.stat().st_size > LARGEST:
            return ""
        return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return ""
