"""The readers that the fuzz runs are for, and the long run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save

import lora_merge
from lora_merge.batch.run import make_batch
from lora_merge.disk.reader import read_bytes
from lora_merge.engine.merge import run as carry_out
from lora_merge.errors import MergeError
from lora_merge.files.checkpoint import open_checkpoint
from lora_merge.planning.recipe import KEY
from lora_merge.recipes.replay import plan_again, prove, refuse_to_unmerge
from lora_merge.viewing.inspect import inspect
from tests.fuzz import strategies as s
from tests.kit.inspected import lines

ROOT = Path(__file__).parents[2]


SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))


SLOWEST = 5.0  # processor seconds for one case; they take milliseconds


BASE = save({"a.weight": torch.zeros(4, 4), "b.weight": torch.zeros(4, 4), "b.bias": torch.zeros(4)})


ADAPTER = save({"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)})


MERGED = {"a.weight": torch.full((4, 4), 2.0), "b.weight": torch.zeros(4, 4), "b.bias": torch.zeros(4)}


ENDINGS = [
    "lora_A.weight", "lora_B.weight", "lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha", "dora_scale",
    "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b",
    "lokr_t2", "oft_blocks", "a1.weight", "a2.weight", "b1.weight", "b2.weight", "diff", "diff_b", "w_norm", "weight",
    "on_input", "lora_magnitude_vector", "lora_embedding_A", "set_weight", "oft_R.weight", "ia3_l", "vera_lambda_b",
    "vera_lambda_d", "fourierft_spectrum", "waveft_spectrum", "bias_indices", "bias_values", "bias_size",
    "reshape_weight", "lora_alpha", "shira_weight", "shira_indices", "road_theta", "road_alpha",
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
    {
        "lora_up.weight": [4, 2],
        "lora_down.weight": [2, 4],
        "bias_indices": [2, 1],
        "bias_values": [1],
        "bias_size": [2],
    },
    {"lora_up.weight": [4, 2], "lora_down.weight": [2, 4], "reshape_weight": [2]},
    {"vera_lambda_b": [4], "vera_lambda_d": [2]},
    {"weight": [4], "on_input": []},
]


MODULES = [
    "a",
    "b",
    f"text_encoder_{'9' * 5000}.a",
    "a/0",
    f"a/{'9' * 5000}",
    "a/²",
    "a\nerror: b",
    "lora_unet_a",
    "base_model.model.a",
    "transformer.b",
    "c",
    "",
]


config = s.table(
    {
        "peft_type": st.sampled_from(
            [
                "LORA",
                "LOHA",
                "LOKR",
                "OFT",
                "IA3",
                "VERA",
                "BOFT",
                "lora",
                "PROMPT_TUNING",
                "FOURIERFT",
                "WAVEFT",
                "RANDLORA",
                "PVERA",
                "ROAD",
                "VBLORA",
                "TRAINABLE_TOKENS",
            ]
        ),
        "projection_prng_key": s.numbers,
        "random_loc_seed": s.numbers,
        "n_frequency": s.numbers,
        "topk": s.numbers,
        "peft_version": st.sampled_from(["0.17.0", "9" * 5000 + ".1", "²", "0." + "9" * 5000 + ".1", "٣.١"]),
        "token_indices": st.lists(s.numbers, max_size=3),
        "group_size": s.numbers,
        "use_cayley_neumann": st.booleans(),
        "target_parameters": st.lists(st.one_of(s.text, s.nasty), max_size=2),
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
    st.one_of(st.sampled_from([KEY, "sshs_model_hash", "format", "ss_network_args",
                               "lora_adapter_metadata", "modelspec.architecture", "ss_network_module"]), s.text),
    st.one_of(s.text, s.nasty, st.one_of(config, s.values).map(lambda v: json.dumps(v))), max_size=4,
)  # fmt: skip


yaml_bombs = st.sampled_from(
    [b"a: *x", b"&a [*a]", b"!!python/object/apply:os.mkdir [executed]", b"- [", b"\xff\xfe", b"x: !!int z",
     b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nd: [*c,*c]", b"rows:\n  - [a, b]\n", b"'" * 99,
     b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1) if n > 97 else b"x"] * 9)) for n in range(97, 110)),
     b"{" * 5000, b"- " * 5000, b"? " * 5000]
)  # fmt: skip


yaml_map = st.one_of(
    yaml_bombs,
    s.as_json(s.values),
    st.sampled_from(sorted((ROOT / "lora_merge" / "models" / "architectures").glob("*.yaml"))).map(Path.read_bytes)
    .flatmap(lambda content: st.one_of(st.just(content), s.damaged(content))),
)  # fmt: skip


def listed(name: str, content: bytes) -> dict[str, Any]:
    """An input as a recipe names it."""
    return {
        "name": name,
        "files": [{"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}],
    }


PATTERNS = ["te", "unet", "re:a", "re:(a+)+$", "re:(", "re:" + "a*" * 40, "re:" + "(" * 3000]


OURS = {
    "version": "0.1.0", "base": listed("base.safetensors", BASE), "dtype": "keep", "compute_dtype": "fp32",
    "unmatched": "error",
    "adapters": [{**listed("adapter.safetensors", ADAPTER), "strength": 1.0, "parts": [["re:a", 1.0]]}],
}  # fmt: skip


SET = {
    **OURS, "base": OURS["base"] | {"folder": False, "config": "", "recipe": OURS}, "setting": {"lora_alpha": 2},  # type: ignore[operator]
    "map": {"name": "m.yaml", "text": (ROOT / "lora_merge" / "models" / "architectures" / "vae.yaml").read_text()},
}  # fmt: skip


odd = st.one_of(
    s.values, s.nasty, st.sampled_from([*PATTERNS, "fp16", "skip", "fp64", True, [["te", 1]], {"parts": [[0, 2]]}, "0" * 64]),
    st.integers(1, 100).map(lambda n: json.loads("[" * n + "]" * n)),
)  # fmt: skip


@st.composite
def with_recipe(draw: st.DrawFn) -> bytes:
    """The merge of BASE and ADAPTER, with a recipe that is nearly right."""
    text = json.dumps(draw(s.bent(st.sampled_from([OURS, OURS, SET]), st.one_of(odd, st.just("deep")))))
    depth = draw(st.sampled_from([300, 900, 3000, 90_000]))
    text = text.replace('"deep"', "[" * depth + "]" * depth)
    if draw(st.integers(0, 9)) == 0:
        text = draw(s.damaged(text.encode())).decode("latin-1")
    return save(MERGED, {KEY: text})


JOBS = [
    {"base": "base.safetensors", "adapters": ["adapter.safetensors:0.5"], "output": ""},
    {"adapters": [{"path": "{a}", "strength": "{b}", "strength_for": {"te": 1, "re:a": "{b}"}}], "output": "",
     "matrix": {"a": {"glob": "ad*.safetensors"}, "b": [0.5, 1], "exclude": [{"b": 1}]}},
    {"base": "{a.stem}.safetensors", "output": "", "dtype": "fp16", "compute_dtype": "fp32", "device": "cpu", "verify": True,
     "overwrite": True, "unmatched": "skip", "on_overflow": "saturate", "max_memory": "64MiB", "matrix": {"a": ["base"], "b": [1, "x"]},
     "setting": {"lora_alpha": 1}, "strength_for": {"unet": 0.5}},
]  # fmt: skip


FILES = st.builds(
    lambda some: {
        "version": 1,
        "defaults": {"base": "base.safetensors", "adapters": ["adapter.safetensors"]},
        "jobs": some,
    },
    st.lists(st.sampled_from(JOBS), min_size=1, max_size=3),
)


outputs = st.sampled_from(["out/o", "out/{a}", "out/{a}-{b}", "out/{a.stem}", "out/x{b}/{a.name}", "out/o/{b}"])


fields = st.one_of(
    odd, st.sampled_from(["{a}", "{b}", "{c}", "{a.size}", "{", "out/o", "1GiB", ["../up", "/abs", "~", "", "{a}", "a"], [None],
                          {"glob": "../*"}, {"glob": "**/*"}, {"glob": "["}, [{"a": 1}], list(range(2000))])
)  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A nearly right file whose outputs are all in one folder: what a file itself names may be written."""
    value = draw(s.bent(FILES, fields))
    for number, job in enumerate(value["jobs"] if isinstance(value.get("jobs"), list) else ()):
        if isinstance(job, dict):
            job["output"] = draw(outputs) + draw(st.sampled_from(["", str(number), str(number)]))
    return value


