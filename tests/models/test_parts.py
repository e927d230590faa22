"""Parts of a model mean the same in every option that takes one, and a part without effect is refused in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.errors import AmbiguousName, UnmatchedModules, UsageError
from lora_merge.job import Adapter
from lora_merge.models.part_factors import Strengths
from lora_merge.safe_regex import Steps
from tests.kit.adapters import kohya
from tests.kit.blocks import names_of
from tests.kit.command_line import run
from tests.kit.files import load, save
from tests.kit.models import TE, UNET, sd1
from tests.kit.pairs import WHOLE
from tests.kit.tensors import Tensors, rand

OPTIONS: dict[str, tuple[str, ...]] = {
    "--strength-for": ("merge", "{base}", "{lora}", "--strength-for", "{part}=0.5"),
    "of one adapter": ("merge", "{base}", "{lora}:0.8,{part}=0.5"),
    "--include": ("combine", "{lora}", "{other}", "--include", "{part}"),
    "--exclude": ("combine", "{lora}", "{other}", "--exclude", "{part}"),
    "--include with a base": ("combine", "{lora}", "{other}", "--base", "{base}", "--include", "{part}"),
    "--exclude of extract": ("extract", "{base}", "{tuned}", "--rank", "2", "--exclude", "{part}"),
    "--rank-for": ("resize", "{lora}", "--rank", "3", "--rank-for", "{part}=1"),
    "--rank-for with a base": ("resize", "{lora}", "--base", "{base}", "--rank", "3", "--rank-for", "{part}=1"),
    "--rank-for of combine": ("combine", "{lora}", "{other}", "--rank", "3", "--rank-for", "{part}=1"),
    "--rank-for of extract": ("extract", "{base}", "{tuned}", "--rank", "3", "--rank-for", "{part}=1"),
    "--rank-for of convert": ("convert", "{lora}", "--to", "diffusers", "--base", "{base}", "--rank", "3", "--rank-for", "{part}=1"),
}  # fmt: skip
BASED = [name for name, words in OPTIONS.items() if "{base}" in words]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, tensors = tmp_path_factory.mktemp("parts"), sd1()
    save(tensors, folder / "base.safetensors")
    save({k: v for k, v in tensors.items() if k.startswith(UNET)}, folder / "unet.safetensors")
    clip = {k.removeprefix(TE): v for k, v in tensors.items() if k.startswith(TE)}
    more = {
        "embeddings.token_embedding.weight": (50, 24),
        "embeddings.position_embedding.weight": (10, 24),
        "final_layer_norm.weight": (24,),
        "final_layer_norm.bias": (24,),
    }
    save({**{f"text_model.{k}": rand(*shape) for k, shape in more.items()}, **clip}, folder / "te.safetensors")
    lora, other = (kohya(tensors, seed=seed) for seed in (100, 300))
    save(lora, folder / "lora.safetensors")
    save(other, folder / "other.safetensors")
    for name in ("te_", "unet_"):
        save({k: v for k, v in lora.items() if k.startswith(f"lora_{name}")}, folder / f"of_{name}.safetensors")
    lora_merge.merge(folder / "base.safetensors", folder / "lora.safetensors", folder / "tuned.safetensors")
    return {path.stem: str(path) for path in folder.glob("*.safetensors")}


def called(option: str, part: str, files: dict[str, str], out: Path, *more: str) -> tuple[int, str]:
    words = (word.format(**files, part=part) for word in OPTIONS[option])
    return run(*words, "-o", out, *more)[::2]


@pytest.mark.few(2)
@pytest.mark.parametrize("part", ["re:no_such_name", "te7", "no_such_stack"])
@pytest.mark.parametrize("option", OPTIONS)
def test_part_that_matches_nothing_is_refused_by_every_option(
    option: str, part: str, files: dict[str, str], tmp_path: Path
) -> None:
    """In the plan, so that `--dry-run` reports it too."""
    for more in ((), ("--dry-run",)):
        code, text = called(option, part, files, tmp_path / "out.safetensors", *more)
        assert code == 2, text
        assert f"{part}" in text.partition("where:")[2].partition("fix:")[0]
    assert not [*tmp_path.iterdir()]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "part", ["unet", "denoiser", "B01", "input_blocks.1", "down_blocks.0", r"re:input_blocks\.1\."]
)
@pytest.mark.parametrize("option", BASED)
def test_every_option_knows_the_parts_of_a_base(option: str, part: str, files: dict[str, str], tmp_path: Path) -> None:
    code, text = called(option, part, files, tmp_path / "out.safetensors", "--dry-run")
    assert code == 0, text


def test_options_choose_the_same_layers(files: dict[str, str], tmp_path: Path) -> None:
    """The layers that `--include` writes are those that `--rank-for` cuts, and that `--strength-for` changes."""
    out = tmp_path / "out.safetensors"
    every = load(Path(files["base"]))
    parts = ("te", "B01-B02", r"re:attn2\.to_k", *(("B01", "input_blocks.2", "*attn1*") if WHOLE else ()))
    for part in parts:
        chosen: list[set[str]] = []
        merged = lora_merge.merge(
            files["base"], [lora_merge.Adapter(files["lora"], 1.0, ((part, 0),))], out, overwrite=True
        )
        plain = load(Path(files["tuned"]))
        chosen.append({k for k, v in load(Path(merged.output)).items() if v.equal(every[k]) and not v.equal(plain[k])})
        tensors = load(
            Path(lora_merge.combine([files["lora"]], out, base=files["base"], include=[part], overwrite=True).output)
        )
        stems = {k.partition(".")[0] for k in tensors}
        lora_merge.resize(files["lora"], out, rank=4, rank_for={part: 1}, base=files["base"], overwrite=True)
        cut = {k.partition(".")[0] for k, v in load(out).items() if k.endswith("down.weight") and len(v) == 1}
        assert stems == cut and len(stems) == len(chosen[0]) > 0, part


def test_part_of_one_of_several_adapters_has_an_effect(files: dict[str, str], tmp_path: Path) -> None:
    """A part for all adapters needs one that changes weights there; a part of one adapter needs that adapter."""
    both = [files["of_te_"], files["of_unet_"]]
    lora_merge.plan(files["base"], both, tmp_path / "x.safetensors", strength_for={"te": 0.5})
    named = [files["of_te_"], lora_merge.Adapter(files["of_unet_"], 1.0, (("te", 0.5),))]
    with pytest.raises(UsageError, match="without effect"):
        lora_merge.plan(files["base"], named, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="without effect"):
        lora_merge.plan(files["base"], [files["of_te_"]], tmp_path / "x.safetensors", strength_for={"vae": 0})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("base", "part"), [("unet", "te"), ("te", "unet"), ("unet", "text_encoder"), ("te", "transformer")]
)
def test_factor_0_leaves_out_a_network_that_the_base_lacks(
    base: str, part: str, files: dict[str, str], tmp_path: Path
) -> None:
    source, lora = load(Path(files[base])), load(Path(files["lora"]))
    report = lora_merge.merge(files[base], files["lora"], tmp_path / "out.safetensors", strength_for={part: 0})
    alone = files["of_unet_" if base == "unet" else "of_te_"]
    lora_merge.merge(files[base], alone, tmp_path / "alone.safetensors")
    found, wanted = load(tmp_path / "out.safetensors"), load(tmp_path / "alone.safetensors")
    assert found.keys() == source.keys() and all(value.equal(wanted[key]) for key, value in found.items())
    assert any(not value.equal(source[key]) for key, value in found.items())
    told = json.loads(report.to_json())
    assert "left out because its strength is 0" in json.dumps(told)
    assert lora_merge.verify(tmp_path / "out.safetensors", search=[Path(alone).parent])["proven"]
    assert len(lora) > len(load(Path(alone)))


@pytest.mark.few(5)
@pytest.mark.parametrize("part", ["te", "te1", "clip_l", "text_encoder", "CLIP", "te BASE", "te1 CLIP"])
@pytest.mark.parametrize(
    "prefix", ["lora_te1_text_model_encoder_layers_0_", "text_encoders.clip_l.transformer.text_model.encoder.layers.0."]
)
def test_factor_0_leaves_out_an_encoder_by_any_of_its_names(part: str, prefix: str) -> None:
    """Of an adapter in the words of kohya and of ComfyUI, where the base is the denoiser alone, as ComfyUI stores it."""
    strengths = Strengths(Adapter(Path("a"), 1.0, ((part, 0.0),)), names_of("native/flux-dev"), Steps())
    strengths.check(dict.fromkeys(strengths.names.shapes, "transformer"))
    assert strengths.leaves_out(f"{prefix}q")
    every = part.partition(" ")[0] in ("te", "CLIP")
    assert strengths.leaves_out("lora_te2_encoder_block_0_layer_0_SelfAttention_q") is every


@pytest.mark.parametrize(("names", "part", "kind"), [
    (("unet", "lora"), {"te": 0.5}, UsageError), (("unet", "of_unet_"), {"te": 0}, UsageError),
    (("unet", "lora"), {"te": 0, "vae": 0}, UsageError), (("unet", "lora"), {"no_such": 0}, UsageError),
    (("unet", "lora"), {"vae": 0}, (UsageError, UnmatchedModules)), (("unet", "of_te_"), {"te": 0}, UnmatchedModules),
])  # fmt: skip
def test_absent_network_needs_factor_0_and_modules_in_the_adapter(
    names: tuple[str, str], part: dict[str, float], kind: Any, files: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(kind):
        lora_merge.merge(files[names[0]], files[names[1]], tmp_path / "out.safetensors", strength_for=part)


@pytest.mark.few(2)
@pytest.mark.parametrize("option", ["strength_for", "rank_for", "exclude"])
def test_part_of_the_defaults_of_a_batch_needs_an_effect_on_one_job(
    option: str, files: dict[str, str], tmp_path: Path
) -> None:
    """Jobs that lack it are made without it, with a note; a part of one job must fit that job."""
    value: Any = {"strength_for": {"te": 0.5}, "rank_for": {"te": 1}, "exclude": ["te"]}[option]
    merging = option == "strength_for"
    common = {"base": files["base"], "overwrite": True, **({} if merging else {"command": "resize", "rank": 2})}
    jobs = [
        {"adapters": [files[name]], "output": str(tmp_path / f"{name}.safetensors")} for name in ("lora", "of_unet_")
    ]
    reports = lora_merge.run_batch({"version": 1, "defaults": {**common, option: value}, "jobs": jobs})
    assert [report.ok for report in reports] == [True, True]
    notes = [
        "left out: it has no effect on this job" in report.to_json()
        for report in sorted(reports, key=lambda r: r.number)
    ]
    assert notes == [False, True]
    with pytest.raises(UsageError, match="without effect"):
        lora_merge.run_batch({"version": 1, "defaults": {**common, option: value}, "jobs": jobs[1:]})
    one = [jobs[0], {**jobs[1], option: value}]
    found = lora_merge.run_batch({"version": 1, "defaults": common, "jobs": one})
    assert {report.number: report.ok for report in found} == {1: True, 2: False}


def wan(width: int = 16) -> Tensors:
    block = "blocks.0"
    return {
        "head.modulation": rand(1, 2, width), "patch_embedding.bias": rand(width), "text_embedding.2.weight": rand(width, width),
        **{f"{block}.{attn}.{n}.weight": rand(width, width, seed=k) for k, n in enumerate("qkvo") for attn in ("self_attn", "cross_attn")},
        **{f"{block}.{attn}.norm_q.weight": rand(width) for attn in ("self_attn", "cross_attn")},
        f"{block}.ffn.0.weight": rand(2 * width, width), f"{block}.ffn.2.weight": rand(width, 2 * width),
    }  # fmt: skip


@pytest.mark.parametrize(("off", "changed"), [("transformer_2", "transformer"), ("transformer", "transformer_2")])
def test_factor_0_settles_a_name_of_two_experts(off: str, changed: str, tmp_path: Path) -> None:
    """Wan 2.2 has two transformers with the same names, and a LoRA of one of them does not state which."""
    for part in ("transformer", "transformer_2"):
        (tmp_path / "wan" / part).mkdir(parents=True)
        (tmp_path / "wan" / part / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
        save(wan(), tmp_path / "wan" / part / "diffusion_pytorch_model.safetensors")
    table = {part: ["diffusers", "WanTransformer3DModel"] for part in ("transformer", "transformer_2")}
    (tmp_path / "wan" / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **table}))
    name = "blocks.0.self_attn.q"
    lora = {f"diffusion_model.{name}.lora_{x}.weight": rand(*shape) for x, shape in (("A", (4, 16)), ("B", (16, 4)))}
    save(lora, tmp_path / "lora.safetensors")
    with pytest.raises(AmbiguousName):
        lora_merge.plan(tmp_path / "wan", tmp_path / "lora.safetensors", tmp_path / "out")
    lora_merge.merge(tmp_path / "wan", tmp_path / "lora.safetensors", tmp_path / "out", strength_for={off: 0})
    delta = lora["diffusion_model.blocks.0.self_attn.q.lora_B.weight"] @ lora[f"diffusion_model.{name}.lora_A.weight"]
    for part in (off, changed):
        found = load(tmp_path / "out" / part / "diffusion_pytorch_model.safetensors")
        wanted = wan()
        wanted[f"{name}.weight"] = wanted[f"{name}.weight"] + (delta if part == changed else 0)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value)
