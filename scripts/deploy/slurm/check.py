"""A front and four tasks of a real Slurm, on four nodes of this machine, under eight streams.

`corral slurm` submits, scales and cancels the tasks of corral.sbatch. One is requeued, one killed,
one reaches its time limit, one leaves a drained node; the front is restarted; then `scale --auto`
follows the clients, to no task and back. Each answer must be whole; only those that the killed
daemon was giving may end, and in an error event. A conversation must go to the task that has it,
and when that is killed with its engine, to another, which finds it in the shared directory of slot
files. Exits with 1 after any deviation.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli  # noqa: E402

from scripts.machines import PATIENCE_S, Clients, Phase, free_port, show  # noqa: E402

TASKS = 4
MODEL = """
[supervisor]
slots_directory = "{slots}"
[models.chat]
path = "{path}"
flags = {{ parallel = 4, threads = 1, ctx-size = 32768 }}
"""
# The least share of a prompt that another task finds in the file of a conversation.
FOUND = 0.9
# Of `scale --auto`; more tasks than the streams of `FEW` need, fewer than those of `MANY`.
MOST, FEW, MANY = 3, 2, 16
FRONT = """
[proxy]
listen = "127.0.0.1:{port}"
[nodes.slurm]
url = "file+http://{nodes}/*.json"
local_first = false
models = ["chat"]
on_demand = true
"""
# A small task, and a signal soon after its time limit has been lowered.
SMALL = {"cpus-per-task": "1", "mem": "400M", "time": "30", "signal": "B:USR1@60"}


@dataclass(frozen=True)
class Turn:
    """Which instance answered, the tokens of the prompt, and those that came from a cache."""

    instance: str
    prompt: int
    cached: int


class Cluster:
    """munged, slurmctld and four slurmd, with all their files in one directory."""

    def __init__(self, home: Path) -> None:
        self._home = home
        first = free_port("127.0.0.1")
        text = (HERE / "slurm.conf").read_text("utf-8")
        ports = {"port": first, "node_ports": f"{first + 1}-{first + TASKS}"}
        text = text.format(home=home, host=socket.gethostname().partition(".")[0], **ports)
        self.conf = home / "slurm.conf"
        self.conf.write_text(text, "utf-8")

    @contextmanager
    def running(self) -> Iterator[None]:
        key = self._home / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = (f"--key-file={key}", f"--socket={self._home}/munge.socket", "--force")
        files = [f"--{kind}-file={self._home}/munge.{kind}" for kind in ("pid", "log", "seed")]
        conf = ("-D", "-f", str(self.conf))
        with ExitStack() as stack:
            stack.enter_context(self._program("munged", "--foreground", *munge, *files))
            wait((self._home / "munge.socket").exists, "munged")
            stack.enter_context(self._program("slurmctld", *conf))
            for number in range(1, TASKS + 1):
                (self._home / f"spool-node{number}").mkdir()
                stack.enter_context(self._program("slurmd", *conf, "-N", f"node{number}"))
            wait(lambda: self("sinfo", "-hNo", "%T").split() == ["idle"] * TASKS, "four nodes")
            yield

    @contextmanager
    def _program(self, *argv: str) -> Iterator[None]:
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def __call__(self, *argv: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done.stdout


class Check:
    def __init__(self, home: Path, cluster: Cluster, clients: int) -> None:
        self._cluster = cluster
        self._shared = home / "shared"
        self._nodes = self._shared / "nodes"
        self._nodes.mkdir(parents=True)
        model = tiny_gguf.make(
            home / "alphabet.gguf", mode="cycle", embd=128, heads=4, layers=4, ff=256, ctx=8192
        )
        self._slots = self._shared / "slots"
        settings = MODEL.format(path=model, slots=self._slots)
        (self._shared / "corral.toml").write_text(settings, "utf-8")
        text = (HERE / "corral.sbatch").read_text("utf-8")
        for option, value in SMALL.items():
            text = re.sub(f"(?m)^#SBATCH --{option}=.*", f"#SBATCH --{option}={value}", text)
        (self._shared / "corral.sbatch").write_text(text, "utf-8")
        (home / "front").mkdir()
        self._port = free_port("127.0.0.1")
        self._front = CorralCli(home / "front")
        self._front.env |= {"SLURM_CONF": str(cluster.conf), "TMPDIR": str(home)}
        self._front.configure(FRONT.format(port=self._port, nodes=self._nodes))
        self.phases: list[Phase] = []
        # Long enough that a file pays.
        self._talks = [
            [{"role": "user", "content": f"conversation {number} " * 400}] for number in range(8)
        ]
        self.clients = Clients("127.0.0.1", self._port, clients)

    def run(self) -> None:
        self._serve_front()
        try:
            self._front("slurm", "submit", "corral.sbatch", "--tasks", "4", directory=self._shared)
            self._wait(lambda: len(self._up()) == TASKS, "four tasks up")
            self._remember()
            self._lose_task()
            with self.clients.running():
                self._happen()
            self._follow_demand()
            self._cancel()
        finally:
            self._front("slurm", "cancel", "--now")
            wait(lambda: not self._cluster("squeue", "-h"), "no tasks")
            self._front.end()

    def _serve_front(self) -> None:
        self._front.serve(until_ready=False)
        wait(self._front.is_running, "the front")

    def _happen(self) -> None:
        self._phase("four tasks", lambda: None, TASKS)
        self._phase("one requeued", self._requeue, TASKS)
        self._phase("one killed", self._kill, TASKS)
        self.clients.killed = ""
        self._phase("one at its time limit", self._time_out, TASKS)
        self._phase("a node drained", self._drain_node, TASKS)
        self._phase("scaled to two", lambda: self._corral("scale", "2"), 2)
        self._phase("scaled to three", lambda: self._corral("scale", "3"), 3)

    def _follow_demand(self) -> None:
        """Let `scale --auto` end the tasks that few clients do not need, and submit more for many.

        Three tasks run. Without clients all end, and requests of the next ones wait until a task
        serves. All its decisions are counted: it must not waver.
        """
        words = ("--auto", "--max", str(MOST), "--grow-after", "10", "--shrink-after", "20")
        to_none = ("--min", "0", "--script", "corral.sbatch")
        argv = self._front.argv("slurm", "scale", *words, *to_none)
        with tempfile.TemporaryFile("w+") as said:
            auto = subprocess.Popen(
                argv, cwd=self._shared, env=self._front.env, stdout=said, stderr=said
            )
            try:
                for clients, up in ((FEW, 1), (MANY, MOST), (FEW, 1), (0, 0), (FEW, 1)):
                    self.clients = Clients("127.0.0.1", self._port, clients)
                    with self.clients.running():
                        self._phase(f"auto: {clients} clients", lambda: None, up)
                        self._stay(up, 30)
            finally:
                auto.terminate()
                auto.wait()
            said.seek(0)
            lines = said.read().splitlines()
        print("corral slurm scale --auto:", *lines, sep="\n  ")
        if len(lines) != 2 + 1 + 2 + 1 + 1:
            self._problem(f"scale --auto: {len(lines)} decisions instead of 7")

    def _stay(self, tasks: int, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            if (found := len(self._tasks())) != tasks:
                self._problem(f"{self.clients.phase.name}: {found} tasks instead of {tasks}")
                return
            time.sleep(1)

    def _phase(self, name: str, do: Callable[[], object], up: int) -> None:
        """Do something, wait for its effect, and let it stand for some answers, if tasks serve."""
        phase = self.clients.phase = Phase(name)
        self.phases.append(phase)
        began_at_s = time.monotonic()
        do()
        self._wait(lambda: len(self._up()) == up == len(self._tasks()), f"{name}: {up} up")
        phase.took_s = time.monotonic() - began_at_s
        done = phase.outcomes["whole"]
        if up:
            self._wait(lambda: phase.outcomes["whole"] >= done + 16, f"{name}: answers")

    def _wait(self, is_so: Callable[[], bool], what: str) -> None:
        try:
            wait(is_so, what)
        except TimeoutError as error:
            self._problem(str(error))
            print(error, self._front.ok("status"), self._corral("status"), sep="\n")

    def _problem(self, text: str) -> None:
        self.clients.phase.problems.append(text)

    def _corral(self, *words: str) -> str:
        return self._front.ok("slurm", *words)

    def _tasks(self) -> list[dict[str, str]]:
        tasks: list[dict[str, str]] = self._front.data("slurm", "status")
        return [task for task in tasks if task["state"] == "RUNNING"]

    def _up(self) -> set[str]:
        return {node.name for node in self._front.status().nodes if node.state == "up"}

    # What happens to tasks

    def _requeue(self) -> None:
        self._leave(self._tasks()[0]["id"], "requeue")

    def _leave(self, task: str, *verb: str) -> None:
        """Wait until a task has left its node, then let it begin again now and not in 2 minutes."""
        before = self._up()
        self._cluster("scontrol", *verb, task)
        self._return(task, before)

    def _return(self, task: str, before: set[str]) -> None:
        self._wait(lambda: len(before & self._up()) == TASKS - 1, f"{task} leaves")
        self._wait(lambda: self._state(task) == "PENDING", f"{task} pending")
        self._cluster("scontrol", "update", f"jobid={task}", "starttime=now")

    def _state(self, task: str) -> str:
        return self._cluster("squeue", "-hj", task, "-o", "%T").strip()

    def _kill(self) -> None:
        """Kill the daemon of a task while it answers."""
        daemons = {self._name(daemon): daemon for daemon in self._daemons()}
        name = max(daemons, key=self._busy)
        self._wait(lambda: self._busy(name) > 1, f"requests at {name}")
        self.clients.killed = name
        daemons[name].send_signal(signal.SIGKILL)
        self._wait(lambda: name not in self._up(), f"{name} down")

    def _name(self, daemon: psutil.Process) -> str:
        """Return the name that the front has for a task."""
        ports = {found.laddr.port for found in daemon.net_connections() if found.status == "LISTEN"}
        [name] = [name for name in self._up() if int(name.rpartition(":")[2]) in ports]
        return name

    def _busy(self, name: str) -> int:
        nodes = self._front.status().nodes
        return sum(node.slots_busy for node in nodes if node.name == name)

    def _time_out(self) -> None:
        """Let the time limit of the task come that has the number of the whole array."""
        before, daemons = self._up(), self._daemons()
        task = min(task_of(daemon) for daemon in daemons if has_number_of_array(daemon))
        minutes = self._cluster("squeue", "-hj", task, "-o", "%M").partition(":")[0]
        self._cluster("scontrol", "update", f"jobid={task}", f"timelimit={int(minutes) + 2}")
        self._return(task, before)

    def _drain_node(self) -> None:
        task = self._tasks()[2]
        node = f"nodename={task['node']}"
        self._cluster("scontrol", "update", node, "state=drain", "reason=check")
        self._leave(task["id"], "requeue")
        self._wait(lambda: self._state(task["id"]) == "RUNNING", f"{task['id']} runs again")
        if task["node"] in {now["node"] for now in self._tasks() if now["id"] == task["id"]}:
            self._problem(f"{task['id']} began again on {task['node']}, which is drained")
        self._cluster("scontrol", "update", node, "state=resume")

    def _cancel(self) -> None:
        self.clients.phase = Phase("cancelled")
        self.phases.append(self.clients.phase)
        self._corral("cancel")
        self._wait(lambda: not self._cluster("squeue", "-h"), "no tasks")
        for what, left in (
            ("daemons", self._daemons()),
            ("engines", self._processes("llama-server")),
            ("files of nodes", list(self._nodes.iterdir())),
        ):
            if left:
                self._problem(f"{what} are left: {left}")

    def _daemons(self) -> list[psutil.Process]:
        return [found for found in self._processes("corral") if "serve" in found.cmdline()]

    def _processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of tasks with this program."""
        found = []
        for process in psutil.process_iter():
            try:
                is_task = str(self._shared.parent) in process.environ().get("TMPDIR", "")
                words = [Path(word).name for word in process.cmdline()[:2]]
            except psutil.Error:
                continue
            if is_task and name in words:
                found.append(process)
        return found

    # Conversations

    def _remember(self) -> None:
        """Have each of eight conversations go where its first turn went, also by a new front."""
        phase = self.clients.phase = Phase("conversations")
        self.phases.append(phase)
        owners = [self._turn(talk).instance for talk in self._talks]
        for which in ("the same front", "a new front"):
            if which == "a new front":
                self._front.ok("stop")
                self._serve_front()
                self._wait(lambda: len(self._up()) == TASKS, "four tasks up")
            turns = [self._turn(talk) for talk in self._talks]
            again = sum(owner == turn.instance for owner, turn in zip(owners, turns, strict=True))
            print(
                f"{which}: {again} of 8 conversations at their task, "
                f"{min(turn.cached for turn in turns)} tokens or more of each in its cache"
            )
            if again < len(turns) or not all(turn.cached for turn in turns):
                self._problem(f"{which}: {again} of 8 conversations were found again")
        phase.outcomes["whole"] += 3 * len(self._talks)

    def _lose_task(self) -> None:
        """Kill a task with its engine; others continue its conversations from their files."""
        phase = self.clients.phase = Phase("a task lost")
        self.phases.append(phase)
        files = self._slots.glob
        self._wait(lambda: len([*files("kept/*/*.json")]) >= len(self._talks), "files of each")
        owners = [self._turn(talk).instance for talk in self._talks]
        before = self._up()
        daemon = next(found for found in self._daemons() if not has_number_of_array(found))
        name = self._name(daemon)
        began_at_s = time.monotonic()
        self._cluster("scancel", "--signal=KILL", "--full", task_of(daemon))
        self._wait(lambda: self._up() == before - {name}, f"{name} down")
        phase.took_s = time.monotonic() - began_at_s
        lost = [talk for talk, owner in zip(self._talks, owners, strict=True) if name in owner]
        turns = [self._turn(talk) for talk in lost]
        tokens = ", ".join(f"{turn.cached} of {turn.prompt}" for turn in turns)
        print(f"a task killed: of its conversations, others found {tokens or 'no'} tokens in files")
        if not turns or any(turn.cached < FOUND * turn.prompt for turn in turns):
            self._problem(f"a task killed: others found {tokens or 'no'} tokens")
        phase.outcomes["whole"] += len(self._talks) + len(lost)
        self._corral("scale", str(TASKS))
        self._wait(lambda: len(self._up()) == TASKS, "four tasks up")

    def _turn(self, talk: list[dict[str, str]]) -> Turn:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        body = {"model": "chat", "max_tokens": 8, "messages": talk}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.load(response)
        connection.close()
        if response.status != http.client.OK:
            raise SystemExit(f"a turn failed: {response.status} {answer}")
        talk += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        usage = answer["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return Turn(response.headers["X-Corral-Instance"], usage["prompt_tokens"], cached)


def task_of(daemon: psutil.Process) -> str:
    variables = daemon.environ()
    return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"


def has_number_of_array(daemon: psutil.Process) -> bool:
    variables = daemon.environ()
    return variables["SLURM_JOB_ID"] == variables["SLURM_ARRAY_JOB_ID"]


def wait(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not in {PATIENCE_S} s: {what}")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-slurm-") as home:
        cluster = Cluster(Path(home))
        with cluster.running():
            check = Check(Path(home), cluster, options.clients)
            check.run()
    return 0 if show(check.phases) else 1


if __name__ == "__main__":
    sys.exit(main())
