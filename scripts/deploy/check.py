"""Run the image and our Kubernetes files with podman, under clients that stream.

First one container: an unknown user, no capabilities, a read-only root; SIGTERM drains it. Then
three pods of the StatefulSet behind the front: one is deleted, all are restarted, all get another
image. Every answer must be whole. Exits with 1 after any deviation.

podman 4.3 runs Pods, ConfigMaps and claims, and ignores much else. This program does the work of
the controllers: one Pod for each ordinal, replaced from the last to the first; a name in dnsmasq
for the pods that are ready; the readiness probe, the preStop hook and the grace period.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)

from scripts.machines import (  # noqa: E402
    PATIENCE_S,
    Answer,
    Clients,
    NameServer,
    Phase,
    Story,
    ask,
    show,
)

KUBERNETES: Final = ROOT / "scripts" / "deploy" / "kubernetes"
NAME: Final = "llama-corral"
FRONT: Final = "llama-corral-front"
NETWORK: Final = "llama-corral-check"
PORT: Final = 8080
REPLICAS: Final = 3
STREAMS: Final = 4
UNKNOWN_USER: Final = "54321:54321"
MODEL: Final = """
[models.chat]
path = "/data/llama-corral/models/alphabet.gguf"
flags = { parallel = 4, threads = 1, ctx-size = 8192 }
"""
# As `kubectl cp` would: the image has no shell.
COPY: Final = """
import pathlib, shutil
models = pathlib.Path("/data/llama-corral/models")
models.mkdir(parents=True, exist_ok=True, mode=0o700)
shutil.copy("/model.gguf", models / "alphabet.gguf")
"""


def run(*words: str, check: bool = True) -> str:
    """Return the output of a command."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and check:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def podman(*words: str, check: bool = True) -> str:
    return run("podman", *words, check=check)


def built(image: str, settings: str, front_settings: str) -> list[dict[str, Any]]:
    """Return the objects of the overlay `front`, with this image and these settings."""
    name, _, tag = image.rpartition(":")
    texts = {NAME: settings, FRONT: front_settings}
    with tempfile.TemporaryDirectory() as directory:
        overlay = Path(directory).resolve()
        for workload, text in texts.items():
            (overlay / workload).write_text(text, "utf-8")
        kustomization = {
            "resources": [os.path.relpath(KUBERNETES / "front", overlay)],
            "replicas": [{"name": NAME, "count": REPLICAS}],
            "images": [
                {"name": f"registry.example.com/{NAME}", "newName": name, "newTag": tag},
            ],
            "configMapGenerator": [
                {"name": workload, "behavior": "replace", "files": [f"corral.toml={workload}"]}
                for workload in texts
            ],
        }
        (overlay / "kustomization.yaml").write_text(json.dumps(kustomization), "utf-8")
        return list(yaml.safe_load_all(run("kubectl", "kustomize", str(overlay))))


