"""The difference of two checkpoints as an adapter: merged into the base it gives the tuned checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lora_merge
from lora_merge.adapters_out import proof as written_proof
from lora_merge.adapters_out.dialects import CANONICAL, DIALECTS
from lora_merge.adapters_out.extract import extraction_proof
from lora_merge.adapters_out.extract.extract_modules import factored
from lora_merge.dtypes import Shape, StoredTensor
from lora_merge.errors import FitError, InputError, UsageError
from lora_merge.planning.checkpoint_cache import CheckpointCache
from lora_merge.proof.weights import WeightReader
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.flux import flux
from tests.kit.models import sd1
from tests.kit.tensors import Tensors, rand


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in fp32, the base with a LoRA of rank 4 merged, and the same base with every vector changed too."""
    made = tmp_path_factory.mktemp("extract")
    base = sd1(torch.float32)
    save_file(base, made / "base.safetensors")
    save_file(kohya(sd1()), made / "lora.safetensors")
    tuned = {k: v.clone() for k, v in merged(made / "base.safetensors", made / "lora.safetensors").items()}
    save_file(tuned, made / "tuned.safetensors")
    save_file({k: v if v.ndim > 1 else v + 0.5 for k, v in tuned.items()}, made / "all.safetensors")
    return made


def merged(base: Path, adapter: Path) -> Tensors:
    return lora_merge.merge_state_dict(load_file(base), [adapter], compute_dtype="fp64")


