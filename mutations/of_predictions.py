"""Faults of the recorder, the profile, the simulator, the meter and the costs."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "attributes-made-by-layers",
        "tensors that layers hold as attributes count as made by them in each step",
        "recording/recording_tape.py",
        (("if self.tape.held_before.get(storage):", "if False:"),),
    ),
    Mutation(
        "micro-steps-play-once-on-two-clocks",
        "equal micro-steps, of which one is stored, take the time of one on two clocks",
        "simulation/clocks.py",
        (("(self.num_runs - 1) * (after_s", "0 * (after_s"),),
    ),
    Mutation(
        "noise-copied-before-it-is-drawn",
        "in a recorded step, a gradient reads the memory that a random op had yet to fill when autograd saved it",
        "recording/recording_tape.py",
        (("or self.is_unfilled or is_parameter", "or is_parameter"),),
    ),
    Mutation(
        "statistics-copied-once",
        "in a recorded step, a gradient reads statistics from before a batch norm updated them",
        "recording/recording_tape.py",
        (("tracker.forget_copy()", "pass"),),
    ),
    Mutation(
        "recorded-weights-copied",
        "in a recorded step, a gradient reads a weight from before its `.data` was assigned to",
        "recording/recording_tape.py",
        (("or self.is_unfilled or is_parameter", "or self.is_unfilled"),),
    ),
    Mutation(
        "lists-of-gradients-die-early",
        "gradients of several losses in a list are predicted to be gone while the next step makes the others",
        "recording/next_step.py",
        (("if at == end or (own.total() > 1 and own <= its)", "if at == end"),),
    ),
    Mutation(
        "masks-of-fake-tensors",
        "on fake tensors a model of transformers makes a mask in each layer that it does without in eager mode",
        "recording/fake_model.py",
        (("        eager_masks(batch),\n", ""),),
    ),
    Mutation(
        "mapping-without-tensors",
        "no tensor is found in a batch that is a mapping but not a dict",
        "recording",
        (
            (
                "return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch",
                "return batch",
            ),
        ),
    ),
    Mutation(
        "list-of-results-dropped",
        "results in a list are planned one by one, though a plan is asked once for all of them",
        "recording/recording_tape.py",
        (("if asks and not is_list and not self.must_keep(facts)", "if asks and not self.must_keep(facts)"),),
    ),
    Mutation(
        "content-of-attributes-changed",
        "recording a batch changes what the attributes of modules hold: lists, tables, generators",
        "recording/restored_state.py",
        (("        for restore in self._content:\n            restore()\n", ""),),
    ),
    Mutation(
        "gradients-beside-the-model-left",
        "recording a batch leaves gradients in weights of the loss, to which the first step of the loop adds",
        "recording/model_step.py",
        (("for tensor, gradient in self._alive_beside():\n                tensor.grad = gradient", "pass"),),
    ),
    Mutation(
        "copies-run-the-model",
        "the copy of a unit that is measured runs the model's own modules, where functions stand for their forwards",
        "recording",
        (('vars(module)["forward"] = _of_copies(own_forward, copies)', "pass"),),
    ),
    Mutation(
        "large-results-as-small-ones",
        "the tape takes as long for an op with large results as for one with small results",
        "profile",
        (("return self.seen_op_s + large * self.large_op_s", "return self.seen_op_s"),),
    ),
    Mutation(
        "deaths-unseen",
        "a storage that dies on a different thread hides what is allocated at the address of its mark",
        "measuring",
        (("if num_bytes > 0 and address not in made:", "if num_bytes > 0:"),),
    ),
    Mutation(
        "host-does-not-wait",
        "the host does not wait for a number that Python reads",
        "simulation",
        (("{**super().actions(), WAIT: self._wait}", "super().actions()"),),
    ),
    Mutation(
        "byte-too-many",
        "every value is played one byte larger than it is",
        "simulation",
        (
            ("playback.alive_bytes += nbytes", "playback.alive_bytes += nbytes + 1"),
            ("room.alive_bytes -= self.nbytes", "room.alive_bytes -= self.nbytes + 1"),
        ),
    ),
    Mutation(
        "workspace-not-played",
        "what an op needs while it runs is not in the peak",
        "simulation",
        (("self._bulk(op.working_bytes, 0)", "pass"),),
    ),
    Mutation(
        "generator-states-not-played",
        "the states of generators that recompute needs take no bytes",
        "simulation",
        (("step.token_type(step, state_bytes, (GENERATOR", "step.token_type(step, 0, (GENERATOR"),),
    ),
    Mutation(
        "dead-saves-end-a-call",
        "a traced call whose forward lets go of what it saved first is played as if it kept nothing",
        "simulation",
        (("is_running = self._running is not None and self._running.call == call", "is_running = False"),),
    ),
    Mutation(
        "retained-graph-played-as-used-up",
        "a traced call lets go of what it saved in a backward that keeps its graph",
        "simulation",
        (("is_retained = code == events.LET_GO or (is_retained and code != events.PHASE)", "is_retained = False"),),
    ),
    Mutation(
        "calibration-of-forward-only",
        "the bytes that calibration adds are missing in backward",
        "simulation",
        (
            (
                "calibration_bytes = (profile.calibration_bytes, profile.calibration_bytes, 0)",
                "calibration_bytes = (profile.calibration_bytes, 0, 0)",
            ),
        ),
    ),
    Mutation(
        "folded-runs-cost-once",
        "an op of a call that stands for several runs costs the time of one",
        "simulation",
        (("self.rerun_s.append(num_runs * self", "self.rerun_s.append(self"),),
    ),
    Mutation(
        "private-copy-not-played",
        "the copy that the tape makes before a write takes no bytes",
        "simulation",
        (("leaf.tensor = self.token_type(self, token.nbytes, old)", "leaf.tensor = self.token_type(self, 0, old)"),),
    ),
    Mutation(
        "sums-end-too-early",
        "a value that several units hold ends, in the sums over units, with the first of them",
        "simulation",
        (("if key not in last or last[key][0] < position:", "if key not in last or last[key][0] > position:"),),
    ),
    Mutation(
        "kept-values-played-as-dropped",
        "what the tape has to keep is played as dropped if a plan says so",
        "simulation",
        (("return Action.KEEP if value.must_keep else action", "return action"),),
    ),
    Mutation(
        "parts-without-ranks",
        "a plan with values in parts is predicted from a profile without ranks",
        "simulation",
        (("if profile.shard_ranks == 1:", "if False:"),),
    ),
    Mutation(
        "windows-of-the-first-unit",
        "what backward runs for the last of the units that wait is ascribed to the first",
        "simulation",
        (("self.call = max(self._num_waiting)", "self.call = min(self._num_waiting)"),),
    ),
    Mutation(
        "usage-without-tape",
        "the time of a layer leaves out what watching its ops takes",
        "planning",
        (("recompute_s=rerun_s + around_s,", "recompute_s=rerun_s,"),),
    ),
    Mutation(
        "blocks-rounded-down",
        "blocks of the CUDA allocator are rounded down",
        "profile",
        (
            (
                "block = -(-nbytes // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES",
                "block = nbytes // _CUDA_BLOCK_BYTES * _CUDA_BLOCK_BYTES",
            ),
        ),
    ),
    Mutation(
        "large-blocks-split",
        "the rest of a segment of CUDA's allocator is not counted",
        "profile",
        (("return block + rest if block >= _LARGE_BLOCK_BYTES", "return block if block >= _LARGE_BLOCK_BYTES"),),
    ),
    Mutation(
        "tape-times-not-read",
        "a profile loses what watching its modules takes on the way through a file",
        "fields.py",
        (
            (
                "return lambda place: tuple((key, item(member)) for key, member in place.members().items())",
                "return lambda place: ()",
            ),
        ),
    ),
    Mutation(
        "freed-twice-accepted",
        "a log that frees a storage twice is taken for a good one",
        "profile",
        (("if storage not in self._storages:", "if False:"), ("self._storages.remove(", "self._storages.discard(")),
    ),
    Mutation(
        "folded-calls-run-once",
        "a call that stands for several micro-steps counts as one",
        "profile",
        (("num_runs=call.num_runs * self._num_runs.get(index, 1)", "num_runs=call.num_runs"),),
    ),
    Mutation(
        "buffers-changed-by-recording",
        "recording leaves the buffers as its step made them",
        "recording",
        (("_write_back(buffer, before)", "pass"),),
    ),
    Mutation(
        "generators-moved-by-recording",
        "recording leaves PyTorch's generator elsewhere",
        "recording",
        (("        torch.random.set_rng_state(of_pytorch)\n", ""),),
    ),
    Mutation(
        "host-generators-moved-by-recording",
        "recording leaves the generators of Python and NumPy elsewhere",
        "recording",
        (("        np.random.set_state(of_numpy)\n", ""),),
    ),
    Mutation(
        "gradients-lost-by-recording",
        "recording leaves the gradients that were there behind as none",
        "recording",
        (("        for parameter, gradient in gradients:\n            parameter.grad = gradient\n", "        pass\n"),),
    ),
    Mutation(
        "optimizer-without-temporaries",
        "what an optimizer allocates while it steps is not recorded",
        "recording",
        (("return OptimizerStep(sum(nbytes), events)", "return OptimizerStep(sum(nbytes), ())"),),
    ),
    Mutation(
        "optimizer-of-another-model",
        "an optimizer of other parameters than the model's is accepted",
        "recording",
        (("if not own or not steps_over or any(", "if True or any("),),
    ),
    Mutation(
        "saved-value-not-marked",
        "that autograd saves a value is recorded in the log, but not with the value",
        "recording",
        (("value.saved, value.saved_elements = True, max(", "value.saved_elements = max("),),
    ),
    Mutation(
        "write-of-another-unit-forgotten",
        "a value that another unit writes to may be dropped",
        "recording",
        (("self.keep([tensor])\n            for index, call", "for index, call"),),
    ),
    Mutation(
        "copy-of-old-content-forgotten",
        "what is made of a value that another unit writes to later may be dropped, though its recipe then holds a copy",
        "recording",
        (("call.values[value].must_keep = True", "pass"),),
    ),
    Mutation(
        "filled-buffers-copied-once",
        "in a recorded step, recipes read a buffer from before a Function filled more of it",
        "recording/recording_tape.py",
        (("        _forget_copies(run.wrote_unseen)\n", ""),),
    ),
    Mutation(
        "deaths-not-measured",
        "what was there before and dies meanwhile still counts in a measured peak",
        "measuring",
        (("if address == OLDER:\n            total_bytes += num_bytes", "if address == OLDER:\n            pass"),),
    ),
    Mutation(
        "trace-left-open",
        "the allocator's trace outlives the thread that began it",
        "_torch_memory.py",
        (("at_end_of_thread(_close)", "at_end_of_thread(bool)"),),
    ),
    Mutation(
        "threads-measure-at-once",
        "two threads that measure memory on the CPU at once crash the process",
        "_torch_memory.py",
        (
            ("not _TURN.acquire(timeout=_MOST_WAIT_S)", "_TURN.acquire(blocking=False) and False"),
            ("        _TURN.release()", "        _TURN.locked() and _TURN.release()"),
        ),
    ),
    Mutation(
        "tuples-held-as-they-are-filled",
        "a look at all objects ends `tuple(generator)` in another thread with a SystemError",
        "measuring",
        (
            (
                "list(compress(chain(things, (None,)), are_tensors))",
                "[one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]",
            ),
        ),
    ),
    Mutation(
        "forked-process-waits",
        "a forked process waits at its end for a thread of Kineto that it does not have",
        "_torch_memory.py",
        (("        _let_forked_processes_end()\n", ""),),
    ),
    Mutation(
        "baseline-ignored",
        "a measured peak begins at what is there instead of at the baseline that was given",
        "measuring",
        (
            (
                "start_bytes = watch.start_bytes if baseline_bytes is None else baseline_bytes",
                "start_bytes = watch.start_bytes",
            ),
        ),
    ),
    Mutation(
        "first-allocation-missed",
        "the first thing that an op allocates is not in its peak",
        "measuring",
        (("in self._events[begin + 1 : end]:", "in self._events[begin + 2 : end]:"),),
    ),
    Mutation(
        "shared-storage-counted-twice",
        "tensors that share a storage each count with all of it",
        "measuring",
        (
            (
                "return sum(storage.nbytes() for storage in storages_of(tensors))",
                "return sum(tensor.untyped_storage().nbytes() for tensor in tensors)",
            ),
        ),
    ),
    Mutation(
        "bf16-as-fp32",
        "products in bf16 take the time of fp32",
        "costs",
        (('torch.bfloat16: "bf16",', 'torch.bfloat16: "fp32",'),),
    ),
    Mutation(
        "causal-attention-in-full",
        "causal attention counts the products of all pairs",
        "costs",
        (("pairs -= pairs * late / (2 * num_keys)", "pass"),),
    ),
    Mutation(
        "one-adapter-for-all",
        "rings across nodes use one network adapter of a node, however many devices they have there",
        "costs",
        (("[together * self.between.bytes_per_s]", "[self.between.bytes_per_s]"),),
    ),
    Mutation(
        "dropout-of-the-cpu",
        "a record for a GPU that is not here has the CPU's ops of dropout",
        "recording",
        (("{F.dropout: _dropout, ", "{"),),
    ),
    Mutation(
        "all-reduce-at-half",
        "an all-reduce takes the time of a reduce-scatter",
        "costs",
        (('(2 * once_s if kind == "all_reduce" else once_s)', "once_s"),),
    ),
    Mutation(
        "limits-added",
        "the times of arithmetic and of traffic are added, though the longer one hides the other",
        "costs",
        (("work.launches * hardware.launch_s + max(limits_s)", "work.launches * hardware.launch_s + sum(limits_s)"),),
    ),
    Mutation(
        "costs-without-dtype",
        "an op in another dtype takes over the cost of the first one",
        "costs",
        (("(argument.stride(), argument.dtype)", "(argument.stride(),)"),),
    ),
    Mutation(
        "fastest-host-link",
        "of several processes the fastest link to a host counts, not the slowest",
        "ranks",
        (
            (
                "to_host_bytes_per_s=min(to_host), from_host_bytes_per_s=min(from_host)",
                "to_host_bytes_per_s=max(to_host)",
            ),
        ),
    ),
    Mutation(
        "copies-of-one-direction-alone",
        "the rate of a direction counts copies that ran when the other one was over",
        "costs",
        (("for begin, end in together or spans", "for begin, end in spans"),),
    ),
    Mutation(
        "host-link-left-out",
        "a fake profile does not say how fast copies to the host are",
        "recording",
        (("{} if host_link is None else host_link.profile_fields()", "{}"),),
    ),
    Mutation(
        "fp8-emulated-in-plans",
        "plans for a device multiply in 8 bits as this machine does",
        "lab/models",
        (
            (
                'kernels_of(left.values) == "cpu" if self.emulated',
                'left.values.device.type == "cpu" if self.emulated',
            ),
        ),
    ),
    Mutation(
        "fp8-without-a-kernel",
        "a device without kernels for 8 bits multiplies in them as in fp32",
        "costs",
        (("if dtype in EIGHT_BITS and dtype not in by_dtype:", "if False:"),),
    ),
    Mutation(
        "fake-function-saves-forever",
        "what a custom Function saved on fake tensors is never released",
        "recording",
        (("if is_fake_tensor(tensor):  # A storage", "if False:  # A storage"),),
    ),
    Mutation(
        "output-held-as-its-own",
        "an output that a compiled unit keeps counts among what is its own, too",
        "recording",
        (("for address, nbytes in made.items() if address not in values}", "for address, nbytes in made.items()}"),),
    ),
    Mutation(
        "gradient-of-output-stays",
        "the gradient of a compiled unit's output does not go in backward",
        "recording",
        (("for address, nbytes in gradients if address in self.gradients}", "for address, nbytes in gradients[:0]}"),),
    ),
    Mutation(
        "input-never-let-go",
        "what a compiled unit holds is held to the end of its backward",
        "recording",
        (("if not nbytes and address in held:", "if False:"),),
    ),
    Mutation(
        "fake-deaths-not-noted",
        "nothing that compiled code frees on fake tensors is seen to go",
        "recording",
        (("Death(storage, self._events.append)", "Death(storage)"),),
    ),
    Mutation(
        "estimates-not-said",
        "what compiled units take by their code alone counts as measured",
        "recording",
        (("is_estimated=runs.is_modelled", "is_estimated=False"),),
    ),
    Mutation(
        "alike-sets-compiled",
        "sets of values of nearly the same bytes are all compiled, ten seconds each",
        "planning",
        (("_ALIKE: Final = 0.002", "_ALIKE: Final = 0.0"),),
    ),
    Mutation(
        "pointwise-as-dear-as-reductions",
        "compiled pointwise ops cost what reading their results does, in the cuts that propose what to keep",
        "planning",
        (("_FUSED: Final = 0.02", "_FUSED: Final = 1.0"),),
    ),
    Mutation(
        "compiled-times-of-one-rank",
        "ranks plan compiled units by times of their own",
        "ranks",
        (("yield from (graph.eager_s, *(variant", "yield from (1.0, *(variant"),),
    ),
    Mutation(
        "end-of-a-compiled-step-unseen",
        "a recording that began within the compiler's wrapper sees nothing of what runs after it",
        "recording",
        (("            enter(modes_outlive_compiler())\n", ""),),
    ),
    Mutation(
        "rounding-below-zero",
        "two modelled times that differ by rounding make a slowdown below zero",
        "profile",
        (("return 0.0 if math.isclose(seconds, default_s) else seconds - default_s", "return seconds - default_s"),),
    ),
    Mutation(
        "copies-gradients-held",
        "gradients of Megatron's fp32 copies, which it frees before forward, count through the whole step",
        "recording",
        (('[*parameters, *beside_parameters(parameters, "main_param")]', "parameters"),),
    ),
    Mutation(
        "hosts-time-for-nothing",
        "issuing ops takes the host no time",
        "simulation",
        (("self.host_s += issue_s", "self.host_s += 0.0"),),
    ),
    Mutation(
        "device-before-its-host",
        "the device runs an op before the host has issued it",
        "simulation",
        (("self.device_s = max(self.device_s, self.host_s) + kernel_s", "self.device_s = self.device_s + kernel_s"),),
    ),
    Mutation(
        "item-does-not-wait",
        "the host reads a result before the device has it",
        "simulation",
        (("self.host_s = max(self.host_s, self.device_s)", "pass"),),
    ),
    Mutation(
        "reruns-free-of-the-tape",
        "an op that the tape runs again takes only its own time",
        "profile",
        (("return op.time_s + self.again_op_s", "return op.time_s"),),
    ),
    Mutation(
        "hooks-see-other-layers",
        "hooks of all modules see the layers that tell what is around ops",
        "_torch_private.py",
        (("            table.clear()\n", "            pass\n"),),
    ),
    Mutation(
        "modes-see-other-layers",
        "the caller's modes see the layers that tell what is around ops",
        "recording",
        (("(without_modes(), without_global_hooks())", "(without_global_hooks(),)"),),
    ),
    Mutation(
        "clipping-counts-as-a-unit",
        "a unit counts as communicating, and runs on the tape, where the loop clips the gradients of shards",
        "recording",
        ((" if current_autograd_node() >= 0 else -1", ""),),
    ),
    Mutation(
        "gathers-inside-traced-units",
        "what FSDP2 gathers before a unit's backward counts as made in it",
        "recording",
        (("if self._call >= 0 and data_parallelism_runs():", "if False:"),),
    ),
    Mutation(
        "state-dict-hooks-gone",
        "after a recording, the state dict of a model that FSDP2 shards has whole parameters that forward gathered",
        "recording/restored_state.py",
        (('if "state_dict" not in name)', ")"),),
    ),
    Mutation(
        "stand-ins-for-sharded-parameters-stay",
        "a model that FSDP2 shards trains the stand-ins with which its units were traced",
        "_torch_fsdp.py",
        (("put_parameter(holder, attribute, part)", "pass"),),
    ),
    Mutation(
        "sharded-units-not-traced",
        "plans leave a unit that FSDP2 shards to the tape, since what gathers its parameters communicates",
        "recording",
        ((" and not data_parallelism_runs():", ":"),),
    ),
    Mutation(
        "compiled-code-holds-nothing",
        "what compiled code in a layer is given in backward counts as free once autograd has handed it over",
        "recording",
        (("return tensor if packed.need is None else self._needed(tensor, packed.need)", "return tensor"),),
    ),
    Mutation(
        "larger-inputs-unseen",
        "a unit that runs on larger inputs than planned, in a call of the same shapes, counts as planned",
        "attaching",
        (("if numel > self.numel:", "if numel < self.numel:"),),
    ),
    Mutation(
        "larger-named-inputs-unseen",
        "attach looks at the size of a unit's input only if the model passes it by position",
        "attaching/unit_watch.py",
        (("args[0] if args else next(iter(kwargs.values()), None)", "args[0] if args else None"),),
    ),
    Mutation(
        "further-gradients-unseen",
        "a part of the loss that comes in later, and reaches more parameters, takes steps over the budget in silence",
        "attaching/held.py",
        (("if nbytes and planned.peak_bytes + nbytes > planned.budget_bytes:", "if False:"),),
    ),
    Mutation(
        "later-state-taken-for-planned",
        "state that an optimizer makes after some steps counts as planned, and steps go over the budget in silence",
        "attaching/step_planner.py",
        (("if not beyond_noise(more_bytes + new_state_bytes, active):", "if not more_bytes:"),),
    ),
    Mutation(
        "spare-layers-work-in-no-room",
        "a layer that a recorded step lacked recomputes its values in memory that its plan has for others",
        "attaching",
        (
            (
                "return max(0, max(tops) + levels.profile.calibration_bytes - levels.simulation.peak_bytes)",
                "return 0",
            ),
        ),
    ),
    Mutation(
        "buckets-of-the-first-step",
        "the buckets that data parallelism makes anew before its second step count besides the first one",
        "_torch_parallel.py",
        (("replica.logger.set_runtime_stats_and_log()", "pass"),),
    ),
    Mutation(
        "gradient-of-a-different-size",
        "a gradient that is alive at the start of a step is freed where a gradient of a different size is made",
        "recording",
        (("if gradient[0] == nbytes), None)", "if gradient[0] != nbytes), None)"),),
    ),
    Mutation(
        "workspace-of-a-graph-twice",
        "in the pool of a graph an op's results are taken besides its workspace, which has them",
        "simulation",
        (("workspace_bytes -= storage.nbytes", "workspace_bytes += storage.nbytes"),),
    ),
    Mutation(
        "chunks-though-slower",
        "a step of several devices computes its loss in more chunks, though that takes longer",
        "planning",
        (("found.step_s >= (1 - SAME_TIME) * best.step_s", "found.step_s < (1 - SAME_TIME) * best.step_s"),),
    ),
    Mutation(
        "results-beside-a-write-unseen",
        "what an op returns beside what it writes, as of `rrelu` and its noise, is not known to be kept",
        "recording/step_recorder.py",
        (("                self.note_opaque(storage)\n", "                pass\n"),),
    ),
    Mutation(
        "layers-held-twice",
        "layers that a helper of the model holds too are two units each, and every step is recorded again",
        "recording/find_units.py",
        (("not unit.is_layer or firsts[id(unit.module)] is unit", "firsts"),),
    ),
)
