"""Hostile files of every kind we read: a MergeError or a right answer, soon, in little memory, nothing else.

A short, repeatable part runs with the other tests; `pytest -m fuzz tests/fuzz` runs five minutes of new cases
(FUZZ_SECONDS to change that). A failure prints the case and the seed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save

import lora_merge
from lora_merge.checkpoint import open_checkpoint, quantised, read_bytes
from lora_merge.errors import MergeError

from . import strategies as s

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "300"))
SLOWEST = 5.0  # processor seconds for one case; they take milliseconds
GROWTH = 300  # MB that all cases together may add to the process

BASE = save({"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4, 4), "b.bias": torch.zeros(4)})
ADAPTER = save({"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)})
ENDINGS = [
    "lora_A.weight", "lora_B.weight", "lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha", "dora_scale",
    "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b",
    "lokr_t2", "oft_blocks", "a1.weight", "a2.weight", "b1.weight", "b2.weight", "diff", "diff_b", "w_norm", "weight",
    "on_input", "lora_magnitude_vector", "lora_embedding_A", "set_weight", "oft_R.weight", "ia3_l", "vera_lambda_b",
]  # fmt: skip
GROUPS = [
    {"lora_A.weight": [2, 4], "lora_B.weight": [4, 2]},
    {"lora_down.weight": [2, 4], "lora_up.weight": [4, 2], "dora_scale": [4, 1]},
    {"hada_w1_a": [4, 2], "hada_w1_b": [2, 4], "hada_w2_a": [4, 2], "hada_w2_b": [2, 4]},
    {"lokr_w1": [2, 2], "lokr_w2": [2, 2]},
    {"lokr_w1": [2, 2], "lokr_w2_a": [2, 1], "lokr_w2_b": [1, 2]},
    {"oft_blocks": [2, 2, 2]},
    {"a1.weight": [2, 4], "a2.weight": [4, 2], "b1.weight": [2, 4], "b2.weight": [4, 2]},
    {"diff": [4, 4]},
    {"weight": [4, 4]},
]
MODULES = ["a", "b", "lora_unet_a", "base_model.model.a", "transformer.b", "c", ""]

config = s.table(
    {
        "peft_type": st.sampled_from(["LORA", "LOHA", "LOKR", "OFT", "IA3", "VERA", "BOFT", "lora", "PROMPT_TUNING"]),
        "r": st.integers(1, 4),
        "lora_alpha": st.one_of(st.integers(0, 4), s.numbers),
        "rank_pattern": st.dictionaries(st.one_of(s.text, s.nasty), st.integers(0, 4), max_size=2),
        "alpha_pattern": st.dictionaries(st.one_of(s.text, s.nasty), s.numbers, max_size=2),
        "target_modules": st.one_of(st.lists(s.text, max_size=2), s.nasty),
        "modules_to_save": st.one_of(st.none(), st.lists(st.sampled_from(["a", "b"]), max_size=2)),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "fan_in_fan_out": st.booleans(),
        "bias": st.sampled_from(["none", "all", "lora_only"]),
        "layers_pattern": s.nasty,
    }
)
recipe = st.dictionaries(
    st.one_of(st.sampled_from(["lora_merge.recipe", "sshs_model_hash", "format", "ss_network_args",
                               "lora_adapter_metadata", "modelspec.architecture", "ss_network_module"]), s.text),
    st.one_of(s.text, s.nasty, st.one_of(config, s.values).map(lambda v: json.dumps(v))), max_size=4,
)  # fmt: skip
yaml_map = st.one_of(
    st.sampled_from([b"a: *x", b"&a [*a]", b"!!python/object/apply:os.mkdir [executed]", b"- [", b"\xff\xfe",
                     b"x: !!int z",
                     b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]", b"rows:\n  - [a, b]\n", b"'" * 99]),
    s.as_json(s.values),
    st.sampled_from(sorted((ROOT / "lora_merge" / "architectures").glob("*.yaml"))).map(Path.read_bytes)
    .flatmap(lambda content: st.one_of(st.just(content), s.damaged(content))),
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Files to write, by name, and what to do with the folder they are in."""

    files: dict[str, st.SearchStrategy[bytes]]
    action: Callable[[Path], Any]


def opened(folder: Path, name: str = "x.safetensors") -> None:
    """Whatever is accepted can be read to the last byte, and the library accepts it too."""
    path = folder / name
    index = open_checkpoint(path)
    quantised(index)
    for info in index.tensors.values():
        assert len(read_bytes(info)) == info.nbytes
    if path.name.endswith(".safetensors"):
        deserialize(path.read_bytes())


