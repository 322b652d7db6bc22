"""What is said, and refused, where PyTorch's hooks do not hold, or are not known to."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import _torch_memory
from recollect.checkpointing.checkpoint import checkpoint
from recollect.engine import opcall, self_check
from recollect.engine.opcall import Settings, current_settings
from recollect.engine.self_check import Hook, SwitchedOff, hooks, switched_off
from recollect.errors import ConfigError, MeterError, RecordError, TorchVersionWarning
from recollect.measuring import meter

ROWS = torch.randn(4, 8)


@pytest.fixture(autouse=True)
def checked_anew() -> Iterator[None]:
    switched_off.cache_clear()
    yield
    switched_off.cache_clear()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def no_hook_holds(monkeypatch: pytest.MonkeyPatch, without: SwitchedOff) -> None:
    monkeypatch.setattr(self_check, "hooks", lambda: [Hook("ops are seen", lambda: 1 / 0 > 0, without)])


def test_all_hooks_hold_whatever_the_caller_runs_under() -> None:
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("the caller's mode sees a check")

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("the caller's mode sees a check")

    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), Functions(), Dispatch():
        assert switched_off() == frozenset()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        switched_off.cache_clear()
        assert switched_off() == frozenset()


def test_checks_leave_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    switched_off()
    assert torch.equal(torch.get_rng_state(), before)


def test_each_hook_says_what_goes_without_it() -> None:
    assert {hook.without for hook in hooks()} == set(SwitchedOff)
    assert len({hook.name for hook in hooks()}) == len(hooks())


def test_one_warning_at_the_line_that_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    no_hook_holds(monkeypatch, SwitchedOff.STEPPING_ASIDE)
    version = torch.__version__.partition("+")[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            recollect.apply(model(), recollect.Plan({}))
    (warning,) = caught
    assert warning.category is TorchVersionWarning and warning.filename == __file__
    assert str(warning.message) == (
        f"this does not hold in torch {version}, and what depends on it is switched off: ops are seen (all modules of a unit "
        "are watched, which takes time). Gradients stay exact. recollect is tested with torch 2.11.0 to 2.15.0: install one of "
        "these, or a newer recollect."
    )


def test_a_newer_version_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "NEWEST_TESTED", "2.10.3")
    with pytest.warns(
        TorchVersionWarning, match=r"^torch 2\.\d+\.\d+ has not been tried: recollect is tested .* to 2\.10\.3\."
    ) as caught:
        recollect.apply(model(), recollect.Plan({}))
    assert len(caught) == 1 and caught[0].filename == __file__
    recollect.apply(model(), recollect.Plan({}))


def test_a_patch_of_a_tested_version_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.15.9+cu140")
    assert switched_off() == frozenset()


def test_nothing_is_recorded_or_promised_where_no_plan_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    no_hook_holds(monkeypatch, SwitchedOff.PLANS)
    message = r"^torch 2\.\d+\.\d+\S* lacks what plans depend on .*, so no step can be recorded\. Install torch 2\.11"
    trained = model()
    with pytest.warns(TorchVersionWarning), pytest.raises(RecordError, match=message):
        recollect.record(trained, ROWS, loss_fn=torch.sum)
    with pytest.raises(RecordError, match=message):
        recollect.attach(trained, torch.optim.SGD(trained.parameters(), 0.1), "1GiB")


def test_checkpoints_keep_all_where_no_plan_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    no_hook_holds(monkeypatch, SwitchedOff.PLANS)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    x = ROWS.clone().requires_grad_()
    with (
        pytest.warns(TorchVersionWarning),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
    ):
        checkpoint(lambda x: x.sin().sin(), x)
    assert len(seen) == 2


def test_a_switch_that_cannot_be_set_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now = current_settings()
    then = Settings((*now.values[:2], not now.values[2], *now.values[3:]), now.modes)
    monkeypatch.setattr(
        opcall,
        "_SWITCHES",
        [
            *opcall._SWITCHES[:2],
            (torch.are_deterministic_algorithms_enabled, lambda is_on: None),
            *opcall._SWITCHES[3:],
        ],
    )
    message = (
        r"^got are_deterministic_algorithms_enabled=False: it was True in forward, and could not be restored .* Do not"
    )
    with pytest.raises(ConfigError, match=message), then.applied(now):
        pass
    assert current_settings().has(now.values, now.modes)


def test_a_trace_that_shows_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_prepare_profiler", "_enable_profiler"):
        monkeypatch.setattr(_torch_memory, name, lambda *args: None)
    monkeypatch.setattr(_torch_memory, "profiler_is_active", lambda: True)
    monkeypatch.setattr(meter, "some_profiler_is_active", lambda: False)
    monkeypatch.setattr(_torch_memory, "_disable_profiler", type("", (), {"experimental_event_tree": list}))
    with pytest.raises(
        MeterError, match=r"^the allocator's trace of torch .* does not show what is allocated, .* Install torch 2\.11"
    ):
        recollect.measure_peak(lambda: torch.ones(8))