def pod(workload: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a Pod of a StatefulSet or Deployment, as podman 4.3 takes it. Its claims are volumes.

    podman publishes all ports on the host, takes the name of an emptyDir for that of a volume of
    all pods, runs probes with curl in the container, and mounts a ConfigMap in place of a file.
    """
    template = copy.deepcopy(workload["spec"]["template"])
    for claim in workload["spec"].get("volumeClaimTemplates", ()):
        volume = claim["metadata"]["name"]
        source = {"claimName": f"{volume}-{name}"}
        template["spec"]["volumes"].append({"name": volume, "persistentVolumeClaim": source})
    [container] = template["spec"]["containers"]
    for key in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"):
        del container[key]
    renamed = {
        volume["name"]: f"{name}-{volume['name']}"
        for volume in template["spec"]["volumes"]
        if "emptyDir" in volume
    }
    for entry in (*template["spec"]["volumes"], *container["volumeMounts"]):
        entry["name"] = renamed.get(entry["name"], entry["name"])
    for mount in container["volumeMounts"]:
        if mount.pop("subPath", None):
            mount["mountPath"] = str(Path(mount["mountPath"]).parent)
    template["spec"]["hostname"] = name
    metadata = {"name": name, "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


class Pods(Story):
    """The pods behind the front, and the controllers that replace them."""

    def __init__(self, image: str, names: NameServer, clients: int) -> None:
        super().__init__(answers=clients, interval_s=1)
        self._image = image
        self._names = names
        self._clients = clients
        self._addresses: dict[str, str] = {}
        resolver = f'resolver = "{names.address}:{names.port}"\n'
        objects = built(
            image,
            f'[proxy]\nallowed_hosts = ["{NAME}"]\n{MODEL}',
            (KUBERNETES / "front" / "corral.toml").read_text("utf-8") + resolver,
        )
        self._set, self._front = (
            next(entry for entry in objects if entry["kind"] == kind)
            for kind in ("StatefulSet", "Deployment")
        )
        self._settings = [entry for entry in objects if entry["kind"] == "ConfigMap"]
        self._ordinals = [f"{NAME}-{ordinal}" for ordinal in range(REPLICAS)]

    @contextmanager
    def running(self, model: Path) -> Iterator[None]:
        pods = [*self._ordinals, FRONT]
        settings = [entry["metadata"]["name"] for entry in self._settings]
        claims = [f"data-{name}" for name in self._ordinals]
        scratch = [f"{name}-{volume}" for name in pods for volume in ("data", "scratch")]
        try:
            for claim in claims:
                put_model(self._image, claim, model)
            self._create(*self._ordinals)
            with self._names.running(*self._addresses.values()):
                self._create(FRONT)
                yield
        finally:
            for name in pods:
                podman("pod", "rm", "--force", "--ignore", name)
            podman("volume", "rm", "--force", *settings, *claims, *scratch, check=False)

    def run(self, other_image: str) -> None:
        self.clients = Clients(self._addresses[FRONT], PORT, self._clients, turns=5)
        with self.clients.running():
            self.phase("three pods", lambda: None, {*self._ordinals})
            deleted = self._ordinals[1]
            delete = functools.partial(self._restart, deleted)
            self.phase(f"deleted: {deleted}", delete, {*self._ordinals})
            for name in reversed(self._ordinals):
                self._replaced("restarted", name)
            [container] = self._set["spec"]["template"]["spec"]["containers"]
            container["image"] = other_image
            for name in reversed(self._ordinals):
                self._replaced("new image", name)
        for name in self._ordinals:
            image = podman("inspect", f"{name}-{NAME}", "--format", "{{.ImageName}}")
            if image != other_image:
                self.phases[-1].problems.append(f"{name} has the image {image}")

    def up(self) -> set[str]:
        status = podman("exec", f"{FRONT}-{NAME}", "corral", "status", "--json")
        nodes = json.loads(status)["data"]["nodes"]
        up = {node["name"].partition("@")[2] for node in nodes if node["state"] == "up"}
        return {name for name in self._ordinals if self._addresses.get(name) in up}

    def _replaced(self, title: str, name: str) -> None:
        self.phase(f"{title}: {name}", functools.partial(self._replace, name), {*self._ordinals})

    def _replace(self, name: str) -> None:
        """Stop a pod when it has left the list, as Kubernetes does, and create it again."""
        del self._addresses[name]
        self._set_endpoints()
        [container] = self._set["spec"]["template"]["spec"]["containers"]
        time.sleep(container["lifecycle"]["preStop"]["sleep"]["seconds"])
        self._restart(name)

    def _restart(self, name: str) -> None:
        """Stop a pod whether or not it is in the list, and create it again."""
        grace_s = self._set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        # `podman pod stop` would take the network away at once.
        podman("stop", "--time", str(grace_s), f"{name}-{NAME}")
        podman("pod", "rm", "--force", name)
        self._create(name)
        self._set_endpoints()

    def _create(self, *names: str) -> None:
        """Return when the pods are ready."""
        for name in names:
            objects = [*self._settings, pod(self._front if name == FRONT else self._set, name)]
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as manifest:
                yaml.safe_dump_all(objects, manifest)
                manifest.flush()
                podman("kube", "play", "--network", NETWORK, manifest.name)
        for name in names:
            infra = podman("pod", "inspect", name, "--format", "{{.InfraContainerID}}")
            address = address_of(infra)
            wait_ready(address, f"{name}-{NAME}")
            self._addresses[name] = address

    def _set_endpoints(self) -> None:
        known = [self._addresses[name] for name in self._ordinals if name in self._addresses]
        self._names.set(*known)


def address_of(container: str) -> str:
    networks = json.loads(
        podman("inspect", container, "--format", "{{json .NetworkSettings.Networks}}")
    )
    address: str = networks[NETWORK]["IPAddress"]
    return address


def wait_ready(address: str, container: str) -> None:
    """Return when the readiness probe succeeds."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        connection = http.client.HTTPConnection(address, PORT, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        time.sleep(0.2)
    log = podman("logs", "--tail", "20", container, check=False)
    raise SystemExit(f"{container} is not ready after {PATIENCE_S} s:\n{log}")


def put_model(image: str, volume: str, model: Path, *options: str) -> None:
    mounts = ("--volume", f"{volume}:/data", "--volume", f"{model}:/model.gguf:ro")
    podman(
        "run",
        "--rm",
        "--network=none",
        *options,
        *mounts,
        "--entrypoint",
        "python",
        image,
        "-c",
        COPY,
    )


def drain(home: Path, image: str, model: Path) -> Phase:
    """Stop a container of an unknown user while it streams."""
    phase = Phase("SIGTERM")
    (home / "corral.toml").write_text(MODEL, "utf-8")
    name, volume = f"{NAME}-alone", f"data-{NAME}-alone"
    answers: list[Answer] = []
    try:
        put_model(image, volume, model, "--user", UNKNOWN_USER)
        podman(
            *("run", "--detach", "--name", name, "--network", NETWORK),
            *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/scratch:mode=1777"),
            *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *("--volume", f"{volume}:/data", "--user", UNKNOWN_USER),
            *("--volume", f"{home}/corral.toml:/etc/llama-corral/corral.toml:ro", image),
        )
        address = address_of(name)
        wait_ready(address, name)
        prompt = [{"role": "user", "content": "hello"}]
        streams = [
            threading.Thread(target=lambda: answers.append(ask(address, PORT, prompt)))
            for _ in range(STREAMS)
        ]
        for stream in streams:
            stream.start()
        Story().wait(lambda: slots_busy(address) == STREAMS, "streams", phase)
        began_at_s = time.monotonic()
        podman("stop", "--time", str(PATIENCE_S), name)
        phase.took_s = time.monotonic() - began_at_s
        for stream in streams:
            stream.join()
        phase.outcomes.update(answer.outcome for answer in answers)
        code = podman("inspect", name, "--format", "{{.State.ExitCode}}")
        if phase.outcomes != {"whole": STREAMS} or code != "0":
            phase.problems.append(f"exit code {code}, answers: {dict(phase.outcomes)}")
    finally:
        podman("rm", "--force", "--ignore", name)
        podman("volume", "rm", "--force", volume)
    return phase


def slots_busy(address: str) -> int:
    connection = http.client.HTTPConnection(address, PORT, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        busy: int = json.load(connection.getresponse())["slots_processing"]
        return busy


@contextmanager
def network() -> Iterator[str]:
    """Yield the host's address in a separate network, without podman's name server."""
    podman("network", "create", "--disable-dns", NETWORK)
    try:
        [found] = json.loads(podman("network", "inspect", NETWORK))
        yield found["subnets"][0]["gateway"]
    finally:
        podman("network", "rm", "--force", NETWORK)


def configure(home: Path) -> None:
    """Run containers where the limits may not be raised, and with version 1 of cgroups."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    bounds = {name: min(resource.getrlimit(kind)[1], 4096) for name, kind in limits.items()}
    ulimits = json.dumps([f"{name}={bound}:{bound}" for name, bound in bounds.items()])
    path = home / "containers.conf"
    path.write_text(f'[containers]\ndefault_ulimits = {ulimits}\n[engine]\nruntime = "runc"\n')
    os.environ["CONTAINERS_CONF"] = str(path)


def other_build(image: str) -> str:
    """Return an image that differs from the first by a label."""
    other = f"localhost/{NAME}:check"
    container = run("buildah", "from", "--pull-never", image)
    run("buildah", "config", "--label", "check=other", container)
    run("buildah", "commit", "--quiet", "--rm", container, other)
    return other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default=f"localhost/{NAME}:latest")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        home = Path(directory)
        home.chmod(0o755)
        configure(home)
        model = tiny_gguf.make(
            home / "alphabet.gguf", mode="cycle", embd=128, heads=4, layers=4, ff=256, ctx=8192
        )
        model.chmod(0o644)
        with network() as address:
            alone = drain(home, options.image, model)
            pods = Pods(options.image, NameServer(home, NAME, address), options.clients)
            with pods.running(model):
                pods.run(other_build(options.image))
    phases = [alone, *pods.phases]
    return 0 if show(phases) else 1


if __name__ == "__main__":
    sys.exit(main())
