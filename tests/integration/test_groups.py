"""Two processes that train a model together: the same steps recorded, one plan, and the same error in both, never a hang."""

import re
from pathlib import Path

import pytest
import torch

from asked_cases import AskedCases
from rank_processes import rank_cases
from tiers import long

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


# What the cases of `group_programs.py` give in the two processes.
cases = rank_cases(ROOT / "tests/support/group_programs.py", 2)


@pytest.mark.parametrize("name", ["DDP", "replicate", *long(["FSDP2"]), "FSDP2, graph", "TP and SP"])
def test_one_line_has_both_run_one_plan_and_train_as_before(name: str, cases: AskedCases) -> None:
    first, second = cases[name]
    assert first["equal"] and second["equal"]
    assert first["recorded"] == second["recorded"] == [0, 2]
    assert first["plans"] == second["plans"] and first["current"] == second["current"]


@pytest.mark.parametrize(
    ("name", "num_kinds"),
    [
        ("FSDP2 around traces", 2),
        pytest.param("FSDP2 around more traces", 2, marks=pytest.mark.long),
        ("FSDP2 around compiled code", 1),
        pytest.param("FSDP2 around more compiled code", 2, marks=pytest.mark.long),
    ],
)
def test_units_find_the_parameters_that_fsdp2_gathers(name: str, num_kinds: int, cases: AskedCases) -> None:
    for row in cases[name]:
        del row["case"]
        assert re.search(r"saved for backward in blocks\.1, has no memory now", row.pop("not gathered")), row
        assert set(map(str, row.values())) == {str([True, 2, ["", ""]])}, row
        assert len(row) == 2 * num_kinds


@pytest.mark.long
@pytest.mark.parametrize("name", ["DDP, compile", "FSDP2, compile"])
def test_layers_are_measured_inside_the_compiler_in_both(name: str, cases: AskedCases) -> None:
    first, second = cases[name]
    assert first["recorded"] == second["recorded"] == [0]
    assert first["plans"] == second["plans"] and "compile" in first["engines"]
    # Compiled code sums in another order; AdamW makes at most a learning rate of a gradient whose sign that turns.
    assert all(row["close"] and row["alike"] for row in (first, second))


def test_collectives_run_again_where_all_run_one_plan(cases: AskedCases) -> None:
    first, second = cases["TP and SP"]
    assert first["collectives_again"] == second["collectives_again"] > 0


def test_both_record_a_pair_of_calls_that_is_longer_in_one(cases: AskedCases) -> None:
    first, second = cases["pairs"]
    assert first["recorded"] == second["recorded"] == [0, 1, 3]
    assert first["plans"][-1] == second["plans"][-1]


def test_they_ask_in_few_steps_where_nothing_is_new(cases: AskedCases) -> None:
    first, second = cases["steady"]
    assert first["equal"] and second["equal"]
    # After two steps that ask, none until the sixth, by when one has had a longer batch. None later is as long.
    assert first["asked"] == second["asked"]
    assert [number for number, asked in enumerate(first["asked"]) if asked] == [0, 1, 2, 6, 7, 8]
    assert first["recorded"] == second["recorded"] == [0, 6]
    assert first["current"] == second["current"]


def test_both_record_when_one_comes_to_hold_more(cases: AskedCases) -> None:
    first, second = cases["grown"]
    assert first["equal"] and second["equal"] and not first["warned"]
    assert second["warned"][0].startswith("recollect: 4.0 MiB more are held beside a step than when it was planned")
    # The step that finds it runs at its leanest in that process, and so do those up to the next one that asks.
    assert first["recorded"] == second["recorded"] == [0, 6]


@pytest.mark.parametrize(("name", "compared"), [("verify", "step"), ("verify where one does not fit", "units")])
def test_verify_gives_one_report_for_all_ranks(name: str, compared: str, cases: AskedCases) -> None:
    first, second = cases[name]
    assert first == second, "times are of both, too"
    assert first["equal"] and first["compared"] == compared
    assert first["rank"] == 1 and first["peaks"]["1"] > first["peaks"]["0"]
    assert re.search(
        r"^ranks +2; the peaks are rank 1's, the largest; the least is rank 0's, \d", first["report"], re.M
    )
    assert ("did not fit" in first["report"]) == (compared == "units")


