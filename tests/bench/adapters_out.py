"""Commands that write adapters, beside `cp` and beside the algorithm of other tools, in one run.

The other tools decompose every ΔW by a full SVD; `full_svd.py` measures that on one layer of each shape and multiplies by how
many there are, so their seconds are extrapolated, without reading and writing. A concatenation in memory is run as it is.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench import inputs
from tests.bench.measure import Run, prepare, run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

SMALL: Final = r"model\.diffusion_model\.input_blocks\..*"
LARGE: Final = r"model\.diffusion_model\..*"
STRENGTH: Final = 4.0
"""At which the merged change is a tenth of the weights."""


def suite(b: Bench) -> None:
    """combine, resize, extract and convert, each with its target."""
    print(f"\nadapters_out, {b.size}{' (a part of it)' if b.small else ''}: seconds, processor seconds, peak memory")
    three = [inputs.adapter(b.file(f"{b.size}-r32-{n}.safetensors"), b.size, rank=32, seed=n) for n in range(3)]
    wide = inputs.adapter(b.file(f"{b.size}-r128.safetensors"), b.size, rank=128)
    out = b.file("out.safetensors")
    of_adapter = Counter((s.shape[0], prod(s.shape[1:])) for s in inputs.layers(b.size))
    peer = _full_svd(b, of_adapter)
    exact = _ours(b, "combine", *three)
    copied = _measured([out], [*_copy(out, b.file("copy.safetensors"))])
    b.file("copy.safetensors").unlink()
    _tell(b, "cp of that", copied, None, "")
    _tell(b, "combine 3 × rank 32, exact", exact, copied.seconds, f"≤ {1.5 * copied.seconds + 2:.1f} s")
    _tell(b, "  concatenated in memory", _measured(three, [sys.executable, "-m", "tests.bench.concatenated", *three, out]),
          copied.seconds, "")  # fmt: skip
    cut = _ours(b, "combine", *three, "--rank", "32")
    _tell(b, "combine 3 × rank 32, --rank 32", cut, None, "≤ 12 s, ≤ 1 GiB", peer=peer)
    _tell(b, "resize 128 → fro:0.9", _ours(b, "resize", wide, "--rank", "fro:0.9"), None, "≤ 25 s", peer=peer)
    copied = _measured([wide], [*_copy(wide, out)])
    made = _ours(b, "convert", wide, "--to", "comfy")
    _tell(b, "convert to comfy", made, copied.seconds, f"≤ {1.2 * copied.seconds + 1:.1f} s")
    _extracted(b, wide)
    b.drop(*(f.name for f in (*three, wide)))


def _extracted(b: Bench, adapter: Path) -> None:
    """Measure extract: of two unrelated checkpoints, whose difference has no leading directions, and of a trained one."""
    part = SMALL if b.small else LARGE
    weights = {k: v for k, v in inputs.weights(b.size, "F16").items() if re.fullmatch(part, k)}
    base, tuned = b.file(f"{b.size}-unet.safetensors"), b.file(f"{b.size}-tuned.safetensors")
    inputs.write(base, weights)
    peer = _full_svd(b, Counter((s[0], prod(s[1:])) for _, s in weights.values() if len(s) > 1))
    inputs.write(tuned, weights, seed=5)
    target = "≤ 60 s, ≤ 1.5 GiB, ≤ 1/25 of the SVD"
    _tell(b, "extract unrelated, rank 32", _ours(b, "extract", base, tuned, "--rank", "32"), None, target, peer=peer)
    tuned.unlink()
    run([sys.executable, "-m", "lora_merge", str(base), f"{adapter}:{STRENGTH}", "-o", str(tuned), "--no-verify",
         "--unmatched", "skip"])  # fmt: skip
    for rule in ("32", "noise"):
        one = _ours(b, "extract", base, tuned, "--rank", rule)
        _tell(b, f"extract trained, {rule}", one, None, target if rule == "32" else "", peer=peer)
    tuned.unlink()
    b.drop(base.name)


def _ours(b: Bench, command: str, *arguments: object) -> Run:
    files = [a for a in arguments if isinstance(a, Path)]
    b.forget()
    prepare(files, "warm")
    return run([sys.executable, "-m", "lora_merge", command, *map(str, arguments), "-o", str(b.file("out.safetensors")),
                "--overwrite", "--json"], known=b.known)  # fmt: skip


def _measured(files: Sequence[Path], command: Iterable[object]) -> Run:
    prepare(files, "warm")
    return run([*map(str, command)])


def _copy(source: Path, to: Path) -> Iterator[str]:
    yield from ("sh", "-c", 'cp "$1" "$2" && sync "$2"', "cp", str(source), str(to))


def _full_svd(b: Bench, shapes: Counter[tuple[int, int]]) -> float:
    """Return the processor seconds of a full SVD of each."""
    bound = "10" if b.small else "100"
    told = run([sys.executable, "-m", "tests.bench.full_svd", bound, json.dumps([[*s, n] for s, n in shapes.items()])])
    found = json.loads(told.output.strip().rpartition("\n")[2])
    print(f"  full SVD of {sum(shapes.values())} layers: {found['full']:.0f} processor seconds, {found['reduced']:.0f} without "
          f"the null space, extrapolated from {found['measured']} of {found['shapes']} shapes")  # fmt: skip
    return float(found["full"])


def _tell(b: Bench, name: str, one: Run, copied: float | None, target: str, *, peer: float | None = None) -> None:
    beside = f"{one.seconds / copied:6.2f} × cp" if copied else f"1/{peer / one.cpu:<4.0f} of SVD" if peer else ""
    print(
        f"  {name:32}{one.seconds:8.1f} s{one.cpu:8.1f} s{one.peak / 2**30:7.2f} GiB  {beside:15} {target}", flush=True
    )
    b.results.append({"suite": "adapters_out", "name": name, "seconds": one.seconds, "cpu": one.cpu, "peak": one.peak,
                      "cp": copied, "full_svd": peer, "target": target, "cores": os.cpu_count()})  # fmt: skip
