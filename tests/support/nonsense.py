"""A child of the sandbox whose first message is no JSON."""

from __future__ import annotations

import socket
import sys
import time

if __name__ == "__main__":
    socket.socket(fileno=int(sys.argv[1])).sendall((8).to_bytes(8, "big") + b"nonsense")
    time.sleep(60)
