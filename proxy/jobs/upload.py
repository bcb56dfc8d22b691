"""Writes a file to the database while it arrives; an unfinished one does not exist for clients."""

from __future__ import annotations

from typing import Final

from proxy.errors import BadRequest, StorageFull
from proxy.jobs import file_rows
from proxy.jobs.ids import new_id
from proxy.jobs.line_runner import Tools
from proxy.jobs.line_splitter import LineSplitter
from proxy.jobs.records import StoredFile

# Of lines that are written in one transaction.
_WRITE_BYTES: Final = 1024**2


class Upload:
    """A file that a client sends."""

    def __init__(self, owner: str, tools: Tools) -> None:
        self._owner = owner
        self._tools = tools
        self.id = new_id("file-")
        self._splitter = LineSplitter(tools.settings)
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._written = 0
        self._key = 0

    async def begin(self, filename: str) -> None:
        """Raises StorageFull or StorageFailed, as all methods."""
        new = (self.id, self._owner, filename, self._tools.now())
        self._key = await self._tools.database.write(lambda one: file_rows.begin(one, new))

    async def feed(self, piece: bytes) -> None:
        """Take bytes of the file. Raises BadRequest above a limit."""
        await self._keep(self._splitter.feed(piece))

    async def finish(self, ttl_s: int | None) -> StoredFile:
        """Make it exist for clients. Raises BadRequest where it is empty."""
        await self._keep(self._splitter.close())
        await self._write()
        size_bytes = self._splitter.size_bytes
        if not size_bytes:
            raise BadRequest("the file is empty")
        expires_at = self._tools.now() + (ttl_s or self._tools.settings.keep_files_s)
        await self._tools.database.write(
            lambda one: file_rows.finish(one, self._key, size_bytes, expires_at)
        )
        found = await self._tools.database.read(
            lambda one: file_rows.find(one, self._owner, self.id)
        )
        if found is None:  # only if its time is over already
            raise BadRequest("the file has expired")
        return found

    async def _keep(self, lines: list[bytes]) -> None:
        self._lines += lines
        self._lines_bytes += sum(map(len, lines))
        if self._lines_bytes >= _WRITE_BYTES:
            await self._write()

    async def _write(self) -> None:
        lines, first = self._lines, self._written + 1
        self._lines, self._lines_bytes, self._written = [], 0, self._written + len(lines)
        used_bytes = await self._tools.database.read(file_rows.used_bytes)
        if used_bytes > self._tools.settings.total_bytes * 3 // 4:
            raise StorageFull(
                "files and results of batches take three quarters of their disk space; delete "
                "files, or raise total_bytes under [jobs]"
            )
        await self._tools.database.write(
            lambda one: file_rows.add_lines(one, self._key, first, lines)
        )
