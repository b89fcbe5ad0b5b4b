"""Errors as messages and back, so that a cause keeps its type from one worker to another."""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

from cpkv import errors
from cpkv.protocol.messages import Failed

FRAMES_TOLD = 2


def failure_of(error: BaseException, where: str) -> Failed:
    """An exception as a message; one that is not ours tells its type and the last places it came through."""
    if isinstance(error, errors.CpkvError):
        return Failed(type(error).__name__, str(error), where)
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_TOLD:]
    places = ", ".join(f"{frame.name} at {frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
    return Failed("CpkvError", f"{type(error).__name__}: {error} (in {places or 'unknown place'})", where)


def error_of(failure: Failed) -> errors.CpkvError:
    """What another worker reported as an error, of the class that it named; TransferError if that is none of ours."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.CpkvError)):
        kind = errors.TransferError
    return kind(f"{failure.where}: {failure.message}")


def raise_failure(failure: Failed) -> NoReturn:
    """Raise what another worker reported, as its own type.

    Raises:
        CpkvError: always; see `error_of`.
    """
    raise error_of(failure)


def checked_answer(question: object, reply: object, answers: tuple[type, ...], peer: str) -> Any:
    """The reply to a question, if it is of one of the types that may answer it.

    Raises:
        CpkvError: what the peer reported.
        ProtocolError: it answered something else.
    """
    if isinstance(reply, Failed):
        raise_failure(reply)
    if not isinstance(reply, answers):
        raise errors.ProtocolError(f"asked {type(question).__name__}, {peer} answered {type(reply).__name__}")
    return reply
