"""The checker of captured steps finds what an engine may not do in one, by line; and only that."""

import inspect
from functools import partial
from typing import Any, NamedTuple

import pytest

from capture_checker import CaptureChecker
from contract_steps import Run, plain
from contract_units import UNITS
from engines import applied
from injected_lines import inject
from policies import FULL
from recollect.checkpointing import checkpoint
from recollect.engine.function_call import FunctionCall
from recollect.engine.function_mode import FunctionMode
from recollect.engine.function_run import FunctionRun
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.graph.node import TracedUnit, _Call
from recollect.engine.opcall import OpCall, WriteCall
from recollect.engine.policy import TapeState
from recollect.engine.tape import Tape
from recollect.engine.tape_forwards import ScopeForward
from recollect.engine.tape_mode import TapeMode
from recollect.engine.values import StorageRecord, TapeValue
from recollect.replay import Node


class Fault(NamedTuple):
    """A line to put into a function, after a line with a text, and what the checker calls it."""

    owner: Any
    name: str
    after: str
    line: str
    what: str
    engine: str = "tape"
    unit: str = "feed forward"


# The CPU has no such thing.
_TRY = "with __import__('contextlib').suppress(Exception): "
_CONTENT = "__import__('recollect.engine.content', fromlist=['content'])"

FAULTS = (
    # What a tensor holds, in forward.
    Fault(TapeMode, "_register", "record = self", "result.abs().sum().item()", "item"),
    Fault(TapeMode, "_leaf", "held, version =", "held.detach().tolist()", "tolist"),
    Fault(TapeMode, "_run_write", "is_raised =", "torch.equal(targets[0], targets[0])", "equal", unit="in place"),
    Fault(TapeMode, "compare", '"""', "torch.where(torch.ones(2).bool())", "nonzero"),
    Fault(TapeMode, "pack", "def pack", "tensor.detach().cpu()", "cpu"),
    Fault(TapeMode, "known_value", "record = record_of", "if tensor.detach().sum() > 0: pass", "__bool__"),
    Fault(TapeState, "op_actions", '"""', "torch.ones(2)[torch.ones(2) > 0]", "__getitem__"),
    Fault(Tape, "_hold_outputs", "storage = tensor", "tensor.detach().numpy()", "numpy"),
    Fault(FunctionRun, "end", "self.saved = saved", "[one.unique() for one in saved]", "_unique2", unit="function"),
    # In backward.
    Fault(Tape, "unpack", "value: TapeValue = packed", "torch.ones(3).nonzero()", "nonzero"),
    Fault(TapeValue, "fetch_saved", "tensor: torch.Tensor = self", "float(tensor.detach().sum())", "__float__"),
    Fault(OpCall, "__call__", "output = self._run", "torch.is_nonzero(torch.ones(1))", "is_nonzero"),
    Fault(WriteCall, "__call__", "base = tensors[0]", "int(base.sum())", "__int__", unit="in place"),
    Fault(FunctionCall, "__call__", "args = self.arguments", "tensors[0].to('cpu')", "to", unit="function"),
    Fault(StorageRecord, "value_of", "def value_of", "torch.ops.aten.item(torch.ones(()))", "_local_scalar_dense"),
    # Checksums and glances.
    Fault(Tape, "run", "output = mode.run_module", f"{_CONTENT}.checksums([output])", "from_address"),
    Fault(TapeValue, "fetch", "tensor = self.fetch_saved()", f"{_CONTENT}.glance_at(tensor)", "string_at"),
    # States of generators.
    Fault(Tape, "new_mode", "def new_mode", "torch.default_generator.get_state()", "get_state"),
    Fault(ScopeForward, "__call__", "mode = self.tape.mode", "torch.get_rng_state()", "get_state"),
    Fault(FunctionMode, "end_function", "self._forget", "torch.initial_seed()", "initial_seed", unit="function"),
    Fault(TapeMode, "run_module", "self.scope = module_path", f"{_TRY}torch.Generator().get_offset()", "get_offset"),
    Fault(TapeMode, "_op_actions", "count = self", f"{_TRY}torch.Generator().set_state(None)", "set_state"),
    # Clocks.
    Fault(Node, "run", "def run", "__import__('time').monotonic_ns()", "monotonic_ns"),
    Fault(GraphForward, "_from_trace", "running.path", "__import__('time').time_ns()", "time_ns", "graph"),
    Fault(TracedUnit, "backward", "given, program =", f"{_TRY}torch.cuda.synchronize()", "synchronize", "graph"),
    # In units that run from traces, and in checkpoints.
    Fault(_Call, "forward", "saved = self.saved", "[one.isnan().any().item() for one in saved]", "item", "graph"),
    Fault(_Call, "take", "saved = self.saved", "torch.allclose(saved[0], saved[0])", "allclose", "graph"),
    Fault(TracedUnit, "_given", "self.latest =", "torch.ops.aten.nonzero.default(torch.ones(2))", "nonzero", "graph"),
    Fault(checkpoint, "checkpoint", "tape = _TAPE", "torch.arange(3).bincount()", "bincount", "checkpoint"),
)


def checked(engine: str, unit: str, *, tells: bool = True) -> CaptureChecker:
    """Run a step as if it were captured, after two."""
    run = Run(UNITS[unit].model())
    checker = CaptureChecker(sees_ops=engine != "graph", tells=tells)
    if engine == "checkpoint":
        for one in run.model.units:
            vars(one)["forward"] = partial(checkpoint.checkpoint, one.forward)
    else:
        applied(engine, run.model, FULL)
    run.through(plain, plain)
    with checker.running():
        run.through(plain)
    return checker


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.owner.__name__}.{fault.name}: {fault.what}")
def test_a_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    number = inject(monkeypatch, fault.owner, fault.name, fault.after, fault.line)
    module = inspect.getmodule(fault.owner)
    assert module is not None
    file = f"{module.__name__.removeprefix('recollect.').replace('.', '/')}.py"
    found = checked(fault.engine, fault.unit).found
    assert {(one.file, one.line) for one in found} == {(file, number)}
    assert fault.what in {one.what for one in found}


# Both read the content of small tensors, and one the state of the generator.
UNTOLD = {"tape": ("engine/tape_mode.py", "engine/values.py"), "graph": ("engine/graph/node.py",)}


@pytest.mark.parametrize("engine", UNTOLD)
def test_engines_that_are_not_told_of_the_capture_are_found(engine: str) -> None:
    """They glance at what small tensors hold, and read the state of a generator, where it is asked for."""
    found = checked(engine, "dropout", tells=False).found
    assert {"string_at", "get_state"} <= {one.what for one in found}
    assert {one.file for one in found} >= set(UNTOLD[engine])


@pytest.mark.parametrize("unit", ["one element", "mask of data", "loop over experts", "saved on cpu inside"])
@pytest.mark.parametrize("engine", ["tape", "checkpoint"])
def test_what_the_model_reads_is_its_own_affair(unit: str, engine: str) -> None:
    assert not checked(engine, unit).lines
