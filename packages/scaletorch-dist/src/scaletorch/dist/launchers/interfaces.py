"""Choose the network interface for gloo, which by default resolves the host's own name."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys

LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # gloo on it accepts only this machine
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR


def is_loopback(address: str) -> bool:
    """Return whether an address is loopback by its text alone, without name resolution.

    A host's own name does not count: it often resolves to loopback on that host only.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def gloo_interface(address: str, one_machine: bool) -> str | None:
    """Return the interface to set for gloo, given rank 0's address, or None if its default works.

    By default gloo uses the address to which this host's name resolves. If that is loopback or does
    not exist (a container, Debian's 127.0.1.1), ranks of other machines could not connect.
    """
    if one_machine or is_loopback(address):
        return LOOPBACK.get(sys.platform)
    if _name_leads_elsewhere():
        return None
    own = own_address(address)
    if is_loopback(own):  # on rank 0, whose own name resolves to loopback
        own = own_address()
    names = [name for _, name in socket.if_nameindex()] if sys.platform == "linux" else []
    return next((name for name in names if _address_of(name) == own), None)


def own_address(towards: str = "192.0.2.1") -> str:
    """Return this machine's address on the route to another one; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except OSError:  # no such name or route: connecting to the store will report it
        return "127.0.0.1"


def _name_leads_elsewhere() -> bool:
    """Return whether this host's own name resolves to an address that other hosts can use."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return not is_loopback(str(found[0][4][0]))


def _address_of(interface: str) -> str:
    import fcntl  # only reached on Linux

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
        except OSError:  # an interface without an address
            return ""
    return socket.inet_ntoa(answer[20:24])
