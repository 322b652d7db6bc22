"""Record one training step of a model: what it computes, what it saves, how long it takes, what memory it needs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recollect._torch_private import DATA_DEPENDENT, tree_leaves
from recollect.applying import apply_policy
from recollect.costs.hardware import Hardware
from recollect.costs.hardware_table import choose_hardware
from recollect.costs.modelled_costs import ModelledCosts
from recollect.costs.op_costs import MeasuredCosts
from recollect.engine.recorded_on import device_name
from recollect.errors import HardwareError, RecordError
from recollect.loss.intercept import loss_in_chunks
from recollect.measuring.device_memory import OtherAllocations, memory_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.profile import events
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.recording.fake_model import fake_batch, fake_tensors
from recollect.recording.find_units import Unit, find_units
from recollect.recording.model_step import (
    LossFunction,
    call_model,
    describe_batch,
    device_of,
    resident_tensors,
    run_forward,
    undisturbed,
)
from recollect.recording.optimizer_step import OptimizerStep, record_optimizer_step
from recollect.recording.recording_tape import DropAll, RecordingTape, StepMode
from recollect.recording.step_recorder import RecordedCall, StepRecorder
from recollect.recording.step_times import measure_step_times, with_step_times
from recollect.recording.trackers import mark_persistent, unmark
from recollect.simulation.decisions import drop_all
from recollect.simulation.simulate import simulate

# Scalars that PyTorch makes inside of C++ functions, which no dispatch mode sees: at most 24 bytes at the peak of the
# twenty models of the test suite, 10 in a step of AdamW. A budget is a bound, so it is rounded up.
_UNSEEN_BYTES = 1024

Costs = MeasuredCosts | ModelledCosts


def record(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    fake: bool = False,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    units: Iterable[str] | None = None,
    accumulates_gradients: bool = False,
    loss_chunks: int = 1,
) -> Profile:
    """Run one training step and write down all that a planner needs to know.

    The step runs with every value dropped that can be, so it needs no more memory than full recompute of every layer.
    Parameters, buffers, gradients, the optimizer and the random generators are left as they were found.

    Args:
        model: any module, in the mode (train or eval) that it will be trained in. It is not edited.
        batch: a tensor, tuple or dict, passed as `model(batch)`, `model(*batch)` or `model(**batch)`.
        optimizer: counts its state, even before its first step, and the working memory of its step.
        loss_fn: from the model's output to a scalar; by default `output.loss`, or the output itself if it is a scalar.
        fake: record on fake tensors, with neither the memory nor the arithmetic; the model may be on the meta device.
            Times then come from a cost model, and values cannot steer the control flow.
        hardware: with `fake`, what the times are for: a name such as "H100" or "RTX 4090" (all stand in
            `recollect.costs.hardware_table`), or the path of a file that `recollect calibrate` wrote. By default this
            machine's GPU if it is known, else an H100. `profile.device_name` says which it is.
        units: module paths of the layers to plan, where `find_units` does not find them.
        accumulates_gradients: gradients exist already when the step begins (gradient accumulation).
        loss_chunks: parts in which output matrix and loss are computed, in this step and under the plans made from it; see
            `chunked_cross_entropy`. 1: as the model does.

    Returns:
        The profile: frozen, torch-free, saved with `profile.save(path)`.

    Raises:
        UnsupportedModelError: the model has no repeated layers.
        AlreadyAppliedError: the model recomputes already.
        HardwareError: an unknown name or a malformed file; or given without `fake`, where times are measured.
        ChunkedLossError: the model's loss cannot be computed in chunks.
        RecordError: the model rejected the batch, the loss is not a scalar or needs no gradient, or, with `fake`, the
            step depends on data.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> profile = recollect.record(model, {"tokens": tokens, "labels": tokens})
        >>> [call.path for call in profile.calls]
        ['embedding', 'rotary_pos_emb', 'decoder.layers.0', 'decoder.layers.1', 'decoder.final_layernorm', 'output_layer']
    """
    if hardware is not None and not fake:
        raise HardwareError(
            f"hardware: got {str(hardware)!r} with fake=False, where times are measured on the device itself; expected "
            "none, or fake=True."
        )
    modelled = ModelledCosts(_hardware(hardware)) if fake else None
    found = find_units(model, units)
    device = device_of(model, batch)
    optimizer_step = record_optimizer_step(optimizer, device)
    session = _Session(model, loss_fn, found, device, accumulates_gradients, loss_chunks)
    if modelled is not None:
        with fake_tensors(model, device):
            return session.profile(modelled, fake_batch(batch, device), optimizer_step)
    others = OtherAllocations(device, resident_tensors(model, batch, optimizer))
    with undisturbed(model):
        profile = session.profile(MeasuredCosts(device), batch, optimizer_step, before_step=others.before_step)
        return session.timed(session.calibrated(profile, batch, others), batch)


def record_with(costs: Costs, model: nn.Module, batch: Any) -> Profile:
    """Record a step on real tensors with costs of one's own, such as a cost model's; see `record` for the others.

    Args:
        costs: runs the ops, and says what they cost.
        model: as for `record`.
        batch: as for `record`.
    """
    device = device_of(model, batch)
    session = _Session(model, None, find_units(model), device, accumulates_gradients=False, loss_chunks=1)
    with undisturbed(model):
        return session.profile(costs, batch, record_optimizer_step(None, device))


class _Session:
    """One call of `record`."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        units: list[Unit],
        device: torch.device,
        accumulates_gradients: bool,
        loss_chunks: int,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.layers = {unit.path for unit in units if unit.is_layer}
        self.paths = [unit.path for unit in units]
        self.device = device
        self.accumulates_gradients = accumulates_gradients
        self.loss_chunks = loss_chunks
        # For each graph, how many ops the tape sees of each module that it need not watch.
        self.seen_ops: dict[int, dict[str, int]] = {}

    def profile(
        self,
        costs: Costs,
        batch: Any,
        optimizer_step: OptimizerStep,
        *,
        before_step: Callable[[], object] = lambda: None,
    ) -> Profile:
        """Run the step under the recorder."""
        recorder = StepRecorder(costs)
        is_fake = isinstance(costs, ModelledCosts)
        self._prepare_gradients()
        before_step()
        tensors = self._persistent_tensors(batch)
        persistent = {name: storage_bytes(group) for name, group in tensors.items()}
        marked = mark_persistent(tensor for group in tensors.values() for tensor in group)
        with apply_policy(self.model, self.paths, RecordingTape(recorder)), self._loss_in_chunks():
            try:
                with costs.recording(), StepMode(recorder):
                    recorder.begin_phase(events.FORWARD)
                    loss = run_forward(self.model, batch, self.loss_fn)
                    recorder.begin_phase(events.BACKWARD)
                    loss.backward()
                    del loss
                recorder.begin_phase(events.OPTIMIZER)
                recorder.log_optimizer_step(optimizer_step.with_room(0 if is_fake else _UNSEEN_BYTES))
            except DATA_DEPENDENT as error:
                raise RecordError(
                    f"cannot record {type(self.model).__name__} on fake tensors: {error} asks for the content of a tensor. "
                    "Record it with fake=False, on a small batch if need be."
                ) from error
            finally:
                recorder.close()
                unmark(marked)
        persistent["optimizer_state"] = optimizer_step.state_bytes
        profile = _assemble(
            recorder,
            costs,
            self.layers,
            persistent=persistent,
            device=str(self.device),
            device_name=costs.hardware.name if isinstance(costs, ModelledCosts) else device_name(self.device),
            device_memory_bytes=_device_memory_bytes(costs, self.device),
            fake=is_fake,
            torch_version=torch.__version__,
            model_class=type(self.model).__name__,
            batch=describe_batch(batch),
            loss_chunks=self.loss_chunks,
        )
        self.seen_ops = {
            profile.calls[index].graph: {m: n for m, n in call.seen_ops.items() if m not in call.watched_modules}
            for index, call in enumerate(recorder.calls)
        }
        return profile

    def calibrated(self, profile: Profile, batch: Any, others: OtherAllocations) -> Profile:
        """Run the leanest step once more, measured, and note what its simulation leaves out: workspaces of kernels.

        What lies on the device besides, and stays there, is noted as well.
        """
        simulated = simulate(profile, [drop_all(profile.graph_of(call)) for call in profile.calls])
        self._prepare_gradients()
        other_bytes = others.before_step()
        with apply_policy(self.model, self.paths, DropAll()):
            measured = measure_peak(lambda: self._step(batch), device=self.device)
        growth_bytes = max(simulated.forward_peak_bytes, simulated.backward_peak_bytes) - profile.persistent_bytes
        missing_bytes = max(0, measured.peak_growth_bytes - growth_bytes)
        persistent = {**profile.persistent, **({"other_allocations": other_bytes} if other_bytes else {})}
        return replace(profile, calibration_bytes=missing_bytes + _UNSEEN_BYTES, persistent=persistent)

    def _loss_in_chunks(self) -> AbstractContextManager[None]:
        return loss_in_chunks(self.model, self.loss_chunks)

    def timed(self, profile: Profile, batch: Any) -> Profile:
        """Replace sums of op times by times of the step and of its units, as far as these can be had in little memory."""

        def forward() -> None:
            with self._loss_in_chunks():
                call_model(self.model, batch)

        def step() -> None:
            self._prepare_gradients()
            self._step(batch)

        times = measure_step_times(
            self.model,
            self.paths,
            forward=forward,
            step=step,
            device=self.device,
            alike=lambda call: profile.calls[call].graph,
        )
        return with_step_times(profile, times, self.seen_ops)

    def _step(self, batch: Any) -> None:
        with self._loss_in_chunks():
            run_forward(self.model, batch, self.loss_fn).backward()

    def _prepare_gradients(self) -> None:
        for parameter in self.model.parameters():
            needs_gradient = self.accumulates_gradients and parameter.requires_grad
            parameter.grad = torch.zeros_like(parameter) if needs_gradient else None

    def _persistent_tensors(self, batch: Any) -> dict[str, list[torch.Tensor]]:
        """Return what is there before the step and after it, on the device."""
        parameters = list(self.model.parameters())
        found = {
            "parameters": list[torch.Tensor](parameters),
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "buffers": list(self.model.buffers()),
            "batch": [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)],
        }
        return {name: [t for t in tensors if t.device == self.device] for name, tensors in found.items()}


