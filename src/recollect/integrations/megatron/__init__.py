"""Turn Megatron's recompute settings into plans.

The names in `__init__.pyi` are imported on first use; none of them needs PyTorch.
"""

from recollect.lazy_names import lazy_names

_HOME_OF_NAME, __getattr__, __dir__ = lazy_names(__name__)
__all__ = sorted(_HOME_OF_NAME)  # noqa: PLE0605 - a list of texts all the same
