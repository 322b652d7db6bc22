"""Plans that offload values: what they say, print and write, and when copies leave and come back."""

import json
import pickle

import pytest

from recollect.errors import PlanError, PlanFormatError
from recollect.plans.plan import Plan
from recollect.plans.trip import Timetable, Trip
from recollect.plans.unit_plan import UnitPlan, digest_of

UNIT = UnitPlan({"norm.mul": "recompute", "up.mm": "offload", "down.mm": "keep"}, trips={"up.mm": Trip(2, 1)})


def test_prints_what_is_offloaded_and_how_much_of_it_there_is() -> None:
    plan = Plan({"a": UNIT}, predicted_peak_bytes=2**20, predicted_host_bytes=2**30, host_budget_bytes=2**31)
    assert str(plan).splitlines() == [
        "a           keep       down",
        "            recompute  all else",
        "            offload    up",
        "all others  keep all",
        "predicted peak 1.0 MiB",
        "predicted host memory 1.0 GiB, host budget 2.0 GiB",
    ]


def test_survives_json_pickle_and_hash() -> None:
    plan = Plan({"a": UNIT, "b": UnitPlan({"mm": "offload"}, trips={"mm": Trip(3, 1, leaves_in_backward=True)})})
    for same in (Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan))):
        assert same == plan and hash(same) == hash(plan)
        assert same.units["a"].trips == {"up.mm": Trip(2, 1)}


def test_only_plans_that_offload_are_of_a_later_version() -> None:
    """Older readers refuse them by their version, and read all others."""
    assert json.loads(Plan({"a": UNIT}).to_json())["version"] == 2
    document = json.loads(Plan({"a": UnitPlan({"up.mm": "keep"})}).to_json())
    assert document["version"] == 1 and not any("host" in key or "trips" in key for key in document)


def test_values_that_no_trip_names_take_the_next_edges() -> None:
    assert UnitPlan({"up.mm": "offload"}).trips == {"up.mm": Trip(1, 1)}


def test_other_moments_are_another_plan() -> None:
    later = UnitPlan(UNIT.actions, trips={"up.mm": Trip(3, 1)})
    assert digest_of({"a": UNIT}) != digest_of({"a": later})
    assert Plan({"a": UNIT}).diff(Plan({"a": later})) == "a  offload at other moments"


@pytest.mark.parametrize(
    ("trips", "message"),
    [
        (
            {"up.mm": Trip(0, 1)},
            "trip of value 'up.mm': got leaves=0, returns=1, expected returns of 0 or more, and leaves of 1",
        ),
        ({"up.mm": Trip(1, -1)}, "returns=-1, expected returns of 0 or more"),
        (
            {"up.mm": Trip(2, 2, leaves_in_backward=True)},
            "leaves=2, returns=2, leaves_in_backward=True, .* leaves of 3 or",
        ),
        ({"down.mm": Trip()}, "trip of value 'down.mm': got one, expected none, as the value is not offloaded"),
    ],
    ids=["at once", "never", "comes back first", "kept"],
)
def test_impossible_trips_say_why(trips: dict[str, Trip], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        UnitPlan(UNIT.actions, trips=trips)
    document = json.loads(Plan({"a": UNIT}).to_json())
    document["units"][0]["trips"] = {name: trip._asdict() for name, trip in trips.items()}
    with pytest.raises(PlanFormatError):
        Plan.from_json(json.dumps(document))


def test_rates_of_copies_are_above_zero() -> None:
    with pytest.raises(PlanError, match="to_host_bytes_per_s: got 0.0, expected a finite number above 0"):
        Plan({}, to_host_bytes_per_s=0.0)


class Logged:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def leave(self) -> None:
        self.log.append(f"{self.name} leaves")

    def come_back(self) -> None:
        self.log.append(f"{self.name} comes back")


def test_copies_leave_as_units_begin_and_come_back_as_backward_comes_to_them() -> None:
    log: list[str] = []
    timetable = Timetable()
    copies = {name: Logged(name, log) for name in ("a", "b", "c")}
    timetable.add(copies["a"], 0, Trip(2, 1))
    timetable.add(copies["b"], 1, Trip(5, 0))
    timetable.add(copies["c"], 1, Trip(2, 1, leaves_in_backward=True))
    for run in (1, 2):
        timetable.forward(run)
    assert log == ["a leaves"]
    timetable.backward(3)
    # There is no sixth unit: b leaves when backward begins, and so does c.
    assert log[1:] == ["b leaves", "c leaves"]
    for run in (2, 1, 0):
        timetable.backward(run)
    assert log[3:] == ["c comes back", "b comes back", "a comes back"]


def test_what_nobody_needs_neither_leaves_nor_comes_back() -> None:
    log: list[str] = []
    timetable = Timetable()
    timetable.add(Logged("a", log), 0, Trip())
    timetable.add(Logged("b", log), 0, Trip(2, 1, leaves_in_backward=True))
    timetable.forward(1)
    timetable.backward(0)
    assert log == []


def test_a_unit_that_is_compiled_offloads_nothing() -> None:
    with pytest.raises(PlanError, match="engine: got 'compile' with 'up.mm' offloaded, expected 'tape'"):
        UnitPlan({"up.mm": "offload"}, engine="compile")
