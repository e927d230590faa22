"""The preview picture of an adapter: from its metadata, or from a file next to it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...disk.files import open_regular
from ...errors import MergeError
from ..training import THUMBNAIL

MOST_PICTURE_BYTES: Final = 1_000_000  # bytes of a picture in a page
PICTURE_DATA: Final = re.compile(r"data:image/(?:png|jpeg|webp|gif|avif);base64,[A-Za-z0-9+/]+={0,2}")
"""A picture in the metadata. Kinds that are programs, such as SVG, are not shown."""
PICTURE_KINDS: Final = {
    "png": rb"\x89PNG\r\n\x1a\n", "jpeg": rb"\xff\xd8\xff", "webp": rb"RIFF....WEBP", "gif": rb"GIF8[79]a",
}  # fmt: skip
"""Kind of a picture → the beginning of its file. A file next to an adapter may be a link to anything: a page holds only
pictures."""


def preview(picture: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Return a picture as an address that holds it; "" if there is none, or it is too large for a page."""
    if picture.get("in") == THUMBNAIL:
        text = metadata.get(THUMBNAIL, "")
        return text if len(text) <= MOST_PICTURE_BYTES * 4 // 3 and PICTURE_DATA.fullmatch(text) else ""
    path = Path(str(picture.get("in", "")))
    try:
        with open_regular(path) as f:
            content = f.read(MOST_PICTURE_BYTES + 1)
    except (OSError, MergeError):
        return ""
    kinds = (kind for kind, start in PICTURE_KINDS.items() if re.match(start, content, re.DOTALL))
    kind = next(kinds, "") if len(content) <= MOST_PICTURE_BYTES else ""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if kind else ""
