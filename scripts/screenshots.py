"""Take pictures of the dashboard and of `corral top` while a daemon answers requests."""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser, Page
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from support import tiny_gguf
from support.corral_cli import CorralCli, until
from support.dashboard_page import VIEWS, Dashboard, chromium
from support.fork_server import ForkServer
from support.terminal import Terminal

from supervisor.system.paths import directories

_SIZES: Final = {"wide": (1440, 900), "narrow": (390, 844)}
_SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
_QUALITY: Final = 80
_KEYS: Final = ("laptop", "phone", "agents")
_CLIENTS: Final = 6  # so that the chat finds a free slot
_REDRAWN_MS: Final = 700
_COMPARED_MS: Final = 300_000
_PLACES: Final = {
    "explanation": "requests",
    "comparison": "models/smollm2",
    "settings": "models",
}
_REPORT: Final = "Save the report"  # the button below a comparison
_SETTINGS_PATH: Final = "~/.config/llama-corral/corral.toml"  # instead of a temporary one
_QUESTIONS: Final = (
    "Why is the sky blue?",
    "Tell me a story about a llama that lives in a corral.",
    "Write a list of ten animals, with a sentence about each.",
)
_CHAT: Final = "Write a short Python function that counts the llamas in a list of animals."
_SETTINGS: Final = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "keys.toml"
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
[nodes.attic]
url = "{node}"
[supervisor.restart]
backoff_initial_s = 0.1
max_failures = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument(
        "--minutes", type=float, default=0.5, help="of requests before the pictures"
    )
    parser.add_argument("--views", nargs="+", default=(*VIEWS, *_PLACES))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="c") as directory,
        chromium() as browser,
        closing(ForkServer()) as fork_server,
        _daemon(Path(directory), fork_server) as (corral, keys),
    ):
        dashboard = _sign_in(browser, corral)
        if "comparison" in arguments.views:
            _compare(dashboard)  # alone: beside clients, engines share the cores and are slow
        with _clients(corral.url, keys):
            until(lambda: corral.slots_busy() > 2)
            threading.Event().wait(60 * arguments.minutes)  # so that the charts have a line
            _picture_top(corral, folder / "top.svg")
            _picture_views(dashboard, folder, arguments.views)


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
def _node(directory: Path, tiny: Path) -> Iterator[CorralCli]:
    directory.mkdir()
    node = CorralCli(directory)
    node.hide_stored_models()
    node.configure(f'[models.tiny]\npath = "{tiny}"')
    node.ok("start")
    try:
        yield node
    finally:
        node.end()


@contextmanager
def _daemon(directory: Path, fork_server: ForkServer) -> Iterator[tuple[CorralCli, list[str]]]:
    # Beside the node: `CorralCli.end` waits for all engines below its directory.
    corral = CorralCli(directory / "front", fork_server)
    corral.root.mkdir()
    corral.hide_stored_models()
    broken = directory / "broken.gguf"
    tiny = tiny_gguf.make(directory / "tiny.gguf")
    broken.write_bytes(tiny.read_bytes()[:-1000])
    with _node(directory / "node", tiny) as node:
        corral.configure(
            _SETTINGS.format(
                smollm2=directories().models / "SmolLM2-135M-Instruct.Q4_1.gguf",
                slow=tiny_gguf.make_slow(directory / "slow.gguf"),
                tiny=tiny,
                broken=broken,
                node=node.url,
            )
        )
        keys = [corral.data("key", "add", name)["key"] for name in _KEYS]
        corral("start")  # one model cannot be started
        try:
            yield corral, keys
        finally:
            corral.end()


