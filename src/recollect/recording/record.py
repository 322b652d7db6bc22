"""Record one training step of a model: its computation and saved tensors, its time, and its memory."""

import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from recollect._torch_private import DATA_DEPENDENT
from recollect.costs.hardware import Hardware
from recollect.costs.hardware_table import choose_hardware
from recollect.costs.host_copies import with_host_link
from recollect.costs.modelled_costs import ModelledCosts
from recollect.costs.op_costs import MeasuredCosts
from recollect.engine.self_check import check_steps_can_be_recorded
from recollect.errors import HardwareError, RecordError
from recollect.loss.intercept import loss_in_chunks
from recollect.measuring.device_memory import other_bytes
from recollect.planning.planners import Engine
from recollect.plans.paths import unit_words
from recollect.profile.host_times import NOTHING, AroundOps
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.ranks.group import ALONE, Place
from recollect.ranks.members import GroupChoice, check_alike, ranks_of
from recollect.recording.engines import check_engine, with_engine
from recollect.recording.fake_model import fake_run
from recollect.recording.find_units import find_units
from recollect.recording.host_times import around_ops
from recollect.recording.model_step import LossFunction, Step, describe_batch, step_tensors
from recollect.recording.optimizer_step import OptimizerStep, record_optimizer_step, reductions_of
from recollect.recording.optimizers import Optimizers, check_optimizers
from recollect.recording.restored_state import free_gradients
from recollect.recording.step_recorder import Costs
from recollect.recording.step_recording import Collectives, Gradients, StepRecording
from recollect.tensors import inner_tensors
from recollect.tracebacks import lets_go


