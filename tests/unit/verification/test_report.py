"""The text of a report; and one report for several processes: the worst of each number, and differences with their rank."""

from dataclasses import replace

import pytest

from recollect.verification.report import Report, report_of_ranks

REPORT = Report(
    compared="step",
    gradients_equal=True,
    first_difference=None,
    num_compared=21,
    plain_peak_bytes=4 * 2**20,
    plan_peak_bytes=3 * 2**20,
    predicted_peak_bytes=4 * 2**20,
    predicted_slowdown=0.031,
    measured_slowdown=0.05,
)
OTHER = replace(
    REPORT,
    gradients_equal=False,
    first_difference=("layers.0.weight", 0.5),
    num_compared=20,
    plain_peak_bytes=5 * 2**20,
    plan_peak_bytes=4 * 2**20,
    measured_slowdown=0.02,
    first_state_difference=("buffer mean", 0.25),
    loss_chunks=2,
    unchunked_difference=("the loss", 0.125),
)


def test_the_worst_of_each_number_counts() -> None:
    report = report_of_ranks([REPORT, OTHER], [4, 6])
    assert report.by_rank == {4: REPORT, 6: OTHER} and report.rank == 6
    assert not report.equal and not report.gradients_equal
    assert report.first_difference == ("layers.0.weight in rank 6", 0.5)
    assert report.first_state_difference == ("buffer mean in rank 6", 0.25)
    assert report.unchunked_difference == ("the loss in rank 6", 0.125)
    assert (report.plan_peak_bytes, report.plain_peak_bytes) == (4 * 2**20, 5 * 2**20)
    assert (report.num_compared, report.measured_slowdown) == (20, 0.05)


def test_its_text_names_the_ranks() -> None:
    text = str(report_of_ranks([REPORT, OTHER], [4, 6]))
    assert "DIFFERENT, first at layers.0.weight in rank 6, by up to 0.5" in text
    assert text.splitlines()[-1] == (
        "ranks            2; the peaks are rank 6's, the largest; the least is rank 4's, 3.0 MiB; slowest is rank 4"
    )


def test_text_of_a_step() -> None:
    assert str(REPORT).splitlines() == [
        "gradients        equal bit for bit (21 compared)",
        "peak without     4.0 MiB",
        "peak with plan   3.0 MiB (predicted 4.0 MiB, measured 25.00% less)",
        "slowdown         5.0% (predicted 3.1%)",
    ]


@pytest.mark.parametrize(
    ("peak_bytes", "text"),
    [(4 * 2**20 - 400, "within 0.01%"), (4 * 2**20 + 400, "within 0.01%"), (5 * 2**20, "measured 25.00% more")],
)
def test_text_of_how_far_a_peak_is_from_its_prediction(peak_bytes: int, text: str) -> None:
    assert f"(predicted 4.0 MiB, {text})" in str(replace(REPORT, plan_peak_bytes=peak_bytes))


def test_text_of_units_and_of_a_plan_without_predictions() -> None:
    report = replace(
        REPORT,
        compared="units",
        plain_peak_bytes=None,
        predicted_peak_bytes=None,
        predicted_slowdown=None,
        measured_slowdown=None,
    )
    assert str(report).splitlines() == [
        "gradients        equal bit for bit (21 compared, unit by unit)",
        "peak without     did not fit",
        "peak with plan   3.0 MiB",
    ]
    assert str(replace(report, measured_slowdown=0.05)).splitlines()[-1] == "slowdown         5.0%"
