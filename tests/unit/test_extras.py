"""Missing packages of extras are named with the command that installs them."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recollect.errors import MissingPackageError
from recollect.extras import EXTRA_OF_PACKAGE, needed

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def extras() -> Iterator[tuple[str, str]]:
    """Packages of the extras in pyproject.toml, with their extra; those for work on recollect itself left out."""
    # Python 3.10 has no parser of TOML.
    section = (
        PYPROJECT.read_text(encoding="utf-8").partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    )
    for extra, packages in re.findall(r"(?ms)^(\w+) = \[(.*?)\](?: #[^\n]*)?$", section):
        for package in re.findall(r'"([\w-]+)', packages):
            if extra not in ("dev", "test") and package != "recollect":
                yield package, extra


def test_every_package_of_an_extra_is_in_the_table() -> None:
    found = dict(extras())
    assert len(found) > 10
    assert found == EXTRA_OF_PACKAGE


def test_broken_package_is_told_from_a_missing_one() -> None:
    with pytest.raises(MissingPackageError, match=r"`trl`, which cannot be imported \(half of it\)\. Run: pip install"):
        with needed("trl", by="a test"):
            raise ImportError("half of it")


@pytest.mark.parametrize(
    ("home", "name", "package"),
    [
        ("recollect.integrations.transformers", "", "transformers"),
        ("recollect.integrations.torchtitan", "", "torchtitan"),
        ("recollect.lab.models.hugging_face", "", "safetensors"),
        ("recollect.integrations.lightning", "MemoryBudget", "lightning"),
        ("recollect.integrations.deepspeed.engine", "initialize", "deepspeed"),
    ],
)
def test_integrations_name_the_extra(home: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = [package, *(("lightning.pytorch", "pytorch_lightning") if package == "lightning" else ())]
    for other in absent:
        monkeypatch.setitem(sys.modules, other, None)
    monkeypatch.delitem(sys.modules, home, raising=False)
    extra = EXTRA_OF_PACKAGE[package]
    said = rf"needs the package `{package}`, which is not installed \(.+\)\. Run: pip install 'recollect\[{extra}\]'"
    with pytest.raises(MissingPackageError, match=said):
        getattr(importlib.import_module(home), name)()
