"""The allocator against a dict of lists and sets, and what it says when pages run out."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpkv.cache.allocator import PageAllocator
from cpkv.errors import AllocatorError, CapacityError, ConfigError
from cpkv.layout.placement import Page, PagePlacement
from cpkv.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

NAMES = st.sampled_from("abcd")


def make(num_pages: int, cp_size: int, *, seed: int | None = 3, page_size: int = 16) -> PageAllocator:
    return PageAllocator(num_pages, PagePlacement(page_size, cp_size), shuffle_seed=seed)


def advised_pages(refused: pytest.ExceptionInfo[CapacityError]) -> int:
    return int(str(refused.value).split("raise --num-pages to ")[1])


class AllocatorMachine(RuleBasedStateMachine):
    """A model of plain sets: every page is free, held by one request, or in one quarantine."""

    @initialize(cp_size=st.integers(1, 5), local_pages=st.integers(2, 7), seed=st.none() | st.integers(0, 9))
    def start(self, cp_size: int, local_pages: int, seed: int | None) -> None:
        self.cp_size = cp_size
        self.allocator = make(cp_size * local_pages, cp_size, seed=seed)
        self.free: list[set[int]] = [
            set(range(cp_size + owner, cp_size * local_pages, cp_size)) for owner in range(cp_size)
        ]
        self.held: dict[str, list[Page]] = {}
        self.start_class: dict[str, int] = {}
        self.quarantined: dict[str, list[Page]] = {}

    @property
    def free_count(self) -> int:
        return sum(map(len, self.free))

    @rule(name=NAMES, count=st.integers(1, 9))
    def allocate_or_extend(self, name: str, count: int) -> None:
        if count > self.free_count:
            with pytest.raises(CapacityError, match=f"request {name} needs {count} pages, {self.free_count} are free"):
                self.allocator.allocate(name, count)
            return
        pages = self.allocator.allocate(name, count)
        assert len(pages) == count, "a request that fits the sum of free pages is admitted"
        chain = self.held.setdefault(name, [])
        self.start_class.setdefault(name, pages[0] % self.cp_size)
        for page in pages:
            wanted = (self.start_class[name] + len(chain)) % self.cp_size
            while not self.free[wanted]:
                wanted = (wanted + 1) % self.cp_size
            assert page % self.cp_size == wanted, f"page {len(chain)} of {name} is of the wrong owner"
            assert page in self.free[wanted], f"page {page} is not free"
            self.free[wanted].remove(page)
            chain.append(page)

    def give_back(self, pages: list[Page]) -> None:
        for page in pages:
            self.free[page % self.cp_size].add(page)

    @rule(name=NAMES)
    def free_or_free_twice(self, name: str) -> None:
        if name not in self.held:
            with pytest.raises(AllocatorError, match=f"request {name} holds no pages; freed twice, or never allocated"):
                self.allocator.free(name)
            return
        assert self.allocator.free(name) == tuple(self.held[name])
        self.give_back(self.held.pop(name))
        del self.start_class[name]

    @rule(name=NAMES)
    def quarantine(self, name: str) -> None:
        if name not in self.held:
            with pytest.raises(AllocatorError, match=f"request {name} holds no pages"):
                self.allocator.quarantine(name)
            return
        assert self.allocator.quarantine(name) == tuple(self.held[name])
        self.quarantined.setdefault(name, []).extend(self.held.pop(name))
        del self.start_class[name]

    @rule(name=NAMES)
    def release_or_release_twice(self, name: str) -> None:
        if name not in self.quarantined:
            with pytest.raises(AllocatorError, match=f"request {name} has no page in quarantine; released twice"):
                self.allocator.release_quarantine(name)
            return
        assert self.allocator.release_quarantine(name) == tuple(self.quarantined[name])
        self.give_back(self.quarantined.pop(name))

    @precondition(lambda self: self.free_count)
    @rule(name=NAMES)
    def take_everything(self, name: str) -> None:
        self.allocate_or_extend(name, self.free_count)

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check()
        assert self.allocator.free_pages == self.free_count
        assert self.allocator.quarantined_pages == sum(map(len, self.quarantined.values()))
        assert set(self.allocator.request_ids) == set(self.held)
        for name, pages in self.held.items():
            assert self.allocator.pages_of(name) == tuple(pages)


class TestAllocatorAgainstPlainSets(AllocatorMachine.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_page_i_of_a_request_is_of_owner_start_plus_i(cp_size: int) -> None:
    """Design: owners stay balanced while every class has pages, also over extensions and with others between."""
    allocator = make(60 * cp_size, cp_size)
    for step in range(6):
        for name, count in (("a", 1), ("b", 2 * cp_size + 1), ("c", step + 1)):
            allocator.allocate(name, count)
    for name in allocator.request_ids:
        owners = [page % cp_size for page in allocator.pages_of(name)]
        assert owners == [(owners[0] + place) % cp_size for place in range(len(owners))], name


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_requests_of_one_page_spread_over_the_owners(cp_size: int) -> None:
    allocator = make(50 * cp_size, cp_size)
    for number in range(40 * cp_size + 1):
        allocator.allocate(f"r{number}", 1)
        counts = Counter(allocator.pages_of(name)[0] % cp_size for name in allocator.request_ids)
        assert max(counts.values()) - min(counts[owner] for owner in range(cp_size)) <= 1


def drained_unevenly(cp_size: int = 4, local_pages: int = 9) -> PageAllocator:
    """Only pages of the last owner are free, but for one of owner 0."""
    allocator = make(cp_size * local_pages, cp_size)
    for number in range(allocator.capacity_pages):
        allocator.allocate(f"r{number}", 1)
    pages = {allocator.pages_of(name)[0]: name for name in allocator.request_ids}
    for page in sorted(pages)[:1] + [page for page in pages if page % cp_size == cp_size - 1]:
        allocator.free(pages[page])
    return allocator


def test_a_request_that_fits_the_sum_of_free_pages_is_admitted_from_one_owner_alone() -> None:
    """Admission counts pages, not pages of a class; the fallback is the same each time."""
    taken = []
    for _ in range(2):
        allocator = drained_unevenly()
        assert allocator.free_pages == 9
        taken.append(allocator.allocate("big", 9))
        assert Counter(page % 4 for page in taken[-1]) == {3: 8, 0: 1}
        assert allocator.free_pages == 0
        allocator.check()
    assert taken[0] == taken[1]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_the_advised_num_pages_suffices_and_no_smaller_number_does(cp_size: int) -> None:
    """The remedy with its computed value, tried; other requests keep what they hold."""
    held, num_pages = [("a", 3), ("b", cp_size)], cp_size * 6
    for wanted in range(1, 12 * cp_size):
        allocator = make(num_pages, cp_size)
        for name, count in held:
            allocator.allocate(name, min(count, allocator.free_pages))
        free = allocator.free_pages
        if wanted <= free:
            continue
        with pytest.raises(CapacityError, match=f"{wanted} pages, {free} are free of {5 * cp_size};") as refused:
            allocator.allocate("big", wanted)
        for advised, fits in ((advised_pages(refused), True), (advised_pages(refused) - cp_size, False)):
            again = make(advised, cp_size)
            for name in allocator.request_ids:
                again.allocate(name, len(allocator.pages_of(name)))
            assert (again.free_pages >= wanted) is fits, f"--num-pages {advised}"
            if fits:
                assert len(again.allocate("big", wanted)) == wanted


def test_a_refused_allocation_changes_nothing() -> None:
    allocator = make(24, 4)
    before = allocator.allocate("a", 5)
    for name in ("a", "new"):
        with pytest.raises(CapacityError):
            allocator.allocate(name, 16)
    assert allocator.pages_of("a") == before
    assert allocator.request_ids == ("a",)
    assert allocator.free_pages == 15
    allocator.check()


def test_the_whole_pool_can_be_allocated_and_none_of_the_reserved_pages_is_in_it() -> None:
    """Kind 4: all of num_pages but one trash page a rank."""
    allocator = make(24, 4)
    assert sorted(allocator.allocate("all", allocator.capacity_pages)) == list(range(4, 24))
    with pytest.raises(CapacityError):
        allocator.allocate("one more", 1)


@pytest.mark.parametrize("cp_size", [1, 3, 4])
def test_thousands_of_requests_of_all_lengths_leave_the_pool_full(cp_size: int) -> None:
    """Kind 15: what never enters a request's chain would never be freed."""
    allocator = make(40 * cp_size, cp_size, page_size=7)
    random_ = random.Random(5)
    alive: deque[str] = deque()
    for number in range(3000):
        # Every second one is short; the others take all lengths that the pool can hold, out of order.
        longest = 7 * (39 * cp_size if number % 2 else 3)
        pages = allocator.placement.pages_for(1 + number * 37 % longest)
        while pages > allocator.free_pages:
            alive.rotate(random_.randrange(len(alive)))
            allocator.free(alive.pop())
        allocator.allocate(f"r{number}", pages)
        alive.append(f"r{number}")
        if number % 7 == 0:
            allocator.quarantine(alive.pop())
            allocator.release_quarantine(f"r{number}")
        if number % 100 == 0:
            allocator.check()
    for name in alive:
        allocator.free(name)
    allocator.check()
    assert allocator.free_pages == allocator.capacity_pages == 39 * cp_size
    assert allocator.request_ids == () and allocator.quarantined_pages == 0
    assert sorted(allocator.allocate("all", 39 * cp_size)) == list(range(cp_size, 40 * cp_size))


