"""The files for containers and Kubernetes, compared with settings, paths and metrics."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from support.documented_metrics import documented_metrics

from proxy.auth.api_keys import OPEN_PATHS
from proxy.settings import ProxySettings
from scripts.deploy import check
from supervisor.service.units import ServiceFacts
from supervisor.settings.load import load
from supervisor.settings.schema import Settings
from supervisor.slot_store.policy import auto_budget_bytes

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "scripts" / "deploy" / "kubernetes" / "base"
EXAMPLES = sorted((KUBERNETES.parent / "examples").glob("*.yaml"))
MONITORING = sorted((ROOT / "scripts" / "deploy" / "monitoring").iterdir())
PROMETHEUS_LABELS = {"instance", "job", "le"}
SETTINGS = Settings.model_validate(tomllib.loads((KUBERNETES / "corral.toml").read_text("utf-8")))
PORT = ProxySettings().port
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.parent.glob("*/kustomization.yaml"))
CONTAINERFILE = (ROOT / "scripts" / "deploy" / "Containerfile").read_text("utf-8")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def all_of(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


WORKLOAD = parsed(KUBERNETES / "statefulset.yaml")
FRONT = parsed(KUBERNETES.parent / "front" / "deployment.yaml")
POD = WORKLOAD["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def image_variables() -> dict[str, str]:
    text = CONTAINERFILE.replace("\\\n", " ")
    [line] = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return dict(word.split("=", 1) for word in line.split())


def test_the_kustomization_names_every_file_but_the_examples() -> None:
    kustomization = parsed(KUBERNETES / "kustomization.yaml")
    named = {*kustomization["resources"], "kustomization.yaml"}
    [generator] = kustomization["configMapGenerator"]
    assert named | set(generator["files"]) == {
        path.name for path in KUBERNETES.iterdir() if path.is_file()
    }
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generator["name"]


def kustomized(directory: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_builds_it(name: str) -> None:
    objects = kustomized(KUBERNETES.parent / name)
    workloads = [entry for entry in objects if entry["kind"] in {"StatefulSet", "Deployment"}]
    selected = [
        entry["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for entry in workloads
    ]
    assert len(set(selected)) == len(workloads)
    settings = {entry["metadata"]["name"] for entry in objects if entry["kind"] == "ConfigMap"}
    for workload in workloads:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            assert volume.get("configMap", {}).get("name") in {None, *settings}
    [budget] = [entry for entry in objects if entry["kind"] == "PodDisruptionBudget"]
    [pods] = [entry for entry in workloads if entry["kind"] == "StatefulSet"]
    assert budget["spec"]["selector"] == pods["spec"]["selector"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_pods_share_a_directory_of_conversations_below_their_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = kustomized(KUBERNETES.parent / "shared-cache")
    [pods] = [entry for entry in objects if entry["kind"] == "StatefulSet"]
    [container] = pods["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    settings = load(KUBERNETES / "corral.toml").settings
    assert settings.supervisor.slots_directory
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "shared"]
    assert settings.supervisor.slots_directory.parent == Path(mount["mountPath"])
    [volume] = [
        volume
        for volume in pods["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "shared"
    ]
    [claim] = [entry for entry in objects if entry["kind"] == "PersistentVolumeClaim"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_front_is_a_pod_like_those_behind_it() -> None:
    front = FRONT["spec"]["template"]["spec"]
    [container] = front["containers"]
    assert front["terminationGracePeriodSeconds"] == POD["terminationGracePeriodSeconds"]
    assert front["securityContext"].items() <= POD["securityContext"].items()
    varying = {"resources"}
    assert {key: value for key, value in container.items() if key not in varying} == {
        key: value for key, value in CONTAINER.items() if key not in varying
    }
    settings = Settings.model_validate(
        tomllib.loads((KUBERNETES.parent / "front" / "corral.toml").read_text("utf-8"))
    )
    [service] = parsed(KUBERNETES / "service.yaml")["metadata"].values()
    assert [node.url for node in settings.nodes.values()] == [f"dns+http://{service}:{PORT}"]


def test_pods_for_podman_are_those_of_the_stateful_set() -> None:
    manifest = check.pod(WORKLOAD | {"spec": labelled(WORKLOAD["spec"])}, "llama-corral-1")
    [container] = manifest["spec"]["containers"]
    same = {"name", "image", "securityContext", "resources"}
    assert {key: container[key] for key in same} == {key: CONTAINER[key] for key in same}
    assert set(container) == same | {
        "volumeMounts"
    }  # podman publishes ports, and runs probes by curl
    volumes = {volume["name"]: volume for volume in manifest["spec"]["volumes"]}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {
        "data": "/data",
        "llama-corral-1-scratch": "/scratch",
        "config": "/etc/llama-corral",
    }
    assert set(volumes) == set(mounted)
    claim = volumes["data"]["persistentVolumeClaim"]["claimName"]
    assert claim == "data-llama-corral-1"  # as Kubernetes names it


def labelled(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a workload with labels, which kustomize adds."""
    return {**spec, "template": {**spec["template"], "metadata": {"labels": {}}}}


def test_one_port_is_the_default_one() -> None:
    [port] = CONTAINER["ports"]
    [service_port] = parsed(KUBERNETES / "service.yaml")["spec"]["ports"]
    assert port["containerPort"] == service_port["port"] == PORT
    assert service_port["targetPort"] == port["name"]
    assert image_variables()["CORRAL_PROXY__LISTEN"] == f"0.0.0.0:{PORT}"
    assert f"EXPOSE {PORT}\n" in CONTAINERFILE