def as_yaml(value: Any) -> bytes:
    """As YAML, with its own ways of writing numbers and text."""
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "replace")


@dataclass(frozen=True)
class Target:
    """Files to write, by name, and what to do with the folder they are in."""

    files: dict[str, st.SearchStrategy[bytes]]
    action: Callable[[Path], Any]


def opened(folder: Path, name: str = "x.safetensors") -> None:
    """Whatever is accepted can be read to the last byte, and the library accepts it too."""
    path = folder / name
    index = open_checkpoint(path)
    assert index.unread.holds("") <= bool(index.unread.how)
    for info in index.tensors.values():
        assert len(read_bytes(info)) == info.nbytes
    if path.name.endswith(".safetensors"):
        deserialize(path.read_bytes())


def merged(folder: Path, adapter: str = "adapter", **options: Any) -> None:
    """What can be planned can be merged, or is refused like any other input."""
    base = folder / ("base" if (folder / "base").exists() else "base.safetensors")
    out = folder / "out"
    try:
        lora_merge.merge(base, [folder / adapter], out, device="cpu", **options)
    except MergeError as e:  # a proof that refuses a merge, or a lack of memory, is no fault of the files
        assert e.exit_code in (2, 3, 4), e
        assert not out.exists()
        raise
    open_checkpoint(out)


