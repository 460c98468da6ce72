"""Bring up the loopback interface of a separate network namespace, then become the command that follows."""

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1

with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
os.execv(sys.argv[1], sys.argv[1:])
