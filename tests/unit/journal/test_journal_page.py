"""The page of a run's episodes: what is in it, and how a real browser shows it."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless import CHROMIUM, REQUIRED, Browser, browser
from logged_run import FAILURE, HOSTILE, LoggedRun

from goaly.journal.__main__ import main
from goaly.journal.episode_text import safe


@pytest.fixture(scope="module")
def page(logged: LoggedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All episodes that `list` has."""
    file = tmp_path_factory.mktemp("page") / "episodes.html"
    assert main(["list", str(logged.folder), "--html", str(file)]) == 0
    return file


class Elements(HTMLParser):
    """The elements of a page, and the text of those that matter."""

    def __init__(self, content: str):
        super().__init__()
        self.started: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def data_of(page: Path) -> dict[str, Any]:
    """The data of the page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found)


def test_a_page_has_its_own_elements_only_and_names_no_other_place(page: Path) -> None:
    content = page.read_text()
    found = Elements(content)
    assert found.open == []
    assert [tag for tag, _ in found.started].count("script") == 2
    names = {name for _, attributes in found.started for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "action", "style")}
    assert {tag for tag, _ in found.started}.isdisjoint({"img", "link", "iframe", "object", "embed", "base"})
    assert "://" not in content
    assert content.isascii()
    (policy,) = [attributes["content"] for tag, attributes in found.started if attributes.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_data_of_a_page_has_everything_that_is_shown(page: Path) -> None:
    data = data_of(page)
    episodes = {one["id"]: one for one in data["episodes"]}
    assert list(episodes) == ["5.1", "5.0", "4.1", "4.0", "3.1", "3.0", "2", "1.1", "1.0", "0.1", "0.0"]
    assert data["notes"] == ["11 episodes; policy version 2; prompts: 1 failed, 1 queued, 2 running, 4 trained"]
    failed = episodes["2"]
    assert (failed["state"], failed["why"], failed["turns"]) == ("failed", safe(FAILURE), [])
    branched = episodes["4.0"]
    assert [turn["parent"] for turn in branched["turns"]] == [None, 1, 2, 3, 2, 5, None, 7]
    question, answer = episodes["3.0"]["turns"][:2]
    assert (question["author"], "".join(question["texts"])) == ("prompt", "question")
    assert "".join(answer["texts"]) == "first<|im_end|>"
    assert (answer["logprobs"], answer["versions"], answer["trained"]) == ([-0.25] * 6, [[0, 6]], [[1, 6]])
    assert answer["columns"]["advantage"] == [[pytest.approx(1, abs=1e-4), 6]]
    assert (question["start"], answer["start"], answer["rewards"]) == (0, 8, [[0.0, 6]])
    assert safe(HOSTILE) in "".join(episodes["4.1"]["turns"][1]["texts"])


def test_the_data_of_a_page_has_the_notes_of_each_turn(page: Path) -> None:
    (worked,) = [one for one in data_of(page)["episodes"] if one["id"] == "3.0"]
    asked, first, *_, second = [turn["notes"] for turn in worked["turns"]]
    assert (asked, len(second)) == (["begin"], 2)
    assert safe(HOSTILE) in first[0]


def test_show_writes_a_page_of_one_episode(logged: LoggedRun, tmp_path: Path) -> None:
    file = tmp_path / "one.html"
    assert main(["show", str(logged.folder), "--episode", "4.0", "--html", str(file)]) == 0
    assert [one["id"] for one in data_of(file)["episodes"]] == ["4.0"]


@pytest.fixture(scope="module")
def shown(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page in a browser."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(page)
        yield opened


ROWS = "[...document.querySelectorAll('#rows tr td:first-child')].map((cell) => cell.textContent)"
COLORS = "[...document.querySelectorAll('.token')].map((token) => token.style.backgroundColor)"
in_browser = pytest.mark.skipif(CHROMIUM is None and not REQUIRED, reason="there is no Chromium on this machine")


@in_browser
def test_a_browser_lists_the_episodes_and_opens_the_first(shown: Browser) -> None:
    assert shown.value(ROWS) == ["5.1", "5.0", "4.1", "4.0", "3.1", "3.0", "2", "1.1", "1.0", "0.1", "0.0"]
    assert shown.value("document.getElementById('facts').innerText").startswith("episode 5.1: queued\n")


@in_browser
def test_a_browser_filters_and_sorts_the_list(shown: Browser) -> None:
    shown.write("#search", "really?")  # only the text of one turn
    assert shown.value(ROWS) == ["4.0"]
    assert shown.value("document.getElementById('count').innerText") == "1 of 11 episodes"
    shown.write("#search", "")
    shown.value("document.execCommand('delete')")
    shown.choose("#state", "trained")
    shown.write("#step", "2")
    shown.choose("#sort", "reward")
    assert shown.value(ROWS) == ["4.1", "3.1", "4.0", "3.0"]
    shown.choose("#state", "")
    shown.value("document.querySelector('#step').select()")
    shown.value("document.execCommand('delete')")
    shown.choose("#sort", "given")
    assert len(shown.value(ROWS)) == 11


@in_browser
def test_a_click_opens_an_episode_with_its_tree(shown: Browser) -> None:
    shown.click("a[href='#4.0']")
    assert shown.value("location.hash") == "#4.0"
    assert shown.value("document.querySelectorAll('.turn').length") == 8
    assert shown.value("document.querySelectorAll('#tree li').length") == 8
    assert shown.value("document.querySelectorAll('#tree ul ul').length") == 4
    text = shown.value("document.querySelector('#turn-2 .text').innerText")
    assert text == "I call <tool_call>{}</tool_call><|im_end|>"
    assert shown.value("document.querySelector('tr.open').dataset.id") == "4.0"


@in_browser
def test_tokens_are_colored_and_listed_where_asked_for(shown: Browser) -> None:
    shown.click("a[href='#3.0']")
    assert shown.value(COLORS) == []
    shown.choose("#color", "logprob")
    colors = shown.value(COLORS)
    assert len(colors) == 13
    assert set(colors) == {"rgba(220, 40, 40, 0.04)"}
    shown.choose("#color", "staleness")
    assert shown.value(COLORS)[:6] == ["rgba(235, 140, 0, 0.8)"] * 6  # version 0, trained by version 1
    assert shown.value(COLORS)[6:] == ["rgba(235, 140, 0, 0)"] * 7
    shown.choose("#color", "advantage")
    assert set(shown.value(COLORS)) == {"rgba(30, 160, 70, 0.8)"}
    assert shown.value("document.querySelector('.token').title") == "log-prob -0.25, version 0"
    shown.click("#table")
    row = shown.value("[...document.querySelectorAll('#turn-4 tr')].at(-1).innerText.split('\\t')")
    assert row == ["28", "257", '"<|im_end|>"', "-0.25", "1", "0", "1", "-0.75", "1"]
    shown.click("#table")
    shown.choose("#color", "")


@in_browser
def test_text_from_the_log_stays_text_and_nothing_is_loaded(shown: Browser, page: Path) -> None:
    shown.click("a[href='#4.1']")
    assert shown.value("document.querySelector('#turn-2 .text').innerText") == safe(HOSTILE) + "<|im_end|>"
    assert shown.value("document.title") == "Episodes of run"
    assert shown.value("document.images.length + document.scripts.length") == 2
    # The page's policy holds: neither another script nor a request is possible.
    more = "const more = document.createElement('script'); more.textContent = 'window.ran = 1'"
    shown.value(f"{{ {more}; document.body.append(more); }}")
    assert shown.value("window.ran === undefined")
    assert shown.value("fetch('https://127.0.0.1:1/').then(() => 'sent', (error) => error.name)") == "TypeError"
    events = [(event["method"], event["params"]) for event in shown.events]
    assert not [how for how, _ in events if how in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    asked = {facts["request"]["url"].partition("#")[0] for how, facts in events if how == "Network.requestWillBeSent"}
    assert asked <= {page.as_uri()}
