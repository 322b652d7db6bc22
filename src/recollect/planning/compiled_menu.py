"""Choose a few sets of values that a compiled unit may keep, to be compiled and measured.

What was measured makes the options of a unit that may run inside `torch.compile` or on the tape.

Compiled code computes pointwise ops again nearly for free, fused into the ops of backward that read them; a reduction costs
about as much as reading its input; products, attention and ops opaque to the compiler cost as much as in the
step. With these costs the minimum cuts of `hull.py` propose what to keep. Fusion makes the costs rough.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from recollect.planning.hull import Option, Stored, spread, unit_hull
from recollect.plans.action import Action, EngineChoice
from recollect.plans.value_names import module_of
from recollect.profile.graph import OpRecord, UnitGraph
from recollect.simulation.decisions import compiled_actions

Keeps = Mapping[str, Action]
"""For each value that a unit computes, by name, whether compiled code keeps it: `UnitPlan.actions`."""

_PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "convolution", "_convolution"}
    | {"_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
    | {"mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_cudnn_rnn"}
)
# Results of these are as large as their input along a dimension.
_REDUCTIONS: Final = ("softmax", "norm", "cum", "sort", "topk", "scan")
# For an op that reads this many times as many bytes as it writes.
_REDUCES: Final = 4
# Seconds of a fused pointwise op, as a part of the seconds to read its results.
_FUSED: Final = 0.02
_MOST_FROM_HULL: Final = 6
# A part of the seconds that dropping everything would add; options that save less are not worth compiling.
_LITTLE: Final = 0.01
_MOST_ON_TAPE: Final = 12
# A part of the bytes that the step saves; of sets that differ by less, one is worth compiling.
_ALIKE: Final = 0.002


def compiled_menu(graph: UnitGraph) -> tuple[Keeps, ...]:
    """Return the sets of values of a unit to compile and measure, from the one that keeps least to the one that keeps most.

    At most ten, of different bytes: nothing; the choices of minimum cuts under the costs of compiled code; attention; this
    and the residual stream's addends; all products and attention. A unit's output is always kept.
    """
    outputs = {index for index, value in enumerate(graph.values) if value.is_output}
    attention = _values_of(graph, _is_attention)
    chosen: dict[frozenset[int], int] = {}
    for keep in (
        frozenset[int](),
        *(frozenset(option.stored.whole) for option in _widest_apart(unit_hull(with_compiled_costs(graph)))),
        attention,
        attention | _residual_stream(graph),
        attention | _values_of(graph, _is_product),
    ):
        nbytes = _bytes(graph, keep - outputs)
        if all(abs(nbytes - known) > _ALIKE * graph.saved_bytes for known in chosen.values()):
            chosen[keep - outputs] = nbytes
    return tuple(keeps_of(graph, keep) for keep in sorted(chosen, key=chosen.__getitem__))


def keeps_of(graph: UnitGraph, kept: Collection[int]) -> dict[str, Action]:
    """Return a compiled unit's action for each of its values, by name, if it keeps some and drops all others that it can."""
    return compiled_actions(graph, {*kept, *(index for index, value in enumerate(graph.values) if value.must_keep)})


def with_compiled_costs(graph: UnitGraph) -> UnitGraph:
    """Return the unit with estimated times for running its ops again in compiled code, and without a tape."""
    moved = [(op, _bytes(graph, (*op.inputs, *op.outputs))) for op in graph.ops if not _is_heavy(op)]
    light = [(op.time_s, nbytes) for op, nbytes in moved if nbytes]
    s_per_byte = min((time_s / nbytes for time_s, nbytes in light), default=0.0)

    def time_s(op: OpRecord) -> float:
        if _is_heavy(op):
            return op.time_s
        read_bytes, made_bytes = _bytes(graph, op.inputs), _bytes(graph, op.outputs)
        is_reduction = read_bytes >= _REDUCES * made_bytes or any(word in _op_name(op) for word in _REDUCTIONS)
        return s_per_byte * (read_bytes if is_reduction else _FUSED * made_bytes)

    ops = tuple(replace(op, time_s=time_s(op), state_bytes=0) for op in graph.ops)
    return replace(graph, ops=ops, tape_s=0.0, module_tape_s=(), again_op_s=0.0, parts=(), variants=(), eager_s=0.0)


