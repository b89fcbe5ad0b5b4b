"""Gathers the pages that hold history, layer by layer, one layer ahead of the computation when there are two buffers.

main thread   open 0 | compute 0 ........ | open 1 | compute 1 ........ | open 2
lane thread   latent 0, index 0 | latent 1 | index 1 | latent 2 | ...
buffers       latent l goes to buffer l % 2; index l to the only one, once the keys of layer l - 1 have been read

All ranks start the gathers in this order, from one thread, in a process group of their own. On a GPU the lane has a
stream of its own: a gather begins behind what the main stream had been given when it was asked for, and the main stream
goes on behind the gather.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from cpkv.layout.plan import BatchPlan
from cpkv.views.side_stream import SideStream
from cpkv.views.view import ViewContext


class GatherLane:
    """A thread that runs jobs in the order in which they were given, up to the first that fails.

    Those behind it fail with the same cause: run out of step, they would meet other gathers of the other ranks.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        # A daemon, since a job that waits for a dead rank must not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads = torch.get_num_threads()
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job after all earlier ones."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        cause: BaseException | None = None
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                if cause is None:
                    job()
            except BaseException as error:
                cause = error
            if cause is None:
                future.set_result(None)
            else:
                future.set_exception(cause)

    def close(self, *, wait: bool) -> None:
        """End the thread after the jobs that were given."""
        self._jobs.put(None)
        if wait:
            self._thread.join()


class HistoryGather:
    """The gathered history of one batch.

    Args:
        plan: of the batch.
        context: of the rank.
        latent: one or two buffers, uint8 [gathered pages * page_size * latent_row_bytes]; two to gather ahead.
        index: uint8 [gathered pages * index_block_bytes]; None when no key will be scored.
        owner: whose pages this rank brings; its own when left out.
    """

    def __init__(
        self,
        plan: BatchPlan,
        context: ViewContext,
        latent: list[torch.Tensor],
        index: torch.Tensor | None,
        *,
        owner: int | None = None,
    ) -> None:
        self._context = context
        self._gather = plan.history
        self._latent = latent
        self._index = index
        self._own = context.tensor(plan.history.padded_local_pages(context.comm.rank if owner is None else owner))
        self._pending: list[Future[None]] = []
        self._stream = SideStream(context.pool.device)
        self._comm = context.comm
        self._lane: GatherLane | None = None
        if len(latent) > 1 and plan.history.max_pages:
            self._comm = context.comm.prefetch
            self._lane = GatherLane(f"prefill rank {context.comm.rank} prefetch")
            self._ahead(self._gather_latent, 0)
            self._ahead(self._gather_index, 0)

    def open_layer(self, layer: int) -> None:
        """Wait for a layer's history, and start the next layer's."""
        if not self._gather.max_pages:
            return
        if self._lane is None:
            self._gather_latent(layer)
            self._gather_index(layer)
            return
        started = time.perf_counter()
        for future in self._pending:
            future.result()
        self._pending.clear()
        self._stream.join()
        self._context.counters.wait_seconds += time.perf_counter() - started
        self._ahead(self._gather_latent, layer + 1)

    def keys_done(self, layer: int) -> None:
        """The index blocks of a layer will not be read any more: the next layer's may come."""
        if self._lane is not None:
            self._ahead(self._gather_index, layer + 1)

    def index_blocks(self) -> torch.Tensor | None:
        """The gathered blocks, uint8 [pages, index_block_bytes]."""
        if self._index is None:
            return None
        return self._index.view(-1, self._context.geometry.index_block_bytes)

    def _ahead(self, gather: Callable[[int], None], layer: int) -> None:
        if self._lane is not None and layer < self._context.geometry.num_layers:
            begins = self._stream.fork()
            self._pending.append(self._lane.submit(lambda: self._stream.run(begins, lambda: gather(layer))))

    def _gather_latent(self, layer: int) -> None:
        geometry = self._context.geometry
        page_bytes = geometry.page_size * geometry.row_format.latent_row_bytes
        self._run(
            layer,
            lambda out: self._context.pool.latent_pages(layer, self._own, out=out),
            self._latent[layer % len(self._latent)].view(len(self._gather.local_pages), -1, page_bytes),
            f"latent pages {layer}",
        )

    def _gather_index(self, layer: int) -> None:
        geometry = self._context.geometry
        if self._index is not None and geometry.slots[layer] >= 0:
            self._run(
                layer,
                lambda out: self._context.pool.index_pages(layer, self._own, out=out),
                self._index.view(len(self._gather.local_pages), -1, geometry.index_block_bytes),
                f"index pages {layer}",
            )

    def _run(self, layer: int, collect: Callable[[torch.Tensor], None], out: torch.Tensor, label: str) -> None:
        started = time.perf_counter()
        # The own pages are put where the gather leaves them, so that they need no buffer of their own.
        collect(out[self._comm.rank])
        self._comm.all_gather(out[self._comm.rank], label, out=out)
        self._context.counters.moved(out.numel(), self._gather.num_pages * out.shape[2], time.perf_counter() - started)

    def close(self, *, abandon: bool) -> None:
        """End the thread; when the batch failed, it ends by itself once its group has."""
        if self._lane is not None:
            self._lane.close(wait=not abandon)
