from pathlib import Path

import pytest
from support import tiny_gguf
from support.stores_layout import Ollama

from supervisor.cli.targets import choose, name_of
from supervisor.daemon.control_messages import DaemonStatus, read
from supervisor.daemon.model_commands import resolve_running
from supervisor.errors import ModelInvalid, NoSuchModel, SettingsInvalid
from supervisor.fleet.planner import LaunchPlanner
from supervisor.system.paths import Directories


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directories:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return Directories(*(tmp_path / name for name in ("config", "data", "cache", "log", "run")))


def configure(*names: str) -> None:
    text = "".join(f'[models.{name}]\npath = "{name}.gguf"\n' for name in names)
    Path("corral.toml").write_text(text, "utf-8")


def test_no_words_select_all_configured_models(where: Directories) -> None:
    configure("chat", "code")
    choice = choose([], None, where)
    assert choice.names == ("chat", "code")
    assert choice.added == ()


def test_a_path_is_a_model_named_by_its_file(where: Directories, tmp_path: Path) -> None:
    configure("chat")
    choice = choose(["deep/Qwen3 8B (q4).gguf", "chat"], None, where)
    assert choice.names == ("Qwen3-8B-q4-", "chat")
    assert choice.added == (str(tmp_path / "deep/Qwen3 8B (q4).gguf"),)
    path = choice.loaded.settings.models["Qwen3-8B-q4-"].path
    assert path == tmp_path / "deep/Qwen3 8B (q4).gguf"


def test_a_pinned_model_is_known_once_it_was_fetched(where: Directories) -> None:
    with pytest.raises(ModelInvalid) as caught:
        choose(["smollm2"], None, where)
    assert caught.value.hint == "corral model get smollm2"


def test_an_unknown_word_lists_the_models_available(where: Directories) -> None:
    configure("chat")
    with pytest.raises(NoSuchModel) as caught:
        choose(["cht"], None, where)
    assert caught.value.hint == "available: chat, smollm2"


def test_without_models_the_hint_names_the_first_commands(where: Directories) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        choose([], None, where)
    assert "corral model get smollm2" in (caught.value.hint or "")


def test_an_address_on_the_command_line_wins(where: Directories) -> None:
    configure("chat")
    settings = choose([], None, where, "127.0.0.1:9").loaded.settings
    assert settings.proxy.listen == "127.0.0.1:9"


@pytest.mark.parametrize(
    ("file", "name"),
    [("a.gguf", "a"), ("-rf.gguf", "rf"), ("...gguf", "model"), ("é.gguf", "model")],
)
def test_any_file_name_makes_a_safe_model_name(file: str, name: str) -> None:
    assert name_of(Path(file)) == name


def test_a_model_of_a_running_daemon_is_found_by_name_or_path(tmp_path: Path) -> None:
    model = {"name": "chat", "path": str(tmp_path / "chat.gguf"), "aliases": ["gpt", "*"]}
    status = read(DaemonStatus, {"models": [model]})
    assert resolve_running(["chat"], status) == ("chat",)
    assert resolve_running([str(tmp_path / "chat.gguf"), "gpt"], status) == ("chat", "chat")
    with pytest.raises(NoSuchModel):
        resolve_running(["other"], status)


def test_a_stored_model_is_known_by_its_name(where: Directories, tmp_path: Path) -> None:
    configure("chat")
    path = tiny_gguf.make(tmp_path / "stored.gguf")
    store = Ollama(tmp_path / ".ollama" / "models")
    store.model("registry.ollama.ai/library/tiny/1b", model=path)
    store.manifest("registry.ollama.ai/library/gone/1b", [("model", "sha256:" + "0" * 64, 1)])
    store.model("registry.ollama.ai/someone/tiny/1b", model=path)
    choice = choose(["tiny:1b", "someone/tiny:1b"], None, where)
    assert choice.names == ("tiny:1b", "someone--tiny:1b")
    assert choice.added == ("tiny:1b", "someone/tiny:1b")
    models = choice.loaded.settings.models
    assert list(models) == ["chat", "tiny:1b", "someone--tiny:1b"]
    assert models["someone--tiny:1b"].aliases == ("someone/tiny:1b",)
    with pytest.raises(ModelInvalid, match="blob sha256-000000000000… is missing"):
        choose(["gone:1b"], None, where)
    with pytest.raises(ModelInvalid, match="no stored model is named someone/other") as caught:
        choose(["someone/other:q8_0"], None, where)
    assert "corral model get someone/other:Q8_0 fetches it" in (caught.value.hint or "")
    with pytest.raises(ModelInvalid) as caught:
        choose(["some/where/else"], None, where)
    assert "fetches" not in (caught.value.hint or "")


def test_found_models_are_served_if_the_settings_say_so(where: Directories, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    tiny_gguf.make(tmp_path / "models" / "tiny.gguf")
    own = tiny_gguf.make(tmp_path / "models" / "own.gguf")
    Path("corral.toml").write_text(
        f'models_dir = "models"\nserve_found = true\n[models.mine]\npath = "{own}"\n'
    )
    loaded = choose([], None, where).loaded
    assert list(loaded.settings.models) == ["mine", "tiny"]
    assert not loaded.settings.models["tiny"].preload
    assert choose(["tiny"], None, where).names == ("tiny",)
    # The found files share the machine as one model.
    assert LaunchPlanner(loaded.settings, where).instances == 2


def test_models_dir_is_one_directory_or_several(
    where: Directories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("chat")
    monkeypatch.setenv("CORRAL_MODELS_DIR", "one")
    assert choose([], None, where).loaded.settings.models_dirs == (tmp_path / "one",)
    monkeypatch.setenv("CORRAL_MODELS_DIR", '["one", "/two"]')
    dirs = choose([], None, where).loaded.settings.models_dirs
    assert dirs == (tmp_path / "one", Path("/two"))
