"""Which recorded steps a plan of which holds for the step under way."""

from dataclasses import replace

import pytest

from recollect.attaching.step_shape import Call, covering, groups_of

PLAIN = Call("", ((4, 64), (4, 64)), ("int64", True), trained=0b111)
OPEN = replace(PLAIN, is_open=True)


@pytest.mark.parametrize(
    ("other", "is_covered"),
    [
        (PLAIN, True),
        (replace(PLAIN, shapes=((3, 64), (3, 64))), True),
        (replace(PLAIN, shapes=((4, 65), (4, 65))), False),
        (replace(PLAIN, shapes=((8, 8), (8, 8))), False),  # fewer elements, but another dimension is larger
        (replace(PLAIN, shapes=((4, 64),)), False),
        (replace(PLAIN, shapes=((4, 64), (4, 64, 1))), False),
        (replace(PLAIN, context=("int64", False)), False),
        (replace(PLAIN, entry="encoder"), False),
        (replace(PLAIN, trained=0b101), True),  # frozen since
        (replace(PLAIN, trained=0b1111), False),  # thawed since
        (replace(PLAIN, has_gradients=True), False),
    ],
)
def test_a_call_that_is_no_larger_is_covered(other: Call, is_covered: bool) -> None:
    assert PLAIN.is_at_least(other) is is_covered
    assert bool(covering([PLAIN], [other])) is is_covered


def test_gradients_that_were_there_may_be_missing() -> None:
    assert replace(PLAIN, has_gradients=True).is_at_least(PLAIN)


def test_more_equal_micro_batches_are_covered_and_more_calls_before_backward_are_not() -> None:
    later = replace(PLAIN, has_gradients=True)
    accumulated = [PLAIN, later]
    assert covering(accumulated, [PLAIN, later, later]) == [1], "the third micro-batch is as the second"
    assert covering([later], [later]), "gradients of the step before"
    assert not covering([later], [later, later]), (
        "the first call's may be freed before backward, the second call's are not"
    )
    assert not covering(accumulated, [PLAIN, OPEN]), "two calls before backward were never recorded"
    pair = [PLAIN, OPEN]
    assert covering(pair, [PLAIN]) and covering(pair, [PLAIN, OPEN])
    assert not covering(pair, [PLAIN, OPEN, OPEN])


def test_gradients_of_other_parameters_than_were_there_are_not_covered() -> None:
    front, back = replace(PLAIN, trained=0b001, has_gradients=True), replace(PLAIN, trained=0b110, has_gradients=True)
    recorded = [replace(front, has_gradients=False), back, replace(front, shapes=((2, 64), (2, 64)))]
    assert covering(recorded, recorded[:2]) == [1]
    assert covering(recorded, [*recorded[:2], recorded[2]]) == [2]
    assert not covering(recorded, [*recorded[:2], back]), "beside all gradients, a call as large was not recorded"
    assert covering([front, *recorded[1:]], [front, back, back]) == [1], "they were there before the step"


def test_groups_begin_where_nothing_waits_for_backward() -> None:
    assert groups_of([]) == []
    assert groups_of([PLAIN, OPEN, PLAIN]) == [[PLAIN, OPEN], [PLAIN]]


def test_in_words() -> None:
    assert str(Call("", ((4, 8), (4, 8, 16)), ())) == "4 x 8 x 16"
    assert str(Call("", (), ())) == "a scalar"
