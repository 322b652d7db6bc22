"""The packages that only parts of recollect need, and the extra of recollect that installs each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from recollect.errors import MissingPackageError

_PACKAGES: Final = {
    "plot": ("matplotlib", "plotly"),
    "train": ("tensorboard", "tokenizers"),
    "benchmarks": ("pulp",),
    "hf": ("safetensors", "transformers"),
    "trainers": (
        "accelerate",
        "bitsandbytes",
        "deepspeed",
        "diffusers",
        "lightning",
        "peft",
        "torchao",
        "torchtitan",
        "trl",
    ),
    "docs": ("mkdocs-material", "mkdocstrings"),
}
EXTRA_OF_PACKAGE: Final = {package: extra for extra, packages in _PACKAGES.items() for package in packages}
"""As in pyproject.toml, which names a package once, next to the extras that include it."""


@contextmanager
def needed(package: str, by: str) -> Iterator[None]:
    """Say which extra brings a package if an import in the block fails."""
    try:
        yield
    except ImportError as problem:
        state = "is not installed" if isinstance(problem, ModuleNotFoundError) else "cannot be imported"
        raise MissingPackageError(
            f"{by} needs the package `{package}`, which {state} ({problem}). "
            f"Run: pip install 'recollect[{EXTRA_OF_PACKAGE[package]}]'"
        ) from problem
