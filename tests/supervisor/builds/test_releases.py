from __future__ import annotations

from collections.abc import Iterator, Mapping

import httpx
import pytest
from support.release_server import ReleaseServer, rate_limited

from supervisor.builds.releases import Release, ReleaseApi, new_client
from supervisor.errors import DownloadFailed, EngineMissing
from supervisor.settings.tables import GITHUB

FILE = "llama-{}-bin-ubuntu-x64.tar.gz"


@pytest.fixture
def server() -> Iterator[ReleaseServer]:
    with ReleaseServer().serving() as server:
        for tag in ("b11200", "b11100"):
            server.releases[tag] = {FILE.format(tag): b"x", f"llama-{tag}-ui.tar.gz": b"y"}
        yield server


def find(server: ReleaseServer, wanted: str, environ: Mapping[str, str] | None = None) -> Release:
    with new_client() as client:
        return ReleaseApi(client, server.api, environ or {}).find(wanted)


def test_a_release_has_files_with_their_digests(server: ReleaseServer) -> None:
    found = find(server, "b11100")
    assert (found.tag, found.build) == ("b11100", 11100)
    (file,) = found.assets
    assert (file.name, file.size_bytes, len(file.sha256 or "")) == (FILE.format("b11100"), 1, 64)


def test_a_version_names_its_build(server: ReleaseServer) -> None:
    server.stable = ("v0.5.0", "b11100")
    assert find(server, "stable").tag == "b11100"
    assert find(server, "v0.5.0").tag == "b11100"


def test_without_versions_the_latest_release_is_a_build(server: ReleaseServer) -> None:
    assert find(server, "stable").tag == "b11200"


def test_the_newest_build_is_one_with_files(server: ReleaseServer) -> None:
    server.stable = ("v0.5.0", "b11100")
    server.releases = {"b11202": {}, "b11201": {FILE.format("b11201"): b"x"}, **server.releases}
    server.drafts = {"b11201"}
    assert find(server, "newest").tag == "b11200"


def test_a_build_that_is_not_there(server: ReleaseServer) -> None:
    with pytest.raises(EngineMissing, match="no release b1$"):  # noqa: RUF043 (an end)
        find(server, "b1")


def test_a_limit_of_requests_tells_how_long_it_lasts(server: ReleaseServer) -> None:
    server.faults.status, server.faults.headers = 403, rate_limited(for_s=1800)
    with pytest.raises(
        DownloadFailed, match=r"no more requests .* for (29m 5\ds|30m 00s)"
    ) as found:
        find(server, "stable")
    assert "GITHUB_TOKEN" in str(found.value.hint)
    server.faults.status, server.faults.headers = 429, {"Retry-After": "61"}
    with pytest.raises(DownloadFailed, match="for 1m 01s"):
        find(server, "newest")


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "refuses the token"), (403, "answers 403 Forbidden"), (502, "answers 502 Bad Gateway")],
)
def test_what_the_api_refuses(server: ReleaseServer, status: int, reason: str) -> None:
    server.faults.status = status
    with pytest.raises(DownloadFailed, match=reason):
        find(server, "stable")


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b'{"tag_name": "../b1", "assets": []}', b'{"tag_name": "b1"}'],
)
@pytest.mark.parametrize("wanted", ["stable", "newest"])
def test_an_answer_that_is_not_githubs(server: ReleaseServer, body: bytes, wanted: str) -> None:
    server.faults.body = body
    with pytest.raises((DownloadFailed, EngineMissing), match=r"not GitHub's|lists no build"):
        find(server, wanted)


def test_an_answer_without_end_is_refused(server: ReleaseServer) -> None:
    server.faults.body = b" " * (16 * 1024**2 + 1)
    with pytest.raises(DownloadFailed, match="more than"):
        find(server, "stable")


def test_a_version_that_names_anything_else_is_refused(server: ReleaseServer) -> None:
    for text in ("v0.4.0", "../x", "b1/../../x", "b" * 100):
        server.stable = ("v0.5.0", text)
        with pytest.raises(DownloadFailed):
            find(server, "stable")


def test_an_address_without_server() -> None:
    with new_client() as client, pytest.raises(DownloadFailed, match="cannot be reached"):
        ReleaseApi(client, "http://127.0.0.1:1/releases").find("stable")


def test_the_token_goes_to_github_alone(server: ReleaseServer) -> None:
    environ = {"GITHUB_TOKEN": "secret"}
    find(server, "stable", environ)
    assert not any("secret" in str(headers) for _, headers in server.requests)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    with client, pytest.raises(EngineMissing):
        ReleaseApi(client, GITHUB, environ).find("b10434")
    assert {request.headers["Authorization"] for request in asked} == {"Bearer secret"}
