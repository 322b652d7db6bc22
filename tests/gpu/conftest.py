"""Which device the tests of this folder run on, and the state of PyTorch that they find.

`RECOLLECT_TEST_DEVICE=cpu` runs here what exists on the CPU too, at tiny sizes, so that a mistake in a test does not have to
wait for a GPU to be found.
"""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Read once, when CUDA starts; without it, deterministic mode refuses to multiply matrices.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Versions of other machines may warn while they are imported, where the marks below do not apply yet.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # noqa: F401

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # What is deprecated there, with other versions of everything, is not what these tests are about.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    asked = os.environ.get("RECOLLECT_TEST_DEVICE", "cuda" if torch.cuda.is_available() else "")
    if not asked:
        pytest.skip("needs a CUDA device; RECOLLECT_TEST_DEVICE=cpu runs what a CPU can")
    return torch.device("cuda", torch.cuda.current_device()) if asked == "cuda" else torch.device(asked)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip(f"is about CUDA, and the tests run on {device}")
    return device


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    """Kernels that repeat themselves to the bit, where PyTorch has them; an error where it has none."""
    module: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        module.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=False)
    module.fill_uninitialized_memory = False  # It would hide reads of what a kernel has not written.
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    module.fill_uninitialized_memory = before[2]


@pytest.fixture(params=["deterministic", "default"])
def kernels(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param == "default" and device.type == "cpu":
        pytest.skip("the kernels of a CPU are all deterministic")
    torch.use_deterministic_algorithms(request.param == "deterministic")
    return str(request.param)
