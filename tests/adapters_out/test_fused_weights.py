"""Adapters with q, k and v apart on a base that has them fused: combined, resized and averaged in their own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.adapters_out.groups import places
from lora_merge.models.names import names
from lora_merge.progress import unwatched
from lora_merge.recipes.commands import COMMANDS
from tests.kit.files import index, metadata, save
from tests.kit.flux import flux, of_flux
from tests.kit.tensors import Tensors, rand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused base, two adapters in diffusers' words, of which the second lacks every k, and one in the base's words."""
    made = tmp_path_factory.mktemp("fused")
    save_file(flux(), made / "base.safetensors")
    save_file(of_flux(), made / "native.safetensors")
    lora_merge.convert(
        made / "native.safetensors", made / "a.safetensors", to="diffusers", base=made / "base.safetensors"
    )
    own = load_file(made / "a.safetensors")
    save_file({k: rand(*v.shape, seed=n) for n, (k, v) in enumerate(own.items()) if ".to_k." not in k},
              made / "b.safetensors")  # fmt: skip
    return made


def modules(path: Path) -> set[str]:
    return {key.partition(".lora_")[0].removesuffix(".alpha").removesuffix(".diff") for key in load_file(path)}


def changed(base: Path, given: Any, **options: Any) -> Tensors:
    return lora_merge.merge_state_dict(load_file(base), given, compute_dtype="fp64", **options)


@pytest.mark.few(2)
@pytest.mark.parametrize(("options", "off"), [
    ({}, 1e-5), ({"method": "mean"}, 1e-5), ({"method": "ties", "density": 0.5, "rank": "energy:1"}, 1e-5),
    ({"algorithm": "full"}, 1e-5), ({"method": "slerp", "t": 0.3}, 1e-5), ({"rank": 4}, 0.9), ({"rank": "size:4KiB"}, 0.9),
])  # fmt: skip
def test_layers_of_the_output_are_modules_of_the_adapters(
    folder: Path, options: dict[str, Any], off: float, tmp_path: Path
) -> None:
    """The method still sees the whole weight: what is merged is what merging by the method gives."""
    base, output = folder / "base.safetensors", tmp_path / "out.safetensors"
    given = [(folder / "a.safetensors", 0.75), (folder / "b.safetensors", -0.5)]
    report = lora_merge.combine(given, output, base=base, dtype="fp32", **options)
    apart = {m for m in modules(folder / "a.safetensors") if ".to_" in m or ".add_" in m or "proj_mlp" in m}
    assert len(apart) == 12 and apart <= modules(output)
    assert report.verified and report.verified["ok"]
    numbers = {n: v for n, v in options.items() if n in ("method", "density", "t")}
    wanted, made = changed(base, given, **numbers), changed(base, [output])
    before = load_file(base)
    for name, value in wanted.items():
        assert (value - made[name]).norm() <= off * (value - before[name]).norm() + 1e-6, name


def test_resize_and_average_keep_the_words_too(folder: Path, tmp_path: Path) -> None:
    a, base = folder / "a.safetensors", folder / "base.safetensors"
    lora_merge.resize(a, tmp_path / "r.safetensors", rank=1, base=base)
    lora_merge.average([a, a], tmp_path / "m.safetensors", base=base)
    apart = {m for m in modules(a) if ".to_" in m}
    assert apart <= modules(tmp_path / "r.safetensors") and apart <= modules(tmp_path / "m.safetensors")
    name = "transformer.transformer_blocks.0.attn.to_q"
    found = lora_merge.load_adapter(a)
    assert found.rank(name, base=base) == 3 == len(found.spectrum(name))


def test_rows_of_a_fused_weight_show_the_norms_of_their_own_rows(folder: Path, tmp_path: Path) -> None:
    a, base = folder / "a.safetensors", folder / "base.safetensors"
    both = lora_merge.combine([a, folder / "b.safetensors"], tmp_path / "c.safetensors", base=base)
    alone = lora_merge.resize(a, tmp_path / "r.safetensors", rank="exact", base=base)
    assert any(".to_" in name for name in alone.layers)
    for name, one in alone.layers.items():
        assert both.layers[name]["adapters"][0] == {"change": pytest.approx(one["norm"], rel=1e-6)}
        assert (both.layers[name]["adapters"][1] is None) is (".to_k" in name)
    fused = load_file(base)["double_blocks.0.img_attn.qkv.weight"].double().chunk(3)
    for rows, letter in zip(fused, "qkv", strict=True):
        (one,) = (
            v
            for k, v in alone.layers.items()
            if k.endswith(f"transformer_blocks.0.attn.to_{letter}") and "single" not in k
        )
        assert one["weight"] == pytest.approx(float(rows.norm()))
        assert one["ratio"] == pytest.approx(one["norm"] / one["weight"])


