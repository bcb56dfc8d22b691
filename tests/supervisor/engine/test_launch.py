from pathlib import Path

from supervisor.engine.client import Endpoint
from supervisor.engine.launch import Launch, clean_environment

ENGINE = Path("/bin/llama-server")


def clean(**environ: str) -> dict[str, str]:
    return clean_environment(
        environ, program=ENGINE, library_dirs=(), api_key="secret", marker="corral chat.0"
    )


def test_an_engines_environment_has_none_of_its_options() -> None:
    env = clean(LLAMA_ARG_CTX_SIZE="1", LLAMA_API_KEY="old", HF_TOKEN="t", PATH="/bin", FOO="x")
    assert env["LLAMA_API_KEY"] == "secret"
    assert env["PATH"] == "/bin"
    assert not {"LLAMA_ARG_CTX_SIZE", "HF_TOKEN", "FOO"} & set(env)


def test_what_chooses_a_device_is_passed_on() -> None:
    wishes = {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0", "LC_ALL": "C"}
    assert wishes.items() <= clean(**wishes).items()


def test_an_engine_can_be_recognised_and_is_run_in_child_mode() -> None:
    env = clean()
    assert env["LLAMA_CORRAL_ENGINE"] == "corral chat.0"
    assert env["LLAMA_SERVER_ROUTER_PORT"] == "1"


def test_library_directories_come_first() -> None:
    env = clean_environment(
        {"LD_LIBRARY_PATH": "/own"},
        program=ENGINE,
        library_dirs=(Path("/a"), Path("/b")),
        api_key="",
        marker="",
    )
    assert env["LD_LIBRARY_PATH"] == "/a:/b:/own"
    assert "LD_LIBRARY_PATH" not in clean()


def test_an_endpoint_is_known_once_there_is_something_to_connect_to() -> None:
    assert Endpoint(Path("/run/a.sock")).is_known
    assert Endpoint(port=80).is_known
    assert not Endpoint().is_known


def test_a_launch_shows_no_secret() -> None:
    launch = Launch(("x",), clean(), Path("/"), Endpoint(), "secret", Path("/log"))
    assert "secret" not in repr(launch)
