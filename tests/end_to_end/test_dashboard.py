"""The dashboard in Chromium, against the real engine: one browser and one daemon for all tests."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Page, ViewportSize, expect
from support import tiny_clip
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, rest_of, until
from support.dashboard_page import VIEWS, Dashboard, Scheme
from support.fork_server import ForkServer

from proxy.dashboard.live import TICK_S

_SCHEMES: tuple[Scheme, ...] = ("light", "dark")
_WIDE: ViewportSize = {"width": 1440, "height": 900}
_SETTINGS = """
[models.tiny]
path = "{tiny}"
flags = {{ ctx-size = 2048, parallel = 2, threads = 1 }}
[models.slow]
path = "{slow}"
preload = false
flags = {{ ctx-size = 4096, parallel = 1, threads = 1, mmproj = "{clip}" }}
[models.broken]
path = "{broken}"
preload = false
[nodes.attic]
url = "{node}"
[supervisor.restart]
backoff_initial_s = 0.01
"""


@pytest.fixture(scope="module")
def daemon(
    browser: Browser,
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    tiny_model: Path,
    slow_model: Path,
    node_url: str,
) -> Iterator[CorralCli]:
    corral = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    broken = corral.root / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:-1000])
    clip = tiny_clip.make(corral.root / "clip.gguf", embd=256)
    paths = {"tiny": tiny_model, "slow": slow_model, "broken": broken, "clip": clip}
    corral.configure(_SETTINGS.format(node=node_url, **paths))
    corral.ok("start")
    yield corral
    corral.end()


@pytest.fixture(scope="module")
def window(browser: Browser, daemon: CorralCli) -> Dashboard:
    """Sign in once."""
    permissions = ["clipboard-read", "clipboard-write"]
    dashboard = Dashboard(browser.new_context(viewport=_WIDE, permissions=permissions), daemon.url)
    dashboard.sign_in(daemon.data("ui", "--no-browser")["url"])
    return dashboard


@pytest.fixture
def dashboard(window: Dashboard) -> Iterator[Dashboard]:
    window.page.set_viewport_size(_WIDE)
    window.show("overview")
    yield window
    assert window.foreign == [], "the page asks other hosts"
    assert window.complaints == []


def test_every_view_is_accessible_and_fits_a_phone(dashboard: Dashboard) -> None:
    page = dashboard.page
    for view in VIEWS:
        links = page.get_by_role("navigation", name="Views")
        links.get_by_role("link", name=view.capitalize()).click()
        expect(page.get_by_role("heading", name=view.capitalize(), level=1)).to_be_attached()
        expect(page.locator(".waiting")).to_have_count(0)
        for scheme in _SCHEMES:
            page.emulate_media(color_scheme=scheme)
            assert dashboard.violations(scheme) == [], f"{view}, {scheme}"
    page.set_viewport_size({"width": 360, "height": 740})
    for view in VIEWS:
        dashboard.show(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view


def test_keys_show_views_and_filters(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.reload()
    page.get_by_role("heading", name="Overview").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("8")
    expect(page.get_by_role("heading", name="Events")).to_be_visible()
    changes = dashboard.row("Events, newest first", "instance.state_changed")
    expect(changes.first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("DAEMON.started 5")
    expect(page.get_by_label("Filter")).to_have_value("DAEMON.started 5")
    page.get_by_label("Filter").fill("DAEMON.started")
    expect(dashboard.row("Events, newest first", "daemon.started")).to_be_visible()
    expect(changes).to_have_count(0)
    page.get_by_label("Level").select_option("Errors")
    expect(dashboard.row("Events, newest first", "daemon.started")).to_have_count(0)
    page.locator("main").focus()
    page.keyboard.press("?")
    shortcuts = page.get_by_role("dialog", name="Shortcuts")
    shortcuts.get_by_label("Keys of one character work").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    expect(page.get_by_role("heading", name="Events")).to_be_visible()
    page.get_by_role("button", name="Shortcuts").click()
    shortcuts.get_by_label("Keys of one character work").check()
    page.mouse.click(5, 400)  # beside the dialog
    expect(shortcuts).to_have_count(0)
    page.keyboard.press("1")
    expect(page.get_by_role("heading", name="Overview")).to_be_attached()


def test_colours_are_as_the_system_light_or_dark(dashboard: Dashboard) -> None:
    page, root = dashboard.page, dashboard.page.locator("html")
    page.keyboard.press("t")
    expect(root).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Colours: light").click()
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")
    page.get_by_role("button", name="Colours: dark").click()
    expect(root).to_have_attribute("data-theme", "system")


def test_a_failure_is_shown_once_and_within_two_seconds(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page = dashboard.page
    status = page.get_by_role("region", name="Status")
    page.get_by_role("button", name="Load broken").click()
    until(lambda: daemon.instances()["broken.0"].state == "failed")
    expect(status).to_contain_text("1 of 3 models failed")
    expect(page.locator("main").get_by_text("is truncated")).to_have_count(1)
    expect(status).to_contain_text("download the file again")
    dashboard.show("events")
    expect(page.get_by_role("banner")).to_contain_text("1 of 3 models failed")
    dashboard.show("overview")
    drawn_ms = page.evaluate("import('/corral/page/live/store.js').then(store => store.REDRAW_MS)")
    assert 1000 * TICK_S + drawn_ms <= 2000  # when the stream tells it, and when the page draws it
    (daemon.root / "broken.gguf").unlink()
    status.get_by_role("button", name="Load broken again").click()
    expect(page.locator("main").get_by_text("is truncated")).to_have_count(0)
    expect(status).to_contain_text("1 of 3 models failed")


def test_memory_and_activity_have_figures(dashboard: Dashboard) -> None:
    page = dashboard.page
    memory = page.get_by_role("region", name="Memory")
    for purpose in ("Weights", "Caches", "Other programs", "Free"):
        expect(memory).to_contain_text(purpose)
    expect(memory).not_to_contain_text("Weights0 B")
    activity = page.get_by_role("region", name="Activity")
    activity.get_by_role("button", name="6 h").click()
    expect(activity.get_by_role("button", name="6 h")).to_have_attribute("aria-pressed", "true")
    activity.locator(".u-over").first.hover()
    expect(activity.locator(".at")).to_have_count(4)
    with page.expect_request("**/corral/v1/rates?span=7d"):
        activity.get_by_role("button", name="7 days").click()
    activity.get_by_role("button", name="15 min").click()
    expect(activity.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")


def test_a_model_is_loaded_chats_is_explained_and_unloaded(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.get_by_role("button", name="Load slow").click()
    expect(dashboard.model("slow")).to_contain_text("loaded")
    expect(page.locator("[aria-live=polite]")).to_contain_text("slow")
    dashboard.model("slow").get_by_role("link", name="slow", exact=True).click()
    model = page.get_by_role("combobox", name="Model")
    expect(model).to_have_value("slow")
    model.select_option("tiny")
    page.get_by_label("Message").fill("hello <b>there</b>")
    page.keyboard.press("Enter")
    copy_of_answer = page.get_by_role("button", name="Copy answer")
    copy_of_answer.click()
    expect(copy_of_answer).to_have_text("Copied")
    assert copied(page) == kept_chats(page)[0]["messages"][1]["content"]
    page.get_by_role("link", name="Explain").click()
    drawer = page.get_by_role("complementary")
    expect(drawer.get_by_role("table", name="Time")).to_contain_text("Decode")
    assert dashboard.violations() == []
    drawer.press("Escape")
    expect(drawer).to_have_count(0)
    dashboard.show("chat")
    expect(page.get_by_role("log")).to_contain_text("hello <b>there</b>")
    expect(page.get_by_role("log")).to_contain_text("tokens/s")
    dashboard.show("caches")
    tiny = page.get_by_role("article", name="tiny")
    expect(tiny).to_contain_text(re.compile(r"\d+ % from caches"))
    expect(tiny).to_contain_text(re.compile(r"Computed[1-9]"))
    chart = page.get_by_role("figure").filter(has_text="tiny")
    for span, title in (("7d", "7 days"), ("15m", "15 min")):
        with page.expect_request(f"**/corral/v1/caches/rates?span={span}"):
            page.get_by_role("button", name=title).click()
        expect(page.get_by_role("button", name=title)).to_have_attribute("aria-pressed", "true")
        expect(chart).to_contain_text(re.compile(r"tiny\d+ % from caches, \d+ s saved today"))
        expect(chart).to_contain_text(re.compile(r"Computed[1-9]"))
        expect(chart.locator("canvas")).to_be_visible()
    dashboard.show("usage")
    used = dashboard.row("Tokens and time", "(no key)")
    expect(used.filter(has_text="tiny")).to_be_visible()
    dashboard.show("overview")
    page.get_by_role("button", name="Unload slow").click()
    expect(dashboard.model("slow")).to_contain_text("unloaded")
    page.get_by_role("button", name="Copy OPENAI_BASE_URL").click()
    expect(page.get_by_role("status").filter(has_text="OPENAI_BASE_URL: Copied")).to_be_attached()
    assert copied(page) == f"{dashboard.origin}/v1"


def copied(page: Page) -> str:
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def kept_chats(page: Page) -> Any:
    return page.evaluate("JSON.parse(localStorage.getItem('corral.chats'))")


def test_a_model_is_warmed_and_restarted(dashboard: Dashboard, daemon: CorralCli) -> None:
    page, notice = dashboard.page, dashboard.page.locator(".notice")
    before = daemon.instances()["tiny.0"]
    page.get_by_role("button", name="Warm tiny").click()
    dialog = page.get_by_role("dialog", name="Warm tiny")
    dialog.get_by_label("System prompt").fill("be brief, and be kind to all who ask")
    with page.expect_request("**/corral/v1/models/tiny/warm") as sent:
        dialog.get_by_role("button", name="Warm").click()
    prompt = {"role": "system", "content": "be brief, and be kind to all who ask"}
    assert sent.value.post_data_json == {"messages": [prompt]}
    expect(notice).to_contain_text("tiny has the prompt in its cache")
    expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Restart tiny").click()
    expect(notice).to_contain_text("tiny is being restarted")
    until(lambda: "tiny.0" in daemon.instances() and daemon.instances()["tiny.0"].pid != before.pid)
    expect(dashboard.model("tiny").get_by_role("link", name="tiny.0")).to_be_visible()


def test_usage_is_a_chart_by_day_and_key_and_internal_work_is_one_row_that_opens(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page = dashboard.page
    with begin_stream(daemon, 4, "tiny") as stream:
        rest_of(stream)
    until(lambda: {"(no key)", "(warming)"} <= keys_used(daemon))
    dashboard.show("usage")
    chart = page.get_by_role("region", name="Tokens by day and key")
    expect(chart.locator("dt")).to_have_text(["(no key)", "Internal work"])
    expect(chart.locator(".column")).to_have_count(30)
    chart.locator(".column").last.hover()
    expect(chart.get_by_role("heading")).to_contain_text(re.compile(r"[1-9].* on "))
    chart.locator(".column").nth(3).hover()
    expect(chart.get_by_role("heading")).to_contain_text(re.compile(r" 0 on "))
    page.get_by_label("Figure").select_option("Requests")
    chart = page.get_by_role("region", name="Requests by day and key")
    with page.expect_request("**/corral/v1/usage?by=day,key&since=6d"):
        page.get_by_role("button", name="7 days").click()
    expect(chart.locator(".column")).to_have_count(7)
    rows = page.get_by_role("table", name="Tokens and time").get_by_role("row")
    internal = rows.get_by_role("button", name="Internal work")
    for by in ("Key", "Day"):
        page.get_by_role("combobox", name="By").select_option(by)
        expect(rows.last).to_contain_text("Internal work")
        internal.click()
        expect(rows.last).not_to_contain_text("Internal work")
        expect(rows.locator(".nested").get_by_text("Warming")).to_have_count(1)
        internal.click()
    page.get_by_role("button", name="All months").click()
    expect(page.get_by_role("combobox", name="By")).to_have_value("key,model")
    expect(page.get_by_role("region", name="Requests by month and key")).to_be_visible()


def test_a_saved_conversation_is_shown_and_forgotten(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page = dashboard.page
    said = [{"role": "user", "content": "the river and the garden and the window " * 20}]
    body = {"model": "tiny", "messages": said, "max_tokens": 4}
    request = urllib.request.Request(f"{daemon.url}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        response.read()
    daemon.ok("slots", "save")
    dashboard.show("caches")
    rows = page.get_by_role("table", name="On disk").get_by_role("row")
    saved = rows.filter(has_text=re.compile(r"tiny.*conversation.* [KM]iB")).first
    name = saved.locator("code").get_attribute("title") or ""
    assert name in {slot["name"] for slot in daemon.data("slots", "list")}
    row = dashboard.row("On disk", name[:8])
    row.get_by_role("button", name=f"Forget {name[:8]}").click()
    dialog = page.get_by_role("dialog", name=f"Forget {name[:8]}")
    assert dashboard.violations() == []
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)
    row.get_by_role("button").click()
    dialog.get_by_role("button", name="Forget").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("status")).to_contain_text(re.compile(r"Deleted: \d file"))
    expect(row).to_have_count(0)
    assert name not in {slot["name"] for slot in daemon.data("slots", "list")}


def keys_used(daemon: CorralCli) -> set[str]:
    return {row["key"] for row in daemon.data("usage", "--by", "key")}


def test_a_chat_is_stopped(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.show("chat/slow")
    page.get_by_label("Message").fill("a line\n" * 80 + "hello")  # more than fits
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="You").last).to_contain_text("hello\nthere")
    log = page.get_by_role("log")
    expect(page.locator(".message.assistant .text").last).not_to_be_empty()
    until(lambda: bottom_px(log) < 40)  # the end is followed
    log.evaluate("it => { it.scrollTop = 0; }")
    before = height_px(log)
    until(lambda: height_px(log) > before)
    assert log.evaluate("it => it.scrollTop") == 0  # unless its reader has scrolled up
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant").last).to_contain_text("(stopped)")
    dashboard.show("requests")
    expect(page.get_by_role("table", name="In flight")).to_have_count(0)


SAMPLING = {"Temperature": "0.5", "Top-p": "0.9", "Top-k": "20", "Min-p": "0.1", "Seed": "7"}
_CHOOSE = """(select, value) => {
  select.value = value;
  select.dispatchEvent(new Event("change", { bubbles: true }));
}"""


def test_chats_are_kept_retried_edited_and_deleted(dashboard: Dashboard) -> None:
    page = dashboard.page
    explain, retry = (
        page.get_by_role("link", name="Explain"),
        page.get_by_role("button", name="Retry"),
    )
    dashboard.show("chat/tiny")
    page.get_by_role("button", name="New chat").click()
    settings = page.locator("summary", has_text="Settings")
    settings.click()
    for label, value in SAMPLING.items():
        page.get_by_label(label).fill(value)
    for label, value in (("System prompt", "be brief"), ("Most tokens", "3")):
        page.get_by_label(label).fill(value)
        for model in ("slow", "tiny"):  # the page is drawn again while its user types
            page.get_by_label("Model").evaluate(_CHOOSE, model)
            expect(page.get_by_role("log")).to_contain_text(f"Ask {model} something")
        page.get_by_label(label).press("Tab")
    with page.expect_request("**/corral/v1/chat/completions") as sent:
        page.get_by_label("Message", exact=True).fill("first")
        expect(page.get_by_label("Most tokens")).to_be_hidden()  # closed without the focus
        page.get_by_role("button", name="Send").click()
    body = sent.value.post_data_json
    assert body
    assert body.pop("messages")[0] == {"role": "system", "content": "be brief"}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 7}
    assert body == {"model": "tiny", "stream": True, "max_tokens": 3, **sampling}
    before = explain.get_attribute("href")
    assert before
    assert dashboard.violations() == []
    retry.click()
    expect(explain).not_to_have_attribute("href", before)
    edit = page.get_by_role("button", name="Edit")
    edit.click()
    page.get_by_label("Edited message").fill("never sent")
    page.get_by_role("button", name="Cancel").click()
    edit.click()
    expect(page.get_by_label("Edited message")).to_have_value("first")
    page.get_by_label("Edited message").fill("second")
    page.get_by_label("Edited message").press("Enter")
    expect(retry).to_be_visible()
    settings.click()
    for label in ("System prompt", "Most tokens", *SAMPLING):
        page.get_by_label(label).fill("")
        page.get_by_label(label).press("Tab")
    expect(settings).to_have_text("Settings")  # and not how many are set
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    conversations = page.get_by_role("navigation", name="Conversations")
    conversations.get_by_role("button", name="first", exact=True).click()
    expect(page.get_by_role("article", name="You")).to_have_text("secondEdit")
    conversations.get_by_role("button", name="Delete first").click()
    expect(conversations.get_by_role("button", name="first")).to_have_count(0)
    assert "first" not in {chat["title"] for chat in kept_chats(page)}
    expect(page.get_by_role("article")).to_have_count(0)


_ANSWER = (
    'data: {"choices": [{"delta": {"reasoning_content": "short"}}]}\n\n'
    'data: {"choices": [{"delta": {"content": "```sh\\ncorral ui\\n```"}}]}\n\n'
)


def test_images_are_sent_and_a_failed_message_is_sent_again(dashboard: Dashboard) -> None:
    page, asked = dashboard.page, "**/corral/v1/chat/completions"
    picture = tiny_clip.picture((255, 0, 0))
    content = b64decode(picture.partition(",")[2])
    file = FilePayload(name="a.png", mimeType="image/png", buffer=content)
    dashboard.show("chat/tiny")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Image", exact=True)).to_have_count(0)
    page.get_by_label("Model").select_option("slow")
    page.get_by_label("Image", exact=True).set_input_files([file, file])
    page.get_by_role("button", name="Remove image 2").click()
    expect(page.get_by_role("img", name="Image")).to_have_count(1)
    page.get_by_label("Message", exact=True).fill("what is it?")
    page.route(asked, lambda route: route.fulfill(status=503, json={"error": {"message": "full"}}))
    with page.expect_request(asked) as sent:
        page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("log").get_by_role("alert")).to_contain_text("full")
    body = sent.value.post_data_json
    assert body
    parts = body["messages"][0]["content"]
    assert parts[1:] == [{"type": "image_url", "image_url": {"url": picture}}]
    page.unroute(asked)
    page.route(asked, lambda route: route.fulfill(body=_ANSWER, content_type="text/event-stream"))
    with page.expect_request(asked) as again:
        page.get_by_role("button", name="Try again").click()
    assert again.value.post_data_json == body
    answer = page.get_by_role("article", name="Answer")
    answer.get_by_text("Reasoning").click()
    expect(answer.get_by_text("short")).to_be_visible()
    answer.get_by_role("button", name="Copy code").click()
    expect(answer.get_by_role("button", name="Copy code")).to_have_text("Copied")
    assert copied(page) == "corral ui"
    expect(page.get_by_role("alert").filter(has_text="full")).to_have_count(0)
    page.unroute(asked)


_MARKDOWN = """async text => {
  const { Markdown } = await import("/corral/page/parts/markdown.js");
  const { html, render } = await import("/corral/page/html.js");
  const place = document.createElement("div");
  render(html`<${Markdown} text=${text} />`, place);
  return place.firstChild.innerHTML;
}"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a **b** `c`", "<p>a <strong>b</strong> <code>c</code></p>"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("![x](https://a.example/b.png)", "<p>![x](https://a.example/b.png)</p>"),
        ("[x](javascript:y)", "<p>x</p>"),
        (
            "[x](https://a.example)",
            '<p><a href="https://a.example" target="_blank" rel="noopener noreferrer">x</a></p>',
        ),
        ("2. a\n3. b", '<ol start="2"><li>a</li><li>b</li></ol>'),
    ],
)
def test_markdown_of_models_is_safe(dashboard: Dashboard, text: str, shown: str) -> None:
    assert dashboard.page.evaluate(_MARKDOWN, text) == shown


