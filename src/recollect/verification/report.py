"""The findings of `verify`, in one process or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from recollect.byte_format import format_bytes
from recollect.engine.offload.flight import HostUse
from recollect.notebooks import ShownInNotebooks
from recollect.quantities import format_seconds
from recollect.verification.compare import Difference
from recollect.weak_map import WeakMap

# If rounds differ by more than this part of a step, their median says nothing.
_NOISY_SPREAD = 0.5
SLOWDOWNS = WeakMap[str]()
"""The measured slowdowns of plans, as text, for later reports."""
# A measured peak that is more than this part above the predicted one needs a reason.
_MUCH_MORE = 0.01


@dataclass(frozen=True, kw_only=True)
class Report(ShownInNotebooks):
    """The findings of `verify`.

    Attributes:
        compared: "step" if the whole step ran with and without the plan; "units" if the plain step does not fit, and each unit
            was compared on its own, on its inputs in the step.
        gradients_equal: every gradient has the same bits with and without the plan, and so has the loss. If the plan chunks
            the loss, "without the plan" means with the same chunks but without recompute.
        first_difference: name of the first parameter (or unit, or "the loss") that differs, and the largest absolute
            difference; None if there is none.
        first_state_difference: the same for other state that the step leaves behind: "buffer layers.0.running_mean", or
            "random generator".
        plain_difference: the same between two steps (or two runs of that unit) without the plan, if they differ. Kernels are
            not deterministic then, and the plan need not be the cause of a difference.
        num_compared: number of gradients compared.
        plain_peak_bytes, plan_peak_bytes: measured peaks of forward and backward, including parameters, buffers, batch and
            optimizer state; None if the plain step did not run.
        plan_reserved_bytes, plan_fragmentation_bytes: on CUDA, the most bytes that the caching allocator held in the step
            with the plan, and how many of them were unused; the prediction excludes them. None on the CPU.
        predicted_peak_bytes, predicted_slowdown: the plan's predictions.
        measured_slowdown: median of the ratio of times with the plan and without recompute (both with the plan's loss chunks,
            as in the prediction), minus one; runs alternate. None if it was not asked for.
        slowdowns: the slowdown of each round; their spread shows how certain the median is.
        loss_chunks: parts of the plan's loss; with more than one, sums have a different order than the model's.
        unchunked_difference: the gradient (or "the loss") furthest from that of the unchunked model, and its distance: the norm
            of the difference over the norm; None with one chunk, or if the plain step did not run.
        eager_difference: of a plan with compiled units, whose gradients are compared with those of the same units compiled
            without a plan: the gradient (or "the loss") furthest from that of the model without `torch.compile`, and its
            distance, as above.
        eager_tolerance: the distance to expect, since fused code rounds in other places: the square root of
            the precision of the least precise parameter.
        host: the cost of offloaded values in a step: host memory, seconds of waiting for copies, and values that were asked for
            at a different moment than planned; None if there are none, or units ran by themselves, without edges.
        predicted_host_bytes: the plan's prediction of that memory.
        left_gradients_bytes: gradients that your own step leaves in memory for its next run.
        rank: in a group of processes, the one whose peaks these are, since its peak under the plan is the largest. The slowdown
            is that of the slowest, and differences are those of the first that has some, which they name. None without a group.
        by_rank: in a group, the findings of each process, by its rank; the same in all of them. Empty without a group.
    """

    compared: Literal["step", "units"]
    gradients_equal: bool
    first_difference: tuple[str, float] | None
    num_compared: int
    plan_peak_bytes: int
    predicted_peak_bytes: int | None
    predicted_slowdown: float | None
    plain_peak_bytes: int | None = None
    measured_slowdown: float | None = None
    slowdowns: tuple[float, ...] = ()
    loss_chunks: int = 1
    unchunked_difference: tuple[str, float] | None = None
    eager_difference: tuple[str, float] | None = None
    eager_tolerance: float = 0.0
    plan_reserved_bytes: int | None = None
    plan_fragmentation_bytes: int | None = None
    plain_difference: tuple[str, float] | None = None
    first_state_difference: tuple[str, float] | None = None
    host: HostUse | None = None
    predicted_host_bytes: int | None = None
    left_gradients_bytes: int = 0
    rank: int | None = None
    by_rank: Mapping[int, Report] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether gradients, loss, buffers and random generators all have the same bits with and without the plan."""
        return self.gradients_equal and self.first_state_difference is None

    def __str__(self) -> str:
        return "\n".join(f"{label:<16} {text}" for label, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return the findings in words, each with its label."""
        equal = (
            f"equal bit for bit ({self.num_compared} compared{', unit by unit' if self.compared == 'units' else ''})"
        )
        rows = [("gradients", _differs(self.first_difference) or equal)]
        if self.first_state_difference is not None:
            rows.append(("left behind", _differs(self.first_state_difference)))
        if self.plain_difference is not None:
            name, difference = self.plain_difference
            rows += [
                ("", f"two runs without the plan differ, too, first at {name}, by up to {difference:.3g}:"),
                ("", "kernels are not deterministic; try torch.use_deterministic_algorithms(True)"),
            ]
        if self.unchunked_difference is not None:
            name, difference = self.unchunked_difference
            rows.append(("loss", f"in {self.loss_chunks} chunks: off by {difference:.1e} at most, at {name}"))
        if self.eager_difference is not None:
            name, difference = self.eager_difference
            limit = f"up to {self.eager_tolerance:.0e} is rounding"
            rows.append(("against eager", f"off by {difference:.1e} at most, at {name} ({limit})"))
        plain = "did not fit" if self.plain_peak_bytes is None else format_bytes(self.plain_peak_bytes)
        rows.append(("peak without", plain))
        rows.append(("peak with plan", f"{format_bytes(self.plan_peak_bytes)}{self._compared_peak()}"))
        more_bytes = self.plan_peak_bytes - (self.predicted_peak_bytes or self.plan_peak_bytes)
        if _MUCH_MORE * self.plan_peak_bytes < more_bytes <= self.left_gradients_bytes:
            left = format_bytes(self.left_gradients_bytes)
            rows += [
                ("", f"the step begins with gradients of its last run ({left}), and was recorded without:"),
                ("", "have it begin with zero_grad(), or record it again now, with them"),
            ]
        if self.plan_reserved_bytes is not None and self.plan_fragmentation_bytes is not None:
            fragmentation = format_bytes(self.plan_fragmentation_bytes)
            rows.append(("reserved", f"{format_bytes(self.plan_reserved_bytes)} ({fragmentation} fragmentation)"))
        if self.host is not None:
            rows.append(("host memory", f"{format_bytes(self.host.most_bytes)}{self._compared_host(self.host)}"))
        if self.measured_slowdown is not None:
            rows.append(("slowdown", self.slowdown_text()))
        if self.rank is not None:
            rows.append(("ranks", self._compared_ranks()))
        return rows

    def _compared_peak(self) -> str:
        if self.predicted_peak_bytes is None:
            return ""
        off = self.plan_peak_bytes / self.predicted_peak_bytes - 1
        measured = "within 0.01%" if abs(off) < 1e-4 else f"measured {abs(off):.2%} {'less' if off < 0 else 'more'}"
        return f" (predicted {format_bytes(self.predicted_peak_bytes)}, {measured})"

    def slowdown_text(self) -> str:
        """Return the measured slowdown in words, with the rounds and the prediction."""
        found = []
        if self.slowdowns:
            low, high = min(self.slowdowns), max(self.slowdowns)
            noisy = ": times too noisy to judge it by" if high - low > _NOISY_SPREAD else ""
            found.append(f"{low:.1%} to {high:.1%} in {len(self.slowdowns)} rounds{noisy}")
        if self.predicted_slowdown is not None:
            found.append(f"predicted {self.predicted_slowdown:.1%}")
        return f"{self.measured_slowdown or 0:.1%}" + (f" ({', '.join(found)})" if found else "")

    def _compared_host(self, host: HostUse) -> str:
        found = [] if self.predicted_host_bytes is None else [f"predicted {format_bytes(self.predicted_host_bytes)}"]
        found += [f"waited {format_seconds(host.stalled_s)}", f"{host.num_missed} values asked for out of time"]
        if host.num_stayed:
            found.append(f"{host.num_stayed} found no room")
        return f" ({', '.join(found)})"

    def _compared_ranks(self) -> str:
        lean = min(self.by_rank, key=lambda rank: self.by_rank[rank].plan_peak_bytes)
        lean_peak = format_bytes(self.by_rank[lean].plan_peak_bytes)
        text = f"{len(self.by_rank)}; the peaks are rank {self.rank}'s, the largest; the least is rank {lean}'s, {lean_peak}"
        slowdowns = {
            rank: its.measured_slowdown for rank, its in self.by_rank.items() if its.measured_slowdown is not None
        }
        return f"{text}; slowest is rank {max(slowdowns, key=slowdowns.__getitem__)}" if slowdowns else text


def _differs(difference: Difference | None) -> str:
    return "" if difference is None else f"DIFFERENT, first at {difference[0]}, by up to {difference[1]:.3g}"


def report_of_ranks(reports: Sequence[Report], ranks: Sequence[int]) -> Report:
    """Return one report for processes that verified together: of each number the worst, and differences with their rank."""
    by_rank = dict(zip(ranks, reports, strict=True))

    def in_ranks(name: str) -> list[Difference]:
        found = {number: getattr(its, name) for number, its in by_rank.items()}
        return [(f"{its[0]} in rank {number}", its[1]) for number, its in found.items() if its is not None]

    rank = max(by_rank, key=lambda number: by_rank[number].plan_peak_bytes)
    slowest = max(reports, key=lambda report: report.measured_slowdown or -1.0)
    return replace(
        by_rank[rank],
        gradients_equal=all(report.gradients_equal for report in reports),
        first_difference=next(iter(in_ranks("first_difference")), None),
        first_state_difference=next(iter(in_ranks("first_state_difference")), None),
        plain_difference=next(iter(in_ranks("plain_difference")), None),
        unchunked_difference=max(in_ranks("unchunked_difference"), key=lambda found: found[1], default=None),
        num_compared=min(report.num_compared for report in reports),
        measured_slowdown=slowest.measured_slowdown,
        slowdowns=slowest.slowdowns,
        rank=rank,
        by_rank=by_rank,
    )
