"""What the kernel knows of a connection and is not in Python's socket module. Linux; elsewhere nothing is known."""

import socket
import struct
import sys

_STATE_ESTABLISHED = 1
_STATE_CLOSE = 7  # tcpi_state, include/net/tcp_states.h
_BYTES_ACKED_OFFSET = 120  # of tcpi_bytes_acked in struct tcp_info, linux/tcp.h


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection, though nobody may have read that yet."""
    if sys.platform != "linux":
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _STATE_ESTABLISHED
    except OSError:
        return True


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side reset the connection."""
    if sys.platform != "linux":
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _STATE_CLOSE


def acked_bytes(sock: socket.socket) -> int | None:
    """How many bytes the other side's host has taken, the SYN counted or not. None: not known."""
    if sys.platform != "linux":
        return None
    try:
        described = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_OFFSET + 8)
    except OSError:
        return None
    if len(described) < _BYTES_ACKED_OFFSET + 8:
        return None
    return int(struct.unpack_from("=Q", described, _BYTES_ACKED_OFFSET)[0])


def keep_watch(sock: socket.socket) -> None:
    """A machine that vanished says nothing, ever: let the kernel find out."""
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
