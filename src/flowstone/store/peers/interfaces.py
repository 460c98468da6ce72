"""The one address of this node at which other nodes of the job reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from flowstone.errors import ArgumentError

_MASTER = "MASTER_ADDR"
_SIOCGIFADDR = 0x8915
_NEXT = "give PeerMemory interface= the name (eth0) or the address of the network that joins the nodes"


def address_of(interface: str | None) -> str:
    """The address of an interface, by its name; an address is itself; None: the one that leads to MASTER_ADDR.

    raises  ArgumentError where there is none, or for an address that means all interfaces
    """
    if interface is None:
        return _towards_master()
    try:
        found = ipaddress.ip_address(interface)
    except ValueError:
        return _of_name(interface)
    if found.is_unspecified or found.is_multicast:
        raise ArgumentError(
            f"interface {interface!r} is not one interface", expected="the network that joins the nodes, and no other",
            next=_NEXT,
        )
    return str(found)


def _towards_master() -> str:
    master = os.environ.get(_MASTER)
    if not master:
        raise ArgumentError(f"at which address do other nodes reach this one? {_MASTER} is not set", next=_NEXT)
    try:
        family, _, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ArgumentError(f"no way leads to {_MASTER} {master}", reason=error.strerror, next=_NEXT) from error


def _of_name(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ArgumentError(
                f"this node has no interface {name!r} with an address", found=names, reason=error.strerror, next=_NEXT
            ) from error
    return socket.inet_ntoa(found[20:24])
