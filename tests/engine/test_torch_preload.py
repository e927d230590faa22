"""torch's library is loaded beside the plan, and nothing that the plan needs waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATE = """
import sys
from importlib import import_module
import lora_merge.cli.main, lora_merge.engine.torch_preload as preload

def compiled():
    return {n for n, m in [*sys.modules.items()] if str(getattr(m, "__file__", "")).endswith((".so", ".pyd"))}

for name in preload.COMPILED:
    import_module(name)
before = compiled()
import lora_merge.engine.merge, lora_merge.engine.admission
print(*sorted(compiled() - before))
"""


@pytest.mark.release
def test_merge_imports_no_compiled_module_after_those_that_are_loaded_first() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
