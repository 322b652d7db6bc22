"""Plans as values: equality, JSON that people edit, and how they print."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from recollect.errors import PlanError, PlanFormatError
from recollect.plans.action import Action
from recollect.plans.paths import compress_classes, compress_paths, expand_paths
from recollect.plans.plan import Plan
from recollect.plans.text import summarise_names, wrap
from recollect.plans.unit_plan import UnitPlan, digest_of, needs_all_ranks

KEPT = ("q_proj", "k_proj", "v_proj", "scaled", "o_proj", "gate_proj", "rsqrt")
NAMES = """
    input_layernorm.pow input_layernorm.mean input_layernorm.add input_layernorm.rsqrt input_layernorm.mul
    input_layernorm.mul#1 self_attn.q_proj.mm self_attn.k_proj.mm self_attn.v_proj.mm self_attn.neg self_attn.cat
    self_attn.mul self_attn.mul#1 self_attn.add self_attn.neg#1 self_attn.cat#1 self_attn.add#1
    self_attn._scaled_dot_product_flash_attention_for_cpu self_attn._scaled_dot_product_flash_attention_for_cpu.1
    self_attn.o_proj.mm add post_attention_layernorm.pow post_attention_layernorm.mean post_attention_layernorm.rsqrt
    post_attention_layernorm.mul mlp.gate_proj.mm mlp.act_fn.silu mlp.up_proj.mm mlp.mul mlp.down_proj.mm add#1