def test_a_request_is_shown_and_cancelled(dashboard: Dashboard, daemon: CorralCli) -> None:
    page = dashboard.page
    with begin_stream(daemon, 30_000, "slow") as stream:
        slot = dashboard.model("slow").get_by_role("listitem")
        expect(slot).to_contain_text("decode")
        dashboard.show("requests")
        row = dashboard.row("In flight", "slow")
        expect(row).to_contain_text("decode")
        row.get_by_role("button", name="Cancel").click()
        assert "request_cancelled" in rest_of(stream)
    expect(page.get_by_role("table", name="In flight")).to_have_count(0)


def test_requests_are_filtered_and_explained_beside_the_list(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page = dashboard.page
    with begin_stream(daemon, 4, "tiny") as stream:
        rest_of(stream)
    dashboard.show("chat/tiny")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("log")).to_contain_text("tokens/s")
    dashboard.show("requests")
    rows = page.get_by_role("table", name="Finished").get_by_role("row")
    answered = rows.filter(has=page.get_by_role("cell", name=re.compile("^200")))
    refused = rows.filter(has=page.get_by_role("cell", name=re.compile("^400")))
    expect(answered.first).to_be_visible()
    before = refused.count()
    request = urllib.request.Request(f"{daemon.url}/v1/chat/completions", b'{"model": "tiny"}')
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request)
    expect(refused).to_have_count(before + 1)
    expect(answered.first).to_be_visible()
    expect(rows.get_by_role("img").first).to_have_attribute("aria-label", re.compile(r"\d ms"))
    page.get_by_label("Result").select_option("failed")
    expect(answered).to_have_count(0)
    failed = refused.first
    expect(failed).to_contain_text(re.compile("400 [a-z]+"))
    failed.get_by_role("link").click()
    drawer = page.get_by_role("complementary")
    expect(drawer.locator("li").first).to_contain_text("400")
    expect(failed).to_have_attribute("aria-current", "true")
    page.get_by_label("Model").select_option("broken")
    expect(rows.filter(has_text="tiny")).to_have_count(0)
    drawer.get_by_role("button", name="Close").click()
    expect(drawer).to_have_count(0)
    for label in ("Model", "Result"):
        page.get_by_label(label).select_option("")
    page.get_by_label("Client").select_option("(dashboard)")
    expect(answered.filter(has_text="(dashboard)").first).to_be_visible()
    expect(answered.filter(has_not_text="(dashboard)")).to_have_count(0)
    page.get_by_label("Client").select_option("")
    with page.expect_request("**/corral/v1/requests?**since=*") as asked:
        page.get_by_label("Ended in").select_option("15 min")
    (since,) = parse_qs(urlsplit(asked.value.url).query)["since"]
    age_s = page.evaluate("since => Date.now() / 1000 - since", int(since))
    assert 900 <= age_s < 900 + PATIENCE_S
    expect(answered.filter(has_not_text="(dashboard)").first).to_be_visible()


