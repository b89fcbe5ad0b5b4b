"""Typed errors. Each message gives the fact, the cause, and the remedy with its computed value."""

from __future__ import annotations


class CpkvError(Exception):
    """Base of every error that cpkv raises on purpose; the command line turns it into exit status 2."""


class ConfigError(CpkvError):
    """An option is out of range, or a combination of options does not exist."""


class CheckpointError(CpkvError):
    """A folder is no checkpoint, is damaged, or holds an architecture that cpkv does not serve."""


class PromptError(CpkvError):
    """A prompt is empty, too long, or holds token ids that the model does not have."""


class CapacityError(CpkvError):
    """A request needs more pages than the pool can give."""


class BusyError(CapacityError):
    """The pages that a request needs are held by others for now; it may be asked for again."""


class AllocatorError(CpkvError):
    """The allocator's books are wrong: a page freed twice, a foreign page, a leak."""


class PlanError(CpkvError):
    """A batch plan breaks one of its invariants, or ranks hold different plans."""


class NumericsError(CpkvError):
    """A NaN reached a score or a logit."""


class TransferError(CpkvError):
    """Pages could not be moved: the peer is missing, refuses, or the engine reports a failure."""


class HandshakeError(TransferError):
    """Two workers describe different pools; the message lists every field that differs."""


class ProtocolError(TransferError):
    """A peer sent a frame that is malformed, too large, or out of order."""


class WorkerDiedError(CpkvError):
    """A rank or the decode worker ended before its work did; the message names it and the first cause."""
