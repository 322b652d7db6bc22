"""Profiles as data: what the constructors refuse, and the JSON round trip; events, blocks of memory, compiled variants."""

import copy
import gzip
import json
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recollect.errors import ProfileFormatError
from recollect.profile.events import ALLOC, DIES, FREE, OP, PHASE, RELEASE, RETURN, SAVE, USE, WORK, StepLog
from recollect.profile.graph import OpRecord, PartRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile, block_bytes
from recollect.profile.variant import VariantRecord
from toy_profile import layer, stack

LEAF = ValueRecord("x", 8, producer=None)
LOG = StepLog(
    (
        *((ALLOC, 0, 8), (OP, 1, 0), (SAVE, 1, 1, 0, 1), (FREE, 0)),
        *((PHASE, 1), (USE, 0), (WORK, 4)) * 2,
        (RELEASE, 0),
    )
)


def with_origin(*origin: int) -> tuple[UnitCall, ...]:
    return (UnitCall("a", 1), UnitCall("b", 1, origins=(origin,)))  # type: ignore[arg-type]


def profile() -> Profile:
    flags: dict[str, Any] = {"must_keep": True, "saved": True, "is_output": True, "mutated_later": True}
    graph = UnitGraph(
        (LEAF, ValueRecord("op", 4, producer=0, **flags)), (OpRecord("op", (0,), (1,), 1e-5, mutates=True),)
    )
    plain = stack(2, graph=graph)
    calls = (*plain.calls[:2], replace(plain.calls[2], origins=((0, 1, 1),), outside=((1, 5),)), *plain.calls[3:])
    return replace(
        plain,
        calls=calls,
        log=LOG,
        fake=True,
        device="cuda:0",
        device_name="H100",
        calibration_bytes=-12,
        device_memory_bytes=80 * 2**30,
    )


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
        ([LEAF], [OpRecord("o", (0,), (), 0.0, state_bytes=-1)], "got -1 state_bytes, expected 0 or more"),
        ([LEAF], [OpRecord("o", (0,), (), 0.0, working_bytes=-2)], "got -2 working_bytes, expected 0 or more"),
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


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (PartRecord(0, 4, 0.1), "part of value 0: expected a value that an op of the unit computes"),
        (PartRecord(1, -4, 0.1), "part of value 1: got -4 bytes"),
        (PartRecord(1, 4, math.nan), "part of value 1: got 4 bytes and nan s"),
    ],
)
def test_a_part_of_nothing_is_refused(part: PartRecord, message: str) -> None:
    values = (ValueRecord("x", 8, producer=None), ValueRecord("h", 8, producer=0))
    with pytest.raises(ValueError, match=message):
        UnitGraph(values, (OpRecord("h", (0,), (1,), 1.0),), parts=(part,))


def test_leaves_may_share_a_name() -> None:
    UnitGraph((LEAF, LEAF), ())


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ((), r"event 0: got \(\), expected one or more ints"),
        ((1, 2.0), r"event 0: got \(1, 2\.0\)"),
        ((1, True), "event 0"),
    ],
)
def test_log_messages(event: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepLog((event,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_s": float("inf")}, "step_s: got inf, expected a finite number of seconds, 0 or more"),
        ({"class_names": (("3-1", "ReLU"),)}, "class_names: '3-1': the range 3-1 does not count up"),
        ({"host_latency_s": -1.0}, r"host_latency_s: got -1\.0, expected a finite number of seconds, 0 or more"),
        (
            {"to_host_bytes_per_s": -1.0},
            r"to_host_bytes_per_s: got -1\.0, expected a finite number of bytes per second, 0 or",
        ),
        (
            {"from_host_bytes_per_s": float("nan")},
            "from_host_bytes_per_s: got nan, expected a finite number of bytes per sec",
        ),
        ({"persistent": {"parameters": -1}}, r"persistent\['parameters'\]: got -1 bytes"),
        ({"calls": (UnitCall("head", 9),)}, r"call 0 \('head'\): graph 9, expected 0 to 2"),
        ({"calls": with_origin(0, 7, 0)}, r"call 1 \('b'\): origin \(0, 7, 0\) is of call 7, expected 0 to 1"),
        ({"calls": with_origin(0, 0, 99)}, r"origin \(0, 0, 99\) is of a value that is not there"),
    ],
)
def test_profile_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(stack(2), **changes)


_DEFAULT = VariantRecord((1,), (0,), 4096, 8192, ((512, -512, 0), (64, 0, -1)), 1e-3, is_default=True)


def _graph(*variants: VariantRecord) -> UnitGraph:
    values = ValueRecord("input", 4096, None), ValueRecord("up.mm", 4096, 0, saved=True)
    return UnitGraph(values, (OpRecord("up.mm", (0,), (1,), 1e-4),), variants=variants, eager_s=2e-3)


def linked() -> Profile:
    return replace(profile(), to_host_bytes_per_s=2e9, from_host_bytes_per_s=3e9, host_latency_s=4e-6)


MADE = {
    "step": profile(),
    "link": linked(),
    "watching": stack(2, graph=replace(layer(), tape_s=1e-5, module_tape_s=(("norm", 2e-5), ("mlp.act", 3e-5)))),
    "variants": stack(1, graph=_graph(_DEFAULT, replace(_DEFAULT, kept=(), is_default=False, is_estimated=True))),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_is_a_value_that_files_keep(made: Profile, tmp_path: Path) -> None:
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))
    assert hash(copy.deepcopy(made)) == hash(made)
    for name in ("step.json", "step.json.gz"):
        made.save(tmp_path / name)
        assert Profile.load(tmp_path / name) == made
    with pytest.raises(TypeError):
        made.persistent["parameters"] = 0  # type: ignore[index]