def test_known_lora_is_found_again_with_its_rank(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.safetensors"
    code, out, told = run("extract", folder / "base.safetensors", folder / "tuned.safetensors", "-o", output,
                            "--rank", "exact")  # fmt: skip
    assert code == 0 and "the same in both checkpoints: no change to store" in out + told, told
    found, known = load_file(output), load_file(folder / "lora.safetensors")
    assert found.keys() == known.keys()
    for name in (n.removesuffix(".alpha") for n in known if n.endswith(".alpha")):
        one, other = (
            t[f"{name}.alpha"].double() / t[f"{name}.lora_down.weight"].shape[0]
            * t[f"{name}.lora_up.weight"].flatten(1).double() @ t[f"{name}.lora_down.weight"].flatten(1).double()
            for t in (found, known)
        )  # fmt: skip
        assert found[f"{name}.lora_down.weight"].shape == known[f"{name}.lora_down.weight"].shape
        assert torch.allclose(one, other, rtol=0, atol=1e-6), name


def test_adapter_brings_the_base_to_the_tuned_checkpoint(folder: Path, tmp_path: Path) -> None:
    report = lora_merge.extract(
        folder / "base.safetensors", folder / "all.safetensors", tmp_path / "a.safetensors", rank="exact",
        include=["unet", "te", "vae"],
    )  # fmt: skip
    assert report.verified is not None and report.verified["recomputed"] == len(report.layers)
    again, tuned = (
        merged(folder / "base.safetensors", tmp_path / "a.safetensors"),
        load_file(folder / "all.safetensors"),
    )
    for name, value in tuned.items():
        assert torch.allclose(again[name], value, rtol=0, atol=2e-6), name


def test_report_shows_the_share_of_numbers_that_differ(folder: Path, tmp_path: Path) -> None:
    value = load_file(folder / "base.safetensors")[KEY].clone()
    value[3, 5] += 2
    tuned = changed(folder, tmp_path, {KEY: value})
    report = lora_merge.extract(folder / "base.safetensors", tuned, tmp_path / "a.safetensors", include=["re:" + KEY])
    ((_, told),) = report.layers.items()
    after = value[3, 5].double() - load_file(folder / "base.safetensors")[KEY][3, 5].double()
    assert (told["changed"], told["largest"]) == (1 / value.numel(), pytest.approx(float(after)))


def test_report_shows_how_large_the_change_is_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    base, tuned = load_file(folder / "base.safetensors"), load_file(folder / "all.safetensors")
    report = lora_merge.extract(
        folder / "base.safetensors", folder / "all.safetensors", tmp_path / "a.safetensors", rank=1
    )
    sizes = {(float(w.double().norm()), float((tuned[k].double() - w.double()).norm())) for k, w in base.items()}
    told = {(one["weight"], one["norm"]) for one in report.layers.values()}
    assert len(told) == len(report.layers) == 30
    assert all(any(one == pytest.approx(size, rel=1e-6) for size in sizes) for one in told)
    for one in (*report.layers.values(), *report.numbers["blocks"].values(), every := report.numbers["all"]):
        assert one["ratio"] == pytest.approx(one["norm"] / one["weight"])
    assert every["weight"] == pytest.approx(np.linalg.norm([weight for weight, _ in told]))


def test_error_of_a_rank_is_the_tail_of_the_singular_values(folder: Path, tmp_path: Path) -> None:
    base, tuned = folder / "base.safetensors", folder / "tuned.safetensors"
    report = lora_merge.extract(base, tuned, tmp_path / "a.safetensors", rank=2)
    made = merged(base, tmp_path / "a.safetensors")
    old, new = load_file(base), load_file(tuned)
    seen = 0
    for key in (k for k in old if old[k].ndim > 1 and not torch.equal(old[k], new[k])):
        wanted = (new[key].double() - old[key].double()).flatten(1).numpy()
        tail = np.sqrt((np.linalg.svd(wanted, compute_uv=False)[2:] ** 2).sum())
        lost = np.linalg.norm(wanted - (made[key].double() - old[key].double()).flatten(1).numpy())
        assert lost == pytest.approx(tail, rel=1e-4, abs=1e-6), key
        seen += 1
    assert seen == len(report.layers)
    assert 0 < report.residual < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rank_above_the_rounding_noise_is_the_trained_one(tmp_path: Path, dtype: torch.dtype) -> None:
    key = "model.layers.0.self_attn.q_proj.weight"
    base = rand(64, 48, seed=1).to(dtype)
    tuned = (base.float() + 0.5 * rand(64, 3, seed=2) @ rand(3, 48, seed=3)).to(dtype)
    save_file({key: base}, tmp_path / "base.safetensors")
    save_file({key: tuned}, tmp_path / "tuned.safetensors")
    found = lora_merge.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors",
                               tmp_path / "a", rank="noise")  # fmt: skip
    assert [layer["rank"] for layer in found.layers.values()] == [3]
    assert found.dtype == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    (layer,), step = (
        found.layers.values(),
        2.0 ** (torch.frexp(tuned.float()).exponent - {True: 8, False: 11}[dtype == torch.bfloat16]),
    )
    change = (tuned.double() - base.double()).norm()
    assert layer["noise"] == pytest.approx(float((step.double().square() / 12).sum().sqrt() / change))
    above = f"{100 * (1 - layer['noise'] ** 2):.4g} %"
    said = any(f"{above} of the difference is a change, the rest rounding noise" in note for note in found.notes)
    assert said is (above != "100 %")  # nothing is said of a rest that is none


