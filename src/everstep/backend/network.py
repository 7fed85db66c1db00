"""Where a group of workers meets: addresses, ports and interfaces of the host that a worker is on.

The connections are the framework's; here ports are only taken, held and waited for.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time

_BACKLOG = 4096
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``address``."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name rather than a number
        return address == "localhost"


def join_address(address: str, port: int) -> str:
    """``host:port``, with the brackets that IPv6 needs."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of ``address``: peers may connect before anybody accepts."""
    taken = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        taken.bind((address, 0))
        taken.listen(_BACKLOG)
    except OSError:
        taken.close()
        raise
    return taken


def hold_port(address: str) -> socket.socket:
    """A free port of ``address``, held for a server that insists on binding it itself.

    The socket is bound and doesn't listen, so that no connection ever reaches it. The kernel gives its port
    to nobody else, but lets a server of the same user that sets ``SO_REUSEPORT`` in. Close it when that
    server is up.
    """
    held = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held


def wait_until_listening(address: str, port: int, deadline: float) -> None:
    """Return when somebody listens there. Raises ``TimeoutError`` at ``deadline`` (monotonic seconds)."""
    pause = _FIRST_PAUSE_S
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"nobody listened on {join_address(address, port)} in time")
        try:
            socket.create_connection((address, port), timeout=left).close()
            return
        except TimeoutError:
            continue
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has ``address``; ``None`` where it can't be told."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return next((name for name in ("lo", "lo0") if name in names), None)
    if not sys.platform.startswith("linux") or ":" in address:
        return None
    return next((name for name in names if _ipv4_of(name) == address), None)


def interface_variables(address: str) -> dict[str, str | None]:
    """Keep the connections of gloo and NCCL on the address that the group meets at, unless the user has
    chosen an interface.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    names = ["GLOO_SOCKET_IFNAME"]
    if is_loopback(address):
        names.append("NCCL_SOCKET_IFNAME")  # elsewhere NCCL finds the fastest one itself
    return {name: interface for name in names if name not in os.environ}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _ipv4_of(interface: str) -> str | None:
    import fcntl

    get_interface_address = 0x8915  # SIOCGIFADDR
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, get_interface_address, request)
        except OSError:  # an interface without an address
            return None
    return socket.inet_ntoa(answer[20:24])
