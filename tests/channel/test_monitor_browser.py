"""The monitor's page in a real browser: what happens is shown soon, for everybody."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlinf.channel import Channel, ChannelConfig, DeviceLock, Job
from rlinf.channel.observer import JobEnded, Observer, first
from rlinf.channel.testing import Rig
from rlinf.channel.web import Page, View
from rlinf.comm import Endpoint
from rlinf.comm.testing import PeerProcess
from tests.channel.browser import CHROMIUM, Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, to render the page"),
]

SOON_S = 3.0
WAIT_S = 30.0
INTERVAL_S = 1.0
"""As the command has it by default."""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("tcp") as rig, rig.server():
        yield rig


@pytest.fixture(scope="module")
def here(rig: Rig) -> Iterator[Endpoint]:
    with rig.endpoint("here/0") as endpoint:
        yield endpoint


@contextmanager
def served(rig: Rig) -> Iterator[Page]:
    stop = threading.Event()
    with Observer(Job(rig.registry.address, rig.registry.token.hex())) as observer:
        view = View(observer, "job")
        first(observer)
        looking = threading.Thread(target=view.watch, args=(INTERVAL_S, stop, JobEnded))
        looking.start()
        try:
            with Page(view) as page:
                yield page
        finally:
            stop.set()
            looking.join(WAIT_S)


@pytest.fixture(scope="module")
def browser(rig: Rig) -> Iterator[Browser]:
    with served(rig) as page, Browser() as browser:
        browser.open(page.url)
        browser.until("!!document.querySelector('#workers tbody tr + tr')")
        yield browser


def texts(selector: str) -> str:
    return f"[...document.querySelectorAll('{selector}')].map(e => e.textContent)"


def soon(browser: Browser, selector: str, *words: str) -> None:
    """A text of the page has all these words before long, counted from now."""
    seconds = browser.until(
        f"{texts(selector)}.some(t => {list(words)}.every(w => t.includes(w)))", WAIT_S
    )
    assert seconds < SOON_S, f"{words} took {seconds:.1f} s"


def never(browser: Browser, selector: str, word: str) -> None:
    browser.until(f"!{texts(selector)}.some(t => t.includes('{word}'))", WAIT_S)


def idle(endpoint: Endpoint) -> None:
    endpoint.send("up", "here/0")
    signal.pause()


def test_a_killed_worker(rig: Rig, here: Endpoint, browser: Browser) -> None:
    process: PeerProcess
    with rig.process("victim/0", idle) as process:
        assert here.recv("victim/0") == "up"
        browser.until(f"{texts('#workers td')}.includes('victim/0')", WAIT_S)
        os.kill(process.pid, signal.SIGKILL)
        soon(browser, "#findings li", "victim/0", f"process {process.pid} is gone")
        soon(browser, "#workers tr", "victim/0", "gone")
        soon(browser, "#log tr", "victim/0", "is gone")


def test_a_full_channel(here: Endpoint, browser: Browser) -> None:
    channel = Channel.create("narrow", here, ChannelConfig(max_items=1, put_window_items=0))
    channel.put(b"1", timeout=WAIT_S)
    waiting = channel.put_async(b"2")
    soon(browser, "#findings li", "narrow is full", "1 of 1 items", "here/0")
    soon(browser, "#channels tr", "narrow", "1 of 1", "full")
    soon(browser, "#waiting tr", "put narrow")
    channel.get()
    channel.get()
    waiting.result(WAIT_S)
    never(browser, "#findings li", "narrow")
    soon(browser, "#log tr", "narrow has room again")


def test_an_imbalance(rig: Rig, here: Endpoint, browser: Browser) -> None:
    channel = Channel.create("uneven", here, ChannelConfig(prefetch_items=1))
    with rig.endpoint("slow/0") as slow, rig.endpoint("quick/0") as quick:
        channel.put_many(list(range(12)))
        with channel.ref.open(slow).lease():
            taken = channel.ref.open(quick)
            for _ in range(10):
                taken.get(timeout=WAIT_S)
            taken.ack()
            soon(browser, "#findings li", "uneven is uneven", "quick/0", "slow/0")
            soon(browser, "#consumers tr", "uneven", "quick/0")


def test_a_held_lock_and_who_waits_for_whom(rig: Rig, here: Endpoint, browser: Browser) -> None:
    with rig.endpoint("next/0") as next_:
        locks = DeviceLock(here, ["core:0"]), DeviceLock(next_, ["core:0"])
        with locks[0].hold((0, 1)):
            soon(browser, "#lock tr", "here/0", "core:0", "holds")
            waiting = threading.Thread(target=hold, args=(locks[1],))
            waiting.start()
            soon(browser, "#lock tr", "next/0", "core:0", "waits", "here/0")
        waiting.join(WAIT_S)
    never(browser, "#lock td", "next/0")


def hold(lock: DeviceLock) -> None:
    with lock.hold((0, 2), timeout=WAIT_S):
        pass


def test_the_keyboard_reaches_everything(browser: Browser) -> None:
    browser.evaluate("document.body.tabIndex = -1, document.body.focus()")
    reached = []
    for _ in range(60):
        browser.press("Tab")
        reached.append(
            browser.evaluate(
                "(e => e.ariaLabel || e.textContent)(document.activeElement)"
                " + ' ' + getComputedStyle(document.activeElement).outlineStyle"
            )
        )
    sections = browser.evaluate(texts("section:not([hidden]) .scroll") + ".length")
    tables = browser.evaluate("[...document.querySelectorAll('.scroll')].map(e => e.ariaLabel)")
    shown = [name for name in tables if f"{name} solid" in reached]
    assert len(shown) >= sections - 1, (tables, reached)
    assert "Pause solid" in reached and "Channels solid" in reached
    browser.evaluate("document.getElementById('pause').focus()")
    for pressed in ("true", "false"):
        browser.press("Enter")
        assert browser.evaluate("document.getElementById('pause').ariaPressed") == pressed


CONTRAST = """
(() => {
  const ink = document.createElement('span');
  document.body.append(ink);
  const of = colour => {
    ink.style.color = colour;
    const rgb = getComputedStyle(ink).color.match(/[0-9.]+/g).slice(0, 3).map(n => n / 255);
    const [r, g, b] = rgb.map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const back = of('var(--back)');
  const against = name => { const a = of(`var(--${name})`);
    return (Math.max(a, back) + .05) / (Math.min(a, back) + .05); };
  const found = ['ink', 'quiet', 'accent', 'bad'].map(against);
  ink.remove();
  return [back, ...found];
})()
"""
"""Luminance of the ground, and how the texts stand out from it, as WCAG 2.2 reckons."""


def test_it_is_readable_in_light_and_dark(browser: Browser) -> None:
    ground = {}
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        ground[scheme], *contrasts = browser.evaluate(CONTRAST)
        assert min(contrasts) >= 4.5, (scheme, contrasts)
    assert ground["light"] > 0.8 and ground["dark"] < 0.05
