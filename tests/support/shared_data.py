"""The public evaluation data beside the checkout, where it is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("ML_RAG_SHARED") or Path(__file__).resolve().parents[3] / "shared") / "data"

shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public evaluation data is not beside the checkout")
