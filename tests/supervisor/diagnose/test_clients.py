from pathlib import Path

import pytest

from proxy.settings import ProxySettings
from supervisor.diagnose.host_checks import check_clients

KEY = '[keys.a]\nkey = "corral-secret"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEY)
    return path


def test_loopback_needs_no_key() -> None:
    assert check_clients(ProxySettings()).level == "ok"


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "[::]:8080", "192.168.0.7:80", "nas:80"])
def test_an_address_for_other_machines_without_a_key_gets_a_warning(
    listen: str, path: Path
) -> None:
    finding = check_clients(ProxySettings(listen=listen))
    assert finding.level == "warn"
    assert listen in finding.text
    assert "corral key add" in str(finding.fix)
    assert check_clients(ProxySettings(listen=listen, api_keys_file=path)).level == "ok"


def test_keys_are_counted(path: Path) -> None:
    assert check_clients(ProxySettings(api_keys_file=path)).text == f"1 API key in {path}"
    path.write_text("")
    assert "all requests are rejected" in check_clients(ProxySettings(api_keys_file=path)).text


def test_a_keys_file_that_others_can_read_fails(path: Path) -> None:
    path.chmod(0o640)
    finding = check_clients(ProxySettings(api_keys_file=path))
    assert finding.level == "fail"
    assert finding.fix == f"chmod 600 {path}"


def test_an_invalid_origin_fails() -> None:
    finding = check_clients(ProxySettings(allowed_origins=("*",)))
    assert finding.level == "fail"
    assert "proxy.allowed_origins" in finding.text
