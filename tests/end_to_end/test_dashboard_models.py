"""The dashboard's view of the models on this machine, in Chromium, against the real engine."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from support import tiny_gguf
from support.corral_cli import CorralCli, until
from support.dashboard_page import Dashboard
from support.fork_server import ForkServer
from support.hub import FakeHub, Refusal

from supervisor.daemon.control_messages import ModelStatus

_REPO = "org/small-GGUF"
_SETTINGS = """
# kept
[models.tiny]
path = "{tiny}"
flags = {{ ctx-size = 512, parallel = 1, threads = 1 }}
"""


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[FakeHub]:
    with FakeHub({_REPO: {"small-Q8_0.gguf": tiny_model.read_bytes()}}).running() as hub:
        yield hub


@pytest.fixture(scope="module")
def daemon(
    browser: Browser,
    hub: FakeHub,
    tmp_path_factory: pytest.TempPathFactory,
    fork_server: ForkServer,
    tiny_model: Path,
) -> Iterator[CorralCli]:
    corral = CorralCli(tmp_path_factory.mktemp("c"), fork_server)
    corral.hide_stored_models()
    corral.env |= {"HF_ENDPOINT": hub.url}
    models = corral.root / "data/models"
    models.mkdir(parents=True, mode=0o700)
    stored = tiny_gguf.make(models / "stored.gguf")
    wheels = models / "wheels/smollm2"
    wheels.mkdir(parents=True)
    (wheels / "damaged.whl").write_bytes(b"no archive")
    (models / "cut.gguf").write_bytes(stored.read_bytes()[:-1000])
    corral.configure(_SETTINGS.format(tiny=tiny_model))
    corral.ok("start")
    yield corral
    corral.end()


@pytest.fixture(scope="module")
def dashboard(browser: Browser, daemon: CorralCli) -> Iterator[Dashboard]:
    dashboard = Dashboard(browser.new_context(), daemon.url)
    dashboard.sign_in(daemon.data("ui", "--no-browser")["url"])
    yield dashboard
    assert dashboard.foreign == []
    assert dashboard.complaints == []


_TABLE = "On this machine"


def _model(daemon: CorralCli, name: str) -> ModelStatus:
    return next(model for model in daemon.status().models if model.name == name)


def test_each_model_shows_where_it_is_and_whether_it_fits(dashboard: Dashboard) -> None:
    dashboard.show("models")
    expect(dashboard.row(_TABLE, "tiny")).to_contain_text("loaded")
    expect(dashboard.row(_TABLE, "tiny")).to_contain_text(re.compile(r"fits needs .* of .* main"))
    expect(dashboard.row(_TABLE, "stored")).to_contain_text("llama-corral")
    expect(dashboard.row(_TABLE, "cut")).to_contain_text(re.compile("cannot be served .*truncated"))
    dashboard.page.get_by_label("Filter").fill("STORED")
    expect(dashboard.row(_TABLE, "tiny")).to_have_count(0)
    expect(dashboard.row(_TABLE, "stored")).to_be_visible()
    dashboard.page.get_by_label("Filter").fill("")


def test_a_model_that_cannot_be_served_is_not_started(dashboard: Dashboard) -> None:
    dashboard.show("models/cut")
    drawer = dashboard.page.get_by_role("complementary", name="cut")
    expect(drawer).to_contain_text("truncated")
    expect(drawer.get_by_role("button", name="Start")).to_have_count(0)
    drawer.get_by_role("button", name="Close").click()
    expect(drawer).to_have_count(0)


def test_a_stored_model_is_planned_and_started_with_options(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page = dashboard.page
    dashboard.show("models")
    dashboard.row(_TABLE, "stored").get_by_role("link").click()
    drawer = page.get_by_role("complementary", name="stored")
    command = drawer.get_by_role("region", name="Command")
    expect(command).to_contain_text("stored.gguf")
    assert dashboard.violations() == []
    drawer.get_by_label("Context").fill("3072")
    drawer.get_by_label("Slots").fill("3")
    drawer.get_by_role("combobox", name="Profile").select_option("low-latency")
    expect(drawer).to_contain_text("3 slots, 3,072 tokens of context in all")
    expect(command).to_contain_text("--ctx-size 3072")
    expect(drawer.get_by_role("region", name="Flags")).to_contain_text("model stored")
    drawer.get_by_role("button", name="Start").click()
    expect(dashboard.row(_TABLE, "stored")).to_contain_text("loaded")
    expect(dashboard.row(_TABLE, "stored")).to_contain_text("corral.toml")
    model = _model(daemon, "stored")
    assert (model.slots, model.ctx_size, model.profile) == (3, 3072, "low-latency")


def test_a_model_is_saved_in_the_settings_file(dashboard: Dashboard, daemon: CorralCli) -> None:
    dashboard.show("models/stored")
    drawer = dashboard.page.get_by_role("complementary", name="stored")
    drawer.get_by_label("Context").fill("1024")
    drawer.get_by_label("Slots").fill("2")
    drawer.get_by_role("combobox", name="Profile").select_option("high-throughput")
    drawer.get_by_label("Save in corral.toml").check()
    drawer.get_by_role("button", name="Restart with these").click()
    expect(dashboard.page.locator(".notice")).to_contain_text("stored is being started")
    text = (daemon.root / "config" / "corral.toml").read_text("utf-8")
    assert "# kept\n" in text
    path = str(daemon.root / "data/models/stored.gguf")
    flags = {"ctx-size": 1024, "parallel": 2}
    saved = {"path": path, "profile": "high-throughput", "flags": flags}
    assert tomllib.loads(text)["models"]["stored"] == saved


def test_the_settings_file_is_edited_with_problems_at_their_lines(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    page, file = dashboard.page, daemon.root / "config" / "corral.toml"
    file.chmod(0o640)
    dashboard.show("models")
    page.get_by_role("button", name="Edit corral.toml").click()
    text, editor = page.get_by_label("Text of corral.toml"), page.locator(".settings-editor")
    save = editor.get_by_role("button", name="Save and apply")
    before = file.read_text("utf-8")
    expect(text).to_have_value(before)
    editor.get_by_role("button", name="Close").click()
    expect(editor).to_have_count(0)
    page.get_by_role("button", name="Edit corral.toml").click()
    lines = before.count("\n")

    text.fill(f"{before}\n[models.wrong\n")
    expect(editor).to_contain_text("Expected ']'")
    expect(editor.locator(".gutter .bad")).to_have_text(str(lines + 2))
    text.fill(f"{before}[hooks]\nwrong = 1\n[models.other]\npath = 'none.gguf'\ntl_s = 5\n")
    problems = editor.locator(".bad-text")
    expect(problems.filter(has_text="did you mean ttl_s?")).to_contain_text(f"Line {lines + 5}")
    expect(problems.filter(has_text="hooks.wrong is unknown")).to_contain_text(f"Line {lines + 2}")
    expect(save).to_be_disabled()
    assert dashboard.violations() == []
    editor.get_by_role("button", name=f"Line {lines + 5}").click()
    selected = "area => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert text.evaluate(selected) == "tl_s = 5"

    changed = before.replace("ctx-size = 512", "ctx-size = 640")
    text.fill(changed)
    expect(editor).to_contain_text("Restarts tiny.0")
    file.write_text(before + "# by another editor\n", "utf-8")
    save.click()
    expect(page.locator(".notice")).to_contain_text("was changed meanwhile")
    page.get_by_role("button", name="Dismiss").click()  # a failure stays until then
    expect(page.locator(".notice")).to_have_count(0)
    file.write_text(before, "utf-8")
    save.click()
    expect(page.locator(".notice")).to_contain_text("corral.toml is saved, and is being applied")
    expect(editor).to_have_count(0)
    assert file.read_text("utf-8") == changed
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    until(lambda: _model(daemon, "tiny").ctx_size == 640)
    until(lambda: len(_model(daemon, "tiny").instances) == 1)


def test_a_running_model_restarts_with_other_options(
    dashboard: Dashboard, daemon: CorralCli
) -> None:
    (before,) = _model(daemon, "tiny").instances
    dashboard.show("models/tiny")
    drawer = dashboard.page.get_by_role("complementary", name="tiny")
    restart = drawer.get_by_role("button", name="Restart with these")
    expect(restart).to_be_disabled()
    drawer.get_by_label("Context").fill("768")
    expect(drawer).to_contain_text("768 tokens")
    restart.click()
    expect(dashboard.page.locator(".notice")).to_contain_text("tiny is being started")
    model = _model(daemon, "tiny")
    assert (model.slots, model.ctx_size) == (1, 768)
    assert before.pid not in {found.pid for found in model.instances if not found.retiring}


_REFUSED = """async ([path, body]) => {
  const { post } = await import("/corral/page/api.js");
  return post(path, body).then(() => 200, error => error.status);
}"""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("%2Fetc%2Fpasswd/start", {}, 404),
        ("..%2F..%2Fstored.gguf/plan", {}, 404),
        ("tiny/start", {"profile": "../secret"}, 400),
        ("tiny/plan", {"profile": "none"}, 400),
        ("cut/start", {}, 409),
        ("cut/plan", {}, 409),
    ],
)
def test_names_from_outside_never_become_paths(
    dashboard: Dashboard, path: str, body: dict[str, str], status: int
) -> None:
    found = dashboard.page.evaluate(_REFUSED, [f"/corral/v1/models/{path}", body])
    assert found == status


def test_profiles_are_compared_with_progress_and_cancel(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.show("models/tiny")
    bench = page.get_by_role("region", name="Comparison of profiles")
    bench.get_by_label("with").select_option("low-memory")
    bench.get_by_label("Minutes").fill("240")
    bench.get_by_label("Although").check()
    bench.get_by_role("button", name="Measure").click()
    expect(bench.get_by_role("progressbar")).to_be_visible()
    assert dashboard.violations() == []
    bench.get_by_role("button", name="Cancel").click()
    expect(bench).to_contain_text("cancelled")
    bench.get_by_label("Compare").select_option("base")
    bench.get_by_label("Workload").select_option("generation")
    bench.get_by_label("Minutes").fill("0.1")
    with page.expect_request("**/corral/v1/bench") as sent:
        bench.get_by_role("button", name="Measure").click()
    measured = {"profiles": ["base", "low-memory"], "workload": "generation", "minutes": 0.1}
    assert sent.value.post_data_json == {"model": "tiny", **measured, "force": True}
    stream = bench.locator("dl > div").filter(has_text="generation: one stream")
    expect(stream).to_contain_text(re.compile("base .* tokens/s.*low-memory .* tokens/s"))
    with page.expect_download() as saved:
        bench.get_by_role("button", name="Save the report").click()
    assert "<title>" in saved.value.path().read_text("utf-8")


def test_options_that_never_fit_are_refused_with_the_reason(dashboard: Dashboard) -> None:
    dashboard.show("models/tiny")
    page, drawer = dashboard.page, dashboard.page.get_by_role("complementary", name="tiny")
    drawer.get_by_label("Context").fill("2000000000")
    expect(drawer).to_contain_text("does not fit")
    drawer.get_by_role("button", name="Restart with these").click()
    expect(page.locator(".notice")).to_contain_text("can never fit")


def test_a_model_is_found_on_the_hub_and_its_download_cancelled_and_continued(
    dashboard: Dashboard, hub: FakeHub
) -> None:
    page, name = dashboard.page, f"{_REPO}:Q8_0"
    dashboard.show("models")
    page.get_by_label("Search Hugging Face").fill("small")
    page.get_by_label("Search Hugging Face").press("Enter")
    found = dashboard.row("On Hugging Face", _REPO)
    found.get_by_role("button", name=f"Plan {_REPO}").click()
    expect(found).to_contain_text(re.compile(f"fits {name}: .*needs .* of .* main memory"))
    found.get_by_label("Quantisation").select_option("Q8_0")
    expect(found).to_contain_text(re.compile(f"fits {name}: as named, needs"))
    hub.gate.clear()
    found.get_by_role("button", name=f"Download {name}").click()
    row = dashboard.row("Downloads", name)
    expect(row.get_by_role("progressbar")).to_be_visible()
    assert dashboard.violations() == []
    row.get_by_role("button", name=f"Cancel {name}").click()
    expect(row).to_contain_text("cancelled")
    hub.gate.set()
    found.get_by_role("button", name=f"Download {name}").click()
    expect(row).to_contain_text("done")
    expect(dashboard.row(_TABLE, name)).to_contain_text("Hugging Face cache")
    expect(dashboard.row(_TABLE, name)).to_contain_text("fits")


def test_a_download_that_fails_shows_why(dashboard: Dashboard, hub: FakeHub) -> None:
    page = dashboard.page
    dashboard.show("overview")
    dashboard.show("models")
    page.get_by_label("Search Hugging Face").fill("small")
    page.get_by_role("button", name="Search").click()
    found = dashboard.row("On Hugging Face", _REPO)
    expect(found).to_be_visible()
    hub.api_refusals = [Refusal(403, {"x-error-code": "GatedRepo"})]
    found.get_by_role("button", name=f"Download {_REPO}").click()
    expect(dashboard.row("Downloads", "gated")).to_contain_text("failed")


def test_a_pinned_model_is_downloaded_by_its_name(dashboard: Dashboard) -> None:
    dashboard.show("models")
    pinned = dashboard.row("Models to begin with", "smollm2")
    expect(pinned).to_contain_text("93.8 MiB")
    pinned.get_by_role("button", name="Download smollm2").click()
    expect(dashboard.row("Downloads", "smollm2")).to_contain_text("failed damaged.whl is damaged")


@pytest.mark.parametrize(
    ("path", "name", "status"),
    [
        ("downloads", "../../etc/passwd", 501),
        ("downloads", "https://files.example/a.gguf", 501),
        ("downloads", "-x/y", 501),
        ("downloads/cancel", "org/none", 404),
    ],
)
def test_only_names_of_the_hub_are_downloaded(
    dashboard: Dashboard, path: str, name: str, status: int
) -> None:
    found = dashboard.page.evaluate(_REFUSED, [f"/corral/v1/{path}", {"name": name}])
    assert found == status
