"""Faults of what watches a training loop, of ranks, of the loss, of checkpoint functions, and of the reference trainer."""

from __future__ import annotations

from mutations.mutation import Mutation

__all__ = ["MUTATIONS"]

MUTATIONS = (
    Mutation(
        "larger-batch-not-noticed",
        "a plan covers larger batches than it was made for",
        "attaching",
        (
            (
                "return len(shape) == len(other) and all(mine >= theirs for mine, theirs in zip(shape, other, strict=True))",
                "return len(shape) == len(other)",
            ),
        ),
    ),
    Mutation(
        "smaller-batch-not-covered",
        "a plan covers batches of its own size only",
        "attaching",
        (("all(mine >= theirs for mine, theirs in zip(shape, other, strict=True))", "shape == other"),),
    ),
    Mutation(
        "departure-not-noticed",
        "a step that runs a unit more often than planned passes for a planned one",
        "attaching",
        (("self._now.departure = Departure(text)", "_ = Departure(text)"),),
    ),
    Mutation(
        "optimizer-replaced-unseen",
        "an optimizer that takes the place of the one that was given is not seen",
        "attaching",
        (("self._took_over(optimizer, False)", "pass"), ("self._took_over(optimizer, True)", "pass")),
    ),
    Mutation(
        "adapters-optimizer-unseen",
        "an optimizer of layers that were put in later is not seen, and no step ends",
        "attaching",
        (("if trained.isdisjoint(_parameters_of(known)):", "if False:"),),
    ),
    Mutation(
        "foreign-optimizer-unsaid",
        "nothing is said where only an optimizer steps that was not passed",
        "attaching",
        (("self._foreign_steps += 1", "pass"),),
    ),
    Mutation(
        "data-dependent-sizes-unseen",
        "no room is left where calls that are alike have values of other sizes",
        "attaching",
        (("return kept_bytes + max(", "return 0 * max("),),
    ),
    Mutation(
        "inner-loop-in-eval-mode",
        "a step is said to run in eval mode if its first call does",
        "attaching",
        (("modes = [call.context[1] for call in step.calls]", "modes = [step.calls[0].context[1]]"),),
    ),
    Mutation(
        "besides-blamed-for-the-step",
        "something besides the step is blamed where the step itself needs more",
        "attaching",
        (("if self.peak_bytes and 2 *", "if False and 2 *"),),
    ),
    Mutation(
        "unfrozen-not-noticed",
        "a step with more trained parameters runs under the old plan",
        "attaching",
        (("and not other.trained & ~self.trained", ""),),
    ),
    Mutation(
        "autocast-not-noticed",
        "a step under autocast runs under the plan of one without",
        "attaching",
        (("module.training, autocast, structure.version)", "module.training, None, structure.version)"),),
    ),
    Mutation(
        "new-modules-not-noticed",
        "a model that was changed runs under its old plan",
        "attaching",
        (("if not self._is_stale and shape == self._seen_shape and num_hooks == self._num_hooks:", "if True:"),),
    ),
    Mutation(
        "hooks-left-behind",
        "the hooks of a handle that was removed stay",
        "attaching",
        (("self._hooks.pop().remove()", "self._hooks.pop()"),),
    ),
    Mutation(
        "optimizer-state-not-foreseen",
        "what the optimizers came to hold since a step was recorded is not in the next plan",
        "attaching",
        (("return present_state_bytes(self._optimizers, self._device)", "return 0"),),
    ),
    Mutation(
        "process-taken-for-tensors",
        "what the process holds besides tensors counts as held beside the step",
        "attaching",
        (("now = tensor_bytes(self._device)", "now = self._begin"),),
    ),
    Mutation(
        "late-zero-grad-unseen",
        "where zero_grad frees the gradients of the steps that repeat is not seen in the first",
        "recording",
        (("freed_at = self._freed_at.get", "freed_at = {}.get"),),
    ),
    Mutation(
        "percentage-of-the-first-step",
        "a percentage stays one of a first step without gradients, which is not repeated",
        "attaching",
        (("self.budget_bytes is not None and repeats else", "self.budget_bytes is not None else"),),
    ),
    Mutation(
        "replaced-calls-counted-twice",
        "calls that no plan foresees need memory beside the planned ones that they replace",
        "attaching",
        (
            (
                "found.update(Course().lacks(self.planned.courses",
                "found.copy().update(Course().lacks(self.planned.courses",
            ),
        ),
    ),
    Mutation(
        "larger-step-without-its-size",
        "the warning of a step that no plan covers does not say which one",
        "attaching",
        (('own = f"a step of {call} is not covered', 'own = f"a step is not covered'),),
    ),
    Mutation(
        "ranks-end-alone",
        "a rank decides at the end of a step without the others",
        "attaching",
        (("return self.ranks.all_of([flag], Place.STEP_END)[0]", "return flag"),),
    ),
    Mutation(
        "any-instead-of-all",
        "what one rank agrees to is taken for agreed by all",
        "ranks",
        (("op=dist.ReduceOp.MIN", "op=dist.ReduceOp.MAX"),),
    ),
    Mutation(
        "missing-ranks-all-named",
        "the error of a rank that does not come names all of them",
        "ranks",
        (("missing = [rank for rank, key in keys.items() if not store.check([key])]", "missing = list(self._ranks)"),),
    ),
    Mutation(
        "plan-of-the-richest",
        "the common plan is the one that suits the rank with most room",
        "ranks",
        (("return max(excesses), max(slowdowns), index", "return min(excesses), min(slowdowns), index"),),
    ),
    Mutation(
        "other-plans-accepted",
        "ranks of one group may run different plans",
        "ranks",
        (("if any(digests != found[0] for digests in found):", "if False:"),),
    ),
    Mutation(
        "other-settings-accepted",
        "ranks of one group may be given different budgets",
        "ranks",
        (("if other.settings.get(name) != value:", "if False:"),),
    ),
    Mutation(
        "absence-not-noticed",
        "a rank that trains without a budget is not missed",
        "ranks",
        (("missing = next((rank for rank, text in found.items() if text is None), None)", "missing = None"),),
    ),
    Mutation(
        "times-of-one-rank",
        "ranks plan with the shortest of their times instead of the median",
        "ranks",
        (("statistics.median(times) for times in", "min(times) for times in"),),
    ),
    Mutation(
        "ignored-tokens-in-the-mean",
        "the mean of a loss in chunks counts the tokens that are ignored",
        "loss",
        (("loss /= num_counted", "loss /= num_tokens"),),
    ),
    Mutation(
        "smoothing-only-in-the-loss",
        "the gradient of a loss in chunks is that without label smoothing at its target",
        "loss",
        (("(smoothing - 1) * (scale if part is None", "-1 * (scale if part is None"),),
    ),
    Mutation(
        "words-of-the-first-rank",
        "every rank takes its part of the vocabulary for the first one",
        "loss",
        (("part = VocabularyPart(group, rank * size, num_words", "part = VocabularyPart(group, 0, num_words"),),
    ),
    Mutation(
        "hidden-gradient-not-summed",
        "the gradient of the hidden states is not summed over the ranks of a vocabulary",
        "loss",
        (("dist.all_reduce(scaled[0], group=ctx.part.group)", "pass"),),
    ),
    Mutation(
        "second-backward-overwritten",
        "a second backward of a loss in chunks finds gradients that the first one has scaled",
        "loss",
        (("is_last = not keeps_graph()", "is_last = True"),),
    ),
    Mutation(
        "class-weights-passed-over",
        "weights of classes have no effect on a loss in chunks",
        "loss",
        (("    if weight is not None:\n        raise refusal(", "    if False:\n        raise refusal("),),
    ),
    Mutation(
        "preferred-saves-recomputed",
        "a policy that prefers to save is read as one that recomputes",
        "checkpointing",
        (('"name", "").partition("_")[2]', '"name", "").replace("PREFER_SAVE", "MUST_RECOMPUTE").partition("_")[2]'),),
    ),
    Mutation(
        "checkpoint-under-transforms",
        "checkpoint uses the tape under torch.func's transforms",
        "checkpointing",
        (("if not torch.is_grad_enabled() or transforms_are_active():", "if not torch.is_grad_enabled():"),),
    ),
    Mutation(
        "nested-choices-both-applied",
        "modules inside a chosen module are chosen, too",
        "checkpointing",
        (("return [path], numel", "return [*paths, path], numel"),),
    ),
    Mutation(
        "unknown-check-accepted",
        "a misspelt determinism_check is passed over",
        "checkpointing",
        (("if determinism_check not in _DETERMINISM_CHECKS:", "if False:"),),
    ),
    Mutation(
        "rotary-base-off",
        "rotary angles fall a little faster than they should",
        "lab",
        (("self.base ** (-channel / self.channels)", "self.base ** (-channel / (self.channels - 1))"),),
    ),
    Mutation(
        "router-bias-upside-down",
        "the router sends more tokens to experts that have many",
        "lab",
        (("(counts.mean() - counts).sign()", "(counts - counts.mean()).sign()"),),
    ),
    Mutation(
        "expert-counts-of-one-rank",
        "routers are balanced by the tokens of their own rank",
        "lab",
        (("router.counts_of_all = functools.partial(summed, group=mesh.get_group())", "pass"),),
    ),
    Mutation(
        "parts-of-sequences-weigh-alike",
        "parts of a sequence weigh alike in the loss, however many labels they have",
        "lab",
        (("(self.ranks * num_own / counted_BT.sum())", "1.0"),),
    ),
    Mutation(
        "labels-without-offset",
        "every rank of a split vocabulary looks for labels among its first words",
        "lab",
        (("own_N = labels_N - get_rank(group) * logits_NV.shape[1]", "own_N = labels_N"),),
    ),
    Mutation(
        "backward-as-dear-as-forward",
        "a model's FLOPs count backward once",
        "lab",
        (("return 3.0 * 2 * num_sequences", "return 2.0 * 2 * num_sequences"),),
    ),
    Mutation(
        "loss-not-divided",
        "gradients of accumulated micro-batches are sums instead of means",
        "lab",
        (("loss = model(tokens, labels).loss / accumulation", "loss = model(tokens, labels).loss"),),
    ),
    Mutation(
        "warm-up-from-zero",
        "the first step of the warm-up has a learning rate of zero",
        "lab",
        (("flags.learning_rate * (step + 1) / flags.warmup_steps", "flags.learning_rate * step / flags.warmup_steps"),),
    ),
    Mutation(
        "changed-bytes-loaded",
        "a file of a checkpoint whose bytes have changed is loaded",
        "lab",
        (("if checksum_of(path / name) != [size, crc]:", "if False:"),),
    ),
    Mutation(
        "changed-manifest-loaded",
        "a manifest whose text has changed is believed",
        "lab",
        (("if zlib.crc32(content.encode()) != crc:", "if False:"),),
    ),
    Mutation(
        "resumed-with-other-settings",
        "a run resumes with another model or other data than it began with",
        "lab",
        (("if before != now and name not in CHANGEABLE:", "if False:"),),
    ),
    Mutation(
        "resumed-without-generator",
        "a resumed run draws other random numbers than an uninterrupted one",
        "lab",
        (('torch.set_rng_state(state["torch"])', "pass"),),
    ),
    Mutation(
        "one-checkpoint-more",
        "one checkpoint more is kept than was asked for",
        "lab",
        (("in list_checkpoints(folder)[:-keep]:", "in list_checkpoints(folder)[: -keep - 1]:"),),
    ),
    Mutation(
        "two-runs-in-a-folder",
        "a second run trains in the folder of a first one",
        "lab",
        (("lock.acquire(blocking=False)", "pass"),),
    ),
    Mutation(
        "lost-rank-not-named",
        "the error of the other ranks does not say which one failed",
        "lab",
        (('return f"rank {rank} of {len(notes)} failed', 'return f"one of {len(notes)} failed'),),
    ),
    Mutation(
        "token-just-outside",
        "a token id of just the size of the vocabulary is accepted",
        "lab",
        (("ids.max() >= self._vocab_size:", "ids.max() > self._vocab_size:"),),
    ),
    Mutation(
        "regression-of-twice-the-threshold",
        "bench calls a setting slower only at twice the threshold",
        "lab",
        (("if versus < -threshold:", "if versus < -2 * threshold:"),),
    ),
    Mutation(
        "fp8-scale-not-copied",
        "a cast in 8 bits runs again with the scale that a later micro-batch left",
        "lab",
        (("current = self.multiplier.clone()", "current = self.multiplier"),),
    ),
    Mutation(
        "fp8-saves-the-wrong-direction",
        "backward multiplies casts whose blocks lie along another dimension than it sums over",
        "lab",
        (
            (
                "ctx.save_for_backward(*tensors[2:4], *tensors[6:8],",
                "ctx.save_for_backward(*tensors[:2], *tensors[4:6],",
            ),
        ),
    ),
    Mutation(
        "fp8-history-not-rolled",
        "the history of delayed scaling has one entry, however long it is to be",
        "lab",
        (("rolled = history.roll(-1, 0)", "rolled = history.clone()"),),
    ),
    Mutation(
        "fp8-experts-not-aligned",
        "experts get rows that are no multiple of what products in 8 bits need",
        "lab",
        (("padded_E = (counts_E + multiple - 1) // multiple * multiple", "padded_E = counts_E"),),
    ),
)