""".split()
LEAN = UnitPlan({name: "keep" if any(part in name for part in KEPT) else "recompute" for name in NAMES})
FAT = UnitPlan(dict.fromkeys(NAMES, "keep"))
FULL = UnitPlan(dict.fromkeys(NAMES, "recompute"), output="recompute")


def llama_plan() -> Plan:
    units = {f"model.layers.{i}": LEAN if i < 23 else FAT for i in range(32)}
    return Plan(
        units,
        budget_bytes=16 * 2**30,
        predicted_peak_bytes=int(15.6 * 2**30),
        predicted_slowdown=0.0312,
        bound_slowdown=0.0287,
    )


def test_prints_what_each_group_of_layers_keeps() -> None:
    assert str(llama_plan()).splitlines() == [
        "model.layers.0-22   keep       input_layernorm.rsqrt q_proj k_proj v_proj",
        "                               self_attn.sdpa o_proj",
        "                               post_attention_layernorm.rsqrt gate_proj",
        "                    recompute  all else",
        "model.layers.23-31  keep all",
        "all others          keep all",
        "predicted peak 15.6 GiB, budget 16.0 GiB",
        "predicted slowdown 3.1 %, no plan can be below 2.9 % by the profile's times",
    ]
    assert repr(llama_plan()) == str(llama_plan())


@pytest.mark.parametrize(("error", "text"), [(0.01, "3.1 % (2.1 to 4.1)\n"), (0.05, "3.1 % (0.0 to 8.1)\n")])
def test_prints_how_sure_the_slowdown_is(error: float, text: str) -> None:
    plan = dataclasses.replace(llama_plan(), slowdown_error=error)
    assert f"predicted slowdown {text}" in str(plan).replace(", no plan", "\n")
    assert Plan.from_json(plan.to_json()) == plan
    assert "error" not in llama_plan().to_json() and llama_plan().slowdown_range is None


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (UnitPlan({}), "keep all"),
        (UnitPlan({"mm": "recompute"}), "recompute all"),
        (UnitPlan({}, output="recompute"), "recompute the output"),
        (UnitPlan({"mm": "keep"}, output="recompute"), "keep all but the output"),
    ],
)
def test_prints_simple_units_in_words(unit: UnitPlan, text: str) -> None:
    assert str(Plan({"block": unit})).splitlines()[0] == f"block       {text}"


def test_plan_without_units_prints_that_all_is_kept() -> None:
    assert str(Plan({})) == "all units  keep all"


def test_long_lists_are_cut_and_say_so() -> None:
    experts = {f"mlp.experts.{i}.w{j}.mm": "keep" if (i + j) % 3 else "recompute" for i in range(64) for j in range(3)}
    scan = {f"scan.op{i}": "keep" if i % 3 else "recompute" for i in range(400)}
    for actions in (experts, scan):
        lines = str(Plan({"layers.0": UnitPlan(actions)})).splitlines()  # type: ignore[arg-type]
        assert len(lines) <= 9
        assert max(map(len, lines)) <= 80
    assert "scan.{op1,op2,op4,op5,op7,op8,+260}" in "\n".join(lines)


SEQUENTIAL = compress_classes(
    {"0": "Conv2d", "1": "BatchNorm2d", "2": "ReLU", "3": "Dropout", "4": "Conv2d", "6": "Conv2d"}
)


def test_modules_of_a_sequential_are_named_by_class() -> None:
    names = [
        "0.convolution",
        "1.native_batch_norm.0",
        "1.add_",
        "2.relu",
        "3.mul",
        "4.convolution",
        "6.convolution",
        "7.mm",
    ]
    dropped = {"0.convolution", "2.relu", "4.convolution", "1.native_batch_norm.0"}
    unit = UnitPlan({name: "recompute" if name in dropped else "keep" for name in names})
    lines = [
        "the model   keep       1.add_ (BatchNorm2d) 3 (Dropout) 6 (Conv2d) 7",
        "            recompute  all else",
    ]
    plan = Plan({"": unit}, class_names=SEQUENTIAL)
    assert str(plan).splitlines()[:2] == lines
    assert str(Plan.from_json(plan.to_json())) == str(plan)
    # In the file, names are what they are, and classes stand apart.
    document = json.loads(plan.to_json())
    assert list(document["units"][0]["values"]) == names
    assert document["class_names"] == {
        "1": "BatchNorm2d",
        "0": "Conv2d",
        "4": "Conv2d",
        "6": "Conv2d",
        "3": "Dropout",
        "2": "ReLU",
    }
    assert "class_names" not in llama_plan().to_json()
    assert plan.diff(Plan({"": UnitPlan(dict.fromkeys(names, "keep"))})).splitlines()[0] == (
        "the model  recompute -> keep  {0,4} (Conv2d) 1.native_batch_norm (BatchNorm2d)"
    )


def test_memory_that_an_op_fills_is_not_shown() -> None:
    names = {
        "attn.mul": "keep",
        "attn.empty_like": "recompute",
        "attn.bernoulli_": "recompute",
        "drop.empty": "recompute",
    }
    assert summarise_names(names) == {"keep": ["attn.mul"], "recompute": ["attn.bernoulli_"]}
    # Where nothing else is treated so, it is.
    assert summarise_names({"mul": 1, "empty": 2}) == {1: ["mul"], 2: ["empty"]}


def test_a_name_longer_than_a_line_ends_it_between_its_parts_and_hidden_names_are_counted() -> None:
    gather = "self_attention.query._c10d_functional:all_gather_into_tensor"
    assert wrap(f"short {gather}", 40) == ["short self_attention.query.", "_c10d_functional:", "all_gather_into_tensor"]
    plan = Plan({"layers.0": UnitPlan({f"m{i}.mm": "keep" if i % 3 else "recompute" for i in range(300)})})
    lines = [line.removeprefix("            recompute").split() for line in str(plan).splitlines()[1:6]]
    assert len([name for line in lines[:4] for name in line]) + int(lines[4][1]) == 100 and lines[4][2] == "more"


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_asked_for(columns: int) -> None:
    ops = ("safe_softmax", "bernoulli_", "scaled_dot_product_attention_math", "native_layer_norm", "masked_fill")
    actions = {f"self_attention.{op}": "recompute" for op in ops} | {"self_attention.mul": "keep"}
    actions |= {f"{'mixer' * 20}.{op}": "keep" for op in ops} | {f"{'mixer' * 20}.add": "recompute"}
    units = {f"transformer.h.blocks_of_layers.{i * i}": UnitPlan(actions) for i in range(9)}  # type: ignore[arg-type]
    plan = dataclasses.replace(llama_plan(), units=units, slowdown_error=0.01, host_wait_slowdown=0.001)
    plan = plan.with_note(
        "counts no optimizer: fit got none; made for the model in eval mode, in which dropout holds less"
    )
    lines = plan.to_text(columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[-1].startswith("    " if columns == 80 else "counts")


def test_diff_names_what_changes() -> None:
    changed = {f"model.layers.{i}": FULL if i < 2 else LEAN for i in range(23)}
    changed |= {f"model.layers.{i}": FAT for i in range(23, 32)}
    changed["model.layers.0"] = UnitPlan({}, engine="compile")
    new = Plan(changed, budget_bytes=2**30, predicted_peak_bytes=int(15.6 * 2**30), predicted_slowdown=0.05)
    assert llama_plan().diff(new).splitlines() == [
        "model.layers.0  recompute -> keep  input_layernorm.{pow,mean,add,mul}",
        "                                   self_attn.{neg,cat,mul,add} add",
        "                                   post_attention_layernorm.{pow,mean,mul}",
        "                                   act_fn up_proj mlp.mul down_proj",
        "                engine: tape -> compile",
        "model.layers.1  keep -> recompute  input_layernorm.rsqrt q_proj k_proj v_proj",
        "                                   self_attn.sdpa o_proj",
        "                                   post_attention_layernorm.rsqrt gate_proj",
        "                output: keep -> recompute",
        "budget 16.0 GiB -> 1.0 GiB",
        "predicted slowdown 3.1 % -> 5.0 %",
    ]
    assert llama_plan().diff(llama_plan()) == "no difference"


def test_every_number_of_a_plan_is_in_its_file(tmp_path: Path) -> None:
    plan = dataclasses.replace(
        llama_plan(),
        note="tried",
        torch_version="2.9.0",
        device_name="H100",
        loss_chunks=4,
        host_budget_bytes=2**30,
        predicted_host_bytes=2**29,
        to_host_bytes_per_s=25e9,
        from_host_bytes_per_s=26e9,
        host_wait_slowdown=0.001,
        slowdown_error=0.02,
        class_names=(("model.layers.0-31.mlp.0", "Linear"),),
    )
    data = [field for field in dataclasses.fields(plan) if field.compare]
    assert all(getattr(plan, field.name) != field.default for field in data)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan == Plan.from_json(plan.to_json())
    assert repr(Plan.load(tmp_path / "plan.json")) == repr(plan)


def test_json_is_made_for_editing() -> None:
    document = json.loads(llama_plan().to_json())
    assert [unit["paths"] for unit in document["units"]] == [["model.layers.0-22"], ["model.layers.23-31"]]
    assert list(document["units"][0]["values"]) == NAMES
    document["units"][0]["values"]["mlp.mul"] = "keep"
    edited = Plan.from_json(json.dumps(document))
    assert edited.units["model.layers.7"].actions["mlp.mul"] == "keep"


def test_json_of_a_module_that_is_called_like_a_range() -> None:
    plan = Plan({"blocks.0-3": LEAN, "blocks.0": LEAN, "blocks.1": LEAN})
    assert set(Plan.from_json(plan.to_json()).units) == {"blocks.0-3", "blocks.0", "blocks.1"}


def test_is_a_value() -> None:
    plan = llama_plan()
    assert copy.deepcopy(plan) == plan == pickle.loads(pickle.dumps(plan))
    assert hash(plan) == hash(copy.deepcopy(plan))
    assert plan != Plan({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.note = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.units["x"] = LEAN  # type: ignore[index]
    with pytest.raises(TypeError):
        LEAN.actions["add"] = "keep"  # type: ignore[index]
    assert plan.with_note("tried").note == "tried"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"actions": {"up.mm": "save"}}, "value 'up.mm': got 'save', expected 'keep' or 'recompute'"),
        ({"actions": {}, "output": "drop"}, "output: got 'drop', expected 'keep' or 'recompute'"),
        ({"actions": {}, "engine": "region"}, "engine: got 'region', expected 'tape' or 'graph' or 'compile'"),
    ],
)
def test_unit_messages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        UnitPlan(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": {"0": {"up": "keep"}}}, "unit '0': got a dict, expected a recollect.UnitPlan"),
        ({"budget_bytes": -1}, "budget_bytes: got -1, expected 0 or more"),
        ({"predicted_slowdown": float("nan")}, "predicted_slowdown: got nan, expected a finite number, -1 or more"),
        ({"bound_slowdown": -0.1}, "bound_slowdown: got -0.1"),
    ],
)
def test_plan_messages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**{"units": {}, **arguments})


def document(**changes: Any) -> dict[str, Any]:
    unit = {"paths": ["layers.0-1"], "engine": "tape", "output": "keep", "values": {"mm": "keep"}}
    return {"format": "recollect.plan", "version": 1, "units": [unit], **changes}


def unit(**changes: Any) -> dict[str, Any]:
    return document(units=[{"paths": ["layers.0"], "values": {}, **changes}])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (document(version="1"), 'version: got "1", expected an integer, 1 or more'),
        (document(version=True), "version: got true, expected an integer"),
        ([], r"document: got \[\], expected an object"),
        ({"format": "recollect.plan", "version": 1}, "document: the key 'units' is missing"),
        (document(extra=1), "extra: unknown key, expected one of format, version, units"),
        (document(source=1), "source: unknown key, expected one of format, version, units"),
        (document(units={}), "units: got {}, expected an array"),
        (document(budget_bytes="16GiB"), 'budget_bytes: got "16GiB", expected an integer, 0 or more'),
        (document(predicted_slowdown="3 %"), 'predicted_slowdown: got "3 %", expected a finite number'),
        (document(predicted_slowdown=-2), "predicted_slowdown: got -2.0, expected a finite number, -1 or more"),
        (document(note=3), "note: got 3, expected a string"),
        (document(class_names={"0": 3}), r"class_names\.0: got 3, expected a string"),
        (document(class_names={"a.0-1.b.0-1": "ReLU"}), "class_names: 'a.0-1.b.0-1': two ranges in one path"),
        (unit(values={"up.mm": "save"}), r'units\[0\]\.values\.up\.mm: got "save", expected "keep" or "recompute"'),
        (unit(values=["up.mm"]), r'units\[0\]\.values: got \["up.mm"\], expected an object'),
        (unit(output="drop"), r'units\[0\]\.output: got "drop", expected "keep" or "recompute"'),
        (unit(engine="region"), r'units\[0\]\.engine: got "region", expected "tape" or "graph" or "compile"'),
        (unit(engine=None, value={}), r"units\[0\]\.value: unknown key, expected one of paths, exact_paths"),
        (unit(paths=["layers.3-1"]), r"units\[0\]\.paths\[0\]: the range 3-1 does not count up"),
        (unit(paths=["a.0-1.b.0-1"]), r"units\[0\]\.paths\[0\]: two ranges in one path"),
        (unit(paths=["layers.0-999999"]), r"units\[0\]\.paths\[0\]: the range 0-999999 is longer than 100000"),
        (unit(paths=[7]), r"units\[0\]\.paths\[0\]: got 7, expected a string"),
        (
            document(units=[{"paths": ["layers.0-3"], "values": {}}, {"paths": ["layers.2"], "values": {}}]),
            r"units\[1\]\.paths\[0\]: the unit 'layers\.2' appears twice",
        ),
    ],
)
def test_malformed_documents_say_where(bad: object, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(json.dumps(bad))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format":', "line 1, column 11: not JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' appears twice in one object"),
        ('{"predicted_slowdown": NaN}', "got NaN, expected a finite number"),
        ("[" * 100_000, "not a recollect.plan document|not JSON"),
    ],
)
def test_text_that_is_no_document(text: str, message: str) -> None:
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("paths", "short"),
    [
        ([], []),
        (["a", "b"], ["a", "b"]),
        (["h.0", "h.1", "h.3"], ["h.0-1", "h.3"]),
        (["h.9", "h.10", "h.11"], ["h.9-11"]),
        (["h.1", "h.0"], ["h.1", "h.0"]),
        (["h.00", "h.01"], ["h.00", "h.01"]),
        (["h.0.a", "h.1.a", "h.1.b"], ["h.0-1.a", "h.1.b"]),
        (["h.0.0", "h.0.1", "h.1.1"], ["h.0.0-1", "h.1.1"]),
        (["0", "1"], ["0-1"]),
    ],
)
def test_paths_in_short(paths: list[str], short: list[str]) -> None:
    assert compress_paths(paths) == short
    assert [path for pattern in short for path in expand_paths(pattern)] == paths


# Units of a plan.


LAYER = UnitPlan({"up.mm": "keep", "act.gelu": "recompute"})
GATHERS = "up._c10d_functional:all_gather_into_tensor"


@pytest.mark.parametrize(
    "other",
    [
        UnitPlan({"up.mm": "keep", "act.gelu": "keep"}),
        UnitPlan({"up.mm": "keep", "act.gelu": "shard"}),
        UnitPlan({"up.mm": "keep", "act.gelu": "recompute"}, output="recompute"),
        UnitPlan({}, engine="compile"),
    ],
    ids=["value", "part", "output", "engine"],
)
def test_plans_that_do_something_else_are_not_the_same(other: UnitPlan) -> None:
    assert digest_of({"layers.0": LAYER}) != digest_of({"layers.0": other})
    assert digest_of({"layers.0": LAYER}) == digest_of(
        {"layers.0": UnitPlan({"act.gelu": "recompute", "up.mm": "keep"})}
    )


def test_the_same_units_with_another_number_of_chunks_are_not_the_same_plan() -> None:
    assert digest_of({"layers.0": LAYER}, 4) != digest_of({"layers.0": LAYER}, 1) == digest_of({"layers.0": LAYER})


@pytest.mark.parametrize(
    ("actions", "is_needed"),
    [
        ({"up.mm": "recompute", GATHERS: "keep"}, False),
        ({GATHERS: "recompute"}, True),
        ({"up.mm": "shard"}, True),
    ],
    ids=["alone", "collective", "part"],
)
def test_a_rank_needs_the_others_to_repeat_a_collective_and_to_gather_parts(
    actions: dict[str, str], is_needed: bool
) -> None:
    assert needs_all_ranks({"layers.0": LAYER, "layers.1": UnitPlan(actions)}) == is_needed


@pytest.mark.parametrize("action", Action)
def test_prints_and_writes_its_word(action: Action) -> None:
    word = action.value
    assert action == word and hash(action) == hash(word)
    assert (str(action), f"{action}", f"{action:>10}", "%s" % action) == (word, word, f"{word:>10}", word)  # noqa: UP031
    assert json.loads(json.dumps({word: action})) == {word: word}


@pytest.mark.parametrize("action", Action)
def test_stays_itself_when_copied(action: Action) -> None:
    assert pickle.loads(pickle.dumps(action)) is copy.deepcopy(action) is Action(action) is action


def test_plans_take_words_and_hold_actions() -> None:
    by_word = UnitPlan({"mm": "recompute", "add": "keep"}, output="recompute")
    by_action = UnitPlan({"mm": Action.RECOMPUTE, "add": Action.KEEP}, output=Action.RECOMPUTE)
    for unit in (by_word, by_action, Plan.from_json(Plan({"a": by_word}).to_json()).units["a"]):
        assert unit == by_action and hash(unit) == hash(by_action)
        assert {type(action) for action in (*unit.actions.values(), unit.output)} == {Action}


def test_json_has_words() -> None:
    document = json.loads(Plan({"a": UnitPlan({"mm": Action.RECOMPUTE})}).to_json())
    assert document["units"] == [{"paths": ["a"], "engine": "tape", "output": "keep", "values": {"mm": "recompute"}}]
