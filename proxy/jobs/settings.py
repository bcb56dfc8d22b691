"""`[jobs]`: the limits of files and batches."""

from __future__ import annotations

from pydantic import Field

from proxy.config.types import SettingsTable


class JobSettings(SettingsTable):
    """`[jobs]`: the limits of OpenAI's Batch API.

    Source of the first two and of `keep_files_s`: OpenAI's API reference, files and batches.
    """

    max_file_bytes: int = Field(
        200 * 1000**2, ge=1024, le=2**40, description="largest file of requests, in bytes"
    )
    max_lines: int = Field(
        50_000, ge=1, le=10_000_000, description="most lines of a file of requests"
    )
    max_line_bytes: int = Field(
        16 * 1024**2, ge=1024, le=2**30, description="longest line of a file of requests, in bytes"
    )
    total_bytes: int = Field(
        8 * 1024**3,
        ge=1024**2,
        le=2**50,
        description="disk space for all files and results, in bytes; files may take three quarters "
        "of it",
    )
    max_jobs: int = Field(
        64, ge=1, le=10_000, description="batches of one API key that have not ended; more get 429"
    )
    max_in_flight: int = Field(
        64, ge=1, le=10_000, description="lines of all batches that one model computes at once"
    )
    max_attempts: int = Field(
        5,
        ge=1,
        le=100,
        description="attempts at a line that fails with 500, 502 or 504 before that is its result; "
        "waits for a slot or a model do not count",
    )
    keep_files_s: int = Field(
        30 * 86_400,
        ge=3600,
        le=10 * 365 * 86_400,
        description="seconds until a file is deleted, results included",
    )
