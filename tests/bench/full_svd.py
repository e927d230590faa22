"""The algorithm of other tools, on a sample: an SVD of each ΔW in fp32. `python -m tests.bench.full_svd SECONDS SHAPES`.

LyCORIS and sd-scripts call `torch.linalg.svd(ΔW)`, which also makes the singular vectors of the null space. The same without
these (`full_matrices=False`) is measured beside it. Timings of an SVD do not depend on the values. One matrix of each shape is
decomposed, the cheapest first, while the seconds last; shapes that are left take as long as their operations are more than
those of the last one measured.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def operations(out: int, cols: int, *, full: bool) -> float:
    """Return the operations of an SVD by way of QR, the R-SVD of Golub and Van Loan, Matrix Computations."""
    short, long = sorted((out, cols))
    return 4 * long**2 * short + 22 * short**3 if full else 6 * long * short**2 + 20 * short**3


def seconds(shapes: dict[tuple[int, int], int], bound: float, *, full: bool) -> tuple[float, int]:
    """Return the processor seconds for all shapes, measured and extrapolated, and how many shapes were measured."""
    spent = total = rate = 0.0
    measured = 0
    for shape in sorted(shapes, key=lambda s: operations(*s, full=full)):
        work = operations(*shape, full=full)
        if spent < bound:
            matrix = torch.randn(*shape)
            began = time.process_time()
            torch.linalg.svd(matrix, full_matrices=full)
            taken = time.process_time() - began
            spent, rate, measured = spent + taken, taken / work, measured + 1
        else:
            taken = rate * work
        total += taken * shapes[shape]
    return total, measured


def main() -> None:
    """Print the processor seconds of both calls, and how many shapes were measured."""
    torch.set_num_threads(1)  # a thread that waits for another one spends processor seconds
    bound, shapes = float(sys.argv[1]), {(out, cols): n for out, cols, n in json.loads(sys.argv[2])}
    full, measured = seconds(shapes, bound, full=True)
    reduced, _ = seconds(shapes, bound, full=False)
    print(json.dumps({"full": full, "reduced": reduced, "measured": measured, "shapes": len(shapes)}))


if __name__ == "__main__":
    main()
