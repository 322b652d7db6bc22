"""Profiles as data: what the constructors refuse, and the JSON round trip."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recollect.errors import ProfileFormatError
from recollect.profile.graph import OpRecord, Profile, StepLog, UnitCall, UnitGraph, ValueRecord
from toy_profile import layer, stack

LEAF = ValueRecord("x", 8, producer=None)
LOG = StepLog(blocks=(((1, 2), (3,)), ((4, -5, 6),)), sequence=((0, -1), (1, 0), (1, 1)))


def with_origin(*origin: int) -> tuple[UnitCall, ...]:
    return (UnitCall("a", 1), UnitCall("b", 1, origins=(origin,)))  # type: ignore[arg-type]


def profile() -> Profile:
    flags: dict[str, Any] = {"must_keep": True, "saved": True, "is_output": True, "mutated_later": True}
    graph = UnitGraph(
        (LEAF, ValueRecord("op", 4, producer=0, **flags)), (OpRecord("op", (0,), (1,), 1e-5, mutates=True),)
    )
    plain = stack(2, graph=graph)
    calls = (*plain.calls[:2], replace(plain.calls[2], origins=((0, 1, 1),), outside=((1, 5),)), *plain.calls[3:])
    return replace(plain, calls=calls, log=LOG, fake=True, device="cuda:0", device_name="H100", calibration_bytes=-12)


def test_sums() -> None:
    assert layer().saved_bytes == 900
    assert layer().forward_s == pytest.approx(0.43)
    assert stack(2).persistent_bytes == 1000
    assert stack(2).graph_of(stack(2).calls[1]) == layer()


@pytest.mark.parametrize(
    ("values", "ops", "message"),
    [
        ([ValueRecord("v", -1, producer=None)], [], r"value 0 \('v'\): got -1 bytes, expected 0 or more"),
        ([ValueRecord("v", 1, producer=3)], [], r"value 0 \('v'\): producer is op 3, expected 0 to -1"),
        ([ValueRecord("v", 1, producer=0)], [OpRecord("o", (), (), 0.0)], "op 0 is its producer but does not list it"),
        ([LEAF], [OpRecord("o", (0,), (0,), 0.0)], r"op 0 \('o'\): lists value 0 as an output, whose producer is None"),
        ([LEAF], [OpRecord("o", (1,), (), 0.0)], r"op 0 \('o'\): refers to value 1, expected 0 to 0"),
        ([LEAF], [OpRecord("o", (-1,), (), 0.0)], "refers to value -1"),
        ([LEAF], [OpRecord("o", (0,), (), float("nan"))], "got a time of nan s, expected a finite number, 0 or more"),
        ([LEAF], [OpRecord("o", (0,), (), -1.0)], r"got a time of -1\.0 s"),
        (
            [ValueRecord("v", 1, producer=0)],
            [OpRecord("o", (0,), (0,), 0.0)],
            "reads value 0 of op 0, expected ops in forward order",
        ),
        (
            [ValueRecord("v", 1, producer=0), ValueRecord("v", 1, producer=0)],
            [OpRecord("o", (), (0, 1), 0.0)],
            "value 1: the name 'v' is used twice",
        ),
    ],
)
def test_graph_messages(values: list[ValueRecord], ops: list[OpRecord], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UnitGraph(tuple(values), tuple(ops))


def test_leaves_may_share_a_name() -> None:
    UnitGraph((LEAF, LEAF), ())


@pytest.mark.parametrize(
    ("blocks", "sequence", "message"),
    [
        ((((),),), (), r"block 0, event 0: got \(\), expected one or more ints"),
        ((((1, 2.0),),), (), r"block 0, event 0: got \(1, 2\.0\)"),
        ((((1, True),),), (), "block 0, event 0"),
        ((), ((0, 0),), "sequence entry 0: block 0, expected 0 to -1"),
        ((((1,),),), ((0, -2),), "sequence entry 0: call -2, expected -1 or more"),
        ((((1,),),), ((0,),), r"sequence entry 0: got \(0,\), expected \(block index, call index or -1\)"),
    ],
)
def test_log_messages(blocks: Any, sequence: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepLog(blocks, sequence)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": float("inf")}, "step_s: got inf, expected a finite number of seconds, 0 or more"),
        ({"persistent": {"parameters": -1}}, r"persistent\['parameters'\]: got -1 bytes"),
        ({"calls": (UnitCall("head", 9),)}, r"call 0 \('head'\): graph 9, expected 0 to 2"),
        ({"calls": with_origin(0, 7, 0)}, r"call 1 \('b'\): origin \(0, 7, 0\) is of call 7, expected 0 to 1"),
        ({"calls": with_origin(0, 0, 99)}, r"origin \(0, 0, 99\) is of a value that is not there"),
        ({"log": StepLog((((1,),),), ((0, 99),))}, "log entry 0: call 99, expected -1 to 3"),
    ],
)
def test_profile_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(stack(2), **changes)


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_round_trip_through_files(name: str, tmp_path: Path) -> None:
    profile().save(tmp_path / name)
    assert Profile.load(tmp_path / name) == profile()


def test_compressed_files_of_equal_profiles_are_equal(tmp_path: Path) -> None:
    profile().save(tmp_path / "a.gz")
    profile().save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_is_a_value() -> None:
    assert copy.deepcopy(profile()) == profile() == pickle.loads(pickle.dumps(profile()))
    assert hash(profile()) == hash(copy.deepcopy(profile()))
    with pytest.raises(TypeError):
        profile().persistent["parameters"] = 0  # type: ignore[index]


def test_repr_says_what_was_recorded() -> None:
    assert repr(stack(2)) == "Profile(Toy on cpu, batch 2 x 16, 4 unit calls, 3 distinct)"
    assert repr(profile()).startswith("Profile(Toy on fake,")


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(profile().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        (edited(version=2), "version: got 2, but this recollect reads up to 1"),
        (edited(format="other"), "format: got \"other\", expected 'recollect.profile'"),
        (edited(step_s=-1.0), r"document: step_s: got -1\.0"),
        (edited(step_s=None), "step_s: got null, expected a finite number"),
        (edited(fake="yes"), 'fake: got "yes", expected true or false'),
        (edited(persistent={"parameters": -1}), "persistent.parameters: got -1, expected an integer, 0 or more"),
        (edited(persistent=[]), r"persistent: got \[\], expected an object"),
        (edited(calls=[{"path": "a"}]), r"calls\[0\]: the key 'graph' is missing"),
        (edited(calls=[{"path": "a", "graph": 7}]), "document: call 0 .* graph 7, expected 0 to 2"),
        (
            edited(log={"blocks": [[[1, 2.5]]], "sequence": []}),
            r"log\.blocks\[0\]\[0\]: got \[1, 2\.5\], expected an array",
        ),
        (
            edited(calls=[{"path": "a", "graph": 0, "origins": [[1, 2]]}]),
            r"calls\[0\]\.origins\[0\]: got \[1, 2\], expected \[value, call, value of that call\]",
        ),
        (
            edited(calls=[{"path": "a", "graph": 0, "outside": [[1, 2, 3]]}]),
            r"calls\[0\]\.outside\[0\]: got \[1, 2, 3\], expected \[value, storage\]",
        ),
        (
            edited(calls=[{"path": "a", "graph": 0, "outside": [[99, 2]]}]),
            r"document: call 0 \('a'\): outside \(99, 2\) is of a value that is not there",
        ),
        (edited(log={"blocks": [], "sequence": [[0, 0]]}), "log: sequence entry 0: block 0"),
        (
            edited(graphs=[{"values": [], "ops": [{"name": "o", "inputs": [0], "outputs": [], "time_s": 0}]}]),
            r"graphs\[0\]: op 0 \('o'\): refers to value 0",
        ),
        (
            edited(graphs=[{"values": [{"name": "v", "nbytes": "1KiB", "producer": None}], "ops": []}]),
            r'graphs\[0\]\.values\[0\]\.nbytes: got "1KiB", expected an integer, 0 or more',
        ),
    ],
)
def test_malformed_documents_say_where(text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=message):
        Profile.from_json(text)


def test_infinite_times_in_an_edited_file() -> None:
    with pytest.raises(ProfileFormatError, match="got Infinity, expected a finite number"):
        Profile.from_json(profile().to_json().replace('"time_s":1e-05', '"time_s":Infinity'))


@pytest.mark.parametrize(
    ("name", "data"),
    [("step.json", b"\xff\xff"), ("step.json.gz", b"no gzip"), ("step.json.gz", gzip.compress(b"{}" * 100)[:-12])],
)
def test_file_that_is_no_profile_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ProfileFormatError, match=r"step\.json.*: not a profile: .* Record it again\."):
        Profile.load(tmp_path / name)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "edited.json").write_text(edited(version=9))
    with pytest.raises(ProfileFormatError, match=r"edited\.json: version: got 9"):
        Profile.load(tmp_path / "edited.json")
