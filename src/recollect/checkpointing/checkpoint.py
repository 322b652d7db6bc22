"""`checkpoint` and `checkpoint_sequential`, with the signatures of `torch.utils.checkpoint`, on the tape.

`apply_activation_checkpointing`: modules are chosen as in `torch.distributed` and left unmodified.

The function runs once. Backward recomputes values op by op as it needs them; see `recollect.engine.tape`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from recollect._torch_functions import are_users_hooks_active, owner_of_hooks, selective_policy
from recollect._torch_private import transforms_are_active
from recollect.applying import apply_policy
from recollect.arguments import check_kind
from recollect.checkpointing.op_policy import Contexts, PolicyFunction, PolicyTape, contexts_with
from recollect.engine.placed_forward import Applied
from recollect.engine.policy import DropAll
from recollect.engine.tape import Tape
from recollect.engine.tape_mode import TapeMode
from recollect.errors import ConfigError, NotYetError
from recollect.recording.find_units import is_called

_DETERMINISM_CHECKS: Final = ("default", "none")

_TAKES_RESPECT: Final = "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint).parameters

# One for all functions, so the ops of one must not decide which are watched in the next.
_TAPE: Final = Tape(DropAll(), runs_to_settle=sys.maxsize)
# Arguments of `checkpoint_wrapper` that have no effect, since nothing runs a second time.
_WITHOUT_EFFECT: Final = frozenset(
    {"checkpoint_impl", "preserve_rng_state", "determinism_check", "debug", "early_stop", "use_reentrant"}
)


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a function, drop the values that it computes, and recompute them when backward asks for them.

    Takes the arguments of `torch.utils.checkpoint.checkpoint`. The function itself runs once: backward recomputes values
    op by op, with the random numbers of forward, so there is no second run that could differ from the first.

    Args:
        function: a function or module. Its result is kept. Without it, a decorator is returned.
        *args: its arguments: tensors, of any shape, and others.
        use_reentrant: False or None: on the tape. True: PyTorch's reentrant implementation itself, with its limits.
        context_fn: of `create_selective_checkpoint_contexts`: values that its policy saves are kept; offloaded ones are in host
            memory until backward comes near them. Any other one needs a second run, which PyTorch's own
            implementation makes.
        determinism_check: "default" or "none". Without a second run there is nothing to check.
        debug: explains a failed check; the same applies.
        early_stop: stop a second run early; the same applies.
        preserve_rng_state: False has no effect on the tape: draws are the same either way, at the cost of one small state.
        respect_saved_tensors_hooks: whether values that a policy saves go through the hooks around the call, such as those of
            `save_on_cpu`, as PyTorch takes it since 2.15. None, False: they stay where they are.
        **kwargs: arguments of the function by keyword.

    Returns:
        The function's result.

    Raises:
        ConfigError: an unknown `determinism_check`; `debug` with a `context_fn`.
        NotYetError: `respect_saved_tensors_hooks` with a policy and hooks around it.
        OffloadError: host memory is not available, or a copy failed.

    Example:
        >>> import torch
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> loss = checkpoint(lambda x: x.sin().exp(), x).sum()  # the sine is dropped
        >>> loss.backward()  # and computed again
        >>> torch.equal(x.grad, x.cos() * x.sin().exp())
        True
    """
    _check(determinism_check, debug, context_fn)
    if function is None:
        given = {
            "use_reentrant": use_reentrant,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "preserve_rng_state": preserve_rng_state,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        }
        return functools.partial(_decorated, {**given, **kwargs})
    options: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if respect_saved_tensors_hooks is not None and _TAKES_RESPECT:
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    if debug:
        options["debug"] = True
    if context_fn is not noop_context_fn:
        options["context_fn"] = context_fn
    if use_reentrant:
        return torch_checkpoint(function, *args, use_reentrant=True, **options, **kwargs)
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    if not torch.is_grad_enabled() or transforms_are_active():
        return function(*args, **kwargs)
    tape = _TAPE
    if context_fn is not noop_context_fn:
        contexts = context_fn()
        if selective_policy(contexts[0]) is None:
            options |= {
                "context_fn": lambda: contexts,
                "determinism_check": determinism_check,
                "early_stop": early_stop,
            }
            return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
        tape = _policy_tape(contexts, respect_saved_tensors_hooks)
    outer = owner_of_hooks()
    if isinstance(outer, TapeMode) and (tape is not _TAPE or outer is not tape.mode):
        # Inside a planned unit its plan decides, and inside a policy's region the policy.
        return function(*args, **kwargs)
    if tape.mode is not None and outer is not tape.mode:
        # In PyTorch's checkpoint inside one of ours: when PyTorch's runs again, this one is outermost.
        tape = Tape(DropAll())
    # The function's name in errors.
    name = str(getattr(function, "__qualname__", type(function).__name__))
    return tape.run(name, function, args, kwargs)