def retold(folder: Path) -> None:
    """What every reader of a recipe does with it; none may fail in another way than by a MergeError."""
    made, out = folder / "made.safetensors", folder / "out"
    for act in (
        lambda: list(lines(inspect(made))),
        lambda: prove(made),
        lambda: carry_out(plan_again(made, out, device="cpu")),
        lambda: refuse_to_unmerge(made),
        lambda: make_batch([{"base": "base.safetensors", "adapters": ["adapter.safetensors"], "output": str(made)}]),
    ):
        with contextlib.suppress(MergeError):
            act()
    open_checkpoint(made)


def batched(folder: Path) -> None:
    """All jobs run that can; every other has an error of ours."""
    for report in lora_merge.run_batch(folder / "jobs.yaml"):
        assert report.ok or "unexpected" not in report.error.what, report.error  # type: ignore[union-attr]


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
            "m/unet/config.json": s.as_json(st.one_of(s.values, s.table({"architectures": st.just(["X"]), "_class_name": s.text}))),
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
    "recipe": Target(
        {"base.safetensors": st.just(BASE), "adapter.safetensors": st.just(ADAPTER), "made.safetensors": with_recipe()},
        retold,
    ),
    "jobs": Target(
        {"base.safetensors": st.just(BASE), "adapter.safetensors": st.just(ADAPTER), "jobs.yaml": jobs().map(as_yaml)},
        batched,
    ),
    "jobs file": Target(  # planned only: a damaged one may name any output
        {
            "base.safetensors": st.just(BASE),
            "adapter.safetensors": st.just(ADAPTER),
            "jobs.yaml": st.one_of(
                yaml_bombs,
                jobs().map(as_yaml).flatmap(s.damaged),
                st.sampled_from(sorted((ROOT / "configs").glob("*.yaml"))).map(Path.read_bytes).flatmap(s.damaged),
            ),
        },
        lambda f: make_batch(f / "jobs.yaml"),
    ),
    "torch archive": Target(
        {"x.pt": st.builds(s.torch_file, s.torch_objects(), zipped=st.booleans())}, lambda f: opened(f, "x.pt")
    ),
    "torch bytes": Target(
        {"x.pt": st.builds(s.torch_file, s.torch_objects(), zipped=st.booleans()).flatmap(s.damaged)},
        lambda f: opened(f, "x.pt"),
    ),
}  # fmt: skip


def remove(path: Path) -> None:
    """The file or folder that a merge may write."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(name: str, examples: int, number: int, *, slowest: float = SLOWEST) -> None:
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
                assert time.process_time() - started < slowest
            remove(folder / "out")
            assert snapshot(Path(root)) == before

    check()


def run_long(name: str) -> None:
    """New cases of one target, for its share of the time of all targets."""
    until = time.monotonic() + SECONDS / len(TARGETS)
    for number in itertools.count(random.SystemRandom().randrange(1 << 32)):
        run(name, 100, number)
        if time.monotonic() > until:
            break
