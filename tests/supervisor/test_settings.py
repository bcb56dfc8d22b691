import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from supervisor.errors import SettingsInvalid
from supervisor.settings.load import Loaded, load
from supervisor.settings.schema import ModelSettings

CHAT = '[models.chat]\npath = "chat.gguf"\n'


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, **overrides: object) -> Loaded:
    path = Path("corral.toml")
    path.write_text(text, "utf-8")
    return load(path, config_dir=Path("nowhere"), overrides=overrides, environ={})


def refusal(text: str) -> str:
    with pytest.raises(SettingsInvalid) as caught:
        read(text)
    return caught.value.message


def test_groups_that_shut_a_model_out_are_refused_with_their_lines() -> None:
    text = CHAT + "pinned = true\n[models.code]\npath = 'code.gguf'\n[groups.large]\n"
    assert read(text + 'models = ["chat", "code"]\ntogether = true').settings.groups
    assert refusal(text + 'models = ["chat", "code"]\nmax_loaded = 1').endswith(
        "corral.toml:6: groups.large: code could never be loaded: at most 1 of chat, code may be "
        "loaded at the same time, and no request for it unloads chat"
    )
    assert "corral.toml:7: groups.large.models: no model is named cod; did you mean" in refusal(
        text + 'models = ["cod"]\nexclusive = true'
    )
    assert refusal(text + 'models = ["code"]').endswith(
        "groups.large: it has no rule: set max_loaded, exclusive or together"
    )
    found = read(text + "models = ['x']\nexclusive = true", serve_found=True)
    assert found.settings.groups["large"].models == ("x",)


def test_a_number_of_loaded_models_that_a_group_cannot_exceed_is_refused() -> None:
    text = CHAT + "[models.code]\npath = 'code.gguf'\n[groups.large]\n"
    assert refusal(text + 'models = ["chat", "code"]\nmax_loaded = 2').endswith(
        "corral.toml:7: groups.large.max_loaded = 2 has no effect: the group has 2 models"
    )
    assert refusal(text + 'models = ["code"]\nmax_loaded = 1\nexclusive = true').endswith(
        "groups.large.max_loaded = 1 has no effect: the group has 1 model"
    )
    assert read(text + 'models = ["chat", "code"]\nmax_loaded = 1').settings.groups


def test_without_a_file_the_defaults_apply() -> None:
    loaded = load(config_dir=Path("nowhere"), environ={})
    assert loaded.path is None
    assert loaded.settings.proxy.listen == "127.0.0.1:8080"
    assert loaded.settings.models == {}


def test_the_current_directory_is_searched_before_the_config_directory(tmp_path: Path) -> None:
    config_dir = tmp_path / "config"
    config_dir.mkdir()
    (config_dir / "corral.toml").write_text(CHAT, "utf-8")
    assert load(config_dir=config_dir, environ={}).path == config_dir / "corral.toml"
    Path("corral.toml").write_text(CHAT, "utf-8")
    assert load(config_dir=config_dir, environ={}).path == tmp_path / "corral.toml"


def test_the_environment_names_a_file_and_the_command_line_wins_over_it() -> None:
    Path("one.toml").write_text(CHAT, "utf-8")
    Path("two.toml").write_text(CHAT, "utf-8")
    named = {"CORRAL_CONFIG": "one.toml"}
    nowhere = Path("nowhere")
    assert load(config_dir=nowhere, environ=named).path == Path("one.toml").absolute()
    found = load(Path("two.toml"), config_dir=nowhere, environ=named)
    assert found.path == Path("two.toml").absolute()


def test_a_named_file_that_is_missing_is_an_error() -> None:
    with pytest.raises(SettingsInvalid, match=r"no settings file gone\.toml"):
        load(Path("gone.toml"), config_dir=Path("nowhere"), environ={})


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORRAL_PROXY__LISTEN", "127.0.0.1:2")
    monkeypatch.setenv("CORRAL_MODELS__CHAT__REPLICAS", "3")
    text = f'{CHAT}[proxy]\nlisten = "127.0.0.1:1"\nmax_body_bytes = 4096\n'
    loaded = read(text)
    assert loaded.settings.proxy.listen == "127.0.0.1:2"
    assert loaded.settings.proxy.max_body_bytes == 4096
    assert loaded.settings.models["chat"].replicas == 3
    assert loaded.origins["proxy.listen"] == "environment"
    assert loaded.origins["proxy.max_body_bytes"] == "file"
    over = read(text, proxy={"listen": "127.0.0.1:3"})
    assert over.settings.proxy.listen == "127.0.0.1:3"
    assert over.origins["proxy.listen"] == "command line"


