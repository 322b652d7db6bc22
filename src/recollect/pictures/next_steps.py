"""Say what a plan on the frontier's page is called, what its name means, and what to do to train with it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recollect.byte_format import least_amount
from recollect.planning.frontier import Frontier, FrontierPoint

__all__ = ["CATEGORY_MEANINGS", "meaning_of", "name_points", "next_steps", "slug_of"]

CATEGORY_MEANINGS = {
    "parameters": "the weights; there before the step",
    "optimizer state": "such as the moments of AdamW; there before the step",
    "buffers and batch": "what the model holds besides weights, and the input; there before the step",
    "other allocations": "what else the allocator counts, such as library workspaces and other models",
    "gradients": "of the parameters: what backward leaves behind, or found there (accumulation)",
    "kept values": "made in forward by the units (mostly layers), for backward",
    "outside of the units": "made in forward between the units, such as by the loss",
    "recomputed values": "dropped in forward, made again for backward",
    "passing values": "die in the phase that made them, such as gradients on their way",
    "working memory": "an op's workspace while it runs",
    "calibration": "measured peak of the recorded step minus its simulated one",
}


def name_points(frontier: Frontier) -> list[str]:
    """Return a name for each of the frontier's points: "plan 1", the leanest, "plan 2", ..., and "keep all"."""
    return [
        "keep all" if _keeps_all(point) else point.name or f"plan {number}"
        for number, point in enumerate(frontier.points, start=1)
    ]


def slug_of(name: str) -> str:
    """Return a name as it stands in the page's address.

    Example:
        >>> slug_of("sqrt, every 6")
        'sqrt-every-6'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def meaning_of(name: str, point: FrontierPoint) -> str:
    """Say what a plan's name means.

    Args:
        name: as `name_points` gave it, or the point's own.
        point: the plan.
    """
    note = point.plan.note
    if _keeps_all(point):
        return "keeps everything for backward and recomputes nothing"
    if name.startswith("plan "):
        return "the fastest plan that recollect found within this peak"
    if note == "full":
        return "keeps the input of each layer and recomputes the rest of it"
    if note.startswith("sqrt"):
        return f"keeps the input of every {_stride(note)}th layer: the square root of the number of layers, rounded"
    return f"keeps the input of every {_stride(note)}th layer".replace("2th", "2nd").replace("3th", "3rd")


def next_steps(point: FrontierPoint, step_flags: Sequence[str]) -> tuple[str, str]:
    """Return the command that writes this plan, "" if there is none, and the code that trains with it.

    Args:
        point: the plan.
        step_flags: flags of `recollect plan` that describe the recorded step; none: it was recorded in Python.
    """
    note = point.plan.note
    amount = least_amount(point.peak_bytes)
    if _keeps_all(point):
        return "", "# Nothing to do: train as you do now.\n"
    if note == "full":
        return "", 'plan = recollect.classic_plan(profile, "full")\nrecollect.apply(model, plan)\n'
    if stride := _stride(note):
        return "", f'plan = recollect.classic_plan(profile, "every_nth", n={stride})\nrecollect.apply(model, plan)\n'
    command = " ".join(["recollect plan", *step_flags, f"--memory-budget {amount} --out plan.json"])
    return command if step_flags else "", f'attached = recollect.attach(model, optimizer, budget="{amount}")\n'


def _stride(note: str) -> int:
    found = re.search(r"every (\d+)$", note)
    return int(found[1]) if found else 0


def _keeps_all(point: FrontierPoint) -> bool:
    return point.slowdown == 0 and not any(unit.recomputes_anything for unit in point.plan.units.values())
