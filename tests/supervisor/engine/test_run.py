from pathlib import Path

from supervisor.engine.child import Exit
from supervisor.engine.client import Endpoint
from supervisor.engine.launch import Launch, Progress
from supervisor.engine.run import ProcessRun, run_to_exit

SCRIPT = """
for value in 0.0 0.001 0.011 0.019 1.0; do
    echo 'cmd_child_to_router:state:{"state":"loading","payload":{"stages":["text_model"],\
"current":"text_model","value":'$value'}}'
done
"""


def a_run(runtime: Path, script: str, seen: list[Progress]) -> ProcessRun:
    launch = Launch(
        argv=("/bin/sh", "-c", script),
        env={},
        cwd=runtime,
        endpoint=Endpoint(),
        api_key="k",
        log_path=runtime / "chat.0.log",
    )
    return ProcessRun(1, launch, clock=lambda: 0.0, on_progress=seen.append)


async def test_each_percent_is_reported_once(tmp_path: Path) -> None:
    seen: list[Progress] = []
    assert await run_to_exit(lambda: a_run(tmp_path, SCRIPT, seen)) == Exit(0)
    assert [progress[1] for progress in seen] == [0.0, 0.011, 1.0]


async def test_an_unexpected_error_is_a_cause(tmp_path: Path) -> None:
    def fails() -> ProcessRun:
        raise OSError("no descriptor is free")

    found = await run_to_exit(fails)
    assert not isinstance(found, Exit)
    assert found.code == "internal"