@cache
def engine_options(graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
    """Return the options of a unit on all engines that it was recorded for, from the leanest to the step without a plan.

    Seconds are relative to the compiled unit that keeps PyTorch's choice, which makes options of engines comparable.
    """
    hull = unit_hull(graph, keeps_output=keeps_output)
    if not keeps_output or not graph.variants:
        return hull
    output_bytes = sum(value.nbytes for _, value in graph.made if value.is_output)
    eager_s = graph.beyond_default_s(graph.eager_s)
    compiled = [
        Option(
            stored=Stored.whole_values(variant.kept),
            recompute_ops=frozenset(),
            kept_bytes=variant.own_bytes + output_bytes,
            recompute_s=graph.beyond_default_s(variant.step_s),
            engine=EngineChoice.COMPILE,
            variant=number,
        )
        for number, variant in enumerate(graph.variants)
    ]
    eager = [replace(option, recompute_s=option.recompute_s + eager_s) for option in spread(hull, _MOST_ON_TAPE)]
    # All: working sets differ between engines, so one that is slower at no fewer bytes may still lower the peak.
    return (*sorted([*compiled[1:], *eager], key=lambda option: (option.kept_bytes, -option.recompute_s)), compiled[0])


def _widest_apart(options: Sequence[Option]) -> list[Option]:
    """Return the few options that leave the smallest gaps between them."""
    chosen = [options[0], options[-1]]
    little_s = _LITTLE * options[0].recompute_s
    while len(chosen) < _MOST_FROM_HULL:
        gain_s, best = max(
            ((_gain_s(option, chosen), option) for option in options if option not in chosen),
            key=lambda found: found[0],
            default=(0.0, options[0]),
        )
        if gain_s <= little_s:
            break
        chosen.append(best)
    return chosen[:1] + chosen[2:]  # The last one keeps everything it can, including pointwise results.


def _gain_s(option: Option, chosen: Iterable[Option]) -> float:
    """Return how many seconds an option is below the line between its neighbours among some others."""
    lean = max((o for o in chosen if o.kept_bytes <= option.kept_bytes), key=lambda o: o.kept_bytes)
    fat = min((o for o in chosen if o.kept_bytes >= option.kept_bytes), key=lambda o: o.kept_bytes)
    part = (option.kept_bytes - lean.kept_bytes) / max(1, fat.kept_bytes - lean.kept_bytes)
    return lean.recompute_s + part * (fat.recompute_s - lean.recompute_s) - option.recompute_s


def _residual_stream(graph: UnitGraph) -> frozenset[int]:
    """Return the sums that begin with the unit's input: of it and a part's output, then of that and the next output."""
    sizes = {value.nbytes for value in graph.values if value.is_output}
    stream = {index for index, value in enumerate(graph.values) if value.producer is None and value.nbytes in sizes}
    found: set[int] = set()
    for op in graph.ops:
        if _op_name(op) in ("add", "add_") and not stream.isdisjoint(op.inputs):
            found.update(value for value in op.outputs if graph.values[value].nbytes in sizes)
            stream |= found
    return frozenset(found)


def _values_of(graph: UnitGraph, is_meant: Callable[[OpRecord], bool]) -> frozenset[int]:
    return frozenset(value for op in graph.ops if is_meant(op) for value in op.outputs)


def _is_heavy(op: OpRecord) -> bool:
    """Whether it is a product, attention, or opaque to the compiler: an op of a different library, or a custom Function."""
    is_foreign = ":" in _op_name(op) or _op_name(op)[:1].isupper()
    return _is_product(op) or _is_attention(op) or is_foreign


def _is_product(op: OpRecord) -> bool:
    return _op_name(op) in _PRODUCTS


def _is_attention(op: OpRecord) -> bool:
    return "attention" in _op_name(op)


def _op_name(op: OpRecord) -> str:
    """Return an op's name without its module and count: "mm" of "mlp.up_proj.mm#1"."""
    return op.name.removeprefix(f"{module_of(op.name)}.").partition("#")[0]


def _bytes(graph: UnitGraph, values: Iterable[int]) -> int:
    return sum(graph.values[value].nbytes for value in values)
