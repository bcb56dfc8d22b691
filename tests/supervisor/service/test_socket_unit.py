import pytest

from proxy.settings import ProxySettings
from supervisor.service.units import socket_unit


@pytest.mark.parametrize(
    ("listen", "wanted"),
    [
        ("127.0.0.1:8080", {"ListenStream=127.0.0.1:8080", "FileDescriptorName=http"}),
        ("[::1]:8080", {"ListenStream=[::1]:8080", "BindIPv6Only=ipv6-only"}),
        ("192.0.2.7:80", {"ListenStream=192.0.2.7:80", "FreeBind=yes"}),
    ],
)
def test_an_address_is_kept_by_systemd(listen: str, wanted: set[str]) -> None:
    unit = socket_unit(ProxySettings(listen=listen))
    assert unit is not None
    assert wanted <= set(unit.splitlines())


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:8080"])
def test_what_systemd_cannot_know_is_left_to_the_daemon(listen: str) -> None:
    assert socket_unit(ProxySettings(listen=listen)) is None
