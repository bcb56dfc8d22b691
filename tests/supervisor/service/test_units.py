from dataclasses import replace
from pathlib import Path

import pytest
from support.service_facts import facts

from supervisor.service.units import ServiceFacts, service_unit


def lines(service: ServiceFacts) -> list[str]:
    return service_unit(service).splitlines()


def test_systemd_waits_as_long_as_the_daemon_stops() -> None:
    limits = {"drain_timeout_s": 600, "stop_timeout_s": 7, "slot_save_timeout_s": 20}
    assert "TimeoutStopSec=649" in lines(facts(supervisor=limits))
    assert "TimeoutStopSec=629" in lines(facts(supervisor={**limits, "persist_slots": False}))


def test_a_service_is_watched_restarted_and_ends_by_itself() -> None:
    assert {
        "Type=notify",
        "ExecStart=/bin/true serve --config /etc/llama-corral/corral.toml",
        "RestartPreventExitStatus=78",
        "KillMode=mixed",
        "OOMPolicy=continue",
        "LimitMEMLOCK=infinity",
        "WatchdogSec=60",
    } <= set(lines(facts()))


def test_the_system_has_an_account_and_the_user_none() -> None:
    system = lines(replace(facts(), groups=("render",)))
    assert {"User=llama-corral", "SupplementaryGroups=render", "StateDirectoryMode=0700"} <= {
        *system
    }
    user = service_unit(facts("user"))
    assert "User=" not in user
    assert "Directory=" not in user
    assert "WantedBy=default.target" in user


def test_keys_are_credentials_and_the_daemon_reads_the_copies() -> None:
    unit = lines(
        facts(
            proxy={"api_keys_file": "/etc/keys.toml"},
            supervisor={"slots_key_file": "/etc/slots.key"},
            nodes={"big-box": {"url": "http://10.0.0.2:8080", "key_file": "/etc/50%.key"}},
        )
    )
    assert "LoadCredential=api_keys:/etc/keys.toml" in unit
    assert 'Environment="CORRAL_PROXY__API_KEYS_FILE=%d/api_keys"' in unit
    assert "LoadCredential=slots_key:/etc/slots.key" in unit
    assert 'Environment="CORRAL_SUPERVISOR__SLOTS_KEY_FILE=%d/slots_key"' in unit
    assert "LoadCredential=node_big-box:/etc/50%%.key" in unit
    nodes = '{\\"big-box\\": {\\"key_file\\": \\"%d/node_big-box\\"}}'
    assert f'Environment="CORRAL_NODES={nodes}"' in unit


def test_a_shared_slot_directory_is_mounted_and_writable() -> None:
    shared = {"slots_directory": "/mnt/50%/slots"}
    assert {"RequiresMountsFor=/mnt/50%%/slots", "ReadWritePaths=/mnt/50%%/slots"} <= {
        *lines(facts(supervisor=shared))
    }
    assert "/mnt" not in service_unit(facts("user", supervisor=shared))


@pytest.mark.parametrize(
    ("model", "protection"),
    [("/srv/a.gguf", "yes"), ("/home/me/a.gguf", "read-only"), ("/root/a.gguf", "read-only")],
)
def test_homes_are_hidden_unless_something_of_it_is_read(model: str, protection: str) -> None:
    unit = lines(facts(models={"a": {"path": model}}))
    assert f"ProtectHome={protection}" in unit


@pytest.mark.parametrize(
    ("model", "protection"),
    [("/srv/a.gguf", "yes"), ("/tmp/a.gguf", "no"), ("/var/tmp/a", "no")],  # noqa: S108 (not written)
)
def test_temporary_files_are_hidden_unless_one_is_read(model: str, protection: str) -> None:
    assert f"PrivateTmp={protection}" in lines(facts(models={"a": {"path": model}}))


def test_a_shell_variable_is_passed_to_a_user_service() -> None:
    service = replace(facts("user"), environment={"PATH": "/opt/50% more/bin"})
    assert 'Environment="PATH=/opt/50%% more/bin"' in lines(service)


def test_paths_that_the_service_reads_are_known() -> None:
    model = {
        "path": "/srv/a.gguf",
        "engine": "/opt/own/llama-server",
        "draft": "/srv/d.gguf",
        "warm_prompts": ["/srv/p.txt"],
    }
    found = facts(models={"a": model}, engine="/opt/llama-server").read_paths
    named = ("/srv/d.gguf", "/srv/p.txt", "/opt/own/llama-server", "/opt/llama-server")
    assert {Path(entry) for entry in named} <= {*found}