def test_a_crash_is_shown_live(dashboard: Dashboard, daemon: CorralCli) -> None:
    page = dashboard.page
    begin_stream(daemon, 1).close()
    before = daemon.instances()["tiny.0"]
    restarts, pid = before.restarts, before.pid
    assert pid, before.state
    os.kill(pid, signal.SIGSEGV)
    expect(dashboard.model("tiny")).to_contain_text(f"{restarts + 1} restart")
    expect(dashboard.model("tiny")).to_contain_text("up ")
    dashboard.show("events")
    exits = dashboard.row("Events, newest first", "instance.exited").first
    expect(exits).to_contain_text("signal 11")
    exits.locator("summary").click()
    expect(exits.get_by_role("region", name="JSON")).to_contain_text('"signal": 11')
    expect(page.locator("code", has_text="request.")).to_have_count(0)
    page.get_by_label("Requests").check()
    expect(page.locator("code", has_text="request.finished").first).to_be_visible()
    page.get_by_label("Model").select_option("broken")
    expect(exits).to_have_count(0)
    dashboard.show("logs")
    started, exits = (
        dashboard.row("Log of the daemon", name) for name in ("daemon.started", "instance.exited")
    )
    ended = dashboard.row("Log of the daemon", "request.finished")
    expect(started).to_be_visible()
    page.get_by_label("Filter").fill("Instance.exited")
    expect(started).to_have_count(0)
    expect(exits.first).to_be_visible()
    page.get_by_label("Filter").fill("")
    expect(ended).to_have_count(0)
    page.get_by_label("Requests").check()
    expect(ended.first).to_be_visible()
    before_count = ended.count()
    with begin_stream(daemon, 1) as stream:
        rest_of(stream)
    until(lambda: ended.count() > before_count)
    page.get_by_label("Level").select_option("Warnings and errors")
    expect(started).to_have_count(0)
    exits.first.locator("summary").click()
    expect(exits.first.get_by_role("region", name="JSON")).to_contain_text('"signal": 11')
    page.get_by_label("Model").select_option("broken")
    expect(exits).to_have_count(0)


