"""What the system says of this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lora_merge.disk.system import peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count this program alone")
def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    held = bytearray(b"1") * (200 << 20)
    code = "from lora_merge.disk.system import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(done.stdout) < len(held) < peak_memory()
