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
    assert pool.take(2, prefix) == prefix
    assert pool.take(1, prefix[:1]) == prefix[:1]
    assert pool.free == 2
    pool.give(prefix)
    assert pool.free == 2
    pool.give(prefix)
    assert pool.free == 3
    pool.give(prefix[:1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_pages_that_are_not_there_or_not_held_are_mistakes() -> None:
    pool = PagePool(2, most_kept=2)
    page = pool.take(1)
    with pytest.raises(AssertionError, match="2 pages are wanted, 1 are free"):
        pool.take(2)
    with pytest.raises(AssertionError, match="is not held"):
        pool.keep("a", [1 - page[0]])
    assert (pool.free, pool.kept) == (1, 0)
    pool.keep("a", page)
    with pytest.raises(AssertionError, match="has a key already"):
        pool.keep("b", page)
    pool.give(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.give(page)


def test_what_is_kept_is_found_from_its_beginning_on() -> None:
    pool = PagePool(6, most_kept=6)
    pages = pool.take(4)
    pool.keep("abc", pages)
    assert pool.find("abd") == pages[:2]
    assert pool.find("bc") == pages[1:3]
    assert pool.find("xabc") == pool.find("") == []
    shared = pool.take(5, pool.find("abc"))
    assert shared[:3] == pages[:3]
    assert not set(shared[3:]) & set(pages)
    pool.give(pages)
    pool.give(shared)
    # Nobody holds any, so all can be taken; what was kept is still there.
    assert (pool.free, pool.kept) == (6, 3)
    assert pool.find("abc") == pages[:3]


def test_nothing_is_kept_where_nothing_may_be() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.keep("ab", pages)
    pool.give(pages)
    assert (pool.kept, pool.find("ab")) == (0, [])


def test_pages_left_longest_ago_are_given_up_first_and_ends_before_beginnings() -> None:
    pool = PagePool(6, most_kept=6)
    for keys in ("ab", "cd", "ef"):
        pages = pool.take(2)
        pool.keep(keys, pages)
        pool.give(pages)
    pool.give(pool.take(2, pool.find("ab")))
    # Left: d c f e b a, the oldest first.
    for gone, found in ((1, "c"), (1, ""), (3, "")):
        pool.take(gone)
        assert len(pool.find("cd")) == len(found)
    assert (pool.find("ef"), len(pool.find("ab")), pool.evictions) == ([], 1, 5)


def test_pages_that_are_held_are_never_given_up() -> None:
    pool = PagePool(4, most_kept=4)
    held = pool.take(2)
    pool.keep("ab", held)
    assert pool.has(2)
    assert not pool.has(3)
    # Two that are found and two others, or the same two and one more that is not there.
    assert pool.has(4, pool.find("ab"))
    assert not pool.has(5, pool.find("ab"))
    own = pool.take(2)
    assert (pool.find("ab"), pool.evictions) == (held, 0)
    pool.give(held)
    # They are free, but not besides themselves.
    assert pool.has(2)
    assert pool.has(2, held)
    assert not pool.has(3, held)
    assert sorted([*pool.take(2), *own]) == [0, 1, 2, 3]


def test_no_more_is_kept_than_may_be() -> None:
    pool = PagePool(8, most_kept=3)
    first = pool.take(2)
    pool.keep("ab", first)
    second = pool.take(3)
    # Those that are held stay, so there is room for one more.
    pool.keep("cde", second)
    assert (pool.find("ab"), pool.find("cde"), pool.kept) == (first, second[:1], 3)
    pool.give(first)
    pool.keep("cde", second)
    assert (pool.find("ab"), pool.find("cde"), pool.kept, pool.evictions) == ([], second, 3, 2)


def test_what_two_have_filled_alike_is_kept_once() -> None:
    pool = PagePool(6, most_kept=6)
    first, second = pool.take(2), pool.take(3)
    pool.keep("ab", first)
    pool.keep("abc", second)
    assert pool.find("abc") == [*first, second[2]]
    pool.give(second)
    pool.give(first)
    assert (pool.free, pool.kept) == (6, 3)


def test_what_is_forgotten_is_found_no_more_and_free_once_it_is_given_back() -> None:
    pool = PagePool(4, most_kept=4)
    left, held = pool.take(1), pool.take(2)
    pool.keep("a", left)
    pool.keep("bc", held)
    pool.give(left)
    pool.forget()
    assert (pool.find("a"), pool.find("bc"), pool.kept, pool.free) == ([], [], 0, 2)
    pool.give(held)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("most_kept", [0, 1, 5, 12, 20])
def test_no_page_is_lost_or_has_two_uses_over_many_stays(most_kept: int) -> None:
    """Against what each page was filled with: 3,000 stays with prefixes of a few families, in a pool that is too small.

    Every page is held, kept or free, and exactly one of these but for pages that are held and kept.
    """
    draw, pool, stays = random.Random(most_kept), PagePool(20, most_kept), []
    content: dict[int, object] = {}
    hits = 0
    for stay in range(3000):
        if stays and draw.random() < 0.5:
            pool.give(stays.pop(draw.randrange(len(stays))))
            continue
        family, length = draw.randrange(6), draw.randint(0, 4)
        keys = [(family, at) for at in range(length)]
        count, found = length + draw.randint(0, 3), pool.find(keys)
        assert [content[page] for page in found] == keys[: len(found)]
        held = {page for pages in stays for page in pages}
        can = count - len(found) <= 20 - len(held | set(found))
        assert pool.has(count, found) == can
        # Who could run if nothing was kept can run.
        assert can or count > 20 - len(held)
        if not can:
            continue
        pages = pool.take(count, found)
        hits += len(found)
        assert pages[: len(found)] == found
        assert not held & set(pages[len(found) :])
        assert len(set(pages)) == count
        content.update(zip(pages[len(found) :], [*keys[len(found) :], *[stay] * count], strict=False))
        stays.append(pages)
        if draw.random() < 0.9:
            pool.keep(keys, pages)
        assert pool.kept <= most_kept
        assert pool.free == 20 - len(held | set(pages))
    for pages in stays:
        pool.give(pages)
    assert pool.free == 20
    assert sorted(pool.take(20)) == list(range(20))
    assert (hits > 0) == (pool.evictions > 0) == (most_kept > 0)
