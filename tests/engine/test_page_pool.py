"""The pool of pages: nobody is given what another holds, and everything comes back."""

import random

import pytest

from sonoro.engine.pages import PagePool


def test_a_shared_page_is_free_when_the_last_owner_gives_it_back() -> None:
    pool = PagePool(4)
    prefix = pool.acquire(2)
    assert pool.acquire(2, prefix) == prefix
    assert pool.acquire(1, prefix[:1]) == prefix[:1]
    assert pool.free == 2
    pool.release(prefix)
    assert pool.free == 2
    pool.release(prefix)
    assert pool.free == 3
    pool.release(prefix[:1])
    assert sorted(pool.acquire(4)) == [0, 1, 2, 3]


def test_pages_that_are_not_there_or_not_held_are_mistakes() -> None:
    pool = PagePool(2, max_cached=2)
    page = pool.acquire(1)
    with pytest.raises(AssertionError, match="2 pages are wanted, 1 are free"):
        pool.acquire(2)
    with pytest.raises(AssertionError, match="is not held"):
        pool.cache("a", [1 - page[0]])
    assert (pool.free, pool.cached) == (1, 0)
    pool.cache("a", page)
    with pytest.raises(AssertionError, match="has a key already"):
        pool.cache("b", page)
    pool.release(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(page)


def test_what_is_kept_is_found_from_its_beginning_on() -> None:
    pool = PagePool(6, max_cached=6)
    pages = pool.acquire(4)
    pool.cache("abc", pages)
    assert pool.find("abd") == pages[:2]
    assert pool.find("bc") == pages[1:3]
    assert pool.find("xabc") == pool.find("") == []
    shared = pool.acquire(5, pool.find("abc"))
    assert shared[:3] == pages[:3]
    assert not set(shared[3:]) & set(pages)
    pool.release(pages)
    pool.release(shared)
    # Nobody holds any, so all can be taken; what was kept is still there.
    assert (pool.free, pool.cached) == (6, 3)
    assert pool.find("abc") == pages[:3]


def test_nothing_is_kept_where_nothing_may_be() -> None:
    pool = PagePool(3)
    pages = pool.acquire(2)
    pool.cache("ab", pages)
    pool.release(pages)
    assert (pool.cached, pool.find("ab")) == (0, [])


def test_pages_left_longest_ago_are_given_up_first_and_ends_before_beginnings() -> None:
    pool = PagePool(6, max_cached=6)
    for keys in ("ab", "cd", "ef"):
        pages = pool.acquire(2)
        pool.cache(keys, pages)
        pool.release(pages)
    pool.release(pool.acquire(2, pool.find("ab")))
    # Left: d c f e b a, the oldest first.
    for gone, found in ((1, "c"), (1, ""), (3, "")):
        pool.acquire(gone)
        assert len(pool.find("cd")) == len(found)
    assert (pool.find("ef"), len(pool.find("ab")), pool.evictions) == ([], 1, 5)


def test_pages_that_are_held_are_never_given_up() -> None:
    pool = PagePool(4, max_cached=4)
    held = pool.acquire(2)
    pool.cache("ab", held)
    assert pool.can_acquire(2)
    assert not pool.can_acquire(3)
    # Two that are found and two others, or the same two and one more that is not there.
    assert pool.can_acquire(4, pool.find("ab"))
    assert not pool.can_acquire(5, pool.find("ab"))
    own = pool.acquire(2)
    assert (pool.find("ab"), pool.evictions) == (held, 0)
    pool.release(held)
    # They are free, but not besides themselves.
    assert pool.can_acquire(2)
    assert pool.can_acquire(2, held)
    assert not pool.can_acquire(3, held)
    assert sorted([*pool.acquire(2), *own]) == [0, 1, 2, 3]


def test_no_more_is_kept_than_may_be() -> None:
    pool = PagePool(8, max_cached=3)
    first = pool.acquire(2)
    pool.cache("ab", first)
    second = pool.acquire(3)
    # Those that are held stay, so there is room for one more.
    pool.cache("cde", second)
    assert (pool.find("ab"), pool.find("cde"), pool.cached) == (first, second[:1], 3)
    pool.release(first)
    pool.cache("cde", second)
    assert (pool.find("ab"), pool.find("cde"), pool.cached, pool.evictions) == ([], second, 3, 2)


def test_what_two_have_filled_alike_is_kept_once() -> None:
    pool = PagePool(6, max_cached=6)
    first, second = pool.acquire(2), pool.acquire(3)
    pool.cache("ab", first)
    pool.cache("abc", second)
    assert pool.find("abc") == [*first, second[2]]
    pool.release(second)
    pool.release(first)
    assert (pool.free, pool.cached) == (6, 3)


def test_what_is_forgotten_is_found_no_more_and_free_once_it_is_given_back() -> None:
    pool = PagePool(4, max_cached=4)
    left, held = pool.acquire(1), pool.acquire(2)
    pool.cache("a", left)
    pool.cache("bc", held)
    pool.release(left)
    pool.clear_cache()
    assert (pool.find("a"), pool.find("bc"), pool.cached, pool.free) == ([], [], 0, 2)
    pool.release(held)
    assert sorted(pool.acquire(4)) == [0, 1, 2, 3]


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
            pool.release(stays.pop(draw.randrange(len(stays))))
            continue
        family, length = draw.randrange(6), draw.randint(0, 4)
        keys = [(family, at) for at in range(length)]
        count, found = length + draw.randint(0, 3), pool.find(keys)
        assert [content[page] for page in found] == keys[: len(found)]
        held = {page for pages in stays for page in pages}
        can = count - len(found) <= 20 - len(held | set(found))
        assert pool.can_acquire(count, found) == can
        # Who could run if nothing was kept can run.
        assert can or count > 20 - len(held)
        if not can:
            continue
        pages = pool.acquire(count, found)
        hits += len(found)
        assert pages[: len(found)] == found
        assert not held & set(pages[len(found) :])
        assert len(set(pages)) == count
        content.update(zip(pages[len(found) :], [*keys[len(found) :], *[stay] * count], strict=False))
        stays.append(pages)
        if draw.random() < 0.9:
            pool.cache(keys, pages)
        assert pool.cached <= most_kept
        assert pool.free == 20 - len(held | set(pages))
    for pages in stays:
        pool.release(pages)
    assert pool.free == 20
    assert sorted(pool.acquire(20)) == list(range(20))
    assert (hits > 0) == (pool.evictions > 0) == (most_kept > 0)
