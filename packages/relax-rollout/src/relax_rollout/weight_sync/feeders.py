"""Which rank of the trainer feeds which engine, and at which address the two meet."""

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil


def choose_feeders(near: Sequence[Sequence[bool]]) -> list[int]:
    """The rank that feeds each engine: one of its own node if there is any, else one of all, each in turn.

    Args:
        near: ``[ranks][engines]``: whether the two are on one node.
    """
    load = [0] * len(near)
    chosen = []
    for engine in range(len(near[0])):
        ranks = [rank for rank in range(len(near)) if near[rank][engine]] or list(range(len(near)))
        feeder = min(ranks, key=lambda rank: (load[rank], rank))
        load[feeder] += 1
        chosen.append(feeder)
    return chosen


def is_near(url: str) -> bool:
    """True when an engine at this address runs on this machine."""
    host, family = _resolved(url)
    return _towards(host, family) == host


def meeting_host(url: str) -> str:
    """The address of this machine at which that engine reaches it: 127.0.0.1 on one machine."""
    host, family = _resolved(url)
    own = _towards(host, family)
    return own if own != host else "::1" if family == socket.AF_INET6 else "127.0.0.1"


def _resolved(url: str) -> tuple[str, socket.AddressFamily]:
    """Host of an address in numbers.

    Raises:
        ValueError: the address names no host that is known here.
    """
    name = urlsplit(url).hostname
    try:
        family, *_, address = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(f"the engine's address {url} names a host that is not known here: {error}") from error
    return str(address[0]), family


def _towards(host: str, family: socket.AddressFamily) -> str:
    """The address that this machine has on its way to a host; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str | None:
    """Name of this machine's network interface that has an address; None when none has it.

    By default gloo listens at the address of the host's name, which other nodes may not reach.

    Args:
        host: an address in numbers, or a name.
    """
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host) if ":" not in host else host)
    except (OSError, ValueError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(found.address.partition("%")[0])
                # The loopback has all of 127.0.0.0/8.
                if own == address or (own.is_loopback and address.is_loopback and own.version == address.version):
                    return str(name)
    return None
