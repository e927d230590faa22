"""Which rows the proof reads a second time, and that it finds a plan that is wrong in one of their numbers or places."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lora_merge
from lora_merge.algorithms import ALGORITHMS
from lora_merge.disk.reader import Reader
from lora_merge.errors import VerificationFailed
from lora_merge.job import Job
from lora_merge.matching.patch import PatchPart
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.planning.make_plan import plan_job
from lora_merge.planning.plan import OutputTensor, Plan
from lora_merge.proof.second_reading import claims
from lora_merge.proof.second_reading.comparison import Confirmation, read_again
from lora_merge.proof.second_reading.formulas import FITS
from lora_merge.proof.second_reading.layouts import Shape
from lora_merge.proof.second_reading.modules import Group
from tests.algorithms.row_files import write

NO_OTHERS = ()
"""Rows whose places and numbers are the plan's alone, as the report says of them by name."""

KNOWN = [name for name in ALGORITHMS if name not in NO_OTHERS]


def read(plan: Plan) -> Confirmation:
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader:
        return read_again(plan, reader)


def planned(job: Job) -> Plan:
    return plan_job(job, CheckpointCache())


def changed(plan: Plan, change: Callable[[OutputTensor, PatchPart], PatchPart]) -> Plan:
    """The plan with other parts of patches."""
    files = [
        replace(f, targets=tuple(t._replace(uses=tuple(change(t, u) for u in t.uses)) for t in f.targets))
        for f in plan.files
    ]
    return replace(plan, files=tuple(files))


def exchanged(plan: Plan) -> Plan:
    """Both layers' changes in the other's place."""
    uses = {t.name: t.uses for f in plan.files for t in f.targets}

    def other(name: str) -> str:
        return name.replace("layers.0", "layers.2").replace("layers.1", "layers.0").replace("layers.2", "layers.1")

    def there(t: OutputTensor) -> tuple[PatchPart, ...]:
        return tuple(u._replace(piece=u.piece._replace(key=t.name)) for u in uses[other(t.name)])

    files = [replace(f, targets=tuple(t._replace(uses=there(t)) for t in f.targets)) for f in plan.files]
    return replace(plan, files=tuple(files))


@pytest.mark.few(9)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_rows_are_proven_a_second_way_or_reported(row: str, tmp_path: Path) -> None:
    found = read(planned(write(row, tmp_path)))
    assert len(found.alone) == (2 if row in NO_OTHERS else 0)
    assert found.proven == found.modules - len(found.alone)


@pytest.mark.few(9)
@pytest.mark.parametrize("row", KNOWN)
def test_wrong_places_are_detected(row: str, tmp_path: Path) -> None:
    plan = planned(write(row, tmp_path))
    if any(t.uses for f in plan.files for t in f.targets):
        with pytest.raises(VerificationFailed, match="disagree on what"):
            read(exchanged(plan))


@pytest.mark.few(9)
@pytest.mark.parametrize("row", KNOWN)
def test_wrong_numbers_and_tensors_are_detected(row: str, tmp_path: Path) -> None:
    """The scale or the limit, every setting that a configuration tells, the strength, two tensors for each other."""
    plan, tried = planned(write(row, tmp_path)), 0
    (part, *_) = [u for f in plan.files for t in f.targets for u in t.uses] or [None]
    if part is None:
        return
    wrong: list[Callable[[Any], Any]] = [lambda p: replace(p, algorithm="another")]
    wrong += [
        lambda p, n=n: replace(p, scalars={**p.scalars, n: 0.123})
        for n in ("scale", "limit")
        if n in part.patch.scalars
    ]
    told = {n for n in ("seed", "terms", "limit", "family", "top", "method", "depth") if n in dict(part.patch.settings)}
    wrong += [lambda p, n=n: replace(p, settings=tuple({**dict(p.settings), n: 99}.items())) for n in told]
    slots = [*part.patch.module.slots]
    if len(slots) > 1:
        a, b = slots[:2]
        wrong.append(
            lambda p: replace(
                p, module=replace(p.module, slots={**p.module.slots, a: p.module.slots[b], b: p.module.slots[a]})
            )
        )
    for change in wrong:
        with pytest.raises(VerificationFailed, match="disagree on"):
            read(changed(plan, lambda _, u, change=change: u._replace(patch=change(u.patch))))
        tried += 1
    with pytest.raises(VerificationFailed, match="how strongly"):
        read(changed(plan, lambda _, u: u._replace(strength=0.5)))
    assert tried > 0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "stated", [{"lora_alpha": 4.0}, {"rs_lora": True}, {"over_rank": True}, {"lora_alpha": 4.0, "rs_lora": True}]
)
@pytest.mark.parametrize("config", [None, {"lora_parameters": {"rank": 2, "scale": 20.0}}])
def test_stated_settings_are_no_disagreement(
    stated: dict[str, Any], config: dict[str, Any] | None, tmp_path: Path
) -> None:
    """For every kind of module that another trainer than PEFT writes, beside a LoRA that may need the same setting."""
    base = {f"m.{name}.weight": torch.rand(8, 8) for name in "ab"}
    beside = {} if config else {"m.b.lora_up.weight": torch.rand(8, 2), "m.b.lora_down.weight": torch.rand(2, 8)}
    save_file(base, tmp_path / "base.safetensors")
    for kind, shapes in MLX.items() if config else OTHERS.items():
        for alpha in ({}, {"m.a.alpha": torch.tensor(1.0)}):
            adapter = {f"m.a.{ending}": torch.rand(*shape) for ending, shape in shapes.items()} | alpha | beside
            folder = tmp_path / f"{kind}{len(alpha)}"
            folder.mkdir()
            save_file(adapter, folder / "adapters.safetensors")
            if config:
                (folder / "adapter_config.json").write_text(json.dumps(config))
            setting = stated | ({"algo": "tlora"} if kind == "tlora" else {})
            paths = tmp_path / "base.safetensors", folder if config else folder / "adapters.safetensors"
            try:
                lora_merge.merge(*paths, folder / "out.safetensors", setting=setting)
            except lora_merge.MergeError as e:
                assert e.exit_code == 2, (kind, e)  # nothing there uses the setting


