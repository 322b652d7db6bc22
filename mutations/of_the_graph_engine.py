"""Faults of the graph engine: what a trace rests on, how it is cut, and how its programs run."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "gradients-of-whole-backwards-held",
        "a backward that keeps its graph holds the gradient of each layer's output until the graph is freed",
        "engine/graph/node.py",
        ((" and keeps_graph() and not goes_everywhere(ctx)", " and keeps_graph()"),),
    ),
    Mutation(
        "graph-draws-bare",
        "a random op that runs again in backward draws other numbers",
        "engine/graph",
        (("if op in self._drawing or op in self._drawn:", "if op in self._drawing:"),),
    ),
    Mutation(
        "graph-hooks-unguarded",
        "a hook that is added inside a unit after it was traced is ignored",
        "_torch_dynamo.py",
        (("skip_nnmodule_hook_guards=False", "skip_nnmodule_hook_guards=True"),),
    ),
    Mutation(
        "graph-casts-of-its-own",
        "under autocast, a traced unit casts a parameter that another module has, too, or another call of it",
        "engine/graph",
        (("if kind not in self._has_traced and keeps_casts():", "if False:"),),
    ),
    Mutation(
        "graph-whole-chain-only",
        "a pipeline that splits backward asks for a part of a unit's chain, which has ended",
        "engine/graph",
        (("elif stretch != call.next_stretch and stretch not in call.found:", "elif False:"),),
    ),
    Mutation(
        "graph-methods-unseen",
        "a method that replaces one of a traced unit is ignored",
        "engine/graph",
        (("if any(names.get(name) is not method for names, name, method in self._methods):", "if False:"),),
    ),
    Mutation(
        "graph-says-that-it-compiles",
        "code that asks whether it is compiled takes another branch in a trace",
        "_torch_dynamo.py",
        (("answers.update(dict.fromkeys(before, False))", "answers.update({})"),),
    ),
    Mutation(
        "graph-ops-not-compared",
        "a trace with other ops than those of eager mode is run",
        "engine/graph",
        (("if found != noted:", "if False:"),),
    ),
    Mutation(
        "graph-adds-first",
        "a unit adds up the gradients of what it reads several times, where eager mode adds over the whole step",
        "engine/graph",
        (("for _ in range(count - 1):", "for _ in range(0):"),),
    ),
    Mutation(
        "graph-edges-for-gradients",
        "edges of autograd's graph without a gradient are taken for summands",
        "engine/graph",
        (("_added_up(total, counts[index])", "_added_up(total, self.num_edges[index])"),),
    ),
    Mutation(
        "graph-saves-for-the-last",
        "forward saves what a backward from fewer outputs needed, and the next one needs more",
        "engine/graph",
        (("self.latest = program if program.needs == self._most.needs else self._most", "self.latest = program"),),
    ),
    Mutation(
        "graph-autocast-of-forward",
        "backward is recorded under the autocast of forward",
        "engine/graph",
        (("nullcontext() if autocast else disable_autocast()", "nullcontext()"),),
    ),
    Mutation(
        "graph-autocast-of-backward",
        "autocast that is on in backward changes nothing there",
        "engine/graph",
        (("(*tangents, autocast_now(self.trace.devices))", "(*tangents, ())"),),
    ),
    Mutation(
        "graph-contexts-left-open",
        "after a unit that cannot be traced, the autocast that it switches on inside stays on",
        "engine/graph",
        (("if step < 0 and num_open < 0:", "if False:"),),
    ),
    Mutation(
        "graph-views-of-another-backward",
        "a backward reads views that only another backward has made",
        "engine/graph",
        (("for place in own:", "for place in own[:0]:"),),
    ),
    Mutation(
        "graph-writer-left-out",
        "memory is made again without the op that writes to it and returns something else",
        "programs",
        (("touched.setdefault(storage, 0)", "pass"),),
    ),
    Mutation(
        "graph-writes-twice",
        "an op that writes to a buffer runs again",
        "programs",
        (("if not self.available.isdisjoint(op.writes):", "if False:"),),
    ),
    Mutation(
        "graph-order-unchecked",
        "an op runs again on what was written to after it had run",
        "programs",
        (("if is_late and number not in", "if False and number not in"),),
    ),
    Mutation(
        "graph-statistics-twice",
        "batch norm in a trace updates its running statistics once more when it runs again",
        "engine/graph",
        (("if op.updated and self._runs_again(op):", "if False:"),),
    ),
    Mutation(
        "graph-statistics-read-late",
        "what runs again reads statistics that a batch norm in the trace has updated since",
        "engine/graph",
        (("for tensor in op.updated)),", "for tensor in op.updated[:0])),"),),
    ),
    Mutation(
        "graph-statistics-made-again",
        "statistics that a batch norm updates are made again, without its update",
        "programs",
        (("if is_there} | outputs | updated", "if is_there} | outputs"),),
    ),
    Mutation(
        "graph-code-unread",
        "a trace takes for constant what code asks of a tensor that no guard sees",
        "engine/graph/graph_engine.py",
        (("        check_code(self.module)\n", ""),),
    ),
    Mutation(
        "kernels-of-attention-not-guarded",
        "a trace keeps its kernel of attention where PyTorch is told to take a different one",
        "engine/graph/graph_engine.py",
        (("return settings, self.module.training, autocast", "return (), self.module.training, autocast"),),
    ),
    Mutation(
        "graph-memory-out-twice",
        "a traced unit gives back a value and an alias of it as one",
        "engine/graph",
        (("found[index] = found[index].view_as(found[index])", "pass"),),
    ),
    Mutation(
        "graph-written-memory-out-twice",
        "a traced unit gives back a value and what a write to its alias returned as one",
        "engine/graph/node.py",
        (("places = [(one.storage, one.layout) for one in trace.outputs]", "places = list(trace.outputs)"),),
    ),
    Mutation(
        "graph-view-from-before-a-write-out",
        "a traced unit adds up the gradients of memory and a view from before a write to it in its own order",
        "engine/graph/trace.py",
        (("any(n._sequence_nr() >= num_nodes for n in nodes)", "False"),),
    ),
    Mutation(
        "graph-kinds-without-autocast",
        "a unit is traced once for calls under autocast and for those without",
        "engine/graph/graph_engine.py",
        (("if any_autocast_is_enabled() else ()", "if False else ()"),),
    ),
    Mutation(
        "graph-backward-writes-lost",
        "what a Function's backward writes to a buffer is lost in a trace",
        "engine/graph",
        (
            (
                "if any(not op.written.isdisjoint(one.storage for one in self.inputs) for op in recorder.ops):",
                "if False:",
            ),
        ),
    ),
    Mutation(
        "graph-formula-of-fakes",
        "a gradient is computed by the formula for fake tensors, where eager mode looks for zeros",
        "engine/graph",
        (("if following is not None and _ASK_DATA.get(node.name()) == place:", "if False:"),),
    ),
    Mutation(
        "graph-changes-unseen",
        "a backward reads what was written to since forward",
        "engine/graph",
        (("if changes or (content is not None and content != glance_at(tensor)):", "if False:"),),
    ),
    Mutation(
        "graph-data-unseen",
        "ops run again on a parameter that was written to through `.data` since forward",
        "engine/graph",
        (("glance_at(tensor) if is_again and not running.is_captured else None", "None"),),
    ),
    Mutation(
        "captured-trace-glances",
        "a unit that runs from a trace reads what tensors hold while a CUDA graph is captured",
        "engine/graph",
        ((" and not running.is_captured else None", " else None"),),
    ),
    Mutation(
        "captured-traced-draws",
        "a traced op draws other random numbers in a replayed graph's backward than in its forward",
        "engine",
        (
            ("        if running.is_captured:\n            for op", "        if False:\n            for op"),
            ('        refuse_draws(facts, func, args, kwargs, "", str(func))\n', ""),
        ),
    ),
    Mutation(
        "captured-while-traced",
        "a unit is traced while a CUDA graph is captured",
        "engine/graph",
        (("if run is None and running.is_captured:", "if False:"),),
    ),
    Mutation(
        "graph-frees-too-soon",
        "what forward saved is freed though the graph is retained",
        "engine/graph",
        (("if not keeps_graph():", "if True:"),),
    ),
    Mutation(
        "graph-traces-forever",
        "a unit whose attributes change in every call is traced in every call",
        "engine/graph",
        (("if self._num_misses > _MOST_MISSES:", "if False:"),),
    ),
    Mutation(
        "graph-bytes-of-workspaces",
        "the prediction of a traced unit forgets what its ops need while they run",
        "programs",
        (("self._takes(op.working_bytes)", "pass"),),
    ),
    Mutation(
        "graph-parts-kept",
        "gradients that a chain of nodes hands over stay in the prediction until the unit's backward ends",
        "programs",
        (("if frees and index in joint.parameters:", "if False:"),),
    ),
    Mutation(
        "graph-settings-changed-inside",
        "a traced unit runs all of its ops under the same settings, though it changes them",
        "engine/graph/recorder.py",
        (("if not self.is_backward and current_settings(NO_MODES) is not self._settings:", "if False:"),),
    ),
    Mutation(
        "graph-zeros-for-none",
        "in a trace, a Function that asks which gradients there are gets zeros for those that are not there",
        "engine/graph/noting_tape.py",
        (
            (
                "asked = _ASKED_OF_CONTEXTS & (names_in(function.forward) | names_in(function.setup_context))",
                "asked = frozenset()",
            ),
        ),
    ),
    Mutation(
        "graph-other-memory",
        "a trace is run though inputs share memory that it writes to, unlike in the traced call",
        "engine/graph/shared_memory.py",
        (("if group != [index for index, one in enumerate(memory) if one == memory[group[0]]]:", "if False:"),),
    ),
    Mutation(
        "graph-other-views",
        "an input that was a view of another one when the unit was traced is read from that one ever after",
        "engine/graph/shared_memory.py",
        (("if len(group) > 1 or storage in written", "if storage in written"),),
    ),
    Mutation(
        "graph-layouts-of-gradients",
        "in a trace, a Function that asks how a gradient is laid out is told what Dynamo assumes",
        "engine/graph/noting_tape.py",
        (("asked |= _ASKED_OF_GRADIENTS & names_in(function.backward)", "pass"),),
    ),
    Mutation(
        "graph-state-read-in-backward",
        "in a trace, the backward of a Function reads global values as they were in forward",
        "engine/graph/noting_tape.py",
        (("asked |= state_in(backward_of(function))", "pass"),),
    ),
    Mutation(
        "graph-state-read-in-backward-of-an-op",
        "in a trace, the backward of a custom op reads global values as they were in forward",
        "_torch_functions.py",
        (("    if not is_of_an_op(function):\n        return own\n", "    if own:\n        return own\n"),),
    ),
    Mutation(
        "graph-objects-given-to-functions",
        "in a trace, the backward of a Function reads attributes of what it was given as they were in forward",
        "engine/graph/noting_tape.py",
        (
            (
                "for one in given if not (isinstance(one, torch.Tensor)",
                "for one in given[:0] if not (isinstance(one, torch.Tensor)",
            ),
        ),
    ),
    Mutation(
        "graph-ties-unguarded",
        "units share a trace though weights are tied in one of them, whose gradients are added up in a different order",
        "_torch_dynamo.py",
        (("skip_no_tensor_aliasing_guards_on_parameters=False,", ""),),
    ),
    Mutation(
        "graph-ops-out-of-sight",
        "ops of modules that the tape no longer watches are not noted, and the unit seems to be another one when it is traced",
        "engine/graph/noting_tape.py",
        (("        self._may_step_aside = False\n", ""),),
    ),
    Mutation(
        "graph-run-in-place-of-traced",
        "where Dynamo is told to run code as it is, recording runs units once more, and draws random numbers",
        "_torch_dynamo.py",
        (('if (stance := eval_frame._stance.stance) != "default":', 'if (stance := "default") != "default":'),),
    ),
    Mutation(
        "graph-other-methods-unseen",
        "a method that replaces one that forward calls is ignored",
        "engine/graph/graph_engine.py",
        (("if callable(method) or isinstance(method, (property, classmethod, staticmethod))", 'if name == "forward"'),),
    ),
    Mutation(
        "graph-hooks-on-all-unseen",
        "a hook on all modules, added after a unit was traced, is ignored",
        "engine/graph/graph_engine.py",
        (("            and not has_global_hooks()\n", ""),),
    ),
    Mutation(
        "graph-tracing-leaves-garbage",
        "what Dynamo leaves after tracing a unit holds tensors that the unit has as attributes",
        "_torch_dynamo.py",
        (("                run_gc_after_compile=False,\n", ""),),
    ),
    Mutation(
        "graph-parameters-not-gathered",
        "the backward of a traced unit reads parameters whose memory FSDP2 has freed",
        "engine/graph",
        (("check_filled(tensor, self.path)", "pass"),),
    ),
    Mutation(
        "graph-gradients-in-parameters-type",
        "traces round gradients to the type of the parameters, where those are to be of a different one",
        "engine/graph",
        (("self._leaves[index].grad_dtype = dtype", "pass"),),
    ),
    Mutation(
        "graph-results-made-apart",
        "of an op that runs again, a result that is written to comes from one run, and another from a second one",
        "programs/cut.py",
        (("return self._forward.blocks.get(maker, [maker])", "return self._forward.groups.get(storage) or [maker]"),),
    ),
    Mutation(
        "graph-of-what-cannot-run-again",
        "a plan has layers run from traces that cannot run again what it drops, and these warn as they run",
        "planning/trace_planner.py",
        (("if knows and not _is_traced(graphs[path], units[path])}", "if knows and graphs[path].joint is None}"),),
    ),
    Mutation(
        "graph-all-or-none",
        "a plan of which not all layers fit the budget from traces runs on the tape as a whole",
        "planning/trace_planner.py",
        (("if len(paths) == 1 or (are_alike", "if paths or (are_alike"),),
    ),
    Mutation(
        "graph-keeps-what-it-read-before-a-write",
        "what reads memory before it is written to is kept, whatever the plan says: above the tape's peak",
        "programs/cut.py",
        (("if error.number in run_between:", "if True:"),),
    ),
    Mutation(
        "graph-remakes-what-it-keeps",
        "an op that runs again makes a kept result once more, as it was before it was written to",
        "programs/cut.py",
        (("if not again.isdisjoint(self.available & self.writes.keys()):", "if False:"),),
    ),
    Mutation(
        "graph-never-keeps-what-it-read-before-a-write",
        "a unit stays on the tape if what reads memory before a write cannot run again with the writes",
        "programs/cut.py",
        (("must_keep.add(rest[-1])", "raise"),),
    ),
    Mutation(
        "graph-views-of-what-changes-shape",
        "a tensor that has views changes its shape in place, and their gradients are those of different views",
        "engine/graph/recorder.py",
        (
            (
                "if traced.maker is None or any(one.storage == traced.storage for one in others):",
                "if traced.maker is None:",
            ),
        ),
    ),
    Mutation(
        "graph-unfinished-backward-held",
        "a backward that ends within a layer, and keeps its graph, leaves what it computed again",
        "engine/graph/node.py",
        (("            at_end_of_backward(call.pause)\n", "            pass\n"),),
    ),
    Mutation(
        "graph-hooks-without-gradients",
        "hooks for a gradient that eager mode does not compute are called",
        "engine/graph/node.py",
        (("trace.num_edges[i] for i", "max(1, trace.num_edges[i]) for i"),),
    ),
    Mutation(
        "graph-gradients-type-unguarded",
        "a trace makes gradients of the type that they had when it was made",
        "engine/graph",
        (("if grad_dtype_of(inputs[index]) is not dtype:", "if False:"),),
    ),
    Mutation(
        "graph-hooks-in-their-module",
        "in a trace, what a hook runs belongs to the module that the hook is on",
        "_torch_dynamo.py",
        (("if not any(_is_in(hook, node) for hook in hooks):", "if True:"),),
    ),
    Mutation(
        "graph-collectives-of-dtensors-unnamed",
        "in a trace, collectives by which DTensors change their layout have no names",
        "engine/graph/recorder.py",
        (("(op.has_grad or self.is_in_collective)", "op.has_grad"),),
    ),
    Mutation(
        "graph-draws-for-dtensors",
        "random ops on DTensors run from traces, though they move a GPU's generator",
        "engine/graph/recorder.py",
        (("self._check_draws(func, args, kwargs)", "pass"),),
    ),
    Mutation(
        "graph-gradients-of-dtensors-respread",
        "gradients of a DTensor that were spread in different ways are handed over as this process's part",
        "engine/graph/trace.py",
        (
            (
                "if any((index, one) not in specs for index in self.spread_inputs for one in gradients[index]):",
                "if False:",
            ),
        ),
    ),
    Mutation(
        "shared-modules-left-on-the-tape",
        "layers that share a module with one on the tape are not traced either",
        "engine/graph/graph_engine.py",
        (("if not self.why_not or scope.is_shared:", "if not self.why_not:"),),
    ),
    Mutation(
        "traced-types-of-fakes",
        "norms under autocast on a CPU have statistics of a different type in traces, and stay on the tape",
        "engine/graph/real_layouts.py",
        (("is_known = not is_mixed and all(", "is_known = all("),),
    ),
)
