"""Faults of verify, of the integrations, of the doctor, of the command line, and of numbers and messages."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "devices-replaced-by-files",
        "`recollect plan --out /dev/null`, as root, leaves a file where the device was",
        "lab/train/files.py",
        (('if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):', "if False:"),),
    ),
    Mutation(
        "formulas-counted-as-recompute",
        "coverage takes the formulas of gradients for ops that run again, where they have a graph of their own",
        "observing",
        ((" and (not keeps_graph() or bool(self._running))", ""),),
    ),
    Mutation(
        "recompute-of-other-units",
        "coverage gives ops that run again outside of modules to no unit",
        "observing",
        (("self._owners[max(0, node - 1)]", "OUTSIDE"),),
    ),
    Mutation(
        "inputs-counted-as-made",
        "coverage counts what views of inputs share with them as made by the unit",
        "observing",
        (("if not old.intersection(map(id, storages_of([tensor])))", ""),),
    ),
    Mutation(
        "not-in-training-mode",
        "coverage does not look at a model's mode",
        "observing",
        (("value, module.training", "value, True"),),
    ),
    Mutation(
        "snapshot-too-new-for-the-viewer",
        "a snapshot is pickled by a protocol that PyTorch's viewer does not read",
        "pictures",
        (("_PROTOCOL = 4", "_PROTOCOL = 5"),),
    ),
    Mutation(
        "names-break-a-notebook",
        "names stand in a notebook's table as the HTML that they may be",
        "pictures",
        (("else escape(str(cell)) for cell in cells", "else str(cell) for cell in cells"),),
    ),
    Mutation(
        "shapes-compared",
        "verify compares the shapes of gradients instead of their bits",
        "verification",
        (("if not has_same_bits(tensor, other):", "if tensor.shape != other.shape:"),),
    ),
    Mutation(
        "state-not-compared",
        "verify does not look at the buffers and generators that a step leaves behind",
        "verification",
        (("state_difference = first_difference(expected.state, got.state)", "state_difference = None"),),
    ),
    Mutation(
        "additional-gradients-accepted",
        "a gradient that is there only under the plan is no difference",
        "verification",
        (('return next(((name, float("inf")) for name in got if name not in expected), None)', "return None"),),
    ),
    Mutation(
        "equal-by-gradients-alone",
        "a report of differing buffers says that all is equal",
        "verification",
        (
            (
                "return self.gradients_equal and self.first_state_difference is None",
                "return self.gradients_equal",
            ),
        ),
    ),
    Mutation(
        "others-trained-by-verify",
        "verify goes on training other models that the optimizers step over, and finds other gradients in each run",
        "verification/steps.py",
        (("(*self.model.parameters(), *stepped)", "self.model.parameters()"),),
    ),
    Mutation(
        "peak-of-the-leanest-rank",
        "a report of several ranks shows the smallest of their peaks",
        "verification",
        (
            (
                "rank = max(by_rank, key=lambda number: by_rank[number].plan_peak_bytes)",
                "rank = min(by_rank, key=lambda number: by_rank[number].plan_peak_bytes)",
            ),
        ),
    ),
    Mutation(
        "slowdown-upside-down",
        "a slowdown is reported as a gain",
        "verification",
        (("found.append(plan_s / plain_s - 1)", "found.append(plain_s / plan_s - 1)"),),
    ),
    Mutation(
        "optimizer-not-put-back",
        "verifying a step of the user's own leaves the optimizer elsewhere",
        "verification",
        (("            put_back()", "            pass"),),
    ),
    Mutation(
        "optimizer-gets-other-tensors",
        "after `verify` an optimizer has copies of its state",
        "recording",
        (("{id(tensor): tensor for tensor in (*parameters, *own)}", "{id(tensor): tensor for tensor in parameters}"),),
    ),
    Mutation(
        "inputs-of-units-not-compared",
        "comparing unit by unit leaves out the gradients of their inputs",
        "verification",
        (('trained |= {f"input {index}": tensor for index, tensor in enumerate(tensors)}', "pass"),),
    ),
    Mutation(
        "block-from-the-end",
        "Megatron's method block recomputes the last layers instead of the first",
        "integrations",
        (
            (
                "full = {path for chunk in chunks for path in chunk[: choice.num_layers]}",
                "full = {path for chunk in chunks for path in chunk[-choice.num_layers :]}",
            ),
        ),
    ),
    Mutation(
        "uniform-as-one-region",
        "Megatron's method uniform drops the inputs of its regions, too",
        "integrations",
        (("for i in range(0, len(chunk), n)]", "for i in range(len(chunk))]"),),
    ),
    Mutation(
        "selective-drops-outputs",
        "a recomputed module's output is dropped, too, which Megatron keeps",
        "integrations",
        (
            (
                "dropped |= inside if outputs[name] == Action.RECOMPUTE else inside - layer.outputs_of(inside)",
                "dropped |= inside",
            ),
        ),
    ),
    Mutation(
        "gathered-inputs-stay",
        "what is gathered is kept whole under Megatron's settings, which keeps its part",
        "integrations",
        (("dropped = {*layer.gathered, *layer.cast_for_router}", "dropped = {*layer.cast_for_router}"),),
    ),
    Mutation(
        "gathers-are-waited-for",
        "Megatron is said to wait for what it gathers beside a product",
        "integrations",
        (("yield min(op.time_s, sum(reader.time_s for reader in readers))", "yield 0.0"),),
    ),
    Mutation(
        "gathers-of-frozen-products-hidden",
        "Megatron is said to hide gathers that backward does not ask for",
        "integrations",
        (("if not any(graph.values[value].saved for value in made):", "if False:"),),
    ),
    Mutation(
        "settings-in-any-order",
        "of Megatron's settings for a pipeline, the first that fits is taken, not the fastest",
        "integrations",
        (("for config in sorted(everywhere, key=added_s):", "for config in everywhere:"),),
    ),
    Mutation(
        "more-layers-than-there-are",
        "a number of layers beyond those of a stage is not refused",
        "integrations",
        (("or value <= max(sizes):", "or True:"),),
    ),
    Mutation(
        "last-group-goes-out",
        "what the last module of a name saves is offloaded too, though backward needs it at once",
        "integrations",
        (("if group is not last[group.name] and group.ops & saving]", "if group.ops & saving]"),),
    ),
    Mutation(
        "part-of-groups-rounded",
        "how many groups are offloaded is rounded otherwise than in Megatron",
        "integrations",
        (("int(len(eligible) * (1 - fraction))]", "round(len(eligible) * (1 - fraction))]"),),
    ),
    Mutation(
        "saved-by-others-too",
        "a value is offloaded though something else saves it as well, so that it never leaves",
        "integrations",
        (("or not savers[key] <= asked}", "or not savers[key] & asked}"),),
    ),
    Mutation(
        "region-asks-early",
        "what a region of layers is recomputed from comes back too late for its last layer",
        "integrations",
        (("= Trip(later, later + ahead)", "= Trip(later, later)"),),
    ),
    Mutation(
        "policy-offload-forgotten",
        "what a policy offloads stays on the device",
        "checkpointing",
        (("        self.send_away(tensor, facts, index)\n", ""),),
    ),
    Mutation(
        "layers-beside-selective",
        "what clashes by being set at all, such as a number of layers with selective recompute, is not refused",
        "integrations",
        (
            (
                'return (value is not None) is (given == "set")',
                'return value is None and given == "unset"',
            ),
        ),
    ),
    Mutation(
        "nothing-to-distribute-to",
        "what needs several ranks, such as distribute_saved_activations, is not refused on one",
        "integrations",
        (('"at most": lambda value, most: value <= int(most),', '"at most": lambda value, most: value < int(most),'),),
    ),
    Mutation(
        "roll-default-misread",
        "full recompute without a method is read as block in ROLL's settings",
        "integrations",
        (('**({"recompute_method": "uniform",', '**({"recompute_method": "block",'),),
    ),
    Mutation(
        "checkpointing-beside-a-budget",
        "a trainer that checkpoints every layer is accepted beside a budget",
        "integrations",
        (("        if getattr(args, name, False):\n", "        if False:\n"),),
    ),
    Mutation(
        "training-step-left-behind",
        "Lightning's module keeps the training step that the callback put there",
        "integrations",
        (("            step.take_off()\n", "            pass\n"),),
    ),
    Mutation(
        "every-micro-step-ends",
        "each of DeepSpeed's accumulated micro-steps counts as the end of a step",
        "integrations",
        (("if self._engine.global_steps != before:", "if True:"),),
    ),
    Mutation(
        "torchtitan-batch-not-checked",
        "a batch larger than planned is not told of in torchtitan",
        "integrations",
        (("or tokens.numel() <= num_tokens:", "or True:"),),
    ),
    Mutation(
        "gate-kept-in-moe-act",
        "the product with the gate counts as no part of moe_act",
        "integrations",
        (('_AFTER_ACTIVATION = frozenset({"mul", ', '_AFTER_ACTIVATION = frozenset({"div", '),),
    ),
    Mutation(
        "weight-kept-in-moe-act",
        "the product with the routing weight counts as no part of moe_act",
        "integrations",
        (("activated.update(op.outputs)", "activated.update(op.outputs if op.activates() else ())"),),
    ),
    Mutation(
        "fragmentation-not-told",
        "the doctor takes fragmentation for a lack of memory",
        "doctor",
        (("if room >= message.tried_bytes:", "if False:"),),
    ),
    Mutation(
        "gib-as-gb",
        "the doctor reads GiB of a message as 10**9 bytes",
        "doctor",
        (('"MiB": 2**20, "GiB": 2**30}', '"MiB": 2**20, "GiB": 10**9}'),),
    ),
    Mutation(
        "pickles-run-code",
        "a memory snapshot may name any class to make, and so run code",
        "doctor",
        (('raise pickle.UnpicklingError(f"it needs {module}.{name}")', "return super().find_class(module, name)"),),
    ),
    Mutation(
        "dtype-mismatch-not-told",
        "a layer that ran again in a different precision is not recognised",
        "doctor",
        (("return old == new and old_dtype != new_dtype", "return False"),),
    ),
    Mutation(
        "lines-counted-once-more",
        "the doctor counts the line that it shows among those like it",
        "doctor",
        (("more = self._counts[rule] - 1", "more = self._counts[rule]"),),
    ),
    Mutation(
        "out-of-memory-passed-over",
        "lines of a log that say out of memory are passed over",
        "doctor",
        (('"heckpoint", "Tried to allocate", ', '"heckpoint", '),),
    ),
    Mutation(
        "unknown-models-have-no-experts",
        "the doctor takes what a file does not say of a model for Megatron's default",
        "doctor",
        (('is_elsewhere = name in _OF_MODEL and settings.get("num_layers") is None', "is_elsewhere = False"),),
    ),
    Mutation(
        "pipe-read-twice",
        "the doctor reads the beginning of a pipe, and then what is left of it",
        "doctor",
        (("if path.is_fifo():", "if False:"),),
    ),
    Mutation(
        "doctor-always-content",
        "recollect doctor exits with 0 if it has recognised nothing",
        "cli",
        (("return 0 if found else _NOTHING_FOUND", "return 0"),),
    ),
    Mutation(
        "bench-always-content",
        "recollect bench exits with 0 if a setting got slower",
        "cli",
        (("return 1 if results.has_regression else 0", "return 0"),),
    ),
    Mutation(
        "recompute-further-inside-passed-over",
        "settings for recompute that a file has further inside, as ROLL's, are passed over, as if nothing were recomputed",
        "integrations/megatron/launch.py",
        (("if deeper and not _RECOMPUTE & values.keys():", "if False:"),),
    ),
    Mutation(
        "errors-exit-with-0",
        "a command that ended with an error exits with 0",
        "cli",
        (("        return _EXIT_ERROR\n", "        return 0\n"),),
    ),
    Mutation(
        "flags-without-words",
        "a flag for a field of the model has no help",
        "cli",
        ((" or _texts().get(FIELD_OF_FLAG.get(field.name, field.name))", ""),),
    ),
    Mutation(
        "debug-without-traceback",
        "--debug shows no traceback",
        "cli",
        (('if "--debug" in words:', "if False:"),),
    ),
    Mutation(
        "budget-error-without-bytes",
        "the error of a budget that is too small does not say it in bytes",
        "errors.py",
        (("({budget_bytes} bytes) is below", "is below"),),
    ),
    Mutation(
        "gb-as-gib",
        "80GB is read as 80 GiB",
        "quantities.py",
        (('**{f"{prefix}b": 1000**power', '**{f"{prefix}b": 1024**power'),),
    ),
    Mutation(
        "percentage-rounded-up",
        "a percentage of the peak is rounded up, beyond what was asked for",
        "quantities.py",
        (
            (
                "return _checked(value, math.floor(number * reference_bytes / 100))",
                "return _checked(value, math.ceil(number * reference_bytes / 100))",
            ),
        ),
    ),
    Mutation(
        "eighty-bytes",
        "a budget of '80' is read as 80 bytes, where a sign was forgotten",
        "quantities.py",
        (("if not 0 < number <= _MOST_PERCENT:", "if not 0 < number < 1:"),),
    ),
    Mutation(
        "least-budget-rounded-down",
        "the least budget that an error names is a little too small",
        "byte_format.py",
        (("tenths = -(-number * 10 // 1024**power)", "tenths = number * 10 // 1024**power"),),
    ),
    Mutation(
        "vocabulary-padded-for-one-rank",
        "a vocabulary is not padded to a multiple for each rank of tensor parallelism, as Megatron's is",
        "cli",
        (("step.model.make_vocab_size_divisible_by * parts", "step.model.make_vocab_size_divisible_by"),),
    ),
    Mutation(
        "loss-not-counted-as-layer",
        "a pipeline's last stage has as many layers as others where Megatron counts the loss as one",
        "integrations",
        (("    sizes[-1] -= ends[1]\n", ""),),
    ),
)
