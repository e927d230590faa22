"""Language models in GGUF files: the merge equals PEFT's, converted as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, TensorNameMap, get_tensor_name_map

import lora_merge
from lora_merge.errors import FitError, InputError, UsageError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.job import make_job
from lora_merge.recipes.replay import prove
from lora_merge.viewing.inspect import inspect
from tests.kit import gguf_files as by_library
from tests.kit.files import load
from tests.kit.gguf_files import Array
from tests.kit.tensors import Tensors

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, KV = 4, 2
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "vocab_size": 40, "head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


class Family(NamedTuple):
    """One architecture: its class in transformers, its number in the `gguf` library, what an adapter changes."""

    name: str
    arch: MODEL_ARCH
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head")


FAMILIES = {
    "llama": Family("Llama", MODEL_ARCH.LLAMA),
    "qwen2": Family("Qwen2", MODEL_ARCH.QWEN2),
    "qwen3": Family("Qwen3", MODEL_ARCH.QWEN3),
    "gemma2": Family("Gemma2", MODEL_ARCH.GEMMA2, ("q_proj", "k_proj", "gate_proj", "down_proj")),
    "gemma3": Family("Gemma3", MODEL_ARCH.GEMMA3, ("q_proj", "k_proj", "gate_proj", "down_proj")),
    "phi3": Family("Phi3", MODEL_ARCH.PHI3, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
}


def model(family: Family, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family.name}{'Text' * (family.name == 'Gemma3')}Config")
    made = getattr(transformers, f"{family.name}ForCausalLM")(config(**{**SIZES, **options}))
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.1)
        if "norm" in name:
            parameter.data += 0.5
    return made


def permuted(weight: Array, heads: int) -> Array:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    rows = len(weight)
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def converted(family: Family, tensors: Tensors, kind: str) -> dict[str, tuple[Array, str]]:
    """The tensors as llama.cpp's converter writes them: names of the library, values by the classes of the converter."""
    names: TensorNameMap = get_tensor_name_map(family.arch, SIZES["num_hidden_layers"])
    found = {}
    for key, tensor in tensors.items():
        values = tensor.detach().float().numpy()
        if family.name == "Llama" and "self_attn.q_proj" in key:
            values = permuted(values, HEADS)
        if family.name == "Llama" and "self_attn.k_proj" in key:
            values = permuted(values, KV)
        if family.name.startswith("Gemma") and key.endswith("norm.weight"):
            values = values + 1
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        found[name] = values, "F32" if values.ndim == 1 else kind
    return found


def entries(arch: MODEL_ARCH) -> dict[str, Any]:
    name = {MODEL_ARCH.LLAMA: "llama"}.get(arch, arch.name.lower())
    numbers = {"attention.head_count": HEADS, "attention.head_count_kv": KV, "embedding_length": 64, "block_count": 2}
    return {"general.file_type": 0, **{f"{name}.{key}": value for key, value in numbers.items()}}


