"""Terms that cancel: what is left of them is right, or refused with the option that mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lora_merge
from lora_merge.engine import block_folder
from lora_merge.errors import InputError, VerificationFailed
from tests.kit.files import load, save
from tests.kit.oracles import assert_rounded
from tests.kit.pretended_cuda import Pretended
from tests.kit.tensors import Tensors, rand

LAYERS, ROWS, COLS = 4, 96, 64


def layer(n: int) -> str:
    return f"blocks.{n}.q"


def adapter(seed: int, kind: str = "lora", layers: Sequence[int] = range(LAYERS)) -> Tensors:
    found: Tensors = {}
    for n in layers:
        if kind == "diff":
            found[f"{layer(n)}.diff"] = rand(ROWS, COLS, seed=seed + n, scale=1.0)
        elif kind == "loha":
            for k, shape in enumerate(((ROWS, 3), (3, COLS), (ROWS, 3), (3, COLS))):
                found[f"{layer(n)}.hada_w{k // 2 + 1}_{'ab'[k % 2]}"] = rand(*shape, seed=seed + n + k, scale=1.0)
        else:
            found[f"{layer(n)}.lora_up.weight"] = rand(ROWS, 4, seed=seed + n, scale=1.0)
            found[f"{layer(n)}.lora_down.weight"] = rand(4, COLS, seed=seed + n, scale=1.0)
    return found


def delta(tensors: Tensors, n: int) -> torch.Tensor | float:
    t = {key.removeprefix(f"{layer(n)}."): v.double() for key, v in tensors.items() if key.startswith(layer(n))}
    if not t:
        return 0.0
    if "diff" in t:
        return t["diff"]
    if "hada_w1_a" in t:
        return (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    return t["lora_up.weight"] @ t["lora_down.weight"]


def exact(base: Tensors, adapters: Sequence[tuple[Tensors, float]]) -> Tensors:
    return {
        key: weight.double() + sum(s * delta(a, n) for a, s in adapters) for n, (key, weight) in enumerate(base.items())
    }


BASE = {f"{layer(n)}.weight": rand(ROWS, COLS, seed=n, scale=1.0) for n in range(LAYERS)}
ONE, TWO = adapter(10), adapter(30)
LARGE = {key: 1e7 * value if "up" in key else value for key, value in TWO.items()}
OPPOSITE = {key: -value if "up" in key else value for key, value in LARGE.items()}
GROWN = {f"{layer(n)}.diff": 1e-6 * rand(ROWS, COLS, seed=90 + n) - BASE[f"{layer(n)}.weight"] for n in range(LAYERS)}
CASES: Mapping[str, Sequence[tuple[Tensors, float]]] = {
    "strengths": [(ONE, 0.8), (TWO, 1e7), (TWO, -1e7)],
    "strengths of some layers": [(ONE, 0.8), (adapter(30, layers=[1, 3]), -3e5), (adapter(30, layers=[0, 1]), 3e5)],
    "tensors": [(ONE, 1.0), (LARGE, 1.0), (OPPOSITE, 1.0)],
    "whole changes": [(adapter(50, "diff"), 1e6), (ONE, 0.5), (adapter(50, "diff"), -1e6)],
    "loha": [(adapter(50, "loha"), -1e6), (ONE, 0.5), (adapter(50, "loha"), 1e6)],
    "the base": [(GROWN, 1.0)],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["sum", "compose"])
def test_remainder_of_terms_that_cancel_is_right(method: str, name: str, tmp_path: Path) -> None:
    """In a file and in memory, in fp32 and in 16 bits; the same bytes in any memory."""
    want = exact(BASE, CASES[name])
    given = [(save(a, tmp_path / f"{n}.safetensors"), s) for n, (a, s) in enumerate(CASES[name])]
    base = save(BASE, tmp_path / "base.safetensors")
    for dtype, memory in (("keep", "1GiB"), ("keep", "64MiB"), ("bf16", "1GiB")):
        out = tmp_path / f"{dtype}-{memory}.safetensors"
        lora_merge.merge(base, given, out, method=method, dtype=dtype, max_memory=memory)
        for key, tensor in load(out).items():
            assert_rounded(tensor, want[key])
    assert (tmp_path / "keep-1GiB.safetensors").read_bytes() == (tmp_path / "keep-64MiB.safetensors").read_bytes()
    held: Any = lora_merge.merge_state_dict(BASE, CASES[name], method=method)
    for key, tensor in load(tmp_path / "keep-1GiB.safetensors").items():
        assert torch.equal(held[key], tensor)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["strengths", "strengths of some layers", "tensors"])
def test_device_finds_terms_that_cancel(name: str, tmp_path: Path, cuda: Pretended) -> None:
    want = exact(BASE, CASES[name])
    given = [(save(a, tmp_path / f"{n}.safetensors"), s) for n, (a, s) in enumerate(CASES[name])]
    lora_merge.merge(save(BASE, tmp_path / "base.safetensors"), given, tmp_path / "out", device="cuda")
    for key, tensor in load(tmp_path / "out").items():
        assert_rounded(tensor, want[key])
    assert not cuda.races


def test_quantised_weights_whose_terms_cancel_are_right(tmp_path: Path) -> None:
    base = save(BASE, tmp_path / "base.safetensors")
    lora_merge.merge(base, [save(ONE, tmp_path / "0.safetensors")], tmp_path / "coded.safetensors", dtype="fp8_scaled")
    given = [(save(a, tmp_path / f"{n}.safetensors"), s) for n, (a, s) in enumerate(CASES["strengths"])]
    lora_merge.merge(tmp_path / "coded.safetensors", given, tmp_path / "fp32.safetensors")
    lora_merge.merge(tmp_path / "coded.safetensors", given, tmp_path / "fp64.safetensors", compute_dtype="fp64")
    got, want = load(tmp_path / "fp32.safetensors"), load(tmp_path / "fp64.safetensors")
    for key, value in want.items():
        assert torch.equal(got[key].double(), value.double()), key


def test_usual_strengths_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, also where adapters are subtracted."""
    dtypes, folded = [], block_folder.new_weights

    def seen(blocks: Any, base: torch.Tensor, *rest: Any) -> Any:
        dtypes.extend([base.dtype] * len(blocks))
        return folded(blocks, base, *rest)

    monkeypatch.setattr(block_folder, "new_weights", seen)
    lora_merge.merge_state_dict(BASE, [(ONE, 1.0), (TWO, -1.0), (ONE, -0.5)])
    assert dtypes == [torch.float32] * LAYERS


