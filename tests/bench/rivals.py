"""What else merges a LoRA into a checkpoint: `python -m tests.bench.rivals NAME BASE ADAPTER OUT`.

Each is written the way its documentation or common practice has it, and ends when the output is on the disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

STRENGTH: Final = 0.7


def load_all(base: Path, adapter: Path, out: Path) -> None:
    """Everything in memory with the safetensors library: load, merge layer by layer in fp32, save."""
    from safetensors.torch import load_file, save_file

    from tests.bench.inputs import MODELS, layers, table

    weights, lora = load_file(base), load_file(adapter)
    model = next(name for name, row in MODELS.items() if table(row.table).keys() == weights.keys())
    for layer in layers(model):
        up, down = (lora[f"{layer.name}.lora_{side}.weight"].float().flatten(1) for side in ("up", "down"))
        scale = STRENGTH * lora[f"{layer.name}.alpha"].item() / down.shape[0]
        rows = weights[layer.key][layer.start : layer.start + layer.shape[0]]
        rows.copy_(rows.float() + (scale * (up @ down)).reshape(rows.shape))
    save_file(weights, out)


def sd_mecha(base: Path, adapter: Path, out: Path) -> None:
    """sd-mecha by its README: the LoRA converted to the base's layout, and added."""
    import sd_mecha as library

    model = library.model(base)
    delta = library.convert(library.model(adapter), model)
    # Its wrapper `sd_mecha.add_difference` compares a merge space that a conversion does not have; this is what it wraps.
    add = library.extensions.merge_methods.resolve("add_difference")
    recipe = add(model, delta, alpha=STRENGTH) | model
    library.merge(recipe, output=out, threads=os.cpu_count())


RIVALS: Final[dict[str, Callable[[Path, Path, Path], None]]] = {"load-all": load_all, "sd-mecha": sd_mecha}


def main() -> None:
    """Run one, and wait for the disk."""
    name, *paths = sys.argv[1:]
    base, adapter, out = map(Path, paths)
    RIVALS[name](base, adapter, out)
    with out.open("rb+") as f:
        os.fsync(f.fileno())


if __name__ == "__main__":
    main()