def test_the_grace_period_holds_the_hook_and_the_longest_stop() -> None:
    facts = ServiceFacts("system", ("corral",), Path("/corral.toml"), SETTINGS)
    hook_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] == facts.stop_timeout_s + hook_s
    readiness = CONTAINER["readinessProbe"]
    assert hook_s > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_probes_need_no_key_and_only_readiness_depends_on_models() -> None:
    names = ("startupProbe", "livenessProbe", "readinessProbe")
    paths = [CONTAINER[name]["httpGet"]["path"] for name in names]
    assert paths == ["/health/live", "/health/live", "/health"]
    assert set(paths) <= OPEN_PATHS
    assert {CONTAINER[name]["httpGet"]["port"] for name in names} == {"http"}


def test_written_are_only_directories_below_volumes() -> None:
    mounted = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    variables = image_variables()
    assert variables["CORRAL_CONFIG"] in mounted
    for kind in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        path = Path(variables[f"CORRAL_{kind}_DIR"])
        # A volume itself belongs to root, and the daemon wants directories of its own user.
        assert {str(parent) for parent in path.parents} & mounted
    for model in SETTINGS.models.values():
        assert model.path.is_relative_to(variables["CORRAL_DATA_DIR"])
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    user = f"USER {POD['securityContext']['runAsUser']}:{POD['securityContext']['runAsGroup']}\n"
    assert user in CONTAINERFILE


def test_the_image_has_all_that_a_wheel_is_made_of() -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    wheel = wheel["targets"]["wheel"]
    files = {"pyproject.toml", "README.md", "LICENSE"}
    wanted = {*wheel["packages"], *wheel["force-include"], *files}
    assert set(" ".join(copied).split()) == wanted


def test_the_disk_holds_the_saved_conversations() -> None:
    [claim] = parsed(KUBERNETES / "statefulset.yaml")["spec"]["volumeClaimTemplates"]
    size = claim["spec"]["resources"]["requests"]["storage"]
    room_bytes = int(size.removesuffix("Gi")) * 1024**3
    assert SETTINGS.supervisor.slots_disk_budget == "auto"
    assert auto_budget_bytes(room_bytes, 0) >= 4 * 1024**3


@pytest.mark.parametrize("path", [*EXAMPLES, *MONITORING], ids=lambda path: path.stem)
def test_metrics_labels_and_models_exist(path: Path) -> None:
    text = json.dumps(all_of(path)).replace('\\"', "")
    documented = {
        series: metric.labels for metric in documented_metrics() for series in metric.series
    }
    for name, labels in re.findall(r"(corral_\w+)(?:\{([^}]*)\})?", text):
        assert set(re.findall(r"(\w+)=", labels)) - PROMETHEUS_LABELS <= documented[name]
    assert set(re.findall(r"model=(\w+)", text)) <= set(SETTINGS.models)
    assert "llama-corral" in text


def kserve() -> Any:
    runtime = parsed(KUBERNETES.parent / "examples" / "kserve-runtime.yaml")["spec"]
    [container] = runtime["containers"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    return container | {"probes": probes, "mounts": container["volumeMounts"]}


def llmkube() -> Any:
    _, service = all_of(KUBERNETES.parent / "examples" / "llmkube.yaml")
    service = service["spec"]
    return service | {"probes": service["probeOverrides"], "mounts": service["extraVolumeMounts"]}


@pytest.mark.parametrize("example", [kserve(), llmkube()], ids=["kserve", "llmkube"])
def test_other_operators_run_the_same_container(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in example["env"]:
        text = re.sub(r"\{\{\.\w+(?:\.gguf)?\}\}", "smollm2", variable["value"])
        monkeypatch.setenv(variable["name"], text)
    settings = load(config_dir=Path("/nonexistent")).settings
    assert list(settings.models) == ["smollm2"]
    assert settings.proxy.allowed_hosts
    for kind, probe in example["probes"].items():
        path = CONTAINER[f"{kind}Probe"]["httpGet"]["path"]
        assert probe == {
            **CONTAINER[f"{kind}Probe"],
            "httpGet": {"path": path, "port": PORT},
        }
    hardened = CONTAINER["securityContext"]
    assert {key: example["securityContext"][key] for key in hardened} == hardened
    mounted = {mount["mountPath"] for mount in example["mounts"]}
    assert {"/data", "/scratch"} <= mounted


DASHBOARD = ROOT / "scripts/deploy/monitoring/grafana-dashboard.json"


def test_grafanas_own_library_reads_each_member_of_the_dashboard() -> None:
    register_default_plugins()  # the types of panels
    read = Dashboard.from_json(parsed(DASHBOARD))
    written = json.loads(json.dumps(read, cls=JSONEncoder))
    assert lost(parsed(DASHBOARD), written) == []


def lost(given: object, kept: object, path: str = "") -> list[str]:
    """Return the paths of members and values that `kept` lacks; it may have defaults besides."""
    match given, kept:
        case dict(), dict():
            found = [lost(value, kept.get(key), f"{path}/{key}") for key, value in given.items()]
        case list(), list() if len(given) == len(kept):
            found = [
                lost(*pair, f"{path}/{n}") for n, pair in enumerate(zip(given, kept, strict=True))
            ]
        case _:
            return [] if given == kept else [path]
    return [place for places in found for place in places]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = parsed(DASHBOARD)["panels"]
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (place["x"] + column, place["y"] + line)
        for place in places
        for column in range(place["w"])
        for line in range(place["h"])
    ]
    assert len(set(cells)) == len(cells) == 24 * (1 + max(line for _, line in cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
