"""Models of the hub: the cache on disk, headers by ranges, whole files by huggingface_hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.disk.hashes import RunningHashes
from lora_merge.planning.recipe import KEY
from lora_merge.sources import hub
from tests.kit.adapters import kohya
from tests.kit.command_line import Command
from tests.kit.files import load, load_all, metadata, save
from tests.kit.folders import llama_folder, peft_folder
from tests.kit.models import sd1_sample
from tests.sources.server import COMMIT, SIGNATURE, TOKEN, Machines, serving, sha256


def test_downloaded_base_is_hashed_once(published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = list[bool]()
    begin = RunningHashes.__enter__
    monkeypatch.setattr(RunningHashes, "__enter__", lambda hashes: (hashing.append(hashes.hashing), begin(hashes))[1])
    assert run("hf://me/sd/sd.safetensors", "style.safetensors", "-o", "a.safetensors")[0] == 0
    assert hashing == [False]
    base = json.loads(metadata(Path("a.safetensors"))[KEY])["base"]
    assert base["files"][0]["sha256"] == sha256(published.repositories["me/sd"]["sd.safetensors"])


def test_merge_of_repositories_is_the_merge_of_their_files(published: Machines, run: Command) -> None:
    code, _, err = run("hf://me/sd/sd.safetensors", "hf://me/style:0.8", "-o", "a.safetensors")
    assert code == 0, err
    assert "are downloaded from hf://me/sd" in err and "the output takes" in err and err.count("free)") == 3
    code, _, err = run("local.safetensors", "style.safetensors:0.8", "-o", "b.safetensors")
    assert code == 0, err
    one, other = load(Path("a.safetensors")), load(Path("b.safetensors"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in other)
    recipe = json.loads(metadata(Path("a.safetensors"))[KEY])
    assert recipe["base"]["source"] == f"hf://me/sd@{COMMIT}/sd.safetensors"
    assert recipe["adapters"][0]["source"] == f"hf://me/style@{COMMIT}"
    assert recipe["adapters"][0]["name"] == "style"
    assert not [r for r in published.requests if r.path.endswith("other.safetensors")]


def test_headers_are_read_by_ranges_alone(published: Machines, run: Command, tmp_path: Path) -> None:
    large = save({f"model.layers.{n}.weight": torch.zeros(512, 1024) for n in range(8)}, tmp_path / "large.safetensors")
    published.repositories["me/large"] = {"large.safetensors": large.read_bytes()}
    code, out, err = run("inspect", "hf://me/large", "--json")
    assert code == 0, err
    assert json.loads(out)["tensors"] == 8 and str(tmp_path) not in out and "lora-merge-headers" not in out
    assert published.bytes_sent("store") <= 256 << 10 < large.stat().st_size
    assert not (tmp_path / "hub").exists()


def test_dry_run_plans_without_a_download(published: Machines, run: Command, tmp_path: Path) -> None:
    code, out, err = run("hf://me/sd/sd.safetensors", "hf://me/style", "--dry-run", "-o", "a.safetensors")
    assert code == 0, err
    assert "are downloaded" in out and f"hf://me/sd@{COMMIT}" in out
    assert not Path("a.safetensors").exists() and not (tmp_path / "hub").exists()


def test_misfit_is_refused_before_the_download(published: Machines, run: Command, tmp_path: Path) -> None:
    odd = save({"lora_unet_nothing.lora_up.weight": torch.ones(4, 2), "lora_unet_nothing.lora_down.weight": torch.ones(2, 4)},
               tmp_path / "odd.safetensors")  # fmt: skip
    code, _, err = run("hf://me/sd/sd.safetensors", odd.name)
    assert code == 4, err
    assert not (tmp_path / "hub").exists() and published.bytes_sent("store") < 1 << 20


def test_cache_on_disk_is_read_without_the_library_and_without_requests(
    published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("hf://me/sd/sd.safetensors", "hf://me/style", "-o", "a.safetensors")[0] == 0
    asked = len(published.requests)
    monkeypatch.setattr(hub, "is_installed", lambda: False)
    code, _, err = run(f"hf://me/sd@{COMMIT}/sd.safetensors", "hf://me/style", "-o", "b.safetensors")
    assert code == 0, err
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()
    assert len(published.requests) == asked


def test_folder_of_a_repository_in_the_cache_is_its_commit(published: Machines, run: Command, tmp_path: Path) -> None:
    """Of `main`, or the only one."""
    assert run("hf://me/sd/sd.safetensors", "hf://me/style", "-o", "a.safetensors")[0] == 0
    asked, folder = len(published.requests), tmp_path / "hub" / "models--me--style"
    for _ in range(2):
        code, _, err = run("local.safetensors", f"{folder}:0.5", "-o", "b.safetensors", "--overwrite")
        recipe = json.loads(metadata(Path("b.safetensors"))[KEY])
        assert code == 0 and recipe["adapters"][0]["source"] == f"hf://me/style@{COMMIT}", err
        (folder / "refs" / "main").unlink(missing_ok=True)
    assert len(published.requests) == asked
    (folder / "snapshots" / ("f" * 40)).mkdir()
    code, _, err = run("local.safetensors", str(folder), "-o", "c.safetensors")
    assert code == 3 and "give the folder with the" in err, err


@pytest.mark.parametrize("words", [("hf://me/sd/sd.safetensors", "hf://me/style"),
                                   ("combine", "hf://me/sd/style.safetensors", "hf://me/style")])  # fmt: skip
def test_dry_run_asks_each_server_once(
    published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """For the files of each repository, each header, the repository of the output and the name of the user."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    style = save(kohya(sd1_sample(), seed=3), Path("other.safetensors"))
    published.repositories["me/sd"]["style.safetensors"] = style.read_bytes()
    code, _, err = run(*words, "-o", "hf://me/out/a.safetensors", "--dry-run")
    asked = [r.path for r in published.requests]
    assert code == 0 and sorted(asked) == sorted({*asked}) and len(asked) == 3 + 2 * 2 + 1, (asked, err)


