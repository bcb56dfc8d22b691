"""`/v1/files` and `/v1/batches` over HTTP, each client with its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.jobs_harness import CHAT, request
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.app import App, Backend
from proxy.server import Server
from proxy.settings import JobSettings, ProxySettings

ME = {"Authorization": "Bearer corral-me-1234"}
YOU = {"Authorization": "Bearer corral-you-1234"}
KEYS = '[keys.me]\nkey = "corral-me-1234"\nrequests_per_minute = 100\n'
KEYS += '[keys.you]\nkey = "corral-you-1234"\n'


class JobsProxy(ProxyHarness):
    """A proxy that keeps jobs; `serving` computes them."""

    jobs_directory: Path
    serving: asyncio.Task[None]
    job_settings = JobSettings(max_line_bytes=2048, max_jobs=2)

    def build(self, settings: ProxySettings) -> Server:
        backend = Backend(loader=self.loader, jobs=(self.jobs_directory, self.job_settings))
        return Server(App(self.router, settings, self.metrics, backend))

    async def begin(self, **changes: Any) -> None:
        await self.open(**changes)
        self.serving = asyncio.get_running_loop().create_task(self.server.serve())
        self._stack.push_async_callback(self.end)

    async def end(self) -> None:
        self.serving.cancel()
        await asyncio.wait([self.serving])

    async def call(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, path, **options) as response:
            body = await response.read()
            return response.status, json.loads(body) if body else None

    async def upload(
        self, content: bytes, headers: dict[str, str] | None = None, **fields: str
    ) -> tuple[int, Any]:
        form = aiohttp.FormData({"purpose": "batch", **fields})
        form.add_field("file", content, filename="a.jsonl")
        return await self.call("POST", "/v1/files", data=form, headers=headers)

    async def batch(self, *lines: bytes, headers: dict[str, str] | None = None) -> Any:
        _, file = await self.upload(b"".join(lines), headers)
        _, batch = await self.create(file["id"], headers)
        return batch

    async def create(
        self, file_id: str, headers: dict[str, str] | None = None, **members: Any
    ) -> tuple[int, Any]:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **members}
        return await self.call("POST", "/v1/batches", json=body, headers=headers)

    async def ended(self, batch: Any, headers: dict[str, str] | None = None) -> Any:
        while batch["status"] in {"validating", "in_progress", "finalizing", "cancelling"}:
            _, batch = await self.call("GET", f"/v1/batches/{batch['id']}", headers=headers)
        return batch


@pytest.fixture
async def proxy(socket_directory: Path, tmp_path: Path) -> AsyncIterator[JobsProxy]:
    async with AsyncExitStack() as stack:
        proxy = JobsProxy(socket_directory, stack)
        proxy.jobs_directory = tmp_path / "jobs"
        yield proxy


def with_keys(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "keys.toml"
    path.touch(0o600)
    path.write_text(KEYS)
    return {"api_keys_file": path}


async def refuse(call: Call) -> None:
    body = b'{"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}'
    fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    await call.head(*fields, status="400 Bad Request")
    await call.send(body)


async def hang(call: Call) -> None:
    await call.until_left()


async def test_a_batch_is_computed_and_its_files_are_read(proxy: JobsProxy) -> None:
    await proxy.begin()
    fake = await proxy.fake()
    batch = await proxy.ended(await proxy.batch(request("a"), request("b")))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert (batch["error_file_id"], batch["errors"], batch["pause_reason"]) == (None, None, None)
    _, file = await proxy.call("GET", f"/v1/files/{batch['output_file_id']}")
    assert (file["object"], file["purpose"]) == ("file", "batch_output")
    async with proxy.http.get(f"/v1/files/{file['id']}/content") as response:
        text = await response.text()
    assert len(text) == file["bytes"]
    assert [json.loads(line)["custom_id"] for line in text.splitlines()] == ["a", "b"]
    assert fake.calls.qsize() == 2
    finished = [fields for name, fields in proxy.emitted if name == "request.finished"]
    assert [request["status"] for request in finished] == [200, 200]


async def test_an_instances_refusal_is_in_the_error_file(proxy: JobsProxy) -> None:
    await proxy.begin()
    await proxy.fake(refuse)
    batch = await proxy.ended(await proxy.batch(request("a")))
    assert batch["request_counts"]["failed"] == 1
    async with proxy.http.get(f"/v1/files/{batch['error_file_id']}/content") as response:
        line = json.loads(await response.text())
    assert line["response"]["status_code"] == 400


async def test_metrics_count_batches_and_lines(proxy: JobsProxy) -> None:
    await proxy.begin()
    await proxy.fake()
    await proxy.ended(await proxy.batch(request("a")))
    async with proxy.http.get("/metrics") as response:
        text = await response.text()
    assert 'corral_batch_lines_total{outcome="completed"} 1.0' in text
    assert 'corral_batches_ended_total{status="completed"} 1.0' in text
    assert 'corral_batches{status="in_progress"} 0.0' in text
    assert "corral_batches_paused 0.0" in text


async def test_nothing_is_written_before_it_is_used(proxy: JobsProxy) -> None:
    await proxy.begin()
    await proxy.call("GET", "/v1/models")
    assert not proxy.jobs_directory.exists()


async def test_a_cancelled_batch_closes_its_requests(proxy: JobsProxy) -> None:
    await proxy.begin()
    fake = await proxy.fake(hang)
    batch = await proxy.batch(request("a"))
    call = await fake.calls.get()
    status, cancelling = await proxy.call("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (status, cancelling["status"]) == (200, "cancelling")
    await until(call.reader.at_eof)
    assert (await proxy.ended(batch))["status"] == "cancelled"
    status, error = await proxy.call("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (status, error["error"]["code"]) == (409, "conflict")


async def test_lines_go_back_to_the_batch_when_the_server_stops(proxy: JobsProxy) -> None:
    await proxy.begin()
    fake = await proxy.fake(hang)
    batch = await proxy.batch(request("a"))
    await fake.calls.get()
    await proxy.end()
    await proxy.server.drain(5)
    await proxy.server.close()
    proxy.router.withdraw(fake.name)
    await proxy.fake(name="chat.2")
    await proxy.begin()
    assert (await proxy.ended(batch))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_other_keys_see_no_file_and_no_batch(proxy: JobsProxy, tmp_path: Path) -> None:
    await proxy.begin(**with_keys(tmp_path))
    await proxy.fake()
    batch = await proxy.ended(await proxy.batch(request("a"), headers=ME), ME)
    assert batch["status"] == "completed"
    for path in ("/v1/files", "/v1/batches"):
        assert (await proxy.call("GET", path, headers=YOU))[1]["data"] == []
    file_id, batch_path = batch["output_file_id"], f"/v1/batches/{batch['id']}"
    for method, path in (
        ("GET", batch_path),
        ("POST", f"{batch_path}/cancel"),
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
    ):
        assert (await proxy.call(method, path, headers=YOU))[0] == 404
        assert (await proxy.call(method, path))[0] == 401
    assert (await proxy.create(batch["input_file_id"], YOU))[0] == 400
    assert len((await proxy.call("GET", "/v1/files", headers=ME))[1]["data"]) == 2


async def test_lines_count_as_requests_of_their_key(proxy: JobsProxy, tmp_path: Path) -> None:
    path = with_keys(tmp_path)
    path["api_keys_file"].write_text(KEYS.replace("100", "5"))
    await proxy.begin(**path)
    fake = await proxy.fake()
    await proxy.batch(*[request(f"r{i}") for i in range(12)], headers=ME)
    await until(lambda: any(name == "request.rejected" for name, _ in proxy.emitted))
    refused = next(fields for name, fields in proxy.emitted if name == "request.rejected")
    assert (refused["client"], refused["code"]) == ("me", "rate_limit_exceeded")
    assert fake.calls.qsize() == 3  # and two requests that made the batch


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_foreign_origin_changes_nothing(proxy: JobsProxy, method: str) -> None:
    await proxy.begin()
    _, file = await proxy.upload(b"{}\n")
    path = "/v1/files" if method == "POST" else f"/v1/files/{file['id']}"
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await proxy.call(method, path, headers=headers))[0] == 403
    assert (await proxy.call("GET", f"/v1/files/{file['id']}"))[0] == 200


async def test_a_file_has_the_sent_bytes_until_it_is_deleted(proxy: JobsProxy) -> None:
    await proxy.begin()
    content = b'{"a": "\xc3\xa4"}\r\n\n{"b": 1}'
    status, file = await proxy.upload(content)
    assert (status, file["bytes"], file["filename"]) == (200, len(content), "a.jsonl")
    path = f"/v1/files/{file['id']}"
    async with proxy.http.get(f"{path}/content") as response:
        assert await response.read() == content
    async with proxy.http.head(f"{path}/content") as response:
        assert response.headers["Content-Length"] == str(len(content))
    deleted = {"id": file["id"], "object": "file", "deleted": True}
    assert await proxy.call("DELETE", path) == (200, deleted)
    assert (await proxy.call("GET", path))[0] == 404
    assert (await proxy.call("DELETE", path))[0] == 404


async def test_a_file_that_a_batch_reads_is_not_deleted(proxy: JobsProxy) -> None:
    await proxy.begin()
    await proxy.fake(hang)
    batch = await proxy.batch(request("a"))
    status, error = await proxy.call("DELETE", f"/v1/files/{batch['input_file_id']}")
    assert (status, batch["id"] in error["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        (b"", {}, "empty"),
        (b"x" * 3000, {}, "max_line_bytes"),
        (b"{}\n", {"purpose": "assistants"}, "purpose"),
        (b"{}\n", {"colour": "red"}, "fields"),
        (b"{}\n", {"expires_after[anchor]": "created_at"}, "expires_after"),
        (b"{}\n", {"expires_after[seconds]": "1"}, "3600"),
    ],
)
async def test_an_upload_that_is_refused_leaves_nothing(
    proxy: JobsProxy, content: bytes, fields: dict[str, str], said: str
) -> None:
    await proxy.begin()
    status, error = await proxy.upload(content, None, **fields)
    assert status == 400
    assert said in error["error"]["message"]
    assert (await proxy.call("GET", "/v1/files"))[1]["data"] == []


@pytest.mark.parametrize("body", [b"", b"--b", b"--b\r\n\r\n\r\n", b"x" * 300_000])
async def test_a_malformed_form_is_refused(proxy: JobsProxy, body: bytes) -> None:
    await proxy.begin()
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert (await proxy.call("POST", "/v1/files", data=body, headers=headers))[0] == 400
    assert (await proxy.call("POST", "/v1/files", data=body))[0] == 400


async def test_lists_are_paged(proxy: JobsProxy) -> None:
    await proxy.begin()
    ids = [(await proxy.upload(b"{}\n"))[1]["id"] for _ in range(3)]
    _, page = await proxy.call("GET", "/v1/files?limit=2&order=asc")
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (ids[:2], True)
    _, page = await proxy.call("GET", f"/v1/files?limit=2&order=asc&after={ids[1]}")
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (ids[2:], False)
    _, page = await proxy.call("GET", "/v1/files?purpose=batch")
    assert [entry["id"] for entry in page["data"]] == ids[::-1]
    assert (await proxy.call("GET", "/v1/files?purpose=vision"))[1]["data"] == []
    for query in ("limit=0", "limit=x", "order=up"):
        assert (await proxy.call("GET", f"/v1/files?{query}"))[0] == 400
    batches = [(await proxy.create(id_))[1]["id"] for id_ in ids[:2]]
    _, page = await proxy.call("GET", "/v1/batches?limit=1")
    assert ([entry["id"] for entry in page["data"]], page["has_more"]) == (batches[1:], True)
    _, page = await proxy.call("GET", f"/v1/batches?after={batches[1]}")
    assert [entry["id"] for entry in page["data"]] == batches[:1]


@pytest.mark.parametrize(
    "members",
    [
        {"input_file_id": 1},
        {"input_file_id": "file-none"},
        {"endpoint": "/v1/images/edits"},
        {"completion_window": "1h"},
        {"metadata": {"a": 1}},
        {"metadata": {"a": "x" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": True}},
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
    ],
)
async def test_an_invalid_batch_is_refused(proxy: JobsProxy, members: dict[str, Any]) -> None:
    await proxy.begin()
    _, file = await proxy.upload(b"{}\n")
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", **members}
    assert (await proxy.call("POST", "/v1/batches", json=body))[0] == 400
    assert (await proxy.call("GET", "/v1/batches"))[1]["data"] == []


async def test_more_batches_than_may_run_get_429(proxy: JobsProxy) -> None:
    await proxy.begin()
    await proxy.fake(hang)
    _, file = await proxy.upload(request("a"))
    found = [(await proxy.create(file["id"], metadata={"a": "b"}))[0] for _ in range(3)]
    assert found == [200, 200, 429]


async def test_uploads_stop_before_results_have_no_space(proxy: JobsProxy) -> None:
    proxy.job_settings = JobSettings(total_bytes=1024**2)
    await proxy.begin()
    for _ in range(9):
        assert (await proxy.upload(b"x" * 90_000 + b"\n"))[0] == 200
    status, error = await proxy.upload(b"x" * 90_000 + b"\n")
    assert (status, error["error"]["code"]) == (507, "storage_full")