@lets_go
def record(
    model: nn.Module,
    batch: Any = None,
    *,
    step: Callable[[], object] | None = None,
    optimizer: Optimizers = None,
    loss_fn: LossFunction | None = None,
    fake: bool = False,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    units: Iterable[str] | None = None,
    holds_output: bool = True,
    gradients: Gradients = "held",
    split_backward: bool = False,
    loss_chunks: int = 1,
    collectives: Collectives = "keep",
    engine: Engine = "tape",
    host_link: bool = False,
    group: GroupChoice = None,
) -> Profile:
    """Run one training step and record everything a planner needs to know.

    The step runs once, and drops every value that can be dropped, so it needs little more memory than full recompute of
    every layer. Given a batch, the step is that of the most common loop, `out = model(**batch); out.loss.backward()`, and
    leaves no traces: parameters, buffers, gradients, attributes of modules, the optimizer and the random generators are as
    they were, and no hook of a parameter runs. Or give your own step: it runs unchanged, as one step of your training, with
    the same gradients, bit for bit, as without recording.

    Args:
        model: any module, in the mode (train or eval) in which it will be trained; to plan several models together, an
            `nn.ModuleDict` of them. It is not edited.
        batch: a tensor, tuple or dict, passed as `model(batch)`, `model(*batch)` or `model(**batch)`.
        step: runs a training step, without arguments: any number of forward and backward calls of any models, losses
            computed anywhere, `optimizer.step()` in it or not. Values that it leaves in variables outside of
            it stay alive into the next step; its return value is dropped. Give this or `batch`.
        optimizer: one, or several; its state counts, even before its first step, and so does the workspace of its step.
        loss_fn: from the model's output to a scalar; by default `output.loss`, or the output itself if it is a scalar.
        fake: record on fake tensors, without memory or arithmetic; the model may be on the meta device. Times then
            come from a cost model, and control flow cannot depend on values.
        hardware: with `fake`, the hardware to model times for: a name such as "H100" or "RTX 4090" (listed in
            `recollect.costs.hardware_table`), or the path of a file that `recollect calibrate` wrote, which also has the
            overhead of the host's Python. Default: this machine's GPU if known, else an H100. `profile.device_name` says which.
            If given, or with the model on the meta device, the kernels are those of its type of device, too.
        units: module paths of the layers to plan, if `find_units` does not find them.
        holds_output: with `batch`, the loop holds the model's output until the next one replaces it, as `out = ...` does.
        gradients: of the last step, when the next one begins. "held": alive until backward begins (`zero_grad` between
            forward and backward); a plan for this holds for "freed", too, but its peak may be higher by their bytes than what
            `attach` says, which sees the loop. "freed": none (`zero_grad` before forward).
            "accumulated": backward adds to them. With `step`, "held" leaves this to the step itself.
        split_backward: with `batch`, find the gradients of the batch first and those of the parameters then, as the stages of
            a zero-bubble pipeline do. The first stage, whose batch needs no gradient, runs a whole backward.
        loss_chunks: parts in which LM head and loss are computed, in this step and under plans made from it; see
            `chunked_cross_entropy`. 1: as the model does.
        collectives: how plans may treat the results of collectives inside units. "keep": they stay, and each rank may have
            its own plan. "replay": they may be dropped, and the collective runs again in backward; then
            all ranks have to record, to apply the same plan, and to run the same ops in the same order.
        engine: "compile" also measures repeated layers inside `torch.compile`, for each of several sets of values to keep:
            plans can then choose them (`EngineChoice.COMPILE`). The profile's step then runs them compiled. It compiles each
            kind of layer up to eleven times, seconds to a minute each. With `fake`, nothing of it runs: bytes and times are
            estimated from the code that would (`VariantRecord.is_estimated`). "graph" and "auto" trace each kind of repeated
            layer, a second each: the peak of plans that run from traces is then predicted to the byte from the second step on;
            the first runs on the tape. `UnitGraph.why_not_traced` says why one was not.
        host_link: measure copies to host memory and back, too, once in a process. Plans can then have a `host_budget`. With
            `fake`, `hardware` says how fast they are.
        group: the processes that record together, whose profiles get the median of their times, and which so make the same plan
            of the same step: a process group or a device mesh; by default those that the model is spread over (by
            DistributedDataParallel, FSDP, tensor parallelism); "alone" for its own times. Not with `fake`.

    Returns:
        The profile: frozen, torch-free, saved with `profile.save(path)`.

    Raises:
        UnsupportedModelError: there is nothing to plan in the model.
        AlreadyAppliedError: the model already recomputes.
        HardwareError: an unknown name or a malformed file; or given without `fake`, where times are measured.
        ChunkedLossError: the model's loss cannot be computed in chunks.
        NotYetError: `engine="compile"` with `split_backward`, or a backward that keeps its graph; or the model is on several
            CUDA devices.
        RecordError: both or neither of `batch` and `step`; the model rejected the batch; the loss is not a scalar or does
            not require grad; an unknown word; with `fake`, the step depends on data; the parameters do not exist yet, or are
            partitioned; a process of the group failed, or has a different model; or this PyTorch lacks what recording needs.

    Warns:
        TorchVersionWarning: once in a process, with a PyTorch newer than the tested ones, or one that behaves differently.
        UserWarning: with `engine="compile"`, layers cannot be compiled.
        ConfigWarning: with `fake`, the model has recurrent layers, whose kernels keep what has no size there.

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
    check_steps_can_be_recorded()
    modelled = _modelled_costs(hardware, fake=fake)
    own = Step(model, batch, step, optimizer, loss_fn, holds_output, gradients, loss_chunks, split_backward)
    own.check()
    if collectives not in get_args(Collectives):
        raise RecordError(f"collectives: got {collectives!r}, expected {' or '.join(map(repr, get_args(Collectives)))}")
    check_engine(engine, model, split_backward=split_backward)
    ranks = ALONE if fake else ranks_of(model, group, "record(model, batch)")
    host = None if modelled is None else modelled.hardware.host
    around = AroundOps(host, 0.0) if host is not None else NOTHING if fake else None

    def prepared() -> tuple[StepRecording, OptimizerStep]:
        check_optimizers(model, optimizer)
        costs = modelled or MeasuredCosts(own.device)
        return _prepared(own, costs, units, collectives, engine=engine, is_elsewhere=hardware is not None)

    with stage("recording the step"):
        recording, optimizer_step = ranks.together(prepared, Place.START)
        check_alike(ranks, model, {"loss_chunks": loss_chunks, "collectives": collectives, "engine": engine})
        # Not a lambda, which would hold the model where the loss or the step raises an error.
        profile = ranks.together(partial(_recorded, own, recording, optimizer_step, around=around), Place.START)
        if host_link and not fake:
            profile = ranks.together(lambda: with_host_link(profile, own.device), Place.START)
        hardware = None if modelled is None else modelled.hardware
        samples = recording.samples_of_graph
        costs = recording.costs
        return with_engine(engine, profile, samples, own.device, hardware=hardware, costs=costs, ranks=ranks)


def record_with(
    costs: Costs,
    step: Step,
    *,
    units: Iterable[str] | None = None,
    collectives: Collectives = "keep",
    within: AbstractContextManager[object] | None = None,
) -> Profile:
    """Record a step with your own costs: a cost model's on real tensors, or `ModelledCosts` on fake ones.

    They run the ops and know the cost of each. `within` is the context in which the step runs on these tensors, such as
    `gathered_stage(model)`.
    """
    step.check()
    return _recorded(replace(step), *_prepared(step, costs, units, collectives), within=within)


def _prepared(
    step: Step,
    costs: Costs,
    units: Iterable[str] | None,
    collectives: Collectives,
    *,
    engine: Engine = "tape",
    is_elsewhere: bool = False,
) -> tuple[StepRecording, OptimizerStep]:
    """`is_elsewhere`: the step will run on the device that a cost model describes, and not on this one."""
    recording = StepRecording(
        step.model,
        find_units(step.model, units),
        costs,
        step.device,
        replays_collectives=collectives == "replay",
        engine=engine,
    )
    is_elsewhere |= all(parameter.device.type == "meta" for parameter in step.model.parameters())
    if is_elsewhere and isinstance(costs, ModelledCosts):
        recording.kernels = costs.hardware.device
    return recording, record_optimizer_step(step.optimizer, step.device)


def _recorded(
    step: Step,
    recording: StepRecording,
    optimizer_step: OptimizerStep,
    *,
    within: AbstractContextManager[object] | None = None,
    around: AroundOps | None = NOTHING,
) -> Profile:
    """`around`: what is around ops; None if that is to be measured."""
    model, is_own = step.model, step.own is not None
    tensors = step_tensors(model, step.batch, step.optimizer)
    others_bytes = other_bytes(step.device, [tensor for group in tensors.values() for tensor in group])
    # Before the parameters are fake: afterwards everything the optimizer steps over would look like copies of them.
    master_weights = tensors["master_weights"]
    with ExitStack() as stack:
        if recording.is_on_fake_tensors:
            run = fake_run(model, step.batch, step.device, kernels=recording.kernels)
            step.batch = stack.enter_context(run)
        elif not is_own:
            stack.enter_context(step.undisturbed())
        stack.enter_context(within or nullcontext())
        if recording.is_on_fake_tensors and any(inner_tensors(p) for p in model.parameters()):
            # DTensors try out each op when they first meet it. The recorder can tell these trials, on fake tensors, from
            # ops on real ones, and so the step runs once unseen.
            if not is_own:
                step.prepare_gradients()  # adding to them is an op, too
            with loss_in_chunks(model, step.loss_chunks):
                step.run()
            free_gradients(model.parameters())
        if not is_own:
            step.prepare_gradients()
        _run(step, recording, others_bytes, master_weights)
        return recording.profile(
            optimizer_step=reductions_of(model).then(optimizer_step),
            gradients="freed" if is_own else step.gradients,
            batch="" if is_own else describe_batch(step.batch),
            loss_chunks=step.loss_chunks,
            around=around or around_ops(step.device, traces=recording.traces),
        )


def _run(step: Step, recording: StepRecording, others_bytes: int, master_weights: list[torch.Tensor]) -> None:
    """Run a step under the recorder, and clear up after it.

    `others_bytes`: bytes besides the step's tensors on a CUDA device before anything was set aside.
    """
    tensors = {**step_tensors(step.model, step.batch, step.optimizer), "master_weights": master_weights}
    known = [tensor for group in tensors.values() for tensor in group]
    recording.start(tensors, set_aside_bytes=max(0, other_bytes(step.device, known) - others_bytes))
    try:
        with loss_in_chunks(step.model, step.loss_chunks):
            held = step.run()
    except DATA_DEPENDENT as error:
        recording.abort()
        raise RecordError(
            f"cannot record {step.name} on fake tensors: {_where(error, step.model)} asks for the content of a tensor "
            f"({error}). Make it depend only on shapes, such as by torch.where in place of an if; or record on real tensors, "
            "on a small batch if need be: recollect.record(model, batch, fake=False)."
        ) from error
    except BaseException:
        recording.abort()
        raise
    recording.stop(step.optimizer)
    if not recording.recorder.has_run_backward:
        raise RecordError(f"the step of {step.name} ran no backward, expected loss.backward() in it.")
    del held
    if step.own is None:
        free_gradients(step.model.parameters())


def _where(error: BaseException, model: nn.Module) -> str:
    paths = {id(module): path for path, module in model.named_modules()}
    found = "the loss, or what is around the model,"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = next(iter(frame.f_locals.values()), None)  # "self", by any name
        if frame.f_code.co_name == "forward" and id(module) in paths:
            what = unit_words(paths[id(module)], "module")
            found = f"{what} ({type(module).__name__}, {frame.f_code.co_filename}:{line})"
    return found


def _modelled_costs(hardware: str | os.PathLike[str] | Hardware | None, *, fake: bool) -> ModelledCosts | None:
    if hardware is not None and not fake:
        raise HardwareError(
            f"hardware: got {str(hardware)!r} with fake=False, where times are measured on the device itself; expected "
            "none, or fake=True."
        )
    if not fake:
        return None
    # Asking for the GPU's name starts CUDA, so ask only if it matters.
    own_device = torch.cuda.get_device_name() if hardware is None and torch.cuda.is_available() else ""
    return ModelledCosts(choose_hardware(hardware, own_device=own_device))