def test_model_that_is_not_here_is_refused_with_the_command_that_downloads_it(
    published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "is_installed", lambda: False)
    code, _, err = run("hf://me/sd@main/sd.safetensors", "style.safetensors")
    assert (
        code == 2 and "hf download me/sd sd.safetensors --revision main" in err and "pip install huggingface_hub" in err
    )
    code, _, err = run("me/sd", "style.safetensors")
    assert code == 2 and "neither a file nor a folder" in err and "hf download me/sd --local-dir me/sd" in err
    assert not published.requests


@pytest.mark.parametrize(("words", "code", "what", "fix"), [
    ("hf://me/nothing style.safetensors", 3, "neither a file nor a folder", "hf auth login"),
    ("me/nothing style.safetensors", 3, "neither a file nor a folder", "check the path"),
    ("hf://me/sd@v9 style.safetensors", 3, "no such revision", "name a branch"),
    ("hf://me/sd/sd.bin style.safetensors", 3, "no such file", "name one of other.safetensors, sd.safetensors"),
    ("hf://me/gated/sd.safetensors style.safetensors", 3, "wants a token", "hf auth login"),
])  # fmt: skip
def test_refusal_of_the_hub_is_answered_with_what_helps(  # noqa: PLR0917
    published: Machines, run: Command, words: str, code: int, what: str, fix: str
) -> None:
    published.repositories["me/gated"] = published.repositories["me/sd"]
    published.gated.add("me/gated")
    number, _, err = run(*words.split())
    assert number == code and what in err and fix in err, err


