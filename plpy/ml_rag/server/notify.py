"""Tells the service manager that the server answers, or that it is about to end: systemd's sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """Send ``"READY=1"`` and the like to the socket that ``NOTIFY_SOCKET`` names; without one, do nothing.

    A service manager that does not listen is none of the server's troubles: no error is raised.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # a name of Linux's own, in no file system
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(1.0)
        manager.sendto("\n".join(assignments).encode(), address)
