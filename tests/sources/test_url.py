"""Files at URLs, and the client that reads them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lora_merge
from lora_merge.addresses import Address
from lora_merge.errors import InputError, MergeError, ResourceError
from lora_merge.planning.recipe import KEY
from lora_merge.sources import contents, web
from lora_merge.sources.web import Endpoint, download, ranges
from tests.kit.adapters import kohya
from tests.kit.architectures import header
from tests.kit.command_line import Command
from tests.kit.files import metadata, save
from tests.kit.hollow import hollow
from tests.kit.models import sd1_sample
from tests.sources.server import SIGNATURE, TOKEN, Hollow, Machines, sha256


def at(machines: Machines, name: str) -> Endpoint:
    url = f"{machines.url}/files/{name}?sig=secret"
    return Endpoint(Address("https", url), url)


def test_merge_of_urls_names_no_query(machines: Machines, run: Command, tmp_path: Path) -> None:
    machines.files["base.safetensors"] = save(sd1_sample(), tmp_path / "b").read_bytes()
    machines.files["style.safetensors"] = save(kohya(sd1_sample()), tmp_path / "s").read_bytes()
    urls = [f"{machines.url}/files/{name}.safetensors?sig=secret" for name in ("base", "style")]
    code, out, err = run(*urls, "-o", "a.safetensors", "--report", "r.json")
    assert code == 0, err
    recipe = metadata(Path("a.safetensors"))[KEY]
    assert json.loads(recipe)["base"]["source"] == f"{machines.url}/files/base.safetensors"
    assert not [text for text in (recipe, out, err, Path("r.json").read_text()) if "secret" in text]
    assert run("verify", "a.safetensors")[0] == 0  # by copies of that hash: a recipe makes no request to this machine
    asked = machines.bytes_sent()
    code, _, err = run(*urls, "-o", "b.safetensors")
    assert code == 0 and machines.bytes_sent() - asked < 100_000 and "are downloaded" not in err
    machines.files["style.safetensors"] = save(kohya(sd1_sample(), seed=9), tmp_path / "s").read_bytes()
    code, _, err = run(*urls, "-o", "c.safetensors")
    assert code == 0 and "are downloaded" in err


def test_small_pickle_is_read_whole(machines: Machines, run: Command, tmp_path: Path) -> None:
    torch.save(kohya(sd1_sample()), tmp_path / "style.pt")
    machines.files["style.pt"] = (tmp_path / "style.pt").read_bytes()
    code, out, err = run("inspect", f"{machines.url}/files/style.pt", "--json")
    assert code == 0 and json.loads(out)["algorithms"] == {"lora": 5}, err


CONTENT = bytes(range(256)) * 4096


def test_ranges_are_the_bytes_of_the_file(machines: Machines) -> None:
    machines.files["x"] = CONTENT
    read = ranges(at(machines, "x"), len(CONTENT))
    for offset, count in ((0, 1), (5, 1000), (len(CONTENT) - 3, 3), (7, 0)):
        assert read(offset, count) == CONTENT[offset : offset + count]
    machines.range_breaks[:] = [10, 0]
    assert read(100, 5000) == CONTENT[100:5100]


def test_ranges_of_a_file_that_has_changed_are_refused(machines: Machines) -> None:
    machines.files["x"] = CONTENT
    read = ranges(at(machines, "x"), len(CONTENT), f'"{sha256(CONTENT)}"')
    machines.files["x"] = CONTENT + b"."
    with pytest.raises(InputError, match="was changed"):
        read(0, 10)
    machines.files["x"] = b"." + CONTENT[1:]
    with pytest.raises(InputError, match="was changed"):
        read(0, 10)


def test_download_goes_on_from_what_is_there(machines: Machines, tmp_path: Path) -> None:
    machines.files["x"] = CONTENT
    counts: list[int] = []
    (tmp_path / "x.part").write_bytes(CONTENT[:500_000])
    digest = download(at(machines, "x"), tmp_path / "x", len(CONTENT), counts.append, etag=f'"{sha256(CONTENT)}"')
    assert digest == sha256(CONTENT) and (tmp_path / "x").read_bytes() == CONTENT and sum(counts) == len(CONTENT)
    assert machines.bytes_sent() == len(CONTENT) - 500_000


def test_download_begins_again_if_the_file_has_changed(machines: Machines, tmp_path: Path) -> None:
    machines.files["x"] = CONTENT
    (tmp_path / "x.part").write_bytes(b"another file" * 1000)
    with pytest.raises(InputError, match="was changed"):
        download(at(machines, "x"), tmp_path / "x", len(CONTENT), print, etag='"another"')
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_file_of_another_length_is_refused(machines: Machines, tmp_path: Path, size: int) -> None:
    machines.files["x"] = CONTENT
    with pytest.raises(MergeError) as e:
        download(at(machines, "x"), tmp_path / "x", size, lambda _: None)
    assert e.value.exit_code in (3, 5) and not (tmp_path / "x").exists()


def test_redirect_to_an_address_without_encryption_is_refused(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.civitai(1, [{"id": 2, "name": "x", "content": b"x"}])
    url = f"{machines.url}/api/download/models/1?fileId=2"
    for host, code in (("http://example.org", "without encryption"), ("ftp://example.org", "without encryption")):
        machines.store = host
        with pytest.raises(InputError, match=code):
            ranges(Endpoint(Address("https", url), url), 1)(0, 1)


def test_disk_without_room_is_named_before_the_first_byte(machines: Machines, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="not enough disk space"):
        contents.require_room(tmp_path / "a" / "b", 1 << 60)


HEADERS = 2 << 20  # bytes that headers of the largest models may take


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["hub", "url"])
def test_headers_of_a_base_of_24_gb_take_less_than_2_mb(
    machines: Machines, run: Command, tmp_path: Path, place: str
) -> None:
    """inspect, parts, a dry run with an adapter of all blocks, compare of two layouts."""
    shapes = {**header("native/flux-dev"), "filler": (500, 1000, 100)}
    base = Hollow.of(hollow(shapes, tmp_path / "flux.safetensors"))
    blocks = {name: shape for name, shape in shapes.items() if "_blocks" in name and len(shape) == 2}
    factors = {}
    for name, (rows, columns) in blocks.items():
        stem = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        factors |= {f"{stem}.lora_down.weight": (16, columns), f"{stem}.lora_up.weight": (rows, 16)}
    style = Hollow.of(hollow(factors, tmp_path / "style.safetensors"))
    for name, content in (("flux.safetensors", base), ("style.safetensors", style)):
        machines.files[name] = machines.repositories.setdefault(f"me/{name.partition('.')[0]}", {})[name] = content
    small = save(sd1_sample(), tmp_path / "sd.safetensors")
    at = {"hub": "hf://me/", "url": f"{machines.url}/files/"}[place]
    flux, lora = (f"{at}{name}" for name in {"hub": ("flux", "style"), "url": machines.files}[place])
    assert len(base) > 23.8e9
    calls = [["inspect", flux], ["parts", flux], [flux, lora, "--dry-run"], ["compare", flux, str(small)]]
    for words in calls:
        before = machines.bytes_sent()
        code, _, err = run(*words)
        assert code == 0, err
        assert 0 < machines.bytes_sent() - before < HEADERS, words


@pytest.fixture
def streamed(machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder for downloads is named; the usual one is in the test's folder."""
    monkeypatch.delenv("LORA_MERGE_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "usual")


def publish(machines: Machines, tmp_path: Path) -> list[str]:
    """The addresses of a base and an adapter."""
    machines.files["base.safetensors"] = save(sd1_sample(), tmp_path / "base.safetensors").read_bytes()
    machines.files["style.safetensors"] = save(kohya(sd1_sample()), tmp_path / "style.safetensors").read_bytes()
    return [f"{machines.url}/files/{name}.safetensors" for name in ("base", "style")]


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*.safetensors"))


@pytest.mark.usefixtures("streamed")
def test_cache_keeps_what_is_else_read_without_a_copy(machines: Machines, run: Command, tmp_path: Path) -> None:
    base, style = publish(machines, tmp_path)
    code, _, err = run(base, style, "-o", "a.safetensors")
    assert code == 0 and "nothing is kept without --cache DIR" in err, err
    assert not (tmp_path / "usual").exists()
    code, _, err = run(base, style, "-o", "b.safetensors", "--cache", "here")
    assert code == 0 and kept(tmp_path / "here") == ["base.safetensors", "style.safetensors"], err
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()
    asked = machines.bytes_sent()
    code, _, err = run(base, style, "-o", "c.safetensors", "--cache", "here")
    assert code == 0 and machines.bytes_sent() - asked < 1000 and "are downloaded" not in err  # one byte of each
    code, _, err = run(base, style, "-o", "d.safetensors")
    assert code == 0 and "nothing is kept" in err, err  # the option ends with its command


OF_OTHERS = [
    ["inspect", "{style}", "--weights"], ["compare", "{style}", "twin.safetensors"],
    ["combine", "{style}", "twin.safetensors", "-o", "x.safetensors"], ["resize", "{style}", "--rank", "2", "-o", "x.safetensors"],
    ["convert", "{style}", "--to", "diffusers", "--base", "base.safetensors", "-o", "x.safetensors"],
    ["average", "{style}", "twin.safetensors", "-o", "x.safetensors"],
    ["extract", "base.safetensors", "{style}", "--rank", "2", "-o", "x.safetensors"],
    ["unmerge", "merged.safetensors", "{style}", "-o", "x.safetensors"],
    ["verify", "merged.safetensors", "--base", "base.safetensors", "--adapter", "{style}"],
    ["batch", "jobs.json"],
]  # fmt: skip
"""Command → how it reads an address."""


@pytest.mark.slow
@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("words", OF_OTHERS, ids=[words[0] for words in OF_OTHERS])
def test_every_command_reads_urls_without_a_copy_and_keeps_them_with_cache(
    machines: Machines, run: Command, tmp_path: Path, words: list[str]
) -> None:
    _, style = publish(machines, tmp_path)
    if words[0] == "extract":
        tuned = {name: t * 1.5 if t.is_floating_point() and t.ndim == 2 else t for name, t in sd1_sample().items()}
        machines.files["style.safetensors"] = save(tuned, tmp_path / "tuned.safetensors").read_bytes()
    assert run("base.safetensors", style, "-o", "merged.safetensors")[0] == 0 or words[0] == "extract"
    (tmp_path / "style.safetensors").unlink()
    (tmp_path / "twin.safetensors").write_bytes(machines.files["style.safetensors"])
    jobs = [{"base": "base.safetensors", "adapters": [style], "output": "x.safetensors"}]
    Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs}))
    words = [word.format(style=style) for word in words]
    code, out, err = run(*words)
    assert code == 0, out + err
    assert kept(tmp_path / "usual") == (["style.safetensors"] if words[0] == "batch" else [])
    Path("x.safetensors").unlink(missing_ok=True)
    code, out, err = run(*words, "--cache", "here")
    assert code == 0 and kept(tmp_path / "here") == ["style.safetensors"], out + err


