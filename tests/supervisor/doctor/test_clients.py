"""Who may ask, as the doctor sees it."""

from pathlib import Path

import pytest

from proxy.settings import ProxySettings
from supervisor.doctor.clients import check_clients

KEY = '[keys.a]\nkey = "corral-secret"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEY)
    return path


def test_on_this_machine_alone_no_key_is_needed() -> None:
    assert check_clients(ProxySettings()).level == "ok"


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "[::]:8080", "192.168.0.7:80", "nas:80"])
def test_an_address_for_others_without_a_key_is_worth_a_warning(listen: str, path: Path) -> None:
    finding = check_clients(ProxySettings(listen=listen))
    assert finding.level == "warn"
    assert listen in finding.text
    assert "corral key add" in str(finding.fix)
    assert check_clients(ProxySettings(listen=listen, api_keys_file=path)).level == "ok"


def test_keys_are_counted(path: Path) -> None:
    assert check_clients(ProxySettings(api_keys_file=path)).text == f"1 API key in {path}"
    path.write_text("")
    assert "nobody may ask" in check_clients(ProxySettings(api_keys_file=path)).text


def test_a_keys_file_that_others_may_read_will_not_do(path: Path) -> None:
    path.chmod(0o640)
    finding = check_clients(ProxySettings(api_keys_file=path))
    assert finding.level == "fail"
    assert finding.fix == f"chmod 600 {path}"


def test_an_origin_that_is_none_will_not_do() -> None:
    finding = check_clients(ProxySettings(allowed_origins=("*",)))
    assert finding.level == "fail"
    assert "proxy.allowed_origins" in finding.text
