"""What a user installs is what the checkout holds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.package import LIBRARIES

ROOT = Path(__file__).parent.parent
tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_folder_with_code_is_packaged() -> None:
    folders = {p.parent.relative_to(ROOT).as_posix().replace("/", ".") for p in (ROOT / "lora_merge").rglob("*.py")}
    folders = {f for f in folders if "algorithms" not in f} | {"lora_merge.algorithms"}
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_library_that_is_imported_is_declared() -> None:
    """Also those that other libraries would bring."""
    names = {"yaml": "PyYAML"}
    extras = PROJECT["project"]["optional-dependencies"]
    declared = " ".join(
        [
            *PROJECT["project"]["dependencies"],
            *(d for name in ("plots", "ray", "hub", "cloud", "systems", "modelscope", "ui") for d in extras[name]),
        ]
    )
    for library in LIBRARIES:
        assert re.search(rf"\b{names.get(library, library)}\b", declared), library


def test_link_to_the_algorithms_points_where_it_should() -> None:
    link = ROOT / "lora_merge" / "algorithms"
    if sys.platform == "win32" and link.is_file():  # what git makes of it there
        assert link.read_text() == "../algorithms"
        return
    assert link.is_symlink()
    assert Path(link.readlink()).as_posix() == "../algorithms"


def test_importing_algorithms_by_accident_is_stopped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import algorithms"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "import lora_merge.algorithms, not algorithms" in done.stderr


def test_torch_is_pinned_for_set_up_and_open_for_users() -> None:
    assert re.search(r"^torch==2\.13\.0$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(d.startswith("torch>=") for d in PROJECT["project"]["dependencies"])


@pytest.mark.release
@pytest.mark.parametrize("link", ["a link", "a text file"])
def test_wheel_holds_the_algorithms_and_the_tables(tmp_path: Path, link: str) -> None:
    """Also where git could make no link to the algorithms, as on Windows."""
    try:
        import setuptools
    except ImportError:
        pytest.skip("no setuptools here to build with")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77")
    copy = tmp_path / "source"  # a build leaves an egg-info behind, in which a checkout finds a version
    shutil.copytree(
        ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "tests", "build", "bench-data", "*.egg-info")
    )
    if link == "a text file":
        (copy / "lora_merge" / "algorithms").unlink()
        (copy / "lora_merge" / "algorithms").write_text("../algorithms")
    build = f"import setuptools.build_meta as b; print(b.build_wheel({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=copy, check=True, capture_output=True)
    import zipfile

    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    files = [p.relative_to(ROOT) for p in (ROOT / "lora_merge").rglob("*") if p.is_file()]
    files += [Path("lora_merge", p.relative_to(ROOT)) for p in (ROOT / "algorithms").rglob("*") if p.is_file()]
    needed = {f.as_posix() for f in files if f.suffix not in (".md", ".pyc")}
    assert needed <= {*names}, needed - {*names}
    assert "lora_merge/algorithms" not in names
    assert not any(n.startswith(("algorithms/", "tests/")) for n in names)
    (about,) = (n for n in names if n.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(about).decode()
    assert all(f"Classifier: {c}" in text for c in PROJECT["project"]["classifiers"])
    assert all(f"Project-URL: {name}, {url}" in text for name, url in PROJECT["project"]["urls"].items())
    assert "Author: The lora-merge developers" in text


def test_classifiers_name_every_python_that_the_tests_run_on() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    (versions,) = re.findall(r"python: \[(.+)\]", workflow)
    named = {c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c}
    assert named == set(re.findall(r'"(.+?)"', versions))
    assert min(named, key=lambda v: int(v[2:])) in PROJECT["project"]["requires-python"]
