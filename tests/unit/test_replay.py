"""The loop that computes dropped values again, on strings in place of tensors: what runs, in which order, what is let go."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from recollect.replay import Node, Value

LONG = 10_000  # ten times Python's default recursion limit


class Text:
    """A tensor's stand-in: unlike `str` it can be referred to weakly, and be written to."""

    def __init__(self, text: str) -> None:
        self.text = text


class Log:
    """Makes nodes that write down their runs."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.overwrote: list[bool] = []

    def node(self, name: str, *inputs: Value) -> Node:
        """A node whose result is "name(first, second)"."""

        def call(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
            self.runs.append(name)
            assert not may_overwrite_first
            return (Text(f"{name}({', '.join(tensor.text for tensor in tensors)})"),)

        return Node(call, list(inputs))

    def value(self, name: str, *inputs: Value) -> Value:
        node = self.node(name, *inputs)
        return dropped(node)

    def write(self, name: str, *inputs: Value) -> Value:
        """The dropped result of an op that writes into its first argument, as the engine does it."""

        def call(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
            self.runs.append(name)
            self.overwrote.append(may_overwrite_first)
            target = tensors[0] if may_overwrite_first else Text(tensors[0].text)
            target.text = f"{name}({', '.join(tensor.text for tensor in tensors)})"
            return (target,)

        return dropped(Node(call, list(inputs), mutates=True))


def dropped(node: Node) -> Value:
    value = Value(node=node)
    node.add_output(value)
    return value


def held(text: str = "x") -> Value:
    return Value(tensor=Text(text))


@pytest.fixture(autouse=True)
def without_cycle_collector() -> Iterator[None]:
    """Reference counts alone must free everything."""
    gc.disable()
    yield
    gc.enable()


def test_value_that_is_there_is_returned_as_it_is() -> None:
    tensor = Text("x")
    assert Value(tensor=tensor).get() is tensor


def test_fetch_of_a_subclass_checks_what_get_returns() -> None:
    class Checked(Value):
        __slots__ = ()

        def fetch(self) -> Any:
            raise LookupError("changed")

    node = Log().node("f", Checked(tensor=Text("x")))
    for value in (Checked(tensor=Text("x")), dropped(node)):
        with pytest.raises(LookupError, match="changed"):
            value.get()


def test_arguments_run_first_in_the_order_of_the_arguments() -> None:
    log = Log()
    left = log.value("left", log.value("a", held()))
    right = log.value("right", log.value("b", held("y")))
    assert log.value("sum", left, right).get().text == "sum(left(a(x)), right(b(y)))"
    assert log.runs == ["a", "left", "b", "right", "sum"]


def test_only_what_is_needed_runs() -> None:
    log = Log()
    first = log.value("a", held())
    second = log.value("b", first)
    third = log.value("c", second)
    second.get()
    assert log.runs == ["a", "b"]
    assert third.tensor is None


def test_each_dropped_ancestor_runs_once() -> None:
    """A ladder of diamonds: 2^20 paths from the top to the bottom."""
    log = Log()
    value = held("")
    for level in range(20):
        below = log.value(f"{level}", value)
        node = Node(_join, [log.value(f"{level} left", below), log.value(f"{level} right", below)])
        value = dropped(node)
    value.get()
    assert len(log.runs) == len(set(log.runs)) == 60
    value.get()
    assert len(log.runs) == 60


def _join(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
    return (Text(""),)


def test_value_that_both_an_argument_and_its_user_need_runs_once() -> None:
    """The shared node is pending twice: by its user, and again by the user's other argument."""
    log = Log()
    shared = log.value("shared", held())
    user = log.value("user", shared, log.value("middle", shared))
    assert user.get().text == "user(shared(x), middle(shared(x)))"
    assert log.runs == ["shared", "middle", "user"]


def test_same_value_twice_among_the_arguments() -> None:
    log = Log()
    once = log.value("a", held())
    assert log.value("square", once, once).get().text == "square(a(x), a(x))"
    assert log.runs == ["a", "square"]


