"""`recollect megatron`: run an unchanged training script of Megatron-LM, with `attach` in place."""

import functools
import importlib.util
import runpy
import sys
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rich.console import Console

from recollect.cli.commands import RunMegatron
from recollect.errors import RecollectError
from recollect.quantities import check_budget, parse_bytes

_MODULE, _FUNCTION = "megatron.training.training", "setup_model_and_optimizer"


def run_megatron(command: RunMegatron, console: Console) -> None:
    """Run the script as Python would."""
    name = f"recollect megatron {command.script}"
    if not command.script.is_file():
        raise RecollectError(f"{name}: no such file, expected a training script of Megatron's.")
    # Before the script takes minutes to build its model. How large its device is, nobody knows yet.
    check_budget(command.recollect_budget, device_bytes=1)
    parse_bytes(command.recollect_host_budget)
    prefix = "recollect_"
    attaching = _Attaching({k.removeprefix(prefix): v for k, v in vars(command).items() if k.startswith(prefix)})
    sys.argv = [str(command.script), *command.script_flags]
    sys.path.insert(0, str(command.script.resolve().parent))
    sys.meta_path.insert(0, attaching)
    try:
        runpy.run_path(str(command.script), run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise RecollectError(f"{name}: {error}. Put the folder of Megatron-LM on PYTHONPATH.") from error
    if not attaching.has_attached:
        raise RecollectError(
            f"{name}: it ended without a call of {_MODULE}.{_FUNCTION}, so it ran without a budget. Call "
            "recollect.attach(model, optimizer, budget) in the script, where its model and optimizer are made."
        )


@dataclass
class _Attaching(MetaPathFinder):
    """Wraps Megatron's function that makes model and optimizer as soon as the script imports it, wherever it does."""

    options: dict[str, Any]
    has_attached: bool = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Any, module: ModuleType) -> None:
        execute(module)
        make = getattr(module, _FUNCTION)

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            # Imports torch, which the script may have to prepare for.
            from recollect.attaching.attach import attach

            model, optimizer, scheduler = make(*args, **kwargs)
            attach(model, optimizer, **self.options)
            self.has_attached = True
            return model, optimizer, scheduler

        setattr(module, _FUNCTION, made)