def alike(folder: Path, tmp_path: Path) -> list[Path]:
    """Two snapshots of the adapter with q, k and v apart."""
    first = load_file(folder / "a.safetensors")
    second = {
        n: v if n.endswith("alpha") else v + 0.1 * rand(*v.shape, seed=k) for k, (n, v) in enumerate(first.items())
    }
    save(second, tmp_path / "second.safetensors", metadata(folder / "a.safetensors"))
    return [folder / "a.safetensors", tmp_path / "second.safetensors"]


@pytest.mark.parametrize("weights", [[0.25, 0.75], [1.0, 0.0]])
def test_averaged_factors_of_parts_are_recognised_by_their_own_rows(
    weights: list[float], folder: Path, tmp_path: Path
) -> None:
    """The factors are averaged module by module; what the report tells of one is what merging and combining give."""
    paths, base, output = alike(folder, tmp_path), folder / "base.safetensors", tmp_path / "m.safetensors"
    report = lora_merge.average(paths, output, base=base, space="factors", weights=weights, dtype="fp32")
    made, (one, other) = load_file(output), map(load_file, paths)
    for name, value in made.items():
        mean = weights[0] * one[name].double() + weights[1] * other[name].double()
        assert torch.equal(value, mean.float()), name
    given = [(p, w) for p, w in zip(paths, weights, strict=True) if w]
    same = lora_merge.combine(given, tmp_path / "c.safetensors", base=base, dtype="fp32")
    assert report.layers.keys() == same.layers.keys() == modules(output)
    for name, told in report.layers.items():
        assert {k: told[k] for k in ("norm", "weight", "ratio")} == pytest.approx(
            {k: same.layers[name][k] for k in ("norm", "weight", "ratio")}, rel=1e-6
        ), name
        assert [n and n["change"] for n in told["adapters"] if n] == pytest.approx(
            [n["change"] for n in same.layers[name]["adapters"] if n], rel=1e-6)  # fmt: skip
        assert told["rank"] == told["rank_before"] == same.layers[name]["rank_before"] == 3, name
    before, wanted, got = load_file(base), changed(base, given), changed(base, [output])
    off, size = (sum(float((a[n] - b[n]).double().square().sum()) for n in before)
                 for a, b in ((got, wanted), (wanted, before)))  # fmt: skip
    assert report.residual == pytest.approx((off / size) ** 0.5, rel=1e-3, abs=1e-6)


def test_rank_of_parts_is_that_of_their_modules_as_planned(folder: Path, tmp_path: Path) -> None:
    """Of q, k and v of rank 3 each the largest rank is 3, and not that of the weight that has all three."""
    average, base = COMMANDS["average"], folder / "base.safetensors"
    job = average.job(alike(folder, tmp_path), tmp_path / "m.safetensors", base, {})
    reports = average.plan(job, None), average.run(job, unwatched, None)
    planned, told = ({n: one["rank"] for n, one in r.layers.items()} for r in reports)
    assert planned == told == dict.fromkeys(modules(folder / "a.safetensors"), 3)


@pytest.mark.parametrize("to", ["keep", "diffusers"])
def test_rank_of_a_part_of_the_model_is_that_of_the_rows_of_its_fused_weights(
    folder: Path, to: str, tmp_path: Path
) -> None:
    given = {"base": folder / "base.safetensors", "rank": 3, "rank_for": {"re:img_attn\\.qkv": 1}, "format": to}
    report = lora_merge.combine([folder / "a.safetensors"], tmp_path / "out.safetensors", **given)  # type: ignore[arg-type]
    ranks = {
        name.rpartition(".")[2]: layer["rank"]
        for name, layer in report.layers.items()
        if ".transformer_blocks." in f".{name}"
    }
    assert {ranks[name] for name in ("to_q", "to_k", "to_v")} == {1}
    assert {ranks[name] for name in ("add_q_proj", "add_k_proj", "add_v_proj")} == {3}


def test_module_in_the_words_of_the_base_first_keeps_the_weight_whole(folder: Path, tmp_path: Path) -> None:
    """A fused module and its parts in one sum: the first adapter decides."""
    given, base = [folder / "native.safetensors", folder / "a.safetensors"], folder / "base.safetensors"
    lora_merge.combine(given, tmp_path / "out.safetensors", base=base, dtype="fp32")
    assert modules(tmp_path / "out.safetensors") == modules(folder / "native.safetensors")
    wanted, made = changed(base, given), changed(base, [tmp_path / "out.safetensors"])
    assert all(torch.allclose(wanted[name], made[name], atol=1e-5) for name in wanted)


