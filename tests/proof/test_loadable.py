"""The output is what others read: the safetensors library, and in folders transformers and diffusers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors

import lora_merge
from lora_merge.engine import merge as run
from lora_merge.engine.admission import plan_merge
from lora_merge.errors import VerificationFailed
from lora_merge.files.safetensors import parse_file
from lora_merge.job import make_job
from lora_merge.proof.loadable import check_opened
from lora_merge.recipes.replay import prove
from tests.kit.files import blob, load, metadata, save
from tests.kit.tensors import rand

NAMES = ("model.layers.0.q", "model.layers.1.q")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of two shards with an index and a configuration, an adapter beside it."""
    base = tmp_path / "base"
    base.mkdir()
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, (name, file) in enumerate(zip(NAMES, files, strict=True)):
        save({f"{name}.weight": rand(8, 8, seed=n), f"{name}.bias": rand(8, seed=n)}, base / file)
    table = {f"{name}.{leaf}": file for name, file in zip(NAMES, files, strict=True) for leaf in ("weight", "bias")}
    index = {"metadata": {"total_size": 2 * 4 * 72}, "weight_map": table}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "config.json").write_text('{"torch_dtype": "float32", "model_type": "llama"}')
    save(
        {f"{NAMES[0]}.lora_up.weight": rand(8, 2), f"{NAMES[0]}.lora_down.weight": rand(2, 8)},
        tmp_path / "lora.safetensors",
    )
    return tmp_path


def merge(model: Path, **options: Any) -> Path:
    lora_merge.merge(model / "base", model / "lora.safetensors", model / "out", **options)
    return model / "out"


def spoiled(monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]) -> None:
    """What was written is changed before the proof."""
    verify = run.verify

    def after(plan: Any, part: Path, *more: Any, **options: Any) -> Any:
        change(part)
        return verify(plan, part, *more, **options)

    monkeypatch.setattr(run, "verify", after)


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


INDEX = "model.safetensors.index.json"
FAULTS = {
    "a tensor in the other file": (edited(INDEX, lambda c: c["weight_map"].update({f"{NAMES[0]}.bias": "model-00002-of-00002.safetensors"})),
                                   "does not name every tensor"),
    "a tensor that is missing": (edited(INDEX, lambda c: c["weight_map"].pop(f"{NAMES[1]}.bias")), "does not name every tensor"),
    "a tensor that is nowhere": (edited(INDEX, lambda c: c["weight_map"].update(more="model-00001-of-00002.safetensors")),
                                 "does not name every tensor"),
    "no table": (edited(INDEX, lambda c: c.update(weight_map=[])), "does not name every tensor"),
    "another size": (edited(INDEX, lambda c: c["metadata"].update(total_size=1)), "another size"),
    "no size": (edited(INDEX, lambda c: c.pop("metadata")), "another size"),
    "no JSON": (lambda folder: (folder / INDEX).write_text("{"), "cannot be read"),
    "another dtype": (edited("config.json", lambda c: c.update(torch_dtype="float16")), "another dtype"),
}  # fmt: skip

