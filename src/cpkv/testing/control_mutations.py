"""Bytes that somebody might send to a control socket: messages, almost messages, and what flips, cuts and lies make."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from cpkv.protocol import messages as m
from cpkv.protocol.frames import LENGTH
from cpkv.testing.sample_pool import SAMPLE_POOL

# Lengths and counts at which a reader may go wrong.
EDGES = (0, 1, 31, 32, 63, 64 << 10, (64 << 10) + 1, m.MAX_FRAME_BYTES, m.MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1)
# Headers of msgpack that promise more items or bytes than follow: arrays, maps, texts, binaries, extensions.
PROMISES = (b"\xdc", b"\xdd", b"\xde", b"\xdf", b"\xda", b"\xdb", b"\xc5", b"\xc6", b"\xc8", b"\xc9")


def message(draw: random.Random, request_id: str) -> Any:
    """A well-formed message to a decode worker that names this request wherever it names one."""
    numbers = tuple(draw.choice((-1, 0, 1, 2**31, 2**63 - 1)) for _ in range(draw.randrange(6)))
    kind = draw.choice(get_args(m.ToDecode))
    if kind is m.Hello:
        return m.Hello(
            SAMPLE_POOL, m.SenderDescription(rank=draw.randrange(-1, 8), cp_size=8, strategy="zigzag", instance="fuzz")
        )
    made: dict[type, Callable[[], Any]] = {
        m.OpenTransfer: lambda: m.OpenTransfer(request_id, draw.getrandbits(63), 4, 1, numbers, m.Sampling()),
        m.PagesSent: lambda: m.PagesSent(request_id, 1, 0, draw.getrandbits(8), numbers, ("d",) * draw.randrange(3)),
        m.FinishTransfer: lambda: m.FinishTransfer(request_id, 1, draw.getrandbits(31)),
        m.AbortTransfer: lambda: m.AbortTransfer(request_id, 1, "why", writes_may_land=True),
        m.WritesDrained: lambda: m.WritesDrained(request_id, draw.getrandbits(31)),
        m.Heartbeat: m.Heartbeat,
        m.RowDigest: lambda: m.RowDigest(request_id),
        m.DecodeStep: lambda: m.DecodeStep((request_id,) * draw.randrange(1, 4)),
        m.ReleaseRequest: lambda: m.ReleaseRequest(request_id),
    }
    return made[kind]()


def odd_body(draw: random.Random, request_id: str) -> bytes:
    """A body that is almost a message, or none at all; it may also still be one."""
    plain = msgspec.to_builtins(message(draw, request_id), builtin_types=(bytes,))
    field = draw.choice(list(plain))
    way = draw.randrange(7)
    if way == 0:
        plain[field] = odd_value(draw)
    elif way == 1:
        del plain[field]
    elif way == 2:
        plain[draw.choice(("x", "", "type ", "\N{SKULL}"))] = odd_value(draw)
    body = msgspec.msgpack.encode(plain)
    if way == 3:
        body = mutate(draw, body)
    elif way == 4:
        at = draw.randrange(len(body))
        body = (
            body[:at] + draw.choice(PROMISES) + draw.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff")) + body[at:]
        )
    elif way == 5:
        body += msgspec.msgpack.encode(message(draw, request_id))
    elif way == 6:
        nested = draw.choice((10, 500, 5_000, 50_000))
        body = b"\x82" + body[1:6] + b"\xa1m" + b"\xa1x" + draw.choice((b"\x91", b"\x81\xa1a")) * nested + b"\xc0"
    return body


def odd_value(draw: random.Random) -> Any:
    """Something that a field does not expect, or only just."""
    return draw.choice(
        (
            None,
            True,
            -1,
            2**64 - 1,
            -(2**63),
            float("nan"),
            float("inf"),
            "",
            "x" * draw.choice((1, 129, 70_000)),
            bytes(draw.randrange(40)),
            [],
            [[]] * 3,
            [odd_number] * draw.choice((1, 1_000, 20_000)) if (odd_number := draw.getrandbits(40)) else [None],
            {"type": "ReleaseRequest", "request_id": "inner"},
            {1: 2, b"k": []},
        )
    )


def mutate(draw: random.Random, data: bytes) -> bytes:
    """Data with one to three changes; it may come out as it was."""
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice((1, 2, 4, 16, 64)))
        way = draw.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            del changed[at:to]
        elif way == 2:
            changed[at:at] = changed[at:to]
        elif way == 3:
            changed[at:at] = draw.randbytes(draw.choice((1, 4, 32, 300)))
        elif way == 4:
            changed[at : at + LENGTH.size] = LENGTH.pack(draw.choice(EDGES))
        else:
            del changed[at:]
    return bytes(changed)


def tamper(draw: random.Random, frames: list[bytes]) -> bytes:
    """A sequence of sealed frames that has certainly lost its first, or has it changed; the rest follows untouched."""
    first, rest = frames[0], b"".join(frames[1:])
    way = draw.randrange(5)
    if way == 0:
        return rest
    if way == 1 and len(frames) > 1:
        return frames[1] + first + b"".join(frames[2:])
    changed = bytearray(first)
    if way == 2:
        changed[:4] = LENGTH.pack(draw.choice([edge for edge in EDGES if LENGTH.pack(edge) != first[:4]]))
    elif way == 3:
        # The seal is left out.
        del changed[4:36]
    else:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed) + rest
