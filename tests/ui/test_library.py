"""What the page lists, reads and writes: files below the named folders alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lora_merge import MergeError
from lora_merge.ui.library import ADAPTER, BASE, Library
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1


def kinds(library: Library) -> dict[str, tuple[str, ...]]:
    """Label → kinds."""
    return {entry.label: entry.kinds for entry in library.entries()}


def test_folder_of_a_program_is_listed_by_its_folders(comfy: Path) -> None:
    for other in (comfy / "models/elsewhere", comfy / "other"):
        other.mkdir()
        save(sd1(), other / "x.safetensors")
    for folder in (comfy, comfy / "models"):
        listed = kinds(Library([folder]))
        assert {label.rpartition("/")[2]: kind for label, kind in listed.items()} == {
            "tiny.safetensors": (BASE,), "tuned.safetensors": (BASE,), "sd3.safetensors": (BASE,),
            "a {x} it's.safetensors": (ADAPTER,), "b.safetensors": (ADAPTER,),
        }  # fmt: skip


def test_output_next_to_the_folders_of_a_program_is_listed(comfy: Path) -> None:
    save(sd1(), comfy / "merged.safetensors")
    assert kinds(Library([comfy]))["merged.safetensors"] == (BASE,)
    assert "merged.safetensors" not in kinds(Library([comfy], comfy / "models"))


@pytest.mark.parametrize(
    ("base", "lora"), [("Stable-diffusion", "Lora"), ("unet", "loras"), ("Stable-diffusion", "LyCORIS")]
)
def test_folders_of_other_programs(base: str, lora: str, tmp_path: Path) -> None:
    for folder, name in ((base, "m"), (lora, "sub/l")):
        path = tmp_path / "models" / folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"not looked at")
    assert [*kinds(Library([tmp_path])).values()] == [(ADAPTER,), (BASE,)][:: 1 if lora < base else -1]


def test_hub_cache_and_plain_folders_are_listed_by_headers(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--me--style/blobs", tmp_path / "models--me--style/snapshots/abc"
    for folder in (blobs, snapshot, tmp_path / "models--me--llm/snapshots/1"):
        folder.mkdir(parents=True)
    save(kohya(sd1()), blobs / "123")
    (snapshot / "style.safetensors").symlink_to(Path("../../blobs/123"))
    save(sd1(), tmp_path / "models--me--llm/snapshots/1/model.safetensors")
    (tmp_path / "models--me--llm/snapshots/1/config.json").write_text("{}")
    expected = {"me/style@abc/style.safetensors": (ADAPTER,), "me/llm@1": (BASE,)}
    assert kinds(Library([tmp_path])) == expected
    plain = tmp_path / "plain"
    plain.mkdir()
    save(kohya(sd1()), plain / "one.safetensors")
    save(sd1(), plain / "two.safetensors")
    (plain / "three.safetensors").write_bytes(b"damaged")
    assert kinds(Library([plain])) == {
        "one.safetensors": (ADAPTER,),
        "two.safetensors": (BASE,),
        "three.safetensors": (),
    }


def test_links_that_lead_out_are_refused(comfy: Path, tmp_path: Path) -> None:
    outside = save(kohya(sd1()), tmp_path / "outside.safetensors")
    loras = comfy / "models/loras"
    (loras / "link.safetensors").symlink_to(outside)
    (loras / "peft").mkdir()
    (loras / "peft/adapter_config.json").write_text("{}")
    (loras / "peft/adapter_model.safetensors").symlink_to(outside)
    library = Library([comfy])
    assert "link.safetensors" not in kinds(library)
    for path in (outside, loras / "link.safetensors", loras / "../../../outside.safetensors", loras / "peft", tmp_path):
        with pytest.raises(MergeError, match=r"outside the page|leads out"):
            library.path(str(path))


def test_outputs_stay_below_their_folder(comfy: Path, tmp_path: Path) -> None:
    (comfy / "out").symlink_to(tmp_path)
    (comfy / "file.safetensors").symlink_to(tmp_path / "file.safetensors")
    library = Library([comfy])
    assert library.target("models/x") == comfy / "models/x"
    for name in ("", ".", "..", "../x", "/etc/x", "a/../../x", "out/x", "file.safetensors", "x\0y"):
        with pytest.raises(MergeError, match="outside the output folder"):
            library.target(name)
    apart = Library([comfy], tmp_path)
    assert apart.target("x") == tmp_path / "x"


def test_dropped_file_is_that_of_the_library_or_arrives_as_a_whole(comfy: Path, tmp_path: Path) -> None:
    library, content = Library([comfy]), (comfy / "models/loras/b.safetensors").read_bytes()
    known = library.find("b.safetensors", len(content))
    assert known is not None and known.path == str(comfy / "models/loras/b.safetensors")
    assert library.find("b.safetensors", len(content) + 1) is None
    stream = io.BytesIO(content)
    path = library.upload("c.safetensors", len(content)).receive(lambda: stream.read(1000))
    assert path == comfy / "dropped/c.safetensors" and path.read_bytes() == content
    assert kinds(library)["c.safetensors"] == (ADAPTER,)
    with pytest.raises(MergeError, match="exists"):
        library.upload("c.safetensors", 1).receive(lambda: b"")


@pytest.mark.parametrize(
    ("name", "length", "content", "what"),
    [
        ("x.safetensors", 9, b"short", "as a whole"),
        ("x.safetensors", 3, b"long", "as a whole"),
        ("x.safetensors", 7, b"damaged", "damaged|too short|header"),
        ("x.safetensors", 0, b"", "the file has 0 B"),
        ("x.safetensors", 1 << 40, b"", "the file has 1.00 TiB"),
        ("../x.safetensors", 1, b"x", "only files with weights"),
        ("x.py", 1, b"x", "only files with weights"),
        ("base", 0, b"", "this is a model"),
    ],
)
def test_dropped_file_that_is_no_adapter_leaves_nothing(
    name: str, length: int, content: bytes, what: str, comfy: Path
) -> None:
    if name == "base":
        content = (comfy / "models/checkpoints/tiny.safetensors").read_bytes()
        name, length = "x.safetensors", len(content)
    stream = io.BytesIO(content)
    with pytest.raises(MergeError, match=what):
        Library([comfy]).upload(name, length).receive(stream.read)
    assert [p.name for p in comfy.rglob("*") if p.name.endswith(("x.safetensors", "x.py", ".part"))] == []
