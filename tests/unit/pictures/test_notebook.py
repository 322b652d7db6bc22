"""What notebooks show: static HTML that no name can break, and tables where there is no picture."""

import gc
import sys
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import recollect
from hostile_names import EVIL, evil_profile
from recollect.notebooks import Lines
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

PICTURE = "data:image/png;base64,"


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def recorded() -> Profile:
    layers = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8)) for _ in range(3)]
    net = nn.Sequential(nn.Linear(8, 8), *layers)
    return recollect.record(net, torch.zeros(256, 8), loss_fn=torch.sum, fake=True)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return recorded()


VIEWS: dict[str, tuple[Callable[[Profile], object], str, bool]] = {
    "profile": (lambda profile: profile, "3 (Sequential)", True),
    "plan": (lambda profile: recollect.plan(profile, "70%"), "recompute", True),
    "frontier": (recollect.frontier, "keep all", True),
    "timeline": (lambda profile: recollect.timeline(profile, Plan({})), "alive at the peak", True),
    "peak": (recollect.explain_peak, "2.mul (Dropout)", False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_shown(profile: Profile, name: str) -> None:
    pytest.importorskip("matplotlib")
    make, text, has_picture = VIEWS[name]
    html = make(profile)._repr_html_()  # type: ignore[attr-defined]
    assert text in Tags(html).text and (PICTURE in html) == has_picture
    assert "http" not in html and "<script" not in html


@pytest.mark.filterwarnings("ignore:Glyph 8232")
@pytest.mark.parametrize("name", VIEWS)
def test_names_cannot_break_it(profile: Profile, name: str) -> None:
    make, _, has_picture = VIEWS[name]
    page = Tags(make(evil_profile(profile))._repr_html_())  # type: ignore[attr-defined]
    assert page.tags <= {"img", "table", "tr", "th", "td", "p", "br", "span"}
    assert "<script>alert(1)</script>" in page.text or name == "frontier"
    assert EVIL not in page.tags


def test_a_plan_without_its_profile_is_a_table() -> None:
    plan = recollect.plan(profile := recorded(), "70%")
    assert plan.source is not None and plan.source() is profile
    assert Plan.from_json(plan.to_json()) == plan and "source" not in plan.to_json()
    del profile
    gc.collect()
    html = plan._repr_html_()
    assert "<img" not in html and "predicted peak" in Tags(html).text


def test_without_matplotlib_it_says_so(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = Tags(recollect.plan(profile, "70%")._repr_html_()).text
    assert "No picture: a PNG needs the package `matplotlib`" in text
    assert "pip install 'recollect[plot]'" in text and "predicted peak" in text


def test_what_verify_and_attach_return(profile: Profile) -> None:
    net, batch = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 8)
    report = recollect.verify(net, batch, Plan({}), loss_fn=torch.sum, time=False)
    assert "equal bit for bit (4 compared)" in Tags(report._repr_html_()).text
    text = recollect.attach(net, torch.optim.SGD(net.parameters()), budget="1GiB", log=str).report()
    assert isinstance(text, Lines) and text == str(text)
    assert text._repr_html_() == f"<pre>{text.replace(chr(39), '&#x27;')}</pre>"
