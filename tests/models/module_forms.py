"""Makes lora_merge/models/module_forms.json from the headers of full-size models: `python -m tests.models.module_forms`."""

from __future__ import annotations

import json
from pathlib import Path

from lora_merge.models import name_table as beside
from lora_merge.models.name_table import form
from lora_merge.models.names import names
from tests.kit.architectures import ALL, header
from tests.kit.files import index

FILE = Path(beside.__file__).with_name("module_forms.json")
ENCODERS = ("clip-l.text_model", "clip-h", "clip-bigg", "t5xxl-encoder", "umt5xxl-encoder")


def made() -> dict[str, str]:
    """Architecture → forms of the canonical names of its parameters but biases, of all headers of that architecture."""
    found: dict[str, set[str]] = {}
    for name in ALL:
        folder, stem = name.split("/")
        if folder == "single-file" or (folder == "transformers" and stem not in ENCODERS):
            continue
        part = names(index(header(name))).parts[0]
        if part.architecture is not None and part.role != "vae" and not stem.startswith("openclip"):
            forms = {form(key) for key in part.views("")}
            found.setdefault(part.architecture.file.stem, set()).update(f for f in forms if not f.endswith(".bias"))
    return {stem: " ".join(sorted(forms)) for stem, forms in sorted(found.items())}


if __name__ == "__main__":
    FILE.write_text(json.dumps(made(), indent=1) + "\n", encoding="ascii")
