"""Fixtures of several files."""

from __future__ import annotations

from support.sandboxing import make

__all__ = ["make"]
