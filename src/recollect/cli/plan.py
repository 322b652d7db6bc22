"""`recollect plan`: choose the values to keep and recompute within a budget, and write the plan.

With `--largest`: find the largest and the fastest micro-batch or sequence length within the budget.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from recollect.byte_format import format_bytes
from recollect.cli.cluster import run_cluster
from recollect.cli.commands import MakePlan
from recollect.cli.common import build_model, check_folder, check_pictures, step_recorder, write_file
from recollect.errors import NotYetError
from recollect.integrations.megatron.nearest import bridge_lines, megatron_flags, nearest_settings
from recollect.integrations.torchtitan_settings import nearest_policy, torchtitan_flags
from recollect.lab.train.optimizer_step import resolve_device
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import check_host_budget
from recollect.pictures.page import write_plan_page
from recollect.pictures.png import draw_memory
from recollect.pictures.words import percent
from recollect.planning.batch_search import MAX_SIZE, LargestBatch, TriedSize, search_batches
from recollect.planning.frontier import prices
from recollect.planning.loss_chunks import plan_with_chunks
from recollect.plans.plan import Plan
from recollect.printing import columns_of, print_line
from recollect.profile.profile import Profile
from recollect.quantities import check_budget, parse_bytes
from recollect.recording.engines import check_host_engine


def run_plan(command: MakePlan, console: Console) -> None:
    if command.plan_file is not None:
        check_folder(command.plan_file, "--out")
    engine = command.step.engine
    check_host_engine(engine, command.host_budget)
    if command.cluster.is_given:
        if parse_bytes(command.host_budget):
            raise NotYetError(
                settings={"host_budget": command.host_budget},
                needs="plans that offload, for the devices of a cluster",
                advice="Plan without --host-budget; or plan one device of it, without the flags of a cluster.",
            )
        if engine != "tape":
            raise NotYetError(
                settings={"engine": engine},
                needs="what layers take on other engines, on the devices of a cluster",
                advice="Plan without --engine; or plan one device of it, without the flags of a cluster.",
            )
        run_cluster(command, console)
        return
    if command.largest is not None:
        run_largest(command, console)
        return
    check_pictures(command.png, command.html)
    step = command.step
    check_budget(command.memory_budget, device_bytes=1 if step.fake else memory_bytes(resolve_device(step.device)))
    config = None
    if command.write == "torchtitan" and step.hf_config is None:
        # Its policies count products, and its models have one for each of queries, keys, values, gate and up.
        config = step.model.dimensions(seq_length=step.seq_length).changed(separate_projections=True)
    recorder = step_recorder(step, config, host_link=bool(parse_bytes(command.host_budget)), engine=engine)
    if not step.fake:
        check_host_budget(command.host_budget)
    planned = plan_with_chunks(recorder, command.memory_budget, command.loss_chunks, command.host_budget, engine)
    plan = planned.plan
    print_line(console, plan.to_text(columns_of(console)))
    print_line(console, f"without recompute {format_bytes(planned.plain_peak_bytes)}")
    if plan.offloads:
        print_line(console, str(prices(planned.profile, plan)))
    if command.plan_file is not None:
        write_file(command.plan_file, plan.to_json() + "\n", console, flag="--out")
    if command.write is not None:
        print_line(console, _nearest(command.write, planned.profile, plan))
    if command.png is not None:
        draw_memory(planned.profile, plan, command.png)
        print_line(console, f"Memory drawn to {command.png}.")
    if command.html is not None:
        write_plan_page(planned.profile, plan, command.html)
        print_line(console, f"Page written to {command.html}.")


def _nearest(tool: Literal["megatron", "bridge", "torchtitan"], profile: Profile, plan: Plan) -> str:
    """Return the nearest settings of a different tool, and their loss, as lines."""
    if tool == "torchtitan":
        policy = nearest_policy(profile, plan)
        return f"{policy}\n{torchtitan_flags(policy.settings)}"
    found = nearest_settings(profile, plan)
    if tool == "bridge":
        return f"{found}\n{bridge_lines(found.settings)}"
    return f"{found}\n{megatron_flags(found.settings) or 'no flags'}"


_NONE = "-"
# A length of 1 leaves nothing to predict, and kernels like round lengths.
_MULTIPLES = {"micro-batch": 1, "seq-length": 64}


def run_largest(command: MakePlan, console: Console) -> None:
    """Record steps of a few sizes on fake tensors, print which fit, and write the plan of the largest."""
    check_budget(command.memory_budget, device_bytes=1)
    assert command.largest is not None
    along, loss_chunks = command.largest, command.loss_chunks
    assert loss_chunks != "auto"  # checked by the flags
    step = command.step
    name, other = ("batch_size", step.seq_length) if along == "micro-batch" else ("seq_length", step.num_sequences)

    def record(size: int) -> Profile:
        changed: dict[str, Any] = {name: size}
        return step_recorder(replace(step, fake=True, **changed))(loss_chunks)

    found = search_batches(
        record,
        command.memory_budget,
        tokens_each=other,
        multiple_of=_MULTIPLES[along] if command.multiple_of is None else command.multiple_of,
        max_size=_max_size(command),
        along=along,
    )
    console.print(answers_table(found))
    console.print(sizes_table(found))
    print_line(console, f"Forward and backward; times modelled for {found.device_name}. See docs/largest_batch.md.")
    if found.planned.size == found.limit:
        print_line(console, f"No {along} above {found.limit:,} was tried (--max-size).")
    plan = found.planned.plan
    assert plan is not None and command.plan_file is not None  # it fits by its plan, and no picture is drawn
    write_file(
        command.plan_file, plan.to_json() + "\n", console, flag="--out", note=f", for {along} {found.planned.size:,}"
    )


def answers_table(found: LargestBatch) -> Table:
    table = Table(title=f"Largest {found.along} within {format_bytes(found.budget_bytes)}", title_justify="left")
    table.add_column("")
    for name in (found.along, "peak", "slowdown", "tokens/s"):
        table.add_column(name, justify="right")
    plain, full, planned, fastest = found.without_recompute, found.full_recompute, found.planned, found.fastest
    of_full = (full.full_peak_bytes, full.full_slowdown) if full else (0, 0.0)
    rows: list[tuple[str, str, TriedSize | None, int, float]] = [
        ("without recompute", found.size_text(plain), plain, plain.plain_peak_bytes if plain else 0, 0.0),
        ("full recompute", found.size_text(full), full, *of_full),
        ("with a plan", found.size_text(planned), planned, planned.peak_bytes or 0, planned.slowdown or 0.0),
        ("most tokens/s", f"{fastest.size:,}", fastest, fastest.peak_bytes or 0, fastest.slowdown or 0.0),
    ]
    for name, size, tried, peak_bytes, slowdown in rows:
        if tried is None:
            table.add_row(name, size, _NONE, _NONE, _NONE)
            continue
        speed = f"{tried.tokens_per_s_at(slowdown):,.0f}"
        table.add_row(name, size, format_bytes(peak_bytes), percent(slowdown), speed)
    return table


def sizes_table(found: LargestBatch) -> Table:
    table = Table(title="Sizes recorded", title_justify="left")
    for name in (found.along, "tokens", "peak without recompute", "peak with a plan", "slowdown", "tokens/s"):
        table.add_column(name, justify="right")
    for row in found.tried:
        cells = [f"{row.size:,}", f"{row.num_tokens:,}", format_bytes(row.plain_peak_bytes)]
        if row.slowdown is None or row.peak_bytes is None:
            cells += [format_bytes(row.least_peak_bytes or 0), "no plan", _NONE]
        else:
            cells += [format_bytes(row.peak_bytes), percent(row.slowdown), f"{row.tokens_per_s or 0:,.0f}"]
        table.add_row(*cells, style="bold" if row in (found.planned, found.fastest) else "")
    return table


def _max_size(command: MakePlan) -> int:
    """Return the largest size to try, by default as many positions as the model has: fake tensors would not notice more."""
    if command.max_size is not None:
        return command.max_size
    if command.largest != "seq-length":
        return MAX_SIZE
    flags = command.step
    config: Any = build_model(flags, torch.device("meta"))[0].config
    if flags.hf_config is not None:
        return getattr(config, "max_position_embeddings", None) or MAX_SIZE
    # A model of Megatron's flags gets as many positions as tokens.
    is_fixed = config.position_embedding_type == "learned_absolute" and not flags.model.is_megatrons
    return config.max_position_embeddings if is_fixed else MAX_SIZE
