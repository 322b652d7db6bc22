"""Runs PyTorch's own tests of checkpointing, from files that you have, with `recollect.checkpoint` in place of PyTorch's.

    python benchmarks/torch_checkpoint_tests.py pytorch/test/test_autograd.py pytorch/test/test_utils.py

The files are part of PyTorch's repository, not of its package, and not of this one; they need the package expecttest. Of each,
the tests run whose code says "checkpoint": first with PyTorch's implementation, then with ours. What passes only with PyTorch's
is listed, with what it asks for (`MEANT`), or else the last line of its error. Exit status 1 if there is anything else.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.utils.checkpoint

import recollect

OURS = {name: getattr(recollect, name) for name in ("checkpoint", "checkpoint_sequential")}
THEIRS = {name: getattr(torch.utils.checkpoint, name) for name in OURS}

_COUNTS = "counts the runs of the function, of which there is one"
_LIMIT = "asks for an error where ours has no such limit"
_WARNING = "asks for the warning that use_reentrant was not passed, and ours chooses"
_PRIVATE = "looks at PyTorch's own dispatch mode"
MEANT = {
    "test_access_saved_tensor_twice_without_recomputation_works": _COUNTS,
    "test_can_only_trigger_recompute_once": _LIMIT,
    "test_checkpoint_sequential_warns_if_use_reentrant_not_passed_explcitly": _WARNING,
    "test_checkpoint_trigger": _COUNTS,
    "test_checkpoint_warns_if_use_reentrant_not_passed_explcitly": _WARNING,
    "test_checkpointing_without_reentrant_custom_function_works": _LIMIT,
    "test_checkpointing_without_reentrant_saved_object_identity": "asks for the same object; ours is an alias of it",
    "test_nested_checkpoint_set_early_stop": _COUNTS,
    "test_nested_checkpoint_set_early_stop_no_recompution_needed": _COUNTS,
    "test_storage_lifetime": _PRIVATE,
    "test_version_counter": _LIMIT,
}


def load(path: Path, implementation: dict[str, Any]) -> Any:
    """Import a file of tests anew, with an implementation in the place from which it imports PyTorch's."""
    vars(torch.utils.checkpoint).update(implementation)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tests_of(module: Any) -> Iterator[unittest.TestCase]:
    """Yield the tests whose code says "checkpoint"."""
    for case in vars(module).values():
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == module.__name__):
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            # Parametrised tests are partial functions of what is written.
            if "checkpoint" in inspect.getsource(inspect.unwrap(getattr(case, name))).lower():
                yield case(name)


def run(path: Path, implementation: dict[str, Any]) -> dict[str, str]:
    """Run a file's tests; return "passed", "skipped" or the last line of the error, by name."""
    found: dict[str, str] = {}
    try:
        for test in tests_of(load(path, implementation)):
            result = unittest.TestResult()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                test.run(result)
            problems = [text for _, text in (*result.errors, *result.failures)]
            last = problems[0].strip().splitlines()[-1] if problems else ""
            found[test.id()] = last or ("skipped" if result.skipped else "passed")
    finally:
        vars(torch.utils.checkpoint).update(THEIRS)
    return found


def main() -> int:
    """Run the files' tests twice, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="test_autograd.py, test_utils.py, ...")
    files = parser.parse_args().files
    for path in files:
        if not path.exists():
            print(f"{path}: not there; it is in PyTorch's repository, in the folder test. Nothing was run.")
            return 0
    # Of a failure, it would say how to run it again.
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    unexpected = 0
    for path in files:
        sys.path.insert(0, str(path.parent))  # They import others from beside them.
        theirs, ours = run(path, THEIRS), run(path, OURS)
        print(f"{path.name}: PyTorch's {_counts(theirs)}; ours {_counts(ours)}")
        for name, outcome in ours.items():
            if outcome != theirs[name]:
                reason = MEANT.get(name.rpartition(".")[2])
                unexpected += reason is None
                print(f"  {name.partition('.')[2]}: {reason or outcome}")
    return int(unexpected > 0)


def _counts(found: dict[str, str]) -> str:
    counts = Counter(o if o in ("passed", "skipped") else "failed" for o in found.values())
    return ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
