"""What the caller has set in torch for his own work changes nothing of ours, and is his again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge import MergeError
from lora_merge.engine.torch_state import exact_products
from tests.kit.files import save
from tests.kit.tensors import Tensors, rand

CUDA, MKLDNN = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
newer = pytest.mark.skipif(not hasattr(CUDA, "fp32_precision"), reason="switches of torch 2.9")


@contextmanager
def turned(turn: Callable[[], object]) -> Iterator[None]:
    """With the user's setting, and afterwards as torch starts."""
    turn()
    try:
        yield
    finally:
        if hasattr(CUDA, "fp32_precision"):
            torch.backends.fp32_precision = "none"
            CUDA.fp32_precision = MKLDNN.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def settings() -> list[object]:
    found: list[object] = [b.fp32_precision for b in (CUDA, MKLDNN) if hasattr(b, "fp32_precision")]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:
        return [*found, "mixed"]


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda: None, id="nothing"),
        pytest.param(lambda: torch.set_float32_matmul_precision("high"), id="high"),
        pytest.param(lambda: torch.set_float32_matmul_precision("medium"), id="medium"),
        pytest.param(lambda: setattr(CUDA, "allow_tf32", True), id="allow_tf32"),
        pytest.param(lambda: setattr(CUDA, "fp32_precision", "tf32"), id="cuda", marks=newer),
        pytest.param(lambda: setattr(MKLDNN, "fp32_precision", "bf16"), id="mkldnn", marks=newer),
        pytest.param(lambda: setattr(torch.backends, "fp32_precision", "tf32"), id="all", marks=newer),
    ],
)
def test_products_are_exact_within_ours_and_as_they_were_when_all_are_done(turn: Callable[[], object]) -> None:
    with turned(turn):
        before = settings()
        with exact_products():
            with exact_products():
                assert not {"tf32", "bf16", "high", "medium", "mixed"} & set(settings())
            assert not {"tf32", "bf16", "high", "medium", "mixed"} & set(settings())
        assert settings() == before


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_products_are_possible_where_the_caller_wants_what_is_deterministic(mode: str) -> None:
    """CUDA refuses all of them otherwise, unless the environment has a variable, and sums at places on any account."""
    torch.set_deterministic_debug_mode(mode)
    try:
        before = torch.get_deterministic_debug_mode()
        with exact_products():
            assert torch.get_deterministic_debug_mode() == 0
        assert torch.get_deterministic_debug_mode() == before > 0
    finally:
        torch.set_deterministic_debug_mode("default")


def test_products_of_16_bits_are_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default CUDA rounds partial sums, where a product is split, to the 16 bits of its result."""
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    before = [getattr(CUDA, name) for name in names]
    with exact_products():
        assert [getattr(CUDA, name) for name in names] == [False, False]
    assert [getattr(CUDA, name) for name in names] == before == [True, True]


@contextmanager
def default(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def loha_and_oft() -> Tensors:
    factors = {"hada_w1_a": (40, 4), "hada_w1_b": (4, 30), "hada_w2_a": (40, 4), "hada_w2_b": (4, 30)}
    return {f"m.a.{k}": rand(*v) for k, v in factors.items()} | {"m.b.oft_blocks": rand(4, 10, 10)}


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda: torch.autocast("cpu", dtype=torch.bfloat16), id="autocast"),
        pytest.param(lambda: torch.device("meta"), id="in a device"),
        pytest.param(lambda: default("meta"), id="default device"),
    ],
)
def test_autocast_and_default_device_do_not_reach_us(tmp_path: Path, disturb: Callable[[], object]) -> None:
    weights, adapter = (
        {"m.a.weight": rand(40, 30), "m.b.weight": rand(40, 30), "m.c.weight": rand(3, 3)},
        loha_and_oft(),
    )
    opened = lora_merge.load_adapter(save(adapter, tmp_path / "a"))
    merged, delta = lora_merge.merge_state_dict(weights, adapter), opened.delta("m.a", weights["m.a.weight"])
    with disturb():  # type: ignore[attr-defined]
        again, same = lora_merge.merge_state_dict(weights, adapter), opened.delta("m.a", weights["m.a.weight"])
        assert torch.get_default_device().type == ("meta" if torch.empty(0).is_meta else "cpu")
    assert torch.equal(delta, same)
    for key, value in merged.items():
        assert torch.equal(again[key], value)


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    adapter = loha_and_oft()
    empty = {k: torch.empty(40, 30, device="meta") for k in ("m.a.weight", "m.b.weight")}
    with pytest.raises(MergeError, match="meta"):
        lora_merge.merge_state_dict(empty, adapter)
    opened = lora_merge.load_adapter(save(adapter, tmp_path / "a"))
    with pytest.raises(MergeError, match="meta"):
        opened.delta("m.b", empty["m.b.weight"])
