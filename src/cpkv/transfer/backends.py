"""Back ends by their names; each is imported when it is asked for."""

from __future__ import annotations

from typing import assert_never

from cpkv.config.names import TransferName
from cpkv.config.settings import EngineSettings
from cpkv.errors import ConfigError
from cpkv.transfer.backend import TransferBackend

_IN_PROCESS = (
    "inprocess moves pages between threads of one process, and this is about processes of their own; use --transfer "
    "tcp, shm, nixl or mooncake"
)


def open_backend(name: TransferName, host: str, *, secret: str, transfer_timeout_s: float) -> TransferBackend:
    """A new back end of this process.

    Args:
        name: which one; there is no fallback to another.
        host: the address under which peers reach this machine; shm needs none.
        secret: shared by all workers. Only `tcp` can make its peers prove it.
        transfer_timeout_s: a peer that is silent for half of it fails its transfers.

    Raises:
        ConfigError: the name is that of no back end between processes, or an argument is out of range.
        TransferError: it cannot run here; see `why_not`.
    """
    if name == "tcp":
        from cpkv.transfer.tcp import TcpBackend

        return TcpBackend(host, transfer_timeout_s=transfer_timeout_s, secret=secret)
    if name == "shm":
        from cpkv.transfer.shm import ShmBackend

        return ShmBackend(transfer_timeout_s=transfer_timeout_s)
    if name == "mooncake":
        from cpkv.transfer.mooncake import MooncakeBackend

        return MooncakeBackend(host, transfer_timeout_s=transfer_timeout_s)
    if name == "nixl":
        from cpkv.transfer.nixl import NixlBackend

        return NixlBackend(host, transfer_timeout_s=transfer_timeout_s)
    if name == "inprocess":
        raise ConfigError(_IN_PROCESS)
    assert_never(name)


def open_backend_of(settings: EngineSettings, secret: str) -> TransferBackend:
    """The back end that settings name; see `open_backend`."""
    return open_backend(settings.transfer, settings.host, secret=secret, transfer_timeout_s=settings.transfer_timeout_s)


def why_not(name: TransferName) -> str | None:
    """Say in words why a back end cannot run between processes here, with the remedy; None when it can."""
    if name == "tcp":
        from cpkv.transfer.tcp import TcpBackend

        return TcpBackend.why_not()
    if name == "shm":
        from cpkv.transfer.shm import ShmBackend

        return ShmBackend.why_not()
    if name == "mooncake":
        from cpkv.transfer.mooncake import MooncakeBackend

        return MooncakeBackend.why_not()
    if name == "nixl":
        from cpkv.transfer.nixl import NixlBackend

        return NixlBackend.why_not()
    if name == "inprocess":
        return _IN_PROCESS
    assert_never(name)
