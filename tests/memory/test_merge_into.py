"""Adapters merged into live models, and taken out again. Run: pytest tests/memory"""

from __future__ import annotations

import copy
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lora_merge
from lora_merge.errors import DeviceFailed, FitError, InputError, TooLarge, UsageError
from lora_merge.memory import merge_into
from lora_merge.memory.merge_into import live_model
from tests.kit.pairs import examples
from tests.kit.pipelines import PIPELINES, saved
from tests.kit.pipelines import model as flux
from tests.kit.tensors import Tensors, rand

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # those of transformers and diffusers
KEEPS = ["host", "device", "compressed"]
IDS = torch.arange(10)[None]


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=30)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | more)).eval()


def tuned(model: Any, folder: Path, **more: Any) -> Any:
    """The model with a PEFT adapter, which is saved to the folder."""
    given = dict(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False) | more
    made = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**given)).eval()
    made.save_pretrained(folder)
    return made


def state(model: nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: nn.Module, before: Tensors) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(
        torch.equal(*(x.contiguous().view(torch.uint8) for x in (after[k], t))) for k, t in before.items()
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("method", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_live_model_computes_what_its_adapter_computes_and_is_restored(keep: Any, method: Any, tmp_path: Path) -> None:
    model = llama()
    want = tuned(model, tmp_path, **method)(IDS).logits
    before, pointers = state(model), {n: p.data_ptr() for n, p in model.named_parameters()}
    with lora_merge.merge_into(model, tmp_path, keep=keep) as merged:
        assert torch.allclose(model(IDS).logits, want, atol=1e-5)
        assert len(merged.changed) == 6
        assert pointers == {n: p.data_ptr() for n, p in model.named_parameters()}
        assert all(p.requires_grad for p in model.parameters())
    assert same(model, before)
    merged.undo()
    assert same(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD", "SDXL"])
def test_live_pipeline_holds_what_its_merged_folder_holds(name: str, tmp_path: Path) -> None:
    make, parts = PIPELINES[name]
    _, lora = saved(make, parts, tmp_path, "")
    torch.manual_seed(0)
    pipe = make()
    before = {part: state(getattr(pipe, part)) for part in parts}
    lora_merge.merge(tmp_path / "base", lora, tmp_path / "merged")
    want = type(pipe).from_pretrained(tmp_path / "merged", **{k: None for k, v in pipe.components.items() if v is None})
    merged = lora_merge.merge_into(pipe, lora)
    assert all(same(getattr(pipe, part), state(getattr(want, part))) for part in parts)
    merged.undo()
    assert all(same(getattr(pipe, part), before[part]) for part in parts)


def test_model_in_peft_layers_is_merged_below_them(tmp_path: Path) -> None:
    model = llama()
    want = tuned(model, tmp_path)(IDS).logits
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()  # changes nothing
    lora_merge.merge_into(wrapped, tmp_path)
    assert torch.allclose(wrapped(IDS).logits, want, atol=1e-5)


@settings(max_examples=examples(15), deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(KEEPS),
    st.sampled_from(["plain", "transposed", "inference"]),
    st.integers(1, 40),
)
def test_results_are_those_of_merge_state_dict(dtype: torch.dtype, keep: Any, memory: str, rows: int) -> None:
    with torch.inference_mode(memory == "inference"):
        model = nn.Sequential(nn.Linear(5, rows), nn.Linear(rows, 3)).requires_grad_(requires_grad=False).to(dtype)
        if memory == "transposed":  # its memory is not in the order of its numbers
            model[0].weight.data = model[0].weight.data.t().contiguous().t()
    adapter = {"0.lora_up.weight": rand(rows, 2), "0.lora_down.weight": rand(2, 5, seed=1)}
    before = state(model)
    want = lora_merge.merge_state_dict(before, adapter)
    merged = lora_merge.merge_into(model, adapter, keep=keep)
    assert same(model, want)
    merged.undo()
    assert same(model, before)


def test_formulas_read_the_original_numbers_of_weights_that_are_changed_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lora_merge.memory.merge.WINDOW_BYTES", 1)  # each tensor is written before the next is read
    model = flux("FluxTransformer2DModel")
    width = model.transformer_blocks[0].attn.to_q.weight.shape[1]
    name = "lora_unet_double_blocks_0_img_attn_qkv"  # one layer of the adapter, three of the model
    adapter = {f"{name}.lora_up.weight": rand(3 * width, 2), f"{name}.lora_down.weight": rand(2, width, seed=1)}
    adapter[f"{name}.dora_scale"] = rand(1, width, seed=2).abs() + 1  # a norm over the rows of all three
    before = state(model)
    want = lora_merge.merge_state_dict(before, adapter)
    for keep in KEEPS:
        with lora_merge.merge_into(model, adapter, keep=keep) as merged:
            assert len(merged.changed) == 3
            assert same(model, want)
        assert same(model, before)


def test_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_merge.memory.merge.WINDOW_BYTES", 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    before = state(model)
    adapter = {f"{n}.lora_up.weight": torch.full((4, 1), 10.0 ** (5 * n)) for n in range(2)}
    adapter |= {f"{n}.lora_down.weight": torch.ones(1, 4) for n in range(2)}
    with pytest.raises(TooLarge):
        lora_merge.merge_into(model, adapter)
    assert same(model, before)
    with pytest.warns(UserWarning, match="cut to its largest"):
        lora_merge.merge_into(model, adapter, on_overflow="saturate").undo()
    assert same(model, before)


def test_changes_that_need_another_model_are_refused(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, on tied heads
        tuned(model, tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(FitError):
        lora_merge.merge_into(model, tmp_path / "head")
    layers = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(FitError, match="live model lacks"):
        lora_merge.merge_into(layers, {"0.diff_b": torch.ones(4), "0.diff": torch.ones(4, 4)})
    assert same(model, before)


def test_tensors_that_are_not_plain_are_refused() -> None:
    class Codes(nn.Parameter):
        quant_state = None

    layer = nn.Linear(4, 4)
    layer.weight = Codes(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    adapter = {"lora_up.weight": rand(4, 1), "lora_down.weight": rand(1, 4)}
    with pytest.raises(InputError, match="Codes cannot be changed in place"):
        lora_merge.merge_into(nn.Sequential(layer), adapter)
    with pytest.raises(InputError, match="meta device"):
        lora_merge.merge_into(nn.Linear(4, 4, device="meta"), adapter)
    with pytest.raises(UsageError, match="no weights"):
        lora_merge.merge_into("base.safetensors", adapter)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="keeps its dtypes"):
        lora_merge.merge_into(nn.Linear(4, 4), adapter, dtype="bf16")
    with pytest.raises(UsageError, match="host, device, compressed"):
        lora_merge.merge_into(nn.Linear(4, 4), adapter, keep="disk")  # type: ignore[arg-type]


def test_warnings_are_absent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        model = llama()
        tuned(model, tmp_path)
        warnings.simplefilter("error")
        assert "changed 6 tensors" in repr(lora_merge.merge_into(model, tmp_path))


def pairs(seed: int, layers: int = 3) -> Tensors:
    """An adapter for `layers` linear layers of 4 numbers."""
    return {f"{n}.lora_{k}.weight": rand(*s, seed=seed + n) for n in range(layers) for k, s in (("up", (4, 2)), ("down", (2, 4)))}  # fmt: skip


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("keep", KEEPS)
def test_merge_is_undone_only_when_later_ones_are(keep: Any) -> None:
    """Its original numbers are older than the later one's: written now, those would come back afterwards."""
    model = stack()
    before = state(model)
    first, second = (lora_merge.merge_into(model, pairs(n), keep=keep) for n in range(2))
    both = state(model)
    with pytest.raises(UsageError, match="later merge"):
        first.undo()
    assert same(model, both)
    second.undo()
    first.undo()
    assert same(model, before)
    first = lora_merge.merge_into(model, pairs(0, layers=1))
    other = lora_merge.merge_into(model, {k.replace("0", "2", 1): t for k, t in pairs(0, layers=1).items()})
    first.undo()  # they share no tensor
    other.undo()
    assert same(model, before)


@pytest.mark.few(6)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("undoing", [False, True])
def test_interruption_at_any_write_loses_nothing(
    keep: Any, *, after: bool, undoing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, write, calls = stack(), merge_into._write, []
    before = state(model)
    merged = lora_merge.merge_into(model, pairs(0), keep=keep) if undoing else None

    def interrupted(tensor: torch.Tensor, data: torch.Tensor) -> None:
        calls.append(tensor)
        if after or len(calls) != 2:
            write(tensor, data)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(merge_into, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merged.undo() if merged else lora_merge.merge_into(model, pairs(0), keep=keep)
    if merged:
        merged.undo()
        assert merged.changed == ()
    assert same(model, before)


@pytest.mark.parametrize("keep", KEEPS)
def test_undo_knows_what_became_of_the_tensors(keep: Any) -> None:
    """Other tensors in their place are restored, casts are refused before anything is written."""
    model = stack()
    before = state(model)
    merged = lora_merge.merge_into(model, pairs(0), keep=keep)
    model.load_state_dict(state(model), assign=True)
    merged.undo()
    assert same(model, before)
    merged = lora_merge.merge_into(model, pairs(0), keep=keep)
    now = state(model)
    model[1].weight.data = model[1].weight.data.double()
    with pytest.raises(UsageError, match="float32 became float64"):
        merged.undo()
    model[1].weight.data = model[1].weight.data.float()
    assert same(model, now)
    wrapped = nn.Sequential(model)  # names change, tensors do not
    merged.undo()
    assert same(wrapped[0], before)


def test_difference_from_numbers_that_are_no_more_restores_nothing() -> None:
    model = stack()
    before = state(model)
    merged = lora_merge.merge_into(model, pairs(0), keep="compressed")
    model[1].weight.data.mul_(2)
    with pytest.raises(UsageError, match="values were changed"):
        merged.undo()
    assert merged.changed == ("1.weight",)
    assert same(model[0], {k: before[f"0.{k}"] for k in ("weight", "bias")})


def test_threads_change_a_model_one_at_a_time() -> None:
    model, other, seen = stack(), stack(), []
    before = state(model)

    def during(_: object) -> None:
        if not seen:
            seen.append(None)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: lora_merge.merge_into(other, pairs(1)).undo()).result()
                with pytest.raises(UsageError, match="uses this memory"):
                    pool.submit(lora_merge.merge_into, model, pairs(1)).result()

    with lora_merge.merge_into(model, pairs(0), progress=during):
        assert seen
    assert same(model, before)


def test_rows_that_share_their_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(1, 4).expand(4, 4))
    with pytest.raises(InputError, match="share their memory"):
        lora_merge.merge_into(model, pairs(0, layers=1))


def test_first_error_of_a_device_is_reported_though_nothing_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["CUDA error: device-side assert triggered", *["CUDA error: unspecified launch failure"] * 9])

    def broken(*_: Any) -> None:
        raise RuntimeError(next(texts))

    monkeypatch.setattr(merge_into, "_write", broken)
    with pytest.raises(DeviceFailed, match="device-side assert"):
        lora_merge.merge_into(stack(), pairs(0))


class Two(nn.Module):
    """Two layers whose weights the test puts into memory."""

    def __init__(self, a: torch.Tensor, c: torch.Tensor) -> None:
        super().__init__()
        self.a, self.c = nn.Module(), nn.Module()
        self.a.weight, self.c.weight = (nn.Parameter(t, requires_grad=False) for t in (a, c))


def layer(name: str, weight: torch.Tensor, seed: int = 0) -> Tensors:
    return {f"{name}.lora_up.weight": rand(weight.shape[0], 2, seed=seed), f"{name}.lora_down.weight": rand(2, weight.shape[1], seed=seed + 1)}  # fmt: skip


def mapped(folder: Path) -> torch.Tensor:
    (folder / "numbers").write_bytes(bytes(36 * 4))
    return torch.from_file(str(folder / "numbers"), shared=True, size=36).view(9, 4)


MEMORY: dict[str, Any] = {
    "one storage": (lambda t: t, lambda t: t.data),
    "transposed": (lambda t: t, lambda t: t.t()),
    "slices": (lambda t: t[:6], lambda t: t[3:]),
    "one row": (lambda t: t[:5], lambda t: t[4:]),
    "columns": (lambda t: t[:, :3], lambda t: t[:, 2:]),
    "steps": (lambda t: t.as_strided((4, 4), (8, 2)), lambda t: t.as_strided((2, 4), (16, 2))),
    "two storages": (lambda t: torch.from_numpy(t.numpy()[:6]), lambda t: torch.from_numpy(t.numpy()[3:])),
}
"""Views of a weight [9, 4] that touch common bytes."""

APART: dict[str, Any] = {
    "rows": (lambda t: t[:5], lambda t: t[5:]),
    "columns": (lambda t: t[:, :3], lambda t: t[:, 3:]),
    "every other": (lambda t: t[:, ::2], lambda t: t[:, 1::2]),
    "no numbers": (lambda t: t, lambda t: t[:0]),
}
"""Views of a weight [9, 4] that touch no common byte."""


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("source", ["memory", "file"])
def test_weights_that_share_memory_are_merged_alone_and_with_a_warning(kind: str, source: str, tmp_path: Path) -> None:
    """A change of one is a change of the other; changes of both would be mixed."""
    numbers = mapped(tmp_path) if source == "file" else rand(9, 4)
    a, c = (view(numbers) for view in MEMORY[kind])
    model = Two(a, c)
    before, want = state(model), a + rand(a.shape[0], 2) @ rand(2, a.shape[1], seed=1)
    with pytest.raises(InputError, match=r"a\.weight and c\.weight|c\.weight and a\.weight"):
        lora_merge.merge_into(model, layer("a", a) | layer("c", c))
    assert same(model, before)
    with pytest.warns(UserWarning, match=r"c\.weight with a\.weight") as caught:
        merged = lora_merge.merge_into(model, layer("a", a))
    assert caught[0].filename == __file__
    assert torch.allclose(model.a.weight, want)
    merged.undo()
    assert same(model, before)


@pytest.mark.parametrize("kind", APART)
def test_weights_in_one_storage_without_a_common_byte_are_merged(kind: str) -> None:
    numbers = rand(9, 4)
    a, c = (view(numbers) for view in APART[kind])
    model = Two(a, c)
    adapter = layer("a", a) | (layer("c", c) if c.numel() else {})
    want = lora_merge.merge_state_dict(state(model), adapter)
    with lora_merge.merge_into(model, adapter):  # warnings are errors
        assert same(model, want)


def test_buffer_and_a_second_name_of_a_changed_weight_are_named() -> None:
    model = stack()
    model.register_buffer("row", model[0].weight[1])
    model.add_module("again", model[0])
    with pytest.warns(UserWarning, match=r"row with 0\.weight.*again\.weight with 0\.weight|again.*row"):
        lora_merge.merge_into(model, pairs(0)).undo()


def test_number_that_shares_its_memory_within_a_weight_is_refused_before_and_after() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).requires_grad_(requires_grad=False)
    model[0].weight.data = rand(7).as_strided((4, 4), (1, 1))
    with pytest.raises(InputError, match="share their memory"):
        lora_merge.merge_into(model, pairs(0, layers=1))
    model[0].weight.data = rand(4, 4)
    merged = lora_merge.merge_into(model, pairs(0, layers=1))
    now = model[0].weight.data
    model[0].weight.data = now[:1].expand(4, 4)
    with pytest.raises(InputError, match="share their memory"):
        merged.undo()
    model[0].weight.data = now
    merged.undo()


def test_adapter_in_the_memory_of_a_weight_that_it_changes_is_refused() -> None:
    """Windows that are written would change the factors of those that follow."""
    model = stack()
    before = state(model)
    adapter = pairs(0) | {"2.lora_down.weight": model[0].weight[1:3]}
    with pytest.raises(InputError, match=r"adapter 0: 2\.lora_down\.weight"):
        lora_merge.merge_into(model, adapter)
    assert same(model, before)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["whole", "rows"])
def test_merges_into_two_models_on_one_memory_are_undone_in_reverse_order(keep: Any, part: slice) -> None:
    first = nn.Sequential(nn.Linear(4, 4, bias=False)).requires_grad_(requires_grad=False)
    weight = first[0].weight[part]
    second = Two(weight, rand(3, 3))
    before = state(first)
    merged = lora_merge.merge_into(first, pairs(0, layers=1), keep=keep)
    later = lora_merge.merge_into(second, layer("a", weight), keep=keep)
    both = state(first)
    with pytest.raises(UsageError, match="later merge"):
        merged.undo()
    assert same(first, both)
    later.undo()
    merged.undo()
    assert same(first, before)


def test_later_merge_is_the_one_that_was_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that which was called later: the first call may have matched for longer."""
    model, match = stack(), merge_into.prepare
    before, inner = state(model), []

    def slow(*args: Any) -> Any:
        made = match(*args)
        if not inner:
            inner.append(None)
            inner[0] = lora_merge.merge_into(model, pairs(1))
        return made

    monkeypatch.setattr(merge_into, "prepare", slow)
    outer = lora_merge.merge_into(model, pairs(0))
    with pytest.raises(UsageError, match="later merge"):
        inner[0].undo()
    outer.undo()
    inner[0].undo()
    assert same(model, before)


def test_merges_of_threads_on_one_memory_are_whole_or_refused() -> None:
    """Merges and undos at once, of models that share one weight: each is whole or refused, and all bytes are restored."""
    weight = rand(64, 64)
    models = [Two(weight, rand(64, 64)) for _ in range(3)] + [Two(rand(4, 4), weight[8:40])]
    before, counts = [state(m) for m in models], {"merged": 0, "refused": 0}

    def work(number: int) -> None:
        name = "c" if number == 3 else "a"
        for _ in range(5):
            with warnings.catch_warnings():
                try:
                    merged = lora_merge.merge_into(models[number], layer(name, getattr(models[number], name).weight))
                except UsageError:
                    counts["refused"] += 1
                    continue
            while merged.changed:
                try:
                    merged.undo()
                except UsageError:
                    counts["refused"] += 1
            counts["merged"] += 1

    with ThreadPoolExecutor(4) as pool:
        assert not [f.exception() for f in [pool.submit(work, n) for n in range(4)] if f.exception()]
    assert counts["merged"] > 0
    assert all(same(m, b) for m, b in zip(models, before, strict=True))


def test_undo_in_two_threads_restores_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, write, seen = stack(), merge_into._write, []
    before = state(model)
    merged = lora_merge.merge_into(model, pairs(0))

    def during(tensor: torch.Tensor, data: torch.Tensor) -> None:
        if not seen:
            seen.append(None)
            with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="uses this memory"):
                pool.submit(merged.undo).result()
        write(tensor, data)

    monkeypatch.setattr(merge_into, "_write", during)
    merged.undo()
    assert same(model, before)
    merged.undo()


def test_live_model_has_the_configuration_of_its_folder(tmp_path: Path) -> None:
    """Of transformers and diffusers, of a table, and of a module without one; of each part of a pipeline."""
    model = llama(tie_word_embeddings=True)
    config = live_model(model, {}, lambda _: rand(1)).config
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for field in ("architectures", "tie_word_embeddings", "num_attention_heads", "model_type", "vocab_size"):
        assert config[field] == written[field] or (field == "architectures" and config[field] == [type(model).__name__])
    flux_config = live_model(flux("FluxTransformer2DModel"), {}, lambda _: rand(1)).config
    assert flux_config["architectures"] == ["FluxTransformer2DModel"] and "num_attention_heads" in flux_config
    plain = stack()
    assert live_model(plain, {}, lambda _: rand(1)).config == {"architectures": ["Sequential"]}
    plain.config = {"architectures": ["Other"], "size": 3}  # type: ignore[assignment]
    assert live_model(plain, {}, lambda _: rand(1)).config == {"architectures": ["Other"], "size": 3}
    plain.config = {"architectures": None, "size": 3}  # type: ignore[assignment]
    assert live_model(plain, {}, lambda _: rand(1)).config == {"architectures": ["Sequential"], "size": 3}
    make, _ = PIPELINES["SD"]
    index = live_model(pipe := make(), {}, lambda _: rand(1))
    assert index.config == {"_class_name": type(pipe).__name__}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    assert index.components.keys() == parts.keys()
    for name, part in parts.items():
        assert index.components[name].config["architectures"] == [type(part).__name__]
        assert {n for n in index.tensors if n.startswith(f"{name}.")} == {
            f"{name}.{n}" for n in index.components[name].tensors
        }


@pytest.mark.parametrize("tied", [False, True])
def test_configuration_decides_what_a_change_of_the_embeddings_is(*, tied: bool, tmp_path: Path) -> None:
    """A model that ties its head has one weight for both ends: a change of the embeddings names the head."""
    model = llama(tie_word_embeddings=tied)
    name = "model.embed_tokens"
    adapter = {f"{name}.lora_B.weight": rand(30, 2), f"{name}.lora_A.weight": rand(2, 16, seed=1)}
    before = state(model)
    if tied:
        with pytest.warns(UserWarning, match=r"lm_head\.weight with model\.embed_tokens\.weight"):
            merged = lora_merge.merge_into(model, adapter)
    else:
        merged = lora_merge.merge_into(model, adapter)
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"]) is not tied
    assert merged.changed == ("model.embed_tokens.weight",)
    merged.undo()
    assert same(model, before)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("end", ["model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"])
def test_state_dict_warns_once_of_ends_that_were_tied_and_now_differ(end: str, *, shared: bool) -> None:
    """They are tied if their values are equal, in one memory or in two."""
    tensors = llama(tie_word_embeddings=True).state_dict()
    if not shared:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    rows = 16 if end.endswith("q_proj") else 30
    adapter = {f"{end}.lora_B.weight": rand(rows, 2), f"{end}.lora_A.weight": rand(2, 16, seed=1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lora_merge.merge_state_dict(tensors, adapter)
    texts = [str(w.message) for w in caught]
    assert len(texts) == (rows == 30), texts
    assert all("model.embed_tokens.weight and lm_head.weight were tied and now differ" in text for text in texts)


@pytest.mark.pairs
@pytest.mark.parametrize("how", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("name", ["weight_scale", "scale_weight", "scale", "scales", "weight_scales", "my_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (8, 1), (2, 2)])
def test_fp8_codes_with_a_scale_are_refused(how: str, name: str, shape: tuple[int, ...]) -> None:
    """Whatever the layer calls it, and wherever it is; the scale of the layer's inputs changes no weight."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    adapter = {"0.lora_A.weight": rand(2, 8), "0.lora_B.weight": rand(8, 2)}
    scale = torch.full(shape, 0.5)
    if how == "buffer":
        model[0].register_buffer(name, scale)
    else:
        setattr(model[0], name, nn.Parameter(scale) if how == "parameter" else scale)
    before = state(model)
    with pytest.raises(InputError, match=r"the base is quantised|has a scale of its own"):
        lora_merge.merge_into(model, adapter)
    assert all(torch.equal(t.float(), before[k].float()) for k, t in state(model).items())
    delattr(model[0], name)
    model[0].input_scale = scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what fp8 cannot hold
        lora_merge.merge_into(model, adapter)


@pytest.mark.parametrize(("model", "other"), [({}, "merge_state_dict()"), ("base.safetensors", "merge()")])
def test_what_is_no_module_has_a_function_of_its_own(model: Any, other: str) -> None:
    with pytest.raises(lora_merge.MergeError, match="no weights") as caught:
        lora_merge.merge_into(model, ["style.safetensors"])
    assert other in caught.value.fix