def test_shuffled_pages_are_neither_sorted_nor_contiguous_and_depend_on_the_seed_alone() -> None:
    """Kind 12."""
    first, again, other = (make(400, 4, seed=seed).allocate("a", 100) for seed in (1, 1, 2))
    assert first == again != other
    assert list(first) != sorted(first)
    neighbours = [left + 1 == right for left, right in zip(first, first[1:], strict=False)]
    assert sum(neighbours) < 20
    assert list(make(400, 4, seed=None).allocate("a", 100)) == list(range(4, 104))


@pytest.mark.parametrize(
    ("num_pages", "says"),
    [
        (10, "num_pages is 10, no multiple of cp_size 4, .* set --num-pages to 12"),
        (4, "num_pages is 4, and 4 of them are reserved .* set --num-pages to 8 or more"),
    ],
)
def test_a_pool_of_uneven_or_reserved_pages_is_refused(num_pages: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(num_pages, 4)


def test_pages_in_quarantine_are_not_handed_out_until_they_are_released() -> None:
    """Kind 28: a failed transfer may still write to them."""
    allocator = make(24, 4)
    doubtful = set(allocator.allocate("a", 6))
    allocator.quarantine("a")
    assert not doubtful & set(allocator.allocate("b", 14))
    with pytest.raises(CapacityError, match="request c needs 1 pages, 0 are free of 20"):
        allocator.allocate("c", 1)
    assert "6 in quarantine" in repr(allocator)
    allocator.release_quarantine("a")
    assert set(allocator.allocate("c", 6)) == doubtful


def test_pages_of_two_failed_attempts_of_one_request_are_all_kept_and_all_released() -> None:
    """Kinds 28 and 35."""
    allocator = make(24, 4)
    first = allocator.allocate("a", 3)
    allocator.quarantine("a")
    second = allocator.allocate("a", 4)
    allocator.quarantine("a")
    allocator.check()
    assert allocator.quarantined_pages == 7
    assert set(allocator.release_quarantine("a")) == {*first, *second}
    allocator.check()
    assert allocator.free_pages == 20


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda a: a._free[0].append(a._chains["a"].pages[0]), r"page \d+ is in free list 0 and in request a"),
        (lambda a: a._free[1].append(a._free[0].pop()), r"page \d+ of owner 0 is in free list 1"),
        (lambda a: a._free[0].pop(), "1 of 20 pages are lost"),
        (lambda a: a._chains["a"].pages.append(Page(2)), "page 2 in request a is reserved or out of range"),
        (lambda a: a._free[0].append(Page(24)), "page 24 in free list 0 is reserved or out of range"),
        (lambda a: a._quarantined["q"].append(a._chains["a"].pages[1]), r"in request a and in quarantine of q"),
    ],
    ids=["free and held", "wrong class", "lost", "reserved", "out of range", "held and quarantined"],
)
def test_check_names_what_is_wrong_with_the_books(damage: object, says: str) -> None:
    allocator = make(24, 4)
    allocator.allocate("a", 5)
    allocator.allocate("q", 2)
    allocator.quarantine("q")
    allocator.check()
    damage(allocator)  # type: ignore[operator]
    with pytest.raises(AllocatorError, match=says):
        allocator.check()


def test_reclaim_frees_what_is_held_and_what_is_in_quarantine_once() -> None:
    allocator = PageAllocator(12, PagePlacement(4, 3))
    held, kept = allocator.allocate("held", 2), allocator.allocate("kept", 3)
    allocator.quarantine("kept")
    assert allocator.reclaim("kept") == kept
    assert allocator.reclaim("held") == held
    assert allocator.free_pages == allocator.capacity_pages
    with pytest.raises(AllocatorError, match="request kept holds no pages"):
        allocator.reclaim("kept")
    allocator.check()