@pytest.mark.parametrize(("rows", "most", "rank"), [(3, None, 3), (8, None, 8), (9, None, 4), (8, 6, 4)])
def test_few_new_embeddings_are_exact(rows: int, most: int | None, rank: int, tmp_path: Path) -> None:
    """Up to twice as many rows as the rule gives ranks; a ceiling for every rule stays one."""
    key = "model.embed_tokens.weight"
    base, tuned = rand(40, 16, seed=1), rand(40, 16, seed=1)
    tuned[5 : 5 + rows] += rand(rows, 16, seed=2)
    save_file({key: base}, tmp_path / "base.safetensors")
    save_file({key: tuned}, tmp_path / "tuned.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "a.safetensors"
    (layer,) = lora_merge.extract(*paths, rank=4, max_rank=most).layers.values()
    assert layer["rank"] == rank
    assert (layer["residual"] < 1e-6) == (rank == rows)


def changed(folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Return a tuned checkpoint with other tensors, or without them."""
    tensors = {**load_file(folder / "tuned.safetensors"), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


KEY = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({KEY: torch.zeros(3, 3)}, FitError, "another shape"),
        ({KEY: None}, FitError, "not in the tuned checkpoint"),
        ({"model.diffusion_model.new.weight": torch.ones(2, 2)}, FitError, "only in the tuned checkpoint"),
        ({KEY: torch.full((16, 16), torch.nan)}, InputError, "NaN"),
    ],
)
def test_checkpoints_that_are_not_of_one_model_are_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], words: str
) -> None:
    output = tmp_path / "a.safetensors"
    with pytest.raises(error) as caught:
        lora_merge.extract(folder / "base.safetensors", changed(folder, tmp_path, change), output)
    assert words in str(caught.value) and next(iter(change)) in str(caught.value)
    assert not output.exists()


def test_checkpoints_of_two_models_are_named(folder: Path, tmp_path: Path) -> None:
    save_file(flux(), tmp_path / "flux.safetensors")
    with pytest.raises(FitError, match=r"different models: Stable Diffusion 1 and .*Flux\.1"):
        lora_merge.extract(folder / "base.safetensors", tmp_path / "flux.safetensors", tmp_path / "a.safetensors")


@pytest.mark.parametrize(("tensors", "what"), [
    ({"emb_params": torch.ones(4, 768)}, "an embedding"), ({"decoder.conv_in.weight": torch.ones(4, 4, 3, 3)}, "a VAE"),
    ({"body.0.rdb1.conv1.weight": torch.ones(4, 4, 3, 3)}, "an upscaler"),
    ({"control_model.input_hint_block.0.weight": torch.ones(4, 3, 3, 3)}, "a ControlNet"),
])  # fmt: skip
def test_file_of_another_kind_is_named_as_a_merge_names_it(
    folder: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], what: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    files = folder / "base.safetensors", tmp_path / "x.safetensors"
    for pair, words in ((files, f"Stable Diffusion 1 and {what}"), (files[::-1], f"{what}.* and Stable Diffusion 1")):
        with pytest.raises(FitError, match=f"different models: {words}"):
            lora_merge.extract(*pair, tmp_path / "a.safetensors")


def test_layer_of_another_shape_is_of_another_model(tmp_path: Path) -> None:
    """Only embeddings and heads grow. Two language models are named by their classes."""
    for name, rows in (("Llama", 8), ("Mistral", 12)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": name.lower(), "architectures": [f"{name}ForCausalLM"]})
        )
        layers = {f"model.layers.{n}.self_attn.q_proj.weight": rand(rows, 8, seed=n) for n in range(2)}
        save_file({"model.embed_tokens.weight": rand(20, 8)} | layers, tmp_path / name / "model.safetensors")
    with pytest.raises(FitError, match=r"different models: Llama\w+ and Mistral") as caught:
        lora_merge.extract(tmp_path / "Llama", tmp_path / "Mistral", tmp_path / "out")
    assert "skip" not in caught.value.fix and not (tmp_path / "out").exists()


def test_weights_that_grew_are_left_out_and_named_where_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path, {KEY: torch.zeros(20, 16)})
    report = lora_merge.extract(
        folder / "base.safetensors", other, tmp_path / "o.safetensors", rank=4, unmatched="skip"
    )
    assert any("of another shape" in note and KEY in note for note in report.notes)
    assert not any("attentions_0_transformer_blocks_0_attn1_to_q" in name for name in report.layers)


@pytest.mark.parametrize("shape", [(0,), (0, 0), (4, 0), (0, 4), (4, 0, 3, 3)])
def test_weight_without_numbers_has_no_difference(tmp_path: Path, shape: tuple[int, ...]) -> None:
    empty, paths = {"b.weight": torch.zeros(shape)}, [tmp_path / name for name in ("base", "tuned", "none")]
    for path, tensors in zip(paths, ({"a.weight": torch.zeros(4, 4)}, {"a.weight": torch.ones(4, 4)}, {}), strict=True):
        save_file(tensors | empty, path)
    report = lora_merge.extract(paths[0], paths[1], tmp_path / "a.safetensors", rank=1)
    assert len(report.layers) == 1
    with pytest.raises(FitError, match="no weight is left to compare"):
        lora_merge.extract(paths[2], paths[2], tmp_path / "b.safetensors")


def test_equal_checkpoints_have_no_difference(folder: Path, tmp_path: Path) -> None:
    base = folder / "base.safetensors"
    with pytest.raises(InputError, match="nothing to extract"):
        lora_merge.extract(base, base, tmp_path / "a.safetensors")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("rank", "same"), ("others", "half"), ("format", "webp"),
                                               ("include", ["nose"]), ("exclude", ["re:("])])  # fmt: skip
def test_wrong_option_is_refused(folder: Path, tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError):
        lora_merge.extract(folder / "base.safetensors", folder / "tuned.safetensors", tmp_path / "a.safetensors",
                           **{option: value})  # type: ignore[arg-type]  # fmt: skip


def test_noise_is_a_rule_of_extract_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="noise"):
        lora_merge.resize(folder / "lora.safetensors", tmp_path / "a.safetensors", rank="noise")


@pytest.mark.parametrize("options", [("--rank", "energy:0.9"), ("--format", "peft", "--include", "unet", "--others",
                                     "skip", "--algorithm", "lora")])  # fmt: skip
def test_extraction_is_replayed_and_proven_from_its_recipe(
    folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / ("o" if "peft" in options else "o.safetensors")
    again = tmp_path / "again" / out.name  # the name is the title in the metadata
    base, tuned = folder / "base.safetensors", folder / "all.safetensors"
    steps = (
        ("extract", base, tuned, "-o", out, *options),
        ("verify", out, "--search", folder),
        ("replay", out, "-o", again, "--search", folder),
    )
    for step in steps:
        code, _, told = run(*step)
        assert code == 0, told
    for made in [*out.iterdir()] if out.is_dir() else [out]:
        assert made.read_bytes() == (again / made.name if out.is_dir() else again).read_bytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Flux in its authors' layout, the same tuned in every parameter, and that in diffusers' names."""
    made = tmp_path_factory.mktemp("flux")
    base = flux()
    tuned = {k: v + rand(*v.shape, seed=77) for k, v in base.items()}
    save_file(base, made / "base.safetensors")
    save_file(tuned, made / "native.safetensors")
    (part,) = CheckpointCache().base(made / "native.safetensors", None)[1].parts
    renamed = {}
    for name, view in part.views(CANONICAL).items():
        rows = [tuned[p.key].reshape(-1, p.cols)[p.start : p.stop] for p in view.row_slices]
        renamed[name] = torch.cat(rows).reshape(view.shape)
    save_file(renamed, made / "diffusers.safetensors")
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("to", [name for name, row in DIALECTS.items() if row.any_model])
@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_layouts_of_both_sides_may_differ_in_every_dialect(models: Path, tmp_path: Path, layout: str, to: str) -> None:
    base, tuned = models / "base.safetensors", models / f"{layout}.safetensors"
    output = tmp_path / ("o" if DIALECTS[to].folder else "o.safetensors")
    if to == "diffusers":  # it has no keys for norms
        with pytest.raises(FitError, match="cannot store biases and norms"):
            lora_merge.extract(base, tuned, output, rank="exact", format=to)
        return
    lora_merge.extract(base, tuned, output, rank="exact", format=to)
    again = merged(base, output)
    for name, value in load_file(models / "native.safetensors").items():
        assert torch.allclose(again[name], value, rtol=0, atol=2e-6), name


def test_size_is_shared_by_all_layers_and_a_rule_for_a_part_wins(models: Path, tmp_path: Path) -> None:
    base, tuned = models / "base.safetensors", models / "native.safetensors"
    report = lora_merge.extract(base, tuned, tmp_path / "a.safetensors", rank="size:4kB", others="skip")
    assert (
        3000
        < sum(t.nbytes for n, t in load_file(tmp_path / "a.safetensors").items() if not n.endswith("alpha"))
        <= 4000
    )
    assert len({layer["rank"] for layer in report.layers.values()}) > 1
    report = lora_merge.extract(base, tuned, tmp_path / "b.safetensors", rank=1, rank_for={"re:mlp": 3})
    ranks = {name: layer["rank"] for name, layer in report.layers.items() if layer["rank"]}
    assert {n for n, r in ranks.items() if r == 3} == {n for n in ranks if "mlp" in n}


def test_planted_kronecker_product_is_found_and_the_nearest_one_has_the_least_error(tmp_path: Path) -> None:
    """The oracle is numpy's decomposition of the rearranged difference."""
    key = "model.diffusion_model.{}.weight"
    shapes = {"time_embed.0": (12, 18), "input_blocks.0.0": (8, 6, 3, 3)}
    base = {**load_file(save_sd1(tmp_path)), **{key.format(n): rand(*s) for n, s in shapes.items()}}
    w1, w2 = rand(3, 3, seed=1), rand(4, 6, seed=2)
    noise = rand(8, 6, 3, 3, seed=3)
    tuned = {**base, key.format("time_embed.0"): base[key.format("time_embed.0")] + torch.kron(w1, w2),
             key.format("input_blocks.0.0"): base[key.format("input_blocks.0.0")] + noise}  # fmt: skip
    save_file(base, tmp_path / "b.safetensors")
    save_file(tuned, tmp_path / "t.safetensors")
    report = lora_merge.extract(tmp_path / "b.safetensors", tmp_path / "t.safetensors", tmp_path / "a.safetensors",
                                algorithm="lokr", factor=3)  # fmt: skip
    planted, nearest = (report.layers[f"lora_unet_{n}"] for n in ("time_embedding_linear_1", "conv_in"))
    assert planted["residual"] < 1e-5 and planted["algorithm"] == "lokr"
    turned = noise.double().reshape(2, 4, 2, 3, 9).permute(0, 2, 1, 3, 4).reshape(4, 108).numpy()
    values = np.linalg.svd(turned, compute_uv=False)
    assert nearest["residual"] == pytest.approx(np.sqrt((values[1:] ** 2).sum() / (values**2).sum()), rel=1e-4)
    again = merged(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    assert torch.allclose(again[key.format("time_embed.0")], tuned[key.format("time_embed.0")], rtol=0, atol=1e-6)
    low = lora_merge.extract(tmp_path / "b.safetensors", tmp_path / "t.safetensors", tmp_path / "l.safetensors",
                             algorithm="lokr", factor=3, rank=1)  # fmt: skip
    assert {layer["rank"] for layer in low.layers.values()} == {1}


def save_sd1(folder: Path) -> Path:
    save_file(sd1(torch.float32), folder / "sd1.safetensors")
    return folder / "sd1.safetensors"


@pytest.mark.parametrize(("size", "factor"), [(n, f) for n in (1, 7, 12, 320, 1280) for f in (-1, 1, 4, 8, 50)])
def test_sizes_are_factored_as_lycoris_does(size: int, factor: int) -> None:
    from lycoris.functional.general import factorization

    assert factored(size, factor) == factorization(size, factor)


def test_file_of_an_unknown_model_has_kohyas_names(tmp_path: Path) -> None:
    base, tuned, output = (tmp_path / f"{name}.safetensors" for name in ("base", "tuned", "out"))
    save_file({"stack.0.lin.weight": rand(8, 8)}, base)
    save_file({"stack.0.lin.weight": rand(8, 8) + rand(8, 1, seed=1) @ rand(1, 8, seed=2)}, tuned)
    lora_merge.extract(base, tuned, output, rank=1)
    assert all(name.startswith("lora_unet_stack_0_lin.") for name in load_file(output))
    assert torch.allclose(merged(base, output)["stack.0.lin.weight"], load_file(tuned)["stack.0.lin.weight"], atol=1e-6)


@pytest.mark.parametrize("also_tuned", [False, True])
def test_quantised_checkpoints_are_compared_by_their_values(tmp_path: Path, *, also_tuned: bool) -> None:
    """The scales beside the codes are no parameters of the model."""
    name, change = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q", rand(16, 1) @ rand(1, 16)

    def coded(values: torch.Tensor) -> Tensors:
        mark = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
        scale = values.abs().max() / 400
        codes = (values / scale).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.comfy_quant": mark}

    def values(found: Tensors) -> torch.Tensor:
        return found[f"{name}.weight"].float() * found[f"{name}.weight_scale"]

    base = coded(rand(16, 16, seed=5))
    tuned = coded(values(base) + change) if also_tuned else {f"{name}.weight": values(base) + change}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    report = lora_merge.extract(
        tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "out.safetensors", rank="exact"
    )
    found = load_file(tmp_path / "out.safetensors")
    (up,), (down,) = (
        [v for k, v in found.items() if k.endswith(end)] for end in ("lora_up.weight", "lora_down.weight")
    )
    (alpha,) = (v for k, v in found.items() if k.endswith(".alpha"))
    want = (values(tuned) if also_tuned else tuned[f"{name}.weight"]) - values(base)
    torch.testing.assert_close(up.float() @ down.float() * alpha / len(down), want, atol=2e-3, rtol=0)
    assert report.verified is not None


def test_changed_weight_without_a_name_in_the_dialect_is_refused_or_reported(tmp_path: Path) -> None:
    """A stray tensor has the name of q in the words of diffusers, so that neither means it."""
    base = flux()
    qkv = "double_blocks.0.img_attn.qkv.weight"
    rows, cols = base[qkv].shape
    base["transformer_blocks.0.attn.to_q.weight"] = rand(rows // 3, cols)
    tuned = {k: v + rand(*v.shape) if k in (qkv, "single_blocks.0.linear2.weight") else v for k, v in base.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    both = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    with pytest.raises(FitError, match=qkv):
        lora_merge.extract(*both, tmp_path / "a.safetensors", format="diffusers")
    left = lora_merge.extract(*both, tmp_path / "left.safetensors", format="diffusers", unmatched="skip")
    assert any(qkv in note and "not written" in note for note in left.notes)
    lora_merge.extract(*both, tmp_path / "b.safetensors", format="diffusers", exclude=[f"re:{qkv}"])
    save_file({**tuned, qkv: base[qkv]}, tmp_path / "other.safetensors")
    equal = tmp_path / "base.safetensors", tmp_path / "other.safetensors"
    assert not any(qkv in n for n in lora_merge.extract(*equal, tmp_path / "c.safetensors", format="lycoris").notes)
    lora_merge.extract(*equal, tmp_path / "d.safetensors", format="kohya")


def test_base_that_was_saved_with_its_wrapper_is_compared_and_its_adapters_are_converted(tmp_path: Path) -> None:
    """torch.compile and DDP put a level in front of every name."""
    base = {f"_orig_mod.{k}": v for k, v in flux().items()}
    tuned = {k: v + rand(*v.shape) for k, v in base.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    made = tmp_path / "a.safetensors"
    lora_merge.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", made, rank="exact", dtype="fp32")
    lora_merge.convert(made, tmp_path / "b.safetensors", to="comfy", base=tmp_path / "base.safetensors")
    for key, value in merged(tmp_path / "base.safetensors", tmp_path / "b.safetensors").items():
        torch.testing.assert_close(value, tuned[key], rtol=0, atol=1e-5)


def test_diffusers_has_no_factors_of_an_embedding(tmp_path: Path) -> None:
    """Its loader puts factors on linear layers and convolutions; kohya's words have a place."""
    table = "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight"
    base = {**sd1(torch.float32), table: rand(40, 24)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({**base, table: base[table] + rand(40, 24, seed=5)}, tmp_path / "tuned.safetensors")
    both = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    with pytest.raises(FitError, match="token_embedding"):
        lora_merge.extract(*both, tmp_path / "a.safetensors", format="diffusers", rank=2)
    made = tmp_path / "a.safetensors"
    lora_merge.extract(*both, made, rank=2)
    with pytest.raises(FitError, match="token_embedding"):
        lora_merge.convert(made, tmp_path / "b.safetensors", to="diffusers", base=both[0])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rank", "dtype"), [("2", torch.bfloat16), ("energy:0.9", torch.float16), ("1", torch.float32)]
)
def test_small_weights_have_the_factors_of_their_own_change(tmp_path: Path, rank: str, dtype: torch.dtype) -> None:
    """Among them are equal ones, rows, columns, convolutions and matrices of rank 1."""
    shapes = [(4, 6), (6, 4), (1, 1), (3, 2, 1, 1), (1, 5), (5, 1)]
    base = {f"layers.{n}.q.weight": rand(*shapes[n % len(shapes)], seed=n).to(dtype) for n in range(120)}
    tuned = {k: v + (n % 7 > 0) * rand(*v.shape, seed=500 + n).to(dtype) for n, (k, v) in enumerate(base.items())}
    tuned["layers.6.q.weight"] = base["layers.6.q.weight"] + torch.ones(4, 6).to(dtype)
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", out, rank=rank)
    factors = load_file(out)
    for key, weight in base.items():
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        change = (tuned[key].double() - weight.double()).flatten(1).numpy()
        if not change.any():
            assert not any(k.startswith(f"{name}.") for k in factors), name
            continue
        up, down = (factors[f"{name}.lora_{slot}.weight"].flatten(1).double().numpy() for slot in ("up", "down"))
        assert float(factors[f"{name}.alpha"]) == len(down), "scale 1"
        left, sizes, right = np.linalg.svd(change, full_matrices=False)
        energy = np.cumsum(sizes**2) / np.sum(sizes**2)
        wished = int(np.sum(energy < 0.9)) + 1 if rank == "energy:0.9" else int(rank)
        count = min(wished, int(np.sum(sizes > 1e-3 * sizes[0])))
        assert len(down) == count, name
        best = left[:, :count] * sizes[:count] @ right[:count]
        assert np.allclose(up @ down, best, rtol=0.01, atol=0.01 * sizes[0]), name


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 1, 1), (100, 90)])
@pytest.mark.parametrize(
    "options", [{"rank": "exact"}, {"algorithm": "lokr"}, {"algorithm": "full"}, {"rank": "size:1MiB"}]
)
def test_bias_of_several_axes_is_one_whole_difference(
    tmp_path: Path, shape: tuple[int, ...], options: dict[str, str]
) -> None:
    """Its factors would have the names of those of its layer's weight."""
    base = {"b.weight": rand(*shape), "b.bias": rand(*shape, seed=1)}
    tuned = {"b.weight": base["b.weight"], "b.bias": rand(*shape, seed=2)}
    both = {"b.weight": rand(*shape, seed=3), "b.bias": tuned["b.bias"]}
    for name, tensors in (("base", base), ("tuned", tuned), ("both", both)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    for name in ("tuned", "both"):
        adapter, merged = tmp_path / f"adapter-{name}.safetensors", tmp_path / f"merged-{name}.safetensors"
        files = [tmp_path / f"{n}.safetensors" for n in ("base", name)]
        lora_merge.extract(*files, adapter, format="kohya", **options)  # type: ignore[arg-type]
        assert torch.equal(load_file(adapter)["lora_unet_b.diff_b"], tuned["b.bias"] - base["b.bias"])
        lora_merge.merge(files[0], [adapter], merged)
        assert torch.allclose(load_file(merged)["b.bias"], tuned["b.bias"], rtol=0, atol=1e-6)


def test_noise_of_whole_numbers_is_not_known(tmp_path: Path) -> None:
    save_file({"b.weight": rand(4, 4)}, tmp_path / "base.safetensors")
    save_file({"b.weight": torch.arange(16).reshape(4, 4)}, tmp_path / "tuned.safetensors")
    with pytest.raises(InputError, match="rounding errors of quantised weights and of whole numbers"):
        lora_merge.extract(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned")), tmp_path / "o", rank="noise")


@pytest.mark.parametrize("size", [1e200, 1e-200])
@pytest.mark.parametrize("layers", [1, 3])
def test_changes_whose_squares_fp64_cannot_hold_are_refused(tmp_path: Path, size: float, layers: int) -> None:
    base = {f"b.{i}.weight": torch.zeros(4, 4, dtype=torch.float64) for i in range(layers)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({k: torch.full_like(v, size) for k, v in base.items()}, tmp_path / "tuned.safetensors")
    with pytest.raises(InputError, match=r"too (large|small) to be computed"):
        lora_merge.extract(*(tmp_path / f"{n}.safetensors" for n in ("base", "tuned")), tmp_path / "o.safetensors")


def test_proof_reads_whole_matrices_as_the_file_stores_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by rows: widened at once they would take several times the memory of a weight; a wrong number is
    seen."""
    given = (folder / "base.safetensors", folder / "all.safetensors", tmp_path / "o.safetensors")
    read, rows = WeightReader.__call__, list[int]()

    def counted(self: WeightReader, info: StoredTensor, shape: Shape, entries: Any = None) -> Any:
        rows.append(shape[0] if entries is None else len(entries))
        return read(self, info, shape, entries)

    monkeypatch.setattr(written_proof, "CHANGE_VALUES", 1)
    monkeypatch.setattr(extraction_proof, "CHANGE_VALUES", 1)
    monkeypatch.setattr(WeightReader, "__call__", counted)
    report = lora_merge.extract(*given, algorithm="full")
    assert report.verified is not None and report.verified["ok"] and {*rows} == {1}
    tensors = load_file(given[2])
    name = next(name for name, value in tensors.items() if name.endswith(".diff") and value.ndim == 2)
    tensors[name][0, 0] += 1
    with safe_open(given[2], "pt") as f:
        save_file(tensors, given[2], f.metadata())
    code, _, told = run("verify", given[2], "--search", folder)
    assert code == 6, told


@pytest.mark.few(2)
@pytest.mark.parametrize(("command", "options"), [
    ("combine", []), ("combine", ["--format", "peft", "--include", "unet"]), ("resize", ["--rank", "2", "--alpha", "rank"]),
    ("convert", ["--to", "lycoris", "--rank", "2"]), ("extract", ["--rank", "exact"]), ("average", ["--space", "factors"]),
], ids=["combine", "combine-peft", "resize", "convert", "extract", "average"])  # fmt: skip
def test_full_proof_of_a_written_adapter_computes_every_layer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: list[str]
) -> None:
    """Without --full it is a sample. The recipe states all options, so that others are refused, and not dropped."""
    monkeypatch.setattr(written_proof, "BUDGET", 1)
    lora, base = folder / "lora.safetensors", folder / "base.safetensors"
    inputs = {"extract": [base, folder / "tuned.safetensors"], "convert": [lora, "--base", base], "resize": [lora],
              "combine": [f"{lora}:0.5", lora, "--base", base]}.get(command, [lora, lora])  # fmt: skip
    output = tmp_path / ("o" if "peft" in options else "o.safetensors")
    code, _, said = run(command, *inputs, *options, "-o", output)
    assert code == 0, said
    sample, full = (lora_merge.verify(output, search=[folder], full=full) for full in (False, True))
    assert (sample["full"], full["full"]) == (False, True)
    assert 1 <= sample["recomputed"] < sample["layers"] == full["recomputed"] == full["layers"]
    code, _, said = run("verify", output, "--search", folder, "--on-overflow", "saturate")
    assert code == 2 and "--on-overflow" in said, said


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj.weight"])
def test_stacked_experts_of_a_model_without_a_table_have_no_factors(tmp_path: Path, name: str) -> None:
    """They were written as those of a kernel, and refused as an adapter that does not fit its own base."""
    base = {f"model.layers.0.mlp.experts.{name}": rand(4, 16, 24)}
    save_file(base, tmp_path / "base.safetensors")
    save_file({k: v + rand(4, 16, 24, seed=1) for k, v in base.items()}, tmp_path / "tuned.safetensors")
    pair = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
    with pytest.raises(FitError, match="the weights of stacked experts"):
        lora_merge.extract(*pair, tmp_path / "a.safetensors", rank=2)
    lora_merge.extract(*pair, tmp_path / "b.safetensors", algorithm="full")
