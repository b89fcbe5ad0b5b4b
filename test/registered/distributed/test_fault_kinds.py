"""Kinds of faults that transfers of this field have shipped, where it takes processes to show them.

Two runs are looked at from several sides: a calm one, with prompts of many chunks over four ranks and two decode
owners, and one in which ranks are cut off, replaced, and come back.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cpkv.errors import CpkvError, TransferError
from cpkv.layout.transfer_map import sender_of_positions
from cpkv.protocol.messages import DecodeStep, OpenTransfer, ReleaseRequest, RowDigest, Sampling
from cpkv.testing.faults.commands import PageFill
from cpkv.testing.faults.contents import expected_digest, seeded_geometry
from cpkv.testing.faults.harness import inject_faults
from cpkv.testing.faults.options import FaultOptions
from cpkv.testing.faults.plan import FaultPlan, PlannedFault, PlannedRequest, draw_plan
from cpkv.testing.faults.processes import DECODE, DecodeHost, PrefillGroup, WorkerStock, rank_name
from cpkv.testing.faults.report import FaultReport
from cpkv.testing.faults.run import FaultRun
from cpkv.testing.ports import taken_port
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=30, suite="distributed", alone=True)

CALM = FaultOptions(seed=21, requests=12, ranks=4, decode_owners=2, verify=True)
CUT_OFF = FaultOptions(seed=26, requests=14, cut_offs=2, retried_share=1.0, lease_s=2.0)
SECRET = "a secret of this test"
PUMPS = 500
LONG_CHUNK_S = 3.2


class Told:
    """What the processes of a run have logged, in order of time: (seconds, file, text)."""

    def __init__(self, report: FaultReport) -> None:
        lines = []
        for path in report.logs:
            for line in path.read_text(encoding="utf-8").splitlines():
                if found := re.match(r"(\d+\.\d+) (.*)", line):
                    lines.append((float(found[1]), path.name, found[2]))
        # Workers log in parallel; a stable sort keeps the order within each.
        self.lines = sorted(lines, key=lambda line: line[0])

    def about(self, request_id: str, file: str = "") -> list[str]:
        """What was said about a request."""
        return [text for _, name, text in self.lines if f"request {request_id}" in text and name.startswith(file)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> FaultReport:
    return inject_faults(CALM, tmp_path_factory.mktemp("calm"))


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> FaultReport:
    return inject_faults(CUT_OFF, tmp_path_factory.mktemp("cut-off"))


def longest(options: FaultOptions) -> str:
    """The request with the longest prompt."""
    return max(draw_plan(options).requests, key=lambda request: request.prompt_tokens).request_id


def test_nothing_goes_wrong_where_nothing_is_done(calm: FaultReport) -> None:
    assert not calm.violations, calm.text()
    assert calm.right == CALM.requests
    assert (calm.rebuilds, max((pages for _, pages in calm.quarantine), default=0)) == (0, 0)


def test_a_request_can_be_followed_through_all_logs(calm: FaultReport) -> None:
    """One id, in the logs of the scheduler, of every rank and of the decode worker, in order."""
    told, name = Told(calm), longest(CALM)
    scheduler, decode = told.about(name, "scheduler"), told.about(name, "decode-worker")
    for expected in ("admitted", "OpenTransfer: TransferOpened", "FinishTransfer", "DecodeStep", "RowDigest", "right"):
        assert any(expected in text for text in scheduler), expected
    steps = [next(at for at, text in enumerate(decode) if step in text) for step in (
        "OpenTransfer", "PagesSent", "FinishTransfer", "DecodeStep", "RowDigest", "ReleaseRequest"
    )]  # fmt: skip
    assert steps == sorted(steps)
    for rank in range(CALM.ranks):
        said = told.about(name, f"prefill-rank-{rank}")
        for expected in ("computed positions", "sending positions", "taken"):
            assert any(expected in text for text in said), (rank, expected)


def test_kind_28_pages_are_not_used_again_while_a_late_write_can_land(cut_off: FaultReport) -> None:
    """Ranks that were given up have writes left, and carry them out when their pages are in other hands."""
    assert not cut_off.violations, cut_off.text()
    assert cut_off.signals["cut off (prefill)"] == CUT_OFF.cut_offs
    assert max(pages for _, pages in cut_off.quarantine) > 0
    assert cut_off.rebuilds >= 1


def test_kind_29_pages_leave_early_and_only_once_they_are_computed(calm: FaultReport) -> None:
    """What is not computed is poison, and would be wrong at the decode worker."""
    assert not calm.violations, calm.text()
    told = Told(calm)
    left_early = 0
    for number in range(CALM.requests):
        said = told.about(f"r{number:04}", "prefill-rank-0")
        sent = [at for at, text in enumerate(said) if "sending" in text]
        computed = [at for at, text in enumerate(said) if "computed" in text]
        # One that waited for pages at the decode worker leaves late, since nothing wanted it before.
        left_early += bool(sent) and sent[0] < computed[-1]
    assert left_early, "no page left before its prompt was done, so nothing was shown"


def test_kind_30_pages_are_freed_once_and_not_once_per_rank(calm: FaultReport) -> None:
    told = Told(calm)
    for planned in draw_plan(CALM).requests:
        freed = [text for text in told.about(planned.request_id, "scheduler") if text.endswith("prefill pages free")]
        assert len(freed) == 1


def test_kind_31_a_request_is_read_the_moment_it_is_complete(calm: FaultReport) -> None:
    """The decode worker compares every byte before it answers, and the first step comes at once."""
    assert not calm.violations, calm.text()
    told = Told(calm)
    for planned in draw_plan(CALM).requests:
        names = [re.search(r": (\w+) of rank", text) for text in told.about(planned.request_id, "decode-worker")]
        order = [found[1] for found in names if found]
        assert order.index("FinishTransfer") + 1 == order.index("DecodeStep")


def test_kind_33_a_rank_that_comes_back_is_not_taken_for_the_one_in_its_place(cut_off: FaultReport) -> None:
    """Both say that they are this rank; their instances differ, and so do the bytes that they send."""
    assert not cut_off.violations, cut_off.text()
    told = Told(cut_off)
    lives = {(found[1], found[2]) for _, _, text in told.lines if (found := re.match(r"rank (\d) of (life\d+)", text))}
    for rank in "01":
        assert sum(of == rank for of, _ in lives) == 1 + CUT_OFF.cut_offs
    came_back = [text for _, name, text in told.lines if name == "scheduler.log" and text.startswith("SIGCONT")]
    assert len(came_back) == CUT_OFF.cut_offs


def test_kind_35_a_request_that_comes_again_is_not_taken_for_its_first_try(cut_off: FaultReport) -> None:
    """The same id with other bytes, after a failure; what is late of the first try changes nothing."""
    assert not cut_off.violations, cut_off.text()
    again = [text for _, _, text in Told(cut_off).lines if re.search(r"try [1-9]\d* is over .*: right", text)]
    assert again


def test_a_prefill_whose_first_chunk_takes_longer_than_its_lease_is_believed_in(tmp_path: Path) -> None:
    """Its scheduler waits for the chunk; its other rank lives, and has sent no page yet."""
    options = FaultOptions(lease_s=1.5, transfer_timeout_s=30.0)
    stop = PlannedFault(
        kind="stop", after_ended=0, side="prefill", rank=1, moment="compute", delay_s=0.0, stop_s=LONG_CHUNK_S
    )
    plan = FaultPlan(1, (PlannedRequest("r0000", 200, 1, None, retries=0),), bursts=(1,), faults=(stop,))
    report = FaultRun(options.settings(), plan, tmp_path, decode_pages=64).run()
    assert not report.violations, report.text()
    assert report.right == 1
    assert report.signals["stop (prefill)"] == 1


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Callable[..., tuple[DecodeHost, PrefillGroup]]]:
    """Makes a decode worker and a group of four ranks, or of other settings."""
    stock = WorkerStock(tmp_path)
    made: list[DecodeHost | PrefillGroup] = []

    def make(
        on_end: Callable[[str, CpkvError | None], None], options: FaultOptions = CALM
    ) -> tuple[DecodeHost, PrefillGroup]:
        settings = options.settings()
        stock.prepare([DECODE, *(rank_name(rank) for rank in range(options.ranks))])
        decode = DecodeHost(stock, settings, SECRET, 64, 1, shuffle_seed=3)
        made.append(decode)
        decode.start()
        group = PrefillGroup(
            stock, settings, SECRET, decode.port, "life", 4, on_end=on_end, watch=lambda question, answered: None
        )
        made.append(group)
        group.start()
        return decode, group

    yield make
    for part in reversed(made):
        part.close()
    stock.close()


def announce(group: PrefillGroup, name: str, seed: int) -> tuple[int, ...]:
    """Admit a request of one page."""
    pages = group.allocator.allocate(name, 1)
    senders = sender_of_positions(pages, group.placement, len(group.ranks))
    group.handover.begin(OpenTransfer(name, 0, 5, 2, senders, Sampling(seed=seed)))
    return pages


def pump(group: PrefillGroup, until: Callable[[], bool]) -> None:
    for _ in range(PUMPS):
        if until():
            return
        group.handover.pump(0.02)
    pytest.fail("nothing came of it")


def test_kind_34_ranks_that_connect_in_another_order_than_their_numbers(
    parts: Callable[..., tuple[DecodeHost, PrefillGroup]],
) -> None:
    """Requests of one page each, of ranks 0 to 3, are sent from the last to the first."""
    ended: dict[str, CpkvError | None] = {}
    _, group = parts(ended.__setitem__)
    requests = {name: (number, announce(group, name, number)) for number, name in enumerate("abcd")}
    assert [group.placement.owner(pages[0]) for _, pages in requests.values()] == [0, 1, 2, 3]
    for name, (seed, pages) in reversed(requests.items()):
        group.fill((PageFill(name, seed, (0,), pages),))
        group.handover.sampled(name, seed)
        pump(group, lambda name=name: name in ended)  # type: ignore[misc]
    assert ended == dict.fromkeys("dcba")
    for name, (seed, _) in requests.items():
        assert group.decode.ask(DecodeStep((name,))).tokens == (seed,)
        assert group.decode.ask(RowDigest(name)).digest == expected_digest(seeded_geometry(16), seed, 1)
        group.decode.ask(ReleaseRequest(name))
    log = group.processes[0].log.parent.parent / "process-0000" / "decode-worker.log"
    sent = re.findall(r"PagesSent of rank (\d)", log.read_text())
    assert sent == ["3", "2", "1", "0"]


def test_kind_40_the_cause_of_a_rank_reaches_the_client(parts: Callable[..., tuple[DecodeHost, PrefillGroup]]) -> None:
    """The decode worker dies under a rank: the client learns which rank could not send, and why."""
    ended: dict[str, CpkvError | None] = {}
    decode, group = parts(ended.__setitem__, FaultOptions(ranks=2))
    pages = announce(group, "a", 7)
    decode.worker.send_signal(signal.SIGKILL)
    decode.worker.wait(10)
    group.fill((PageFill("a", 7, (0,), pages),))
    group.handover.sampled("a", 7)
    pump(group, lambda: "a" in ended)
    error = ended["a"]
    assert isinstance(error, TransferError)
    assert re.search(r"prefill rank 0: .*(decode worker|rank 0 could not send)", str(error))


def test_kind_40_ready_is_told_only_by_a_worker_that_can_serve(tmp_path: Path) -> None:
    """A decode worker whose port is taken says so in place of being ready; one that is ready answers at once."""
    stock = WorkerStock(tmp_path)
    settings = CALM.settings()
    try:
        with taken_port() as port:
            decode = DecodeHost(stock, settings, SECRET, 64, 1, shuffle_seed=3, port=port)
            with pytest.raises(TransferError, match=f"decode worker: cannot listen on 127.0.0.1:{port}"):
                decode.start()
            decode.close()
        decode = DecodeHost(stock, settings, SECRET, 64, 1, shuffle_seed=3)
        try:
            decode.start()
            assert decode.state(5.0).free == decode.state(5.0).capacity
        finally:
            decode.close()
    finally:
        stock.close()


def test_a_plan_is_the_same_for_the_same_seed() -> None:
    options = FaultOptions(seed=5, requests=30, kills_prefill=2, aborts=5, stops=1)
    assert draw_plan(options) == draw_plan(options)
    assert draw_plan(options) != draw_plan(replace(options, seed=6))