def crossed() -> Tensors:
    """Products of 1e5 whose sum is about 1."""
    found = adapter(70)
    for n in range(LAYERS):
        up, down = (found[f"{layer(n)}.lora_{part}.weight"] for part in ("up", "down"))
        up[:, 0] *= 1e5
        up[:, 1] = -up[:, 0]
        down[1] = down[0] * (1 + 1e-6 * rand(COLS, seed=n, scale=1.0))
    return found


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_products_that_cancel_are_refused_with_what_mends_it(dtype: str, tmp_path: Path) -> None:
    base, tensors = save(BASE, tmp_path / "base.safetensors"), crossed()
    lora, out = save(tensors, tmp_path / "lora.safetensors"), tmp_path / "out.safetensors"
    with pytest.raises(InputError, match=r"products .* cancel") as caught:
        lora_merge.merge(base, lora, out, dtype=dtype)
    assert caught.value.fix == 'compute with compute_dtype="fp64"' and not out.exists()
    lora_merge.merge(base, lora, out, dtype=dtype, compute_dtype="fp64")
    for key, tensor in load(out).items():
        assert_rounded(tensor, exact(BASE, [(tensors, 1.0)])[key])


def test_file_whose_products_cancelled_is_not_proven(tmp_path: Path) -> None:
    """Nor is one in which a number is wrong by more than that explains."""
    base, lora = save(BASE, tmp_path / "base.safetensors"), save(crossed(), tmp_path / "lora.safetensors")
    out = tmp_path / "out.safetensors"
    lora_merge.merge(base, lora, out, verify=False)
    with pytest.raises(VerificationFailed, match="cancel"):
        lora_merge.verify(out, base, [lora], full=True)
    damaged = load(out)
    damaged[f"{layer(0)}.weight"][5, 7] += 1e3
    with pytest.raises(VerificationFailed, match="are not what base and adapters give"):
        lora_merge.verify(save(damaged, tmp_path / "damaged.safetensors"), base, [lora], full=True)
