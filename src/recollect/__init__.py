"""Fits PyTorch training into the memory you have, at the least slowdown possible, and proves it.

The names in `__init__.pyi` are the public API. They are imported on first use: `import recollect` is quick, and the planner
works without PyTorch.
"""

from recollect.lazy_names import lazy_names

__version__ = "0.1.0"

_HOME_OF_NAME, __getattr__, __dir__ = lazy_names(__name__)
__all__ = sorted(_HOME_OF_NAME)  # noqa: PLE0605 - a list of texts all the same
