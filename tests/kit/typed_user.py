"""Every public function as a user calls it: mypy --strict reads this file with the package; nobody runs it."""

from pathlib import Path

import torch
from torch import nn

import lora_merge


class Pipe:
    @property
    def components(self) -> dict[str, nn.Module]:
        return {"unet": nn.Linear(2, 2)}


def report(step: lora_merge.Step) -> None:
    print(step.stage, step.done)


def files() -> None:
    result: lora_merge.Report = lora_merge.merge(
        "base.safetensors",
        ["a.safetensors", ("b.safetensors", 0.5)],
        "out.safetensors",
        dtype=torch.bfloat16,
        strength_for={"te": 0.5},
        setting={"lora_alpha": 16},
        metadata={"modelspec.author": "me"},
        progress=report,
    )
    print(result.to_json(), result.coverage, result.written)
    lora_merge.merge(Path("base"), {"a.safetensors": 0.5}, max_memory="2GiB", device="cpu", overwrite=True)
    lora_merge.merge("base", lora_merge.Adapter(Path("a.safetensors"), 0.5))
    lora_merge.merge("base", ["a", "b"], strengths=[0.8, 0.5], unmatched="skip", method="ties", density=0.5)
    print(lora_merge.plan("base", "a").changed)
    lora_merge.unmerge("merged", ("a", 0.8), "back", search=["loras"])
    lora_merge.replay("merged", "again")
    print(lora_merge.verify("merged", full=True)["proven"])
    print(lora_merge.inspect("a", weights=True), lora_merge.compare("a", "b").to_json())


def adapters() -> None:
    lora_merge.combine(["a", "b"], "c", method="ties", density=0.5, rank=32)
    lora_merge.resize("a", "c", rank="energy:0.99")
    lora_merge.convert("a", "c", to="diffusers")
    lora_merge.extract("base", "tuned", "c", rank=32)
    lora_merge.average(["a", "b"], "c", weights=[0.5, 0.5])


def memory(model: nn.Module, weight: torch.Tensor) -> None:
    merged = lora_merge.merge_state_dict(model.state_dict(), [("a", 0.5), {"x": weight}], dtype="bf16")
    model.load_state_dict(merged)
    with lora_merge.merge_into(model, "a", keep="compressed") as handle:
        print(handle.changed)
    lora_merge.merge_into(Pipe(), "a").undo()
    opened = lora_merge.load_adapter("a")
    print((0.5 * opened + opened).delta("x", weight))


def batches() -> None:
    jobs = [{"base": "b", "adapters": ["a"], "output": f"{n}.safetensors"} for n in range(3)]
    lora_merge.run_batch(jobs, workers=2)
    print([plan.bytes for plan in lora_merge.plan_batch(jobs, former=lora_merge.FormerPlans())])
    reports = lora_merge.run_batch({"version": 1, "jobs": [{"base": "b", "adapters": ["a"], "output": "o"}]})
    print([r.error.what for r in reports if r.error is not None])
    lora_merge.run_batch("jobs.yaml", on_report=lambda r: print(r.output), progress=True)
    lora_merge.run_batch([lora_merge.Job(Path("b"), (lora_merge.Adapter(Path("a")),), Path("o"))])
    try:
        lora_merge.run_batch(Path("jobs.yaml"))
    except lora_merge.MergeError as e:
        print(e.what, e.where, e.fix, e.exit_code)


def mistakes() -> None:
    """A type checker finds each of these; an ignored line without an error is an error."""
    lora_merge.merge("base", "a", dtpye="bf16")  # type: ignore[call-arg]
    lora_merge.merge("base", "a", unmatched="ignore")  # type: ignore[arg-type]
    lora_merge.merge_into(3, "a")  # type: ignore[arg-type]
    lora_merge.run_batch(3)  # type: ignore[arg-type]
    lora_merge.merge("base", 3)  # type: ignore[arg-type]
