"""A daemon whose proxy has a certificate, and the commands that talk to it."""

import ssl
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import trustme
from support.certificates import expired, trusting, write, write_ca
from support.corral_cli import CorralCli

from supervisor.backend.settings_file import certificate_notes
from supervisor.settings.schema import Settings

SETTINGS = """
[proxy]
listen = "127.0.0.1:0"
[proxy.tls]
cert = "server.pem"
key = "server.key"
"""
WITH_CLIENTS = """client_ca = "ca.pem"
[models.tiny]
path = "{path}"
"""


def test_commands_and_clients_reach_a_daemon_with_a_certificate(
    corral: CorralCli, tiny_model: Path
) -> None:
    authority = trustme.CA()
    corral.configure(SETTINGS + WITH_CLIENTS.format(path=tiny_model))
    here = corral.root / "config"
    files = write(here, authority.issue_cert("corral.example", "127.0.0.1"))
    write_ca(here / "ca.pem", authority)
    assert "certificate" not in corral("config", "check").stderr
    corral.ok("start")
    url = corral.data("status")["url"]
    assert url.startswith("https://127.0.0.1:")

    refused = corral("batch", "list")
    assert (refused.returncode != 0, "CORRAL_CLIENT_CERT" in refused.stderr) == (True, True)
    own = authority.issue_cert("me")
    mine = corral.root / "mine.pem"
    mine.touch(0o600)
    mine.write_bytes(own.private_key_and_cert_chain_pem.bytes())
    corral.env["CORRAL_CLIENT_CERT"] = str(mine)
    assert corral.data("batch", "list") == []
    with urllib.request.urlopen(f"{url}/v1/models", context=trusting(authority, own)) as answer:
        assert answer.status == 200

    other = write(here, authority.issue_cert("corral.example", "127.0.0.1"), "other")
    text = (here / "corral.toml").read_text()
    moved = text.replace("server.pem", "other.pem").replace("server.key", "other.key")
    (here / "corral.toml").write_text(moved)
    note = "[proxy.tls] changed: it applies to new connections"
    assert corral.data("reload")["notes"] == [note]
    assert corral.data("status")["tls_cert"] == str(other["cert"])
    shown = ssl.get_server_certificate(("127.0.0.1", int(url.rpartition(":")[2])))
    assert shown.split() == other["cert"].read_text().split()[: len(shown.split())]
    (here / "corral.toml").write_text(text)
    corral.ok("reload")

    files["key"].chmod(0o644)
    broken = corral("reload")
    assert (broken.returncode != 0, "is open to others" in broken.stderr) == (True, True)
    assert corral.data("batch", "list") == []


def test_config_check_names_wrong_and_expired_files(corral: CorralCli) -> None:
    authority = trustme.CA()
    corral.configure(SETTINGS)
    missing = corral("config", "check")
    assert (missing.returncode != 0, "server.pem cannot be read" in missing.stderr) == (True, True)
    here = corral.root / "config"
    write(here, expired(authority))
    assert "expired at 2002-01-01" in corral("config", "check").stderr
    other = write(here, authority.issue_cert("127.0.0.1"), "other")
    other["key"].replace(here / "server.key")
    assert "does not belong to the certificate" in corral("config", "check").stderr


def test_certificates_of_nodes_are_looked_at_too(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = write(tmp_path, expired(authority))
    node = {"url": "https://a:1", "ca_file": write_ca(tmp_path / "ca.pem", authority), **files}
    settings = Settings.model_validate({"nodes": {"a": node}})
    (note,) = certificate_notes(settings, datetime.now(UTC))
    assert note.startswith("nodes.a.cert: ")
