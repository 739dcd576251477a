"""Fixtures of several files."""

from __future__ import annotations

from support.embedding import behave, session
from support.loading import folder, loader, server
from support.models_server import models
from support.schema import model, shop
from support.scripted import script
from support.vectorizers import items

__all__ = ["behave", "folder", "items", "loader", "model", "models", "script", "server", "session", "shop"]
