"""Every fault of a download ends in the right file, or in a clear error and nothing half."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
from support.hub import CONTENT, FILE, REPO, FakeHub, Refusal

from supervisor.errors import (
    AccessDenied,
    CorralError,
    DiskFull,
    DownloadFailed,
    HubAccessDenied,
    NoSuchModel,
)
from supervisor.models.hub import HubClient
from supervisor.models.local_stores import HubCache
from supervisor.models.repository import RemoteFile, Repository
from supervisor.models.transfer import Transfer, fetch, take_turn

Make = Callable[[], Transfer]


def ignore(_stage: str, _done_bytes: int, _all_bytes: int) -> None:
    return


def failure(transfer: Transfer, client: HubClient) -> CorralError:
    with pytest.raises(CorralError) as caught:
        fetch(transfer, client, ignore)
    assert not transfer.target.exists()
    return caught.value


def begin(transfer: Transfer, content: bytes) -> None:
    transfer.part.parent.mkdir(parents=True)
    transfer.part.write_bytes(content)


def test_a_file_comes_whole_and_is_verified(
    transfer: Make, client: HubClient, hub: FakeHub
) -> None:
    steps: list[tuple[str, int, int]] = []
    one = transfer()
    done = fetch(one, client, lambda *step: steps.append(step))
    assert one.target.read_bytes() == CONTENT
    assert not one.part.exists()
    assert done == (len(CONTENT), one.digest)
    assert steps[-1] == ("download", len(CONTENT), len(CONTENT))


def test_a_file_that_is_there_is_not_requested(
    transfer: Make, client: HubClient, hub: FakeHub
) -> None:
    fetch(transfer(), client, ignore)
    before = len(hub.seen)
    assert fetch(transfer(), client, ignore) == (0, "")
    assert len(hub.seen) == before


def test_a_part_is_continued_with_the_rest_alone(
    transfer: Make, client: HubClient, hub: FakeHub
) -> None:
    one = transfer()
    begin(one, CONTENT[:300_000])
    done = fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT
    assert hub.served_bytes[FILE] == len(CONTENT) - 300_000 == done[0]


def test_a_cut_connection_is_continued(
    transfer: Make, client: HubClient, hub: FakeHub, waits: list[float]
) -> None:
    hub.cuts = [100_000, 0, 150_000]
    one = transfer()
    fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT
    assert hub.served_bytes[FILE] == len(CONTENT)
    assert waits == [1, 2, 1]  # longer while nothing comes


def test_a_connection_that_is_always_cut_ends_with_the_received_bytes(
    transfer: Make, client: HubClient, hub: FakeHub, waits: list[float]
) -> None:
    hub.cuts = [50_000, *[0] * 9]
    one = transfer()
    error = failure(one, client)
    assert isinstance(error, DownloadFailed)
    assert "broke" in error.message
    assert "continues where it stopped" in (error.hint or "")
    assert one.part.read_bytes() == CONTENT[:50_000]
    assert waits == [1, 2, 4, 8]
    assert hub.requests("resolve") == 5


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_when_it_says(
    transfer: Make, client: HubClient, hub: FakeHub, waits: list[float], status: int
) -> None:
    hub.refusals = [Refusal(status, {"retry-after": "7"}), Refusal(status)]
    one = transfer()
    fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT
    assert waits == [7, 2]


def test_a_server_that_wants_a_long_wait_is_left_to_the_user(
    transfer: Make, client: HubClient, hub: FakeHub, waits: list[float]
) -> None:
    hub.refusals = [Refusal(429, {"retry-after": "3600"})]
    error = failure(transfer(), client)
    assert "429" in error.message
    assert "in 3600 s" in (error.hint or "")
    assert waits == []


def test_a_wrong_digest_leaves_nothing(transfer: Make, client: HubClient, hub: FakeHub) -> None:
    hub.damaged = {FILE}
    one = transfer()
    error = failure(one, client)
    assert isinstance(error, DownloadFailed)
    assert "digest" in error.message
    assert not one.part.exists()


def test_a_damaged_part_is_found_out(transfer: Make, client: HubClient) -> None:
    one = transfer()
    begin(one, b"x" * 1000)
    failure(one, client)
    assert fetch(one, client, ignore)[0] == len(CONTENT)


@pytest.mark.parametrize("part", [CONTENT[:1000], CONTENT + b"more"])
def test_a_server_without_ranges_sends_all_again(
    transfer: Make, client: HubClient, hub: FakeHub, part: bytes
) -> None:
    hub.ignores_ranges = True
    one = transfer()
    begin(one, part)
    fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT


def test_a_server_with_another_file_is_not_believed(
    transfer: Make, client: HubClient, hub: FakeHub
) -> None:
    one = transfer()
    hub.repositories[REPO][FILE] = CONTENT + b"more"
    assert "another size" in failure(one, client).message


def test_a_large_file_comes_in_parts(transfer: Make, hub: FakeHub, waits: list[float]) -> None:
    one = transfer()
    fetch(one, HubClient(hub.url, sleep=waits.append, range_max_bytes=200_000), ignore)
    assert one.target.read_bytes() == CONTENT
    assert hub.requests("resolve") == 3


def test_a_file_outside_lfs_is_verified_as_git_does(
    repository: Repository, cache: HubCache, transfer: Make, client: HubClient, hub: FakeHub
) -> None:
    hub.in_git = {FILE}
    digest = hub.digest(FILE, CONTENT)
    assert len(digest) == 40
    one = replace(transfer(), digest=digest, target=cache.blob(REPO, digest))
    fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT


def test_a_full_disk_is_named(transfer: Make, client: HubClient) -> None:
    one = transfer()
    one.part.parent.mkdir(parents=True)
    one.part.symlink_to("/dev/full")
    error = failure(one, client)
    assert isinstance(error, DiskFull)
    assert "continues where it stopped" in (error.hint or "")


def test_a_directory_that_cannot_be_written_is_named(transfer: Make, client: HubClient) -> None:
    one = transfer()
    one.part.parent.parent.mkdir(parents=True)
    one.part.parent.write_text("a file")
    assert isinstance(failure(one, client), AccessDenied)


@pytest.mark.parametrize(
    ("refusal", "kind", "word"),
    [
        (Refusal(401, {"x-error-code": "GatedRepo"}), HubAccessDenied, f"{REPO} is gated"),
        (Refusal(403, {"x-error-code": "GatedRepo"}), HubAccessDenied, f"{REPO} is gated"),
        (Refusal(403, {"x-error-message": "not for you"}), HubAccessDenied, "not for you"),
        (Refusal(404, {"x-error-code": "EntryNotFound"}), NoSuchModel, f"{REPO} has no {FILE}"),
        (Refusal(400), DownloadFailed, "400"),
    ],
)
def test_a_refusal_is_explained(
    transfer: Make,
    client: HubClient,
    hub: FakeHub,
    refusal: Refusal,
    kind: type[CorralError],
    word: str,
) -> None:
    hub.refusals = [refusal]
    error = failure(transfer(), client)
    assert type(error) is kind
    assert word in error.message
    assert error.hint


def test_the_token_goes_to_the_hub_alone(
    transfer: Make, client: HubClient, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.token, hub.private = "hf_secret", {REPO}
    fetch(transfer(), client, ignore)
    (to_hub, to_cdn) = hub.seen
    assert "resolve" in to_hub[0]
    assert to_hub[1] == "Bearer hf_secret"
    assert to_cdn[1] == ""


def test_an_expired_link_to_the_download_server_is_asked_for_again(
    transfer: Make, client: HubClient, hub: FakeHub, waits: list[float]
) -> None:
    hub.cdn_refusals = [Refusal(403), Refusal(404)]
    one = transfer()
    fetch(one, client, ignore)
    assert one.target.read_bytes() == CONTENT
    assert hub.requests("resolve") == 3


def test_two_commands_for_one_file_take_turns(
    transfer: Make, hub: FakeHub, waits: list[float]
) -> None:
    hub.gate.clear()
    waiting = threading.Event()
    first = HubClient(hub.url, sleep=waits.append)
    second = HubClient(hub.url, sleep=waits.append, notify=lambda _: waiting.set())
    with ThreadPoolExecutor(2) as pool:
        begun = pool.submit(fetch, transfer(), first, ignore)
        while not hub.requests("resolve"):
            assert not begun.done()
        other = pool.submit(fetch, transfer(), second, ignore)
        assert waiting.wait(60)
        hub.gate.set()
        assert begun.result()[0] == len(CONTENT)
        assert other.result()[0] == 0
    assert hub.served_bytes[FILE] == len(CONTENT)
    assert waits == []


def test_a_lock_whose_holder_does_nothing_is_given_up(transfer: Make) -> None:
    one = transfer()
    one.lock.parent.mkdir(parents=True)
    waiting = take_turn(one.lock, one.part, FILE, lambda _: None, poll_s=0.01, stalled_s=0)
    with (
        filelock.FileLock(one.lock),
        pytest.raises(DownloadFailed, match="fetched nothing"),
        waiting,
    ):
        pass


def test_a_part_of_another_program_counts_as_progress(
    transfer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = transfer()
    theirs = one.part.with_name(f"{one.digest}.0123abcd.incomplete")
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    sizes = iter(range(1, 9))

    class Lock(filelock.SoftFileLock):
        """Held by a program whose part grows at each attempt but the last."""

        def acquire(self, *_: object, **__: object) -> Any:
            if (size := next(sizes, None)) is None:
                return self
            theirs.write_bytes(b"x" * size)
            raise filelock.Timeout(self.lock_file)

    monkeypatch.setattr(filelock, "FileLock", Lock)
    said: list[str] = []
    with take_turn(one.lock, one.part, FILE, said.append, poll_s=0.001, stalled_s=0):
        assert next(sizes, None) is None
    assert said == [f"another command fetches {FILE}; waiting for it"]


def test_a_path_that_leaves_its_repository_is_refused() -> None:
    for path in ("../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "a\\x.gguf", "a\x1b.gguf"):
        with pytest.raises(DownloadFailed):
            RemoteFile(path, 1, "0" * 64)
    with pytest.raises(DownloadFailed):
        RemoteFile("x.gguf", 1, "../../etc")
    with pytest.raises(DownloadFailed):
        Repository("org/x", "main", "../..", {})


def test_a_file_without_a_digest_is_continued_only_if_it_has_a_tag(
    transfer: Make, client: HubClient, hub: FakeHub, tmp_path: Path
) -> None:
    one = replace(transfer(), digest="")
    begin(one, CONTENT[:1000])
    assert fetch(one, client, ignore)[0] == len(CONTENT)
    two = replace(one, tag='"1"', target=tmp_path / "two.gguf")
    two.part.write_bytes(CONTENT[:1000])
    assert fetch(two, client, ignore)[0] == len(CONTENT) - 1000
    assert two.target.read_bytes() == CONTENT
