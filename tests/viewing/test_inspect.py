"""`inspect` says what a file is from its header alone, without torch."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.facts import COUNT
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.formats.unread import METADATA, SIGNS
from lora_merge.files.safetensors import layout
from lora_merge.text import size
from lora_merge.viewing.inspect import inspect
from lora_merge.viewing.text import lines
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1
from tests.kit.tensors import rand

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
        {"lora": 32},
        [4],
        [2.0],
    )
    assert set(facts["names"]) == {"lora_unet_", "lora_te_"}
    assert "kohya" in facts["trainer"]
    assert any(line.startswith("algorithms") and "lora 32" in line for line in lines(facts))


def test_ia3_is_an_adapter_and_an_embedding_is_called_one(tmp_path: Path) -> None:
    """Half of (IA)³'s tensors have names that any model's have."""
    lora = {"lycoris_a.weight": torch.ones(4, 1), "lycoris_a.on_input": torch.zeros((), dtype=torch.bool)}
    assert inspect(save(lora, tmp_path / "a.safetensors"))["algorithms"] == {"ia3": 1}
    facts = inspect(save({"<cat>": torch.ones(4)}, tmp_path / "b.safetensors"))
    assert "textual inversion" in facts["looks_like"]


def test_pair_shows_what_fits_and_what_does_not(tmp_path: Path) -> None:
    base = save({k: v for k, v in sd1().items() if k.startswith("model.")}, tmp_path / "unet.safetensors")
    match = inspect(base, save(kohya(sd1()), tmp_path / "a.safetensors"))["match"]
    assert (match["matched"], match["total"], match["components"]) == (24, 32, {"unet": 24})
    assert len(match["unmatched"]) == 8
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
    assert (size(n), size(n, *COUNT)) == (bytes_, count)


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
        **{entry: (weights, {entry: "{}"}) for entry in METADATA},
        "codes": (weights | {"a.weight": torch.ones(4, 4, dtype=torch.uint8), "a.scale": torch.ones(4, 1)}, {}),
    }
    for name, (tensors, entries) in cases.items():
        path = save(tensors, tmp_path / "model.safetensors", {"format": "pt"} | entries)
        facts, said = inspect(path), open_checkpoint(path).quantised.how
        assert facts["quantised"] == said != "", name
        assert name == "codes" or name in said
        (line,) = [line for line in lines(facts) if line.startswith("quantised ")]
        assert line.endswith(said)
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