def test_paths_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    assert read(CHAT).settings.models["chat"].path == tmp_path / "chat.gguf"


def test_paths_of_flags_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    trial = "[models.chat.trial]\nshare = 0.5\nflags = { lora = 'b.gguf' }\n"
    flags = "[models.chat.flags]\nmmproj = 'a.gguf'\npoll = 3\n"
    chat = read(CHAT + flags + trial).settings.models["chat"]
    assert chat.flags == {"mmproj": f"{tmp_path}/a.gguf", "poll": 3}
    assert chat.trial
    assert chat.trial.flags == {"lora": f"{tmp_path}/b.gguf"}


def test_engines_of_models_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    trial = "[models.chat.trial]\nshare = 0.5\nengine = 'new/llama-server'\n"
    chat = read(CHAT + "engine = '~/llama-server'\n" + trial).settings.models["chat"]
    assert chat.engine == Path.home() / "llama-server"
    assert chat.trial
    assert chat.trial.engine == tmp_path / "new" / "llama-server"


def test_an_empty_path_is_not_the_directory_of_the_settings_file() -> None:
    for line in ("[supervisor]\nslots_directory = ''", CHAT.replace("chat.gguf", "")):
        assert "is empty; leave it out instead" in refusal(line)


def test_a_home_directory_is_expanded() -> None:
    found = read('engine = "~/llama-server"\n').settings.engine
    assert found == Path.home() / "llama-server"


def test_an_unknown_key_names_the_nearest() -> None:
    assert "models.chat.replica is unknown; did you mean replicas?" in refusal(
        CHAT + "replica = 2\n"
    )
    assert "prxy is unknown; did you mean proxy?" in refusal("[prxy]\n")
    assert "proxy.lissten is unknown; did you mean listen?" in refusal("[proxy]\nlissten = 1\n")


def test_all_errors_are_reported_at_once_with_the_file() -> None:
    message = refusal('[models.chat]\nreplicas = 0\n[proxy]\nlisten = "8080"\n')
    assert "models.chat.path is missing" in message
    assert "models.chat.replicas" in message
    assert "proxy.listen" in message
    assert all(re.search(r"corral.toml:\d+: ", line) for line in message.splitlines())


def test_each_error_has_its_line() -> None:
    text = """\
lisen = 1

[proxy]
allowed_hosts = [
    "a",
    "b",
]
listen = "8080"

[models.chat]
# no path
args = '''
x
'''
"""
    lines = [line.partition("corral.toml:")[2] for line in refusal(text).splitlines()]
    places = {line.split(": ")[1].split()[0]: int(line.split(":")[0]) for line in lines}
    assert places == {"lisen": 1, "proxy.listen": 8, "models.chat.path": 10, "models.chat.args": 12}


def test_conflicts_are_reported_at_once_with_their_lines() -> None:
    text = f"{CHAT}fallback = ['cat']\nworkers = ['w']\n[proxy]\ndefault_model = 'chta'\n"
    message = refusal(text)
    assert len(message.splitlines()) == 3
    assert "corral.toml:6: proxy.default_model: no model is named chta; did you mean" in message
    assert "corral.toml:3: models.chat.fallback: no model is named cat" in message
    assert "corral.toml:4: models.chat.workers: no worker is named w" in message


def test_an_error_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_PROXY__LISTEN", "8080")
    assert refusal(CHAT).startswith("the variable CORRAL_PROXY__LISTEN: proxy.listen: ")
    monkeypatch.delenv("CORRAL_PROXY__LISTEN")
    monkeypatch.setenv("CORRAL_MODELS", '{"chat": {"ttl_s": "x"}}')
    assert refusal(CHAT).startswith("the variable CORRAL_MODELS: models.chat.ttl_s: ")
    monkeypatch.setenv("CORRAL_MODELS", "{")
    assert refusal(CHAT).startswith("the variable CORRAL_MODELS cannot be read: ")


