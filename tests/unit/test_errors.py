"""The tree of errors: its shape, its messages, and that errors survive a trip between processes."""

import copy
import pickle
import re

import pytest

from recollect import errors
from recollect.errors import (
    BudgetTooSmallError,
    ConfigError,
    FreedValueError,
    MutatedValueError,
    NotYetError,
    OffloadError,
    QuantityError,
    RandomDrawError,
    RecollectError,
    RecordError,
    UnknownNameError,
)
from recollect.quantities import parse_budget

WITH_ATTRIBUTES = [
    QuantityError("16G", "write which"),
    UnknownNameError(kind="unit", name="layers.O", known=["layers.0"]),
    BudgetTooSmallError(budget_bytes=10, least_peak_bytes=20, unit="head"),
    MutatedValueError(unit="layers.0", module="mlp", op="mul", shape=(2, 3), changes=1),
    ConfigError(settings={"a": 1}, reason="no", advice="Set a to 2.", rule="a-is-2"),
    NotYetError(settings={"a": 1}, needs="b", advice="Leave it out."),
    FreedValueError(unit="layers.0", module="mlp", op="mul", shape=(2, 3)),
    RandomDrawError(op="lab.noise.default"),
    OffloadError(unit="layers.0", name="up.mm", direction="back", reason="no room"),
]


def test_the_tree_in_the_docstring_is_that_of_the_classes() -> None:
    parents, drawn = ["Exception"], {}
    for indent, name, base in re.findall(r"^( +)(\w+(?:Error|Warning))\b(?: \((\w+)\))?", errors.__doc__ or "", re.M):
        # A warning is below none of them.
        above = parents[(len(indent) - 4) // 2]
        parents[(len(indent) - 4) // 2 + 1 :] = [name]
        drawn[name] = {base or above} if name.endswith("Warning") else {above, base or above}
    classes = {name: kind for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    assert len(drawn) > 30 and drawn == {
        name: {base.__name__ for base in kind.__bases__} for name, kind in classes.items() if isinstance(kind, type)
    }


@pytest.mark.parametrize("error", [*WITH_ATTRIBUTES, RecordError("plain")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_can_be_sent_between_processes(error: RecollectError, copied: object) -> None:
    twin = copied(error)  # type: ignore[operator]
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_budget_too_small() -> None:
    error = BudgetTooSmallError(budget_bytes=12 * 2**30, least_peak_bytes=15 * 2**30, unit="layers.17")
    assert str(error) == (
        "12.0 GiB (12884901888 bytes) is below the least possible peak 15.0 GiB (16106127360 bytes), which unit "
        "'layers.17' needs. Raise the budget to '15.0GiB', or use a smaller batch."
    )
    assert (error.budget_bytes, error.least_peak_bytes, error.unit) == (12884901888, 16106127360, "layers.17")
    whole_model = BudgetTooSmallError(budget_bytes=1000, least_peak_bytes=2000, unit="")
    assert "(2000 bytes), which the model needs. Raise" in str(whole_model)


def test_budget_too_small_says_what_fills_the_peak() -> None:
    error = BudgetTooSmallError(
        budget_bytes=1000, least_peak_bytes=2000, unit="head", tenants=["parameters 1 B", "b 2 B"]
    )
    assert "which unit 'head' needs. It is filled by parameters 1 B, b 2 B. Raise the budget" in str(error)
    assert error.changed(unit="").tenants == ("parameters 1 B", "b 2 B")


def test_budget_too_small_as_a_percentage_without_its_sign() -> None:
    error = BudgetTooSmallError(budget_bytes=60, least_peak_bytes=2000, unit="")
    assert str(error).endswith("use a smaller batch. If you meant a percentage, write '60%'.")
    assert "percentage" not in str(BudgetTooSmallError(budget_bytes=101, least_peak_bytes=2000, unit=""))


def test_budget_too_small_with_advice() -> None:
    error = BudgetTooSmallError(budget_bytes=1000, least_peak_bytes=2000, unit="head", advice=["Try this.", "Or that."])
    assert str(error).endswith("which unit 'head' needs. Raise the budget to '2.0KiB'. Try this. Or that.")
    assert error.advice == ("Try this.", "Or that.")


@pytest.mark.parametrize("least_peak_bytes", [20, 1025, 10**6 + 1, 2**20 - 1, 2**30, 2**60 + 1, 3 * 2**60])
def test_budget_too_small_gives_the_least_budget_to_paste(least_peak_bytes: int) -> None:
    plain_bytes = least_peak_bytes * 3 // 2
    error = BudgetTooSmallError(
        budget_bytes=10, least_peak_bytes=least_peak_bytes, unit="head", plain_peak_bytes=plain_bytes
    )
    assert f"Raise the budget to {error.least_budgets[0]!r} or {error.least_budgets[1]!r}, or" in str(error)
    for text, tolerance in zip(error.least_budgets, (1.1, 1.05), strict=True):  # one decimal; one percent
        assert least_peak_bytes <= parse_budget(text, reference_bytes=plain_bytes) <= least_peak_bytes * tolerance
    other = error.changed(plain_peak_bytes=2 * plain_bytes)
    assert int(other.least_budgets[1].rstrip("%")) == 34


def test_unknown_name_suggests_similar_names() -> None:
    error = UnknownNameError(kind="value", name="mlp.up.mm", known=["mlp.up_proj.mm", "add"], where="unit 'layers.0'")
    assert str(error) == "unit 'layers.0' has no value 'mlp.up.mm'. Did you mean 'mlp.up_proj.mm'?"
    assert error.suggestions == ("mlp.up_proj.mm",)


@pytest.mark.parametrize(
    ("known", "advice"),
    [
        (["a", "b"], "It has 2: 'a', 'b'."),
        (["a", "b", "c", "d"], "It has 4: 'a', 'b', 'c' and 1 more."),
        ([], "It has no units at all."),
    ],
)
def test_unknown_name_without_a_similar_one(known: list[str], advice: str) -> None:
    error = UnknownNameError(kind="unit", name="layers.0", known=known)
    assert str(error) == f"the model has no unit 'layers.0'. {advice}"


@pytest.mark.parametrize(
    ("unit", "module", "changes", "message"),
    [
        ("layers.0", "mlp", 1, "used by mul in layers.0.mlp, was changed in place 1 time before"),
        ("layers.0", "", 2, "used by mul in layers.0, was changed in place 2 times before"),
        ("", "", 1, "used by mul in the model, was changed in place 1 time before"),
        ("", "", 0, "used by mul in the model, was changed in place (through `.data` or NumPy) before"),
    ],
)
def test_mutated_value(unit: str, module: str, changes: int, message: str) -> None:
    error = MutatedValueError(unit=unit, module=module, op="mul", shape=(2, 3), changes=changes)
    assert str(error).startswith(f"a tensor of shape [2, 3], {message} backward used it. ")
    assert str(error).endswith("Write to a copy of it, or run backward before the write.")