def test_token_goes_to_the_hub_alone_and_into_no_text(
    published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    published.repositories["me/gated"] = published.repositories["me/sd"]
    published.gated.add("me/gated")
    code, out, err = run(
        "hf://me/gated/sd.safetensors", "hf://me/style", "-o", "a.safetensors", "--report", "r.json", "--html", "r.html"
    )
    assert code == 0, err
    assert {r.token for r in published.requests if r.server == "api"} == {TOKEN}
    assert {r.token for r in published.requests if r.server == "store"} == {""}
    texts = [
        out,
        err,
        Path("r.json").read_text(),
        Path("r.html").read_text(),
        json.dumps(metadata(Path("a.safetensors"))),
    ]
    published.gated.add("me/style")
    published.answers[:] = [500] * 9
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    texts += [*run("inspect", "hf://me/gated/sd.safetensors", "--debug", "--json")[1:]]
    assert not [text for text in texts if TOKEN in text or SIGNATURE in text]


def test_hub_that_is_out_of_reach_is_a_lack_of_resources(
    published: Machines, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run("hf://me/sd/sd.safetensors", "style.safetensors")
    assert code == 5 and "neither a file nor a folder here, and the hub cannot be reached" in err


def test_replay_and_verify_download_the_same_commit(published: Machines, run: Command, tmp_path: Path) -> None:
    assert run("hf://me/sd/sd.safetensors", "hf://me/style:0.5", "-o", "a.safetensors")[0] == 0
    first = Path("a.safetensors").read_bytes()
    for name in ("local.safetensors", "style.safetensors"):
        Path(name).unlink()
    shutil.rmtree(tmp_path / "hub")
    code, _, err = run("verify", "a.safetensors")
    assert code == 0, err
    shutil.rmtree(tmp_path / "hub")
    code, _, err = run("replay", "a.safetensors", "-o", "b.safetensors")
    assert code == 0, err
    assert Path("b.safetensors").read_bytes() == first


def test_source_with_other_bytes_than_the_recipe_fails_the_verification(
    published: Machines, run: Command, tmp_path: Path
) -> None:
    assert run("hf://me/sd/sd.safetensors", "hf://me/style:0.5", "-o", "a.safetensors")[0] == 0
    for name in ("local.safetensors", "style.safetensors"):
        Path(name).unlink()
    shutil.rmtree(tmp_path / "hub")
    (tmp_path / "other").mkdir()
    other = save(kohya(sd1_sample(), seed=5), tmp_path / "other" / "x")
    published.repositories["me/style"]["style.safetensors"] = other.read_bytes()
    other.unlink()
    code, _, err = run("verify", "a.safetensors")
    assert code == 6 and "has other bytes" in err, err


def test_folder_of_a_repository_is_merged_as_a_local_folder(published: Machines, run: Command, tmp_path: Path) -> None:
    files = llama_folder(tmp_path / "tiny")
    published.repositories["me/tiny"] = files
    published.repositories["me/peft"] = peft_folder(tmp_path / "peft")
    code, _, err = run("me/tiny", "me/peft@main:0.5", "-o", "a")
    assert code == 0, err
    code, _, err = run("tiny", "peft:0.5", "-o", "b")
    assert code == 0, err
    assert {p.name for p in Path("a").iterdir()} == {p.name for p in Path("b").iterdir()}
    assert load_all(Path("a")).keys() == load_all(Path("b")).keys()
    assert Path("a/config.json").read_bytes() == Path("b/config.json").read_bytes()
    assert not [r for r in published.requests if r.path.endswith("pytorch_model.bin")]


def test_default_name_of_an_output_is_that_of_the_repository(published: Machines, run: Command, tmp_path: Path) -> None:
    published.repositories["me/tiny"] = llama_folder(tmp_path / "one")
    published.repositories["me/peft"] = peft_folder(tmp_path / "two")
    for _ in range(2):  # from the hub, and from its cache
        code, _, err = run("hf://me/tiny", "hf://me/peft")
        assert code == 0, err
        shutil.rmtree("tiny+peft")


def test_batch_downloads_each_base_once(published: Machines, run: Command) -> None:
    jobs = [
        {"base": "hf://me/sd/sd.safetensors", "adapters": [f"hf://me/style:{s}"], "output": f"{s}.safetensors"}
        for s in (0.5, 1)
    ]
    Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    code, _, err = run("batch", "jobs.json")
    assert code == 0, err
    whole = [r.path for r in published.requests if r.server == "store" and r.method == "GET" and "hf_hub" in r.agent]
    assert len({*whole}) == 2 == len(whole), whole
    assert Path("0.5.safetensors").exists() and Path("1.safetensors").exists()
    asked = published.bytes_sent("store")
    code, out, err = run("batch", "jobs.json")
    assert code == 0 and "skipped" in out and published.bytes_sent("store") == asked, err


def test_python_takes_addresses(published: Machines, tmp_path: Path) -> None:
    steps: list[lora_merge.Step] = []
    report = lora_merge.merge(
        "hf://me/sd/sd.safetensors", [("hf://me/style", 0.5)], tmp_path / "o.safetensors", progress=steps.append
    )
    assert report.verified
    fetched = [step for step in steps if step.stage == "fetch"]
    assert sum(step.done for step in fetched) == sum({step.output: step.total for step in fetched}.values()) > 0
    assert lora_merge.inspect("hf://me/style")["algorithms"]
    assert lora_merge.load_adapter("hf://me/style").modules


def test_input_that_was_a_folder_is_not_taken_from_a_folder_with_more(
    published: Machines, run: Command, tmp_path: Path
) -> None:
    """The file of the repository is here too, next to others: the folder is not what the recipe names."""
    assert run("local.safetensors", "me/style", "-o", "a.safetensors")[0] == 0
    shutil.rmtree(tmp_path / "hub")
    code, out, err = run("verify", "a.safetensors")
    assert code == 0 and "1 × style (" in out, err


WRITTEN = [
    ("merge", ["hf://me/sd/sd.safetensors", "hf://me/style:0.5"]),
    ("combine", ["hf://me/style:0.5", "twin.safetensors"]),
    ("resize", ["hf://me/style", "--rank", "2"]),
    ("convert", ["hf://me/style", "--to", "diffusers", "--base", "hf://me/sd/sd.safetensors"]),
    ("average", ["hf://me/style", "twin.safetensors"]),
    ("extract", ["hf://me/sd/sd.safetensors", "hf://me/tuned", "--rank", "2"]),
]
"""Command → its inputs and options."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("command", "words"), WRITTEN, ids=[command for command, _ in WRITTEN])
def test_output_names_commits_and_is_written_again_from_a_mirror_or_a_file(  # noqa: PLR0917
    published: Machines, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: list[str]
) -> None:
    shutil.copy("style.safetensors", "twin.safetensors")
    tuned = {name: t * 1.5 if t.is_floating_point() and t.ndim == 2 else t for name, t in sd1_sample().items()}
    published.repositories["me/tuned"] = {"t.safetensors": save(tuned, tmp_path / "t.safetensors").read_bytes()}
    code, _, err = run(command, *words, "-o", "a.safetensors")
    assert code == 0, err
    first = Path("a.safetensors").read_bytes()
    recipe = json.loads(metadata(Path("a.safetensors"))[KEY])
    inputs_of = [*recipe.get("adapters", recipe.get("tuned")), *([recipe["base"]] if "base" in recipe else [])]
    sources = {value.get("source", "") for value in inputs_of}
    expected = {f"hf://{word.partition('/')[2].lstrip('/').partition(':')[0]}" for word in words if "hf:" in word}
    assert {source.replace(f"@{COMMIT}", "") for source in sources - {""}} == expected
    # a file of that hash, without the cache and without the hub
    shutil.rmtree(tmp_path / "hub")
    asked = len(published.requests)
    code, _, err = run("verify", "a.safetensors")
    assert code == 0 and len(published.requests) == asked, err
    # a mirror
    for name in ("local.safetensors", "style.safetensors", "t.safetensors"):
        Path(name).unlink()
    with serving(Machines(published.repositories)) as mirror:
        monkeypatch.setenv("HF_ENDPOINT", mirror.url)
        code, _, err = run("replay", "a.safetensors", "-o", "b.safetensors")
        assert code == 0 and mirror.requests and len(published.requests) == asked, err
    assert Path("b.safetensors").read_bytes() == first


def test_jobs_file_takes_bare_names_and_looks_each_up_once(published: Machines, run: Command, tmp_path: Path) -> None:
    """A folder next to the jobs file and the output of a job come before a repository of the same name."""
    published.repositories["me/out"] = published.repositories["me/sd"]
    (tmp_path / "sub" / "loras").mkdir(parents=True)
    shutil.copy("style.safetensors", tmp_path / "sub" / "loras" / "ink.safetensors")
    published.repositories["me/one"] = {"sd.safetensors": published.repositories["me/sd"]["sd.safetensors"]}
    jobs = [
        {"base": "me/one@main", "adapters": ["me/style:{s}"], "output": "s{s}", "matrix": {"s": [0.5, 1]}},
        {"base": "me/one", "adapters": ["loras/ink.safetensors"], "output": "me/out"},
        {"base": "me/out", "adapters": [{"path": "me/style", "strength": -1}], "output": "last"},
    ]  # fmt: skip
    jobs_file = tmp_path / "sub" / "jobs.json"
    jobs_file.write_text(json.dumps({"version": 1, "jobs": jobs}))
    code, out, err = run("batch", str(jobs_file))
    assert code == 0, out + err
    assert {p.name for p in jobs_file.parent.iterdir()} == {"jobs.json", "loras", "me", "s0.5", "s1", "last"}
    recipe = json.loads(metadata(jobs_file.parent / "s0.5" / "sd.safetensors")[KEY])
    assert recipe["base"]["source"] == f"hf://me/one@{COMMIT}" and not [
        r for r in published.requests if "me/out" in r.path
    ]
    asked = [r.path for r in published.requests if r.path.startswith("/api/models/me/one")]
    assert len(asked) == 2  # with and without a revision


def test_bare_name_of_a_jobs_file_that_is_nowhere_is_one_mistake(published: Machines, run: Command) -> None:
    jobs = [{"base": "me/nothing", "adapters": ["me/style:{s}"], "output": "{s}", "matrix": {"s": [1, 2, 3]}}]
    Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    code, _, err = run("batch", "jobs.json")
    assert code == 2 and err.count("nor a model on the hub") == 1, err
    assert len([r for r in published.requests if "me/nothing" in r.path]) == 1