@pytest.mark.parametrize(
    "name",
    [
        *("../up", "-rf", ".hidden", "a b", "", "x" * 129, "é"),
        *("/a", "a/", "a//b", "a/../b", "a/./b", "a/.b", "a/-b", "a\\\\b", "/".join("abcdefghi")),
    ],
)
def test_a_model_name_that_could_be_a_path_or_an_option_is_rejected(name: str) -> None:
    assert "not a model name" in refusal(f'[models."{name}"]\npath = "x"\n')


@pytest.mark.parametrize("name", ["chat", "org/model:Q4_K_M", "a/b/c", "x" * 128])
def test_a_model_name_may_have_an_organisation_and_a_quantisation(name: str) -> None:
    assert list(read(f'[models."{name}"]\npath = "x"\n').settings.models) == [name]


def test_a_toml_error_has_its_position() -> None:
    assert "line 1" in refusal("models = = 1")


def test_a_model_inherits_the_restart_policy() -> None:
    text = CHAT + "restart = { max_failures = 9 }\n[supervisor.restart]\nbackoff_initial_s = 2\n"
    restart = read(text).settings.models["chat"].restart
    assert (restart.max_failures, restart.backoff_initial_s, restart.backoff_max_s) == (9, 2, 60)


def test_unknown_keys_of_nested_tables_get_suggestions_from_their_table() -> None:
    assert "supervisor.restart.backoff_max is unknown; did you mean backoff_max_s?" in refusal(
        "[supervisor.restart]\nbackoff_max = 1\n"
    )
    assert "proxy.limits.n_predikt is unknown; did you mean n_predict?" in refusal(
        "[proxy.limits]\nn_predikt = 1\n"
    )
    assert "models.chat.trial.sharre is unknown; did you mean share?" in refusal(
        '[models.chat.trial]\nprofile = "base"\nshare = 0.2\nsharre = 1\n'
    )
    assert "models.chat.restart.max_failure is unknown; did you mean max_failures?" in refusal(
        CHAT + "[models.chat.restart]\nmax_failure = 1\n"
    )


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("supervisor", "liveness_interval_s = 0.5"),
        ("supervisor", "idle_probe_s = -1"),
        ("supervisor", "batch_timeout_s = 0"),
        ("supervisor.restart", "max_failures = 0"),
        ("models.chat.restart", "backoff_initial_s = 0"),
        ("models.chat.restart", "failure_half_life_s = 1e9"),
    ],
)
def test_out_of_range_values_are_rejected(table: str, line: str) -> None:
    key, _, _ = line.partition(" ")
    assert f"{table}.{key}" in refusal(f"{CHAT}[{table}]\n{line}\n")


@pytest.mark.parametrize(
    ("value", "bytes_"),
    [("12 GiB", 12 << 30), ("1.5GiB", 3 << 29), (1048576, 1 << 20), ("1048576", 1 << 20)],
)
def test_a_memory_budget_is_bytes_or_a_text(value: object, bytes_: int) -> None:
    found = read(CHAT, supervisor={"memory_budget": value}).settings
    assert found.supervisor.memory_budget == bytes_


@pytest.mark.parametrize(
    ("value", "seconds"), [(900, 900), ("15m", 900), ("1h30m", 5400), ("900", 900), (0, 0)]
)
def test_a_ttl_is_seconds_or_a_duration(value: object, seconds: float) -> None:
    model = ModelSettings.model_validate({"path": "a", "ttl_s": value, "keep_alive_max_s": value})
    assert (model.ttl_s, model.keep_alive_max_s) == (seconds, seconds)


@pytest.mark.parametrize("value", ["fifteen", "15 m", "-5m", "1m" * 60, ""])
def test_an_invalid_ttl_is_rejected(value: object) -> None:
    with pytest.raises(ValidationError, match="ttl_s"):
        ModelSettings.model_validate({"path": "a", "ttl_s": value})


