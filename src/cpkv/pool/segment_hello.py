"""What a rank says about its segments before anybody maps them, and why another rank refuses it."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import asdict

import msgspec

from cpkv.errors import HandshakeError, ProtocolError
from cpkv.pool.sealed_segment import RangeShape

EXCHANGE_VERSION = 1


class SegmentDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says about its segments; all but `rank` must be equal on all ranks.

    `shapes` are those of the descriptors, in their order; `geometry` is whatever else must agree, as text.
    """

    version: int
    secret: str
    rank: int
    cp_size: int
    host: str
    shapes: tuple[RangeShape, ...]
    geometry: dict[str, str]

    def fields(self) -> dict[str, str]:
        """What is compared, by the name that a refusal gives it."""
        found = {"host": self.host, "cp_size": str(self.cp_size), "number of ranges": str(len(self.shapes))}
        for place, shape in enumerate(self.shapes):
            found |= {f"range {place} {name}": str(value) for name, value in asdict(shape).items()}
        return found | {f"geometry {name}": value for name, value in self.geometry.items()}


class _Version(msgspec.Struct):
    version: int


def decode_hello(frame: bytes, version: int) -> SegmentDescription:
    """The description in a frame.

    Raises:
        HandshakeError: another version sent it; of that nothing but the number is understood.
        ProtocolError: it is malformed.
    """
    try:
        if (other := msgspec.msgpack.decode(frame, type=_Version).version) == version:
            return msgspec.msgpack.decode(frame, type=SegmentDescription)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"its hello is malformed: {error}") from error
    raise HandshakeError(f"version is {other} there and {version} here; run the same cpkv on both")


def why_not_hello(
    theirs: SegmentDescription, ours: SegmentDescription, peers: Collection[int], called: Collection[int]
) -> str | None:
    """Why a rank is refused for what it says, in words; None when it belongs to this group.

    Args:
        theirs: its description.
        ours: what it must equal.
        peers: ranks that may call.
        called: ranks that have called before.
    """
    if not hmac.compare_digest(theirs.secret.encode(), ours.secret.encode()):
        return "it has another secret than this run"
    if theirs.rank in called:
        return "it called twice"
    if theirs.rank not in peers:
        return f"only ranks {peers} are expected"
    there, here = theirs.fields(), ours.fields()
    differing = [
        f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name)
    ]
    return "; ".join(differing) or None
