"""What torchao stores."""

from __future__ import annotations

from tests.files.torchao_layers import stored

STORED = stored()