@pytest.mark.parametrize("start", ["end", "from the middle on"])
def test_long_chain_needs_no_recursion(start: str) -> None:
    log = Log()
    chain = [held("")]
    for index in range(LONG):
        node = Node(lambda tensors, _, at=index: log.runs.append(str(at)) or (Text(""),), [chain[-1]])
        chain.append(dropped(node))
    if start != "end":
        chain[LONG // 2].get()
    chain[-1].get()
    assert log.runs == [str(index) for index in range(LONG)]


def test_long_chain_that_nobody_asked_for_is_freed() -> None:
    """Python's own recursive free of nested objects must not run out of stack."""
    value = held("")
    start = weakref.ref(value)
    for _ in range(10 * LONG):
        value = dropped(Node(_join, [value]))
    del value
    assert start() is None


def test_argument_that_nobody_needs_is_gone_when_the_op_has_run() -> None:
    log = Log()
    alive: list[int] = []
    texts: list[weakref.ref[Text]] = []

    def call(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        result = Text("")
        texts.append(weakref.ref(result))
        del tensors
        alive.append(sum(text() is not None for text in texts))
        return (result,)

    value = held()
    for _ in range(5):
        value = dropped(Node(call, [value]))
    value.get()
    # Of the chain, only the op's argument and its result are there at any time.
    assert alive == [1, 2, 2, 2, 2]
    assert sum(text() is not None for text in texts) == 1
    assert log.runs == []


def test_argument_that_is_needed_later_stays_and_is_not_computed_again() -> None:
    log = Log()
    shared = log.value("shared", held())
    first, second = log.value("first", shared), log.value("second", shared)
    text = weakref.ref(shared.get())
    del shared
    first.get()
    assert text() is not None
    second.get()
    assert text() is None
    assert log.runs == ["shared", "first", "second"]


def test_node_lets_go_of_arguments_and_value_of_its_node() -> None:
    log = Log()
    argument = log.value("a", held())
    node = log.node("b", argument)
    value = dropped(node)
    value.get()
    assert (node.inputs, node.call, value.node, argument.node) == ((), None, None, None)
    last = weakref.ref(argument)
    del argument
    assert last() is None


def _three(log: Log, *wanted: bool) -> tuple[Node, list[Value | None]]:

    def call(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        log.runs.append("split")
        return tuple(Text(f"part {index}") for index in range(3))

    node = Node(call, [held()])
    values = [Value(node=node) if want else None for want in wanted]
    for value in values:
        node.add_output(value)
    return node, values


def test_several_results_of_one_run() -> None:
    log = Log()
    _, (first, second, third) = _three(log, True, True, True)
    assert third.get().text == "part 2"
    assert (first.get().text, second.get().text) == ("part 0", "part 1")
    assert log.runs == ["split"]


def test_results_that_were_kept_are_not_delivered() -> None:
    log = Log()
    _, values = _three(log, False, True, False)
    assert values[1].get().text == "part 1"


def test_result_whose_value_is_gone_is_not_held() -> None:
    log = Log()
    node, values = _three(log, True, True, True)
    last = values.pop()
    values.clear()
    assert last.get().text == "part 2"
    assert [reference is not None and reference() is not None for reference in node.outputs] == [False, False, True]


def test_result_that_became_available_meanwhile_is_not_replaced() -> None:
    log = Log()
    _, (first, second, _) = _three(log, True, True, True)
    mine = Text("kept")
    first.tensor, first.node = mine, None
    second.get()
    assert first.get() is mine


def test_op_may_write_into_what_nobody_else_needs() -> None:
    log = Log()
    value = log.write("sin_", log.write("add_", log.value("mm", held())))
    assert value.get().text == "sin_(add_(mm(x)))"
    assert log.overwrote == [True, True]


def _needed_by_another_op(log: Log, base: Value) -> object:
    return log.value("other", base)


def _held_by_autograd(log: Log, base: Value) -> object:
    return base


def _seen_through_a_view(log: Log, base: Value) -> object:
    base.is_viewed = True
    return None


OTHER_USES: dict[str, Callable[[Log, Value], object]] = {
    "another op": _needed_by_another_op,
    "autograd": _held_by_autograd,
    "a view": _seen_through_a_view,
}


@pytest.mark.parametrize("use", OTHER_USES.values(), ids=OTHER_USES)
def test_op_writes_into_a_copy_of_what_somebody_else_needs(use: Callable[[Log, Value], object]) -> None:
    log = Log()
    base = log.value("mm", held())
    other = use(log, base)
    written = log.write("add_", base)
    text = base.get()
    del base
    assert written.get().text == "add_(mm(x))"
    assert log.overwrote == [False]
    assert text.text == "mm(x)"
    assert other is None or isinstance(other, Value)
    if isinstance(other, Value):
        assert other.get().text in ("mm(x)", "other(mm(x))")


def test_last_of_two_writers_need_not_copy() -> None:
    log = Log()
    base = log.value("mm", held())
    first, second = log.write("add_", base), log.write("mul_", base)
    del base
    assert (first.get().text, second.get().text) == ("add_(mm(x))", "mul_(mm(x))")
    assert log.overwrote == [False, True]


def test_argument_that_is_also_written_is_copied() -> None:
    log = Log()
    base = log.value("mm", held())
    written = log.write("mul_", base, base)
    del base
    assert written.get().text == "mul_(mm(x), mm(x))"
    assert log.overwrote == [False]


def test_op_that_fails_can_be_asked_again() -> None:
    """Out of memory in backward: what was computed stays, and the next attempt goes on from there."""
    log = Log()
    failures = [MemoryError("full")]

    def call(tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        if failures:
            raise failures.pop()
        return (tensors[0],)

    value = dropped(Node(call, [log.value("a", held())]))
    with pytest.raises(MemoryError, match="full"):
        value.get()
    assert value.get().text == "a(x)"
    assert log.runs == ["a"]


def test_value_without_tensor_or_node_is_a_bug_of_ours() -> None:
    with pytest.raises(RuntimeError, match="neither tensor nor node: this is a bug in recollect, please report it"):
        Value().get()


def test_second_run_of_a_node_is_a_bug_of_ours() -> None:
    node = Log().node("f", held())
    node.run()
    with pytest.raises(RuntimeError, match="asked to run twice: this is a bug in recollect, please report it"):
        node.run()