def test_a_rank_may_verify_for_itself(cases: AskedCases) -> None:
    for row in cases["verify alone"]:
        assert row["equal"] and row["rank"] is None and "ranks" not in row["report"]


def test_fit_makes_one_plan_of_common_times(cases: AskedCases) -> None:
    first, second = cases["fit"]
    assert first["plan"] == second["plan"]
    assert len(first["times"]) > 10 and first["times"] == second["times"]


def test_one_process_may_plan_alone(cases: AskedCases) -> None:
    assert len(cases["alone"][0]["plans"]) == 1


def test_apply_compares_plans_in_a_group(cases: AskedCases) -> None:
    assert [row["applied"] for row in cases["apply the same"]] == [1, 1]


ERRORS = {
    "apply others": r"PlanError: .* different ones \(\w{8} in rank 0, \w{8} in rank 1\), expected one plan\. Let one",
    "verify others": r"PlanError: .* different ones \(\w{8} in rank 0, \w{8} in rank 1\), expected one plan\. Let one",
    "budgets": r"ConfigError: got budget in rank 0='80%', budget in rank 1='90%': two values of budget in one group.* Pass",
    "bad budget": r"QuantityError: 'much'",
    "too small": r"BudgetTooSmallError: .*after the first step: 1 B .* DDP's communication buckets .* 144.6 KiB",
    "models": r"RecordError: .* different models: GPTModel with 21 .* rank 0, .* 15 .* rank 1; only rank 0 has decoder.*Build",
    "larger": r"LargerStepError: a step of 2 x 40 is not covered by the plan, which was made for 2 x 24\.",
    "cannot record": r"RecordError: rank 1 of 2 failed, so none continues: ValueError: nothing fits here",
    "fewer calls": r"RecordError: rank 0 ended a step .*, rank 1 called the model once more .* equally often .* Pass group=",
    "raises once": r"RecordError: rank 0 called the model once more in a step, rank 1 began a step: .* Pass group=",
    "without backward": r"RecordError: .* in which no backward ran",
    "uneven": r"RecordError: .* runs in join\(\).* Have as many batches in each; or pass group=\"alone\"",
    "verify units that are sharded": r"NotYetError: got compare='units': not yet: .* FSDP2 .* Verify a step that fits",
    "capture": r"NotYetError: got recollect\.capture='DistributedDataParallel', processes=2: not yet: graphs with collectives",
    "captured training": r"NotYetError: got --cuda-graph-impl='full_iteration', processes=2: not yet: graphs with collectives",
    "no group": r"ArgumentError: .* got 'everyone' as group: expected a process group, a device mesh, or 'alone'\. Leave",
}


@pytest.mark.parametrize("name", ERRORS)
def test_both_fail_alike(name: str, cases: AskedCases) -> None:
    first, second = cases[name]
    assert re.search(ERRORS[name], first["error"]), first["error"]
    assert first["error"] == second["error"]


def test_fsdp1_trains_as_before(cases: AskedCases) -> None:
    """After the others, as it leaves parameters in memory; those of wrappers inside layers come and go."""
    first, second = cases["FSDP1"]
    assert first["equal"] and second["equal"]
    assert first["plans"] == second["plans"] and first["recorded"] == second["recorded"] == [0, 2]


def test_who_does_not_call_is_named(cases: AskedCases) -> None:
    first, second = cases["not all call"]
    assert "attach(model, optimizer, budget): rank 1 of 2 did not call it within 2 s" in first["error"]
    assert "error" not in second


def test_the_end_of_a_process_ends_the_other(cases: AskedCases) -> None:
    (first,) = cases.last("ends")
    assert re.search(
        r"RecordError: a process that began a step got no answer from the others of ranks 0 and 1", first["error"]
    )
