"""PyTorch's `sac_milp` as a peer: run its private solver with op times measured here, and apply its answer.

`torch.distributed._tools.sac_ilp` takes a tree of modules with bytes and times and returns, for each module that it would
checkpoint, the part of the activation memory to discard; `get_optimal_checkpointing_policy_per_module` turns that into a
choice per op. Nothing in PyTorch applies either, and its own time estimates need a GPU. What is done here instead:

- times are medians of each op on this machine, by op and shapes, handed to `SACEstimator` in place of its estimate;
- its curves of time against memory are fitted by a package that is not needed for two lines: here their lower hull is taken;
- each chosen module runs under a selective checkpoint that saves the ops of the answer, counted as the estimator does,
  except what ops write to in place, which a selective checkpoint refuses to save.

Needs `pip install pulp`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import Graph, aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import (
    OPS_TO_ALWAYS_SKIP,
    SACEstimator,
    SACGreedyOrderMeta,
    SACStats,
    SACTradeOffStats,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from peers import Peer
from recollect.measuring.timing import timed
from recompute import Forward, Recompute, Replaced
from subject import Step

_GIB = 1 << 30
_NUM_TIMED_STEPS = 3


class OpTimes(TorchDispatchMode):
    """Time ops as they run, and give fake ops the median in ms of those with the same arguments."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._seconds: dict[Any, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, op_s = timed(lambda: func(*args, **(kwargs or {})), self._device)
        self._seconds.setdefault(_key(func, args), []).append(op_s)
        return output

    def estimate(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Run an op on fake tensors; return its result and its time, 0 for an op not seen before."""
        output = func(*args, **(kwargs or {}))
        return output, 1e3 * statistics.median(self._seconds.get(_key(func, args), [0.0]))


def _key(func: Any, args: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return (func, *((tuple(t.shape), t.stride(), t.dtype) for t in tensors))


class _GroupedShapes(TorchDispatchMode):
    """Fake grouped products of any dtype; PyTorch's own knows only bf16, because of the GPU's kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        rows, columns = args[0].shape[-2], args[1].shape[-1]
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        is_weight_gradient = args[0].dim() == args[1].dim() == 2
        shape = (offsets.numel(), rows, columns) if is_weight_gradient else (rows, columns)
        return args[0].new_empty(shape)


def _forget_without_backward(memory: MemTracker, runtime: RuntimeEstimator) -> None:
    """Remove modules without a backward (positions), because the code that sums up asks each module for its backward."""
    for module, stats in list(memory.memory_tracking.items()):
        if _ModState.PRE_BW not in stats.snapshots:
            del memory.memory_tracking[module]
            for order in (runtime.mod_fw_pre_order, runtime.mod_fw_post_order):
                order.remove(stats.mod_fqn)


class Solver:
    """The module tree of a step, and the answers of `sac_milp`."""

    def __init__(self, step: Step) -> None:
        self._step = step
        times = OpTimes(step.device)
        for _ in range(_NUM_TIMED_STEPS):
            with times:
                step.run()
        step.clear()
        with FakeTensorMode(), _GroupedShapes():
            fake = Step(step.flags, step.model_name)
            memory = MemTracker()
            memory.track_external(fake.model)
            with memory:
                fake.run()
            runtime = RuntimeEstimator()("operator-level-cost-model")
            runtime._estimate = times.estimate
            with contextlib.redirect_stdout(None), runtime:  # it prints a total
                fake.run()
            self._estimator = SACEstimator()("operator-level-cost-model")
            self._estimator._estimate_runtime = times.estimate
            with self._estimator:
                fake.run()
            self._estimator.pwlf_sac_tradeoff_curve = functools.partial(_fit_hulls, self._estimator)
            _forget_without_backward(memory, runtime)
            self._stats = aggregate_stats(fake.model, memory, runtime, self._estimator, step.device)

    def recompute(self, budget_bytes: int) -> Recompute:
        """Return its answer to a budget, ready to apply.

        Raises:
            ValueError: it finds none.
        """
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

        discarded, _, peak_bytes = sac_milp(self._graph(), budget_bytes / _GIB)
        if peak_bytes < 0:
            raise ValueError("sac_milp declares the budget infeasible")
        forwards: dict[nn.Module, Forward] = {}
        for name, fraction in discarded.items():
            stats = self._estimator.sac_mod_stats[name]
            # It returns an empty list if it finds no answer; nothing is saved then.
            saved = get_optimal_checkpointing_policy_per_module(stats, min(1.0, max(0.0, 1 - fraction)))
            module = self._step.model.get_submodule(name.partition(".")[2])
            contexts = functools.partial(_contexts, _saved_ops(stats, saved))
            forwards[module] = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
        return Replaced(forwards)

    def _graph(self) -> Graph:
        # The solver changes its arguments.
        return parse_module_info({**self._stats, "mod_stats": [dict(stat) for stat in self._stats["mod_stats"]]})


def _saved_ops(stats: SACStats, saved: Sequence[int]) -> frozenset[tuple[str, int]]:
    """The values to save, as an op's name and the number of its run in the module; fake runs have more ops than real ones."""
    written = {op for pair in stats.inplace_ops for op in pair}
    counts: Counter[str] = Counter()
    chosen = set()
    for op, (name, save) in enumerate(zip(stats.func_names, saved, strict=False)):
        if save and op not in written:
            chosen.add((name, counts[name]))
        counts[name] += 1
    return frozenset(chosen)


def _contexts(saved_ops: frozenset[tuple[str, int]]) -> Any:
    # Up to torch 2.12 the policy is also called in recompute, which needs its own count.
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        count, name = counts[ctx.is_recompute], op._overloadpacket.__name__
        is_saved = (name, count[name]) in saved_ops
        count[name] += 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _fit_hulls(estimator: SACEstimator) -> None:
    for name, stats in estimator.sac_mod_stats.items():
        curve = _curve(stats, estimator.sac_mod_greedy_order_meta[name])
        lines = _hull_lines(curve)
        estimator.sac_mod_tradeoff_stats[name] = SACTradeOffStats(
            n_segments=len(lines),
            slopes=[slope for slope, _ in lines],
            intercepts=[intercept for _, intercept in lines],
            fit_breaks=[],
            tradeoff_curve=OrderedDict(curve),
            sac_memory=sum(stats.memory),
            sac_runtime=sum(stats.runtimes),
        )


def _curve(stats: SACStats, order: SACGreedyOrderMeta) -> list[tuple[float, float]]:
    """Return the fraction of memory discarded and of time recomputed, as ops are discarded in greedy order."""
    total_bytes, total_ms = sum(stats.memory) or 1, sum(stats.runtimes) or 1.0
    discarded_bytes = sum(stats.memory[op] for op in order.recomputed_ops)
    again_ms = sum(stats.runtimes[op] for op in order.recomputed_ops)
    curve = [(discarded_bytes / total_bytes, again_ms / total_ms)]
    for candidate in order.msps_meta:
        discarded_bytes += candidate.memory
        again_ms += candidate.runtime
        curve.append((discarded_bytes / total_bytes, again_ms / total_ms))
    return [*curve, (1.0, 1.0)]


def _hull_lines(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return slope and intercept of each edge of the lower convex hull."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and x == hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], (x, y)) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((x, y))
    slopes = [_slope(low, high) for low, high in itertools.pairwise(hull)]
    lines = [(slope, low[1] - slope * low[0]) for slope, low in zip(slopes, hull, strict=False)]
    return lines or [(0.0, hull[0][1])]


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def milp_peers(step: Step, budgets_bytes: Sequence[int], fractions: Sequence[float]) -> list[Peer]:
    """Return its answers to some budgets; none if its solver is not installed or does not apply to the model."""
    solver: Callable[[], Solver] = functools.cache(functools.partial(Solver, step))

    def peer(budget_bytes: int, fraction: float) -> Peer:
        return Peer(f"sac_milp {fraction:.0%}", "PyTorch's solver", lambda step: _solved(solver, budget_bytes))

    return [peer(budget, fraction) for budget, fraction in zip(budgets_bytes, fractions, strict=True)]


def _solved(solver: Callable[[], Solver], budget_bytes: int) -> Recompute:
    if importlib.util.find_spec("pulp") is None:
        raise ImportError("needs pip install pulp")
    return solver().recompute(budget_bytes)
