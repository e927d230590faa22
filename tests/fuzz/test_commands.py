"""Damaged files for every command that reads some: exit code 0, or one error of ours with exit code 3 or 4.

A short, repeatable part runs with the other tests; `pytest -m fuzz tests/fuzz` runs more (FUZZ_SECONDS to change that).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save

from lora_merge.adapters_out.dialects import DIALECTS
from lora_merge.planning.recipe import KEY
from tests.fuzz import strategies as s
from tests.fuzz.targets import (
    BASE,
    ENDINGS,
    GROUPS,
    MERGED,
    TARGETS,
    Target,
    as_yaml,
    config,
    jobs,
    listed,
    odd,
    recipe,
    remove,
    run,
    run_long,
)
from tests.kit import command_line
from tests.kit.hostile_commands import ADAPTER as GGUF_ADAPTER
from tests.kit.hostile_commands import LLAMA, gguf
from tests.kit.pairs import WHOLE

A = {"a.lora_down.weight": torch.ones(2, 4), "a.lora_up.weight": torch.ones(4, 2), "a.alpha": torch.tensor(2.0)}
B = {"b.hada_w1_a": torch.ones(4, 2), "b.hada_w1_b": torch.ones(2, 4), "b.hada_w2_a": torch.ones(4, 2), "b.hada_w2_b": torch.ones(2, 4)}  # fmt: skip
SOUND = save(A)
adapters = st.one_of(
    s.adapters(["a", "b"], GROUPS),
    s.checkpoints(st.builds("{}.{}".format, st.sampled_from(["a", "b", "a\nerror: b"]), st.sampled_from(ENDINGS)), recipe),
    st.sampled_from([SOUND, save({**A, **B}), save(A, {KEY: "{}", "ss_network_args": '{"algo": "loha"}'})]).flatmap(s.damaged),
)  # fmt: skip
"""Adapters that are nearly right."""

BLOCK = [
    "blk.0.attn_q.weight",
    "blk.0.attn_v.weight",
    "blk.0.ffn_up.weight",
    "token_embd.weight",
    "blk.0.attn_norm.weight",
]
numbers = st.one_of(st.integers(0, 2**64 - 1), st.booleans(), st.floats(width=32))
entries = st.dictionaries(
    st.sampled_from(["general.architecture", "general.type", "general.alignment", "adapter.type", "adapter.lora.alpha", "split.count", "split.no",
                     "llama.attention.head_count", "llama.attention.head_count_kv", "comfy.gguf.orig_shape.blk.0.attn_q.weight", KEY,
                     "general.file_type", "llama.block_count", "lora_merge.padding"]),
    st.one_of(numbers, s.nasty.filter(lambda t: len(t) < 99), st.sampled_from(["llama", "flux", "adapter", "lora"]),
              st.lists(st.integers(-2, 2**31 - 1), max_size=3), st.lists(st.sampled_from(["x", ""]), min_size=1, max_size=2)), max_size=2,
)  # fmt: skip
shapes = st.sampled_from([(2, 2), (2, 2), (2, 2), (4, 4), (2,), (), (0, 2), (1, 1, 1), (3, 2)])


def container(sound: dict[str, Any], names: list[str]) -> st.SearchStrategy[bytes]:
    """GGUF files with some of these tensors, that are nearly right."""
    some = st.one_of(st.just(names), st.lists(st.sampled_from(names), unique=True))
    made = st.builds(lambda more, own, shape: gguf({**sound, **more}, own, shape), entries, some, shapes)
    return st.one_of(made, made, made.flatmap(s.damaged))


models = container(LLAMA, BLOCK)
own_adapters = container(GGUF_ADAPTER, [f"{name}.lora_{x}" for name in BLOCK[:3] for x in "ab"])

COMBINED = {
    "version": "0.1.0", "command": "combine", "adapters": [{**listed("a", SOUND), "strength": 1.0, "parts": []}],
    "options": {"rank": "1", "method": "sum", "alpha": "keep", "max_rank": 2, "rank_for": [["a", "1"]]},
}  # fmt: skip
TIES = {**COMBINED, "options": {"rank": "1", "method": "ties", "density": 0.5, "seed": 1}, "base": listed("base", BASE)}
ours = st.one_of(odd, s.numbers, st.sampled_from(["ties", "slerp", "energy:0.9", "size:1KiB", {"overwrite": True}, {"map": "base"}, [["te", "x"]]]))  # fmt: skip
recipes = s.bent(st.sampled_from([COMBINED, COMBINED, TIES]), ours).map(lambda told: save(A, {KEY: json.dumps(told)}))


def orders(*given: list[str]) -> st.SearchStrategy[bytes]:
    """One of these lists of arguments, as a file."""
    return st.sampled_from(given).map(lambda one: json.dumps(one).encode())


def carried_out(folder: Path) -> None:
    """Give the arguments in the folder to the command line, with its files named by their paths."""
    given = [str(folder / a[1:]) if a.startswith("@") else a for a in json.loads((folder / "arguments").read_bytes())]
    code, _, told = command_line.run(*given)
    asked = any(
        word in told
        for word in (
            "--base",
            "lora-merge inspect ",
            "--weights",
            "--strength-for",
            "--dtype ",
            "jobs.yaml",
        )
    )
    late = {"verify": 6, "replay": 6, "batch": 7}.get(given[0])
    assert code in (0, 3, 4, late) or (code == 2 and asked), (given, code, told)
    assert "unexpected failure" not in told, (given, told)
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    misfit = (given[0], code) == ("inspect", 4)  # told in its table
    assert len(errors) == bool(code) or (misfit and not errors), (given, code, told)
    if errors:
        told = told[f"\n{told}".rindex(f"\n{errors[0]}") :]  # jobs have errors of their own, before it
        assert told.count("\n  where: ") == told.count("\n  fix:   ") == 1, told
    for made in (folder / name for name in ("out", "out.safetensors", "out.md", "out.gguf")):
        assert code == late or not (code and made.exists()), (given, code, told)
        remove(made)


def target(arguments: st.SearchStrategy[bytes], **files: st.SearchStrategy[bytes]) -> Target:
    """The command with its files."""
    return Target({"arguments": arguments, **files}, carried_out)


OUT = ["-o", "@out.safetensors"]
base = st.just(BASE)
bases = st.one_of(base, s.checkpoints(st.sampled_from(["a.weight", "b.weight", "b.bias"])), base.flatmap(s.damaged))
blocks = [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)]
"""Modules of a model whose blocks have names."""
of_blocks = s.checkpoints(st.sampled_from([f"{name}.weight" for name in blocks]))
PARTS = [
    "te=2",
    "model=0",
    "BASE=nan",
    "re:a=1e39",
    "re:(a+)+$=1",
    "L00=1e-46",
    "L00-L01=-0.5",
    "L1-L0=2",
    "lbw=1,0,1",
    "lbw=0,1e308,inf",
    "lbw=",
    "IN04=1",
]
batched = st.builds(as_yaml, jobs())
"""Jobs files whose outputs lie in one folder."""
COMMANDS = {
    "combine": target(
        orders(["combine", "@a", "@sound", *OUT], ["combine", "@a:0.5", "@sound", "--base", "@base", "--rank", "same", *OUT],
               ["combine", "@a", "@sound", "--method", "ties", "--rank", "1", "--base", "@base", "--unmatched", "skip", *OUT],
               ["combine", "@a", "@sound", "--method", "slerp", "--t", "0.5", "--algorithm", "full", *OUT]),
        a=adapters, sound=st.just(SOUND), base=bases),
    "resize": target(
        orders(["resize", "@a", "--rank", "1", *OUT], ["resize", "@a", "--rank", "energy:0.9", "--base", "@base", *OUT],
               ["resize", "@a", "--rank", "size:1KiB", "--unmatched", "skip", "--base", "@base", "--algorithm", "auto", *OUT]),
        a=adapters, base=bases),
    "convert": target(
        orders(*(["convert", "@a", "--to", to, "--base", "@base", "-o", "@out" if to == "peft" else "@out.safetensors"] for to in DIALECTS),
               ["convert", "@a", "--to", "kohya", "--rank", "1", "--unmatched", "skip", *OUT]),
        a=adapters, base=bases),
    "average": target(
        orders(["average", "@a", "@sound", *OUT], ["average", "@a", "@sound", "--ema", "0.9", "--base", "@base", "--unmatched", "skip", *OUT]),
        a=adapters, sound=st.just(SOUND), base=bases),
    "extract": target(
        orders(["extract", "@base", "@tuned", *OUT], ["extract", "@base", "@tuned", "--rank", "energy:0.9", "--unmatched", "skip", *OUT],
               ["extract", "@base", "@tuned", "--algorithm", "full", "--dtype", "bf16", *OUT],
               ["extract", "@base", "@tuned", "--algorithm", "lokr", "--rank", "1", *OUT], ["extract", "@base", "@tuned", "--rank", "noise", *OUT],
               ["extract", "@base", "@tuned", "--algorithm", "auto", "--compute-dtype", "fp32", "--others", "skip", *OUT]),
        base=bases, tuned=bases),
    "unmerge": target(
        orders(["unmerge", "@base", "@a", *OUT], ["unmerge", "@base", "@a:-0.5", "--unmatched", "skip", *OUT],
               ["unmerge", "@base", "@a", "@sound", "--dtype", "fp16", "--unmatched", "skip", *OUT], ["unmerge", "@base", "@a:1e-300", *OUT]),
        base=bases, a=adapters, sound=st.just(SOUND)),
    "unmerge by recipe": target(
        orders(["unmerge", "@made", *OUT], ["unmerge", "@made", "@a", *OUT]), base=bases, a=st.just(SOUND),
        made=st.one_of(recipes, TARGETS["recipe"].files["made.safetensors"])),
    "card": target(
        orders(["@base", "@a", "--card", *OUT], ["@base", "@a:0.5", "--card", "--unmatched", "skip", *OUT],
               ["@base", "@a", "--card", "--dtype", "fp16", "--on-overflow", "saturate", *OUT]),
        base=st.one_of(bases, s.checkpoints(st.sampled_from(["a.weight", "b.weight"]), recipe)), a=adapters),
    "strength": target(
        orders(*(["@base", "@a", "--strength-for", part, "--unmatched", "skip", *OUT] for part in PARTS),
               ["@base", "@a:1e300", "--compute-dtype", "fp64", *OUT], ["@base", "@a:1e-320", *OUT]),
        base=of_blocks, a=s.adapters(blocks, GROUPS)),
    "options": target(
        orders(*(["@base", "@a", "--unmatched", "skip", *more, *OUT] for more in (
            ["--dtype", "fp8_e4m3fn"], ["--dtype", "int8"], ["--dtype", "nvfp4"], ["--rounding", "stochastic", "--dtype", "bf16"],
            ["@a", "--method", "ties"], ["@a", "--method", "compose"], ["@sound", "--method", "dare"], ["--compute-dtype", "fp16"],
            ["--compute-dtype", "bf16", "--on-overflow", "saturate"]))),
        base=bases, a=adapters, sound=st.just(SOUND)),
    "batch": target(
        orders(["batch", "@jobs.yaml"], ["batch", "@jobs.yaml", "--json", "--card"], ["batch", "@jobs.yaml", "--dry-run"], ["batch", "@jobs.yaml", "--fail-fast", "-q"]),
        **{"base.safetensors": bases, "adapter.safetensors": adapters, "jobs.yaml": batched}),
    "compare": target(
        orders(["compare", "@a", "@sound"], ["compare", "@a", "@b", "--base", "@base"], ["compare", "@b", "@base"], ["compare", "@base", "@b", "--json"]),
        a=adapters, sound=st.just(SOUND), base=bases,
        b=st.one_of(adapters, st.just(BASE).flatmap(s.damaged), s.checkpoints(st.sampled_from(["a.weight", "b.weight"])))),
    "inspect": target(
        orders(["inspect", "@a"], ["inspect", "@a", "--weights", "--hashes"], ["inspect", "@base", "@a", "--weights"], ["inspect", "@a", "--json"],
               ["inspect", "@base", "@a", "--json", "--weights"]),
        a=adapters, base=bases),
    "inspect a folder": target(
        orders(["inspect", "@a"], ["inspect", "@base", "@a", "--weights"]), base=base,
        **{"a/adapter_model.safetensors": adapters, "a/adapter_config.json": s.as_json(config)}),
    "verify": target(
        orders(["verify", "@made"], ["verify", "@made", "--full"], ["verify", "@made", "--base", "@base", "--adapter", "@a"]),
        base=base, a=st.just(SOUND), made=st.one_of(recipes, TARGETS["recipe"].files["made.safetensors"], st.just(save(MERGED)).flatmap(s.damaged))),
    "replay": target(
        orders(["replay", "@made", *OUT]), base=base, a=st.just(SOUND), made=st.one_of(recipes, TARGETS["recipe"].files["made.safetensors"])),
    "GGUF base": target(
        orders(["@m", "@g", "-o", "@out.gguf"], ["@m", "@g", "-o", "@out.gguf", "--unmatched", "skip"], ["inspect", "@m"], ["parts", "@m"], ["compare", "@m", "@m"]),
        m=models, g=st.just(gguf(GGUF_ADAPTER, [f"{name}.lora_{x}" for name in BLOCK[:3] for x in "ab"]))),
    "GGUF adapter": target(
        orders(["@m", "@g", "-o", "@out.gguf", "--unmatched", "skip"], ["inspect", "@g", "--weights"], ["resize", "@g", "--rank", "1", "--base", "@m", *OUT],
               ["combine", "@g", "@g", *OUT], ["convert", "@g", "--to", "peft", "--base", "@m", "-o", "@out"], ["inspect", "@m", "@g"]),
        m=st.just(gguf(LLAMA, BLOCK)), g=own_adapters),
}  # fmt: skip
TARGETS |= COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_few_cases(name: str) -> None:
    run(name, 128 if WHOLE else 3, 1)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", COMMANDS)
def test_fuzz_of_many_cases(name: str) -> None:
    run_long(name)
