"""Rules that decide value by value, for tests: each is a `recollect.engine.policy.Policy`."""

import zlib
from dataclasses import dataclass

from recollect.plans.action import Action
from recollect.plans.value_names import module_of


@dataclass(frozen=True)
class Uniform:
    """The same answer for every value of every unit."""

    values: Action
    output: Action = Action.KEEP

    @property
    def drops_outputs(self) -> bool:
        return self.output is Action.RECOMPUTE

    def action(self, unit_path: str, value_name: str) -> Action:
        return self.values

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return self.values is not Action.KEEP

    def output_action(self, unit_path: str) -> Action:
        return self.output


@dataclass(frozen=True)
class AllButDraws(Uniform):
    """Recompute every value of every unit but what random ops make, as a plan for a captured step does."""

    values: Action = Action.RECOMPUTE
    also: frozenset[str] = frozenset()

    def action(self, unit_path: str, value_name: str) -> Action:
        op = value_name.removeprefix(f"{module_of(value_name)}.").partition("#")[0].partition(".")[0]
        return _recompute_if(op not in DRAWS | self.also)


@dataclass(frozen=True)
class Random:
    """A coin for each value and each unit's output, the same on every run; the seed also sets the coin's bias.

    Every third module keeps all that it computes, so that what is dropped is read, viewed and saved out of sight.
    """

    seed: int
    drops_outputs = True

    def action(self, unit_path: str, value_name: str) -> Action:
        is_dropped = self._coin(unit_path, value_name) < (2, 5, 8)[self.seed % 3]
        return _recompute_if(is_dropped and self.acts_in(unit_path, module_of(value_name)))

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return self._coin(unit_path, f"module {module_path}") >= 3

    def output_action(self, unit_path: str) -> Action:
        return _recompute_if(self._coin(unit_path, "the output") < 5)

    def _coin(self, unit_path: str, value_name: str) -> int:
        return zlib.crc32(f"{self.seed} {unit_path} {value_name}".encode()) % 10


@dataclass(frozen=True)
class Only:
    """Recompute the named values, whatever the unit; keep the rest."""

    names: frozenset[str]
    output: Action = Action.KEEP

    @property
    def drops_outputs(self) -> bool:
        return self.output is Action.RECOMPUTE

    def action(self, unit_path: str, value_name: str) -> Action:
        return _recompute_if(value_name in self.names)

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        return any(module_of(name) == module_path for name in self.names)

    def output_action(self, unit_path: str) -> Action:
        return self.output


# Of the registry's units.
DRAWS = frozenset(
    {
        "bernoulli_",
        "exponential_",
        "rand",
        "randint_like",
        "randn_like",
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "native_dropout",
    }
    | {"recollect_tests:drop", "_scaled_dot_product_flash_attention_for_cpu"}
)


def _recompute_if(is_dropped: bool) -> Action:
    return Action.RECOMPUTE if is_dropped else Action.KEEP


KEEP_ALL = Uniform(Action.KEEP)
FULL = Uniform(Action.RECOMPUTE)
NOTHING_KEPT = Uniform(Action.RECOMPUTE, output=Action.RECOMPUTE)

Policy = Uniform | Random | Only

EVERY_PLAN: dict[str, Policy] = {
    "keep-all": KEEP_ALL,
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    **{f"random-{seed}": Random(seed) for seed in range(6)},
}
FEW_PLANS: dict[str, Policy] = {"full": FULL, "nothing-kept": NOTHING_KEPT, "random-1": Random(1)}