def _assemble(recorder: StepRecorder, costs: Costs, layers: set[str], **facts: Any) -> Profile:
    """Turn what was recorded into frozen data; calls with equal graphs share one."""
    graphs: dict[UnitGraph, int] = {}
    graph_of_call = [graphs.setdefault(_graph(call, costs), len(graphs)) for call in recorder.calls]
    sources = [{source for source, _ in call.origins} for call in recorder.calls]
    calls = tuple(
        UnitCall(
            path=call.path,
            graph=graph,
            repeated=call.path in layers,
            chained=index + 1 < len(sources) and index in sources[index + 1],
            origins=tuple((value, source, source_value) for (source, source_value), value in call.origins.items()),
            outside=tuple((value, storage) for storage, value in call.outside.items()),
        )
        for index, (call, graph) in enumerate(zip(recorder.calls, graph_of_call, strict=True))
    )
    forward_s = [graph.forward_s for graph in graphs]
    step_s = math.fsum(forward_s[call.graph] for call in calls)
    step_s += math.fsum(costs.seconds_of(run) for run in recorder.other_runs)
    log = StepLog(blocks=(_resolved(recorder, costs),), sequence=((0, -1),))
    return Profile(graphs=tuple(graphs), calls=calls, log=log, step_s=step_s, **facts)


