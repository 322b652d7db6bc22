"""`apply_activation_checkpointing`: modules chosen as `torch.distributed` has them chosen, and left unmodified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from recollect.applying import apply_policy
from recollect.arguments import check_kind
from recollect.checkpointing.op_policy import Contexts, PolicyFunction, PolicyTape, contexts_with
from recollect.engine.placed_forward import Applied
from recollect.engine.policy import DropAll
from recollect.engine.tape import Tape
from recollect.errors import ConfigError, NotYetError
from recollect.plans.paths import paths_above
from recollect.recording.find_units import NOT_CALLED

# Of `checkpoint_wrapper`: what has no effect where nothing runs a second time.
_WITHOUT_EFFECT: Final = frozenset(
    {"checkpoint_impl", "preserve_rng_state", "determinism_check", "debug", "early_stop", "use_reentrant"}
)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] | None = None,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Callable[..., bool] | None = None,
    *,
    policy_fn: PolicyFunction | Sequence[Any] | None = None,
) -> Applied:
    """Recompute the chosen modules of a model in backward, as `torch.distributed`'s function of this name.

    The modules stay what they are: nothing is wrapped, and names of parameters, state dicts and hooks do not change. Of
    modules inside each other the outermost is chosen. There is no budget; for one, see `fit` and `attach`.

    Args:
        model: the model. As in PyTorch, it is not chosen itself.
        checkpoint_wrapper_fn: None, or PyTorch's `checkpoint_wrapper`, also as a `functools.partial`, of which `context_fn` of
            `create_selective_checkpoint_contexts` counts.
        check_fn: whether to recompute a module.
        auto_wrap_policy: called as FSDP does, with `module`, `recurse` and `nonwrapped_numel`; in place of `check_fn`.
        policy_fn: what to save inside of them: `policy(context, op, *args, **kwargs)` as of PyTorch's selective
            checkpointing, or a list of ops; see `policy_plan` for the peak that this leads to.

    Returns:
        A handle that ends it; also a context manager.

    Raises:
        ArgumentError: the model is no module.
        ConfigError: no module was chosen; or two policies are given.
        NotYetError: another wrapper, such as `offload_wrapper`.
        AlreadyAppliedError: the model already recomputes.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(
        ...     *[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)]
        ... )
        >>> applied = apply_activation_checkpointing(
        ...     model, check_fn=lambda module: isinstance(module, torch.nn.Sequential)
        ... )
        >>> model(torch.randn(4, 8)).sum().backward()  # three GELUs are computed again
        >>> applied.remove()
    """
    check_kind("apply_activation_checkpointing(model)", "model", model, nn.Module, "torch.nn.Module")
    context_fn = _context_fn_of(checkpoint_wrapper_fn)
    if policy_fn is not None:
        if context_fn is not None:
            raise ConfigError(
                settings={"policy_fn": policy_fn, "checkpoint_wrapper_fn": checkpoint_wrapper_fn},
                reason="each says what to save",
                advice="Pass one of them.",
            )
        context_fn = contexts_with(policy_fn)
    policy = auto_wrap_policy or functools.partial(_checked, check_fn)
    paths = _outermost(_chosen(model, "", policy)[0])
    if not paths:
        chooser = {"check_fn": check_fn} if auto_wrap_policy is None else {"auto_wrap_policy": auto_wrap_policy}
        raise ConfigError(
            settings=chooser,
            reason=f"it chose no module of {type(model).__name__}",
            advice="Print what it is called with; the model itself and lists of modules cannot be chosen.",
        )
    return apply_policy(model, paths, Tape(DropAll()) if context_fn is None else PolicyTape(context_fn))


def _checked(check_fn: Callable[[nn.Module], bool], *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or check_fn(module)


def _chosen(module: nn.Module, path: str, policy: Callable[..., bool]) -> tuple[list[str], int]:
    """Return what a policy chooses inside a module, children first, and the number of their parameters' elements."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return [], 0
    paths: list[str] = []
    chosen_numel = 0
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        inside, inside_numel = _chosen(child, child_path, policy)
        paths += inside
        chosen_numel += inside_numel
    if path and policy(module=module, recurse=False, nonwrapped_numel=numel - chosen_numel):
        if not isinstance(module, NOT_CALLED):
            return [*paths, path], numel
    return paths, chosen_numel


def _outermost(paths: Sequence[str]) -> list[str]:
    chosen = set(paths)
    return sorted(path for path in chosen if chosen.isdisjoint(paths_above(path)))


def _context_fn_of(wrapper: Callable[..., nn.Module] | None) -> Callable[[], Contexts] | None:
    """Return the `context_fn` that a wrapper would pass on."""
    if wrapper is None:
        return None
    function, options = (wrapper.func, wrapper.keywords) if isinstance(wrapper, functools.partial) else (wrapper, {})
    others = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT | {"context_fn"}}
    name = getattr(function, "__name__", "")
    if name != "checkpoint_wrapper" or not function.__module__.startswith("torch.") or others:
        raise NotYetError(
            settings=others or {"checkpoint_wrapper_fn": wrapper},
            needs="another module around each one, and here modules stay as they are",
            advice="Leave it out, or pass PyTorch's checkpoint_wrapper with nothing but a context_fn.",
        )
    return options.get("context_fn")
