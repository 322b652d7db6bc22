"""Record one training step of a model: what it computes and saves, how long it takes, how much memory it needs."""

from __future__ import annotations

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
from recollect.profile.profile import Profile
from recollect.recording.assemble import Costs, assemble
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
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.step_times import measure_step_times, with_step_times
from recollect.recording.trackers import mark_persistent, unmark
from recollect.simulation.decisions import drop_all
from recollect.simulation.simulate import Simulation, simulate

# Scalars that PyTorch makes inside C++ functions, unseen by dispatch modes: at most 24 bytes at the peak of the test
# suite's twenty models, 10 in a step of AdamW. A budget is a bound, so this rounds up.
_UNSEEN_BYTES = 1024


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
    """Run one training step and record all that a planner needs to know.

    The step drops every value that can be dropped, so it needs no more memory than full recompute of every layer. It
    leaves parameters, buffers, gradients, the optimizer and the random generators as they were.

    Args:
        model: any module, in the mode (train or eval) in which it will be trained. It is not edited.
        batch: a tensor, tuple or dict, passed as `model(batch)`, `model(*batch)` or `model(**batch)`.
        optimizer: its state counts, even before its first step, and so does the workspace of its step.
        loss_fn: from the model's output to a scalar; by default `output.loss`, or the output itself if it is a scalar.
        fake: record on fake tensors, without memory or arithmetic; the model may be on the meta device. Times then
            come from a cost model, and control flow cannot depend on values.
        hardware: with `fake`, what the times are for: a name such as "H100" or "RTX 4090" (listed in
            `recollect.costs.hardware_table`), or the path of a file that `recollect calibrate` wrote. Default: this
            machine's GPU if known, else an H100. `profile.device_name` says which.
        units: module paths of the layers to plan, where `find_units` does not find them.
        accumulates_gradients: gradients exist already when the step begins (gradient accumulation).
        loss_chunks: parts in which LM head and loss are computed, in this step and under plans made from it; see
            `chunked_cross_entropy`. 1: as the model does.

    Returns:
        The profile: frozen, torch-free, saved with `profile.save(path)`.

    Raises:
        UnsupportedModelError: the model has no repeated layers.
        AlreadyAppliedError: the model already recomputes.
        HardwareError: an unknown name or a malformed file; or given without `fake`, where times are measured.
        ChunkedLossError: the model's loss cannot be computed in chunks.
        RecordError: the model rejected the batch; the loss is not a scalar or does not require grad; with `fake`, the
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
    modelled = _modelled_costs(hardware, fake=fake)
    device = device_of(model, batch)
    session = _Session(model, loss_fn, find_units(model, units), device, accumulates_gradients, loss_chunks)
    optimizer_step = record_optimizer_step(optimizer, device)
    if modelled is not None:
        with fake_tensors(model, device):
            return session.profile(modelled, fake_batch(batch, device), optimizer_step)
    others = OtherAllocations(device, resident_tensors(model, batch, optimizer))
    with undisturbed(model):
        profile = session.profile(MeasuredCosts(device), batch, optimizer_step, before_step=others.before_step)
        leanest = simulate(profile, [drop_all(profile.graph_of(call)) for call in profile.calls])
        return session.timed(session.calibrated(profile, leanest, batch, others), leanest, batch)


def record_with(costs: Costs, model: nn.Module, batch: Any) -> Profile:
    """Record a step on real tensors with costs of your own, such as a cost model's.

    Args:
        costs: runs the ops and knows their costs.
        model: see `record`.
        batch: see `record`.
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
        # For each graph, the number of ops per module, except of modules that the tape always watches.
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
        profile = assemble(
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

    def calibrated(self, profile: Profile, leanest: Simulation, batch: Any, others: OtherAllocations) -> Profile:
        """Measure the leanest step, and add what its simulation misses: kernel workspaces, and other allocations."""
        self._prepare_gradients()
        other_bytes = others.before_step()
        with apply_policy(self.model, self.paths, DropAll()):
            measured = measure_peak(lambda: self._step(batch), device=self.device)
        growth_bytes = max(leanest.forward_peak_bytes, leanest.backward_peak_bytes) - profile.persistent_bytes
        missing_bytes = max(0, measured.peak_growth_bytes - growth_bytes)
        persistent = {**profile.persistent, **({"other_allocations": other_bytes} if other_bytes else {})}
        return replace(profile, calibration_bytes=missing_bytes + _UNSEEN_BYTES, persistent=persistent)

    def _loss_in_chunks(self) -> AbstractContextManager[None]:
        return loss_in_chunks(self.model, self.loss_chunks)

    def timed(self, profile: Profile, leanest: Simulation, batch: Any) -> Profile:
        """Replace sums of op times by measured times of the step and its units, without more memory than recording."""

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
        return with_step_times(profile, times, self.seen_ops, leanest)

    def _step(self, batch: Any) -> None:
        with self._loss_in_chunks():
            run_forward(self.model, batch, self.loss_fn).backward()

    def _prepare_gradients(self) -> None:
        for parameter in self.model.parameters():
            needs_gradient = self.accumulates_gradients and parameter.requires_grad
            parameter.grad = torch.zeros_like(parameter) if needs_gradient else None

    def _persistent_tensors(self, batch: Any) -> dict[str, list[torch.Tensor]]:
        """Return the device's tensors that outlive the step, by kind."""
        parameters = list(self.model.parameters())
        found = {
            "parameters": list[torch.Tensor](parameters),
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "buffers": list(self.model.buffers()),
            "batch": [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)],
        }
        return {name: [t for t in tensors if t.device == self.device] for name, tensors in found.items()}


def _device_memory_bytes(costs: Costs, device: torch.device) -> int:
    return costs.hardware.memory_bytes if isinstance(costs, ModelledCosts) else memory_bytes(device)


def _modelled_costs(hardware: str | os.PathLike[str] | Hardware | None, *, fake: bool) -> ModelledCosts | None:
    if hardware is not None and not fake:
        raise HardwareError(
            f"hardware: got {str(hardware)!r} with fake=False, where times are measured on the device itself; expected "
            "none, or fake=True."
        )
    if not fake:
        return None
    # Asking for the GPU's name starts CUDA, so ask only if it counts.
    own_device = torch.cuda.get_device_name() if hardware is None and torch.cuda.is_available() else ""
    return ModelledCosts(choose_hardware(hardware, own_device=own_device))