MLX = {"mlx": {"lora_a": (8, 2), "lora_b": (2, 8)}}
OTHERS = {
    "oft": {"oft_blocks": (2, 4, 4)}, "boft": {"oft_blocks": (1, 2, 4, 4)}, "oft_diag": {"oft_diag": (2, 4, 4)},
    "loha": {f"hada_{w}_{x}": s for w in ("w1", "w2") for x, s in (("a", (8, 2)), ("b", (2, 8)))},
    "lokr": {"lokr_w1": (2, 2), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 4)},
    "glora": {"a1.weight": (8, 2), "a2.weight": (2, 8), "b1.weight": (8, 2), "b2.weight": (2, 8)},
    "tlora": {"q_layer.weight": (2, 8), "p_layer.weight": (8, 2), "lambda_layer": (1, 2)},
    "full": {"diff": (8, 8)},
}  # fmt: skip
"""Kind → the tensors of one module on a weight [8, 8]."""


SERIES = {"use_cayley_neumann": True}
CONSTRAINED: list[dict[str, Any]] = [
    {}, SERIES, {**SERIES, "num_cayley_neumann_terms": 3}, {"coft": True}, {"coft": True, "eps": 1e-3},
    {"block_share": True}, {**SERIES, "coft": True},
]  # fmt: skip
ENTRIES: dict[str, list[dict[str, Any]]] = {
    "psoft": [{}, SERIES, {**SERIES, "num_cayley_neumann_terms": 3}, {**SERIES, "cayley_neumann_eps": 0.5},
              {"psoft_orth": False}, {"ab_svd_init": "pissa_init"}, {"psoft_svd": "lowrank"},
              {"psoft_svd": "lowrank", "psoft_svd_lowrank_niter": 2}, {"random_seed": 3}],
    "peft_oft": CONSTRAINED, "peft_oft_embedding": CONSTRAINED,
    "waveft": [{}, {"wavelet_family": "db2"}, {"use_idwt": False}, {"scaling": 3.0}, {"random_loc_seed": 5}],
    "fourierft": [{}, {"scaling": 3.0}, {"alpha": 3.0}, {"random_loc_seed": 5}, {"n_frequency": 4}],
    "hra": [{}, {"apply_GS": True}], "road": [{"group_size": 4}, {"group_size": 2}], "miss": [{}, {"init_weights": "bat"}],
    "gralora": [{}, {"alpha": 3}, {"hybrid_r": 1}], "randlora": [{}, {"randlora_alpha": 3}, {"projection_prng_key": 4}],
    "vera": [{}, {"projection_prng_key": 4}], "deft": [{}, {"decomposition_method": "relu"}, {"parq": True}],
    "shira": [{}, {"scaling": 3.0}, {"random_seed": 3}], "adalora": [{}, {"use_rslora": True}],
    "vblora": [{}, {"topk": 1}], "hira": [{}, {"r": 4}], "c3a": [{}, {"block_size": 2}],
}  # fmt: skip
"""Row → entries of PEFT's configuration that the row's file is read with."""


@pytest.mark.few(4)
@pytest.mark.parametrize("row", ENTRIES)
def test_configuration_means_the_same_to_plan_and_proof(row: str, tmp_path: Path) -> None:
    job = write(row, tmp_path)
    path = job.adapters[0].path / "adapter_config.json"
    method, tried = json.loads(path.read_text())["peft_type"], 0
    for entries in ENTRIES[row]:
        path.write_text(json.dumps({"peft_type": method, **entries}))
        try:
            plan = planned(job)
        except lora_merge.MergeError:
            continue
        read(plan)
        tried += 1
    assert tried


OF_ANY_SIZE = {"fourierft", "waveft", "shira", "supertuning", "psoft", "peft_glora_bias"}
"""Kinds whose tensors' sizes do not depend on the weight's."""


def test_module_fits_its_weight_and_none_that_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[bool]] = {}

    def fits(group: Group, shape: Shape) -> bool:
        answer = right(group, shape)
        if answer:
            larger = tuple(4 * size + 1 for size in shape)
            assert group.kind in OF_ANY_SIZE or not right(group, larger), (group.kind, shape, "and", larger)
        asked.setdefault(group.kind, set()).add(answer)
        return answer

    right = claims.fits
    monkeypatch.setattr(claims, "fits", fits)
    for row in ALGORITHMS:
        (folder := tmp_path / row).mkdir()
        read(planned(write(row, folder)))
    assert {*FITS} - {"lora_bias", "book"} == {*asked}, "kinds that no row's file has"
    assert [kind for kind, answers in asked.items() if True not in answers] == []
