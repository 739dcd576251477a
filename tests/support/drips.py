"""A process of its own that answers byte by byte, without end."""

import socket
import sys
import time

if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.sendall((10**6).to_bytes(8, "big"))
    while True:
        connection.sendall(b"x")
        time.sleep(0.002)
