"""Faults of the engine, of the loop that recomputes a value, and of what stands around a planned model."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "replayed-ops-taken-for-own",
        "ops that run again for a backward within a unit's forward get recipes of that unit, which no record knows",
        "engine/tape_mode.py",
        (("if self.is_foreign() or is_replaying():", "if self.is_foreign():"),),
    ),
    Mutation(
        "replaced-forward-of-class",
        "a planned layer goes on with the forward that its class had when the plan was applied",
        "engine/placed_forward.py",
        (("if self._follows_class and (of_class", "if False and (of_class"),),
    ),
    Mutation(
        "copies-hold-themselves",
        "deep copies of a model with a plan live until a garbage collection: a loop that makes them runs out of memory",
        "engine/placed_forward.py",
        (("        if isinstance(owner, nn.Module):\n", "        if owner == 0:\n"),),
    ),
    Mutation(
        "statistics-made-again",
        "statistics that a batch norm updates are made again, without its update",
        "engine",
        (("# The op itself has saved each, too.", "return"),),
    ),
    Mutation(
        "statistics-saved-before",
        "a gradient reads statistics from before a batch norm updated them, where eager mode reads the new ones",
        "engine",
        (("> sum(one is storage for one in storages):", "> 100:"),),
    ),
    Mutation(
        "write-without-copy",
        "a value that the tape holds is not copied before an op writes to it",
        "engine",
        (
            (
                "storages = snapshot_targets(targets, is_raised=is_raised)",
                "storages = [target.untyped_storage() for target in targets]",
            ),
        ),
    ),
    Mutation(
        "copy-at-even-address",
        "a copy of a slice begins at an even address where the slice does not, and a GPU's kernels add in another order",
        "engine/values.py",
        (("begin = tensor.storage_offset() % max(1, _EVEN_BYTES // tensor.itemsize)", "begin = 0"),),
    ),
    Mutation(
        "weights-of-autograd-and-recipes",
        "autograd and recipes hold a weight together: after a write through `.data`, one of them reads the wrong content",
        "engine/tape_mode.py",
        (("known = self._parameters[id(tensor), in_hook] =", "known = self._parameters[id(tensor), not in_hook] ="),),
    ),
    Mutation(
        "weights-held-by-their-memory",
        "a gradient reads a weight from before its `.data` was assigned to, where eager mode reads the new one",
        "engine/policy.py",
        (("if in_hook and type(tensor) is Parameter and not", "if False and not"),),
    ),
    Mutation(
        "weights-known-by-their-address",
        "an op that runs again reads a weight from before its `.data` was assigned to, or another one at the same address",
        "engine/policy.py",
        (("return is_same or is_partitioned(parameter)", "return True"),),
    ),
    Mutation(
        "saved-weights-without-attributes",
        "a Function's backward gets a weight that it saved without the attributes that are on it",
        "_torch_functions.py",
        (("return tuple([parameters.get(index, one)", "return tuple([one"),),
    ),
    Mutation(
        "forward-lost-in-copies",
        "a copy of a planned model lacks the forwards that its user put on modules, and computes something else",
        "engine/placed_forward.py",
        (("return operator.getitem, ((self.forward,), 0)", 'return getattr, (self.module, "forward")'),),
    ),
    Mutation(
        "forwards-pickled-by-function",
        "a planned model whose layers have lists of modules cannot be unpickled",
        "engine/placed_forward.py",
        (('            return getattr, (self.module, "forward")  #', "            pass  #"),),
    ),
    Mutation(
        "forwards-left-in-place",
        "a plan on two engines leaves a forward on a module that layers share, and the next plan is refused",
        "engine/placed_forward.py",
        (("            self.forward.take_off()", "            pass"),),
    ),
    Mutation(
        "version-not-checked",
        "a held value that was overwritten since forward is used as if it were the old one",
        "engine",
        (("if changes := tensor._version - self.version:", "if changes := 0:"),),
    ),
    Mutation(
        "written-by-a-backward",
        "an op that runs again reads what a Function's backward wrote to a value that it was given",
        "engine/values.py",
        (("self.version = tensor._version  #", "pass  #"),),
    ),
    Mutation(
        "unseen-write-not-noticed",
        "what NumPy wrote into a small held value is used in recompute",
        "engine",
        (("if self.content is not None and self.content != glance_at(tensor):", "if False:"),),
    ),
    Mutation(
        "draw-from-here",
        "an op that draws random numbers runs again from wherever its own generator is",
        "engine",
        (("        generator.set_state(self.state)\n        return generator", "        return generator"),),
    ),
    Mutation(
        "generator-left-elsewhere",
        "after an op that takes no generator ran again, the shared one is not set back",
        "engine",
        (("self.generator.set_state(now)", "pass"),),
    ),
    Mutation(
        "autocast-in-replay",
        "ops run again under the autocast that is on in backward",
        "engine",
        (
            (
                "with outside_vmap(), reruns, Replaying(), torch.enable_grad(), below_autograd(), disable_autocast():",
                "with outside_vmap(), reruns, Replaying(), torch.enable_grad(), below_autograd():",
            ),
        ),
    ),
    Mutation(
        "settings-of-backward",
        "ops run again with the default dtype and the switches of backward instead of those of forward",
        "engine",
        (("if hold_here(self.settings):", "if True:"),),
    ),
    Mutation(
        "statistics-counted-twice",
        "batch norm updates its running statistics once more when it runs again",
        "engine",
        (("args = [None if position in hidden else a for position, a in enumerate(args)]", "args = list(args)"),),
    ),
    Mutation(
        "choices-recomputed",
        "the result of topk is dropped, though others choose by it",
        "engine",
        (('{"topk", "sort", "msort", "argsort"', '{"sort", "msort", "argsort"'),),
    ),
    Mutation(
        "recurrent-dropout-again",
        "a recurrent layer of cuDNN's runs again with other masks of dropout",
        "engine/draws.py",
        (("return facts.draws_elsewhere or ", "return "),),
    ),
    Mutation(
        "searched-convolution-again",
        "a convolution runs again in backward, whose thread has found another kernel for it",
        "engine/facts.py",
        (("(facts.keeps_if_searched and torch.backends.cudnn.benchmark)", "False"),),
    ),
    Mutation(
        "foreign-op-draws-unseen",
        "a custom op that draws without saying so runs again with other numbers",
        "engine",
        (
            (
                "is_random=torch.Tag.nondeterministic_seeded in tags or is_foreign,",
                "is_random=torch.Tag.nondeterministic_seeded in tags,",
            ),
        ),
    ),
    Mutation(
        "mask-recomputed",
        "what a mask selects is dropped, though its shape depends on data",
        "engine",
        (("return any(index is not None and index.dtype in _MASKS for index in args[1])", "return False"),),
    ),
    Mutation(
        "foreign-buffer-recomputed",
        "a buffer that a kernel out of sight may have filled is made again empty",
        "engine",
        (("if record.created is not None:\n", "if False:\n"),),
    ),
    Mutation(
        "output-not-held",
        "the output of a unit is held by nobody, though the plan keeps it",
        "engine",
        (("            self._hold_outputs(unit_path, output, call)", "            pass"),),
    ),
    Mutation(
        "ops-not-counted",
        "the second op of a name in a module gets the action of the first",
        "engine",
        (("self.counts[key] = count + 1", "self.counts[key] = count"),),
    ),
    Mutation(
        "view-without-offset",
        "a view of a recomputed value begins at its first element",
        "engine",
        (("return tensor.as_strided(size, stride, offset)", "return tensor.as_strided(size, stride, 0)"),),
    ),
    Mutation(
        "graph-kept-but-used-up",
        "a second backward over the same graph finds recipes that were used up",
        "engine",
        (("return keeps_graph() and not torch.is_grad_enabled()", "return False"),),
    ),
    Mutation(
        "mismatch-not-told",
        "a plan that does not name a value of the model is applied without a word",
        "engine",
        (("                if is_value:\n", "                if False:\n"),),
    ),
    Mutation(
        "collective-without-agreement",
        "a rank runs a collective again without asking whether the others do",
        "engine",
        (
            (
                'self.agreement.check(name_of_group(self.args, self.kwargs), f"run {self.func} again in backward")',
                "pass",
            ),
        ),
    ),
    Mutation(
        "collective-not-awaited",
        "what a collective makes when it runs again is used before it is there",
        "engine",
        (
            (
                "return [waited_for(result) for result in super().__call__(tensors, may_overwrite_first)]",
                "return list(super().__call__(tensors, may_overwrite_first))",
            ),
        ),
    ),
    Mutation(
        "part-of-the-first-rank",
        "every rank holds the first part of a value that is held as parts",
        "engine",
        (("content[self._rank * size : (self._rank + 1) * size].clone()", "content[:size].clone()"),),
    ),
    Mutation(
        "parts-not-compared",
        "a value that differs from rank to rank is held as parts",
        "engine",
        (("if not bool((everywhere == found).all()):", "if False:"),),
    ),
    Mutation(
        "seeds-drawn-again",
        "compiled code draws other random numbers when it computes a value again",
        "engine",
        (("        if is_seeds(node):\n            return True\n", ""),),
    ),
    Mutation(
        "unit-outputs-dropped",
        "one graph of a whole model computes again what units return",
        "engine",
        (
            (
                "node in held or self._is_kept(node) for node in self.needed",
                "self._is_kept(node) for node in self.needed",
            ),
        ),
    ),
    Mutation(
        "results-tagged-apart",
        "a kept and a dropped result of one op leave no cut of a compiled unit",
        "engine",
        (("                decisions |= dict.fromkeys(together, is_kept)\n", "                pass\n"),),
    ),
    Mutation(
        "absent-results-kept",
        "compiled code keeps attention by cuDNN, some of whose results do not exist and are in no plan",
        "engine",
        (
            ("if names is None or not is_tensor(node):", "if names is None:"),
            ("if isinstance(one, torch.Tensor))", ")"),
        ),
    ),
    Mutation(
        "compiled-backward-twice",
        "the backward of a compiled unit may run a second time over what it has used up",
        "engine",
        (
            (
                "                node.register_prehook(partial(_before_backward, self.path, read))",
                "                pass",
            ),
        ),
    ),
    Mutation(
        "batch-norm-by-its-traced-name",
        "inside the compiler, what a batch norm makes has a name that no plan has: it is kept, with a warning",
        "engine/compiled",
        (('if facts.name.startswith("_native_batch_norm_legit"):', "if False:"),),
    ),
    Mutation(
        "views-of-statistics-unread",
        "inside the compiler, statistics of a group norm that backward reads as views are not kept as a plan says",
        "engine/compiled",
        ((" or (is_view(user) and _is_read_outside(user, members))", ""),),
    ),
    Mutation(
        "later-hooks-of-all-uncompiled",
        "hooks of all modules that come after a unit was compiled do not run",
        "engine/compiled",
        (("forward(*args, **kwargs) if with_global_hooks else forward(*args, **kwargs)", "forward(*args, **kwargs)"),),
    ),
    Mutation(
        "interrupt-leaves-stacks",
        "an interrupt between a change of a stack and its note leaves hooks or modes behind, or another error",
        "engine/tape.py",
        (("                    _put_back(mode, hooks)\n", ""),),
    ),
    Mutation(
        "wrapped-unit-named",
        "a plan does not find the values of a unit inside what torch.compile wrapped around it",
        "engine",
        (('name.removeprefix("_orig_mod.")', "name"),),
    ),
    Mutation(
        "fullgraph-of-a-layer-refused",
        "a layer compiled with fullgraph=True fails under a plan that has it run eagerly, since PyTorch finds no graph",
        "engine",
        (("forward.has_looked = leave_graph() < 0", "forward.has_looked = True"),),
    ),
    Mutation(
        "function-draws-anew",
        "an autograd Function that runs again draws from wherever the generator is",
        "engine",
        (("for generator, state in self._unseen:\n                generator.set_state(state)", "pass"),),
    ),
    Mutation(
        "function-writes-unseen",
        "an autograd Function that writes to an argument out of sight runs again",
        "engine",
        (("        if not positions:\n", "        if True:\n"),),
    ),
    Mutation(
        "collective-writes-unseen",
        "a collective that writes in place is taken for one that does not",
        "engine",
        (('return (0,) if name.endswith("_") else ()', "return ()"),),
    ),
    Mutation(
        "write-in-sight-refused",
        "a write in sight, of an output between units, is taken for one out of sight",
        "engine",
        (("            notes.clear()  # Of parts", "            pass  # Of parts"),),
    ),
    Mutation(
        "argument-of-a-write-refused",
        "a write in sight to what the op also reads is taken for one out of sight",
        "engine",
        (("            forget_content(storage)  # `_bind_write`", "            pass  # `_bind_write`"),),
    ),
    Mutation(
        "group-keeps-a-function",
        "a Function that is told a process group is kept",
        "engine",
        ((", *PROCESS_GROUPS)", ")"),),
    ),
    Mutation(
        "userbuffers-forgotten",
        "a product that communicates in buffers of the process runs again",
        "engine",
        (('self.keep("it may communicate while it multiplies")', "pass"),),
    ),
    Mutation(
        "bundle-not-made-anew",
        "a Function that runs again gets the values of its bundled arguments in place of the bundle",
        "engine",
        (("for position, kind in self._bundles.items():", "for position, kind in ():"),),
    ),
    Mutation(
        "collective-in-function-kept",
        "a Function that runs a collective is kept, although all ranks run one plan",
        "engine",
        (('"c10d:_reduce_scatter_base_", "c10d:allreduce_"})', "})"),),
    ),
    Mutation(
        "unread-argument-held",
        "a product that reads nothing of its first argument holds it, or a copy",
        "engine",
        (('kwargs.get("beta", 1) == 0', "not kwargs"),),
    ),
    Mutation(
        "content-not-compared",
        "the first call of a unit does not look for writes by kernels that were given an address",
        "engine",
        (("if outer is None and self._must_compare(forward):", "if False:"),),
    ),
    Mutation(
        "content-compared-once-for-a-class",
        "of several modules of a class that are checkpointed, only the first is watched for unseen writes",
        "engine/tape.py",
        (("forward if isinstance(forward, torch.nn.Module) else getattr(", "getattr("),),
    ),
    Mutation(
        "alias-overwritten",
        "an in-place op that runs again overwrites a value that another one shares its storage with",
        "replay.py",
        (("return not self.inputs[0].is_viewed and self._count", "return self._count"),),
    ),
    Mutation(
        "every-write-copied",
        "an in-place op that runs again copies its target even if nobody else needs it",
        "replay.py",
        (("may_overwrite_first = self.mutates and self._owns_first()", "may_overwrite_first = False"),),
    ),
    Mutation(
        "plans-of-others-count",
        "the plan of a model that only shares a module counts as the model's own",
        "applying.py",
        (("if one in own or _holds(one.model, model) or _holds(model, one.model)]", "]"),),
    ),
    Mutation(
        "applied-twice",
        "a second plan is put on a model that has one",
        "applying.py",
        (
            (
                'raise already_applied(name, "a recollect plan", f"remove that plan first: {own.applied.removal}")',
                "pass",
            ),
        ),
    ),
    Mutation(
        "wrapper-frees-unseen",
        "a plan may drop values whose parameters FSDP1 frees after forward",
        "_torch_fsdp.py",
        (("found = _freed_by_wrappers(model)", "found: set[int] = set()"),),
    ),
    Mutation(
        "freed-output-dropped",
        "a plan may drop an output whose parameters FSDP2 frees after forward",
        "applying.py",
        (("if unit.output is Action.RECOMPUTE and any(", "if False and any("),),
    ),
    Mutation(
        "own-checkpoint-inside",
        "a model's own checkpoint inside a unit recomputes what the plan keeps",
        "engine",
        (("    elif _units.running:", "    elif False:"),),
    ),
    Mutation(
        "own-checkpoint-around",
        "a model's own checkpoint around units runs them again",
        "engine",
        (("has_units = _units.begun > begun", "has_units = False"),),
    ),
    Mutation(
        "own-checkpoint-elsewhere",
        "what a checkpoint saves in which no unit runs is kept",
        "engine",
        (("has_units = _units.begun > begun", "has_units = True"),),
    ),
    Mutation(
        "transform-recorded",
        "a call of the model under a function transform is recorded as any other",
        "recording",
        (("if self._outermost is not module or transforms_are_active():", "if self._outermost is not module:"),),
    ),
    Mutation(
        "transform-in-unit",
        "a function transform inside a unit is an error",
        "_torch_functions.py",
        (("fail_if_non_empty and not is_ours", "fail_if_non_empty"),),
    ),
    Mutation(
        "trace-in-unit",
        "the tape's own ops are traced by torch.func.linearize",
        "engine",
        ((" or tracing_mode() is not None", ""),),
    ),
    Mutation(
        "settings-as-at-the-beginning",
        "an op runs again under the default dtype that a unit began with, though it has changed it",
        "engine/opcall.py",
        (("if facts.follows_settings or self.values[:3] != general:", "if facts.follows_settings:"),),
    ),
    Mutation(
        "functions-under-any-settings",
        "a Function runs again under the settings of backward",
        "engine/function_call.py",
        (("stack.enter_context(self.settings.applied(current_settings()))", "pass"),),
    ),
    Mutation(
        "views-of-other-types",
        "a unit that returns a view of another type, as of complex numbers, is taken for overwritten",
        "engine/values.py",
        (
            (
                "tensor = tensor.as_strided((num_bytes // tensor.itemsize,), (1,), 0).view(dtype)",
                "tensor = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())",
            ),
        ),
    ),
    Mutation(
        "hooks-off-within-transforms",
        "what a unit saves after a `torch.func.grad` stays: a module within it cannot put its hooks back",
        "engine/tape_mode.py",
        ((" and self._may_unhook and not transforms_are_active():", " and self._may_unhook:"),),
    ),
    Mutation(
        "statistics-out-of-sight",
        "a module that updates statistics unseen runs past the tape, which goes on to hold them",
        "engine/tape_mode.py",
        (("if updated or facts.changes_storage:", "if facts.changes_storage:"),),
    ),
    Mutation(
        "captured-glances",
        "the tape reads what tensors hold while a CUDA graph is captured",
        "engine",
        (("None if in_hook or self.is_captured else", "None if in_hook else"),),
    ),
    Mutation(
        "captured-comparison",
        "the first call of a unit compares contents while a CUDA graph is captured",
        "engine",
        (("                if mode.is_captured:\n", "                if False:\n"),),
    ),
    Mutation(
        "captured-mask-unplanned",
        "a model that computes more while a graph is captured is planned as if none were",
        "capturing",
        (("with self._graphs.running(), _as_captured(static.batch):", "with self._graphs.running():"),),
    ),
    Mutation(
        "captured-draws",
        "an op draws other random numbers in a replayed graph's backward than in its forward",
        "engine",
        (
            ("if self.is_captured and facts.is_random:", "if False:"),
            ('        refuse_draws(facts, func, args, kwargs, "", str(func))\n', ""),
        ),
    ),
    Mutation(
        "captured-function-draws",
        "a custom Function that draws random numbers runs again in a captured step",
        "engine",
        (("if run.draws.is_unknown:", "if False:"),),
    ),
    Mutation(
        "captured-policy-draws",
        "what a checkpoint's policy does not save draws other random numbers in a captured step",
        "checkpointing",
        (("if self.is_captured and facts.is_random and", "if False and"),),
    ),
    Mutation(
        "captured-copies",
        "values leave for host memory while a CUDA graph is captured",
        "engine/offload",
        (("        if is_capturing():\n", "        if False:\n"),),
    ),
    Mutation(
        "captured-reruns-timed",
        "what the tape runs again is timed while a CUDA graph is captured",
        "engine",
        (("if self.reruns is None or is_capturing() else", "if self.reruns is None else"),),
    ),
    Mutation(
        "captured-recording",
        "an attached loop records a step while a CUDA graph is captured",
        "attaching/attached.py",
        (("        if is_capturing():\n", "        if False:\n"),),
    ),
    Mutation(
        "captured-readings",
        "an attached loop reads clocks while a CUDA graph is captured",
        "attaching/held.py",
        (("        if is_capturing():\n", "        if False:\n"),),
    ),
    Mutation(
        "compiled-parameters-not-gathered",
        "the backward of a compiled unit reads parameters whose memory FSDP2 has freed",
        "engine/compiled",
        (("check_filled(tensor, path)", "pass"),),
    ),
    Mutation(
        "gathered-weights-not-held",
        "what ZeRO-3 gathers for a layer is freed earlier than predictions count, and steps exceed their budget",
        "engine/policy.py",
        ((" and not is_partitioned(tensor):", ":"),),
    ),
    Mutation(
        "short-runs-settle",
        "runs that call ops less often than the plan foresees tell which modules need no watching",
        "engine/policy.py",
        (("not self.policy.are_met(unit_path, counts)", "not self.policy"),),
    ),
    Mutation(
        "fake-recordings-told",
        "one rank that plans for all of them on fake tensors waits for the others, and then raises an error",
        "recording/step_recording.py",
        (("is_alone=self.is_on_fake_tensors", "is_alone=False"),),
    ),
    Mutation(
        "plans-counted-apart",
        "ranks that changed between plans at different times do not meet under the first plan that they all need",
        "applying.py",
        (("is_alone=is_alone)", "is_alone=False)"),),
    ),
    Mutation(
        "shared-modules-named-once",
        "a module that layers share has the name of the first layer in all of them, which their plans do not know",
        "engine/tape_forwards.py",
        (("self.names[mode.unit_path]", "next(iter(self.names.values()))"),),
    ),
)
