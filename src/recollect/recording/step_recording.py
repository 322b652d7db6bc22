"""One recording: from `start` to `stop`, everything that runs on this thread is recorded, whoever calls it."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recollect._torch_fsdp import freed_after_forward
from recollect._torch_functions import modes_outlive_compiler
from recollect._torch_parallel import GradientBuckets
from recollect._torch_private import uncompiled
from recollect.applying import apply_policy
from recollect.costs.modelled_costs import ModelledCosts
from recollect.engine.check_plan import device_name
from recollect.engine.compiled.compiled_engine import check_compilers
from recollect.engine.policy import DropAll
from recollect.engine.tape import forget_last_step
from recollect.engine.together import Agreement
from recollect.measuring.deaths import Deaths, allocated_storages
from recollect.measuring.device_memory import memory_bytes
from recollect.measuring.meter import storage_bytes, storages_of
from recollect.planning.planners import Engine
from recollect.plans.unit_plan import UnitPlan
from recollect.profile import events
from recollect.profile.events import Key
from recollect.profile.host_times import NOTHING, AroundOps
from recollect.profile.profile import Profile, block_bytes
from recollect.profile.repeated_steps import fold
from recollect.recording.assemble import assemble
from recollect.recording.compiled_code import UnseenStorages
from recollect.recording.find_units import Unit, class_names
from recollect.recording.next_step import Leftover, Phases, Returns, leftovers, with_last_step
from recollect.recording.optimizer_step import OptimizerStep, still_to_come
from recollect.recording.optimizers import Optimizers, beside_parameters, state_tensors
from recollect.recording.recording_tape import RecordingTape
from recollect.recording.replicated_values import RanksWithParts
from recollect.recording.step_mode import StepMode
from recollect.recording.step_recorder import Costs, StepRecorder
from recollect.recording.trackers import UnrelatedMemory, filled_storages, freed_gradients, keys_outside
from recollect.recording.unit_samples import UnitSample, UnitSamples
from recollect.simulation.clocks import has_two_clocks, plain_step_times
from recollect.tensors import tensors_held

Gradients: TypeAlias = Literal["held", "freed", "accumulated"]
"""Gradients of the last step when the next one begins: alive until backward begins, freed, or added to by backward."""

Collectives: TypeAlias = Literal["keep", "replay"]
"""Whether plans keep the results of collectives, or may run collectives again."""

# Scalars that PyTorch makes inside C++ functions, unseen by dispatch modes: at most 24 bytes at the peak of the test suite's
# twenty models, 10 in a step of AdamW, and on CUDA four blocks. A budget is a bound, so this rounds up.
_UNSEEN_BYTES: Final = 1024
_UNSEEN_ON_CUDA_BYTES: Final = 4096


@dataclass(eq=False)
class StepRecording:
    """Records a step: its ops, the tensors they save, and its memory, while keeping as little as possible.

    Args:
        in_loop: whether it begins in a call of the user's loop, which then tells `returns` of all calls. It takes as little
            memory as it can, and counts memory besides the step on the CPU too, as it always does on CUDA.
        replays_collectives: whether plans may run collectives again; this recording then does.
        engine: what plans of the step will run on; on the tape, `samples_of_graph` stays empty.
        lean_units: the leanest known plan for the step, which then runs under it, within the budget if possible;
            else it drops everything except unit outputs.

    Attributes:
        left_bytes: bytes made by the step and the recording that were alive when the recording stopped, and what is
            left of the last step's gradients.
        meets_gradients: the next step begins with gradients, and this one did not.
        late_gradients_bytes: bytes of those that it frees by `zero_grad` without adding to them.
        samples_of_graph: for each graph of the profile, a call of a unit that has it or is like it, as far as it can run by
        itself.
    """

    model: nn.Module
    units: Sequence[Unit]
    costs: Costs
    device: torch.device
    _: KW_ONLY
    in_loop: bool = False
    replays_collectives: bool = False
    engine: Engine = "tape"
    lean_units: Mapping[str, UnitPlan] | None = None

    def __post_init__(self) -> None:
        for unit in (one for one in self.units if one.is_layer and self.engine == "compile"):
            check_compilers(self.model, unit.path)
        self._modelled = self.costs if isinstance(self.costs, ModelledCosts) else None
        self._ranks = RanksWithParts.of(self.model, self.device, self._modelled)
        self.recorder = StepRecorder(self.costs, self.device, self._ranks, traces=self.traces)
        self._unseen = UnseenStorages(self.recorder, self.device, self.model.parameters)
        self._runs_samples = self.engine == "compile"  # Else they are traced only.
        self._samples = UnitSamples(
            self.model,
            self.device,
            in_excerpts=self.in_loop,
            takes_any=self.engine != "tape",
            takes_parts=not self._runs_samples,
        )
        self._stack = ExitStack()
        self._persistent: dict[str, int] = {}
        self._last_state: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.returns = Returns(self.recorder)
        self.samples_of_graph: dict[int, UnitSample] = {}
        self._ran_optimizer = False
        self._leftovers: dict[Key, Leftover] = {}
        # Where `zero_grad` frees those of the last step, by storage and by parameter (0: nowhere); or the gradient of this step
        # that was made by adding to it.
        self._gradients, self._freed_at = dict[Key, int | Key](), dict[int, int | Key]()
        self._other_bytes = self.left_bytes = self.late_gradients_bytes = 0
        self.meets_gradients = False
        self._to_come = OptimizerStep(0, ())
        self.kernels = self.device.type

    @property
    def traces(self) -> bool:
        return self.engine in ("auto", "graph")

    @property
    def is_on_fake_tensors(self) -> bool:
        return self._modelled is not None

    def start(
        self,
        persistent: Mapping[str, Iterable[torch.Tensor]],
        *,
        gradients: Iterable[torch.Tensor] = (),
        set_aside_bytes: int = 0,
    ) -> None:
        """Begin to record.

        `persistent`: tensors that exist before the step and after it, by kind. `gradients`: those of the last step, which this
        step may free. `set_aside_bytes`: what a CUDA device holds only during this recording, to restore afterwards.
        """
        recorder = self.recorder
        known: list[torch.Tensor] = []
        for kind, group in persistent.items():
            present = self._present(group)
            self._persistent[kind] = storage_bytes(present)
            if kind == "optimizer_state":
                self._last_state = [(weakref.ref(storage), storage.nbytes()) for storage in storages_of(present)]
            recorder.trackers.mark_persistent(present)
            known += present
        if self._ranks is not None:
            self._ranks.begin((*self.model.parameters(), *self.model.buffers(), *persistent.get("batch", ())))
        recorder.note_gathered(self.model.parameters())
        in_buckets, buckets_bytes = self._note_buckets()
        last_gradients = [gradient for gradient in self._present(gradients) if id(gradient) not in in_buckets]
        alive = allocated_storages(storages_of(known)) if self.in_loop and self.device.type == "cpu" else None
        # Existing gradients are logged as if the step made them.
        self._unrelated = UnrelatedMemory(
            self.device,
            known if self.device.type == "cuda" else [*known, *last_gradients],
            alive or (),
            set_aside_bytes=set_aside_bytes + buckets_bytes,
        )
        enter = self._stack.enter_context
        policy, paths = DropAll(but=self.lean_units), [unit.path for unit in self.units]
        agreement = Agreement("recording", is_alone=self.is_on_fake_tensors) if self.replays_collectives else None
        tape = RecordingTape(policy, self._unseen, self._samples, agreement=agreement)
        tape.note_attributes(self.model)
        try:
            enter(apply_policy(self.model, paths, tape))
            self._stack.callback(register_optimizer_step_pre_hook(self._optimizer_begins).remove)
            if not self.in_loop:
                enter(self.returns.seen_by_hooks(self.model, paths))
            enter(filled_storages(recorder.note_resize))
            enter(freed_gradients(self._note_freed))
            enter(self.costs.recording(None if alive is None else Deaths(alive)))
            enter(modes_outlive_compiler())
            enter(StepMode(self._unseen))
        except BaseException:
            self.abort()
            raise
        recorder.begin_phase(events.FORWARD)
        for gradient in last_gradients:
            self._unseen.note_present(gradient)

    def _note_buckets(self) -> tuple[set[int], int]:
        """Count DDP's buckets; return the `id` of gradients that are parts of them, and their bytes."""
        buckets = GradientBuckets(self.model, may_communicate=not self.is_on_fake_tensors)
        nbytes = sum(block_bytes(size, self.device.type) for size in buckets.sizes_bytes)
        if nbytes:
            self._persistent["communication_buckets"] = nbytes
        views = buckets.views()
        self.recorder.trackers.mark_persistent(views)
        self.recorder.is_counted = buckets.claims
        return set(map(id, views)), nbytes

    def _present(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on the device; sparse ones (gradients of an embedding) have no storage to count."""
        return [tensor for tensor in tensors if tensor.device == self.device and tensor.layout is torch.strided]

    def abort(self) -> None:
        self._stack.close()
        self.recorder.close()

    def stop(self, optimizers: Optimizers = None) -> None:
        """Stop recording; state that these optimizers made in the step counts as present from the start."""
        recorder = self.recorder
        self._stack.close()
        freed_at, parameters = self._freed_at.get, list(self.model.parameters())
        # Megatron's loops free those of its copies where they clear its gradient buffers, which is before forward.
        with_gradients = [*parameters, *beside_parameters(parameters, "main_param")]
        # Opacus holds gradients of each sample on the parameters, until `zero_grad` frees all of a parameter's.
        self._gradients = {
            one: freed_at(id(p), 0)
            for p in with_gradients
            for one in keys_outside(tensors_held([p.grad, *map(vars(p).get, ("grad_sample", "summed_grad"))]))
        }
        self._unseen.forget_present(self._gradients)
        made = keys_outside(state_tensors(optimizers))
        self._to_come = still_to_come(optimizers, self.device)
        recorder.event_log.end()
        left = leftovers(recorder.events, recorder.calls)
        met = {one: at for one, at in self._gradients.items() if at and one in left}
        self.meets_gradients = bool(met)
        self.late_gradients_bytes = sum(left[one].nbytes for one, at in met.items() if isinstance(at, int))
        self._note_staying_outputs()
        forget_last_step()
        self.left_bytes = sum(one.nbytes for one in left.values()) + self._samples.held_bytes
        # Fake tensors take no memory.
        self._other_bytes = self._unrelated.nbytes(0 if self.is_on_fake_tensors else self.left_bytes)
        recorder.close()
        # A new optimizer has taken the old one's place, if its state is gone.
        if gone_bytes := sum(nbytes for state, nbytes in self._last_state if state() is None):
            self._persistent["optimizer_state"] -= gone_bytes
        if made:
            made_bytes = sum(left[one].nbytes for one in made if one in left)
            self._persistent["optimizer_state"] = self._persistent.get("optimizer_state", 0) + made_bytes
            memory = events.ALLOC, events.FREE
            rest = [event for event in recorder.events if event[0] not in memory or (-1, event[1]) not in made]
            recorder.event_log.replace(rest)
        self._leftovers = {key: one for key, one in left.items() if key not in made and one.is_held}

    def _note_freed(self, parameter: torch.Tensor) -> None:
        """Note where `zero_grad` frees the last step's gradient; if there is one of this step, that was added to it first."""
        made = next(iter(keys_outside([parameter.grad])), None)
        if made is not None or parameter.grad is None:
            self._freed_at.setdefault(id(parameter), made or len(self.recorder.events) - 1)

    def _note_staying_outputs(self) -> None:
        """Mark outputs of units whose parameters are gone when a different unit's backward asks for the output."""
        freed = freed_after_forward(self.model)
        modules = dict(self.model.named_modules(remove_duplicate=False)) if freed else {}
        for call in self.recorder.calls if freed else ():
            call.output_stays = any(id(part) in freed for part in modules[call.path].modules())
            for value in call.values if call.output_stays else ():
                value.must_keep |= value.is_output and value.producer is not None

    @property
    def peak_bytes(self) -> int:
        """The peak of the recorded step itself, with everything this process had in memory, as measured."""
        return 0 if isinstance(self.costs, ModelledCosts) else self.costs.step_bytes

    def profile(
        self,
        *,
        optimizer_step: OptimizerStep | None,
        gradients: Gradients,
        batch: str,
        loss_chunks: int = 1,
        around: AroundOps = NOTHING,
    ) -> Profile:
        """Return the profile of the step as it runs from the second time on.

        `optimizer_step`: added to the step, unless an optimizer ran in it; None if one did that began before the recording.
        """
        recorder, modelled = self.recorder, self._modelled
        unseen_bytes = _UNSEEN_ON_CUDA_BYTES if self.device.type == "cuda" else _UNSEEN_BYTES
        unseen_bytes = unseen_bytes if modelled is None else 0
        recorder.event_log.replace(self._with_last_step(gradients))
        persistent = dict(self._persistent)
        for kind, nbytes in (("other_tensors", recorder.read_bytes), ("other_allocations", self._other_bytes)):
            if nbytes and not (kind == "other_tensors" and self.device.type == "cuda"):
                persistent[kind] = nbytes
        if optimizer_step is not None and not self._ran_optimizer:
            persistent["optimizer_state"] = optimizer_step.state_bytes
            recorder.add_optimizer_step(optimizer_step.with_room(unseen_bytes))
        elif self._to_come.events:
            persistent["optimizer_state"] = persistent.get("optimizer_state", 0) + self._to_come.state_bytes
            recorder.add_optimizer_step(self._to_come.with_room(unseen_bytes))
        host_link = None if modelled is None else modelled.hardware.host_link
        made = assemble(
            recorder,
            self.costs,
            {unit.path for unit in self.units if unit.is_layer},
            persistent=persistent,
            device=str(self.device),
            kernels=self.kernels,
            device_name=device_name(self.device, self.model) if modelled is None else modelled.hardware.name,
            device_memory_bytes=memory_bytes(self.device) if modelled is None else modelled.hardware.memory_bytes,
            calibration_bytes=unseen_bytes,
            fake=modelled is not None,
            torch_version=torch.__version__,
            model_class=type(self.model).__name__,
            class_names=class_names(self.model),
            parameter_itemsize=max((p.element_size() for p in self.model.parameters()), default=0),
            batch=batch,
            loss_chunks=loss_chunks,
            outputs=tuple(self.returns.deaths()),
            makes_cache=self.returns.makes_cache,
            ranks=self._ranks,
            around=around,
            host=None if around is NOTHING else around.host,
            **({} if host_link is None else host_link.profile_fields()),
        )
        if self.engine != "tape":
            # A copy of a unit that communicates cannot run by itself.
            left_out = recorder.communicating if self._runs_samples else ()
            self.samples_of_graph = self._samples.of_graphs(made, left_out)
        if has_two_clocks(made):
            made = replace(made, step_s=plain_step_times(made).step_s)
        return fold(made)

    def _with_last_step(self, gradients: Gradients) -> list[events.Event]:
        """Return the events with the leftovers of the last step, until they are replaced.

        A gradient is freed by `zero_grad`, else before backward; if backward adds to it, it ends where this step's began. A
        model's output lives until it is replaced (`Returns`).
        Anything else (a loss, a gradient of the input) lives at most until the phase ends in which its successor is made;
        gradients of several losses in one list, until the last are made.
        """
        recorder, left, phases = self.recorder, self._leftovers, Phases(self.recorder.events)
        returned = self.returns.replaced_at(left)
        made_at = {(-1, event[1]): at for at, event in enumerate(recorder.events) if event[0] == events.ALLOC}
        ends = phases.ends_of_results(one for key, one in left.items() if key not in self._gradients)

        def replaced_at(key: Key) -> int:
            if key in self._gradients:
                freed_at = self._gradients[key]
                if isinstance(freed_at, tuple):
                    return made_at.get(freed_at, phases.first_backward)
                return phases.next_after(freed_at or phases.first_backward - 1)
            phase_end = phases.next_after(left[key].made_at)
            end = ends.get(phase_end, phase_end)
            return min(end, returned.get(key, end))

        sizes = {key: one.nbytes for key, one in left.items()}
        if gradients != "held":
            sizes = {key: nbytes for key, nbytes in sizes.items() if self._gradients.get(key, 1)}
        last = {recorder.new_storage(): (nbytes, replaced_at(key)) for key, nbytes in sizes.items()}
        return with_last_step(recorder.events, last)

    @uncompiled
    def _optimizer_begins(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._ran_optimizer = True
        self.recorder.begin_phase(events.OPTIMIZER)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # After the optimizer itself.
        if closure is None:
            return None
        run = self._within_step(closure)
        return ((args[0], run, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": run})

    def _within_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure (forward and backward within an optimizer's step) so that it notes when it ends."""

        def run() -> Any:
            try:
                return closure()
            finally:
                self.recorder.begin_phase(events.OPTIMIZER)

        return run
