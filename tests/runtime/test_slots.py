"""Pools of slots and pages: nobody is given what another holds, and everything comes back."""

import random

import pytest

from sonoro.runtime.slots import PagePool, SlotPool


def test_every_slot_is_taken_once_the_lowest_first() -> None:
    pool = SlotPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.free == 0
    pool.give(2)
    pool.give(0)
    assert pool.free == 2
    assert pool.take() == 0


def test_a_slot_too_many_or_given_twice_is_a_mistake() -> None:
    pool = SlotPool(1)
    slot = pool.take()
    with pytest.raises(AssertionError, match="no slot"):
        pool.take()
    pool.give(slot)
    with pytest.raises(AssertionError, match="free already"):
        pool.give(slot)


def test_a_shared_page_is_free_when_the_last_owner_gives_it_back() -> None:
    pool = PagePool(4)
    prefix = pool.take(2)
    pool.share(prefix)
    pool.share(prefix[:1])
    assert pool.free == 2
    pool.give(prefix)
    assert pool.free == 2
    pool.give(prefix)
    assert pool.free == 3
    pool.give(prefix[:1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_pages_that_are_not_there_or_not_held_are_mistakes() -> None:
    pool = PagePool(2)
    page = pool.take(1)
    with pytest.raises(AssertionError, match="2 pages are wanted, 1 are free"):
        pool.take(2)
    assert pool.free == 1
    with pytest.raises(AssertionError, match="not all held"):
        pool.share([*page, 1 - page[0]])
    pool.give(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.give(page)


def test_no_page_has_two_owners_and_none_is_lost_over_many_stays() -> None:
    draw, pool, stays = random.Random(0), PagePool(20), []
    for _ in range(2000):
        if stays and draw.random() < 0.5:
            pool.give(stays.pop(draw.randrange(len(stays))))
        else:
            stays.append(pool.take(draw.randint(0, min(5, pool.free))))
        held = [page for pages in stays for page in pages]
        assert len(set(held)) == len(held) == 20 - pool.free
    for pages in stays:
        pool.give(pages)
    assert sorted(pool.take(20)) == list(range(20))
