"""Stored values of a unit, and what differs from them in one value."""

from __future__ import annotations

from recollect.planning.hull import Stored

STORED = Stored(frozenset([1, 2]), frozenset([3]))


def test_a_value_is_toggled_in_one_way_of_storing_it() -> None:
    assert STORED.toggled(2) == Stored(frozenset([1]), frozenset([3]))
    assert STORED.toggled(3) == Stored(frozenset([1, 2, 3]), frozenset([3]))
    assert STORED.toggled_part(3) == Stored.whole_values([1, 2])


def test_values_are_stored_in_any_way() -> None:
    assert STORED.values == {1, 2, 3}
    assert STORED.without([1, 3]).values == {2}
    assert STORED.with_whole([4]).values == {1, 2, 3, 4}


def test_more_is_stored_where_all_else_is_stored_in_the_same_way() -> None:
    assert STORED.with_whole([4]).has_more_than(STORED)
    assert not STORED.has_more_than(STORED)
    assert not Stored.whole_values([1, 2, 3]).has_more_than(STORED)


def test_the_order_is_that_of_the_numbers() -> None:
    assert STORED.order == ([1, 2], [3])