def test_the_log_of_an_instance_is_chosen_filtered_and_followed(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page, filter_ = dashboard.page, dashboard.page.get_by_label("Filter")
    for _ in range(4):  # each adds ten lines to the log
        with begin_stream(daemon, 4, "tiny") as stream:
            rest_of(stream)
    dashboard.model("tiny").get_by_role("link", name="tiny.0").click()
    log = page.get_by_role("log", name="Log of tiny.0")
    expect(log).to_contain_text("[llama-corral: run 1")
    page.get_by_label("Source").select_option("daemon")
    expect(dashboard.row("Log of the daemon", "daemon.started")).to_be_visible()
    page.get_by_label("Source").select_option("tiny.0")
    lines = log.locator("div")
    expect(lines.nth(50)).to_be_attached()
    expect(lines.filter(has_text="daemon.started")).to_have_count(0)
    assert bottom_px(log) < 2
    page.get_by_label("Follow").uncheck()
    log.evaluate("region => { region.scrollTop = 0; }")
    filter_.fill("LLAMA-CORRAL: run")
    expect(lines.filter(has_not_text="llama-corral: run")).to_have_count(0)
    expect(lines.first).to_have_class("level own")
    filter_.fill("")
    expect(lines.nth(50)).to_be_attached()
    assert bottom_px(log) > 2
    page.get_by_label("Follow").check()
    until(lambda: bottom_px(log) < 2)


def height_px(region: Locator) -> float:
    px: float = region.evaluate("it => it.scrollHeight")
    return px


def bottom_px(region: Locator) -> float:
    """Return how far a region's end is below what it shows."""
    px: float = region.evaluate("it => it.scrollHeight - it.scrollTop - it.clientHeight")
    return px


# Without the wait for the next try, which would come before a click is known to have failed.
_NO_WAITS = """() => {
  const wait = window.setTimeout;
  window.setTimeout = (act, ms) => (ms < 1000 ? wait(act, ms) : 0);
}"""


def test_a_lost_connection_is_told_and_comes_back(dashboard: Dashboard) -> None:
    page, banner = dashboard.page, "The connection to the daemon is lost."
    is_lost = True
    # Not removed before it has handled all requests: playwright would handle some twice.
    page.route("**/corral/v1/**", lambda route: route.abort() if is_lost else route.fallback())
    dashboard.show("logs")
    expect(page.get_by_role("alert").filter(has_text=banner)).to_be_visible()
    is_lost = False
    expect(page.get_by_text(banner)).to_have_count(0)
    page.evaluate(_NO_WAITS)
    is_lost = True
    dashboard.show("overview")  # which opens the connection again, without a log
    expect(page.get_by_role("alert").filter(has_text=banner)).to_be_visible()
    is_lost = False
    page.get_by_role("button", name="Try now").click()
    expect(page.get_by_text(banner)).to_have_count(0)
    page.unroute_all(behavior="wait")
    page.reload()
    page.get_by_role("heading", name="Overview").wait_for()


def test_settings_of_clients_are_of_the_chosen_model_and_copied(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.show("clients")
    client = page.locator("details").filter(has_text="Claude Code")
    client.locator("summary").click()
    settings = client.get_by_role("region").first
    for model in ("slow", "tiny"):
        page.get_by_role("combobox", name="Model").select_option(model)
        expect(settings).to_contain_text(model)
    command = client.get_by_role("button", name="Copy Write these settings")
    command.click()
    expect(command).to_have_text("Copied")
    assert copied(page).startswith("corral connect claude")


def test_a_new_tab_is_signed_in_by_an_open_one(browser: Browser, daemon: CorralCli) -> None:
    dashboard = Dashboard(browser.new_context(), daemon.url)
    dashboard.sign_in(daemon.data("ui", "--no-browser")["url"])
    (cookie,) = dashboard.context.cookies()
    tab = dashboard.context.new_page()
    tab.goto(f"{daemon.url}/corral")
    expect(tab.get_by_role("heading", name="Overview")).to_be_visible()
    token = tab.evaluate("sessionStorage.getItem('corral.session')")
    assert token == dashboard.page.evaluate("sessionStorage.getItem('corral.session')")
    assert token not in tab.url
    assert dashboard.context.cookies() == [cookie]
    assert token not in cookie["value"]
    other = browser.new_context().new_page()
    other.goto(f"{daemon.url}/corral")
    expect(other.get_by_text("This tab is not signed in.")).to_be_visible()
    dashboard.page.get_by_role("button", name="Sign out").click()
    for page in (dashboard.page, tab):
        expect(page.get_by_text("This tab is not signed in.")).to_be_visible()
    late = dashboard.context.new_page()
    late.goto(f"{daemon.url}/corral")
    expect(late.get_by_text("This tab is not signed in.")).to_be_visible()
    assert late.evaluate("sessionStorage.getItem('corral.session')") is None
    assert dashboard.complaints == []
    for context in (dashboard.context, other.context):
        context.close()


def test_strangers_are_refused(browser: Browser, daemon: CorralCli) -> None:
    link = daemon.data("ui", "--no-browser")["url"]
    dashboard = Dashboard(browser.new_context(), daemon.url)
    dashboard.sign_in(link)
    old = Dashboard(browser.new_context(), daemon.url)
    old.page.goto(link)
    expect(old.page.get_by_role("alert")).to_contain_text("corral ui")
    expect(old.page.get_by_label("API key with the admin right")).to_be_visible()
    (cookie,) = dashboard.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    session = f"{cookie['name']}={cookie['value']}"
    dashboard.page.reload()
    dashboard.page.get_by_role("heading", name="Overview").wait_for()
    assert post(daemon, session) == 401
    page_token = dashboard.page.evaluate("sessionStorage.getItem('corral.session')")
    token = {"X-Corral-Session": page_token}
    assert post(daemon, session, **token) == 200
    assert post(daemon, session, **token, Origin="https://example.com") == 403
    assert post(daemon, session, **token, Host="example.com") == 403
    assert post(daemon, "") == 401
    for case in (dashboard, old):
        case.context.close()


def post(daemon: CorralCli, cookie: str, **headers: str) -> int:
    """Load a model as the page does; return the status."""
    request = urllib.request.Request(
        f"{daemon.url}/corral/v1/models/tiny/load",
        data=json.dumps({}).encode(),
        headers={
            "Content-Type": "application/json",
            "Cookie": cookie,
            "Origin": daemon.url,
            "Sec-Fetch-Site": "same-origin",
            **headers,
        },
    )
    try:
        with urllib.request.urlopen(request) as response:
            status: int = response.status
    except urllib.error.HTTPError as error:
        return error.code
    return status


_MODULES = """async () => {
  // The longest wait in ms until a store's listeners draw a snapshot, then a patch.
  async function redrawOf(store) {
    const state = { models: { m: { state: "loading" } } };
    const history = { at_s: 1, interval_s: 1, tokens_per_second: [], prompt_tokens_per_second: [],
      queued: [], first_token_s: [] };
    const [wait, waits] = [window.setTimeout, []];
    window.setTimeout = (act, ms) => wait(act, waits.push(ms) && 0);
    const drawn = () => new Promise((resolve) => { store._draws = resolve; });
    store.subscribe(() => store._draws());
    let next = drawn();
    store.takeSnapshot({ now_s: 1, state, history });
    await next;
    next = drawn();
    store.takePatch({ models: { m: { state: "failed" } } });
    await next;
    window.setTimeout = wait;
    return waits.length > 1 ? Math.max(...waits) : null;
  }
  const { mergePatch } = await import("/corral/page/live/merge_patch.js");
  const { Rates } = await import("/corral/page/live/rates.js");
  const { changes } = await import("/corral/page/live/changes.js");
  const { bytes, duration, seconds } = await import("/corral/page/format.js");
  const { requestMessage } = await import("/corral/page/chat/chat.js");
  const { waiting } = await import("/corral/page/views/chat.js");
  const { parse } = await import("/corral/page/live/log_lines.js");
  const { LiveStore } = await import("/corral/page/live/store.js");
  const store = new LiveStore();
  const names = ["node.up", ...Array(600).fill("request.finished")];
  names.forEach((name, i) => store.takeEvent({ seq: i + 1, at: "", name }));
  const wait = (r, m = {}) => waiting({ requests: { r }, models: { m } }, "r", "m");
  const kept = { a: 1 };
  const patched = mergePatch(
    { kept, b: { c: 1, d: 2 }, e: [1] },
    { b: { c: null }, e: [2], f: { g: null } },
  );
  const rates = new Rates({ at_s: 9, interval_s: 1, tokens_per_second: [1, 2],
    prompt_tokens_per_second: [0, 0], queued: [0, 0], first_token_s: [0.5, null] });
  rates.take({ at_s: 10, tokens_per_second: 3, prompt_tokens_per_second: 0, queued: 0 });
  rates.take({ at_s: 10, tokens_per_second: 4, prompt_tokens_per_second: 0, queued: 0 });
  const drawn_ms = await redrawOf(new LiveStore());
  return {
    isDrawnSoon: drawn_ms > 0 && drawn_ms <= 1000,
    patched, isKept: patched.kept === kept,
    samples: rates.times,
    first: rates.columns.first_token_s,
    now: rates.columns.tokens_per_second.at(-1),
    changes: changes(
      { models: { m: { state: "loading" } } },
      { models: { m: { state: "failed", cause: "x" } } },
    ),
    bytes: [0, 2048, 5.4e9, null].map(bytes),
    waits: [wait({ phase: "queued", position: 2 }),
      wait({ phase: "loading" }, { load_progress: 0.4 }),
      wait({ phase: "prefill", prompt_tokens: 10, prompt_tokens_done: 6 })],
    message: requestMessage({ role: "user", content: "x", images: ["data:,"] }).content,
    levels: ["0.06.787.236 W srv x", '{"level":"error","event":"a.b"}', "{cut"]
      .map((text) => parse(text, 1).level ?? null),
    events: [store.events.length, store.events[0].name, store.lastRequest],
    times: [duration(75), duration(90000), seconds(0.25)],
  };
}"""


def test_modules_compute_their_results(dashboard: Dashboard) -> None:
    assert dashboard.page.evaluate(_MODULES) == {
        "isDrawnSoon": True,
        "patched": {"kept": {"a": 1}, "b": {"d": 2}, "e": [2], "f": {}},
        "isKept": True,
        "samples": [8, 9, 10],
        "first": [0.5, None, None],
        "now": 3,
        "changes": ["Model m is failed: x"],
        "bytes": ["0 B", "2.0 KiB", "5.0 GiB", "–"],
        "waits": ["queued, place 2", "loading m, 40 %", "reading the prompt, 60 %"],
        "message": [
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": {"url": "data:,"}},
        ],
        "levels": ["warning", "error", None],
        "events": [501, "node.up", 601],
        "times": ["1 min 15 s", "1 d 1 h", "250 ms"],
    }