@pytest.mark.parametrize("value", ["12 GB", "much", 0, -1, "1 KiB"])
def test_an_invalid_memory_budget_is_rejected(value: object) -> None:
    with pytest.raises(SettingsInvalid, match="memory_budget"):
        read(CHAT, supervisor={"memory_budget": value})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "replicas = 0",
            "replicas: must be greater than or equal to 1 or must be 'auto' (it is 0)",
        ),
        ("draft = 7", "draft: must be 'auto' or "),
        ("flags = { 'a b' = 1 }", "flags.a b: not an option of llama-server (it is 'a b')"),
        ("ttl_s = 'x'", 'ttl_s: neither seconds nor a duration such as "15m" or "1h30m"'),
        ("min_residency_s = 'x'", "min_residency_s: must be a valid number, unable to parse"),
        ("fallback = 'other'", "fallback: must be an array (it is 'other')"),
        ("restart = 'never'", "restart: must be a table"),
    ],
)
def test_a_message_names_the_key_and_the_allowed_values(line: str, message: str) -> None:
    assert f"models.chat.{message}" in refusal(f"{CHAT}{line}\n")


def test_a_size_with_another_unit_gets_an_example() -> None:
    assert "such as 12 GiB (it is '12 GB')" in refusal("[supervisor]\nmemory_budget = '12 GB'\n")


def test_draft_and_replicas_can_be_auto(tmp_path: Path) -> None:
    found = read(
        '[models.a]\npath = "a.gguf"\ndraft = "auto"\nreplicas = "auto"\n'
        '[models.b]\npath = "a.gguf"\ndraft = "auto.gguf"\n'
    ).settings.models
    assert (found["a"].draft, found["a"].replicas) == ("auto", "auto")
    assert found["b"].draft == tmp_path / "auto.gguf"


# Variants and nodes.


def test_a_variant_has_defaults_and_forced_and_stripped_members() -> None:
    high = "[models.chat.variants.high]\ntemperature = 1\nstrip = ['stop']\nset = { seed = 7 }\n"
    variant = read(CHAT + high).settings.models["chat"].variants["high"]
    assert variant.defaults == {"temperature": 1}
    assert (variant.set, variant.strip) == ({"seed": 7}, ("stop",))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "changes nothing"),
        ("id_slot = 1", "id_slot cannot be set"),
        ("set.model = 'x'", "model cannot be set"),
    ],
)
def test_an_invalid_variant_is_rejected(value: str, reason: str) -> None:
    assert reason in refusal(f"{CHAT}[models.chat.variants.high]\n{value}\n")


@pytest.mark.parametrize("name", ["chat", "talk", "chat:high", "talk:high"])
def test_the_default_model_is_one_of_the_names(name: str) -> None:
    chat = CHAT + 'aliases = ["talk", "*"]\n[models.chat.variants.high]\ntemperature = 1\n'
    proxy = f'[proxy]\ndefault_model = "{name}"\n'
    assert read(chat + proxy).settings.proxy.default_model == name


@pytest.mark.parametrize("name", ["chta", "*", "high"])
def test_a_default_model_that_there_is_not_is_rejected(name: str) -> None:
    proxy = f'[proxy]\ndefault_model = "{name}"\n'
    assert f"proxy.default_model: no model is named {name}" in refusal(CHAT + proxy)
    node = '[nodes.box]\nurl = "http://box:8080"\n'
    assert read(CHAT + proxy + node).settings.proxy.default_model == name  # the node may have it


@pytest.mark.parametrize("name", ["chat", "talk", "chat:high"])
def test_a_fallback_is_one_of_the_names(name: str) -> None:
    chat = CHAT + 'aliases = ["talk", "*"]\n[models.chat.variants.high]\ntemperature = 1\n'
    other = f'[models.big]\npath = "big.gguf"\nfallback = ["{name}"]\n'
    assert read(chat + other).settings.models["big"].fallback == (name,)


@pytest.mark.parametrize("name", ["chta", "*", "high"])
def test_a_fallback_that_there_is_not_is_rejected(name: str) -> None:
    chat = f'{CHAT}fallback = ["{name}"]\n'
    assert f"models.chat.fallback: no model is named {name}" in refusal(chat)
    node = '[nodes.box]\nurl = "http://box:8080"\n'
    assert read(chat + node).settings.models["chat"].fallback == (name,)  # the node may have it


def test_a_fallback_of_a_nodes_model_is_of_no_model_here() -> None:
    table = '[proxy.fallback]\nfar = ["chat"]\n'
    assert "there are no nodes, and no model is named so" in refusal(CHAT + table)
    node = '[nodes.box]\nurl = "http://box:8080"\n'
    assert read(CHAT + table + node).settings.proxy.fallback == {"far": ("chat",)}
    own = table.replace("far", "chat").replace('"chat"]', '"far"]')
    assert "proxy.fallback.chat: this machine has a model" in refusal(CHAT + own + node)


