"""What two processes of one group run in `test_groups.py`, as a program that serves cases.

python group_programs.py RANK FOLDER
"""

import contextlib
import functools
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import recollect
from blocks import Stack, built
from case_server import join, serve
from recollect.attaching import lockstep, missed
from recollect.attaching.planned_step import PlannedStep
from recollect.engine.compiled.compiled_engine import CompiledForward, compile_forward
from recollect.engine.content import has_same_bits
from recollect.engine.graph.graph_engine import GraphForward
from recollect.errors import BudgetWarning, FreedValueError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.lab.train.config import StepFlags, TrainConfig
from recollect.lab.train.processes import Processes
from recollect.planning.compiled_menu import compiled_menu
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan, digest_of
from recollect.plans.value_names import collective_kind
from recollect.ranks import group as group_module
from recollect.ranks.group import Group
from recollect.recording import engines
from recollect.recording.step_recording import StepRecording
from recollect.verification import verify as verify_module

RANK = int(sys.argv[1])
BUDGET = "85%"


def model(num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return GPTModel(llama_config(num_layers=num_layers, hidden_size=32, num_attention_heads=2, vocab_size=64))


def replicated() -> nn.Module:
    return DistributedDataParallel(model(), gradient_as_bucket_view=True)


def composed() -> nn.Module:
    return replicate(model(), gradient_as_bucket_view=True)


def sharded() -> nn.Module:
    made = model()
    for layer in made.decoder.layers:
        fully_shard(layer)
    return fully_shard(made)


def wrapped() -> nn.Module:
    """By FSDP1: layers, and each matrix in them, whose parameters come and go within the layer."""
    made = model()
    kinds = {type(made.decoder.layers[0]), nn.Linear}
    return FullyShardedDataParallel(made, auto_wrap_policy=ModuleWrapPolicy(kinds), device_id=torch.device("cpu"))


def split() -> nn.Module:
    return tensor_parallel(model(num_layers=3), init_device_mesh("cpu", (2,)), sequence_parallel=True)


def train(
    made: nn.Module,
    *lengths: int,
    calls: int = 1,
    budget: Any = BUDGET,
    seed: int = RANK,
    asked: Sequence[int] = (),
    grows_after: int = -1,
    **options: Any,
) -> dict[str, Any]:
    """Train for some steps; `lengths` are of the batches, `asked` grows with each question to the other process.

    After the step `grows_after` the second process holds 4 MiB more.
    """
    asked_before, held = [], []
    optimizer = torch.optim.AdamW(made.parameters())
    attached = recollect.attach(made, optimizer, budget, log=lambda line: None, **options)
    torch.manual_seed(seed)
    with attached:
        for number, length in enumerate(lengths):
            asked_before.append(len(asked))
            for _ in range(calls):
                tokens = torch.randint(0, 64, (2, length))
                made(tokens=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            held += [torch.zeros(1 << 20)] * (number == grows_after and RANK == 1)
        plans = [digest_of(step.plan.units) for step in attached.planned]
        return {
            "plans": plans,
            "engines": sorted({str(unit.engine) for step in attached.planned for unit in step.plan.units.values()}),
            "recorded": attached.recorded_steps,
            "asked": [after - before for before, after in itertools.pairwise([*asked_before, len(asked)])],
            "current": digest_of(attached.plan.units if attached.plan else {}),
            "collectives_again": sum(map(_collectives_again, attached.planned)),
        }


def _collectives_again(step: PlannedStep) -> int:
    return sum(
        action is Action.RECOMPUTE and bool(collective_kind(name))
        for unit in step.plan.units.values()
        for name, action in unit.actions.items()
    )


def same_training(
    build: Callable[[], nn.Module],
    # The longer batch comes to both in the same step.
    lengths: Sequence[int] = (24, 24, 32, 24),
    *,
    seed: int = RANK,
    records_first: bool = False,
    **options: Any,
) -> dict[str, Any]:
    plain, planned = build(), build()
    if records_first:
        tokens = torch.zeros(2, 24, dtype=torch.int64)
        for is_fake in (True, False):
            recollect.record(planned, {"tokens": tokens, "labels": tokens}, fake=is_fake)
    train_alike(plain, lengths, seed)
    found = train(planned, *lengths, seed=seed, **options)
    pairs = zip(plain.parameters(), planned.parameters(), strict=True)
    return {**found, "equal": all(has_same_bits(_local(a), _local(b)) for a, b in pairs)}


def compiled_training(build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Layers are measured inside the compiler, for two sets of values, and run there from the second step on."""
    own = engines.with_variants
    engines.with_variants = functools.partial(own, menu=lambda graph: compiled_menu(graph)[:1])  # type: ignore[assignment]
    plain, planned = build(), build()
    train_alike(plain, (24, 24, 24))
    try:
        found = train(planned, 24, 24, 24, budget="95%", engine="compile")
    finally:
        engines.with_variants = own
    close = [
        torch.allclose(_local(a), _local(b), rtol=1e-4, atol=1e-5)
        for a, b in zip(plain.parameters(), planned.parameters(), strict=True)
    ]
    checksums: list[Any] = [None, None]
    whole = (getattr(one, "full_tensor", lambda one=one: one)() for one in planned.parameters())
    dist.all_gather_object(checksums, [one.detach().double().sum().item() for one in whole])
    return {**found, "close": all(close), "alike": checksums[0] == checksums[1]}


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARDED: dict[str, dict[str, Any]] = {
    "default": {},
    "freed": {"reshard_after_forward": True},
    "staying": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
}


def sharded_blocks(made: nn.Module, **settings: Any) -> nn.Module:
    for block in made.blocks:
        fully_shard(block, **settings)
    return fully_shard(made, **settings)


def two_blocks() -> Stack:
    return built(lambda: Stack(depth=2))


def sharded_units(engine: str, *kinds: str) -> dict[str, Any]:
    """Whether layers that FSDP2 shards before or after the plan is applied have the gradients that they have without one."""
    data = torch.randn(8, 16)
    profile = recollect.record(two_blocks(), data, loss_fn=torch.sum, fake=True)
    plan = halved(recollect.classic_plan(profile, "full"), engine)

    def gradients(made: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            made.zero_grad()
            made(data).float().square().sum().backward()
            found += [_local(parameter.grad) for parameter in made.parameters()]
        return found

    found: dict[str, Any] = {}
    for kind in kinds:
        plain = sharded_blocks(two_blocks(), **SHARDED[kind])
        for block in plain.blocks if engine == "compile" else ():
            vars(block)["forward"] = compile_forward(block.forward, None)
        expected = gradients(plain)
        for order in ("before", "after"):
            made = two_blocks() if order == "after" else sharded_blocks(two_blocks(), **SHARDED[kind])
            with recollect.apply(made, plan) as applied:
                if order == "after":
                    for block in made.blocks if engine == "compile" else ():  # type: ignore[union-attr]
                        block.compile(fullgraph=True)  # as torchtitan does, and before it shards
                    sharded_blocks(made, **SHARDED[kind])
                got = gradients(made)
                own = [one for one in applied._forwards if isinstance(one, (GraphForward, CompiledForward))]
            is_equal = all(map(has_same_bits, expected, got))
            found[f"{kind} {order}"] = [is_equal, len(own), [getattr(one, "why_not", "") for one in own]]
    # Of a kind whose code is there.
    made = sharded_blocks(two_blocks(), **SHARDED[kinds[-1]])
    with recollect.apply(made, plan):
        gradients(made)
        made.blocks[1].set_unshard_in_backward(False)
        try:
            gradients(made)
        except FreedValueError as error:
            found["not gathered"] = str(error)
    return found


def halved(plan: Plan, engine: str) -> Plan:
    """Return a plan that keeps every second value of the given one, on an engine."""
    units = {}
    for path, unit in plan.units.items():
        actions = {name: ("keep", "recompute")[index % 2] for index, name in enumerate(unit.actions)}
        units[path] = UnitPlan(actions, engine=engine)  # type: ignore[arg-type]
    return Plan(units)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


def fitted(made: nn.Module) -> dict[str, Any]:
    torch.manual_seed(RANK)
    tokens = torch.randint(0, 64, (2, 24))
    profile = recollect.record(made, {"tokens": tokens, "labels": tokens})
    plan = recollect.fit(made, {"tokens": tokens, "labels": tokens}, "85%")
    # The times of both are the same now, to the bit.
    return {
        "plan": digest_of(plan.units),
        "times": [profile.step_s, *(op.time_s for graph in profile.graphs for op in graph.ops)],
    }


def alone() -> dict[str, Any]:
    """Only the first process plans."""
    if RANK == 0:
        return train(replicated(), 24, 24, group="alone")
    train_alike(replicated(), (24, 24))
    return {}


def applied(same: bool) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (2, 24))
    profile = recollect.record(model(), {"tokens": tokens, "labels": tokens}, fake=True)
    plan = recollect.classic_plan(profile, "full" if same or RANK == 0 else "keep_all")
    made = model()
    mesh = init_device_mesh("cpu", (2,))
    try:
        recollect.apply(made, plan, group=mesh)
    finally:
        number = len(recollect.applied_to(made))
    return {"applied": number}


def cannot_record() -> dict[str, Any]:
    own = StepRecording.profile
    if RANK == 1:
        StepRecording.profile = _fail  # type: ignore[method-assign]
    try:
        return train(replicated(), 24)
    finally:
        StepRecording.profile = own  # type: ignore[method-assign]


def _fail(*_: Any, **__: Any) -> Any:
    raise ValueError("nothing fits here")


def fewer_calls() -> dict[str, Any]:
    made = model()
    return train(made, 24, 24, 24, calls=1 + RANK, group=dist.group.WORLD)


def raises_once() -> dict[str, Any]:
    """The first call raises in one process, whose loop goes on, as does that of the other."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    with recollect.attach(made, optimizer, BUDGET, group=dist.group.WORLD):
        for tokens in (
            torch.zeros(2, 24, dtype=torch.int64) if RANK == 0 else None,
            torch.zeros(2, 24, dtype=torch.int64),
        ):
            with contextlib.suppress(TypeError):
                made(tokens=tokens, labels=tokens).loss.backward()
    return {}


def without_backward() -> dict[str, Any]:
    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    with recollect.attach(made, optimizer, BUDGET, group=dist.group.WORLD):
        for _ in range(3):
            tokens = torch.randint(0, 64, (2, 24))
            loss = made(tokens=tokens, labels=tokens).loss
            if RANK == 0:
                loss.backward()
            optimizer.step()
    return {}


def steady() -> dict[str, Any]:
    """Twelve steps, of which one process has a longer batch in one, at a time at which they do not ask."""
    asked: list[int] = []
    own = Group.all_of
    Group.all_of = lambda group, flags, place: (asked.append(1), own(group, flags, place))[1]  # type: ignore[method-assign]
    try:
        return same_training(replicated, [24] * 4 + [24 + 8 * RANK] + [24] * 7, asked=asked)
    finally:
        Group.all_of = own  # type: ignore[method-assign]


def grown() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = same_training(replicated, [24] * 8, grows_after=1)
    return {**found, "warned": [str(one.message) for one in caught if one.category is BudgetWarning]}


def pairs() -> dict[str, Any]:
    """Two calls wait for backward together; from the third step on, the second one is as long as the first in one process."""
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    # What fits without recompute has the least, however long ops take on a busy machine.
    attached = recollect.attach(made, optimizer, "100%", group=dist.group.WORLD, log=lambda line: None)
    for lengths in ((16, 16), (32, 32), *[(16, 16 + 16 * RANK)] * 3):
        batches = [torch.randint(0, 64, (2, length)) for length in lengths]
        losses = [made(tokens=tokens, labels=tokens).loss for tokens in batches]
        sum(losses).backward()
        del losses
        optimizer.step()
        optimizer.zero_grad()
    return {"recorded": attached.recorded_steps, "plans": [digest_of(step.plan.units) for step in attached.planned]}


def train_alike(made: nn.Module, lengths: Sequence[int], seed: int = RANK) -> None:
    """The loop of `train` without a budget."""
    optimizer = torch.optim.AdamW(made.parameters())
    torch.manual_seed(seed)
    for length in lengths:
        tokens = torch.randint(0, 64, (2, length))
        made(tokens=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def verified(made: nn.Module, fits: bool = True, same: bool = True, **options: Any) -> dict[str, Any]:
    """Both verify one plan, on batches of their own; the second has the longer one, by more than gloo may free late."""
    tokens = torch.randint(0, 64, (2, 24 + 40 * RANK))
    batch = {"tokens": tokens, "labels": tokens}
    plans = [recollect.plan(recollect.record(made, batch), "90%")]
    if same:
        # Each has planned for its own batch.
        dist.broadcast_object_list(plans, src=1)
    elif RANK == 0:
        plans = [recollect.Plan({})]
    own = verify_module.memory_bytes
    if not fits:
        verify_module.memory_bytes = lambda device: RANK  # type: ignore[assignment]
    try:
        report = recollect.verify(made, batch, plans[0], **options)
    finally:
        verify_module.memory_bytes = own
    peaks = {rank: its.plan_peak_bytes for rank, its in report.by_rank.items()}
    return {
        "report": str(report),
        "equal": report.equal,
        "compared": report.compared,
        "rank": report.rank,
        "peaks": peaks,
    }


def uneven() -> dict[str, Any]:
    made = replicated()
    with made.join():
        return train(made, 24)


def captured(made: nn.Module) -> dict[str, Any]:
    tokens = torch.zeros(2, 24, dtype=torch.int64)
    recollect.capture(made, {"tokens": tokens, "labels": tokens}, torch.optim.SGD(made.parameters()))
    return {}


def check_captures() -> dict[str, Any]:
    flags = TrainConfig(step=StepFlags(device="cpu", cuda_graph_impl="full_iteration"))
    Processes(ranks=group_module.group_of([0, 1], "train")).check(flags, flags.model.dimensions(64, seq_length=24))
    return {}


def not_all_call() -> dict[str, Any]:
    """Only the first process attaches."""
    dist.barrier()
    group_module._LONGEST_WAIT_S = 2
    try:
        return train(model(), 24, group=dist.group.WORLD) if RANK == 0 else {}
    finally:
        group_module._LONGEST_WAIT_S = 120
        dist.barrier()


def ends() -> dict[str, Any]:
    """The second process ends while the first goes on."""
    if RANK == 1:
        train(model(), *[24] * 4, group=dist.group.WORLD)
        os._exit(0)
    return train(model(), *[24] * 10, group=dist.group.WORLD)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "DDP": lambda: same_training(replicated),
    "replicate": lambda: same_training(composed, records_first=True),
    "FSDP2": lambda: same_training(sharded),
    "FSDP1": lambda: same_training(wrapped),
    "FSDP2, graph": lambda: same_training(sharded, engine="graph"),
    "FSDP2 around traces": lambda: sharded_units("graph", "staying", "bf16"),
    "FSDP2 around more traces": lambda: sharded_units("graph", "default", "freed"),
    "FSDP2 around compiled code": lambda: sharded_units("compile", "bf16"),
    "FSDP2 around more compiled code": lambda: sharded_units("compile", "staying", "freed"),
    "DDP, compile": lambda: compiled_training(replicated),
    "FSDP2, compile": lambda: compiled_training(sharded),
    "TP and SP": lambda: same_training(split, seed=0, budget="82%"),
    "steady": steady,
    "grown": grown,
    "pairs": pairs,
    "verify": lambda: verified(sharded()),
    "verify where one does not fit": lambda: verified(replicated(), fits=False),
    "verify units that are sharded": lambda: verified(sharded(), fits=False),
    "verify others": lambda: verified(replicated(), same=False),
    "verify alone": lambda: verified(model(), group="alone", compare="units"),
    "fit": lambda: fitted(sharded()),
    "alone": alone,
    "apply the same": lambda: applied(same=True),
    "apply others": lambda: applied(same=False),
    "budgets": lambda: train(replicated(), 24, budget=("80%", "90%")[RANK]),
    "bad budget": lambda: train(replicated(), 24, budget=("80%", "much")[RANK]),
    "too small": lambda: train(replicated(), 24, budget=1),
    "models": lambda: train(model(3 - RANK), 24, group=dist.group.WORLD),
    "larger": lambda: train(replicated(), *((24, 24) if RANK == 0 else (24, 40)), on_larger="raise"),
    "cannot record": cannot_record,
    "fewer calls": fewer_calls,
    "raises once": raises_once,
    "without backward": without_backward,
    "uneven": uneven,
    "capture": lambda: captured(replicated()),
    "captured training": check_captures,
    "no group": lambda: train(model(), 24, group="everyone"),
    "not all call": not_all_call,
    "ends": ends,
}


def main() -> None:
    # So that few steps show what happens between.
    lockstep._STEADY_STEPS, lockstep._ASKS_EVERY = 2, 4  # type: ignore[misc]
    missed._MOST_ATTEMPTS = 1  # type: ignore[misc]
    join(2)
    serve(lambda name: CASES[name]())


if __name__ == "__main__":
    main()