LATER = ("a tensor that is missing", "another size", "no size", "another dtype")
"""Those that do not keep a finished folder from being opened."""


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_side_files_that_do_not_fit_the_weights_are_detected(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    change, message = FAULTS[fault]
    merge(model, dtype="bf16")
    with monkeypatch.context() as patch, pytest.raises(VerificationFailed, match=message) as failed:
        spoiled(patch, change)
        merge(model, dtype="bf16", overwrite=True)
    assert failed.value.exit_code == 6
    assert ".part" not in str(failed.value)
    assert load(model / "out" / "model-00001-of-00002.safetensors")  # the old one stays


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_beside_a_finished_output_are_detected(model: Path, fault: str) -> None:
    change, message = FAULTS[fault]
    out = merge(model, dtype="bf16")
    assert prove(out, search=[model])["proven"]
    change(out)
    with pytest.raises(
        lora_merge.MergeError, match=message if fault in LATER else "index is wrong|not a valid JSON"
    ) as failed:
        prove(out, search=[model])
    if fault in LATER:
        assert failed.value.exit_code == 6
        assert "lora-merge replay" in failed.value.fix


def test_component_that_is_missing_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    (base / "unet").mkdir(parents=True)
    (base / "scheduler").mkdir()
    (base / "scheduler" / "scheduler_config.json").write_text("{}")
    save({"a.weight": rand(8, 8)}, base / "unet" / "diffusion_pytorch_model.safetensors")
    kinds = {"unet": ["diffusers", "UNet2DConditionModel"], "scheduler": ["diffusers", "DDIM"],
             "safety_checker": [None, None], "gone": ["diffusers", "Gone"], "_class_name": "Pipeline"}  # fmt: skip
    (base / "model_index.json").write_text(json.dumps(kinds))
    save({"unet.a.lora_up.weight": rand(8, 2), "unet.a.lora_down.weight": rand(2, 8)}, tmp_path / "lora.safetensors")
    merge(tmp_path)

    def lose(folder: Path) -> None:
        (folder / "scheduler" / "scheduler_config.json").unlink()
        (folder / "scheduler").rmdir()

    with (
        monkeypatch.context() as patch,
        pytest.raises(VerificationFailed, match="component of the pipeline is missing"),
    ):
        spoiled(patch, lose)
        merge(tmp_path, overwrite=True)
    lose(tmp_path / "out")
    with pytest.raises(VerificationFailed, match="component of the pipeline is missing"):
        prove(tmp_path / "out", search=[tmp_path])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "tied",
    [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}],
)
def test_configuration_that_ties_separate_tensors_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: dict[str, Any]
) -> None:
    base, name = tmp_path / "base", "model.embed_tokens"
    base.mkdir()
    save({f"{name}.weight": rand(16, 8), "model.norm.weight": rand(8)}, base / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    adapter, head = tmp_path / "lora.safetensors", "base_model.model.lm_head"
    adapter.mkdir()
    save(
        {f"{head}.lora_B.weight": rand(16, 2), f"{head}.lora_A.weight": rand(2, 8)},
        adapter / "adapter_model.safetensors",
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    out = merge(tmp_path)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    with monkeypatch.context() as patch, pytest.raises(VerificationFailed, match="ties what has weights of its own"):
        spoiled(patch, lambda folder: (folder / "config.json").write_text(json.dumps(tied)) and None)
        merge(tmp_path, overwrite=True)
    (out / "config.json").write_text(json.dumps(tied))
    with pytest.raises(VerificationFailed, match="ties what has weights of its own"):
        prove(out, search=[tmp_path])


def test_library_sees_what_was_planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out = model / "base" / "model-00001-of-00002.safetensors", model / "one.safetensors"
    job = {"base": base, "adapters": [(model / "lora.safetensors", 1.0)], "output": out}
    lora_merge.merge(base, model / "lora.safetensors", out)
    [file] = plan_merge(make_job(**job, overwrite=True)).files
    assert check_opened(file, out) == ()
    written = out.read_bytes()
    header = written[: parse_file(out).data_offset]
    assert check_opened(file, out, header) == ()
    tensors, told = load(out), metadata(out)
    for other, message in (({**tensors, "more": rand(1)}, "more"), ({k: v.half() for k, v in tensors.items()}, "F16")):
        save(other, out, told)
        with pytest.raises(VerificationFailed, match=rf"(?s)sees another tensor than planned.*{message}"):
            check_opened(file, out)
    save(tensors, out, {**told, "more": "entry"})
    with pytest.raises(VerificationFailed, match="other metadata"):
        check_opened(file, out, header)
    out.write_bytes(blob({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)))
    with pytest.raises(VerificationFailed, match="does not open the output"):
        check_opened(file, out)


def test_library_that_does_not_know_a_dtype_is_reported_not_blamed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model / "odd.safetensors"
    weight = rand(8, 8).numpy().tobytes()
    base.write_bytes(blob({f"{NAMES[0]}.weight": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]},
                           "phases": {"dtype": "C64", "shape": [1], "data_offsets": [256, 264]}}, weight + bytes(8)))  # fmt: skip

    def refuse(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("unknown variant `C64`")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    report = lora_merge.merge(base, model / "lora.safetensors", model / "odd-out.safetensors")
    assert report.verified is not None
    assert any("does not open the output, which holds C64" in w for w in report.verified["warnings"])
    with pytest.raises(VerificationFailed, match="does not open"):
        merge(model)
