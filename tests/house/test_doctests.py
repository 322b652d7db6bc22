"""The examples in docstrings are right."""

import doctest
import importlib
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)


def test_examples() -> None:
    results = {name: doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS) for name in MODULES}
    assert {name: result for name, result in results.items() if result.failed} == {}
    assert results["recollect.quantities"].attempted > 0