def merged(folder: Path, adapter: str = "adapter", **options: Any) -> None:
    """What can be planned can be merged, or is refused like any other input."""
    base = folder / ("base" if (folder / "base").exists() else "base.safetensors")
    out = folder / "out"
    lora_merge.merge(base, [folder / adapter], out, device="cpu", **options)
    open_checkpoint(out)


TARGETS = {
    "header": Target(
        {"x.safetensors": st.one_of(s.checkpoints(s.text), s.checkpoints(s.text, recipe)).flatmap(s.damaged)}, opened
    ),
    "index.json": Target(
        {
            "m/model-00001-of-00002.safetensors": st.just(BASE),
            "m/model-00002-of-00002.safetensors": st.just(ADAPTER),
            "m/model.safetensors.index.json": s.as_json(
                s.table({"weight_map": st.dictionaries(
                    st.sampled_from(["a.weight", "b.weight", "b.bias", "a.lora_A.weight", "zzz"]),
                    st.one_of(st.sampled_from(["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
                              s.nasty))})
            ),
        },
        lambda f: open_checkpoint(f / "m"),
    ),
    "pipeline": Target(
        {
            "m/unet/diffusion_pytorch_model.safetensors": st.just(BASE),
            "m/unet/config.json": s.as_json(s.values),
            "m/model_index.json": s.as_json(s.table({"unet": st.just(["diffusers", "X"]), "../m": s.values})),
        },
        lambda f: open_checkpoint(f / "m"),
    ),
    "adapter_config.json": Target(
        {
            "base.safetensors": st.just(BASE),
            "adapter/adapter_model.safetensors": st.just(ADAPTER),
            "adapter/adapter_config.json": s.as_json(config),
        },
        merged,
    ),
    "metadata": Target(
        {
            "base": s.checkpoints(st.sampled_from(["a.weight", "b.weight"]), recipe),
            "adapter": s.checkpoints(
                st.builds("a.{}".format, st.sampled_from(["lora_A.weight", "lora_B.weight", "alpha"])), recipe
            ),
        },
        merged,
    ),
    "adapter tensors": Target(
        {
            "base": st.just(BASE),
            "adapter": s.checkpoints(st.builds("{}.{}".format, st.sampled_from(MODULES), st.sampled_from(ENDINGS))),
        },
        lambda f: merged(f, unmatched="skip"),
    ),
    "adapter values": Target(
        {"base": st.just(BASE), "adapter": s.adapters(["a", "b"], GROUPS)}, lambda f: merged(f, unmatched="skip")
    ),
    "empty tensors": Target(
        {
            "base": st.just(save({"a.weight": torch.zeros(0, 4), "b.weight": torch.zeros(4, 0)})),
            "adapter": s.checkpoints(st.builds("{}.{}".format, st.sampled_from(["a", "b"]), st.sampled_from(ENDINGS))),
        },
        lambda f: merged(f, unmatched="skip"),
    ),
    "yaml map": Target(
        {"base": st.just(BASE), "adapter": st.just(ADAPTER), "map.yaml": yaml_map},
        lambda f: merged(f, map=f / "map.yaml"),
    ),
    "torch archive": Target(
        {"x.pt": st.builds(s.torch_file, s.torch_objects(), zipped=st.booleans())}, lambda f: opened(f, "x.pt")
    ),
    "torch bytes": Target(
        {"x.pt": st.builds(s.torch_file, s.torch_objects(), zipped=st.booleans()).flatmap(s.damaged)},
        lambda f: opened(f, "x.pt"),
    ),
}  # fmt: skip


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(name: str, examples: int, number: int) -> None:
    """One batch of cases of one target."""
    target = TARGETS[name]

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries(target.files))  # type: ignore[arg-type]
    def check(files: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "inside")
            for file, content in files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(content)
            before = snapshot(Path(root))
            with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
                started = time.process_time()
                with contextlib.suppress(MergeError):
                    target.action(folder)
                assert time.process_time() - started < SLOWEST
            (folder / "out").unlink(missing_ok=True)
            assert snapshot(Path(root)) == before

    check()


def memory() -> float:
    """The most memory this process ever had, in MB; 0 where that cannot be asked."""
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Any:
    for name in TARGETS:
        run(name, 1, 0)  # so that what is imported late is not counted
    before = memory()
    yield
    assert memory() - before < GROWTH


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_a_few_cases(name: str) -> None:
    run(name, 40, 1)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_many_cases(name: str) -> None:
    until = time.monotonic() + SECONDS / len(TARGETS)
    first = random.SystemRandom().randrange(1 << 32)
    for number in itertools.count(first):
        run(name, 100, number)
        if time.monotonic() > until:
            break
