"""Fuzzes the control socket: strangers and insiders send what no honest peer would, many connections side by side.

strangers (127.0.0.2)   no secret: greetings, proofs and frames that are mutated, forged or recorded from others
insiders  (127.0.0.1)   the secret: sealed frames with odd content; frames changed, repeated, swapped, left out or cut

A server must answer what is well formed, end every other connection, tell a stranger nothing but its greeting, never
stop, never wait and never keep memory.
"""

from __future__ import annotations

import logging
import random
import resource
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cpkv.errors import CpkvError, TransferError
from cpkv.protocol.frames import LENGTH, frame_of
from cpkv.protocol.messages import Done, Failed, ReleaseRequest, ToDecode
from cpkv.protocol.sealing import GREETING_BYTES, SEAL_BYTES, Greeting
from cpkv.testing.control import PATIENCE_S, RawClient, is_closed, read
from cpkv.testing.control_mutations import message, mutate, odd_body, tamper
from cpkv.transfer.channel import listen
from cpkv.transfer.server import Connection, MessageServer, ServerLimits

SECRET = "the secret of a fuzzed run"
HONEST, NEVER = "honest", "never"
INSIDER_HOST, STRANGER_HOST = "127.0.0.1", "127.0.0.2"
LIMITS = ServerLimits(max_connections=64, greeting_s=1.0, frame_s=1.0)
MAX_GROWTH_BYTES = 16 << 20
OPEN_INSIDERS = 8
HANGING = 24
# Closing sends a reset, so that a hundred thousand connections do not use the ports up.
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class FuzzReport:
    """What came of a run.

    Attributes:
        inputs: that were sent.
        seconds: that it took.
        growth_bytes: of resident memory, from the most during the first half (10,000 inputs at most) to the most.
        peak_bytes: the most resident memory of the process.
        counts: inputs by kind, and messages that the handler took.
    """

    inputs: int
    seconds: float
    growth_bytes: int
    peak_bytes: int
    counts: dict[str, int]


class FuzzHandler:
    """Takes any message of an insider, and notes what should never have reached it."""

    def __init__(self) -> None:
        self.taken = 0
        self.wrong: list[str] = []

    def answer(self, connection: Connection, message: Any) -> Any:
        """Done; an error where the message asks for more than two of something."""
        self.taken += 1
        if not connection.peer.startswith(f"{INSIDER_HOST}:"):
            self.wrong.append(f"a stranger's {type(message).__name__} was accepted")
        named = getattr(message, "request_id", "") or "".join(getattr(message, "request_ids", ())[:1])
        if named == NEVER:
            self.wrong.append(f"a {type(message).__name__} was accepted after its connection was tampered with")
        if len(getattr(message, "request_ids", ())) > 2:
            raise TransferError("too many at once")
        return Done()

    def closed(self, connection: Connection) -> None:
        """Nothing to do."""

    def tick(self, now_s: float) -> None:
        """Nothing to do."""


