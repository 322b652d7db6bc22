"""Make plans of the well-known recompute schedules, to compare the planner with.

| name | keeps |
|---|---|
| keep_all | everything, so no recompute |
| full | each layer's input |
| every_nth | the input of every nth layer |
| sqrt | the input of every nth layer, where n is the rounded square root of the number of layers |

Units that were recorded inside `torch.compile` run there: "keep_all" leaves the choice to PyTorch, and "full" keeps nothing, if
that was recorded. Embedding, final norm and LM head keep everything, as with the switches of the libraries themselves.

References:
    T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.1, for the
    square root. https://arxiv.org/abs/1604.06174
"""

import difflib
import math
from typing import Literal

from recollect.arguments import check_kind
from recollect.errors import PlanError
from recollect.planning.option_table import always_named
from recollect.planning.output_choices import dropped_outputs, longest_chain
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import compiled_unit, keep_all_unit, recompute_all_unit
from recollect.simulation.predicted import predicted_plan

ClassicName = Literal["keep_all", "full", "every_nth", "sqrt"]
CLASSIC_NAMES: tuple[ClassicName, ...] = ("keep_all", "full", "every_nth", "sqrt")


def classic_plan(profile: Profile, name: ClassicName, n: int | None = None) -> Plan:
    """Return a classic schedule as a plan, with its predicted peak and slowdown.

    Args:
        profile: the recorded step.
        name: "keep_all", "full", "every_nth" or "sqrt".
        n: only for "every_nth": keep the input of every nth layer; 1 is the same as "full".

    Returns:
        A plan without a budget.

    Raises:
        PlanError: unknown name; `n` missing, below 1, or given for a different name; `n` above 1 for layers that do not
            feed each other.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> profile = recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True)
        >>> full = classic_plan(profile, "full")
        >>> full.note, sorted(full.units)
        ('full', ['0', '1', '2', '3'])
    """
    check_kind('classic_plan(profile, "full")', "profile", profile, Profile, "recollect.Profile")
    stride, note = _stride(profile, name, n)
    dropped = dropped_outputs(profile, stride=stride) if stride > 1 else frozenset()
    units, named = {}, always_named(profile)
    for call in profile.calls:
        if call.path not in named or call.path in units:
            continue
        graph = profile.graph_of(call)
        keeps_output = call.path not in dropped
        leanest = next((number for number, variant in enumerate(graph.variants) if not variant.kept), -1)
        if graph.variants and keeps_output and (stride == 0 or leanest >= 0):
            units[call.path] = compiled_unit(graph, 0 if stride == 0 else leanest)
        else:
            keeps_all = stride == 0 or not call.repeated
            units[call.path] = (
                keep_all_unit(graph) if keeps_all else recompute_all_unit(graph, keeps_output=keeps_output)
            )
    plan = Plan(units, note=note)
    return predicted_plan(profile, plan)


def _stride(profile: Profile, name: str, n: int | None) -> tuple[int, str]:
    """Return how many layers share one kept input (0: keep everything), and the note of the plan."""
    if name not in CLASSIC_NAMES:
        close = difflib.get_close_matches(str(name), CLASSIC_NAMES, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise PlanError(f"classic plan: got {name!r}, expected one of {', '.join(CLASSIC_NAMES)}.{meant}")
    if name != "every_nth":
        if n is not None:
            raise PlanError(f"n: got {n} with {name!r}, expected none; only 'every_nth' takes n.")
        if name != "sqrt":
            return (0 if name == "keep_all" else 1), name
        n = max(1, round(math.sqrt(longest_chain(profile))))
    if type(n) is not int or n < 1:
        raise PlanError(f"n: got {n!r} with 'every_nth', expected a whole number of layers, 1 or more.")
    if n > 1 and longest_chain(profile) < 2:
        raise PlanError(
            f"n: got {n}, but no repeated layer of this model feeds the next one, so each input is kept; use 'full'."
        )
    return n, f"{name}, every {n}" if name == "sqrt" else f"every {n}"
