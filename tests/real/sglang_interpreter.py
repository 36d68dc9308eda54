"""Where SGLang is installed: ``$STREAMRL_SGLANG_PYTHON``, or what ``make test`` makes beside the repository's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("STREAMRL_SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang/bin/python"))
needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"SGLang is not installed here: no {PYTHON}; `make .venv-sglang/.installed` makes it, or name another one "
    "in $STREAMRL_SGLANG_PYTHON",
)