def _resolved(recorder: StepRecorder, costs: Costs) -> tuple[tuple[int, ...], ...]:
    """The events as a step without recorder has them: bytes and times instead of op numbers, gradients added up in place."""
    resolved: list[tuple[int, ...]] = []
    same: dict[int, int] = {}
    recorded = recorder.events
    for position, (code, *rest) in enumerate(recorded):
        following = recorded[position + 1] if position + 1 < len(recorded) else ()
        if code == events.WORK:
            run = recorder.other_runs[rest[0]]
            # The sum's own memory is told by SUM.
            is_sum = bool(following) and following[0] == events.SUM
            resolved.append((code, 0 if is_sum else costs.working_bytes_of(run), round(1e9 * costs.seconds_of(run))))
        elif code == events.SUM:
            storage, addend, nbytes = rest
            if following == (events.FREE, addend):
                same[storage] = same.get(addend, addend)
                same[addend] = -1
            else:
                resolved.append((events.ALLOC, storage, nbytes))
        elif code == events.FREE:
            storage = same.get(rest[0], rest[0])
            if storage >= 0:
                resolved.append((code, storage))
        else:
            resolved.append((code, *rest))
    return tuple(resolved)


def _graph(call: RecordedCall, costs: Costs) -> UnitGraph:
    values = tuple(ValueRecord(**vars(value)) for value in call.values)
    ops = tuple(
        OpRecord(
            name=op.name,
            inputs=op.inputs,
            outputs=op.outputs,
            time_s=costs.seconds_of(op.run),
            mutates=op.mutates,
            state_bytes=op.state_bytes,
            working_bytes=costs.working_bytes_of(op.run),
        )
        for op in call.ops
    )
    return UnitGraph(values, ops)


def _device_memory_bytes(costs: Costs, device: torch.device) -> int:
    return costs.hardware.memory_bytes if isinstance(costs, ModelledCosts) else memory_bytes(device)


def _hardware(which: str | os.PathLike[str] | Hardware | None) -> Hardware:
    # Asking for the GPU's name starts CUDA, so it is asked for only where it counts.
    own_device = torch.cuda.get_device_name() if which is None and torch.cuda.is_available() else ""
    return choose_hardware(which, own_device=own_device)
