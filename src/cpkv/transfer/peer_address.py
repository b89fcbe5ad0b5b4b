"""Where a peer's engine is reached, from the session id that its handshake told."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

from cpkv.errors import TransferError

FROM_HANDSHAKE = "start it, or take its id from the handshake"


class PeerAddress(NamedTuple):
    """What a socket to the peer is made with, and what it is connected to."""

    family: socket.AddressFamily
    kind: socket.SocketKind
    protocol: int
    address: Any


def resolve_peer(session_id: str, host: str, port: str | int) -> PeerAddress:
    """Look a peer up.

    Raises:
        TransferError: naming the session; its host does not resolve, or its port is no number.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        raise TransferError(f"peer {session_id} has no address that resolves ({error}); {FROM_HANDSHAKE}") from None
    return PeerAddress(family, kind, protocol, address)
