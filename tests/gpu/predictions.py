"""What was predicted of merges on a GPU before one was at hand, and what a run says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple


class Prediction(NamedTuple):
    """A figure of a step, and the range in which it was predicted or is wanted."""

    figure: str
    words: str
    low: float
    high: float
    unit: str = ""
    factor: float = 1.0  # from the figure to the unit

    def verdict(self, figures: Mapping[str, Any]) -> str:
        """Return whether a run confirms it."""
        found = figures.get(self.figure)
        if found is None:
            return "not measured"
        return "confirmed" if self.low <= float(found) * self.factor <= self.high else "refuted"


MANY: Final = float("inf")
PREDICTIONS: Final = (
    Prediction("doctor_failed", "formulas against the reference (`lora-merge doctor`): runs that fail", 0, 0),
    Prediction("context_s", "context and first kernel", 0.2, 1.5, "s"),
    Prediction("cublas_s", "start of cuBLAS", 0.02, 1.0, "s"),
    Prediction("pinned_up", "pinned memory, up (PCIe 5: 53 to 55)", 20, 56, "GB/s"),
    Prediction("pinned_down", "pinned memory, down", 20, 56, "GB/s"),
    Prediction("odd_share", "pinned memory from a multiple of 8, of that from a page, up", 90, 105, "%", 100),
    Prediction("pageable_up", "pageable memory, up", 3, 17, "GB/s"),
    Prediction("registered_share", "registered memory, of pinned memory's rate, up", 95, 110, "%", 100),
    Prediction("register_ms", "cudaHostRegister of 64 MiB of huge pages", 0, 10, "ms"),
    Prediction("duplex_share", "both ways at once, of twice one way", 75, 105, "%", 100),
    Prediction("aminmax_gb_s", "extremes of fp32 on the device", 1000, MANY, "GB/s"),
    Prediction("foreach_gb_s", "many casts fp16 to fp32 in one call, read and written", 1000, MANY, "GB/s"),
    Prediction("product_error", "fp32 product, relative error (TF32: 5e-4)", 0, 2e-6),
    Prediction("casts_different", "casts to 16 and 8 bits that differ from the host's", 0, 0),
    Prediction("conv_error", "fp64 conv_transpose2d, largest error", 0, 1e-12),
    Prediction("svd_4096_s", "SVD of 4096 × 4096 in fp64, torch's own driver", 5, 60, "s"),
    Prediction("gpu_tests_failed", "tests marked gpu that fail", 0, 0),
    Prediction("stream_races", "reports of torch's race detector", 0, 0),
    Prediction("memcheck_errors", "reports of compute-sanitizer, memcheck", 0, 0),
    Prediction("initcheck_errors", "reports of compute-sanitizer, initcheck", 0, 0),
    Prediction("different_share", "elements of SDXL that differ from the CPU's merge", 0, 0.1, "%", 100),
    Prediction("worst_ulp", "largest difference from the CPU's merge", 0, 1, "ulp"),
    Prediction("full_proof_failed", "`verify --full` of the four merges that fails", 0, 0),
    Prediction("sdxl_link_share", "folds of SDXL, of the link's rate (before: 10 to 25)", 70, 100, "%", 100),
    Prediction("flux_link_share", "folds of Flux, of the link's rate (before: 10 to 25)", 70, 100, "%", 100),
    Prediction("sdxl_kernels_per_gb", "kernels for each GB of SDXL that is folded", 0, 300),
    Prediction("flux_kernels_per_gb", "kernels for each GB of Flux that is folded", 0, 300),
    Prediction("sdxl_over_floor", "whole merge of SDXL, of the floor of its folder", 100, 110, "%", 100),
    Prediction("disk_over_floor", "the same on a disk, programs' starts included", 90, 110, "%", 100),
    Prediction("rank_128_ratio", "folds of Flux with rank 128, of rank 32 (before: 1.5 to 2)", 0.9, 1.5),
    Prediction("auto_loss", "what `auto` takes, of the faster one of CPU and GPU, whole merge of SDXL", 90, 115, "%", 100),
    Prediction("host_ms_per_gb", "processor time of the host for each GB of SDXL folded, with `meta` for the GPU", 0, 60, "ms"),
    Prediction("sdxl_host_ms_per_gb", "the same with the GPU itself", 0, 60, "ms"),
    Prediction("host_operations", "operations of a device for each GB of SDXL, counted with `meta`", 0, 300),
    Prediction("keep_s", "merge_state_dict of SDXL on the GPU, device=keep", 0, 2.0, "s"),
    Prediction("keep_host_bytes", "bytes of the results that come to the host meanwhile", 0, 0),
    Prediction("together_different", "two merges at once in threads: files that differ from one alone", 0, 0),
    Prediction("outputs_residual", "extract and resize: what is left out there, of what the CPU leaves out", 99, 101, "%", 100),
    Prediction("allocators_different", "other allocators of torch: files that differ", 0, 0),
    Prediction("crowded_s", "SDXL while another process leaves 1 GiB of the device", 0, 15, "s"),
    Prediction("crowded_ulp", "its largest difference from a merge alone", 0, 1, "ulp"),
    Prediction("hostile_lost", "jobs that fail beside a hostile one", 0, 0),
    Prediction("vram_peak_share", "peak of the device's memory, of --max-vram 512MiB", 0, 100, "%", 100),
    Prediction("interrupted_left", "files that an interrupted merge leaves", 0, 0),
)  # fmt: skip


def table(figures: Mapping[str, Any], predictions: Iterable[Prediction] = PREDICTIONS) -> str:
    """Return the predictions with their figures and verdicts, in Markdown."""
    rows = ["| figure | predicted or wanted | measured | |", "|---|---|---|---|"]
    for p in predictions:
        found = figures.get(p.figure)
        measured = "–" if found is None else f"{float(found) * p.factor:.4g} {p.unit}".strip()
        wanted = f"{p.low:g} to {p.high:g}" if p.high < MANY else f"at least {p.low:g}"
        rows.append(f"| {p.words} | {wanted} {p.unit}".rstrip() + f" | {measured} | {p.verdict(figures)} |")
    return "\n".join(rows)
