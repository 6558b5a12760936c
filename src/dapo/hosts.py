"""The names by which a machine calls itself, for servers that answer this machine alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address, or the header ``Host`` of a request, is of this machine: a page elsewhere that reaches
    127.0.0.1 through a name of its own brings that name. An address in digits is nobody's name."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]") or (":" in name.strip("[]") and not name.endswith("]")):
        name, port = host, "0"  # there is none; all colons belong to an address of IPv6
    name = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        if not port.isdecimal() or name.lower() in ("localhost", "localhost."):
            return port.isdecimal()
        address = ipaddress.ip_address(name)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback
    except ValueError:
        return False
