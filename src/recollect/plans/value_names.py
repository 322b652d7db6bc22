"""Names the values of a unit, for use in plans: by the module that computes them, the op, and which call of the op."""

_COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_dtensor", "c10d"})


def value_stem(module_path: str, op_name: str, count: int) -> str:
    """Name the `count`-th call (from 0) of an op in a module of the unit.

    Example:
        >>> value_stem("mlp.act_fn", "silu", 0), value_stem("", "add", 1)
        ('mlp.act_fn.silu', 'add#1')
    """
    stem = f"{module_path}.{op_name}" if module_path else op_name
    return f"{stem}#{count}" if count else stem


def result_names(stem: str, num_results: int | None) -> tuple[str, ...]:
    """Name the results of an op call: by the call only if it has one result or returns a list (None).

    Example:
        >>> result_names("mlp.router.topk", 2)
        ('mlp.router.topk.0', 'mlp.router.topk.1')
    """
    if num_results is None or num_results <= 1:
        return (stem,)
    return tuple(f"{stem}.{index}" for index in range(num_results))


def collective_kind(name: str) -> str:
    """Return the collective that an op, or the value it computes, belongs to; empty if none.

    Example:
        >>> collective_kind("attention.o._c10d_functional:all_reduce#1"), collective_kind("attention.o.mm")
        ('all_reduce', '')
    """
    op = name.removeprefix(f"{module_of(name)}.")
    namespace, mark, call = op.partition(":")
    return call.partition("#")[0].partition(".")[0] if mark and namespace in _COLLECTIVE_NAMESPACES else ""


def module_of(value_name: str) -> str:
    """Return the path within the unit of the module that computes a value; empty for the unit's own ops.

    Example:
        >>> module_of("mlp.down_proj.mm#1"), module_of("mlp.down_proj.topk.0"), module_of("add")
        ('mlp.down_proj', 'mlp.down_proj', '')
    """
    parts = value_name.split(".")
    if len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return ".".join(parts[:-1])


def op_of(value_name: str) -> tuple[str, str, int]:
    """Return the module and the op that compute a value, and which call of the op it is, from 0.

    Example:
        >>> op_of("mlp.down_proj.mm#1"), op_of("mlp.router.topk.0"), op_of("add")
        (('mlp.down_proj', 'mm', 1), ('mlp.router', 'topk', 0), ('', 'add', 0))
    """
    module_path = module_of(value_name)
    op_name, _, rest = value_name.removeprefix(f"{module_path}.").partition("#")
    return module_path, op_name.partition(".")[0], int(rest.partition(".")[0] or 0)
