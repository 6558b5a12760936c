"""Where the servers listen, and the names by which a machine calls itself, for those that answer this machine alone."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from dapo.errors import ConfigError

LOCAL = "127.0.0.1"


def listening_socket(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first of ``ports`` that is free; 0: any.
    Raises ConfigError: the address cannot be listened on."""
    problem: OSError | None = None
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            found = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: of a name that cannot be one
            raise ConfigError(f"--host {host}: not an address of this machine: {error}") from None
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            problem = error
    shown = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    raise ConfigError(f"cannot listen on {host}, port {shown}: {problem and problem.strerror}; try --port 0")


def wrong_name(host: str, or_else: str) -> str | None:
    """What to answer to a request without a token that comes by another name (its header ``Host``) than those of this
    machine: a page elsewhere can reach 127.0.0.1 through a name of its own. None: it is one of them."""
    return None if is_loopback(host) else f"no such name here: {host[:100]}; use 127.0.0.1, or {or_else}"


def url(host: str, port: int) -> str:
    """``http://host:port``, with an address of IPv6 in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, or the header ``Host`` of a request, is of this machine."""
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
