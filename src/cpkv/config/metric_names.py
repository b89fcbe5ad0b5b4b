"""The names of metrics, and what each counts; every exporter takes them from here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TRANSFERS_OPEN = "cpkv_transfers_open"
REQUESTS_HELD = "cpkv_requests_held"
PAGES_FREE = "cpkv_pages_free"
PAGES_HELD = "cpkv_pages_held"
PAGES_QUARANTINED = "cpkv_pages_quarantined"
TRANSFERS_COMPLETED = "cpkv_transfers_completed_total"
TRANSFERS_GIVEN_UP = "cpkv_transfers_given_up_total"
ENGINE_REBUILDS = "cpkv_transfer_engine_rebuilds_total"

HELP: Mapping[str, str] = MappingProxyType(
    {
        TRANSFERS_OPEN: "Transfers under way to this decode worker",
        REQUESTS_HELD: "Requests that hold pages",
        PAGES_FREE: "Pages that can be given to a request now",
        PAGES_HELD: "Pages that requests hold",
        PAGES_QUARANTINED: "Pages out of use since a write of a failed transfer may still land in them",
        TRANSFERS_COMPLETED: "Transfers of which every page has arrived",
        TRANSFERS_GIVEN_UP: "Attempts that were aborted, that stalled, or whose prefill is gone",
        ENGINE_REBUILDS: "Transfer engines that were closed and made anew to end a quarantine",
    }
)
