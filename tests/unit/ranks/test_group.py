"""What processes of one group answer each other, and who is named where one does not come."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rank_threads import error_of, run_on_threads
from recollect.errors import RecordError
from recollect.ranks import group as of_groups
from recollect.ranks.group import Group, Place, group_of

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with the gloo backend")


def test_all_have_to_agree() -> None:
    def asked(ranks: Group) -> list[bool]:
        return ranks.all_of([True, ranks.is_first, not ranks.is_first, False], Place.START)

    assert run_on_threads(asked) == [[True, False, False, False]] * 2


def test_each_learns_what_all_gave() -> None:
    assert (
        run_on_threads(lambda ranks: ranks.gather(("first", ranks.is_first), Place.START))
        == [[("first", True), ("first", False)]] * 2
    )


def test_at_different_places_all_raise_the_same() -> None:
    def meet(ranks: Group) -> str:
        place = Place.FIRST_CALL if ranks.is_first else Place.STEP_END
        return error_of(lambda: ranks.all_of([True], place))

    first, second = run_on_threads(meet)
    assert first.startswith(
        "RecordError: rank 0 began a step, rank 1 ended a step that was recorded: processes that train"
    )
    assert first == second


@pytest.fixture
def _the_first_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One process, which waits for others for a moment only."""
    monkeypatch.setattr(of_groups, "_LONGEST_WAIT_S", 0.05)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_the_first_process")
def test_only_those_that_do_not_come_are_named() -> None:
    with pytest.raises(RecordError, match=r"recollect\.fit\(\): ranks 1 and 2 of 3 did not call it within 0\.05 s"):
        group_of([2, 0, 1], "fit()")


@pytest.mark.usefixtures("_the_first_process")
def test_who_cannot_connect_learns_what_torchruns_restarts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(of_groups._Meeting, "wait", lambda *_: [])
    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(
        RecordError, match=r"ranks 0 and 1 could not connect .*Mesh failed\).* TORCH_DISABLE_SHARE_RDZV"
    ):
        group_of([0, 1], "fit()")


@pytest.mark.usefixtures("_the_first_process")
def test_torchruns_restarted_processes_find_no_sign_of_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet at the same store."""
    met = of_groups._Meeting((0, 1))
    monkeypatch.setattr(of_groups, "_meetings", {(0, 1): met})
    monkeypatch.setattr(met, "group", lambda: dist.group.WORLD)
    monkeypatch.setattr(Group, "all_of", lambda *_: [])
    of_groups.meeting_place().set(f"{met._key}/1/1", "here")
    group_of([0, 1], "fit()")
    assert met._number == 1 and not of_groups.meeting_place().check([met._key_of(0)])
