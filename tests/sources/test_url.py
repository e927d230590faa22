"""Files at URLs, and the client that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_merge.addresses import Address
from lora_merge.errors import InputError, MergeError, ResourceError
from lora_merge.planning.recipe import KEY
from lora_merge.sources import contents, inputs
from lora_merge.sources.web import Endpoint, download, ranges
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.architectures import header
from tests.kit.files import metadata, save
from tests.kit.hollow import hollow
from tests.kit.models import sd1
from tests.sources.server import Hollow, Machines, sha256

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        inputs._located.clear()
        return tuple(command_line.run(*words))

    return call


def at(machines: Machines, name: str) -> Endpoint:
    url = f"{machines.url}/files/{name}?sig=secret"
    return Endpoint(Address("https", url), url)


def test_merge_of_urls_names_no_query(machines: Machines, run: Command, tmp_path: Path) -> None:
    machines.files["base.safetensors"] = save(sd1(), tmp_path / "b").read_bytes()
    machines.files["style.safetensors"] = save(kohya(sd1()), tmp_path / "s").read_bytes()
    urls = [f"{machines.url}/files/{name}.safetensors?sig=secret" for name in ("base", "style")]
    code, out, err = run(*urls, "-o", "a.safetensors", "--report", "r.json")
    assert code == 0, err
    recipe = metadata(Path("a.safetensors"))[KEY]
    assert json.loads(recipe)["base"]["source"] == f"{machines.url}/files/base.safetensors"
    assert not [text for text in (recipe, out, err, Path("r.json").read_text()) if "secret" in text]
    asked = machines.bytes_sent()
    code, _, err = run(*urls, "-o", "b.safetensors")
    assert code == 0 and machines.bytes_sent() - asked < 100_000 and "are downloaded" not in err
    machines.files["style.safetensors"] = save(kohya(sd1(), seed=9), tmp_path / "s").read_bytes()
    code, _, err = run(*urls, "-o", "c.safetensors")
    assert code == 0 and "are downloaded" in err


def test_small_pickle_is_read_whole(machines: Machines, run: Command, tmp_path: Path) -> None:
    import torch

    torch.save(kohya(sd1()), tmp_path / "style.pt")
    machines.files["style.pt"] = (tmp_path / "style.pt").read_bytes()
    code, out, err = run("inspect", f"{machines.url}/files/style.pt", "--json")
    assert code == 0 and json.loads(out)["algorithms"] == {"lora": 32}, err


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
    small = save(sd1(), tmp_path / "sd.safetensors")
    at = {"hub": "hf://me/", "url": f"{machines.url}/files/"}[place]
    flux, lora = (f"{at}{name}" for name in {"hub": ("flux", "style"), "url": machines.files}[place])
    assert len(base) > 23.8e9
    calls = [["inspect", flux], ["parts", flux], [flux, lora, "--dry-run"], ["compare", flux, str(small)]]
    for words in calls:
        before = machines.bytes_sent()
        code, _, err = run(*words)
        assert code == 0, err
        assert 0 < machines.bytes_sent() - before < HEADERS, words
