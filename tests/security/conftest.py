"""Fixtures of several files."""

from __future__ import annotations

from support.canary import canaries
from support.loading import folder, loader, server
from support.models_server import models
from support.schema import model, shop
from support.scripted import script

__all__ = ["canaries", "folder", "loader", "model", "models", "script", "server", "shop"]
