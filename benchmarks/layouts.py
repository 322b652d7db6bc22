"""Which layouts train alike under a plan, and how well their peaks are predicted: one row a layout and plan.

    python benchmarks/layouts.py                 on the fake process group: one process, exact, a minute
    python benchmarks/layouts.py --gloo          DDP, FSDP2 and TP, in two processes
    python benchmarks/layouts.py --store         adds the rows to benchmarks/results/layouts.csv

The fake group's collectives are deterministic (an all-gather repeats this rank's part), so that a single process has the
tensors, the ops and the memory of one rank. Over gloo, threads let go of what they sent a moment late, at random.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from layout_models import LAYOUTS, Layout, loss_of
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan

RESULTS = Path(__file__).parent / "results" / "layouts.csv"
OVER_GLOO = ("DDP", "FSDP2", "TP")
RANKS_OVER_GLOO = 2
PLANS = ("keep_all", "full", "budget", "random")
# The same, from a record that lets collectives run again.
REPLAYING = tuple(f"{name}, collectives replayed" for name in PLANS[1:])


@dataclass(frozen=True)
class Row:
    """One layout under one plan.

    Attributes:
        gradients: "equal" bit for bit to the same layout without a plan, or where they differ.
        collectives: of one step without the plan, by kind.
        collectives_with_plan: the same with it.
        predicted_replays: of collectives, by kind, under the plan.
    """

    layout: str
    group: str
    ranks: int
    rank: int
    plan: str
    gradients: str
    predicted_bytes: int
    measured_bytes: int
    collectives: str
    collectives_with_plan: str
    predicted_replays: str = "none"


class Collectives(TorchDispatchMode):
    """Counts collectives by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        namespace, name = func._schema.name.split("::") if hasattr(func, "_schema") else ("", "")
        if "c10d" in namespace and not name.startswith(("wait", "_wrap")):
            self.counts[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return in_words(self.counts)


def in_words(counts: Mapping[str, int]) -> str:
    """Return numbers of collectives as text."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def collectives(model: nn.Module, batch: torch.Tensor) -> str:
    """Count the collectives of one step; not of the first ones, in which DDP finds its buckets."""
    for _ in range(4):
        with Collectives() as seen:
            loss_of(model(batch)).backward()
        model.zero_grad()
    return str(seen)


def plans(profile: Profile, *, keeps_outputs: bool) -> Iterator[tuple[str, Plan]]:
    """Yield plans of each kind: nothing and everything recomputed, values at random, and a budget halfway."""
    ends = {name: recollect.classic_plan(profile, name) for name in ("keep_all", "full")}
    yield from ends.items()
    yield "budget", recollect.plan(profile, sum(plan.predicted_peak_bytes or 0 for plan in ends.values()) // 2)
    yield "random", random_plan(profile, keeps_outputs=keeps_outputs)


def random_plan(profile: Profile, *, keeps_outputs: bool, seed: int = 1) -> Plan:
    """Toss a coin for each value of each unit, and for the output of each layer but the last."""
    coin = random.Random(seed)
    units: dict[str, UnitPlan] = {}
    paths = [call.path for call in profile.calls]
    for call in profile.calls:
        values = [v for v in profile.graph_of(call).values if v.producer is not None and not v.must_keep]
        drops_output = not keeps_outputs and call.path in paths[1:-3] and coin.random() < 0.5
        units[call.path] = UnitPlan(
            {value.name: "recompute" if coin.random() < 0.5 else "keep" for value in values},
            output="recompute" if drops_output else "keep",
        )
    plan = Plan(units)
    return predicted_plan(profile, plan)


def rows(name: str, layout: Layout, wanted: Sequence[str]) -> Iterator[Row]:
    """Record a layout, and yield a row for each plan that is wanted."""
    with layout.around():
        model, batch = layout.build(), layout.batch()
        # Nothing ran before: what DTensors find out in their first step must not show.
        optimizer = torch.optim.AdamW(model.parameters())
        profile = recollect.record(model, batch, optimizer=optimizer, loss_fn=loss_of)
        plain = collectives(model, batch)
        made = [(name, plan, profile) for name, plan in plans(profile, keeps_outputs=layout.reshards)]
        if not set(REPLAYING).isdisjoint(wanted) and layout.has_functional_collectives:
            profile = recollect.record(model, batch, optimizer=optimizer, loss_fn=loss_of, collectives="replay")
            again = plans(profile, keeps_outputs=layout.reshards)
            made += [(f"{name}, collectives replayed", plan, profile) for name, plan in again]
        for plan_name, plan, profile in made:
            if plan_name not in wanted:
                continue
            report = recollect.verify(
                model, batch, plan, optimizer=optimizer, loss_fn=loss_of, compare="step", time=False
            )
            with recollect.apply(model, plan):
                with_plan = collectives(model, batch)
            yield Row(
                layout=name,
                group=dist.get_backend(),
                ranks=dist.get_world_size(),
                rank=dist.get_rank(),
                plan=plan_name,
                gradients="equal" if report.equal else f"differ at {report.first_difference}",
                predicted_bytes=plan.predicted_peak_bytes or 0,
                measured_bytes=report.plan_peak_bytes,
                collectives=plain,
                collectives_with_plan=with_plan,
                predicted_replays=in_words(replays(profile, plan)),
            )


def replays(profile: Profile, plan: Plan) -> Counter[str]:
    """Predict how many collectives of each kind run again in a step."""
    found: Counter[str] = Counter()
    for usage in recollect.layer_usage(profile, plan):
        found.update({kind: usage.num_runs * count for kind, count in usage.replayed_collectives.items()})
    return found


def on_the_fake_group(names: Iterable[str], wanted: Sequence[str], *, last_rank: bool = False) -> Iterator[Row]:
    """Yield the rows of layouts, each as its first or last rank sees it."""
    for name in names:
        layout = LAYOUTS[name]
        rank = layout.world_size - 1 if last_rank else 0
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size)
        try:
            yield from rows(name, layout, wanted)
        finally:
            dist.destroy_process_group()


def over_gloo(names: Sequence[str], wanted: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of layouts that two processes share, as the first of them sees it."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (tuple(names), tuple(wanted), folder), nprocs=RANKS_OVER_GLOO)
        for line in (Path(folder) / "rank0").read_text(encoding="utf-8").splitlines():
            yield Row(**json.loads(line))


def _rank(rank: int, names: Sequence[str], wanted: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS_OVER_GLOO)
    lines = [json.dumps(asdict(row)) for name in names for row in rows(name, LAYOUTS[name], wanted)]
    (Path(folder) / f"rank{rank}").write_text("\n".join(lines), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only this one; may be given several times")
    parser.add_argument(
        "--plan", action="append", choices=(*PLANS, *REPLAYING), help="only this one; may be given several times"
    )
    parser.add_argument("--gloo", action="store_true", help="over gloo in two processes")
    parser.add_argument("--last-rank", action="store_true", help="as the last rank sees it, not the first")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--store", action="store_true", help=f"add the rows to {RESULTS.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = options.layout or (OVER_GLOO if options.gloo else list(LAYOUTS))
    wanted = options.plan or (*PLANS, *REPLAYING)
    found = over_gloo(names, wanted) if options.gloo else on_the_fake_group(names, wanted, last_rank=options.last_rank)
    made = []
    for row in found:
        made.append(row)
        print(json.dumps(asdict(row)) if options.json else text(row), flush=True)
    if options.store:
        store(made)


def text(row: Row) -> str:
    """Return a row as a line."""
    off = row.measured_bytes - row.predicted_bytes
    same = "as without" if row.collectives == row.collectives_with_plan else row.collectives_with_plan
    return (
        f"{row.layout:22} {row.plan:9} {row.gradients:6} predicted {row.predicted_bytes:9,} measured {off:+7,}  "
        f"{row.collectives}; with plan: {same}"
    )


def store(made: Sequence[Row]) -> None:
    """Put rows into the table, in place of those of the same layouts and group."""
    columns = [field.name for field in fields(Row)]
    old: list[dict[str, Any]] = []
    if RESULTS.exists():
        with RESULTS.open(encoding="utf-8", newline="") as file:
            old = list(csv.DictReader(file))
    replaced = {(row.layout, row.group) for row in made}
    kept = [row for row in old if (row["layout"], row["group"]) not in replaced]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *(asdict(row) for row in made)])


if __name__ == "__main__":
    main(sys.argv[1:])
