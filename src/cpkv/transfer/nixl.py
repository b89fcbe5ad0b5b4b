"""NIXL with its UCX back end, for memory of the host.

Tried with nixl-cu13 1.5.1. What it does that this module is built around:

- A write to a peer that is stopped stays in progress for ever. Neither releasing it, nor removing the peer, nor taking
  the registration back ends it: the source is read, and the bytes land, whenever the peer goes on. Only the end of the
  whole agent is a fence. So a peer that stays silent costs a rebuild of the agent, after the other peers' writes ended.
- An agent that is told new metadata of a peer calls the writes in flight to it "not found", though they go on. So
  metadata is loaded only while nothing is in flight to that peer.
- Over TCP the receiver does not check a write against what is registered: bytes would land in memory that was taken
  back. So each engine tells what it has registered (`cpkv.transfer.nixl_metadata`), and targets are checked by that.
- A write that was reported as failed can still land at the peer, until the peer's agent has ended. On one host UCX
  would write into the peer's memory without its help, by Linux's cross-memory attach (cma): also after its agent has
  ended, into memory that somebody else has by then. So cma is left out (UCX_TLS is set to ^cma), and an UCX_TLS that
  lets it in is refused.
- UCX listens on ports of its own choice, on every network device unless UCX_NET_DEVICES says otherwise, and takes
  writes from anyone who connects: there is no authentication. Keep these ports behind a firewall.
- UCX can abort the process (stubs.c: Assertion `0' failed) while it connects to a peer whose agent ends: seen once in
  2,000 requests with 200 kills. The rank is dead then, and the others are told so.
- Its logger and that of UCX print on stdout, and its import turns off `logging.raiseExceptions`: put right here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from cpkv.errors import ConfigError, TransferError
from cpkv.transfer.backend import Region, Run, TransferBackend, TransferStatus
from cpkv.transfer.nixl_metadata import Metadata, MetadataLink, MetadataServer

_PIP = "pip install 'cpkv[nixl]'"
_WHEEL, _OTHER_WHEEL = "nixl-cu13", "nixl-cu12"
_FLOOR = "1.5.1"
_UCX = "UCX"
_MEMORY = "DRAM"
WITHOUT_CMA = "^cma"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Write:
    session_id: str
    request: Any
    started: float


@dataclass(eq=False)
class _Remote:
    """A peer: our link to it, what our agent was told of it, and the run whose target we asked it about."""

    link: MetadataLink
    loaded: Metadata | None = None
    doubtful: bool = False
    asked_about: Run | None = None
    progress: float = 0.0


class NixlBackend(TransferBackend):
    """One engine of this process. Raises TransferError if it cannot run here; it never turns into another back end.

    `host` is the address of this machine under which peers ask for metadata; which network the bytes take is up to UCX
    (UCX_TLS, UCX_NET_DEVICES). A peer that is silent for half of `transfer_timeout_s` fails its transfers: a single
    write must end within that. After the whole of it the agent is rebuilt, in a `poll` that takes as long as a start;
    writes in flight to silent peers are over then, and this engine's own peers see theirs fail once.
    """

    name: ClassVar[str] = "nixl"
    max_runs_per_write = 64
    max_bytes_per_write = 4 << 20

    def __init__(
        self, host: str = "127.0.0.1", max_outstanding_per_peer: int = 16, transfer_timeout_s: float = 10.0
    ) -> None:
        super().__init__(max_outstanding_per_peer)
        if transfer_timeout_s <= 0:
            raise ConfigError(f"transfer_timeout_s is {transfer_timeout_s}; use more than 0 (10 is the default)")
        reason = self.why_not()
        if reason is not None:
            raise TransferError(reason)
        self._silence_s = transfer_timeout_s / 2
        self._identity = secrets.token_hex(6)
        self._agents = 0
        self._registered: dict[Region, Any] = {}
        self._remotes: dict[str, _Remote] = {}
        self._writes: dict[int, _Write] = {}
        self._cut: dict[int, str] = {}
        self._next_handle = 1
        self._pumped = self._awake = time.monotonic()
        self._server = MetadataServer(host)
        self.session_id = f"{host}:{self._server.port}/{self._identity}"
        try:
            self._start_agent()
        except TransferError:
            self._server.close()
            raise

    @classmethod
    def why_not(cls) -> str | None:
        """Say why NIXL cannot be used in this process, with the remedy; None when it can. Imports it."""
        version, other = _installed(_WHEEL), _installed(_OTHER_WHEEL)
        if other is not None:
            both = f"{_WHEEL} and {_OTHER_WHEEL} are both installed, each with a UCX and plugins of its own"
            one = f"{_OTHER_WHEEL} is installed and cpkv uses {_WHEEL}, which also runs without CUDA"
            return f"{one if version is None else both}; pip uninstall -y nixl {_OTHER_WHEEL}, then {_PIP}"
        if version is not None and _numbers(version) < _numbers(_FLOOR):
            return f"{_WHEEL} {version} is installed and cpkv was tried with {_FLOOR} and later; {_PIP}"
        transports = os.environ.get("UCX_TLS", WITHOUT_CMA)
        if _lets_cma_in(transports):
            return (
                f"UCX_TLS is {transports!r}, which lets a peer of this host write into memory after it was taken back "
                f"(cma); unset UCX_TLS, or set it to {WITHOUT_CMA!r}"
            )
        try:
            _module()
        except ModuleNotFoundError as error:
            return f"NIXL is not installed ({error}); {_PIP}"
        except ImportError as error:
            return f"NIXL is installed but cannot be loaded ({error}); pip uninstall -y {_WHEEL}, then {_PIP}"
        return None

    def _register_memory(self, region: Region) -> None:
        self._register_with_agent(region)
        try:
            self._publish()
        except TransferError:
            self._agent.deregister_memory(self._registered.pop(region))
            raise

    def _unregister_memory(self, region: Region) -> None:
        # Told first: a peer that has heard it starts no more writes there.
        descriptor = self._registered.pop(region)
        self._publish()
        try:
            self._agent.deregister_memory(descriptor)
        except Exception as error:
            raise TransferError(f"NIXL did not unregister region {region} ({error}); close the back end") from error

    def _submit_write(self, session_id: str, run: Run) -> int:
        return self._submit_runs(session_id, [run])

    def _submit_runs(self, session_id: str, runs: list[Run]) -> int:
        remote = self._remotes[session_id]
        assert remote.loaded is not None, "_contact comes first"
        now = time.monotonic()
        try:
            request = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([(run.source, run.length, 0) for run in runs], _MEMORY),
                self._agent.get_xfer_descs([(run.target, run.length, 0) for run in runs], _MEMORY),
                remote.loaded.agent,
                b"",
                [_UCX],
            )
            state = self._agent.transfer(request)
        except Exception as error:  # the errors of the bindings have no common base
            raise TransferError(
                f"NIXL did not take a write for peer {session_id} ({error}): it is gone or refuses us"
            ) from error
        if state == "ERR":
            raise TransferError(f"NIXL did not take a write for peer {session_id}: it is gone or refuses us")
        handle = self._next_handle
        self._next_handle += 1
        self._writes[handle] = _Write(session_id, request, now)
        return handle

    def _check(self, handle: int) -> TransferStatus:
        if handle in self._cut:
            return TransferStatus("failed", self._cut.pop(handle))
        write = self._writes[handle]
        cause = "the peer has died or refuses us"
        try:
            state = self._agent.check_xfer_state(write.request)
        except Exception as error:  # the errors of the bindings have no common base
            state, cause = "ERR", f"{error}: {cause}"
        if state == "PROC":
            silent = self._silent_s(write)
            return TransferStatus("pending", self._silence(silent) if silent > self._silence_s else "")
        del self._writes[handle]
        _release(write.request)
        if state == "ERR":
            return TransferStatus("failed", f"NIXL reported a failed write ({cause})")
        if (remote := self._remotes.get(write.session_id)) is not None:
            remote.progress = time.monotonic()
        return TransferStatus("done")

    def _contact(self, session_id: str, since: float) -> bool:
        if any(map(self._is_overdue, self._writes.values())):
            return False
        remote = self._remotes.get(session_id)
        if remote is not None and remote.doubtful:
            if self._in_flight_to(session_id):
                return False
            self._drop(session_id)
            remote = None
        if remote is None:
            remote = self._remotes[session_id] = _Remote(MetadataLink(session_id))
        metadata = remote.link.metadata()
        if metadata is None:
            if time.monotonic() - max(since, remote.link.waiting_since) > self._silence_s:
                raise TransferError(
                    f"peer {session_id} has not answered for {self._silence_s:g} s: it is stopped or cut off; see to "
                    f"it, or raise transfer_timeout_s above {2 * self._silence_s:g}"
                )
            return False
        if not self._load(session_id, remote, metadata):
            return False
        return self._knows_targets(session_id, remote, metadata)

    def _load(self, session_id: str, remote: _Remote, metadata: Metadata) -> bool:
        """Tell our agent what the peer told us; False while writes in flight forbid it."""
        if remote.loaded == metadata:
            return True
        if self._in_flight_to(session_id):
            return False
        self._unload(remote)
        try:
            name = self._agent.add_remote_agent(metadata.blob)
        except Exception as error:  # the errors of the bindings have no common base
            raise TransferError(f"NIXL does not accept the metadata of peer {session_id} ({error})") from error
        if (name.decode() if isinstance(name, bytes) else name) != metadata.agent:
            raise TransferError(f"peer {session_id} tells the metadata of {name!r} as that of {metadata.agent!r}")
        remote.loaded = metadata
        return True

    def _knows_targets(self, session_id: str, remote: _Remote, metadata: Metadata) -> bool:
        """Whether the peer says that the next write's targets are registered; it is asked once if it did not say so."""
        runs = self._lanes[session_id].queue[0].runs.first(self.max_runs_per_write)
        missing = next(
            (run for run in runs if not any(r.holds(run.target, run.length) for r in metadata.regions)), None
        )
        if missing is None or missing != remote.asked_about:
            remote.asked_about = missing
            if missing is not None:
                remote.link.ask()
            return missing is None
        remote.asked_about = None
        raise TransferError(
            f"peer {session_id} does not register {Region(missing.target, missing.length)}, or not any more; take the "
            "target from its handshake"
        )

    def _pump(self) -> bool:
        now = time.monotonic()
        if now - self._pumped > self._silence_s:
            # This process was stopped, or its owner did not ask: the silence since then may have been ours.
            self._awake = now
        self._pumped = now
        moved = super()._pump()
        # No write of a peer that still answers is cut short: `_contact` holds new ones back until these have ended.
        if self._closed or not self._writes or not all(map(self._is_overdue, self._writes.values())):
            return moved
        self._rebuild()
        return True

    def _rebuild(self) -> None:
        """End the agent, and with it every write in flight; start another that has the same memory."""
        silent = sorted({write.session_id for write in self._writes.values()})
        _log.warning("the NIXL agent of %s is rebuilt, since peers are silent: %s", self.session_id, ", ".join(silent))
        self._cut |= {handle: self._silence(self._silent_s(write)) for handle, write in self._writes.items()}
        self._end_agent()
        self._start_agent()

    def _is_overdue(self, write: _Write) -> bool:
        return self._silent_s(write) > 2 * self._silence_s

    def _silent_s(self, write: _Write) -> float:
        """Seconds since the peer took anything, or since the write was started if that is later."""
        remote = self._remotes.get(write.session_id)
        return time.monotonic() - max(write.started, self._awake, remote.progress if remote is not None else 0.0)

    def _silence(self, seconds: float) -> str:
        return (
            f"no write has ended for {seconds:.3g} s: the peer has stopped or is cut off, or the network is too slow; "
            f"see to it, or raise transfer_timeout_s above {2 * self._silence_s:g}"
        )

    def _in_flight_to(self, session_id: str) -> bool:
        lane = self._lanes.get(session_id)
        return lane is not None and bool(lane.in_flight)

    def _forget(self, session_id: str) -> None:
        # Not dropped at once: our agent must know the peer for as long as writes to it are in flight.
        if session_id in self._remotes:
            self._remotes[session_id].doubtful = True

    def _drop(self, session_id: str) -> None:
        remote = self._remotes.pop(session_id)
        remote.link.close()
        self._unload(remote)

    def _unload(self, remote: _Remote) -> None:
        if remote.loaded is not None:
            # It may have removed a peer by itself that it saw dying.
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(remote.loaded.agent)
            remote.loaded = None

    def _start_agent(self) -> None:
        """A new agent with all registered memory, and its metadata told."""
        module = _module()
        self._agents += 1
        name = f"cpkv-{self._identity}-{self._agents}"
        try:
            self._agent: Any = module.nixl_agent(name, module.nixl_agent_config(backends=[_UCX]))
        except Exception as error:  # the errors of the bindings have no common base
            raise TransferError(f"NIXL did not start an agent ({error}); UCX_LOG_LEVEL=info shows why") from error
        if _UCX not in self._agent.backends:
            self._agent = None
            raise TransferError(f"NIXL finds no {_UCX} plugin; unset NIXL_PLUGIN_DIR, or {_PIP} anew")
        for region in self._registered:
            self._register_with_agent(region)
        self._publish()

    def _register_with_agent(self, region: Region) -> None:
        try:
            self._registered[region] = self._agent.register_memory([(region.address, region.length, 0, "")], _MEMORY)
        except Exception as error:  # the errors of the bindings have no common base
            raise TransferError(f"NIXL did not register region {region} ({error}); is the memory mapped?") from error

    def _publish(self) -> None:
        blob, regions = self._agent.get_agent_metadata(), tuple(self._registered)
        self._server.publish(Metadata(self._identity, self._agent.name, blob, regions))

    def _end_agent(self) -> None:
        """End the agent: when this returns it reads and writes nothing any more."""
        for write in self._writes.values():
            _release(write.request)
        self._writes.clear()
        for remote in self._remotes.values():
            remote.loaded = None
        # Its threads end with the last reference to it.
        self._agent = None

    def _close_engine(self) -> None:
        for remote in self._remotes.values():
            remote.link.close()
        self._server.close()
        self._end_agent()
        self._remotes.clear()
        self._registered.clear()


def _holds(regions: tuple[Region, ...], run: Run) -> bool:
    return any(region.holds(run.target, run.length) for region in regions)


def _release(request: Any) -> None:
    # One in flight may refuse to be released; it ends with its agent.
    with contextlib.suppress(Exception):
        request.release()


def _module() -> ModuleType:
    # UCX reads both when it is loaded; it would log to stdout.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_TLS", WITHOUT_CMA)
    raise_exceptions = logging.raiseExceptions
    # Here and not at the top: the library is an extra.
    import nixl_cu13

    logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.setLevel(logging.WARNING)
    logger.propagate = True
    return nixl_cu13


def _lets_cma_in(transports: str) -> bool:
    """Whether a value of UCX_TLS, a list of transports or with ^ of those left out, has cross-memory attach."""
    named = {"cma", "sm", "shm", "all"} & {name.strip() for name in transports.lower().lstrip("^").split(",")}
    return not named if transports.startswith("^") else bool(named)


def _installed(wheel: str) -> str | None:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
