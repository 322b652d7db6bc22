"""One report for several processes: the worst of each number, and differences with their rank."""

from recollect.verification.report import Report, report_of_ranks

FIRST = Report(
    compared="step",
    gradients_equal=True,
    first_difference=None,
    num_compared=7,
    plain_peak_bytes=3000,
    plan_peak_bytes=2000,
    predicted_peak_bytes=2000,
    predicted_slowdown=0.1,
    measured_slowdown=0.3,
)
SECOND = Report(
    compared="step",
    gradients_equal=False,
    first_difference=("layers.0.weight", 0.5),
    num_compared=6,
    plain_peak_bytes=4000,
    plan_peak_bytes=2500,
    predicted_peak_bytes=2500,
    predicted_slowdown=0.1,
    measured_slowdown=0.2,
    first_state_difference=("buffer mean", 0.25),
    loss_chunks=2,
    unchunked_difference=("the loss", 0.125),
)


def test_the_worst_of_each_number_counts() -> None:
    report = report_of_ranks([FIRST, SECOND], [4, 6])
    assert report.by_rank == {4: FIRST, 6: SECOND} and report.rank == 6
    assert not report.equal and not report.gradients_equal
    assert report.first_difference == ("layers.0.weight in rank 6", 0.5)
    assert report.first_state_difference == ("buffer mean in rank 6", 0.25)
    assert report.unchunked_difference == ("the loss in rank 6", 0.125)
    assert (report.plan_peak_bytes, report.plain_peak_bytes) == (2500, 4000)
    assert (report.num_compared, report.measured_slowdown) == (6, 0.3)


def test_its_text_names_the_ranks() -> None:
    text = str(report_of_ranks([FIRST, SECOND], [4, 6]))
    assert "DIFFERENT, first at layers.0.weight in rank 6, by up to 0.5" in text
    assert text.splitlines()[-1] == (
        "ranks            2; the peaks are rank 6's, the largest; the least is rank 4's, 2.0 KiB; slowest is rank 4"
    )
