"""This machine's address in a network."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def address_towards(coordinator: str) -> str:
    """This machine's address in the network by which it reaches the coordinator, `host:port`."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    address = _own_address(host, int(port))
    if host not in _LOOPBACK and ipaddress.ip_address(address).is_loopback:
        # The host's own name, as some systems have it; others cannot reach it by that.
        with contextlib.suppress(OSError):
            return _own_address(_ANYWHERE, int(port))
    return address


_ANYWHERE = "192.0.2.1"  # of a network that is for examples alone (RFC 5737): reached as everything outside is


def _own_address(host: str, port: int) -> str:
    """The address from which this machine would send there."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])
