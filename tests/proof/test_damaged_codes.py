"""One damaged bit anywhere in changed codes and scales is found, also where no number that is read from it changes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import lora_merge
from lora_merge.dtypes import QUANTISED_DTYPES
from lora_merge.errors import VerificationFailed
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.files.formats.output import FILE_FORMATS, FOLDER_FORMATS
from lora_merge.planning.recipe import CHECKSUMS
from lora_merge.recipes.replay import _job_of, prove
from tests.files.quantised_forms import FORMS
from tests.kit.files import metadata, save
from tests.kit.gguf_files import write
from tests.kit.gguf_models import flux, style
from tests.kit.quantised import NAMES, adapter, base
from tests.kit.tensors import Tensors, rand


def damage(out: Path, *, each: int = 1) -> Iterator[tuple[str, int]]:
    """Flip bits of every tensor, one at a time, `each` of them; yield the tensor and the bit while it is flipped."""
    index, chosen = open_checkpoint(out), random.Random(0)
    for path, header in index.headers.items():
        for t in header.tensors.values():
            for bit in chosen.sample(range(8 * t.nbytes), min(each, 8 * t.nbytes)):
                with path.open("r+b") as file:
                    file.seek(t.offset + bit // 8)
                    (old,) = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([old ^ 1 << bit % 8]))
                    file.flush()
                    yield t.name, bit
                    file.seek(t.offset + bit // 8)
                    file.write(bytes([old]))


def is_found(out: Path, *, each: int = 1) -> None:
    assert prove(out, full=True)["proven"]
    for name, bit in damage(out, each=each):
        with pytest.raises(VerificationFailed):
            prove(out, full=True)
            pytest.fail(f"bit {bit} of {name}")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [n for n, form in FORMS.items() if not form.decode_only])
def test_damage_in_a_base_of_every_format(name: str, tmp_path: Path) -> None:
    source, _ = base(FORMS[name], tmp_path / "base", NAMES[:1])
    out = tmp_path / ("out" if source.is_dir() else "out.safetensors")
    lora_merge.merge(source, save(adapter(NAMES[:1]), tmp_path / "lora.safetensors"), out)
    is_found(out)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_damage_in_blocks_of_gguf(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "base.gguf", "flux", flux(kind))
    lora_merge.merge(source, save(style(), tmp_path / "lora.safetensors"), tmp_path / "out.gguf")
    is_found(tmp_path / "out.gguf")


SIDE = 256
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def plain(size: float = 0.001) -> tuple[Tensors, Tensors]:
    """Two bf16 weights, and an adapter of the first."""
    weights = {f"{name}.weight": rand(SIDE, SIDE, seed=n, scale=0.02).bfloat16() for n, name in enumerate((Q, K))}
    return weights, {f"{Q}.lora_A.weight": rand(4, SIDE), f"{Q}.lora_B.weight": rand(SIDE, 4, seed=1, scale=size)}


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return save(plain()[1], tmp_path / "lora.safetensors")


def quantised(tmp_path: Path, dtype: str, **options: str) -> Path:
    weights, change = plain()
    out, source = tmp_path / f"{dtype}.safetensors", save(weights, tmp_path / "bf16.safetensors")
    lora_merge.merge(source, save(change, tmp_path / "first.safetensors"), out, dtype=dtype, **options)
    return out


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", list(FILE_FORMATS))
def test_damage_in_a_weight_quantised_on_the_way_out(dtype: str, tmp_path: Path) -> None:
    is_found(quantised(tmp_path, dtype), each=2)


@pytest.mark.slow
def test_damage_in_codes_of_stochastic_rounding(tmp_path: Path) -> None:
    """Either neighbour lies within one step; only the written one is right."""
    is_found(quantised(tmp_path, "fp8_scaled", rounding="stochastic"), each=8)


def test_damage_in_the_codes_of_a_weight_that_is_written_twice(tmp_path: Path) -> None:
    """The one scale of the weight does not cover what is added, which is known after its first codes are written."""
    big = save(plain(size=50.0)[1], tmp_path / "big.safetensors")
    lora_merge.merge(quantised(tmp_path, "fp8_scaled"), big, tmp_path / "out.safetensors")
    is_found(tmp_path / "out.safetensors", each=4)


def test_damage_in_scales_of_another_file(tmp_path: Path) -> None:
    source, tensors = base(FORMS["block fp8"], tmp_path / "base", NAMES[:2])
    lora = save(adapter(NAMES[:2]), tmp_path / "lora.safetensors")
    (source / "model.safetensors").unlink()
    for number, last in enumerate(("weight", "weight_scale_inv", "scale")):
        held = {key: value for key, value in tensors.items() if key.endswith(f".{last}")}
        if held:
            save(held, source / f"model-{number + 1:05}-of-00002.safetensors")
    lora_merge.merge(source, lora, tmp_path / "out")
    is_found(tmp_path / "out", each=3)
    sums = [metadata(path)[CHECKSUMS] for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert [len(text) for text in sums] == [16, 16]


def one(tmp_path: Path, source: Path, lora: Path, **options: int) -> str:
    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    lora_merge.merge(source, lora, out, **options)
    return metadata(out)[CHECKSUMS]


def test_sums_are_those_of_the_tensors_however_they_were_written(tmp_path: Path, lora: Path) -> None:
    """With large and small windows, alone and in a batch."""
    from zlib import crc32

    source = quantised(tmp_path, "nvfp4")
    said = one(tmp_path, source, lora)
    assert said == one(tmp_path, source, lora, max_memory=16 << 20)
    jobs = [{"base": source, "adapters": [f"{lora}:{s}"], "output": tmp_path / f"b{s}.safetensors"} for s in (1, 0.5)]
    assert [r.status for r in lora_merge.run_batch(jobs)] == ["merged"] * 2
    assert (
        metadata(tmp_path / "b1.safetensors")[CHECKSUMS] == said != metadata(tmp_path / "b0.5.safetensors")[CHECKSUMS]
    )
    index = open_checkpoint(tmp_path / "b1.safetensors")
    data = (tmp_path / "b1.safetensors").read_bytes()
    (header,) = index.headers.values()
    names = [t for t in header.tensors.values() if t.name.startswith(Q) and not t.name.endswith("comfy_quant")]
    assert said == "".join(f"{crc32(data[t.offset : t.offset + t.nbytes]):08x}" for t in names)


def test_output_without_codes_has_no_sums(tmp_path: Path, lora: Path) -> None:
    """Nor does it inherit those of its base."""
    source = quantised(tmp_path, "fp8_scaled")
    assert CHECKSUMS in metadata(source)
    lora_merge.merge(source, lora, tmp_path / "plain.safetensors", dtype="bf16")
    lora_merge.merge(source, lora, tmp_path / "bare.safetensors", no_metadata=True)
    for name in ("plain", "bare"):
        assert CHECKSUMS not in metadata(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("edit", [lambda text: text[8:], lambda text: f"{int(text[0], 16) ^ 1:x}{text[1:]}"])
def test_sums_that_were_edited_are_detected(tmp_path: Path, edit: Callable[[str], str]) -> None:
    out = quantised(tmp_path, "fp8_scaled")
    raw, said = out.read_bytes(), metadata(out)[CHECKSUMS]
    out.write_bytes(raw.replace(said.encode(), edit(said).ljust(len(said)).encode()))
    with pytest.raises(VerificationFailed, match="header was changed"):
        prove(out, full=True)


PLACES = [
    *(("out.safetensors", option) for option in FILE_FORMATS),
    *(("out", option) for option in FOLDER_FORMATS),
    *(("out.gguf", option) for option in QUANTISED_DTYPES if option not in FILE_FORMATS and option not in FOLDER_FORMATS),
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Name of an output → a base of its kind that is not quantised, and an adapter."""
    there = tmp_path_factory.mktemp("sources")
    weights, change = plain()
    file, lora = save(weights, there / "base.safetensors"), save(change, there / "lora.safetensors")
    folder = there / "base"
    folder.mkdir()
    save(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    gguf = write(there / "base.gguf", "flux", flux("F16"))
    return {
        "out.safetensors": (file, lora), "out": (folder, lora),
        "out.gguf": (gguf, save(style(), there / "style.safetensors")),
    }  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "option"), PLACES)
def test_format_is_known_without_a_recipe(
    name: str, option: str, sources: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """For each value of --dtype the job of the output is the one that made it."""
    (source, lora), out = sources[name], tmp_path / name
    lora_merge.merge(source, lora, out, dtype=option, no_metadata=True, verify=False)
    with ExitStack() as stack:
        assert _job_of(open_checkpoint(out), source, [lora], {}, stack).dtype == option
    assert prove(out, source, [lora])["proven"]


@pytest.mark.parametrize("name", ["ComfyUI fp8 rows", "ComfyUI int4 rotated", "mlx 4 bit", "ModelOpt nvfp4"])
def test_format_that_no_option_writes_is_named(name: str, tmp_path: Path) -> None:
    """Also where one writes a format of the same name with other scales."""
    made, _ = base(FORMS[name], tmp_path / "made", NAMES[:1])
    values = {key: rand(*info.shape) for key, info in open_checkpoint(made).tensors.items()}
    source, lora = save(values, tmp_path / "plain.safetensors"), save(adapter(NAMES[:1]), tmp_path / "lora.safetensors")
    with pytest.raises(VerificationFailed, match="no --dtype gives weights of"):
        prove(made, source, [lora])
