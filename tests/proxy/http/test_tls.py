from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from support.certificates import write, write_ca

from proxy.errors import ConfigError
from proxy.http.tls import client_context, server_context
from proxy.settings import TlsSettings

CA = trustme.CA()
CERT = CA.issue_cert("127.0.0.1")

BEGIN = "-----BEGIN CERTIFICATE-----\n"

Files = dict[str, Path]


def encrypt(files: Files) -> None:
    key = serialization.load_pem_private_key(files["key"].read_bytes(), None)
    files["key"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )


WRONG: dict[str, tuple[Callable[[Files], object], str]] = {
    "no certificate": (lambda files: files["cert"].unlink(), "server.pem cannot be read: No such"),
    "no key": (lambda files: files["key"].unlink(), "server.key cannot be read: No such"),
    "an open key": (lambda files: files["key"].chmod(0o640), r"open to others \(mode 640\)"),
    "a directory": (lambda files: files.update(cert=files["cert"].parent), "Is a directory"),
    "no PEM": (lambda files: files["cert"].write_text("x"), "has no certificate"),
    "half a PEM": (
        lambda files: files["cert"].write_text(BEGIN),
        "used",
    ),
    "a key that is none": (lambda files: files["key"].write_text("x"), "has no key"),
    "another key": (
        lambda files: files["key"].write_bytes(CA.issue_cert("a").private_key_pem.bytes()),
        "does not belong to the certificate",
    ),
    "a passphrase": (encrypt, "has a passphrase"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, wrong: str) -> None:
    files = write(tmp_path, CERT)
    server_context(TlsSettings(**files))
    spoil, message = WRONG[wrong]
    spoil(files)
    with pytest.raises(ConfigError, match=message):
        server_context(TlsSettings(**files))
    with pytest.raises(ConfigError, match=message):
        client_context(None, **files)


def test_a_bundle_of_authorities_may_have_comments(tmp_path: Path) -> None:
    bundle = write_ca(tmp_path / "ca.pem", CA)
    bundle.write_bytes("# Autorité\n".encode() + bundle.read_bytes())
    assert client_context(bundle, None, None).cert_store_stats()["x509_ca"] == 1
    bundle.write_text("nothing")
    with pytest.raises(ConfigError, match=r"CA certificates .*ca.pem cannot be used"):
        client_context(bundle, None, None)