def test_older_files_know_no_link_to_the_host() -> None:
    older = json.loads(linked().to_json())
    for name in ("to_host_bytes_per_s", "from_host_bytes_per_s", "host_latency_s"):
        del older[name]
    assert Profile.from_json(json.dumps(older)) == profile() != linked()


def test_compressed_files_of_equal_profiles_are_equal(tmp_path: Path) -> None:
    profile().save(tmp_path / "a.gz")
    profile().save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_repr_says_what_was_recorded() -> None:
    assert repr(stack(2)) == "Profile(Toy on cpu, batch 2 x 16, 4 unit calls, 3 distinct)"
    assert repr(profile()).startswith("Profile(Toy on fake,")
    held = StepLog(((ALLOC, 0, 1024), (PHASE, 0), (WORK, 0), (ALLOC, 1, 8)))
    assert repr(replace(stack(2), log=held)).endswith(", 1.0 KiB of the step before it)")


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(profile().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (edited(to_host_bytes_per_s="fast"), 'to_host_bytes_per_s: got "fast", expected a finite number'),
        (edited(step_s=None), "step_s: got null, expected a finite number"),
        (edited(fake="yes"), 'fake: got "yes", expected true or false'),
        (edited(persistent=[]), r"persistent: got \[\], expected an object"),
        (edited(calls=[{"path": "a"}]), r"calls\[0\]: the key 'graph' is missing"),
        (edited(log={"events": [[1, 2.5]]}), r"log\.events\[0\]: got \[1, 2\.5\], expected an array"),
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
            r"call 0 \('a'\): outside \(99, 2\) is of a value that is not there",
        ),
        (edited(log={"events": [[]]}), "log: event 0: got"),
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


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ((10,), r"got event 10, expected one of 0, 1, 2"),
        ((ALLOC, 1), "ALLOC with 1 operands, expected 2"),
        ((ALLOC, 1, -5), "ALLOC of -5 bytes, expected 0 or more"),
        ((WORK, -1), "WORK in -1 bytes, expected 0 or more"),
        ((FREE, 7), "FREE of storage 7, which is not alive"),
        ((OP, 9, 0), "OP of call 9, expected 0 to 3"),
        ((OP, 1, 5), "OP 5 of call 1, expected 0 to 0"),
        ((DIES, 1, 2), "DIES 2 of call 1, expected 0 to 1"),
        ((SAVE, 1, 1, 0, -1), "SAVE of call -1, expected 0 to 3"),
        ((USE, 3), "USE of handle 3, which is not saved"),
        ((RELEASE, 3), "RELEASE of handle 3, which is not saved"),
        ((RETURN, 4), "RETURN of call 4, expected 0 to 3"),
        ((PHASE, 3), "PHASE 3, expected 0 to 2"),
    ],
)
def test_events_that_cannot_be_played_back_say_where(event: tuple[int, ...], message: str) -> None:
    text = edited(log={"events": [[WORK, 8], list(event)]})
    with pytest.raises(ProfileFormatError, match=rf"^log\.events\[1\]: {message}"):
        Profile.from_json(text)


def number_places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a document has numbers, the first of each array."""
    if isinstance(data, dict):
        for key, item in data.items():
            yield from number_places(item, (*path, key))
    elif isinstance(data, list) and data:
        yield from number_places(data[0], (*path, 0))
    elif type(data) in (int, float):
        yield path


def with_number(path: tuple[Any, ...], number: float) -> str:
    document = json.loads(profile().to_json())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = number
    return json.dumps(document)


NUMBERS = list(number_places(json.loads(profile().to_json())))


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e400, -(10**9)])
def test_no_number_of_an_edited_file_may_be_impossible(path: tuple[Any, ...], number: float) -> None:
    """NaN, infinity and negative numbers, wherever they are put, are refused, by a message with a place or a name."""
    if path == ("calibration_bytes",) and number < 0:
        return  # The recorded step may need less than its simulation.
    with pytest.raises(ProfileFormatError, match=r"expected|does not list it"):
        Profile.from_json(with_number(path, number))


def test_all_numbers_are_edited_by_the_test_above() -> None:
    names = {path[-1] for path in NUMBERS if isinstance(path[-1], str)}
    assert names >= {"version", "step_s", "parameters", "calibration_bytes", "graph", "nbytes", "time_s"}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("step.json.gz", b"no gzip"),
        ("step.json.gz", gzip.compress(b"{}" * 100, mtime=0)[:-12]),
    ],
)
def test_file_that_is_no_profile_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ProfileFormatError, match=r"step\.json.*: not a profile: .* Record it again\."):
        Profile.load(tmp_path / name)


def test_an_event_is_handled_before_it_is_yielded() -> None:
    log = StepLog(((PHASE, 0), (ALLOC, 0, 8), (FREE, 0), (ALLOC, 0, 8), (FREE, 0)))
    alive: dict[int, int] = {}
    handlers = {ALLOC: alive.__setitem__, FREE: alive.pop}
    assert [(event, dict(alive)) for event in log.play(handlers)] == list(
        zip(log.events, ({}, {0: 8}, {}, {0: 8}, {}), strict=True)
    )


@pytest.mark.parametrize(
    ("nbytes", "on_cuda"),
    [
        (0, 0),
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (9 * 2**20, 9 * 2**20),
        (21 * 2**20 // 2, 21 * 2**20 // 2),
        (11 * 2**20, 12 * 2**20),
        (12 * 2**20 + 1, 12 * 2**20 + 512),
    ],
)
def test_cuda_hands_out_whole_blocks(nbytes: int, on_cuda: int) -> None:
    assert block_bytes(nbytes, "cuda") == block_bytes(nbytes, "cuda:1") == on_cuda
    assert block_bytes(nbytes, "cpu") == nbytes


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
