"""The registry of a simulated world: the real directory, restarts, and what those who ask remember."""

from __future__ import annotations

from cpkv.errors import ConfigError
from cpkv.protocol.directory import Directory, KnownWorkers, WorkerRecord
from cpkv.testing.hostile_fabric import Fault

_NAME = "decode"
_LEASE_S = 2.0


class SimulatedRegistry:
    """Where the prefill learns which life of the decode worker it should call."""

    def __init__(self, now: float) -> None:
        self._starts = 0
        self._known = KnownWorkers()
        self.is_down = False
        self.restart(now)

    def restart(self, now: float) -> None:
        """The registry comes back, and knows nobody."""
        self._starts += 1
        self._started_at = now
        self._directory = Directory(_LEASE_S)
        self.is_down = False

    def beat(self, instance: str, now: float) -> bool:
        """A decode worker renews its name, or registers; whether it has it."""
        if self.is_down:
            return False
        held = self._directory.get(_NAME, now)
        if self._directory.renew(_NAME, instance, now) is not None:
            return True
        try:
            record = WorkerRecord(name=_NAME, role="decode", instance=instance, host="127.0.0.1", port=1, pool=None)
            self._directory.register(record, now)
        except ConfigError:
            return False
        if held is not None:
            raise Fault(f"{instance} took the name of {held.instance}, whose lease had not ended")
        return True

    def find(self, now: float) -> str:
        """The instance that a prefill would call; empty where it knows none."""
        if not self.is_down:
            settled = now - self._started_at > _LEASE_S
            self._known.learn(str(self._starts), settled, self._directory.list(None, now))
        found = self._known.find("decode")
        return found[0].instance if found else ""
