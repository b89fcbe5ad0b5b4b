"""The Mooncake Transfer Engine over TCP, with peers found by its own P2P handshake (no metadata server).

Tried with mooncake-transfer-engine-non-cuda 0.3.13.post1. What it does that this module is built around:

- It reports by return codes alone, and any use of an engine whose `initialize` failed, or of a handle that was
  reported as finished, is a crash of the process. Neither can happen here.
- About 2,050 writes outstanding at one peer overflow its queue and wedge the peer, so the cap is ours.
- The first contact with a peer that is stopped blocks for a minute. So writes to a peer stay queued here until it has
  answered a probe of ours that does not block.
- A write that was reported as failed, or whose engine is gone, can still land at the peer.
- Each engine listens on two TCP ports, at random from 15000 to 17000 (MC_MIN_RPC_PORT, MC_MAX_RPC_PORT), on ALL
  interfaces whatever `host` says, and takes writes into registered memory from anyone who connects: there is no
  authentication. Keep these ports behind a firewall.
- A forked child keeps the sockets of its parent open, and then a dead peer takes 30 s to notice: spawn, never fork.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import select
import socket
import time
from typing import Any, ClassVar

from cpkv.errors import ConfigError, TransferError
from cpkv.transfer.backend import Region, Run, TransferBackend, TransferStatus
from cpkv.transfer.peer_address import FROM_HANDSHAKE, resolve_peer

_APT = "apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4"
_PIP = "pip install 'cpkv[mooncake]'"
_WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
_FLOOR = "0.3.13.post1"
# What transfer_submit_write returns when it started nothing: 0, or -1 read as an unsigned 64-bit number.
_NO_HANDLE = (0, -1, (1 << 64) - 1)
_MIN_TIMEOUT_S = 5


class MooncakeBackend(TransferBackend):
    """One engine of this process. Raises TransferError if it cannot run here; it never turns into another back end.

    `host` is the address under which peers reach this machine. A peer that is silent for half of `transfer_timeout_s`
    (5 or more), at first contact or later, fails its transfers. The timeouts inside the engine are one set per
    process: those of the first engine hold. Make the first one before other threads are started, since it sets
    environment variables (`prepare_environment`).
    """

    name: ClassVar[str] = "mooncake"

    def __init__(
        self, host: str = "127.0.0.1", max_outstanding_per_peer: int = 16, transfer_timeout_s: float = 10.0
    ) -> None:
        super().__init__(max_outstanding_per_peer)
        if transfer_timeout_s < _MIN_TIMEOUT_S:
            raise ConfigError(
                f"transfer_timeout_s is {transfer_timeout_s}: the engine takes {_MIN_TIMEOUT_S} s at least; use "
                f"{_MIN_TIMEOUT_S} or more"
            )
        prepare_environment(transfer_timeout_s)
        reason = self.why_not()
        if reason is not None:
            raise TransferError(reason)
        self._silence_s = transfer_timeout_s / 2
        self._reached: set[str] = set()
        self._probes: dict[str, _Probe] = {}
        self._engine: Any = _started_engine(host)
        self.session_id = f"{host}:{self._engine.get_rpc_port()}"

    @classmethod
    def why_not(cls) -> str | None:
        """Say why Mooncake cannot be used in this process, with the remedy; None when it can. Imports it."""
        # Loading the library with this set aborts the process, so it comes first.
        if "MC_LOG_DIR" in os.environ:
            return (
                "MC_LOG_DIR is set, even if empty, which makes Mooncake abort the process when it is loaded; unset it"
            )
        installed = _installed_wheels()
        if len(installed) > 1:
            return (
                f"{' and '.join(installed)} are both installed and overwrite each other's files; uninstall both, then "
                f"{_PIP}"
            )
        for wheel, version in installed.items():
            if _numbers(version) < _numbers(_FLOOR):
                return (
                    f"{wheel} {version} is installed, and versions before {_FLOOR} report success for writes that were "
                    f"refused, or are several times slower; {_PIP}"
                )
        prepare_environment()
        try:
            _engine_class()
        except ModuleNotFoundError as error:
            return f"Mooncake is not installed ({error}); {_PIP}"
        except ImportError as error:
            if re.search(r"lib(cuda|nv)", str(error)):
                return (
                    f"a CUDA build of Mooncake is installed and this machine lacks its libraries ({error}); uninstall "
                    f"{' '.join(installed) or 'it'}, then {_PIP}"
                )
            return f"Mooncake is installed but a system library is missing ({error}); {_APT}"
        return None

    def _register_memory(self, region: Region) -> None:
        code = self._engine.register_memory(region.address, region.length)
        if code != 0:
            raise TransferError(f"Mooncake did not register region {region} (code {code}); is the memory mapped?")

    def _unregister_memory(self, region: Region) -> None:
        code = self._engine.unregister_memory(region.address)
        if code != 0:
            raise TransferError(f"Mooncake did not unregister region {region} (code {code}); close the back end")

    def _submit_write(self, session_id: str, run: Run) -> int:
        handle = int(self._engine.transfer_submit_write(session_id, run.source, run.target, run.length))
        if handle in _NO_HANDLE:
            raise TransferError(f"Mooncake did not take a write for peer {session_id}: it is gone or refuses us")
        return handle

    def _check(self, handle: int) -> TransferStatus:
        code = self._engine.transfer_check_status(handle)
        if code == 0:
            return TransferStatus("pending")
        if code == 1:
            return TransferStatus("done")
        if code == -2:
            return TransferStatus("pending", "Mooncake reported a timeout (code -2)")
        return TransferStatus(
            "failed",
            f"Mooncake reported a failed write (code {code}): the peer has died, has stopped, or no longer registers "
            "the target",
        )

    def _contact(self, session_id: str, since: float) -> bool:
        if session_id in self._reached:
            return True
        probe = self._probes.get(session_id) or _Probe(session_id)
        self._probes[session_id] = probe
        try:
            answered = probe.answered()
        except TransferError:
            self._end_probe(session_id)
            raise
        if answered:
            self._end_probe(session_id)
            self._reached.add(session_id)
        # The probe of a silent peer stays, and is answered when the peer goes on. Each transfer waits its own time.
        elif time.monotonic() - max(since, probe.started) > self._silence_s:
            raise TransferError(
                f"peer {session_id} has not answered for {self._silence_s:g} s: it is stopped or cut off; see to it, "
                f"or raise transfer_timeout_s above {2 * self._silence_s:g}"
            )
        return answered

    def _end_probe(self, session_id: str) -> None:
        self._probes.pop(session_id).close()

    def _forget(self, session_id: str) -> None:
        self._reached.discard(session_id)

    def _close_grace_s(self) -> float:
        return 2 * self._silence_s

    def _close_engine(self) -> None:
        for region in self._regions:
            self._engine.unregister_memory(region.address)
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()
        # Destroying the engine joins its threads, so that nothing reads our memory after this line.
        self._engine = None


class _Probe:
    """Asks a peer for a sign of life: connects to its handshake port, closes our half, and waits for it to close its.

    A process that is stopped accepts connections, since its kernel does, but never closes one. The engine has a probe
    of its own, which blocks for a minute in that case, in a thread that then crashes the exit of this process.
    """

    def __init__(self, session_id: str) -> None:
        host, _, port = session_id.rpartition(":")
        self.started = time.monotonic()
        family, kind, protocol, address = resolve_peer(session_id, host, port)
        self._session_id = session_id
        self._asked = False
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        self._socket.connect_ex(address)

    def answered(self) -> bool:
        """Whether the peer is alive; False means not known yet, TransferError that nobody is there."""
        try:
            if not self._asked:
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                if not poller.poll(0):
                    return False
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code != 0:
                    raise OSError(code, os.strerror(code))
                self._socket.shutdown(socket.SHUT_WR)
                self._asked = True
            self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransferError(f"peer {self._session_id} is not there ({error.strerror}); {FROM_HANDSHAKE}") from None
        return True

    def close(self) -> None:
        self._socket.close()


def prepare_environment(transfer_timeout_s: float | None = None) -> None:
    """Set the MC_* variables that Mooncake reads, where the operator has not; the one place that changes os.environ.

    Some are read when the library is loaded, some by each engine, so this runs before the import. Without
    `transfer_timeout_s` the timeouts are left for the first engine to set.
    """
    wanted = {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
        "MC_FORCE_TCP": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    if transfer_timeout_s is not None:
        whole = os.environ.get("MC_TRANSFER_TIMEOUT") or str(math.ceil(transfer_timeout_s))
        # Below the timeout of a transfer, so that what is reported is the write that stalled and not the whole.
        within = str(max(2, int(whole) // 2) if whole.isdigit() else 2)
        wanted |= {
            "MC_TRANSFER_TIMEOUT": whole,
            "MC_TCP_STATUS_TIMEOUT_SEC": within,
            "MC_TCP_PROGRESS_TIMEOUT_SEC": within,
        }
    for key, value in wanted.items():
        os.environ.setdefault(key, value)


def _engine_class() -> Any:
    # Here and not at the top: the library is an extra, and the environment has to be set before it is loaded.
    from mooncake.engine import TransferEngine

    return TransferEngine


def _started_engine(host: str) -> Any:
    """A new engine that listens; TransferError, and no engine left, if it cannot."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise TransferError(
            f"host {host!r} does not resolve ({error}), so no peer could reach this engine; give an address of this "
            "machine"
        ) from error
    engine = _engine_class()()
    code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        ports = f"{os.environ.get('MC_MIN_RPC_PORT', '15000')} to {os.environ.get('MC_MAX_RPC_PORT', '17000')}"
        raise TransferError(
            f"Mooncake did not start on {host} (code {code}), most likely since no port from {ports} is free; free "
            "one, or set MC_MIN_RPC_PORT and MC_MAX_RPC_PORT to a wider range"
        )
    return engine


def _installed_wheels() -> dict[str, str]:
    found = {}
    for wheel in _WHEELS:
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
