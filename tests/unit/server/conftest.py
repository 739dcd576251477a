"""Fixtures of several files."""

from __future__ import annotations

from support.model_server_process import server
from support.remote_endpoint import remote

__all__ = ["remote", "server"]
