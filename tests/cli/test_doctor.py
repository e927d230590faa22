"""The examination of the machine. Run: pytest tests/cli/test_doctor.py"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from lora_merge.algorithms import ALGORITHMS
from lora_merge.cli import doctor
from lora_merge.cli import main as program
from lora_merge.cli.doctor import MIXTURES, deviation, examine, rows
from lora_merge.cli.reports import plain_lines
from lora_merge.engine.tensor_moves import Placement
from lora_merge.proof.reference import REFERENCE, Reference
from tests.kit.command_line import run


def lines(found: dict[str, Any]) -> list[str]:
    """The lines about what was found."""
    return [*plain_lines(rows(found))]


def test_sound_machine_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine(tmp_path, disk_bytes=1 << 20)
    assert found["problems"] == []
    (cpu,) = (d for d in found["devices"] if d["device"] == "cpu")
    assert {"fp32", "bf16", "fp16", "fp8_e4m3fn"} <= set(cpu["dtypes"])
    assert cpu["algorithms"] == len(ALGORITHMS)
    assert cpu["worst"]["fp64"] < 1e-9
    for mode in ("direct", "buffered"):
        assert found["disk"][mode]["write"] > 0
        assert found["disk"][mode]["read"] > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    assert run("doctor").out.splitlines() == [*lines(found), "all is well"]
    json.dumps(found)


def test_wrong_formula_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**REFERENCE, "lokr": Reference(lambda g: np.zeros((len(g.rows), g.cols)))}
    monkeypatch.setattr(doctor, "REFERENCE", MappingProxyType(broken))
    found = examine(tmp_path, disk_bytes=1 << 20)
    assert [p for p in found["problems"] if p.startswith("cpu: lokr in fp32 is off by")]
    assert all("lokr" in p for p in found["problems"])
    assert any(row.startswith("problem  cpu: lokr") for row in lines(found))


def test_folder_that_is_not_there_or_full_or_closed_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(folder: Path, size: int = 1 << 20) -> str:
        found = examine(folder, disk_bytes=size)
        assert lines(found)[-1] == f"problem  {found['problems'][0]}"
        return str(found["problems"][0])

    assert "not a folder" in problem(tmp_path / "none")
    assert "are free" in problem(tmp_path, 1 << 60)

    def refused(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_bytes", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert "no permission to write" in problem(tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "writes"), [("ext4", "direct"), ("tmpfs", "cached")])
def test_doctor_writes_directly_where_a_merge_would(
    kind: str, writes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda _: kind)
    assert examine(tmp_path, disk_bytes=1 << 20)["auto"]["writes"] == writes


@pytest.mark.few(2)
@pytest.mark.parametrize("stored", MIXTURES)
def test_every_formula_takes_every_mixture_of_dtypes(stored: tuple[str, str]) -> None:
    for name in ALGORITHMS:
        assert deviation(name, Placement(torch.device("cpu"), torch.float32), stored) < doctor.TOLERANCE["F32"], name


def test_command_prints_json_and_says_it_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: examine(tmp_path / "none", disk_bytes=1 << 20))
    monkeypatch.setattr(sys, "argv", ["lora-merge", "doctor", "--json", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        program.main()
    found = json.loads(capsys.readouterr().out)
    assert found["problems"]
    assert "is not a folder" in lines(found)[-1]


def test_folder_that_is_missing_is_an_error_as_of_other_commands(tmp_path: Path) -> None:
    done = run("doctor", "--json", tmp_path / "none")
    assert done.code == 2
    assert json.loads(done.out)["error"]["where"] == str(tmp_path / "none")


def test_device_that_is_listed_and_unusable_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "present", lambda: ["cuda:0"])
    monkeypatch.setattr(doctor, "unusable", lambda _: "no kernel image is available")
    found = examine(tmp_path, disk_bytes=1 << 20)
    assert found["problems"] == ["cuda:0: no kernel image is available"]
    assert any(line.startswith("cuda:0   unusable") for line in lines(found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_cuda_device_is_well(tmp_path: Path) -> None:
    found = examine(tmp_path, disk_bytes=1 << 20)
    assert [d for d in found["devices"] if d["device"].startswith("cuda")]
    assert found["problems"] == []
