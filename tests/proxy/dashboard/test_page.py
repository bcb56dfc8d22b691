"""The page's files come from a fixed table, with headers that allow nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.proxy_harness import ProxyHarness

from proxy.dashboard.dashboard import library_files, page_files


async def test_the_page_is_served_and_revalidated(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/corral") as response:  # by way of the redirect
        assert (response.status, response.url.path) == (200, "/corral/")
        assert response.content_type == "text/html"
        headers = response.headers
        policy = headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert all(
            name in policy
            for name in ("default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'")
        )
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-cache"
    async with proxy.http.get("/corral/", headers={"If-None-Match": headers["ETag"]}) as response:
        assert response.status == 304
        assert await response.read() == b""


async def test_a_browser_at_the_root_finds_the_page(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/", headers={"Accept": "text/html,*/*;q=0.8"}) as response:
        assert (response.status, response.url.path) == (200, "/corral/")


async def test_other_clients_find_the_endpoints_at_the_root(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/", headers={"Accept": "*/*"}) as response:
        found = await response.json()
    assert found["name"] == "llama-corral"
    for name in ("models", "health", "metrics", "dashboard"):
        async with proxy.http.get(found["endpoints"][name]) as response:
            assert response.status in {200, 503}, name


async def test_every_file_is_served_with_its_type(proxy: ProxyHarness) -> None:
    libraries = library_files(proxy.dashboard.vendor)
    for prefix, files in (("page", page_files()), ("vendor", libraries)):
        for path, (body, content_type, _) in files.items():
            async with proxy.http.get(f"/corral/{prefix}/{path}") as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == content_type
                assert await response.read() == body


@pytest.mark.parametrize(
    "path",
    [
        *("page/", "page/no.js", "page/../static_files.py", "page/..%2Fstatic_files.py"),
        *("page/%2e%2e/dashboard.py", "page//etc/passwd", "vendor/engine.toml"),
        *("vendor/page.toml", "vendor/../pyproject.toml"),
    ],
)
async def test_no_other_path_is_a_file(proxy: ProxyHarness, path: str) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(f"GET /corral/{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"


def test_only_listed_libraries_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a.mjs", "b.mjs", "LICENSE"):
        (tmp_path / "a" / name).write_text("x", "utf-8")
    assert library_files(tmp_path) == {}
    text = '[[libraries]]\nname = "a"\n[libraries.files]\n"a.mjs" = "0"\n"LICENSE" = "0"\n'
    (tmp_path / "page.toml").write_text(text, "utf-8")
    assert list(library_files(tmp_path)) == ["a/a.mjs"]