def test_every_command_that_reads_inputs_has_cache() -> None:
    from lora_merge.cli import adapter_commands, batch_command, inspect_commands, main, tables, verify_commands

    commands = [main.merge, batch_command.batch, inspect_commands.inspect, inspect_commands.compare, tables.parts,
                verify_commands.verify, verify_commands.replay, verify_commands.unmerge, adapter_commands.combine,
                adapter_commands.resize, adapter_commands.convert, adapter_commands.average, adapter_commands.extract]  # fmt: skip
    assert all("cache" in inspect.signature(command).parameters for command in commands)
    calls = (lora_merge.inspect, lora_merge.compare, lora_merge.verify, lora_merge.replay, lora_merge.load_adapter,
             lora_merge.run_batch, lora_merge.plan_batch)  # fmt: skip
    assert all("cache" in inspect.signature(call).parameters for call in calls)


@pytest.mark.slow
def test_workers_find_what_was_fetched_once(machines: Machines, run: Command, tmp_path: Path) -> None:
    base, style = publish(machines, tmp_path)
    jobs = [{"base": base, "adapters": [f"{style}:{s}"], "output": f"{s}.safetensors"} for s in (0.25, 0.5, 1)]
    Path("jobs.json").write_text(json.dumps({"version": 1, "jobs": jobs, "defaults": {"cache": "here"}}))
    code, out, err = run("batch", "jobs.json", "--workers", "2")
    assert code == 0, out + err
    whole = [sent for sent in machines.sent if sent == len(machines.files["base.safetensors"])]
    assert len(whole) == 2  # of its header, as it is small, and of the download
    for job in jobs:
        assert json.loads(metadata(Path(str(job["output"])))[KEY])["base"]["source"] == base


