"""What a run is asked to do, and the pools and bounds that go with it."""

from __future__ import annotations

from dataclasses import dataclass

from cpkv.config.names import TransferName
from cpkv.config.settings import EngineSettings

PAGE_SIZE = 16
# Two long prompts fit at a time, so that freed pages are soon in other hands.
RANK_PAGES = 48
DECODE_PAGES = 108
# What a rank that was cut off had to send is in other hands when it comes back.
CUT_OFF_S = 3.0


@dataclass(frozen=True)
class FaultOptions:
    """What to run.

    Attributes:
        transfer: one between processes.
        seed: of everything that is drawn.
        requests: how many.
        kills_prefill: ranks killed.
        kills_decode: decode workers killed.
        aborts: requests whose client goes.
        stops: workers stopped for `stop_s`.
        stop_s: seconds.
        hiccups: workers stopped for a moment.
        cut_offs: ranks that come back after they were replaced.
        ranks: of the prefill.
        decode_owners: places that decode pages are spread over.
        lease_s: see `EngineSettings`.
        transfer_timeout_s: see `EngineSettings`. A worker that is stopped for less than half of it must not be missed.
        verify: compare digests of pages.
        retried_share: of failed requests that come again under the same id.
    """

    transfer: TransferName = "tcp"
    seed: int = 0
    requests: int = 40
    kills_prefill: int = 0
    kills_decode: int = 0
    aborts: int = 0
    stops: int = 0
    stop_s: float = 5.0
    hiccups: int = 0
    cut_offs: int = 0
    ranks: int = 2
    decode_owners: int = 1
    lease_s: float = 3.0
    transfer_timeout_s: float = 8.0
    verify: bool = False
    retried_share: float = 0.5

    def settings(self) -> EngineSettings:
        """Of the workers."""
        return EngineSettings(
            num_pages=RANK_PAGES * self.ranks,
            enable_cp_shared_kv=self.ranks > 1,
            cp_size=self.ranks,
            page_size=PAGE_SIZE,
            transfer=self.transfer,
            transfer_timeout_s=self.transfer_timeout_s,
            lease_s=self.lease_s,
            verify_transfer=self.verify,
        )

    @property
    def cut_off_s(self) -> float:
        """After how long a rank that was cut off comes back: its lease is over."""
        return self.lease_s + CUT_OFF_S
