"""Has searches for plans try fewer options in fewer simulated steps: where no test asks how good plans are.

Tests of one process have it by a fixture of `conftest.py`, programs that serve cases by `case_server.py`. Commands, examples
and pages run as users run them.
"""

from recollect.planning import chain_solver

SETTINGS = {"_PROBED_EVENTS": 40_000, "_OPS_OF_ALL_VARIATIONS": 60_000}


def switch_on() -> None:
    for name, value in SETTINGS.items():
        assert hasattr(chain_solver, name), f"the search has no {name} to make smaller"
        setattr(chain_solver, name, value)