def split(folder: Path) -> Path:
    """The same model in diffusers' layout, with q, k and v apart."""
    found = names(index({name: tuple(value.shape) for name, value in flux().items()}))
    views = {f"{p.module}.{p.parameter}": p.view for p in places(found, DIALECTS["diffusers"]) if not p.bare}
    before = load_file(folder / "base.safetensors")
    made = {}
    for name, view in views.items():
        rows = [before[p.key].reshape(-1, p.cols)[p.start : p.stop] for p in view.row_slices]
        made[name] = torch.cat(rows).reshape(view.shape).contiguous()
    save_file(made, folder / "split.safetensors")
    return folder / "split.safetensors"


@pytest.mark.few(2)
@pytest.mark.parametrize(("options", "off"), [
    ({}, 1e-5), ({"method": "ties", "density": 0.5, "rank": "energy:1"}, 1e-5), ({"algorithm": "full"}, 1e-5),
    ({"rank": 2}, 0.9), ({"rank": "size:8KiB"}, 0.9), ({"rank": 2, "method": "ties"}, 0.95),
])  # fmt: skip
@pytest.mark.parametrize("first", ["native", "a"])
def test_modules_that_are_fused_in_the_first_adapter_are_fused_in_the_output(
    folder: Path, first: str, options: dict[str, Any], off: float, tmp_path: Path
) -> None:
    """On a base that has them apart: readers of its dialect know no names of parts. A rank is that of the module."""
    base, out = split(folder), tmp_path / "out.safetensors"
    second = "a" if first == "native" else "native"
    given = [(folder / f"{first}.safetensors", 0.75), (folder / f"{second}.safetensors", -0.5)]
    report = lora_merge.combine(given, out, base=base, dtype="fp32", **options)
    assert modules(out) == modules(folder / f"{first}.safetensors")
    assert report.verified is not None
    if options.get("rank") == 2:
        assert {int(one["rank"]) for one in report.layers.values()} <= {0, 1, 2}
        assert {v.shape[0] for k, v in load_file(out).items() if "down" in k or "lora_A" in k} <= {1, 2}
    numbers = {n: v for n, v in options.items() if n in ("method", "density")}
    wanted, made, before = changed(base, given, **numbers), changed(base, [out]), load_file(base)
    for name, value in wanted.items():
        assert (value - made[name]).norm() <= off * (value - before[name]).norm() + 1e-5 or "rank" in options, name
    lost = sum(float((value - made[name]).double().square().sum()) for name, value in wanted.items())
    whole = sum(float((value - before[name]).double().square().sum()) for name, value in wanted.items())
    assert report.residual == pytest.approx((lost / whole) ** 0.5, rel=0.01, abs=1e-5)
    assert report.residual <= off


def test_rank_of_a_fused_module_counts_factors_that_its_weights_share_once(folder: Path, tmp_path: Path) -> None:
    """q, k and v of the fused adapter have the same down factor of rank 3; the other has q alone, of rank 3."""
    other = {name: value for name, value in load_file(folder / "b.safetensors").items() if ".to_q." in name}
    save_file(other, tmp_path / "q.safetensors")
    combine, given = COMMANDS["combine"], [folder / "native.safetensors", tmp_path / "q.safetensors"]
    job = combine.job(given, tmp_path / "out.safetensors", split(folder), {"dtype": "fp32"})
    planned, report = combine.plan(job, None), combine.run(job, unwatched, None)
    ranks = [
        {name: layer["rank"] for name, layer in r.layers.items() if "img_attn_qkv" in name} for r in (planned, report)
    ]
    assert ranks[0] == ranks[1] and {*ranks[1].values()} == {6}
    wanted, made = changed(split(folder), given), changed(split(folder), [tmp_path / "out.safetensors"])
    assert all(torch.allclose(wanted[name], made[name], atol=1e-5) for name in wanted)


def test_rank_is_that_of_the_fused_module_in_a_conversion_too(folder: Path, tmp_path: Path) -> None:
    """Its parts are not all as large, and the proof asks no more of each than of the whole."""
    base, out = split(folder), tmp_path / "out.safetensors"
    lora_merge.convert(folder / "a.safetensors", out, to="kohya", base=base, rank=1)
    (fused,) = {v.shape for k, v in load_file(out).items() if "double_blocks_0_img_attn_qkv.lora_down" in k}
    assert fused[0] == 1