@contextmanager
def _clients(url: str, keys: Sequence[str]) -> Iterator[None]:
    """Send chats with these API keys until the block ends."""
    ended = threading.Event()
    threads = [
        threading.Thread(
            target=_chat, args=(url, keys[number % len(keys)], number, ended), daemon=True
        )
        for number in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _chat(url: str, key: str, number: int, ended: threading.Event) -> None:
    model = "story" if number % 2 else "smollm2"
    messages: list[dict[str, str]] = []
    for turn in count(number):
        if ended.is_set():
            return
        question = _QUESTIONS[turn % len(_QUESTIONS)]
        messages = [*messages[-4:], {"role": "user", "content": question}]
        with suppress(urllib.error.URLError):
            _ask(url, key, {"model": model, "messages": messages, "max_tokens": 80}, ended)


def _ask(url: str, key: str, body: dict[str, object], ended: threading.Event) -> None:
    request = urllib.request.Request(  # noqa: S310 (our own daemon)
        f"{url}/v1/chat/completions",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        while response.readline() and not ended.is_set():
            pass


def _sign_in(browser: Browser, corral: CorralCli) -> Dashboard:
    dashboard = Dashboard(browser.new_context(device_scale_factor=1), corral.url)
    dashboard.page.goto(f"{corral.url}/corral/")
    dashboard.page.get_by_text("not signed in").wait_for()
    dashboard.sign_in(corral.data("ui", "--no-browser")["url"])
    return dashboard


def _compare(dashboard: Dashboard) -> None:
    dashboard.show(_PLACES["comparison"])
    bench = dashboard.page.get_by_role("region", name="Comparison of profiles")
    bench.get_by_label("with").select_option("low-memory")
    bench.get_by_label("Workload").select_option("generation")
    bench.get_by_label("Minutes").fill("1")
    bench.get_by_label("Although").check()
    bench.get_by_role("button", name="Measure").click()
    bench.get_by_role("button", name=_REPORT).wait_for(timeout=_COMPARED_MS)


def _picture_views(dashboard: Dashboard, folder: Path, views: Sequence[str]) -> None:
    page = dashboard.page
    dashboard.show("chat")
    page.get_by_label("Model").select_option("smollm2")
    page.get_by_label("Message").fill(_CHAT)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Explain").wait_for()
    for scheme in _SCHEMES:
        page.emulate_media(color_scheme=scheme)
        page.reload()
        for view in views:
            _show(dashboard, view)
            _picture(page, folder, view, scheme)
    for complaint in dashboard.complaints:
        print(complaint)
    dashboard.context.close()


def _show(dashboard: Dashboard, view: str) -> None:
    page = dashboard.page
    dashboard.show(_PLACES.get(view, view))
    page.locator(".waiting").first.wait_for(state="detached")
    match view:
        case "chat":
            page.get_by_role("button", name=_CHAT[:10]).first.click()
            page.get_by_role("link", name="Explain").wait_for()
        case "clients":
            page.locator("summary").first.click()
        case "explanation":
            page.get_by_role("table", name="Finished").get_by_role("link").first.click()
            page.locator(".drawer .waiting").wait_for(state="detached")
        case "settings":
            page.get_by_role("button", name="Edit corral.toml").click()
            text = page.get_by_label("Text of corral.toml")
            shown = re.sub('"/[^"]*/', '"/models/', text.input_value())
            text.fill(shown.replace("preload = false", "tl_s = 600"))
            page.get_by_text("did you mean").wait_for()
            path = page.get_by_text("/corral.toml")
            path.evaluate("(it, path) => { it.textContent = path; }", _SETTINGS_PATH)
        case "comparison":
            page.get_by_role("button", name=_REPORT).wait_for()


def _picture(page: Page, folder: Path, name: str, scheme: str) -> None:
    """Write WebP files, a third of the size of the PNG files that playwright writes."""
    session = page.context.new_cdp_session(page)
    for size, (width, height) in reversed(_SIZES.items()):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(_REDRAWN_MS)
        if name == "comparison":
            page.get_by_role("button", name=_REPORT).scroll_into_view_if_needed()
        taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": _QUALITY})
        (folder / f"{name}-{size}-{scheme}.webp").write_bytes(base64.b64decode(taken["data"]))
    session.detach()


if __name__ == "__main__":
    main()