def stored(made: Any) -> Tensors:
    tied = made.config.tie_word_embeddings
    return {k: v for k, v in made.state_dict().items() if not (tied and k == "lm_head.weight")}


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Path, Tensors, Tensors]]]:
    """A function that returns an adapter of PEFT, and the model without and with it."""

    def tuned(family: Family, **options: Any) -> tuple[Path, Tensors, Tensors]:
        from peft import LoraConfig, get_peft_model

        base = model(family, **{k: v for k, v in options.items() if k != "target_modules"})
        before = {k: v.clone() for k, v in stored(base).items()}
        targets = options.get("target_modules", [*family.targets])
        wrapped = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = tmp_path_factory.mktemp("adapter")
        wrapped.save_pretrained(folder)
        return folder, before, stored(wrapped.merge_and_unload())

    yield tuned


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_merge_is_that_of_peft(name: str, tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]) -> None:
    family = FAMILIES[name]
    adapter, before, after = tune(family, tie_word_embeddings=name.startswith("gemma"))  # theirs always are
    base = by_library.write(tmp_path / "m.gguf", name, converted(family, before, "F32"), entries(family.arch))
    report = lora_merge.merge(base, adapter, tmp_path / "out.gguf")
    assert report.changed == 2 * len([t for t in family.targets if t != "lm_head"]) + ("lm_head" in family.targets)
    found, wanted = by_library.read(tmp_path / "out.gguf"), converted(family, after, "F32")
    assert found.keys() == wanted.keys()
    for key, (values, kind) in found.items():
        np.testing.assert_allclose(values, wanted[key][0], atol=2e-6, err_msg=key)
        assert kind == "F32"


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_matrices_take_the_type_that_is_asked_for(
    dtype: str, tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]
) -> None:
    family = FAMILIES["llama"]
    adapter, before, after = tune(family)
    base = by_library.write(tmp_path / "m.gguf", "llama", converted(family, before, "Q8_0"), entries(family.arch))
    report = lora_merge.merge(base, adapter, tmp_path / "out.gguf", dtype=dtype)
    found, wanted = by_library.read(Path(report.output)), converted(family, after, "F32")
    for key, (values, kind) in found.items():
        assert kind == ("F32" if values.ndim == 1 else {"bf16": "BF16", "fp16": "F16"}[dtype])
        np.testing.assert_allclose(values, wanted[key][0], atol=0.01)
    fields = by_library.fields(Path(report.output))
    assert fields["general.file_type"] == {"bf16": 32, "fp16": 1}[dtype]
    assert fields["llama.attention.head_count"] == HEADS


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "F16"])
def test_splits_stay_splits(kind: str, tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]) -> None:
    """Only the first split tells the heads of the model."""
    family = FAMILIES["llama"]
    adapter, before, after = tune(family)
    tensors = [*converted(family, before, kind).items()]
    folder = tmp_path / "model"
    folder.mkdir()
    for n in range(2):
        more = entries(family.arch) if n == 0 else {}
        part = dict(tensors[len(tensors) * n // 2 : len(tensors) * (n + 1) // 2])
        by_library.write(
            folder / f"m-0000{n + 1}-of-00002.gguf", "llama", part, {**more, "split.no": n, "split.count": 2}
        )
    lora_merge.merge(folder, adapter, tmp_path / "out")
    wanted = converted(family, after, "F32")
    files = sorted(p.name for p in (tmp_path / "out").iterdir() if p.suffix == ".gguf")
    assert files == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    found = {k: v for f in files for k, v in by_library.read(tmp_path / "out" / f).items()}
    for key, (values, _) in found.items():
        np.testing.assert_allclose(values, wanted[key][0], atol=0.05)
    assert found.keys() == wanted.keys()
    assert by_library.fields(tmp_path / "out" / files[1])["split.no"] == 1


def test_head_that_the_file_does_not_have_is_not_added(
    tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]
) -> None:
    """llama.cpp reads the embeddings where `output.weight` is missing."""
    family = FAMILIES["llama"]
    adapter, before, _ = tune(family, tie_word_embeddings=True, target_modules=["q_proj", "lm_head"])
    base = by_library.write(tmp_path / "m.gguf", "llama", converted(family, before, "F16"), entries(family.arch))
    with pytest.raises((FitError, InputError)) as caught:
        lora_merge.merge(base, adapter, tmp_path / "out.gguf")
    assert caught.value.exit_code in (3, 4)
    assert not (tmp_path / "out.gguf").exists()


def test_names_of_transformers_are_shown(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    path = by_library.write(
        tmp_path / "m.gguf", "qwen3", converted(family, stored(model(family)), "Q4_0"), entries(family.arch)
    )
    index = open_checkpoint(path)
    assert "model.layers.1.self_attn.q_norm.weight" in index.tensors
    assert index.tensors["model.layers.0.mlp.gate_proj.weight"].stored == "blk.0.ffn_gate.weight"
    assert json.loads(json.dumps(dict(index.config)))["num_key_value_heads"] == KV
    assert inspect(path)["quantised"] == "16 weights as Q4_0"
    llama = converted(FAMILIES["llama"], stored(model(FAMILIES["llama"])), "F16")
    other = inspect(by_library.write(tmp_path / "f.gguf", "llama", llama, entries(MODEL_ARCH.LLAMA)))
    assert not other.get("quantised"), "F16 with its rows in another order is not quantised"


def lora_in_gguf(folder: Path, path: Path, kind: str = "F32", alpha: float = 8.0) -> Path:
    """An adapter of PEFT as convert_lora_to_gguf.py writes it: `lora_b` of q and k has the rows of the converter."""
    from safetensors.torch import load_file

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    found = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        stem, _, last = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        values = tensor.float().numpy()
        if last == "lora_B" and "q_proj" in stem:
            values = permuted(values, HEADS)
        if last == "lora_B" and "k_proj" in stem:
            values = permuted(values, KV)
        name = names.get_name(f"{stem}.weight", try_suffixes=(".weight",))
        found[f"{name}.{last.lower()}"] = values, kind if values.shape[-1] % 32 == 0 else "F32"
    more = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha}
    return by_library.write(path, "llama", found, more)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_adapters_in_gguf_are_those_that_they_were_converted_from(
    kind: str, tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]
) -> None:
    """On a base in GGUF, and on the folder of transformers."""
    from safetensors.torch import save_file

    family = FAMILIES["llama"]
    adapter, before, after = tune(family, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
    lora = lora_in_gguf(adapter, tmp_path / "lora.gguf", kind)
    base = by_library.write(tmp_path / "m.gguf", "llama", converted(family, before, "F32"), entries(family.arch))
    lora_merge.merge(base, lora, tmp_path / "out.gguf")
    wanted, near = converted(family, after, "F32"), {"F32": 2e-6, "F16": 2e-3, "Q8_0": 2e-2}[kind]
    for key, (values, _) in by_library.read(tmp_path / "out.gguf").items():
        np.testing.assert_allclose(values, wanted[key][0], atol=near, err_msg=key)
    model(family).config.save_pretrained(tmp_path / "hf")
    save_file(before, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    lora_merge.merge(tmp_path / "hf", lora, tmp_path / "merged")
    for key, tensor in load(tmp_path / "merged" / "model.safetensors").items():
        np.testing.assert_allclose(tensor, after[key], atol=near, err_msg=key)
    with pytest.raises(InputError, match="heads"):
        lora_merge.merge(tmp_path / "hf" / "model.safetensors", lora, tmp_path / "no.safetensors")


def test_adapters_in_gguf_of_other_kinds_are_refused(tmp_path: Path) -> None:
    factors = {
        "blk.0.attn_v.weight.lora_a": (np.ones((4, 64)), "F32"),
        "blk.0.attn_v.weight.lora_b": (np.ones((64, 4)), "F32"),
    }
    for name, more in {
        "of a kind": {"adapter.type": "control_vector"}, "no number": {"adapter.lora.alpha": "many"},
        "aLoRA": {"adapter.alora.invocation_tokens": [1, 2]},
    }.items():  # fmt: skip
        path = by_library.write(tmp_path / "a.gguf", "bloom", factors, {"general.type": "adapter", **more})
        with pytest.raises(InputError, match=name):
            open_checkpoint(path)
    lora = {"general.type": "adapter", "adapter.lora.alpha": 4.0}
    odd = {**factors, "blk.0.attn_norm.weight": (np.ones((4, 64)), "F32")}
    with pytest.raises(InputError, match="more than LoRA"):
        open_checkpoint(by_library.write(tmp_path / "odd.gguf", "llama", odd, lora))


SHAPES = {
    "token_embd.weight": (96, 64), "blk.0.attn_q.weight": (64, 64), "blk.0.ffn_up_exps.weight": (3, 96, 64),
    "blk.0.ffn_down_exps.weight": (3, 64, 96), "blk.1.ffn_up_exps.weight": (3, 64, 64), "enc.blk.1.ffn_up.weight": (96, 64),
}  # fmt: skip


def pair_in_gguf(folder: Path, arch: str, kind: str, alpha: float | None) -> tuple[Path, Path, dict[str, Array]]:
    """A model of any architecture, a LoRA on all of its matrices, and the sum by the rule of llama-adapter.cpp."""
    rng = np.random.default_rng(0)
    base = {name: (rng.normal(0, 0.1, shape).astype(np.float32), kind) for name, shape in SHAPES.items()}
    model = by_library.write(folder / "m.gguf", arch, base)
    merged, factors = {}, {}
    for name, (values, _) in by_library.read(model).items():
        *experts, rows, cols = SHAPES[name]
        table = name == "token_embd.weight"
        a = rng.normal(0, 0.2, (rows, 4) if table else (*experts, 4, cols)).astype(np.float32)
        b = rng.normal(0, 0.2, (cols, 4) if table else (*experts, rows, 4)).astype(np.float32)
        factors |= {f"{name}.lora_a": (a, "F32"), f"{name}.lora_b": (b, "F32")}
        merged[name] = values + (alpha / 4 if alpha else 1) * (a @ b.T if table else b @ a)
    entries = {
        "general.type": "adapter",
        "adapter.type": "lora",
        **({} if alpha is None else {"adapter.lora.alpha": alpha}),
    }
    return model, by_library.write(folder / "lora.gguf", arch, factors, entries), merged


@pytest.mark.few(2)
@pytest.mark.parametrize(("arch", "kind", "alpha"), [
    ("qwen3moe", "F32", 8.0), ("t5", "Q8_0", None), ("gemma4", "F16", 0.0), ("no-such-model", "BF16", 2.0),
])  # fmt: skip
def test_adapter_in_gguf_fits_the_names_of_its_base(arch: str, kind: str, alpha: float | None, tmp_path: Path) -> None:
    """Equal names are one weight in every architecture, also the factors of stacked experts and of the tokens."""
    base, lora, wanted = pair_in_gguf(tmp_path, arch, kind, alpha)
    report = lora_merge.merge(base, lora, tmp_path / "out.gguf")
    assert report.changed == len(SHAPES)
    for name, (values, own) in by_library.read(tmp_path / "out.gguf").items():
        near = {"F32": 2e-6, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 2e-2}[kind]
        np.testing.assert_allclose(values, wanted[name], atol=near, err_msg=name)
        assert own == kind
    table = tmp_path / "map.yaml"
    table.write_text(f"title: A\ncomponent: model\ncanonical: gguf\nlayouts:\n  gguf: [{', '.join(SHAPES)}]\n")
    lora_merge.merge(base, lora, tmp_path / "map.gguf", map=table)
    assert (tmp_path / "map.gguf").stat().st_size >= (tmp_path / "out.gguf").stat().st_size


def test_adapter_in_gguf_needs_a_base_with_its_names(tmp_path: Path) -> None:
    """A base of transformers has them for the architectures of the table alone; and an adapter of PEFT has others."""
    from safetensors.torch import save_file

    base, lora, _ = pair_in_gguf(tmp_path, "bloom", "F32", 4.0)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(64, 64)}, tmp_path / "hf.safetensors")
    with pytest.raises(InputError, match="'bloom'"):
        lora_merge.merge(tmp_path / "hf.safetensors", lora, tmp_path / "no.safetensors")
    peft = {f"model.layers.0.self_attn.q_proj.lora_{x}.weight": torch.ones(64, 64) for x in "AB"}
    save_file(peft, tmp_path / "peft.safetensors")
    with pytest.raises(InputError, match=r"architecture 'bloom'\n.*peft\.safetensors"):
        lora_merge.merge(base, [lora, tmp_path / "peft.safetensors"], tmp_path / "no.gguf")