@pytest.mark.usefixtures("streamed")
def test_python_has_the_option(machines: Machines, tmp_path: Path) -> None:
    base, style = publish(machines, tmp_path)
    lora_merge.merge(base, style, tmp_path / "a.safetensors", cache=tmp_path / "here")
    assert kept(tmp_path / "here") == ["base.safetensors", "style.safetensors"]
    lora_merge.load_adapter(style, cache=str(tmp_path / "there"))
    lora_merge.merge_state_dict(sd1_sample(), style, cache=tmp_path / "third")
    assert kept(tmp_path / "there") == kept(tmp_path / "third") == ["style.safetensors"]


def big_base(machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> str:
    """The address of a base whose header is read in one range, next to an adapter here."""
    save(kohya(sd1_sample()), tmp_path / "style.safetensors")
    content = save({**sd1_sample(), "more": torch.zeros(1 << 18)}, tmp_path / "base.safetensors").read_bytes()
    machines.files["s.safetensors"] = content
    machines.repositories["me/s"] = {"s.safetensors": content}
    machines.civitai(12, [{"id": 90, "name": "s.safetensors", "content": content}])
    machines.large = 10**9  # in the repository itself
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setenv("CIVITAI_API_TOKEN", TOKEN)
    if place == "stream":
        monkeypatch.delenv("LORA_MERGE_CACHE")
    names = {"hub": "hf://me/s/s.safetensors", "civitai": "civitai:12", "ms": "ms://me/s/s.safetensors"}
    return names.get(place, f"{machines.url}/files/s.safetensors?sig={SIGNATURE}")


PLACES = ["url", "stream", "hub", "civitai", "ms"]
FAILURES = [(0, 5), (401, 3), (403, 3), (404, 3), (429, 5), (500, 5)]
"""Status of all answers from some byte on, 0 for a network that is gone → exit code."""


@pytest.mark.few(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("status", "expected"), FAILURES, ids=[str(status) for status, _ in FAILURES])
def test_failure_in_mid_run_writes_nothing(  # noqa: PLR0917
    machines: Machines,
    run: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    status: int,
    expected: int,
) -> None:
    """It begins after the plan, with the first request of the transfer."""
    name = big_base(machines, tmp_path, monkeypatch, place)
    assert run(name, "style.safetensors", "-o", "a.safetensors", "--dry-run")[0] == 0
    machines.failure = (sum(machines.sent) * 2, status)
    code, out, err = run(name, "style.safetensors", "-o", "a.safetensors", "--json")
    assert code == expected and "fix:" in err and "MiB are" in err and "modules" not in err, err
    assert not Path("a.safetensors").exists() and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not [text for text in (out, err) for secret in (TOKEN, SIGNATURE) if secret in text]


def test_server_that_says_nothing_is_given_up(
    machines: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base, style = publish(machines, tmp_path)
    monkeypatch.setattr(web, "TIMEOUT", 0.05)
    monkeypatch.setattr(web, "TRIES", 2)
    machines.delay = 0.3
    code, _, err = run(base, style, "-o", "a.safetensors")
    assert code == 5 and "cannot be reached: timed out" in err, err


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "shorter": lambda content: content[:-1], "longer": lambda content: content + b".",
    "other": lambda content: content[:-1] + b".",
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("place", ["hub", "civitai", "ms", "url", "stream"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_bytes_that_are_not_those_of_the_plan_are_refused_and_removed(  # noqa: PLR0917
    machines: Machines, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, damage: str
) -> None:
    """The servers of a hub state a hash; at a URL other bytes of the same ETag and length cannot be known."""
    name = big_base(machines, tmp_path, monkeypatch, place)
    machines.large = 1000
    assert run(name, "style.safetensors", "-o", "a.safetensors", "--dry-run")[0] == 0
    sent = sum(machines.sent)
    machines.damage = lambda content: DAMAGES[damage](content) if sum(machines.sent) >= 2 * sent else content
    code, _, err = run(name, "style.safetensors", "-o", "a.safetensors")
    if damage == "other" and place in ("url", "stream"):
        assert code == 0, err
        return
    assert code == 3, err
    stored = [p for p in (*(tmp_path / "hub").rglob("*"), *(tmp_path / "store").rglob("*")) if p.is_file()]
    assert not [p for p in stored if p.stat().st_size > 10_000] and not Path("a.safetensors").exists()
