"""Hostile settings, key files, profiles and variables get a message, never a traceback."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.growth import is_linear

from proxy.auth.keys_file import parse_keys, read_keys
from proxy.common.toml_text import parse_toml
from proxy.errors import ConfigError
from supervisor.cli import config
from supervisor.engine import prompts
from supervisor.errors import SettingsInvalid
from supervisor.output import run_command
from supervisor.plan import profile
from supervisor.settings.load import load

MIB: Final = 1024**2
MODEL: Final = '[models.m]\npath = "{model}"\n'

TEXTS: Final = {
    "deep arrays": "a = " + "[" * 100_000,
    "deep tables": "a = " + "{a = " * 100_000,
    "a deep key": ".".join("a" * 100_000) + " = 1",
    "a deep key of quoted parts": ".".join(['"a"'] * 50_000) + " = 1",
    "deep headers": "\n".join(f"[{'.'.join('a' * 60)}.b{n}]" for n in range(4000)),
    "a deep variant": "[models.m.variants.v]\nset = " + "{a = " * 90 + "1" + "}" * 90,
    "too large": "#" * (2 * MIB),
    "many quotes": '"\\"' * 200_000,
    "many unknown keys": "\n".join(f"k{n} = 1" for n in range(50_000)),
    "not text": "\udcff",
    "NUL": "a = 1\0",
    "a long number": "a = " + "9" * 5000,
    "a long hexadecimal number": "[proxy]\nqueue_max = 0x" + "f" * 5000,
    "parallel without end": MODEL + "flags = { parallel = inf }",
    "no number of slots": MODEL + "flags = { parallel = nan }",
    "many slots": MODEL + "flags = { parallel = 1000000000 }",
    "a context without end": MODEL + "flags = { ctx-size = 1" + "0" * 30 + " }",
    "a negative context": MODEL + "flags = { ctx-size = -5 }",
    "a flag that is a date": MODEL + "flags = { seed = 1979-05-27 }",
    "a flag with NUL": MODEL + 'flags = { chat-template = "a\\u0000b" }',
    "a flag with an escape": MODEL + 'flags = { chat-template = "a\\u001b[2J" }',
    "a flag without a name": MODEL + 'flags = { "" = 1 }',
    "a flag named by dashes": MODEL + 'flags = { "--" = 1 }',
    "an argument with NUL": MODEL + 'args = ["a\\u0000"]',
    "a path with NUL": '[models.m]\npath = "a\\u0000b"',
    "a path with lines": '[models.m]\npath = "a\\nb"',
    "an empty path": '[models.m]\npath = ""',
    "a long path": '[models.m]\npath = "' + "a" * 10_000 + '"',
    "a home there is not": '[models.m]\npath = "~nobody-of-this-name/m.gguf"',
    "a device": '[models.m]\npath = "/dev/zero"',
    "an engine that is a device": MODEL.replace("[", 'engine = "/dev/zero"\n[', 1),
    "an engine that is a directory": MODEL.replace("[", 'engine = "/"\n[', 1),
    "an engine without a path": MODEL.replace("[", 'engine = ""\n[', 1),
    "a long engine": MODEL.replace("[", 'engine = "' + "a" * 10_000 + '"\n[', 1),
    "a long profile": MODEL + 'profile = "' + "a" * 10_000 + '"',
    "a profile with NUL": MODEL + 'profile = "a\\u0000"',
    "a profile that is a path": MODEL + 'profile = "../../etc/passwd"',
    "a variant with a date": MODEL + "variants.v = { set = { a = 12:00:00 } }",
    "a variant without end": MODEL + "variants.v = { temperature = inf }",
    "a variant out of JSON": MODEL + "variants.v = { seed = 0x" + "f" * 100 + " }",
    "an endless wait": "[proxy]\nqueue_timeout_s = inf",
    "no wait": "[proxy]\nqueue_timeout_s = nan",
    "a port too many": '[proxy]\nlisten = "127.0.0.1:' + "9" * 5000 + '"',
    "a host no system resolves": '[proxy]\nlisten = "a..b:80"',
    "a host of lines": '[proxy]\nlisten = "a\\nb:80"',
    "memory without end": '[supervisor]\nmemory_budget = "' + "9" * 400 + ' TiB"',
    "a budget without end": "[supervisor]\nmemory_budget = 1" + "0" * 60,
    "a word of pydantic": "_cli_parse_args = true",
    "a prefix of pydantic": "_env_prefix = 5",
    "itself": "self = 1\n__pydantic_self__ = 1",
    "a node with a port too many": '[nodes.n]\nurl = "http://a:99999"',
    "a node with NUL": '[nodes.n]\nurl = "http://a\\u0000:80"\nkey_file = "a\\u0000"',
    "an alias of lines": MODEL + 'aliases = ["a\\nb"]',
    "tables for values": "proxy = 1\nmodels = [1, 2]\n[supervisor]\nrestart = 1.5",
}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CORRAL_")]:
        monkeypatch.delenv(name)
    for kind in ("CONFIG", "DATA", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a cache of engines and models that all tests here share."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("CORRAL_CACHE_DIR", str(directory))
        yield directory


def write(directory: Path, text: str, model: Path) -> Path:
    path = directory / "mine.toml"
    path.write_bytes(text.replace("{model}", str(model)).encode(errors="surrogateescape"))
    path.chmod(0o600)
    return path


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", TEXTS)
def test_hostile_settings_get_a_message(
    name: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, TEXTS[name], tiny_model)
    code = run_command("config check", lambda: config.check(path), as_json=False)
    message = capsys.readouterr().err
    assert code == SettingsInvalid.exit_code
    assert len(message) < 10_000


LONG: Final[dict[str, Callable[[int], str]]] = {
    "arrays": lambda size: "a = " + "[" * size,
    "tables": lambda size: "a = " + "{a = " * size,
    "a key": lambda size: ".".join("a" * size) + " = 1",
    "a key of quoted parts": lambda size: ".".join(['"a"'] * size) + " = 1",
    "headers": lambda size: "\n".join(f"[{'.'.join('a' * 60)}.b{n}]" for n in range(size // 60)),
    "quotes": lambda size: '"\\"' * size,
    "keys": lambda size: "\n".join(f"k{n} = 1" for n in range(size)),
}


@pytest.mark.parametrize("name", LONG)
def test_the_time_of_parsing_grows_with_the_length(name: str) -> None:
    def parse(size: int) -> None:
        with suppress(ValueError):
            parse_toml(LONG[name](size).encode())

    assert is_linear(parse, 2000)


VALUES = st.one_of(
    st.sampled_from(["inf", "-inf", "nan", "0", "-1", "1e400", "true", '""', "[]", "{}"]),
    st.sampled_from(["1979-05-27T07:32:00Z", "12:00:00", "[[[]]]", "{a = {b = 1}}", '["\\u0000"]']),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(str),
    st.text(max_size=20).map(
        lambda text: '"' + "".join(f"\\U{ord(entry):08x}" for entry in text) + '"'
    ),
)
# Halves of surrogate pairs are no TOML; that is tested above.
KEYS = st.sampled_from(
    [
        *(f"proxy.{key}" for key in ("listen", "queue_max", "origins", "hosts", "policy")),
        *(
            f"proxy.{key}"
            for key in (
                "api_keys_file",
                "prefix_index_max_blocks",
                "max_body_bytes",
                "queue_timeout_s",
            )
        ),
        *(f"supervisor.{key}" for key in ("memory_budget", "slots_disk_budget", "idle_probe_s")),
        *(f"supervisor.restart.{key}" for key in ("backoff_initial_s", "max_failures")),
        *(f"models.m.{key}" for key in ("path", "profile", "replicas", "draft", "aliases", "args")),
        *(f"models.m.{key}" for key in ("ttl_s", "warm_prompts", "variants", "variants.v.set.a")),
        *(f"models.m.flags.{key}" for key in ("parallel", "ctx-size", "batch-size", "gpu-layers")),
        *(f"models.m.flags.{key}" for key in ("ubatch-size", "cache-ram", "threads", "mmproj")),
        *(f"models.m.flags.{key}" for key in ("slot-prompt-similarity", "cache-type-k", "device")),
        *(f"models.m.flags.{key}" for key in ("kv-unified", "spec-type", "chat-template", "x")),
        *(f"models.m.flags.{key}" for key in ("spec-draft-n-max", "swa-full", "flash-attn")),
        *(f"nodes.n.{key}" for key in ("url", "key_file", "models", "slots")),
        "engine",
        "models",
        "models.n.path",
        "nodes",
        "proxy",
    ]
)


@pytest.mark.usefixtures("cache")
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_settings_of_any_values_are_read_or_rejected(
    tmp_path: Path, tiny_model: Path, changed: dict[str, str]
) -> None:
    base = {"models.m.path": f'"{tiny_model}"'}
    text = "\n".join(f"{key} = {value}" for key, value in {**base, **changed}.items())
    path = write(tmp_path, text, tiny_model)
    assert run_command("config check", lambda: config.check(path), as_json=False) in {0, 78}
    assert run_command("config show", lambda: config.show_settings(path), as_json=True) in {0, 78}


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_rejected(content: bytes) -> None:
    for prefix in (b"", b"[keys.a]\n", b"[models.m]\n", b"a = "):
        with suppress(ConfigError):
            parse_keys(prefix + content, Path("keys.toml"))
        with suppress(ValueError):
            parse_toml(prefix + content)


VARIABLES: Final = {
    "a listen that is none": {"CORRAL_PROXY__LISTEN": "\x1b[2J"},
    "no JSON": {"CORRAL_MODELS": "{"},
    "deep JSON": {"CORRAL_MODELS": "[" * 100_000},
    "deep names": {"CORRAL_PROXY" + "__A" * 5_000: "1"},
    "a table that is none": {"CORRAL_PROXY": "5"},
    "a settings file that is none": {"CORRAL_CONFIG": "/" + "x" * 5_000},
    "a home there is not": {"CORRAL_CONFIG": "~nobody-of-this-name/corral.toml"},
    "bytes": {"CORRAL_ENGINE": "caf\udce9/llama-server", "CORRAL_PROXY__LISTEN": "x"},
    "a number without end": {"CORRAL_SUPERVISOR__MEMORY_BUDGET": "inf"},
    "a directory of no home": {"CORRAL_CACHE_DIR": "~nobody-of-this-name/x"},
    "a long directory": {"CORRAL_CONFIG_DIR": "/" + "x" * 5_000, "CORRAL_PROXY__LISTEN": "x"},
}


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", VARIABLES)
def test_hostile_variables_get_a_message(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in VARIABLES[name].items():
        monkeypatch.setenv(variable, value)
    assert run_command("config check", lambda: config.check(None), as_json=False) != 0
    assert "error:" in capsys.readouterr().err


def test_a_settings_path_that_is_not_a_file_is_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        tmp_path / "pipe": "it is a pipe",
        tmp_path: "it is a directory",
        Path("/dev/zero"): "it is a device",
        Path("a\0b"): "there is no settings file",
    }.items():
        with pytest.raises(SettingsInvalid, match=message):
            load(path, config_dir=tmp_path, environ={})


def test_a_pipe_as_warm_prompt_is_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsInvalid, match="is a pipe"):
        prompts.read(tmp_path / "pipe")


PROFILES: Final = {
    "deep": "flags = " + "[" * 100_000,
    "itself": 'extends = "mine"',
    "a flag without end": "[flags]\nparallel = inf",
    "a flag with NUL": '[flags]\nmodel = "a\\u0000"',
    "not text": "\udcff",
    "a long extends": 'extends = "' + "a" * 10_000 + '"',
}


@pytest.mark.parametrize("name", PROFILES)
def test_hostile_profiles_get_a_message(name: str, tmp_path: Path) -> None:
    write(tmp_path, PROFILES[name], tmp_path)
    with pytest.raises(SettingsInvalid):
        profile.load("mine", [tmp_path])


def test_a_long_chain_of_profiles_is_rejected(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"p{number}.toml").write_text(f'extends = "p{number + 1}"', "utf-8")
    with pytest.raises(SettingsInvalid, match="more than 32 profiles"):
        profile.load("p0", [tmp_path])


KEY_FILES: Final = {
    "deep": "keys = " + "[" * 100_000,
    "a deep key": ".".join("a" * 100_000) + " = 1",
    "not text": "\udcff",
    "numbers without end": "[keys.a]\nmax_in_flight = inf",
    "long numbers": "[keys.a]\nmax_in_flight = 0x" + "f" * 5000,
    "a date": "[keys.a]\nsha256 = 1979-05-27",
}


@pytest.mark.parametrize("name", KEY_FILES)
def test_hostile_key_files_get_a_message(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, KEY_FILES[name], tmp_path)
    with pytest.raises(ConfigError):
        read_keys(path)