def _check(determinism_check: str, debug: bool, context_fn: Callable[[], Contexts]) -> None:
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ConfigError(
            settings={"determinism_check": determinism_check},
            reason="there is no such check",
            advice=f"Set it to {' or '.join(map(repr, _DETERMINISM_CHECKS))}.",
        )
    if debug and context_fn is not noop_context_fn:
        raise ConfigError(
            settings={"debug": True, "context_fn": context_fn},
            reason="PyTorch's trace for debugging is itself a context",
            advice="Drop one of them; on the tape, debug has no effect.",
        )


def _policy_tape(contexts: Contexts, respect_saved_tensors_hooks: bool | None) -> PolicyTape:
    if respect_saved_tensors_hooks and are_users_hooks_active():
        raise NotYetError(
            settings={"respect_saved_tensors_hooks": True},
            needs="ways to store a value that are not its own, for what a policy saves",
            advice="Leave it out, or use torch.utils.checkpoint.checkpoint, in torch 2.15 or later.",
        )
    return PolicyTape(lambda: contexts)


def _decorated(options: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return run


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """Run functions in sequence, in equal segments, each a `checkpoint` except the last.

    Takes the arguments of `torch.utils.checkpoint.checkpoint_sequential`.

    Args:
        functions: modules or functions of one argument.
        segments: the number of parts to run them in. If they do not divide evenly, the last one gets the rest.
        input: the argument of the first.
        use_reentrant: see `checkpoint`.
        preserve_rng_state: see `checkpoint`.

    Returns:
        The result of the last function.

    Raises:
        ConfigError: fewer than one segment, or more than there are functions.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        >>> checkpoint_sequential(layers, 2, torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """
    # Not `children`, which skips a module's second occurrence.
    parts: list[Callable[[Any], Any]] = list(cast(Iterable[Any], functions))
    if not 1 <= segments <= max(1, len(parts)):
        raise ConfigError(
            settings={"segments": segments},
            reason=f"there are {len(parts)} functions to divide",
            advice=f"Set it to 1 to {max(1, len(parts))}.",
        )
    size = len(parts) // segments
    output = input
    for number in range(segments - 1):
        part = functools.partial(_in_turn, parts[number * size : (number + 1) * size])
        output = checkpoint(part, output, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _in_turn(parts[(segments - 1) * size :], output)


def _in_turn(functions: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] | None = None,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Callable[..., bool] | None = None,
    *,
    policy_fn: PolicyFunction | Sequence[Any] | None = None,
) -> Applied:
    """Recompute the chosen modules of a model in backward, like the function of this name in `torch.distributed`.

    The modules do not change: nothing is wrapped, and names of parameters, state dicts and hooks do not change. Of
    modules inside each other the outermost is chosen. There is no budget; for one, see `fit` and `attach`.

    Args:
        model: the model. As in PyTorch, it is not chosen itself.
        checkpoint_wrapper_fn: None, or PyTorch's `checkpoint_wrapper`, also as a `functools.partial`, of which `context_fn` of
            `create_selective_checkpoint_contexts` counts.
        check_fn: whether to recompute a module.
        auto_wrap_policy: called as FSDP does, with `module`, `recurse` and `nonwrapped_numel`; in place of `check_fn`.
        policy_fn: the values to save inside of them: `policy(context, op, *args, **kwargs)` as of PyTorch's selective
            checkpointing, or a list of ops; see `policy_plan` for the peak that this leads to.

    Returns:
        A handle that ends it; also a context manager.

    Raises:
        ArgumentError: the model is not a module.
        ConfigError: no module was chosen; or two policies are given.
        NotYetError: an unsupported wrapper, such as `offload_wrapper`.
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
    paths = sorted(_chosen(model, "", policy)[0])
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
    """Ask a policy, children first; return the outermost modules that it chooses, and their numbers of parameters."""
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
        if is_called(module):
            return [path], numel
    return paths, chosen_numel


def _context_fn_of(wrapper: Callable[..., nn.Module] | None) -> Callable[[], Contexts] | None:
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
