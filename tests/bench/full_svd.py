"""The algorithm of other tools, on a sample: a full SVD of each ΔW in fp32. `python -m tests.bench.full_svd SECONDS SHAPES`.

Timings of an SVD do not depend on the values. One matrix of each shape is decomposed, the cheapest first, while the seconds
last; shapes that are left take as long as their operations are more than those of the last one measured.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def operations(out: int, cols: int) -> float:
    """About how the time of an SVD grows with the shape."""
    return min(out, cols) ** 2 * float(max(out, cols))


def main() -> None:
    """Print the processor seconds for all shapes, measured and extrapolated, and how many shapes were measured."""
    bound, shapes = float(sys.argv[1]), {tuple(s): n for *s, n in json.loads(sys.argv[2])}
    spent = total = rate = 0.0
    measured = 0
    for out, cols in sorted(shapes, key=lambda s: operations(*s)):
        if spent < bound:
            matrix = torch.randn(out, cols)
            began = time.process_time()
            torch.linalg.svd(matrix, full_matrices=False)
            taken = time.process_time() - began
            spent, rate, measured = spent + taken, taken / operations(out, cols), measured + 1
        else:
            taken = rate * operations(out, cols)
        total += taken * shapes[out, cols]
    print(json.dumps({"cpu": total, "measured": measured, "shapes": len(shapes), "spent": spent}))


if __name__ == "__main__":
    main()
