"""Find the address at which other nodes of the job reach this node."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from flowstone.errors import ArgumentError

_MASTER = "MASTER_ADDR"
_SIOCGIFADDR = 0x8915
_NEXT = "pass interface= to PeerMemory: the name (eth0) or address of this node's interface to the other nodes"


def address_of(interface: str | None) -> str:
    """The address of a network interface, which is given by name or address; None: the interface with the route to
    MASTER_ADDR.

    raises  ArgumentError  the interface has no address, or the address means all interfaces
    """
    if interface is None:
        return _towards_master()
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        return _of_name(interface)
    if address.is_unspecified or address.is_multicast:
        raise ArgumentError(
            f"interface={interface!r} is not the address of one interface of this node",
            expected="an address that is neither unspecified (0.0.0.0) nor multicast", next=_NEXT,
        )
    return str(address)


def _towards_master() -> str:
    master = os.environ.get(_MASTER)
    if not master:
        raise ArgumentError(
            f"cannot find the address at which other nodes reach this node: {_MASTER} is not set", next=_NEXT
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ArgumentError(
            f"this node has no route to {_MASTER}={master}", reason=error.strerror, next=_NEXT
        ) from error


def _of_name(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ArgumentError(
                f"this node has no interface {name!r} with an address", found=names, reason=error.strerror, next=_NEXT
            ) from error
    return socket.inet_ntoa(answer[20:24])
