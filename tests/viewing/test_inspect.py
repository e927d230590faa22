"""`inspect` says what a file is from its header alone, without torch."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import lora_merge
from lora_merge.errors import FitError
from lora_merge.facts import THOUSANDS
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.formats.unread import METADATA_FORMATS, SIGNS
from lora_merge.files.safetensors import layout
from lora_merge.text import size
from lora_merge.viewing.compare import compare
from lora_merge.viewing.file_verdict import model_of, table_of_files
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.json_schemas import schema_of
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.inspected import lines
from tests.kit.models import sd1
from tests.kit.tensors import rand
from tests.viewing.conftest import Scene

HEADERS = Path(__file__).parents[1] / "headers"


def hollow(inventory: str, path: Path, dtype: str = "F16") -> Path:
    """A full-size checkpoint without its data: header, then a hole of the right length."""
    shapes = json.loads(gzip.decompress((HEADERS / f"{inventory}.json.gz").read_bytes()))
    header = layout([(name, dtype, tuple(shape)) for name, shape in shapes.items()], {"format": "pt"}, 0)
    size = 0
    for shape in shapes.values():
        count = 1
        for d in shape:
            count *= d
        size += 2 * count
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + size)
    return path


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("inventory", "architecture", "components"),
    [
        ("single-file/sdxl", "Stable Diffusion XL", {"unet", "te1", "te2", "vae"}),
        ("native/flux-dev", "Flux", {"transformer"}),
        ("native/qwen-image", "Qwen", {"transformer"}),
    ],
)
def test_full_size_checkpoints_are_recognised(
    tmp_path: Path, inventory: str, architecture: str, components: set[str]
) -> None:
    path = hollow(inventory, tmp_path / "model.safetensors")
    facts = inspect(path)
    assert facts["kind"] == "checkpoint"
    assert architecture.lower() in facts["architecture"].lower()
    assert components <= set(facts["components"])
    assert facts["bytes"] == path.stat().st_size
    assert facts["dtypes"] == {"fp16": facts["parameters"]}


def test_adapter_shows_algorithm_rank_alpha_and_names(tmp_path: Path) -> None:
    path = save(kohya(sd1(), rank=4, alpha=2.0), tmp_path / "a.safetensors", {"ss_network_module": "networks.lora"})
    facts = inspect(path)
    assert (facts["kind"], facts["algorithms"], facts["ranks"], facts["alphas"]) == (
        "adapter",
        {"lora": 20},
        [4],
        [2.0],
    )
    assert set(facts["names"]) == {"lora_unet_", "lora_te_"}
    assert "kohya" in facts["trainer"]
    assert any(line.startswith("algorithms") and "lora 20" in line for line in lines(facts))


def test_ia3_is_an_adapter_and_an_embedding_is_called_one(tmp_path: Path) -> None:
    """Half of (IA)³'s tensors have names that any model's have."""
    lora = {"lycoris_a.weight": torch.ones(4, 1), "lycoris_a.on_input": torch.zeros((), dtype=torch.bool)}
    assert inspect(save(lora, tmp_path / "a.safetensors"))["algorithms"] == {"ia3": 1}
    facts = inspect(save({"<cat>": torch.ones(4)}, tmp_path / "b.safetensors"))
    assert "textual inversion" in facts["looks_like"]


@pytest.mark.parametrize(("keys", "start", "level"), [
    (("encoder.conv_in.weight", "decoder.conv_in.weight", "quant_conv.weight"), "VAE, fp32", "good"),
    (("decoder.layers.1.weight", "decoder.layers.3.conv.0.weight"), "VAE (tiny, TAESD), fp32", "good"),
    (("model.0.weight", "model.1.sub.0.RDB1.conv1.0.weight"), "Upscaler (ESRGAN), fp32", "good"),
    (("controlnet_cond_embedding.conv_in.weight", "a.attn2.to_k.weight"), "ControlNet for Stable Diffusion 1, fp32", "warning"),
    (("image_proj.norm.weight", "ip_adapter.1.to_k_ip.weight"), "IP-Adapter for Stable Diffusion 1, fp32", "warning"),
    (("emb_params",), "Embedding (textual inversion) for Stable Diffusion 1, fp32", "warning"),
    (("strange.weight",), "Model of an unknown architecture, fp32", "good"),
])  # fmt: skip
def test_component_of_a_pipeline_is_named_first(tmp_path: Path, keys: tuple[str, ...], start: str, level: str) -> None:
    facts = inspect(save({key: torch.ones(2, 768) for key in keys}, tmp_path / "a.safetensors"))
    assert facts["verdict"]["level"] == level
    assert facts["verdict"]["text"].startswith(f"{start}, ")
    assert facts["verdict"]["text"].endswith("nothing to merge.") == (level == "warning")
    of_models = [row for row in lines(facts) if row.startswith(("architecture", "layout", "components", "blocks"))]
    assert bool(of_models) == (level == "good")


def test_pair_shows_what_fits_and_what_does_not(tmp_path: Path) -> None:
    base = save({k: v for k, v in sd1().items() if k.startswith("model.")}, tmp_path / "unet.safetensors")
    match = inspect(base, save(kohya(sd1()), tmp_path / "a.safetensors"))["match"]
    assert (match["matched"], match["total"], match["components"]) == (15, 20, {"unet": 15})
    assert len(match["unmatched"]) == 5
    assert "text encoder" in match["why"]


def test_merged_file_shows_its_recipe(tmp_path: Path) -> None:
    base, adapter = save(sd1(), tmp_path / "b.safetensors"), save(kohya(sd1()), tmp_path / "a.safetensors")
    lora_merge.merge(base, [(adapter, 0.5)], tmp_path / "o.safetensors")
    done = run("inspect", tmp_path / "o.safetensors", "--json")
    facts = json.loads(done.out)
    assert facts["recipe"]["adapters"][0]["strength"] == 0.5


def test_inspecting_imports_nothing_slow(tmp_path: Path) -> None:
    """torch takes a second to import, pydantic (which typer uses for some parameters) a tenth."""
    path = hollow("single-file/sdxl", tmp_path / "model.safetensors")
    code = (
        f"import sys\nfrom lora_merge.cli.main import main\nsys.argv = ['lora-merge', 'inspect', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "found = {'torch', 'numpy', 'pydantic', 'importlib.metadata'} & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no")
    done = run("inspect", tmp_path / "x.safetensors")
    assert done.code == 3
    assert done.err.startswith("error: ")


@pytest.mark.parametrize(
    ("n", "bytes_", "count"),
    [(0, "0 B", "0"), (999, "999 B", "999"), (1023, "1023 B", "1.02 K"), (999_999, "976.56 KiB", "1000.00 K"),
     (2_567_463_684, "2.39 GiB", "2.57 G"), (10**16, "9094.95 TiB", "10000.00 T")],
)  # fmt: skip
def test_large_numbers_are_short(n: int, bytes_: str, count: str) -> None:
    assert (size(n), size(n, *THOUSANDS)) == (bytes_, count)


def test_dtypes_are_counted_by_parameters(tmp_path: Path) -> None:
    path = save({"a": torch.zeros(3, 4), "b": torch.zeros(5).half()}, tmp_path / "m.safetensors")
    assert inspect(path)["dtypes"] == {"fp32": 12, "fp16": 5}


@pytest.mark.parametrize(
    "text", ['{"transformer.r": 2, "transformer.lora_alpha": 6, "transformer.alpha_pattern": {"x": 9}}', "{"]
)
def test_alpha_of_a_configuration_is_shown(tmp_path: Path, text: str) -> None:
    tensors = {"transformer.x.lora_A.weight": torch.zeros(2, 4), "transformer.x.lora_B.weight": torch.zeros(4, 2)}
    facts = inspect(save(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": text}))
    assert facts["alphas"] == ([6, 9] if len(text) > 1 else [])
    assert facts["trainer"] == "diffusers"


def test_quantised_weights_alone_are_called_so(tmp_path: Path) -> None:
    """For every sign of every storage format: in the facts, and in the line of the text."""
    weights = {"blocks.0.lin.weight": rand(8, 8), "norm.weight": rand(8)}
    cases: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {
        **{name: (weights | {f"blocks.0.lin.{name}": torch.ones(2)}, {}) for name in SIGNS},
        **{entry: (weights, {entry: '{"layers": {"blocks.0.lin": {}}}'}) for entry in METADATA_FORMATS},
        "codes": (weights | {"a.weight": torch.ones(4, 4, dtype=torch.uint8), "a.scale": torch.ones(4, 1)}, {}),
    }
    for name, (tensors, entries) in cases.items():
        path = save(tensors, tmp_path / "model.safetensors", {"format": "pt"} | entries)
        facts, said = inspect(path), open_checkpoint(path).unread.how
        assert facts["quantised"] == said != "", name
        assert name == "codes" or name in said
        (line,) = [line for line in lines(facts) if line.startswith("quantised ")]
        assert line.endswith(said)
    for entry, value in product(METADATA_FORMATS, ("", "none", "null", "{}", '{"layers": {}}')):
        if not (entry == "quantization_config" and "layers" in value):
            facts = inspect(save(weights, tmp_path / "plain.safetensors", {entry: value}))
            assert "quantised" not in facts, (entry, value)
    for plain in (weights, {k: v.to(torch.float8_e4m3fn) for k, v in weights.items()}, kohya(sd1()), sd1()):
        facts = inspect(save(plain, tmp_path / "plain.safetensors"))
        assert "quantised" not in facts
        assert not any(line.startswith("quantised") for line in lines(facts))


def test_folder_whose_configuration_says_so_is_quantised(tmp_path: Path) -> None:
    save({"model.embed_tokens.weight": rand(8, 8)}, tmp_path / "model.safetensors")
    for said, how in (({}, None), ({"quantization_config": {"quant_method": "fp8"}}, "fp8, says its config.json")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **said}))
        assert inspect(tmp_path).get("quantised") == how


def test_sizes_of_a_bases_weights_are_those_of_its_numbers(tmp_path: Path) -> None:
    """By part, block and kind of layer; numbers that are not finite are counted and left out."""
    tensors = sd1()
    name = next(name for name, t in tensors.items() if t.is_floating_point() and t.ndim == 2)
    tensors[name][0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    sizes = inspect(save(tensors, tmp_path / "base.safetensors"), weights=True)["sizes"]
    numbers = {key: t.double()[t.isfinite()] for key, t in tensors.items() if t.is_floating_point()}
    assert sizes["tensors"].keys() == numbers.keys() != tensors.keys()
    assert sizes["all"]["broken"] == sizes["tensors"][name]["broken"] == 2
    for key, found in sizes["tensors"].items():
        assert found["norm"] == pytest.approx(float(numbers[key].norm()), rel=1e-5)
        assert found["largest"] == pytest.approx(float(numbers[key].abs().max()))
        assert (found["of"], found["zeros"]) == (tensors[key].numel(), int((tensors[key] == 0).sum()))
    squares = sum(float(values.square().sum()) for values in numbers.values())
    for kind in ("components", "kinds", "tensors"):
        assert sum(row["norm"] ** 2 for row in sizes[kind].values()) == pytest.approx(squares, rel=1e-5)
        assert sum(row["of"] for row in sizes[kind].values()) == sizes["all"]["of"]
    assert {"cross-attention", "feed-forward"} <= sizes["kinds"].keys()
    assert "unet B02" in sizes["blocks"]


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
}


def test_report_begins_with_what_a_file_is_for(scene: Scene, tmp_path: Path) -> None:
    """The verdict, the trigger words, how it was trained, and with a base whether it fits, in five lines."""
    metadata = {"modelspec.trigger_phrase": "ohwx ink", "ss_sd_model_name": "v1-5.safetensors", "ss_steps": "900",
                "ss_num_train_images": "40", "ss_base_model_version": "sd_v1"}  # fmt: skip
    lora = save(kohya(sd1()), tmp_path / "ink.safetensors", metadata=metadata)
    text = "\n".join([*lines(inspect(lora))][:5])
    for words in (
        "LoRA, rank 4, for Stable Diffusion 1",
        "ohwx ink",
        "with kohya sd-scripts, on v1-5.safetensors, 900 steps",
    ):
        assert words in text
    assert "ink.safetensors fits: all 20 modules match." in next(iter(lines(inspect(scene.base, lora))))
    other = save(
        {"lora_unet_nowhere.lora_up.weight": rand(4, 2), "lora_unet_nowhere.lora_down.weight": rand(2, 4)},
        tmp_path / "x.safetensors",
    )
    facts = inspect(scene.base, other)
    assert facts["verdict"]["level"] == "bad" and "does not fit" in next(iter(lines(facts)))


@pytest.mark.parametrize(("entry", "text", "title"), [
    ("ss_base_model_version", "sdxl_base_v1-0", "Stable Diffusion XL"), ("ss_base_model_version", "sd_v1", "Stable Diffusion 1"),
    ("modelspec.architecture", "stable-diffusion-xl-v1-base/lora", "Stable Diffusion XL"),
    ("modelspec.architecture", "stable-diffusion-v2-768-v/lora", "Stable Diffusion 2"), ("modelspec.architecture", "flux-1-dev/lora", "Flux.1"),
    ("modelspec.architecture", "qwen-image/lora", "Qwen-Image"), ("ss_base_model_version", "hunyuan-video", "HunyuanVideo"),
    ("ss_base_model_version", "sd3.5-large", "Stable Diffusion 3"), ("ss_base_model_version", "of my own", "unknown"), ("ss_base_model_version", "a swan of taiwan", "unknown"),
])  # fmt: skip
def test_model_of_an_adapter_is_in_its_metadata_if_shapes_show_none(
    entry: str, text: str, title: str, tmp_path: Path
) -> None:
    facts = inspect(save(kohya(sd1()), tmp_path / "a.safetensors", metadata={entry: text}))
    assert facts["made_for"] == title
    assert facts.get("made_for_by") == (None if title == "unknown" else entry)


def by_names(path: Path) -> Path:
    """An adapter of which the names alone show the model: its layers are small, and it has no metadata."""
    te = [f"lora_te{n}_text_model_encoder_layers_{n}_self_attn_q_proj" for n in (1, 2)]
    modules = ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", *te)
    return save({f"{m}.lora_{side}.weight": rand(20, 20) for m in modules for side in ("up", "down")}, path)


def test_model_of_an_adapter_is_known_by_its_names_where_shapes_show_none(scene: Scene, tmp_path: Path) -> None:
    """A look at it alone and on a base, a comparison, a sum and a merge have one answer."""
    other = by_names(tmp_path / "xl.safetensors")
    sd = save(kohya(sd1()), tmp_path / "sd.safetensors", metadata={"ss_base_model_version": "sd_v1"})
    facts, fit = inspect(other), inspect(scene.base, other)
    assert (facts["made_for"], facts["made_for_by"]) == ("Stable Diffusion XL", "its names")
    assert facts["verdict"]["text"].startswith("LoRA, rank 20, for Stable Diffusion XL (")
    both = "the adapter looks made for Stable Diffusion XL, the base is Stable Diffusion 1"
    assert fit["verdict"]["text"].endswith(f"xl.safetensors does not fit: {both.replace('the adapter', 'it', 1)}.")
    assert compare(sd, other)["made_for"] == ["Stable Diffusion 1", "Stable Diffusion XL"]
    with pytest.raises(
        FitError, match=r"sd\.safetensors is for Stable Diffusion 1, xl\.safetensors for Stable Diffusion XL"
    ):
        lora_merge.combine([sd, other], tmp_path / "sum.safetensors")
    with pytest.raises(FitError) as e:
        lora_merge.plan(scene.base, other)
    assert e.value.what == both
    assert "3 of 3 modules do not fit, such as lora_te1" in e.value.where
    # The text has one extent of the misfit.
    text = "\n".join(lines(fit))
    assert (
        re.findall(r"[0-9]+ of [0-9]+ modules|\([0-9]+ modules", text) == ["3 of 3 modules"] and "in part" not in text
    )


def test_every_adapter_on_a_base_has_a_verdict(scene: Scene, tmp_path: Path) -> None:
    code, out, _ = run("inspect", scene.base, scene.ink, by_names(tmp_path / "xl.safetensors"), scene.oil)
    verdict = out.splitlines()[0]
    assert code == 4
    assert "ink.safetensors fits: all 20 modules match. xl.safetensors does not fit: it looks made for" in verdict
    assert verdict.endswith("oil.safetensors fits: all 15 modules match.") and "more characters" not in verdict


@pytest.mark.parametrize(("tensors", "what", "for_model"), [
    ({"emb_params": rand(4, 768)}, "embedding (textual inversion)", "Stable Diffusion 1"),
    ({"body.0.rdb1.conv1.weight": rand(4, 4, 3, 3)}, "upscaler (ESRGAN)", ""),
    ({"control_model.input_hint_block.0.weight": rand(4, 3, 3, 3)}, "ControlNet", ""),
    ({"decoder.conv_in.weight": rand(4, 4, 3, 3)}, "VAE", ""),
])  # fmt: skip
def test_table_of_files_says_what_each_is(
    tensors: dict[str, torch.Tensor], what: str, for_model: str, tmp_path: Path
) -> None:
    titles, row = table_of_files([inspect(save(tensors, tmp_path / "x.safetensors"))])
    assert {title: row[titles.index(title)] for title in ("what", "for")} == {"what": what, "for": for_model}


def test_language_model_is_called_by_its_class_and_size(tmp_path: Path) -> None:
    save(
        {"model.layers.0.self_attn.q_proj.weight": rand(8, 8), "model.embed_tokens.weight": rand(9, 8)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    facts = inspect(tmp_path)
    assert facts["model"] == {
        "class": "LlamaForCausalLM",
        "name": "Llama",
        "size": "136",
        "layers": 1,
        "hidden_size": 8,
    }
    assert any(line.startswith("verdict") and "Llama, 136 parameters" in line for line in lines(facts))
    sizes = [model_of(LLAMA, count)["size"] for count in (8_030_261_248, 1_235_814_400, 596_049_920, 70_553_706_496)]
    assert sizes == ["8 B", "1.2 B", "596 M", "71 B"]


def test_folder_of_files_is_a_table_with_a_row_for_each(tmp_path: Path) -> None:
    """Also for one that cannot be read, with the reason."""
    for name in ("ink", "oil"):
        save(kohya(sd1()), tmp_path / f"{name}.safetensors", metadata={"modelspec.trigger_phrase": f"{name} style"})
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    code, out, _ = run("inspect", tmp_path)
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "ink style" in rows["ink.safetensors"] and "lora 20" in rows["oil.safetensors"]
    assert rows["broken.safetensors:"]
    found = json.loads(run("inspect", tmp_path, "--json")[1])
    assert len(found["files"]) == 2 and [*found["unread"]] == [str(tmp_path / "broken.safetensors")]
    Draft202012Validator(schema_of("files")).validate(found)


def test_values_begin_in_one_column(scene: Scene) -> None:
    """Behind the longest name, `bits per weight`."""
    named = [line for line in lines(inspect(scene.base)) if line.startswith(("file ", "bits per weight"))]
    assert len({len(line) - len(line.split(maxsplit=3 if line.startswith("bits") else 1)[-1]) for line in named}) == 1


def test_patterns_of_names_are_shown_on_request(scene: Scene) -> None:
    plain, verbose = run("inspect", scene.base, scene.ink)[1], run("inspect", scene.base, scene.ink, "-v")[1]
    assert "\nmatches " not in plain and "\nmatches " in verbose


def test_folder_of_many_lists_the_folders_in_it(scene: Scene, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(scene.ink.read_bytes())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(scene.base.read_bytes())
    (tmp_path / "empty").mkdir()
    rows = run("inspect", tmp_path)[1].splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["a.safetensors", "b.safetensors", "model"]


def test_written_adapter_has_no_note_on_its_header(scene: Scene, tmp_path: Path) -> None:
    """Adapters have a recipe and no seal."""
    lora_merge.resize(scene.ink, tmp_path / "o.safetensors", rank=2)
    assert not [note for note in inspect(tmp_path / "o.safetensors")["notes"] if "header" in note]
