"""A short run of the fuzzer of test/fuzz_control_socket.py, and that it would see a server that is not sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cpkv.errors import HandshakeError
from cpkv.protocol.frames import ServerFrames
from cpkv.protocol.sealing import FrameSeal
from cpkv.testing.control_fuzz import FuzzHandler, fuzz_control_socket
from cpkv.testing.registration import register_cpu_ci
from cpkv.transfer.peer_stream import PeerStream
from cpkv.transfer.server import MessageServer

register_cpu_ci(est_time=4, suite="unit")

INPUTS = 2000


def test_nothing_that_peers_send_stops_the_server_or_is_accepted_without_the_secret() -> None:
    report = fuzz_control_socket(INPUTS, seed=20)
    assert report.inputs == INPUTS
    assert len(report.counts) == 8 and min(report.counts.values()) > 30, "a kind of input was not tried"
    assert report.counts["messages taken"] > INPUTS // 4, "hardly any input was well-formed enough to go deep"


def take_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FrameSeal, "check", lambda *_: None)


def believe_any_proof(patch: pytest.MonkeyPatch) -> None:
    prove = ServerFrames._prove

    def prove_or_not(frames: ServerFrames) -> bool:
        try:
            return prove(frames)
        except HandshakeError:
            del frames._received[: frames._body_start]
            frames.proved = True
            return True

    patch.setattr(ServerFrames, "_prove", prove_or_not)


def forget_the_number_of_a_frame(patch: pytest.MonkeyPatch) -> None:
    check = FrameSeal.check

    def check_without_order(seal: FrameSeal, body: bytes, mac: bytes) -> None:
        sent, start = seal._received, max(0, seal._received - 2)
        for number in range(start, sent + 4):
            seal._received = number
            try:
                return check(seal, body, mac)
            except Exception:
                seal._received = sent
        check(seal, body, mac)

    patch.setattr(FrameSeal, "check", check_without_order)


def die_of_a_malformed_message(patch: pytest.MonkeyPatch) -> None:
    answer = MessageServer._answer

    def answer_or_die(server: MessageServer, peer: PeerStream) -> None:
        try:
            answer(server, peer)
        except Exception:
            raise SystemExit from None

    patch.setattr(MessageServer, "_answer", answer_or_die)


def keep_a_connection_open(patch: pytest.MonkeyPatch) -> None:
    answer = MessageServer._answer

    def answer_or_go_on(server: MessageServer, peer: PeerStream) -> None:
        try:
            answer(server, peer)
        except Exception:
            pass

    patch.setattr(MessageServer, "_answer", answer_or_go_on)
    patch.setattr("cpkv.testing.control.PATIENCE_S", 0.2)
    patch.setattr("cpkv.testing.control_fuzz.PATIENCE_S", 0.2)


def keep_what_comes(patch: pytest.MonkeyPatch) -> None:
    answer, kept = FuzzHandler.answer, []

    def answer_and_keep(handler: FuzzHandler, connection: Any, message: Any) -> Any:
        kept.append(b"\xaa" * (64 << 10))
        return answer(handler, connection, message)

    patch.setattr(FuzzHandler, "answer", answer_and_keep)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (take_anything, "a stranger.* was accepted|after its connection was tampered with|a stranger was told"),
        (believe_any_proof, "a stranger was told"),
        (forget_the_number_of_a_frame, "accepted after its connection was tampered with"),
        (die_of_a_malformed_message, "odd content|several frames|a good client was not served"),
        (keep_a_connection_open, "stayed open after a malformed message"),
        (keep_what_comes, r"memory grew by \d+ bytes"),
    ],
)
def test_the_fuzzer_sees_a_server_that_is_not_sound(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], words: str
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=rf"seed 21, input \d+: .*({words})"):
        fuzz_control_socket(INPUTS, seed=21, check_every=100)
