"""Faults of the planner, of plans, and of pipelines."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "called-by-layers-unnamed",
        "a plan does not name a unit that keeps everything and runs within layers, whose values then count as theirs",
        "planning/option_table.py",
        (("if first < call:", "if False:"),),
    ),
    Mutation(
        "draws-written-over",
        "plans for a captured step keep what a random op makes, and not what is written over it",
        "profile",
        (("kept.update(op.outputs)", "pass"),),
    ),
    Mutation(
        "pools-without-neighbours",
        "a free block in a graph's pool does not join the free one after it",
        "simulation",
        (("if after is not None and after.is_free:", "if False:"),),
    ),
    Mutation(
        "capture-of-gradients-once",
        "a captured step does not give the optimizer its gradients again after zero_grad",
        "capturing",
        (
            (
                "            parameter.grad = own\n        return graph.loss.clone()",
                "            pass\n        return graph.loss.clone()",
            ),
        ),
    ),
    Mutation(
        "capture-of-stale-batches",
        "a captured step reads the batch that it was captured with",
        "capturing",
        (("kind.batch.fill(batch)", "pass"),),
    ),
    Mutation(
        "capture-of-moved-weights",
        "a captured step goes on after the model's tensors have moved",
        "capturing",
        (("if now == self._addresses:", "if True:"),),
    ),
    Mutation(
        "capture-that-warms-up-aloud",
        "the warm-up of a captured step changes buffers and random generators",
        "capturing",
        (("with undisturbed(step.model, keeps_attributes=True):", "if True:"),),
    ),
    Mutation(
        "readers-of-dropped-outputs-traced",
        "a unit that reads a dropped output is predicted from its trace, though it runs on the tape",
        "planning",
        (("unit.output is Action.RECOMPUTE}\n    # What reads", "unit is None}\n    # What reads"),),
    ),
    Mutation(
        "plans-above-the-budget",
        "the chain solver takes plans of up to one percent more than the budget",
        "planning",
        (
            (
                "(found for found in known if found.peak_bytes <= budget_bytes)",
                "(found for found in known if found.peak_bytes <= 1.01 * budget_bytes)",
            ),
        ),
    ),
    Mutation(
        "plans-leave-room",
        "no value more is stored where memory has room for it",
        "planning",
        (("if found is not None and found.recompute_s > enough_s:", "if False:"),),
    ),
    Mutation(
        "traces-of-halves",
        "the planner lets units run from traces whose backward is split in two, all of it in each half",
        "planning",
        (("any(True for _ in self.profile.log.operands(PEEK))", "False"),),
    ),
    Mutation(
        "repeated-units-solved-as-a-chain",
        "a step whose units run several times is solved as if each ran once, not as a mix of options",
        "planning/chain.py",
        (("if self._others is None:\n            chosen = cheapest", "if True:\n            chosen = cheapest"),),
    ),
    Mutation(
        "chain-one-byte-short",
        "an option that needs just what is left is not taken",
        "planning",
        (
            (
                "fits_here = kept[:, None] + stage.own_bytes <= budget_bytes",
                "fits_here = kept[:, None] + stage.own_bytes < budget_bytes",
            ),
        ),
    ),
    Mutation(
        "segments-at-the-front-left-out",
        "outputs are not dropped at the front only",
        "planning",
        (("choices |= {first_outputs(self.profile", "_ = {first_outputs(self.profile"),),
    ),
    Mutation(
        "readers-of-dropped-outputs-alike",
        "a unit that reads a dropped output is taken to need no more than one that does not",
        "planning",
        (("reads_dropped = not any(row.keeps_outputs)", "reads_dropped = False"),),
    ),
    Mutation(
        "states-free-in-the-cut",
        "the cut takes the states of generators for free",
        "planning",
        (("yield node, self._sink, op.state_bytes, ", "yield node, self._sink, 0, "),),
    ),
    Mutation(
        "states-free-in-options",
        "an option's bytes leave out the states of generators",
        "planning",
        (("for part in held]) + state_bytes,", "for part in held]),"),),
    ),
    Mutation(
        "overwritten-inputs-read-again",
        "an op whose input is overwritten later may run again",
        "planning",
        (
            (
                "return fixed | {index for index, op in enumerate(graph.ops) if not lost.isdisjoint(op.inputs)}",
                "return fixed",
            ),
        ),
    ),
    Mutation(
        "parts-as-large-as-the-whole",
        "a value kept as a part costs as many bytes as the whole",
        "planning",
        (
            (
                "sum([part.nbytes for part in held])",
                "sum([self._nbytes[part.value] for part in held])",
            ),
        ),
    ),
    Mutation(
        "reader-of-a-dropped-output-off-the-tape",
        "a unit that reads a dropped output is left out of the plan",
        "planning",
        (("or any(self._lacks_output(source, options[source]) for source in self.sources[index])", ""),),
    ),
    Mutation(
        "bound-too-high",
        "the bound is five percent above what is proved",
        "planning",
        (("return float(highest * self._seconds)", "return float(1.05 * highest * self._seconds)"),),
    ),
    Mutation(
        "bound-too-low",
        "the bound is half of what could be proved",
        "planning",
        (("return float(highest * self._seconds)", "return float(0.5 * highest * self._seconds)"),),
    ),
    Mutation(
        "bound-without-workspace",
        "the bound leaves out what ops between units need while they run",
        "planning",
        (("working_bytes = event[1] if event[0] == WORK else 0", "working_bytes = 0"),),
    ),
    Mutation(
        "bound-not-checked",
        "a plan below the bound is no error",
        "planning",
        (("if bound_s > recompute_s * (1 + _SAFETY) + _SAFETY**2:", "if False:"),),
    ),
    Mutation(
        "search-ends-early",
        "the search is content with a plan half as slow again as the bound",
        "planning",
        (("_SMALL_GAP = 0.01\n_SMALL_GAP_OF", "_SMALL_GAP = 0.5\n_SMALL_GAP_OF"),),
    ),
    Mutation(
        "least-peak-too-high",
        "the error of a budget that is too small names the highest of the known peaks",
        "planning",
        (
            (
                "least, plan = min(known, key=lambda pair: pair[0].peak_bytes)",
                "least, plan = max(known, key=lambda pair: pair[0].peak_bytes)",
            ),
        ),
    ),
    Mutation(
        "largest-batch-one-less",
        "the search for the largest batch ends one size early",
        "planning",
        (("if high - low <= 1:", "if high - low <= 2:"),),
    ),
    Mutation(
        "chunks-beyond-need",
        "the loss is cut into more chunks, though fewer are as fast",
        "planning",
        (("if best is not None and _step_s(made) >= (1 - SAME_TIME) * _step_s(best):", "if False:"),),
    ),
    Mutation(
        "unknown-keys-in-plans",
        "a misspelt key of a unit in a plan's file is passed over",
        "fields.py",
        (("if key not in known and key not in head:", "if False:"),),
    ),
    Mutation(
        "chunks-not-written",
        "a plan loses its loss chunks on the way through a file",
        "plans",
        (
            (
                "numbers = {field.name: getattr(self, field.name) for field in fields(self)[1:-1]}",
                'numbers = {f.name: getattr(self, f.name) for f in fields(self)[1:-1] if f.name != "loss_chunks"}',
            ),
        ),
    ),
    Mutation(
        "classes-not-written",
        "a plan loses the classes of a Sequential's modules on the way through a file",
        "plans",
        (('{"class_names": dict(class_names)} if', "{} if"),),
    ),
    Mutation(
        "empty-memory-shown",
        "a printed plan names memory that another op fills",
        "plans",
        (("for name, place in places.items() if not is_empty(name)}", "for name, place in places.items()}"),),
    ),
    Mutation(
        "digest-without-outputs",
        "plans that differ in what becomes of outputs only pass for the same",
        "plans",
        (("(path, str(unit.engine), str(unit.output), sorted(", "(path, str(unit.engine), sorted("),),
    ),
    Mutation(
        "parts-need-no-ranks",
        "a plan with values in parts passes for one that each rank can run alone",
        "plans",
        (("action is Action.SHARD or (action is Action.RECOMPUTE", "(action is Action.RECOMPUTE"),),
    ),
    Mutation(
        "unit-named-twice",
        "the second of two entries for one unit wins without a word",
        "plans",
        (("            if path in units:\n", "            if False:\n"),),
    ),
    Mutation(
        "warm-up-one-longer",
        "1F1B runs one forward more before its first backward",
        "pipelines",
        (("warmup = num_ranks - rank - 1\n", "warmup = num_ranks - rank\n"),),
    ),
    Mutation(
        "interleaved-warm-up-too-long",
        "interleaved 1F1B warms up one group of micro-batches too long",
        "pipelines",
        (("(stages_per_rank - 1) * num_ranks", "stages_per_rank * num_ranks"),),
    ),
    Mutation(
        "backward-of-chunks-in-forward-order",
        "interleaved 1F1B runs the backwards of a rank's stages in the order of their forwards",
        "pipelines",
        (("chunk = stages_per_rank - 1 - chunk", "pass"),),
    ),
    Mutation(
        "sends-take-no-time",
        "what goes from rank to rank is there at once",
        "pipelines",
        (("(send_s if rank_of[source[1]] != rank else 0.0)", "0.0"),),
    ),
    Mutation(
        "sent-outputs-stay",
        "1F1B holds every output that it has sent until the step ends",
        "pipelines",
        (('            self.let_go(("sent", action.stage))\n', "            pass\n"),),
    ),
    Mutation(
        "halves-end-at-once",
        "a micro-batch counts as gone with the first half of its backward",
        "pipelines",
        (
            (
                "alive += {FORWARD: 1, INPUT: 0, BACKWARD: -1, WEIGHT: -1}[action.kind]",
                "alive += {FORWARD: 1, INPUT: -1, BACKWARD: -1, WEIGHT: 0}[action.kind]",
            ),
        ),
    ),
    Mutation(
        "stages-of-other-batches",
        "a schedule whose stages run different micro-batches is accepted",
        "pipelines",
        (("if found != batches[0]:", "if False:"),),
    ),
    Mutation(
        "rank-on-one-clock",
        "a rank whose device runs behind its host is planned on the sum of both clocks",
        "pipelines",
        (
            (
                "    if has_two_clocks(step.profile):\n        return ClockedPlanner",
                "    if False:\n        return ClockedPlanner",
            ),
        ),
    ),
    Mutation(
        "rank-not-named",
        "the error of a budget that is too small for a pipeline does not say for which rank",
        "pipelines",
        (('unit=f"rank {rank} (stages', 'unit=f"a rank (stages'),),
    ),
    Mutation(
        "stage-taken-for-the-model",
        "the layers of one pipeline stage are taken for all layers of the model",
        "integrations/megatron",
        (("found == sizes[stage::num_stages]", "found == sizes"),),
    ),
)
