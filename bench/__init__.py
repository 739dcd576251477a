"""Figures of ml_rag, each beside its floor, measured in the same run: ``make bench``."""

import sys
from pathlib import Path

# what tests and figures share: tests/support
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
