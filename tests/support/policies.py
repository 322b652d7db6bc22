"""Rules that decide value by value, for tests: each is a `recollect.engine.policy.Policy`."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from recollect.plans.value_names import module_of


@dataclass(frozen=True)
class Uniform:
    """The same answer for every value of every unit."""

    recompute: bool
    keep_output: bool

    def drops(self, unit_path: str, value_name: str) -> bool:
        return self.recompute

    def drops_in(self, unit_path: str, module_path: str) -> bool:
        return self.recompute

    def drops_output(self, unit_path: str) -> bool:
        return not self.keep_output


@dataclass(frozen=True)
class Random:
    """A coin for each value and each unit's output, the same on every run; the seed also sets the coin's bias.

    Every third module keeps all that it computes, so that what is dropped is read, viewed and saved out of sight.
    """

    seed: int

    def drops(self, unit_path: str, value_name: str) -> bool:
        is_dropped = self._coin(unit_path, value_name) < (2, 5, 8)[self.seed % 3]
        return is_dropped and self.drops_in(unit_path, module_of(value_name))

    def drops_in(self, unit_path: str, module_path: str) -> bool:
        return self._coin(unit_path, f"module {module_path}") >= 3

    def drops_output(self, unit_path: str) -> bool:
        return self._coin(unit_path, "the output") < 5

    def _coin(self, unit_path: str, value_name: str) -> int:
        return zlib.crc32(f"{self.seed} {unit_path} {value_name}".encode()) % 10


@dataclass(frozen=True)
class Only:
    """Recompute the named values, whatever the unit; keep the rest."""

    names: frozenset[str]
    keep_output: bool = True

    def drops(self, unit_path: str, value_name: str) -> bool:
        return value_name in self.names

    def drops_in(self, unit_path: str, module_path: str) -> bool:
        return any(module_of(name) == module_path for name in self.names)

    def drops_output(self, unit_path: str) -> bool:
        return not self.keep_output


KEEP_ALL = Uniform(recompute=False, keep_output=True)
FULL = Uniform(recompute=True, keep_output=True)
NOTHING_KEPT = Uniform(recompute=True, keep_output=False)

Policy = Uniform | Random | Only

EVERY_PLAN: dict[str, Policy] = {
    "keep-all": KEEP_ALL,
    "full": FULL,
    "nothing-kept": NOTHING_KEPT,
    **{f"random-{seed}": Random(seed) for seed in range(10)},
}
FEW_PLANS: dict[str, Policy] = {"full": FULL, "nothing-kept": NOTHING_KEPT, "random-1": Random(1)}