def test_part_of_a_split_stands_for_all(tmp_path: Path) -> None:
    """llama.cpp opens a split by its first part; other files of the folder are no part of it."""
    base, lora, wanted = pair_in_gguf(tmp_path, "granite", "F32", 8.0)
    folder, tensors = tmp_path / "models", [*by_library.read(base).items()]
    folder.mkdir()
    for n in range(3):
        entry = {"split.no": n, "split.count": 3}
        by_library.write(folder / f"m-0000{n + 1}-of-00003.gguf", "granite", dict(tensors[2 * n : 2 * n + 2]), entry)
    (folder / "other.gguf").write_bytes(base.read_bytes())
    for n in (1, 3):
        report = lora_merge.merge(folder / f"m-0000{n}-of-00003.gguf", lora, tmp_path / f"out{n}")
        parts = [*(tmp_path / f"out{n}").glob("*.gguf")]
        assert {p.name for p in parts} == {f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)}
        found = {key: values for part in parts for key, (values, _) in by_library.read(part).items()}
        assert report.changed == len(SHAPES)
        for key, values in wanted.items():
            np.testing.assert_allclose(found[key], values, atol=2e-6, err_msg=key)
    assert prove(tmp_path / "out3")["proven"]
    assert prove(tmp_path / "out1", folder / "m-00002-of-00003.gguf", [lora])["proven"]
    assert make_job(folder / "m-00001-of-00003.gguf", [lora]).output.name == "m+lora"
    with pytest.raises(UsageError, match=r'write output=".*/x"$'):
        lora_merge.merge(folder / "m-00001-of-00003.gguf", lora, tmp_path / "x.gguf")
    (folder / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(InputError, match=r"2 of 3 are here\n.*m without -00002-of-00003"):
        open_checkpoint(folder / "m-00001-of-00003.gguf")


def test_transformers_computes_with_the_merged_file_what_it_does_with_the_merged_folder(
    tmp_path: Path, tune: Callable[..., tuple[Path, Tensors, Tensors]]
) -> None:
    from transformers import LlamaForCausalLM

    family = FAMILIES["llama"]
    adapter, before, _ = tune(family)
    made = model(family)
    made.load_state_dict(before)
    made.save_pretrained(tmp_path / "hf")
    more = {"feed_forward_length": SIZES["intermediate_size"], "context_length": 64, "rope.dimension_count": 16,
            "attention.layer_norm_rms_epsilon": made.config.rms_norm_eps, "vocab_size": SIZES["vocab_size"]}  # fmt: skip
    entry = entries(family.arch) | {f"llama.{key}": value for key, value in more.items()}
    base = by_library.write(tmp_path / "m.gguf", "llama", converted(family, before, "Q8_0"), entry)
    lora_merge.merge(tmp_path / "hf", adapter, tmp_path / "sum")
    lora_merge.merge(base, adapter, tmp_path / "out.gguf")

    def logits(folder: Path, **options: Any) -> Array:
        with torch.no_grad():
            loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
            return np.asarray(loaded(torch.arange(12)[None]).logits)

    right, found = logits(tmp_path / "sum"), logits(tmp_path, gguf_file="out.gguf")
    change = np.linalg.norm(right - logits(tmp_path / "hf"))
    assert np.linalg.norm(found - right) < 0.05 * change
