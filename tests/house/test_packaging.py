"""What an index shows of the package is true of this tree."""

from __future__ import annotations

import re
from pathlib import Path

import recollect

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_version_is_the_first_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE) == versions[:1] == [recollect.__version__]


def test_pythons_begin_with_the_least_one_that_installs() -> None:
    (least,) = re.findall(r'^requires-python = ">=(.*)"', PROJECT, re.MULTILINE)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert named[0] == least and named == sorted(named, key=lambda one: int(one[2:]))
