"""Who waits for a processor when all are busy: a query that somebody waits for goes before a load and an answer.

One search needs some 10 ms of a processor, an answer seconds and a load minutes. Where all of them have the same share,
a search waits its turn many times over; where the long ones yield, they hardly notice.
"""

from __future__ import annotations

import contextlib
import os
import threading

#: the environment variable by which the server tells its processes what to add to their nice value
VARIABLE = "ML_RAG_BACKGROUND_NICE"
#: the default: about 1/9 of the share of a process at 0 where processors are busy, all of it where they are free
NICE = 10


def yield_thread() -> None:
    """Let the calling thread, and those it starts from here on, yield to others. Does nothing where that cannot be."""
    by = int(os.environ.get(VARIABLE, NICE))
    # on Linux a nice value is of a thread; elsewhere no process has the number of a thread
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + by)
