"""OutputModule forms of the page, on the folder that `tests/ui` has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

A, B = "loras/a {x} it's.safetensors", "loras/b.safetensors"
TINY, TUNED = "checkpoints/tiny.safetensors", "checkpoints/tuned.safetensors"

FILLED: dict[str, dict[str, Any]] = {
    "merge": {"base": TINY, "adapters": [(A, 0.8, {"te": 0.5}), (B, -0.5, {"lbw": "1,1,0.5,0"})],
              "options": {"dtype": "bf16", "metadata": "a.b=c d\ne=f=g", "verify": "false", "seed": "7",
                          "rounding": "stochastic", "max_memory": "512MiB"}},
    "ties": {"command": "merge", "base": TINY, "adapters": [(A, 1, {}), (B, 1, {})],
             "options": {"method": "ties", "density": "0.5", "elect": "count"}},
    "attached": {"command": "merge", "base": TUNED, "adapters": [(B, 1, {"re:attn1": 0.25})], "options": {}},
    "combine": {"base": TINY, "adapters": [(A, 0.8, {}), (B, 0.5, {"unet": 0.5})], "options": {"rank": "4", "exclude": "te"}},
    "resize": {"adapters": [(A, 1, {})], "options": {"rank": "energy:0.9", "rank_for": "te=2"}},
    "convert": {"base": TINY, "adapters": [(A, 1, {})], "options": {"to": "diffusers"}},
    "extract": {"base": TINY, "adapters": [(TUNED, 1, {})], "options": {"rank": "4", "include": "unet"}},
    "average": {"adapters": [(A, 1, {}), (B, 1, {})], "options": {"weights": "1, 3", "rank": "4"}},
    "unmerge": {"base": "checkpoints/merged.safetensors", "adapters": [(B, 0.5, {})], "options": {}},
}  # fmt: skip


def form(name: str, comfy: Path, output: str = "out/x") -> dict[str, Any]:
    """A output form as the page sends it."""
    row, models = FILLED[name], comfy / "models"
    adapters = [{"path": str(models / p), "strength": s, "strength_for": parts} for p, s, parts in row["adapters"]]
    base = str(models / row["base"]) if "base" in row else ""
    return {
        "command": row.get("command", name),
        "base": base,
        "adapters": adapters,
        "options": row["options"],
        "output": output,
    }
