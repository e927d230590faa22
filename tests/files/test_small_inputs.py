"""No input below a megabyte takes more than 5 s or 500 MB, and what real programs save is still read."""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_merge.disk.reader import read_bytes
from lora_merge.files.checkpoint import open_checkpoint
from tests.kit import hostile_inputs, hostile_names
from tests.kit.cost import slowness

ROOT = Path(__file__).parents[2]
SECONDS, MEGABYTES = 5, 500
FEW_SECONDS = 1.5  # for inputs of 60 000 bytes: what grows with the square of the bytes takes longer


@pytest.mark.slow
def test_small_inputs_take_little_time_and_memory(tmp_path: Path) -> None:
    """The command line answers each with an exit code and one error; what it used for each is what it says."""
    told, slow = io.StringIO(), slowness()
    with contextlib.redirect_stdout(told):
        hostile_inputs.run(tmp_path, hostile_inputs.inputs())
    lines = checked(told.getvalue(), FEW_SECONDS * max(slow, slowness()))
    assert len(lines) > 200
    for name, _, code, _, _ in lines:
        assert code in (2, 3, 4, 5) or (code == 0 and not name.startswith(("pickle", "jobs"))), (name, code)


@pytest.mark.slow
def test_megabyte_of_names_entries_or_fields_takes_little_time_and_memory(tmp_path: Path) -> None:
    """Each run draws a group, and of its files of up to a megabyte every eighth; they are made in one process.

    All of them, some 2500, take two hours: `python -m tests.kit.hostile_names FOLDER`.
    """
    group, first = random.choice([*hostile_names.groups()]), random.randrange(8)
    command = [sys.executable, "-m", "tests.kit.hostile_names", str(tmp_path), "1000000", group, "8", str(first)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1_000, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = checked(done.stdout, SECONDS)
    assert lines, group
    for name, _, code, _, _ in lines:
        assert code in (0, 2, 3, 4, 5, 6), (name, code)


def checked(told: str, most: float) -> list[tuple[str, int, object, float, float]]:
    """What the command line said to each input, having used no more than it may."""
    lines = [json.loads(line) for line in told.splitlines()]
    for name, size, _, seconds, megabytes in lines:
        assert size <= 1_000_000, name
        assert seconds < most, (name, seconds)
        assert megabytes < MEGABYTES, (name, megabytes)
    return lines


def trained(dtype: torch.dtype) -> dict[str, Any]:
    """A checkpoint as Lightning and its kin write it: everything that a training needs to go on."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = model.state_dict()
    assert isinstance(state, OrderedDict)
    state._metadata["note"] = {"version": 1}  # type: ignore[attr-defined]
    return {
        "state_dict": state, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [scheduler.state_dict()],
        "epoch": 3, "global_step": 2**40, "callbacks": {("ModelCheckpoint", "val"): {"best": torch.tensor(0.5)}},
        "hyper_parameters": {"lr": 1e-4, "betas": (0.9, 0.999), "name": "läuft", "flags": {1, 2}, "none": None},
        "rng": torch.get_rng_state(), "bytes": b"\xff\x00a", "array": bytearray(b"abc"), "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "complex": 1 + 2j, "counts": Counter("abca"),
        "ordered": OrderedDict(a=OrderedDict(b=1)), "half": torch.ones(2).half(), "big": 2**200, "-": -(2**40),
        "parameter": torch.nn.Parameter(torch.ones(2)), "sparse": torch.ones(2).to_sparse(), "view": torch.ones(6)[1:3],
        "bool": torch.tensor([True]), "fp8": torch.ones(2).to(torch.float8_e4m3fn), "long": "x" * 100_000, "text": "y" * 300,
    }  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("zipped", ["zip", "legacy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:.*lr_scheduler.step")
def test_files_that_a_training_saves_are_read(tmp_path: Path, zipped: str, dtype: torch.dtype) -> None:
    whole = trained(dtype)
    if zipped == "legacy":
        del whole["fp8"]  # torch itself cannot read it back from there
    torch.save(whole, tmp_path / "last.ckpt", _use_new_zipfile_serialization=zipped == "zip")
    index = open_checkpoint(tmp_path / "last.ckpt")
    assert set(index.tensors) == set(whole["state_dict"])
    for name, tensor in whole["state_dict"].items():
        assert read_bytes(index.tensors[name]) == tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_old_ways_of_saving_are_read(tmp_path: Path, protocol: int) -> None:
    """Storages shared by views, and tensors made by the first of torch's functions for that."""
    ones = torch.arange(12.0)
    tensors = {"a": ones.reshape(3, 4).t(), "b": ones[2:5], "c": torch.nn.Parameter(ones[:2])}
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    assert set(open_checkpoint(tmp_path / "x.pt").tensors) == set(tensors)