def test_an_alias_and_a_variant_have_different_names() -> None:
    chat = CHAT + 'aliases = ["chat:high"]\n[models.chat.variants.high]\ntemperature = 1\n'
    assert refusal(chat).endswith("models.chat: the name chat:high is given twice")


def test_one_model_alone_may_stand_for_all_other_names() -> None:
    other = '[models.b]\npath = "b.gguf"\naliases = ["*"]\n'
    read(CHAT + other)
    message = refusal(CHAT + 'aliases = ["*"]\n' + other)
    assert message.endswith("models.b: the name * belongs to the model chat")


@pytest.mark.parametrize(
    "other",
    [
        '[models.b]\npath = "b.gguf"\naliases = ["chat"]\n',
        '[models.b]\npath = "b.gguf"\naliases = ["chat:high"]\n',
        '[models."chat:high"]\npath = "b.gguf"\n',
        '[models.talk]\npath = "b.gguf"\n',
        '[models."talk:high"]\npath = "b.gguf"\n',
    ],
)
def test_no_two_models_share_a_name(other: str) -> None:
    chat = CHAT + 'aliases = ["talk"]\n[models.chat.variants.high]\ntemperature = 1\n'
    assert read(chat).settings.models["chat"].aliases == ("talk",)
    assert re.search(r"models\.\w+: the name \S+ belongs to the model \S+$", refusal(chat + other))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu:8080", "http://gpu:8080"),
        ("https://gpu/v1/", "https://gpu"),
        ("http://[::1]:80/llm/v1", "http://[::1]:80/llm"),
    ],
)
def test_the_url_of_a_node_is_normalised(url: str, address: str, tmp_path: Path) -> None:
    node = read(f'[nodes.gpu]\nurl = "{url}"\nkey_file = "gpu.key"\n').settings.nodes["gpu"]
    assert node.url == address
    assert node.key_file == tmp_path / "gpu.key"


@pytest.mark.parametrize(
    "url",
    [
        "gpu:8080",
        "ftp://gpu",
        "http://",
        "http://a:b@gpu",
        "http://gpu?k=1",
        "http://gpu#x",
        "http://gpu:0",
        "http://gpu:70000",
        "http://gpu:x",
        "http://gpu/a\\nb",
    ],
)
def test_a_url_with_less_or_more_than_an_address_is_rejected(url: str) -> None:
    assert "nodes.gpu.url" in refusal(f'[nodes.gpu]\nurl = "{url}"\n')


def test_a_misspelled_key_of_a_node_gets_a_suggestion() -> None:
    assert "did you mean key_file?" in refusal('[nodes.gpu]\nurl = "http://gpu"\nkeyfile = "x"\n')


@pytest.mark.parametrize(
    ("text", "name", "new"),
    [
        ("[proxy]\nline_max = 3\n", "proxy.line_max", "queue_max"),
        ("[supervisor]\nkeep_slots = false\n", "supervisor.keep_slots", "persist_slots"),
        ("[supervisor.restart]\nbreaker = 3\n", "supervisor.restart.breaker", "max_failures"),
    ],
)
def test_a_renamed_setting_gets_an_error_with_its_new_name(text: str, name: str, new: str) -> None:
    assert f"{name} was renamed: write {new}" in refusal(text)


@pytest.mark.parametrize(
    ("more", "may_choose"),
    [
        ('engine_tools = true\nflags = { tools = "all" }', True),
        ('engine_tools = true\nflags = { "--tools" = "read_file,exec_shell_command" }', True),
        ('engine_tools = true\nflags = { tools = "read_file" }', False),
        ("engine_tools = true\nflags = { ui-mcp-proxy = true }", False),
        ('engine_tools = true\nflags = { tools = "all", tools-runtime = "podman:a" }', False),
        (
            'engine_tools = true\nflags = { tools = "all" }\nargs = ["--tools-runtime", "ssh:a"]',
            False,
        ),
        ('flags = { tools = "all" }', False),
    ],
)
def test_a_client_chooses_the_runtime_of_tools_only_if_it_may_run_everything(
    more: str,
    may_choose: bool,  # noqa: FBT001 (a parameter of the test)
) -> None:
    model = read(CHAT + more).settings.models["chat"]
    assert model.lets_clients_choose_runtime == may_choose
