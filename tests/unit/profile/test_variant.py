"""What a compiled unit takes is checked, and survives a file."""

from dataclasses import replace

import pytest

from recollect.errors import ProfileFormatError
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord

_DEFAULT = VariantRecord((1,), (0,), 4096, 8192, ((512, -512, 0), (64, 0, -1)), 1e-3, is_default=True)


def _graph(*variants: VariantRecord) -> UnitGraph:
    values = ValueRecord("input", 4096, None), ValueRecord("up.mm", 4096, 0, saved=True)
    return UnitGraph(values, (OpRecord("up.mm", (0,), (1,), 1e-4),), variants=variants, eager_s=2e-3)


def test_variants_survive_a_file() -> None:
    graph = _graph(_DEFAULT, replace(_DEFAULT, kept=(), is_default=False, is_estimated=True))
    profile = Profile((graph,), (UnitCall("layers.0", 0),), StepLog(), 1.0)
    assert Profile.from_json(profile.to_json()) == profile


def test_a_bad_variant_in_a_file_says_where() -> None:
    text = Profile((_graph(_DEFAULT),), (UnitCall("layers.0", 0),), StepLog(), 1.0).to_json()
    with pytest.raises(ProfileFormatError, match=r"graphs\[0\]\.variants\[0\]: variant: lets go of value 7"):
        Profile.from_json(text.replace("[512,-512,0]", "[512,-512,7]"))


def test_a_variant_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match="-1 bytes in backward"):
        replace(_DEFAULT, backward=((-1, 0, -1),))
    with pytest.raises(ValueError, match="lets go of value 7, which it does not hold"):
        replace(_DEFAULT, backward=((1, 0, 7),))
    with pytest.raises(ValueError, match="got nan s"):
        replace(_DEFAULT, step_s=float("nan"))


def test_a_graph_checks_its_variants() -> None:
    with pytest.raises(ValueError, match="variant 0: value 9, expected 0 to 1"):
        _graph(replace(_DEFAULT, kept=(9,)))
    with pytest.raises(ValueError, match="PyTorch's own choice first"):
        _graph(_DEFAULT, _DEFAULT)
