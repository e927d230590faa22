"""The whole program where the system has nothing of POSIX. Run: pytest tests/whole/test_without_posix.py"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lora_merge
from tests.kit import gguf_files
from tests.kit.adapters import kohya
from tests.kit.files import save
from tests.kit.models import sd1_sample
from tests.kit.tensors import rand

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the real thing")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tests.kit.without_posix", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    base = sd1_sample()
    save(base, folder / "base.safetensors")
    save(kohya(base), folder / "style.safetensors")
    return folder


def test_merge_and_proof_have_the_same_bytes(files: Path, tmp_path: Path) -> None:
    pair = [files / "base.safetensors", files / "style.safetensors"]
    lora_merge.merge(*pair, tmp_path / "with.safetensors", device="cpu")
    merge = [*pair, "--device", "cpu", "-o", tmp_path / "without.safetensors"]
    proof = ["verify", tmp_path / "without.safetensors", "--full", "--base", pair[0], "--adapter", pair[1]]
    done = run(*merge, "--then", *proof)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "without.safetensors").read_bytes() == (tmp_path / "with.safetensors").read_bytes()
    assert done.stdout.count("verified") == 2
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.release
def test_folder_is_merged_and_replaced(files: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes((files / "base.safetensors").read_bytes())
    (model / "config.json").write_text("{}")
    merge = [model, files / "style.safetensors", "-o", tmp_path / "out", "--overwrite"]
    done = run(*merge, "--then", *merge)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("verified") == 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.release
def test_kill_leaves_the_output_as_it_was(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    out.write_bytes(b"old")
    for wait in (0.3, 1.0, 1.8):
        child = subprocess.Popen(
            command(files / "base.safetensors", files / "style.safetensors", "-o", out, "--overwrite"),
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
        size = out.stat().st_size
        assert size == 3 or size > 1000
    done = run(files / "base.safetensors", files / "style.safetensors", "-o", out, "--overwrite")
    assert done.returncode == 0, done.stderr


HALF_WRITTEN = """
import sys
from pathlib import Path
from tests.kit.without_posix import take_away
take_away()
from lora_merge.disk.publish import replacing
with replacing(Path(sys.argv[1]), folder=sys.argv[2] == "folder", contents=["weights"]) as part:
    (part / "weights" if sys.argv[2] == "folder" else part).write_text("half")
    print(part.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_remains_of_a_killed_run_are_removed_and_files_of_a_running_one_stay(tmp_path: Path, kind: str) -> None:
    def started(name: str) -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HALF_WRITTEN, str(tmp_path / name), kind], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    running, part = started("first")
    killed, other = started("second")
    killed.kill()
    killed.communicate()
    third, _ = started("third")
    there = {p.name for p in tmp_path.iterdir()}
    assert not {other, f"{other}.lock"} & there
    assert {part, f"{part}.lock"} <= there
    for child in (running, third):
        child.communicate()
        assert child.returncode == 0
    assert {p.name for p in tmp_path.iterdir()} == {"first", "third"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as git leaves them where there are no symbolic links: the link to the formulas is a text file."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("lora_merge", "algorithms"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    (copy / "tests" / "kit").mkdir(parents=True)
    for name in ("__init__.py", "kit/__init__.py", "kit/without_posix.py"):
        shutil.copy(ROOT / "tests" / name, copy / "tests" / name)
    (copy / "lora_merge" / "algorithms").unlink()
    (copy / "lora_merge" / "algorithms").write_text("../algorithms")
    return copy


@pytest.mark.release
def test_batch_finds_the_formulas_where_the_link_to_them_is_a_text_file(
    checkout: Path, files: Path, tmp_path: Path
) -> None:
    find = "import lora_merge.algorithms.lora as a, lora_merge.api as b; print(a.__file__, b.__file__, sep='\\n')"
    found = subprocess.run([sys.executable, "-c", find], cwd=checkout, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert [Path(line) for line in found.stdout.split()] == [
        checkout / "algorithms" / "lora.py", checkout / "lora_merge" / "api.py",
    ]  # fmt: skip
    jobs = tmp_path / "jobs.json"
    base, style = str(files / "base.safetensors"), str(files / "style.safetensors")
    jobs.write_text(json.dumps({"version": 1, "jobs": [
        {"base": base, "adapters": [{"path": style, "strength": s}], "output": f"{s}.safetensors"} for s in (0.5, 1)
    ]}))  # fmt: skip
    batch = command("batch", jobs, "--workers", "2")
    done = subprocess.run(batch, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    lora_merge.merge(base, style, tmp_path / "o.safetensors")
    assert (tmp_path / "o.safetensors").read_bytes()[-4096:] == (tmp_path / "1.safetensors").read_bytes()[-4096:]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


WRITE = """
style = files / "style.safetensors"
lora_merge.combine([style, (style, 0.5)], out / "combined.safetensors")
lora_merge.resize(style, out / "resized.safetensors", rank=2)
lora_merge.convert(style, out / "peft", to="peft", base=files / "base.safetensors", include=["unet"])
lora_merge.merge(files / "flux.gguf", files / "flux-style.safetensors", out / "flux.gguf", device="cpu")
"""
WITHOUT = f"""
import sys
from pathlib import Path
from tests.kit.without_posix import take_away
take_away()
import lora_merge
files, out = map(Path, sys.argv[1:])
{WRITE}
"""


@pytest.mark.release
def test_adapters_and_gguf_files_are_written_to_the_same_bytes(checkout: Path, files: Path, tmp_path: Path) -> None:
    layer = "double_blocks.0.img_mlp.0"
    gguf_files.write(files / "flux.gguf", "flux", {f"{layer}.weight": (rand(96, 256).numpy(), "Q8_0")})
    stem = "lora_unet_" + layer.replace(".", "_")
    factors = {f"{stem}.lora_down.weight": rand(4, 256), f"{stem}.lora_up.weight": rand(96, 4)}
    save(factors, files / "flux-style.safetensors")

    def made(out: Path) -> dict[str, bytes]:
        found = {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        shutil.rmtree(out)
        return found

    out = tmp_path / "out"  # under one name, which recipes hold
    out.mkdir()
    exec(WRITE, {"files": files, "out": out, "lora_merge": lora_merge})
    expected = made(out)
    out.mkdir()
    program = [sys.executable, "-c", WITHOUT, str(files), str(out)]
    done = subprocess.run(program, cwd=checkout, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert made(out) == expected
    assert len(expected) > 4
