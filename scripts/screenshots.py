"""Take pictures of the dashboard and of `corral top` while a daemon answers requests."""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, product
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from support import tiny_gguf
from support.corral_cli import CorralCli, until
from support.dashboard_page import VIEWS, Dashboard, chromium
from support.terminal import Terminal

from supervisor.system.paths import directories

_SIZES: Final = {"wide": (1440, 900), "narrow": (390, 844)}
_SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
_CLIENTS: Final = 8
_SETTLED_S: Final = 20
_QUESTIONS: Final = (
    "Why is the sky blue?",
    "Tell me a story about a llama that lives in a corral.",
    "Write a list of ten animals, with a sentence about each.",
)
_SETTINGS: Final = """
[models.smollm2]
path = "{smollm2}"
flags = {{ ctx-size = 8192, parallel = 4 }}
[models.story]
path = "{slow}"
flags = {{ ctx-size = 16384, parallel = 4, threads = 1 }}
[models.unused]
path = "{tiny}"
preload = false
[models.broken]
path = "{broken}"
[supervisor.restart]
backoff_initial_s = 0.1
max_failures = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="c") as directory,
        chromium() as browser,
        _daemon(Path(directory)) as corral,
        _clients(corral.url),
    ):
        until(lambda: corral.slots_busy() > 2)
        threading.Event().wait(_SETTLED_S)  # so that the charts have a line
        _picture_top(corral, folder / "top.svg")
        for scheme, size in product(_SCHEMES, _SIZES):
            _picture_views(browser, corral, scheme, size, folder)


def _picture_top(corral: CorralCli, path: Path) -> None:
    columns = 110
    corral.env |= {"NO_COLOR": "", "FORCE_COLOR": "1"}
    console = Console(record=True, width=columns, file=io.StringIO())
    with Terminal(corral, "top", "--once", columns=columns) as terminal:
        terminal.end()
    console.print(Text.from_ansi(terminal.written.decode().replace("\r", "")))
    # Without rich's fonts, which a page would load from elsewhere.
    style = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(path), title="corral top", code_format=style)


@contextmanager
def _daemon(directory: Path) -> Iterator[CorralCli]:
    corral = CorralCli(directory)
    broken = directory / "broken.gguf"
    tiny = tiny_gguf.make(directory / "tiny.gguf")
    broken.write_bytes(tiny.read_bytes()[:-1000])
    corral.configure(
        _SETTINGS.format(
            smollm2=directories().models / "SmolLM2-135M-Instruct.Q4_1.gguf",
            slow=tiny_gguf.make_slow(directory / "slow.gguf"),
            tiny=tiny,
            broken=broken,
        )
    )
    corral("start")  # one model cannot be started
    try:
        yield corral
    finally:
        corral.end()


@contextmanager
def _clients(url: str) -> Iterator[None]:
    """Send chats until the block ends."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_chat, args=(url, number, ended), daemon=True)
        for number in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _chat(url: str, number: int, ended: threading.Event) -> None:
    model = "story" if number % 2 else "smollm2"
    messages: list[dict[str, str]] = []
    for turn in count(number):
        if ended.is_set():
            return
        question = _QUESTIONS[turn % len(_QUESTIONS)]
        messages = [*messages[-4:], {"role": "user", "content": question}]
        with suppress(urllib.error.URLError):
            _ask(url, {"model": model, "messages": messages, "max_tokens": 300}, ended)


def _ask(url: str, body: dict[str, object], ended: threading.Event) -> None:
    request = urllib.request.Request(  # noqa: S310 (our own daemon)
        f"{url}/v1/chat/completions",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        while response.readline() and not ended.is_set():
            pass


def _picture_views(
    browser: Browser, corral: CorralCli, scheme: Literal["light", "dark"], size: str, folder: Path
) -> None:
    width, height = _SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    )
    dashboard = Dashboard(context, corral.url)
    page = dashboard.page
    page.goto(f"{corral.url}/corral/")
    page.get_by_text("not signed in").wait_for()
    page.screenshot(path=folder / f"signed-out-{scheme}-{size}.png")
    dashboard.sign_in(corral.data("ui", "--no-browser")["url"])
    for view in VIEWS:
        dashboard.show(view)
        page.locator(".waiting").wait_for(state="detached")
        if view == "chat":
            page.get_by_label("Model").select_option("smollm2")
            page.get_by_label("Message").fill("Which animals live in a corral? Answer with a list.")
            page.keyboard.press("Enter")
            page.get_by_role("link", name="Explain").wait_for()
        if view == "clients":
            page.locator("summary").first.click()
        page.wait_for_timeout(600)
        page.screenshot(path=folder / f"{view}-{scheme}-{size}.png")
    dashboard.show("requests")
    page.get_by_role("table", name="Finished").get_by_role("link").first.click()
    page.locator(".drawer .waiting").wait_for(state="detached")
    page.screenshot(path=folder / f"explanation-{scheme}-{size}.png")
    for complaint in dashboard.complaints:
        print(f"{scheme}, {size}: {complaint}")
    context.close()


if __name__ == "__main__":
    main()
