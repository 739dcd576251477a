"""Waiting for a socket in a way that ends with every signal, as PostgreSQL cancels a statement by one.

``select.poll`` goes on waiting after a signal for which Python has no handler (PEP 475), and PostgreSQL's are its own.
So a cancelled statement would be noticed at the end of the wait only. poll(2) itself ends with any signal (signal(7)).
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable

try:
    import ctypes

    class _Pollfd(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    _poll: Callable[..., int] | None = ctypes.CDLL(None, use_errno=True).poll
except (ImportError, OSError, AttributeError):  # a Python without it, or a system that lets nothing be loaded
    _poll = None


def wait(fd: int, event: int, seconds: float) -> bool:
    """Whether the descriptor is ready for ``event`` (``select.POLLIN`` …) within ``seconds``; False after a signal."""
    milliseconds = round(seconds * 1000)
    if _poll is None:
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(milliseconds))
    ready = _poll(ctypes.byref(_Pollfd(fd, event, 0)), ctypes.c_ulong(1), milliseconds)
    if ready < 0 and (number := ctypes.get_errno()) != errno.EINTR:
        raise OSError(number, os.strerror(number))
    return ready > 0
