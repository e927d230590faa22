"""`combine` and `resize` through the command line and the API, on small files in several dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lora_merge
from lora_merge.adapters_out.combine import plan
from lora_merge.errors import FitError, InputError, MergeError, UsageError
from lora_merge.recipes.commands import COMMANDS
from lora_merge.viewing.inspect import inspect
from tests.kit.command_line import run
from tests.kit.cost import steps
from tests.kit.files import metadata, strays
from tests.kit.hostile_commands import ADAPTER, LLAMA, gguf

LINEAR, CONV = "down_blocks_0_attentions_0_proj_in", "mid_block_resnets_0_conv1"


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kohya(path: Path, rank: int, alpha: float, seed: int, dtype: torch.dtype = torch.float16) -> Path:
    made = {}
    for n, (name, down, up) in enumerate(((LINEAR, (rank, 24), (20, rank)), (CONV, (rank, 4, 3, 3), (12, rank, 1, 1)))):
        made[f"lora_unet_{name}.lora_down.weight"] = rand(*down, seed=seed + n).to(dtype)
        made[f"lora_unet_{name}.lora_up.weight"] = rand(*up, seed=seed + n + 9).to(dtype)
        made[f"lora_unet_{name}.alpha"] = torch.tensor(alpha, dtype=dtype)
    save_file(
        made, path, {"ss_network_module": "networks.lora", "ss_base_model_version": "sd_v1", "ss_name": path.stem}
    )
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return kohya(tmp_path / "a.safetensors", 4, 2.0, 1), kohya(tmp_path / "b.safetensors", 8, 8.0, 100)


def delta(path: Path) -> dict[str, np.ndarray]:
    """What a file of plain factors means, by layer; independent of the package."""
    stored, found = load_file(path), {}
    for key in [k for k in stored if k.endswith(".lora_down.weight")]:
        name = key.removesuffix(".lora_down.weight")
        a, b = stored[key].double().flatten(1).numpy(), stored[f"{name}.lora_up.weight"].double().flatten(1).numpy()
        scale = float(stored[f"{name}.alpha"]) / len(a) if f"{name}.alpha" in stored else 1.0
        found[name] = scale * b @ a
    return found


def test_exact_sum_keeps_every_bit_where_scales_are_powers_of_two(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    done = run("combine", pair[0], f"{pair[1]}:0.5", "-o", out, "--json", "--json-tensors")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    a, b, c = delta(pair[0]), delta(pair[1]), delta(out)
    for name, value in c.items():
        np.testing.assert_array_equal(value, a[name] + 0.5 * b[name])
        assert report["layers"][name]["rank"] == 12
    assert report["verified"]["recomputed"] == 2
    told = metadata(out)
    assert told["ss_network_dim"] == "12"
    assert told["ss_base_model_version"] == "sd_v1"
    assert "ss_name" not in told
    recipe = json.loads(told["lora_merge.recipe"])
    assert [one["strength"] for one in recipe["adapters"]] == [1.0, 0.5]
    assert recipe["dropped_metadata"] == ["ss_name"]


@pytest.mark.parametrize("rule", ["5", "energy:0.8", "size:3KiB"])
def test_rank_gives_the_optimum_and_the_reported_residual(rule: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    report = lora_merge.combine(list(pair), tmp_path / "c.safetensors", rank=rule, dtype="fp32")
    a, b, c = delta(pair[0]), delta(pair[1]), delta(tmp_path / "c.safetensors")
    for name, value in c.items():
        right = a[name] + b[name]
        best = np.linalg.norm(np.linalg.svd(right, compute_uv=False)[report.layers[name]["rank"] :])
        assert best * (1 - 1e-6) <= np.linalg.norm(right - value) <= best * (1 + 1e-5)
        assert report.layers[name]["residual"] == pytest.approx(np.linalg.norm(right - value) / np.linalg.norm(right))


def test_reports_show_the_largest_number_and_the_share_that_change(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Of all numbers, as the layers are small; in all and by block the same, also of a method that drops some."""
    pruned = lora_merge.combine([*pair], tmp_path / "p.safetensors", method="prune", density=0.25, rank=4)
    report = lora_merge.resize(pair[0], tmp_path / "r.safetensors", rank=2)
    for name, whole in delta(pair[0]).items():
        told = report.layers[name]
        assert (told["of"], told["elements"], "changed" in told) == (whole.size, whole.size, False), "it is a product"
        assert told["largest"] == pytest.approx(np.abs(whole).max(), rel=1e-6)
    every, layers = report.numbers["all"], [*report.layers.values()]
    assert not {"changed", "weight", "ratio"} & every.keys()
    assert every["largest"] == max(one["largest"] for one in layers)
    assert every["of"] == sum(one["of"] for one in layers) == sum(b["of"] for b in report.numbers["blocks"].values())
    dropped = [0.0, 0.0]
    for name, whole in delta(pair[0]).items():
        kept = [np.abs(d) >= np.sort(np.abs(d), axis=None)[-(d.size // 4)] for d in (whole, delta(pair[1])[name])]
        assert pruned.layers[name]["changed"] == pytest.approx((kept[0] | kept[1]).mean())
        dropped = [dropped[0] + (kept[0] | kept[1]).sum(), dropped[1] + whole.size]
    assert pruned.numbers["all"]["changed"] == pytest.approx(dropped[0] / dropped[1])


@pytest.mark.parametrize("method", ["sum", "ties"])
def test_reports_show_the_norm_of_each_input(method: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """At its strength, before the method changes it; an adapter that does not change a layer has none there."""
    one = tmp_path / "one.safetensors"
    save_file({k: v for k, v in load_file(pair[0]).items() if LINEAR in k}, one)
    given, size = [pair[0], (pair[1], -0.5), one], {} if method == "sum" else {"density": 0.5, "rank": 4}
    report = lora_merge.combine(given, tmp_path / "c.safetensors", method=method, **size)
    a, b = delta(pair[0]), delta(pair[1])
    for name, layer in report.layers.items():
        wanted = [np.linalg.norm(a[name]), 0.5 * np.linalg.norm(b[name]), np.linalg.norm(a[name])]
        told = [found and found["change"] for found in layer["adapters"]]
        assert told == [*map(pytest.approx, wanted[:2]), pytest.approx(wanted[2]) if LINEAR in name else None]
    every = [found["change"] for found in report.numbers["all"]["adapters"]]
    sums = [np.linalg.norm([*map(np.linalg.norm, d.values())]) for d in (a, b)]
    assert every[:2] == [pytest.approx(sums[0]), pytest.approx(0.5 * sums[1])]
    resized = lora_merge.resize(pair[0], tmp_path / "r.safetensors", rank=2)
    assert all(one["adapters"] == [{"change": pytest.approx(one["norm"])}] for one in resized.layers.values())
    for space in ("delta", "factors"):
        done = lora_merge.average([pair[0], pair[0]], tmp_path / f"{space}.safetensors", space=space)
        assert done.numbers["all"]["adapters"] == [{"change": pytest.approx(sums[0] / 2)}] * 2


def test_resizing_twice_is_resizing_once_and_alpha_keeps_its_share(pair: tuple[Path, Path], tmp_path: Path) -> None:
    one, two, straight = (tmp_path / f"{n}.safetensors" for n in ("one", "two", "straight"))
    lora_merge.resize(pair[1], one, rank=6, dtype="fp32")
    lora_merge.resize(one, two, rank=3)
    report = lora_merge.resize(pair[0], straight, rank=3, dtype="fp32")
    assert {layer["alpha"] for layer in report.layers.values()} == {1.5}
    straight.unlink()
    lora_merge.resize(pair[1], straight, rank=3, dtype="fp32")
    for name, value in delta(two).items():
        np.testing.assert_allclose(value, delta(straight)[name], atol=1e-4)


def test_algorithms_and_dialects_meet_by_name(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    loha = {
        f"lora_unet_{LINEAR}.{slot}": rand(*shape, seed=n)
        for n, (slot, shape) in enumerate(
            {"hada_w1_a": (20, 2), "hada_w1_b": (2, 24), "hada_w2_a": (20, 2), "hada_w2_b": (2, 24)}.items()
        )
    }
    dotted = "unet.down_blocks.0.attentions.0.proj_in"
    peft = {f"{dotted}.lora_A.weight": rand(3, 24, seed=5), f"{dotted}.lora_B.weight": rand(20, 3, seed=6)}
    save_file(loha, tmp_path / "loha.safetensors")
    save_file(peft, tmp_path / "peft.safetensors")
    out = tmp_path / "c.safetensors"
    report = lora_merge.combine([pair[0], tmp_path / "loha.safetensors", (tmp_path / "peft.safetensors", -2.0)], out)
    name = f"lora_unet_{LINEAR}"
    first, second = (loha[f"{name}.hada_w{i}_a"].double() @ loha[f"{name}.hada_w{i}_b"].double() for i in (1, 2))
    third = peft[f"{dotted}.lora_B.weight"].double() @ peft[f"{dotted}.lora_A.weight"].double()
    right = delta(pair[0])[name] + (first * second - 2 * third).numpy()
    assert report.layers[name]["rank"] == 4 + 4 + 3
    assert report.dtype == "fp32"
    np.testing.assert_allclose(delta(out)[name], right, atol=1e-5)


def test_merging_the_combination_is_merging_all_also_with_dora_and_biases(tmp_path: Path) -> None:
    base = {"model.layers.0.q.weight": rand(20, 24, seed=0), "model.layers.0.q.bias": rand(20, seed=1),
            "model.norm.weight": rand(24, seed=2)}  # fmt: skip
    save_file(base, tmp_path / "base.safetensors")
    plain = {"base_model.model.model.layers.0.q.lora_A.weight": rand(4, 24, seed=3),
             "base_model.model.model.layers.0.q.lora_B.weight": rand(20, 4, seed=4)}  # fmt: skip
    dora = {"lora_unet_model_layers_0_q.lora_down.weight": rand(2, 24, seed=5),
            "lora_unet_model_layers_0_q.lora_up.weight": rand(20, 2, seed=6),
            "lora_unet_model_layers_0_q.dora_scale": rand(20, 1, seed=7).abs() + 1,
            "lora_unet_model_layers_0_q.diff_b": rand(20, seed=8), "lora_unet_model_norm.diff": rand(24, seed=9)}  # fmt: skip
    files = [tmp_path / "plain.safetensors", tmp_path / "dora.safetensors"]
    save_file(plain, files[0])
    save_file(dora, files[1])
    with pytest.raises(UsageError, match="base"):
        lora_merge.combine(files, tmp_path / "c.safetensors", rank=20)
    report = lora_merge.combine([files[0], (files[1], 0.7)], tmp_path / "c.safetensors", base=tmp_path / "base.safetensors",
                                rank="energy:1", dtype="fp32")  # fmt: skip
    assert report.residual < 1e-5
    assert report.verified is not None
    assert report.verified["recomputed"] == 3
    weights = sorted(one["weight"] for one in report.layers.values())
    assert weights == pytest.approx(sorted(float(w.double().norm()) for w in base.values()))
    every = report.numbers["all"]
    assert every["ratio"] == pytest.approx(every["norm"] / sum(w * w for w in weights) ** 0.5)
    for name, adapters in (("all", [files[0], (files[1], 0.7)]), ("one", [tmp_path / "c.safetensors"])):
        lora_merge.merge(tmp_path / "base.safetensors", adapters, tmp_path / f"{name}.safetensors")
    both = (load_file(tmp_path / f"{name}.safetensors") for name in ("all", "one"))
    for mine, other in zip(*(b.values() for b in both), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_same_inputs_same_bytes_and_masks_do_not_depend_on_the_order(pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"method": "dare_ties", "density": 0.5, "algorithm": "full", "dtype": "fp32"}
    outs = [tmp_path / f"{n}.safetensors" for n in range(4)]
    for out, order in zip(outs, (pair, pair, pair[::-1]), strict=False):
        lora_merge.combine(list(order), out, **options)
    lora_merge.combine(list(pair), outs[3], **{**options, "seed": 1})
    assert outs[0].read_bytes() == outs[1].read_bytes()
    one, other, seeded = (load_file(outs[n]) for n in (0, 2, 3))
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert not all(torch.equal(one[k], seeded[k]) for k in one)


WRONG = [
    (["--method", "tiez"], 2), (["--rank", "0"], 2), (["--method", "ties"], 4), (["--density", "0.5"], 2),
    (["--method", "slerp"], 2), (["--method", "ties", "--density", "0", "--rank", "4"], 2),
    (["--method", "mean", "-s", "1", "-s", "-1"], 2), (["--alpha", "x"], 2), (["--alpha", "1e308"], 2), (["--alpha", "1e-320"], 2), (["--rank-for", "te"], 2),
    (["--seed", "x"], 2), (["--max-rank", "1.5", "--rank", "4"], 2),
]  # fmt: skip


@pytest.mark.parametrize(("options", "code"), WRONG, ids=[" ".join(o) for o, _ in WRONG])
def test_wrong_options_are_refused_and_nothing_is_written(
    options: list[str], code: int, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    done = run("combine", *pair, "-o", tmp_path / "c.safetensors", *options)
    assert done.code == code
    assert not strays(tmp_path)
    assert not (tmp_path / "c.safetensors").exists()


def test_bad_inputs_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    with pytest.raises(UsageError):
        lora_merge.combine(list(pair), pair[0], overwrite=True)
    with pytest.raises(InputError, match="nothing"):
        lora_merge.combine([pair[0], (pair[0], -1.0)], out)
    with pytest.raises(FitError):
        other = kohya(tmp_path / "d.safetensors", 4, 2.0, 1)
        stored = load_file(other)
        stored[f"lora_unet_{LINEAR}.lora_down.weight"] = rand(4, 30, seed=0)
        save_file(stored, other)
        lora_merge.combine([pair[0], other], out)
    stored = load_file(pair[1])
    stored[f"lora_unet_{LINEAR}.lora_down.weight"][0, 0] = float("nan")
    save_file(stored, pair[1])
    with pytest.raises(InputError, match="NaN"):
        lora_merge.combine(list(pair), out)
    assert not out.exists()


def test_dry_run_shows_ranks_and_size_and_writes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    done = run("combine", *pair, "-o", out, "--dry-run", "--json", "--json-tensors")
    assert {layer["rank"] for layer in json.loads(done.out)["layers"].values()} == {12}
    assert not out.exists()


@pytest.mark.parametrize("rule", ["exact", "energy:1"])
def test_auto_stores_whatever_is_smaller(rule: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """12 directions of a matrix of 20 × 24 are larger than the matrix, 12 of a convolution of 12 × 36 too; 4 are not."""
    out = tmp_path / "c.safetensors"
    for given, kind in (([*pair], "full"), ([pair[0]], "lora")):
        report = lora_merge.combine(given, out, algorithm="auto", rank=rule, dtype="fp32", overwrite=True)
        assert {layer["algorithm"] for layer in report.layers.values()} == {kind}
        sums = [delta(path) for path in given]
        stored = load_file(out)
        for name in sums[0]:
            right = sum(one[name] for one in sums)
            found = stored[f"{name}.diff"].flatten(1).numpy() if kind == "full" else delta(out)[name]
            np.testing.assert_allclose(found, right, atol=1e-4)


@pytest.mark.parametrize(("command", "options", "told"), [
    ("resize", {"rank": "energy:0.9"}, "the rank is chosen from the values"), ("resize", {"rank": 2}, "rank 2"),
    ("convert", {"rank": "energy:0.9"}, "the rank is chosen from the values"), ("convert", {"rank": 2}, "rank 2"),
    ("convert", {"algorithm": "full"}, "whole matrices"), ("convert", {"dtype": "bf16"}, "rank 4"),
])  # fmt: skip
def test_plan_shows_ranks_that_headers_show(
    command: str, options: dict[str, Any], told: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = run(command, pair[0], "-o", tmp_path / "c.safetensors", "--dry-run", *given)
    assert done.code == 0 and told in done.out, done.out
    assert not (tmp_path / "c.safetensors").exists()


def test_plan_refuses_what_has_no_factors(tmp_path: Path) -> None:
    save_file({f"lora_unet_{LINEAR}.diff": rand(20, 24, seed=7)}, tmp_path / "w.safetensors")
    for word in ("-q", "--dry-run"):
        failed = run("combine", tmp_path / "w.safetensors", "-o", tmp_path / "c.safetensors", word)
        assert failed.code == FitError.exit_code and "no product of two small factors" in failed.err


def test_written_adapter_is_reproduced_and_proven_from_its_recipe(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out, copy = tmp_path / "c.safetensors", tmp_path / "copy.safetensors"
    assert run("combine", pair[0], f"{pair[1]}:0.5", "-o", out, "--method", "ties", "--density", "0.5", "--rank",
                  "energy:0.9", "--rank-for", "conv1=3").code == 0  # fmt: skip
    proof = json.loads(run("verify", out, "--json").out)
    assert proof["same_bytes"] and proof["recomputed"] == proof["layers"] == 2
    inputs = [path.rename(path.with_name(f"now-{path.name}")) for path in pair]
    assert json.loads(run("verify", out, "--json").out)["same_bytes"]
    for path in inputs:
        path.rename(path.with_name(path.name.removeprefix("now-")))
    assert run("replay", out, "-o", copy).code == 0
    assert copy.read_bytes() == out.read_bytes()
    raw = bytearray(out.read_bytes())
    raw[-1] ^= 1
    out.write_bytes(raw)
    assert run("verify", out).code == 6


@pytest.mark.few(5)
@pytest.mark.parametrize("change", [
    {"adapters": []}, {"adapters": [1]}, {"options": {"rank": {}}}, {"options": {"density": "x"}}, {"command": "bake"}, {"command": []}, {"command": {}}, {"base": {"name": "b", "files": []}},
    {"options": {"method": "slerp"}}, {"options": {"method": "mean", "density": 0.5}},
])  # fmt: skip
def test_recipe_that_cannot_be_followed_is_damaged(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, object]
) -> None:
    """Also where a user who types the same would be told of a wrong option: this file is no choice of theirs."""
    out = tmp_path / "ab.safetensors"
    lora_merge.combine(list(pair), out)
    told = json.loads(metadata(out)["lora_merge.recipe"])
    changed = {**told, **change}
    for step in ("replay", "verify"):
        save_file(load_file(out), out, {"lora_merge.recipe": json.dumps(changed)})
        more = ["-o", tmp_path / "again.safetensors"] if step == "replay" else []
        assert run(step, out, *more).code == InputError.exit_code


def test_adapter_is_no_merged_checkpoint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    lora_merge.combine(pair, tmp_path / "c.safetensors")
    with pytest.raises(InputError, match="an adapter that combine has written"):
        lora_merge.unmerge(tmp_path / "c.safetensors", output=tmp_path / "o.safetensors")


def test_recipe_does_not_decide_what_is_overwritten(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out, there = tmp_path / "ab.safetensors", tmp_path / "there.safetensors"
    lora_merge.combine(list(pair), out)
    told = json.loads(metadata(out)["lora_merge.recipe"])
    told["options"] |= {"overwrite": True, "no_such": 1, "output": str(there), "map": str(pair[0])}
    save_file(load_file(out), out, {"lora_merge.recipe": json.dumps(told)})
    there.write_bytes(b"mine")
    assert run("replay", out, "-o", there).code == UsageError.exit_code
    assert there.read_bytes() == b"mine"
    assert run("replay", out, "-o", tmp_path / "again.safetensors").code == 0


def test_base_in_gguf_gives_shapes_and_the_output_is_an_adapter(tmp_path: Path) -> None:
    layer = "blk.0.ffn_up.weight"
    base, adapter = tmp_path / "m.gguf", tmp_path / "a.gguf"
    base.write_bytes(gguf(LLAMA, [layer], (4, 6)))
    adapter.write_bytes(gguf(ADAPTER, [f"{layer}.lora_{x}" for x in "ab"], (4, 6)))
    for command in (
        ["combine", adapter, adapter],
        ["resize", adapter, "--rank", "1"],
        ["convert", adapter, "--to", "peft"],
    ):
        out = tmp_path / (command[0] if command[0] == "convert" else f"{command[0]}.safetensors")
        assert run(*command, "--base", base, "-o", out).code == 0
        found = load_file(next(out.glob("*.safetensors")) if out.is_dir() else out)
        assert sorted(tuple(t.shape) for t in found.values() if t.ndim == 2) == [(1, 6), (4, 1)]


@pytest.mark.parametrize("method", ["sum", "dare_ties"])
def test_bytes_do_not_depend_on_where_tensors_wait(method: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """In memory, or beyond a share of --max-memory in a temporary file, which is gone at the end."""
    made = []
    for limit in ("1GiB", "4KB"):
        out = tmp_path / "new folder" / f"{limit}.safetensors"
        options = {"density": 0.5, "seed": 3, "algorithm": "full"} if method != "sum" else {}
        lora_merge.combine(pair, out, method=method, max_memory=limit, **options)  # type: ignore[arg-type]
        made.append(out.read_bytes())
    assert made[0] == made[1]
    assert sorted(p.name for p in (tmp_path / "new folder").iterdir()) == ["1GiB.safetensors", "4KB.safetensors"]
    assert not strays(tmp_path / "new folder")


@pytest.mark.slow
def test_cost_of_a_module_does_not_grow_with_their_number(tmp_path: Path) -> None:
    """Square weights under PEFT's names: whether a layer is a Conv1D hangs on all others."""

    def work(count: int, act: Callable[[Path], object]) -> int:
        names = [f"base_model.model.layers.{i}.q.lora_{x}.weight" for i in range(count) for x in "AB"]
        save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "fan_in_fan_out": false}')
        return steps(lambda: act(tmp_path))

    out = tmp_path / "o" / "out.safetensors"
    for act in (
        lambda path: inspect(path, weights=True),
        lambda path: lora_merge.combine([path], out, overwrite=True, verify=False),
    ):
        work(10, act)
        small, middle, large = (work(n, act) for n in (40, 80, 160))
        assert large - middle < 1.1 * 2 * (middle - small)


@pytest.mark.parametrize("alpha", [2.0**-16, 0.003, 4e4])
def test_exact_sum_keeps_its_digits_whatever_the_scale_of_its_inputs(alpha: float, tmp_path: Path) -> None:
    """In fp16 the left factor alone would hold a few bits of such changes, or none; powers of two are moved to the
    right one."""
    one, other = kohya(tmp_path / "a.safetensors", 4, 2.0, 1), kohya(tmp_path / "b.safetensors", 8, 8.0, 100)
    stored = load_file(one)
    changed = {k: torch.tensor(alpha) if k.endswith("alpha") else v for k, v in stored.items()}
    save_file({k: v * 2**-9 if "up" in k else v for k, v in changed.items()}, one)
    report = lora_merge.combine([one, other], tmp_path / "c.safetensors", dtype="fp16")
    assert report.residual < 4e-4
    alone = lora_merge.combine([one], tmp_path / "d.safetensors", dtype="fp16")
    made, wanted = delta(tmp_path / "d.safetensors"), delta(one)
    for name, change in wanted.items():
        assert np.linalg.norm(made[name] - change) < 4e-4 * np.linalg.norm(change), name
    assert alone.residual < 4e-4
    files = load_file(one), load_file(other), load_file(tmp_path / "c.safetensors")
    name = f"lora_unet_{LINEAR}.lora_down.weight"
    assert files[2][name][4:].equal(files[1][name]), "rows that need no other scale keep their bits"


def test_adapters_of_two_models_are_refused(tmp_path: Path) -> None:
    """Both in kohya's words: without a base, nothing but the modules' own names and widths tells."""
    shapes = {
        "flux": {f"double_blocks_{n}_img_attn_qkv": (9216, 3072) for n in range(2)}
        | {"double_blocks_0_txt_mlp_0": (12288, 3072)},
        "xl": {f"input_blocks_4_1_transformer_blocks_{n}_attn2_to_k": (640, 2048) for n in range(2)},
    }
    for name, modules in shapes.items():
        made = {}
        for module, (out, cols) in modules.items():
            made[f"lora_unet_{module}.lora_down.weight"] = torch.ones(1, cols)
            made[f"lora_unet_{module}.lora_up.weight"] = torch.ones(out, 1)
            made[f"lora_unet_{module}.alpha"] = torch.tensor(1.0)
        save_file(made, tmp_path / f"{name}.safetensors")
    with pytest.raises(FitError, match=r"different models: .* is for Chroma or Flux\.1, .* for Stable Diffusion XL"):
        lora_merge.combine([tmp_path / f"{n}.safetensors" for n in shapes], tmp_path / "o.safetensors")
    assert not (tmp_path / "o.safetensors").exists()


def test_error_of_the_format_names_the_adapter_and_no_file_that_is_gone(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(MergeError) as failure:
        lora_merge.combine([*pair], tmp_path / "o", format="peft")
    assert str(failure.value.where).startswith(str(pair[0])), failure.value
    assert not (tmp_path / "o").exists() and not strays(tmp_path)


@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"rank": "size:2000"}, {"algorithm": "full"}])
def test_plan_shows_the_size_of_the_file(options: dict[str, Any], pair: tuple[Path, Path], tmp_path: Path) -> None:
    """With its header, and with the bound of `size`; metadata may take a page less."""
    out = tmp_path / "o.safetensors"
    planned = plan(COMMANDS["combine"].job(list(pair), out, None, options)).written
    lora_merge.combine(pair, out, **options)
    assert 0 <= planned - out.stat().st_size <= 2 * 4096


def test_plan_says_which_decomposition_exceeds_the_limit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Factors need no whole matrix; ties gives one."""
    told = {}
    cases: tuple[tuple[str, dict[str, Any]], ...] = (("sum", {}), ("ties", {"density": 0.5}))
    for method, given in cases:
        for limit in ("4KiB", "1GiB"):
            options: dict[str, Any] = {"method": method, "rank": 2, "max_memory": limit, **given}
            notes = plan(COMMANDS["combine"].job(list(pair), tmp_path / "o.safetensors", None, options)).notes
            told[method, limit] = any("more than --max-memory" in n for n in notes)
    assert told == {("sum", "4KiB"): False, ("sum", "1GiB"): False, ("ties", "4KiB"): True, ("ties", "1GiB"): False}


HADA = {"hada_w1_a": (20, 2), "hada_w1_b": (2, 24), "hada_w2_a": (20, 2), "hada_w2_b": (2, 24)}


@pytest.mark.parametrize(("slots", "count"), [(HADA, 0), ({"diff": (20, 24)}, 1)], ids=["loha", "whole"])
@pytest.mark.parametrize("command", ["resize", "convert"])
def test_plan_notes_memory_for_changes_without_factors(
    command: str, slots: dict[str, tuple[int, ...]], count: int, tmp_path: Path
) -> None:
    """LoHa of a small rank has factors, which every command cuts without the matrix."""
    adapter = tmp_path / "a.safetensors"
    save_file({f"lora_unet_{LINEAR}.{slot}": rand(*shape, seed=7) for slot, shape in slots.items()}, adapter)
    row = COMMANDS[command]
    job = row.job([adapter], tmp_path / "o.safetensors", None, {"rank": 2, "max_memory": "4KiB"})
    assert sum("more than --max-memory" in note for note in row.plan(job, None).notes) == count


def test_inputs_without_a_rank_stay_whole_by_the_rule_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As by `average`, whose rule it is."""
    save_file({f"lora_unet_{LINEAR}.diff": rand(20, 24, seed=7)}, tmp_path / "w.safetensors")
    inputs = [tmp_path / "w.safetensors", pair[0]]
    for given in (inputs[:1], inputs):
        options: Any = {"rank": "same", "include": ["re:proj_in"]}
        out, name = tmp_path / "o.safetensors", f"lora_unet_{LINEAR}"
        planned = plan(COMMANDS["combine"].job(given, out, None, options)).layers[name]["rank"]
        told = lora_merge.combine(given, out, overwrite=True, **options).layers[name]
        assert told["rank"] == planned == 20 and told["residual"] < 1e-5
