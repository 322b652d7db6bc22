"""The training loop: plan once, then step, log, validate and save until the end, or until it is interrupted.

On one machine, with one thread count and one version of torch, equal runs give equal bits: weights depend on the seed, batches
on (seed, step), and a plan changes no gradient. A resumed run reuses the plan in the run folder.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity

import recollect
from recollect.capturing.cuda_graphs import CudaGraphs
from recollect.lab.train.config import ProfileFlags, TrainConfig
from recollect.lab.train.exchange import CapturedExchange
from recollect.lab.train.files import only_run_in
from recollect.lab.train.optimizer_step import learning_rate_at, measure_step, resolve_device
from recollect.lab.train.pipeline_plans import PipelinePlans
from recollect.lab.train.prepare import prepare
from recollect.lab.train.processes import Processes, joined_processes, num_processes
from recollect.lab.train.records import LiveDisplay, Log, MetricsFile, Outcome, PlainDisplay, StepRecord, TensorBoardLog
from recollect.lab.train.session import Session, open_session
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.host_memory import check_host_budget
from recollect.plans.plan import Plan
from recollect.printing import print_line
from recollect.quantities import check_budget
from recollect.ranks.group import Place


def train(config: TrainConfig, *, console: Console | None = None) -> Outcome:
    """Train a model as configured, within its memory budget.

    Writes config.json, metrics.jsonl, baseline.json and checkpoints/ into the run folder, also plan.json with a budget, and
    tensorboard/ on request. SIGINT and SIGTERM end the run after the current step, with a checkpoint.
    """
    console = console or Console()
    with contextlib.ExitStack() as stack:
        stop = threading.Event()
        if num_processes() > 1:
            # When a process ends, torchrun sends the others SIGTERM, and they should still say why they end.
            stack.enter_context(stop_requests(stop))
        processes = stack.enter_context(joined_processes(config))
        ranks = processes.ranks
        if config.step.memory_budget is not None:
            # Not earlier: each process has its own device from here on, and others would wait for one that refuses its budget.
            check_budget(config.step.memory_budget, device_bytes=memory_bytes(resolve_device(config.step.device)))
            check_host_budget(config.step.host_budget)
        if config.run.run_dir is None:
            named = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
            config = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=named))
        if not ranks.is_alone:
            config = _on_ranks(config, processes)
        if not processes.is_first:
            console = Console(quiet=True)
        stack.enter_context(deterministic_kernels(wanted=config.step.deterministic))
        print_line(console, "Reading data and building the model")
        ranks.together(lambda: _lock_folder(config, stack) if processes.is_first else None, Place.START)
        session = open_session(config, processes)
        print_line(console, _describe(session))
        plan, baseline = prepare(session, console)
        if config.step.captures:
            assert not isinstance(plan, PipelinePlans)
            _capture(session, plan, console, stack)
        elif plan is not None:
            stack.enter_context(
                plan.applied(session)
                if isinstance(plan, PipelinePlans)
                else recollect.apply(session.trained.wrapped, plan, group=processes.plan_group)
            )
        budget_bytes = None if plan is None else plan.budget_bytes
        logs = _open_logs(session, console, plan, stack) if processes.is_first else []
        if ranks.is_alone:
            stack.enter_context(stop_requests(stop))
        records = _run(session, logs, stop)
    return Outcome(
        records=tuple(records),
        baseline=baseline,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=None if plan is None else plan.predicted_peak_bytes,
        predicted_slowdown=None if plan is None else plan.predicted_slowdown,
        step_s=_fastest_step_s(records, session),
        folder=str(session.folder),
        total_steps=config.optim.steps,
        excess_reason=processes.excess_reason(session.device),
    )


def _capture(session: Session, plan: Plan | None, console: Console, stack: contextlib.ExitStack) -> None:
    trained, example = session.trained, next(session.batches(0))
    graphs, log = functools.partial(CudaGraphs, session.device), functools.partial(print_line, console)
    accumulation = session.config.optim.num_micro_batches
    exchange = CapturedExchange(trained.wrapped, trained.optimizer, example, plan, accumulation, graphs, log)
    stack.enter_context(exchange.captured)
    session.trained = dataclasses.replace(trained, exchange=exchange)


def _on_ranks(config: TrainConfig, processes: Processes) -> TrainConfig:
    """Return the configuration of a run of several processes, with the same folder in all of them."""
    # A pipeline needs a micro-batch for each of its ranks.
    optim = config.optim.on_ranks(processes.data_ranks * processes.layout.pipeline_model_parallel_size)
    folder = processes.ranks.gather(config.run.run_dir, Place.START)[0]
    return dataclasses.replace(config, optim=optim, run=dataclasses.replace(config.run, run_dir=folder))


def _lock_folder(config: TrainConfig, stack: contextlib.ExitStack) -> None:
    folder = config.run.run_dir
    if folder is not None and (folder.exists() or not config.run.resume):
        stack.enter_context(only_run_in(folder))


def _run(session: Session, logs: list[Log], stop: threading.Event) -> list[StepRecord]:
    records: list[StepRecord] = []
    flags = session.config
    measured = {session.step + 1, flags.optim.steps - 1}
    is_free = session.device.type == "cuda"  # elsewhere the meter slows steps down and cannot run with a profiler
    traces = session.folder / "profile" if session.processes.is_first else None
    session.seed()
    saved_step = session.step
    is_stopped = False
    while session.step < flags.optim.steps:
        # A process that has to stop stops them all, before the same step.
        is_stopped = not session.processes.ranks.all_of([not stop.is_set()], Place.NEXT_STEP)[0]
        if is_stopped:
            break
        is_measured = flags.run.log_memory_to_tensorboard or session.step in measured
        is_measured = is_free or (is_measured and not flags.profile.covers(session.step + 1))
        with traced(session.step + 1, flags.profile, traces):
            record = _take_step(session, is_measured=is_measured)
        records.append(record)
        for log in logs:
            log.write(record)
        if _is_due(session.step, flags.run.checkpoint_every):
            saved_step = session.save()
    if session.step != saved_step:
        session.save()
    session.checkpoints.finish()
    if is_stopped:
        for log in logs:
            log.note(f"Stopped after step {session.step}; resume with --run-dir {session.folder} --resume")
    return records


def _take_step(session: Session, *, is_measured: bool) -> StepRecord:
    flags = session.config.optim
    learning_rate = learning_rate_at(session.step, flags)
    for group in session.optimizer.param_groups:
        group["lr"] = learning_rate
    batches = list(session.batches(session.step))

    def step() -> tuple[float, float]:
        return session.trained.step(batches, clip_norm=flags.clip_norm)

    start_s = time.perf_counter()
    peak_bytes = None
    if is_measured:
        (loss, grad_norm), peak_bytes = measure_step(
            step,
            device=session.device,
            model=session.trained.wrapped,
            optimizer=session.optimizer,
            is_captured=session.config.step.captures,
        )
        # The budget is each device's.
        peak_bytes = max(session.processes.ranks.gather(peak_bytes, Place.MEASURED))
    else:
        loss, grad_norm = step()
    step_s = time.perf_counter() - start_s
    session.step += 1
    return StepRecord(
        step=session.step,
        loss=loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        step_s=step_s,
        tokens_per_s=session.config.data.seq_length * flags.batch_size * flags.num_micro_batches / step_s,
        validation_loss=_validate(session),
        peak_bytes=peak_bytes,
    )


def _validate(session: Session) -> float | None:
    is_due = session.step == session.config.optim.steps or _is_due(session.step, session.config.run.validate_every)
    if session.corpus.validation is None or session.config.num_validation_batches == 0 or not is_due:
        return None
    return session.trained.validation_loss(session.validation_batches(), session.config.num_validation_batches)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _open_logs(
    session: Session, console: Console, plan: recollect.Plan | PipelinePlans | None, stack: contextlib.ExitStack
) -> list[Log]:
    known = {} if plan is None else {"predicted_peak_bytes": plan.predicted_peak_bytes or 0}
    budget_bytes = None if plan is None else plan.budget_bytes
    if budget_bytes is not None:
        known["memory_budget_bytes"] = budget_bytes
    total_steps, first_step = session.config.optim.steps, session.step
    logs: list[Log] = [MetricsFile(session.folder / "metrics.jsonl", first_step=first_step)]
    stack.callback(logs[0].close)
    run = session.config.run
    if run.tensorboard or run.tensorboard_dir is not None or run.log_memory_to_tensorboard:
        logs.append(
            TensorBoardLog(
                run.tensorboard_dir or session.folder / "tensorboard", first_step=first_step, beside_peak=known
            )
        )
        stack.callback(logs[-1].close)
    if console.is_terminal:
        logs.append(LiveDisplay(console, total_steps=total_steps, first_step=first_step, budget_bytes=budget_bytes))
    else:
        logs.append(PlainDisplay(console, total_steps=total_steps, budget_bytes=budget_bytes, every=run.log_interval))
    stack.callback(logs[-1].close)
    return logs


def _fastest_step_s(records: list[StepRecord], session: Session) -> float | None:
    # The first step warms up; on a CPU, measuring a step slows it down.
    is_free = session.device.type == "cuda"
    times = [record.step_s for record in records[1:] if is_free or record.peak_bytes is None]
    return min(times, default=None)


def _describe(session: Session) -> str:
    dimensions, corpus = session.model.config, session.corpus
    held_out = 0 if corpus.validation is None else corpus.validation.num_tokens
    changes = f" with {', '.join(session.changes)}" if session.changes else ""
    start = f", resuming after step {session.step}{changes}" if session.step else ""
    processes = session.processes.description
    return (
        f"Model: {dimensions.num_layers} layers of width {dimensions.hidden_size}, "
        f"{dimensions.num_parameters / 1e6:.1f} M parameters, {session.config.step.precision} on {session.device}.\n{processes}"
        f"Data: {corpus.training.num_tokens:,} tokens, {held_out:,} held out.\n"
        f"Run folder: {session.folder}{start}"
    )


@contextlib.contextmanager
def traced(step: int, flags: ProfileFlags, folder: Path | None) -> Iterator[None]:
    """In a with-block, trace a step into `folder/step_00000010.json`, if `flags` choose it; None: in a different process."""
    if folder is None or not flags.covers(step):
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step_{step:08d}.json"))


@contextlib.contextmanager
def stop_requests(stop: threading.Event) -> Iterator[None]:
    """In a with-block, let the first SIGINT or SIGTERM only set `stop`; the second one ends the process.

    Outside of the main thread signals cannot be caught, and `stop` stays unset.
    """
    previous: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)
        previous.clear()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        restore()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def deterministic_kernels(*, wanted: bool) -> Iterator[None]:
    """Use CUDA's deterministic kernels in a with-block, if `wanted` and if CUDA is available; a CPU always gives the same bits.

    An op in the block that has no such kernel raises RuntimeError; `--no-deterministic` allows any.
    """
    if not (wanted and torch.cuda.is_available()):
        yield
        return
    # cuBLAS reads this once, at its start; without it, matrix products raise in deterministic mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), module.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling would write every new tensor twice, and no op here reads uninitialised memory.
    module.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        module.fill_uninitialized_memory = before[1]
