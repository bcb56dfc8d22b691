"""The pipe from the host that started the daemon."""

import asyncio
import os
import subprocess
import sys

from support.corral_cli import PATIENCE_S

from supervisor.daemon.desktop import exit_with_starter, watch_starter

_PROGRAM = """
import time
from supervisor.daemon.desktop import exit_with_starter
with exit_with_starter(0):
    print("in the block", flush=True)
    time.sleep(60)
"""


async def test_the_end_of_the_starter_is_noticed() -> None:
    reader, writer = os.pipe()
    closed = asyncio.Event()
    with watch_starter(reader, closed.set):
        os.close(writer)
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()
    os.close(reader)


def test_a_process_that_is_starting_ends_with_its_starter() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=pipe, stdout=pipe) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_starter_that_stays_ends_nothing() -> None:
    reader, writer = os.pipe()
    with exit_with_starter(reader):
        pass
    os.close(writer)
    os.close(reader)