class _FaultLog(logging.Handler):
    """Keeps what a server logs with a traceback: nothing that a peer sends may be a fault of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(self.format(record))


class ControlFuzzer:
    """One run against a server of its own.

    Args:
        seed: draws everything.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.handler = FuzzHandler()
        self._server = MessageServer(
            listen("0.0.0.0", 0), ToDecode, self.handler, secret=SECRET, where="fuzzed", limits=LIMITS
        )
        self._port = self._server.port
        self._insiders: list[RawClient] = []
        self._hanging: deque[socket.socket] = deque()
        self._recorded = b""
        self.counts: Counter[str] = Counter()
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "odd content": (8, self._odd_content),
            "several frames": (2, self._several_frames),
            "tampered frames": (3, self._tampered_frames),
            "half a frame": (1, self._half_a_frame),
            "odd greeting": (4, self._odd_greeting),
            "forged proof": (4, self._forged_proof),
            "half a greeting": (1, self._half_a_greeting),
        }
        self._server.start()

    def step(self) -> str:
        """Send one input; returns its kind.

        Raises:
            AssertionError: the server did something wrong.
        """
        names = list(self._kinds)
        (name,) = self._draw.choices(names, [self._kinds[name][0] for name in names])
        self.counts[name] += 1
        try:
            self._kinds[name][1]()
        except (CpkvError, OSError) as error:
            raise AssertionError(f"{name}: a well-formed input or connection failed: {error!r}") from error
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        return name

    def check(self) -> None:
        """A good client is served, and the handler has seen nothing that it should not.

        Raises:
            AssertionError: saying what is wrong.
        """
        try:
            with closing(self._call()) as good:
                assert good.ask(ReleaseRequest(HONEST)) == Done(), "a good client got a wrong answer"
        except (TransferError, OSError) as error:
            raise AssertionError(f"a good client was not served: {error}") from error
        assert not self.handler.wrong, self.handler.wrong[0]

    def close(self) -> None:
        """End the server and every connection."""
        for client in self._insiders:
            client.close()
        for connection in self._hanging:
            connection.close()
        self._server.close()

    # Insiders.

    def _call(self) -> RawClient:
        client = RawClient(self._port, SECRET)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        return client

    def _insider(self) -> RawClient:
        """One of several that are open; taken out of them, to be given back while it is of use."""
        if len(self._insiders) < OPEN_INSIDERS:
            return self._call()
        return self._insiders.pop(self._draw.randrange(len(self._insiders)))

    def _exchange(self, client: RawClient, bodies: list[bytes]) -> None:
        """Send sealed frames at once; each that is a message must be answered, the first other one ends it."""
        sent = b"".join(frame_of(client.seal, body) for body in bodies)
        with suppress(ConnectionError):  # the server may close before it has read all
            client.socket.sendall(sent)
        for body in bodies:
            if not _is_message(body):
                assert is_closed(client.socket), "a connection stayed open after a malformed message"
                client.close()
                return
            try:
                answer = client.channel.receive(PATIENCE_S)
            except TransferError:
                # A server that closes with bytes unread resets the connection, and answers on their way are lost.
                assert not all(map(_is_message, bodies)), "a message was not answered"
                assert is_closed(client.socket), "a message was not answered in time"
                client.close()
                return
            assert isinstance(answer, Done | Failed), f"a message was answered by {answer}"
        self._recorded = sent
        self._insiders.append(client)

    def _odd_content(self) -> None:
        self._exchange(self._insider(), [odd_body(self._draw, HONEST)])

    def _several_frames(self) -> None:
        bodies = [msgspec.msgpack.encode(message(self._draw, HONEST)) for _ in range(self._draw.randrange(1, 6))]
        if self._draw.random() < 0.3:
            bodies.insert(self._draw.randrange(len(bodies) + 1), odd_body(self._draw, HONEST))
        self._exchange(self._insider(), bodies)

    def _tampered_frames(self) -> None:
        client = self._insider()
        good = [client.frame(message(self._draw, HONEST)) for _ in range(self._draw.randrange(3))]
        never = [client.frame(message(self._draw, NEVER)) for _ in range(self._draw.randrange(2, 5))]
        repeated = good[-1] if good and self._draw.random() < 0.2 else b""
        self._send_and_end(client.socket, b"".join(good) + (repeated or tamper(self._draw, never)) + b"".join(never))

    def _half_a_frame(self) -> None:
        client = self._insider()
        frame = client.frame(message(self._draw, NEVER))
        client.socket.sendall(frame[: self._draw.randrange(len(frame))])
        self._leave(client.socket)

    # Strangers.

    def _stranger(self) -> socket.socket:
        connection = socket.create_connection((INSIDER_HOST, self._port), PATIENCE_S, (STRANGER_HOST, 0))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        return connection

    def _odd_greeting(self) -> None:
        draw = self._draw
        greeting = mutate(draw, Greeting.of(SECRET).encode())
        if draw.random() < 0.3:
            greeting = draw.choice((b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(draw.randrange(200)), greeting * 3))
        self._send_and_end(self._stranger(), greeting + self._forged(), most=GREETING_BYTES)

    def _forged_proof(self) -> None:
        self._send_and_end(self._stranger(), Greeting.of(SECRET).encode() + self._forged(), most=GREETING_BYTES)

    def _half_a_greeting(self) -> None:
        connection = self._stranger()
        greeting = Greeting.of(SECRET).encode() + LENGTH.pack(0) + bytes(SEAL_BYTES)
        with suppress(ConnectionError):
            connection.sendall(greeting[: self._draw.randrange(len(greeting))])
        self._leave(connection)

    def _forged(self) -> bytes:
        """Frames with no, zero, random or recorded seals."""
        draw = self._draw
        body = msgspec.msgpack.encode(message(draw, NEVER))
        seal = draw.choice((b"", bytes(SEAL_BYTES), draw.randbytes(SEAL_BYTES)))
        frames = draw.choice((b"", LENGTH.pack(0) + draw.randbytes(SEAL_BYTES), LENGTH.pack(0)))
        frames += draw.choice((LENGTH.pack(len(body)) + seal + body, self._recorded, mutate(draw, self._recorded), b""))
        return frames

    def _send_and_end(self, connection: socket.socket, data: bytes, most: int = 1 << 20) -> None:
        """Send, say that nothing more will come, and wait until the server has closed."""
        told = b""
        with connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                told = read(connection, most + 1)
            except TimeoutError:
                raise
            except OSError:
                pass  # the server closed before it had read all
            assert len(told) <= most, f"a stranger was told {len(told)} bytes"
            assert is_closed(connection), "a connection stayed open after its end"

    def _leave(self, connection: socket.socket) -> None:
        """Let a connection hang; the oldest of many is closed, where the server has not done so."""
        self._hanging.append(connection)
        if len(self._hanging) > HANGING:
            self._hanging.popleft().close()


def _is_message(body: bytes) -> bool:
    try:
        msgspec.msgpack.decode(body, type=ToDecode)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def resident_bytes() -> int:
    """Memory of this process that is resident now. Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def fuzz_control_socket(
    inputs: int, seed: int, *, check_every: int = 1000, progress: Callable[[str], None] = lambda line: None
) -> FuzzReport:
    """Send so many inputs to a server, and check it after every `check_every` of them.

    Raises:
        AssertionError: naming the seed, the number of the input and what the server did wrong.
    """
    warm_up = min(10_000, inputs // 2)
    log, faults = logging.getLogger("cpkv.transfer.server"), _FaultLog()
    propagates, log.propagate = log.propagate, False
    log.addHandler(faults)
    started = time.monotonic()
    fuzzer = ControlFuzzer(seed)
    number = base = peak = 0
    try:
        for number in range(1, inputs + 1):
            fuzzer.step()
            if number % check_every == 0 or number in (warm_up, inputs):
                fuzzer.check()
                assert not faults.faults, f"the server logged a fault of its own: {faults.faults[0]}"
                peak = max(peak, resident_bytes())
                base = peak if number <= warm_up else base
                assert peak - base < MAX_GROWTH_BYTES, f"memory grew by {peak - base} bytes since the warm-up"
                progress(f"{number} inputs, {number / (time.monotonic() - started):.0f} inputs/s, {peak >> 20} MiB")
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, input {number}: {error}") from error
    finally:
        fuzzer.close()
        log.removeHandler(faults)
        log.propagate = propagates
    counts = {**fuzzer.counts, "messages taken": fuzzer.handler.taken}
    return FuzzReport(inputs, time.monotonic() - started, peak - base, peak, counts)
