"""How the help shows flags that may be left out: `--num-layers INT`, not `{None}|INT`; "None" is still understood."""

from __future__ import annotations

import types
from functools import reduce
from operator import or_
from typing import Any, Union, get_args

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

__all__ = ["REGISTRY"]

REGISTRY = ConstructorRegistry()
_NONE = "None"


@REGISTRY.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """Return how to read and show a type or None."""
    kinds = get_args(info.type)
    if info.type_origin not in (Union, types.UnionType) or types.NoneType not in kinds:
        return None
    rest = reduce(or_, (kind for kind in kinds if kind is not types.NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(rest, info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return PrimitiveConstructorSpec(
        nargs=spec.nargs,
        metavar=spec.metavar,
        instance_from_str=lambda words: None if words == [_NONE] else spec.instance_from_str(words),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [_NONE] if value is None else spec.str_from_instance(value),
        choices=None if spec.choices is None else (*spec.choices, _NONE),
    )
