"""The network interface for gloo; left to itself gloo looks up the host's own name."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # with which gloo listens on this machine alone
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


def is_loopback(address: str) -> bool:
    """Return whether an address says, without being resolved, that it is this machine only.

    A host's own name often resolves to loopback on that host alone: it does not count.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def gloo_interface(address: str, one_machine: bool) -> str | None:
    """The interface that gloo must be told, or None if its own choice is good.

    On one machine it is loopback: gloo then listens to no others and resolves no name. On several,
    gloo takes the address that this host's name resolves to; where that is loopback or none at all
    (a container, Debian's 127.0.1.1), the others would be sent to themselves.

    Args:
        address: Of rank 0.
        one_machine: Whether all ranks are known to be here.
    """
    if one_machine or is_loopback(address):
        return LOOPBACK.get(sys.platform)
    if _name_leads_elsewhere():
        return None
    own = own_address(address)
    if is_loopback(own):  # rank 0's own name, seen from rank 0
        own = own_address()
    return next((name for name in _interfaces() if _address_of(name) == own), None)


def own_address(towards: str = "192.0.2.1") -> str:
    """The address with which this machine reaches another; nothing is sent to find it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such name or route: the store's connection will say so
        return "127.0.0.1"


def _name_leads_elsewhere() -> bool:
    """Return whether this host's own name resolves to an address that other hosts can use."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return not is_loopback(str(found[0][4][0]))


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else []


def _address_of(interface: str) -> str:
    import fcntl  # Linux alone comes here

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
        except OSError:  # an interface without an address
            return ""
    return socket.inet_ntoa(answer[20:24])
