"""Deployment files parse, agree with the server's settings and with each other, and keep the rules of their tools."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.offer import GENERATION_SERVICE
from service.settings import ServerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KINDS = {
    "StatefulSet": "apps/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
}


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((KUBERNETES / name).read_text())
    return loaded


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    template: dict[str, Any] = manifest("statefulset.yaml")["spec"]["template"]
    return template


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


@pytest.fixture(scope="module")
def settings() -> ServerSettings:
    return ServerSettings(**tomllib.loads((KUBERNETES / "config.toml").read_text()))


def test_every_manifest_is_of_a_known_kind_and_every_one_is_applied() -> None:
    names = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(manifest("kustomization.yaml")["resources"]) == names
    for name in (*names, "kustomization.yaml"):
        found = manifest(name)
        assert KINDS[found["kind"]] == found["apiVersion"], name
        assert found.get("metadata", {}).get("name", "mlx-stream") == "mlx-stream"


def test_the_configuration_that_is_mounted_is_the_one_that_is_generated(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    (generator,) = manifest("kustomization.yaml")["configMapGenerator"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generator["name"]
    assert all((KUBERNETES / file).is_file() for file in generator["files"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["--config", f"{mounts['config']}/{generator['files'][0]}"]
    claims = {claim["metadata"]["name"] for claim in manifest("statefulset.yaml")["spec"]["volumeClaimTemplates"]}
    assert set(mounts) == claims | set(volumes)


def test_state_and_caches_lie_on_volumes_since_the_rest_is_read_only(
    container: dict[str, Any], settings: ServerSettings
) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(settings.state_dir) in mounts
    image = (DEPLOY / "docker/Dockerfile").read_text()
    found = re.search(r"XDG_CACHE_HOME=(\S+)", image)
    assert found is not None
    assert found[1] in mounts
    assert f"MLX_STREAM_STATE_DIR={settings.state_dir}" in image


def test_ports_and_probes_are_those_of_the_server(container: dict[str, Any], settings: ServerSettings) -> None:
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.metrics_listen is not None
    assert ports["grpc"] == int(settings.listen.rpartition(":")[2])
    assert ports["metrics"] == int(settings.metrics_listen.rpartition(":")[2])
    probes = {name: container[name]["grpc"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {ports["grpc"]}
    assert probes["readinessProbe"]["service"] == GENERATION_SERVICE.full_name
    assert "service" not in probes["livenessProbe"]
    assert "service" not in probes["startupProbe"]


def test_a_replica_has_time_to_end_its_streams(
    pod: dict[str, Any], container: dict[str, Any], settings: ServerSettings
) -> None:
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed = int(seconds) + settings.shutdown_late_seconds + settings.shutdown_grace_seconds
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed + 5


def test_liveness_waits_longer_than_health_takes_to_tell_of_a_stuck_step_twice(container: dict[str, Any]) -> None:
    probe = container["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_the_service_is_headless_and_selects_the_pods(pod: dict[str, Any], container: dict[str, Any]) -> None:
    service, stateful = manifest("service.yaml"), manifest("statefulset.yaml")
    labels = pod["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    for selector in (
        service["spec"]["selector"],
        stateful["spec"]["selector"]["matchLabels"],
        manifest("poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"],
        manifest("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == names


def test_a_disruption_leaves_a_replica() -> None:
    budget, replicas = manifest("poddisruptionbudget.yaml")["spec"], manifest("statefulset.yaml")["spec"]["replicas"]
    assert budget["maxUnavailable"] < replicas


def dockerfile() -> list[str]:
    """Instructions, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "docker/Dockerfile").read_text(), flags=re.M)
    return [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def test_the_image_keeps_the_rules_of_its_linter() -> None:
    lines = dockerfile()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    stages = [line.split()[3] for line in lines if line.startswith("FROM ")]
    assert {"cpu", "cuda"} <= set(stages)
    assert all(":" in base and not base.endswith(":latest") for base in bases if base not in stages)
    assert not any(line.startswith(("ADD ", "MAINTAINER ")) for line in lines)
    for line in (line for line in lines if "apt-get install" in line):
        assert "--no-install-recommends" in line
        assert "rm -rf /var/lib/apt/lists/*" in line
        packages = [word for word in line.split("&&")[1].split()[3:] if not word.startswith("-")]
        assert packages
        assert all("=" in package for package in packages)
    assert all("--no-cache-dir" in line and "-c constraints.txt" in line for line in lines if "pip install" in line)
    for line in (line for line in lines if line.startswith(("ENTRYPOINT", "CMD", "VOLUME"))):
        assert isinstance(json.loads(line.partition(" ")[2]), list)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"] * 2
    assert "STOPSIGNAL SIGTERM" in lines


def test_the_image_copies_what_exists_and_what_is_not_ignored() -> None:
    root = DEPLOY.parent
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for line in (line for line in dockerfile() if line.startswith("COPY ")):
        for source in line.split()[1:-1]:
            assert (root / source).exists(), source
            assert source in let_in, source


def test_the_images_command_is_one_that_the_server_takes() -> None:
    for line in (line for line in dockerfile() if line.startswith("CMD ")):
        known_flags(json.loads(line.partition(" ")[2]))


def known_flags(arguments: list[str]) -> dict[str, str]:
    """The flags of a command line of `serve`, each a setting of the server."""
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    fields = {"--" + name.replace("_", "-") for name in ServerSettings.model_fields} | {"--config"}
    assert flags.keys() <= fields
    return flags


def test_the_systemd_unit_starts_the_server_and_waits_for_its_end() -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / "systemd/mlx-stream.service").read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            entries = sections.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            key, separator, value = line.partition("=")
            assert separator, line
            entries.append((key, value))
    assert list(sections) == ["Unit", "Service", "Install"]
    service = dict(sections["Service"])
    program, verb, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb) == ("mlx-stream", "serve")
    known_flags(arguments)
    assert service["Type"] == "exec"
    assert service["KillSignal"] == "SIGTERM"
    assert float(service["TimeoutStopSec"]) > time_to_end() + 5
    variables = [one for key, value in sections["Service"] if key == "Environment" for one in shlex.split(value)]
    assert f"MLX_STREAM_STATE_DIR=/var/lib/{service['StateDirectory']}" in variables
    assert f"XDG_CACHE_HOME=/var/cache/{service['CacheDirectory']}" in variables


def time_to_end() -> float:
    """Seconds that a server with default settings takes for its end."""
    fields = ServerSettings.model_fields
    return float(fields["shutdown_late_seconds"].default + fields["shutdown_grace_seconds"].default)


def test_the_launchd_job_stays_in_the_foreground_and_is_given_time() -> None:
    job = plistlib.loads((DEPLOY / "launchd/org.mlx-stream.server.plist").read_bytes())
    program, verb, *arguments = job["ProgramArguments"]
    assert (Path(program).name, verb) == ("mlx-stream", "serve")
    assert known_flags(arguments)["--listen"].startswith("127.0.0.1:")
    assert job["Label"] == "org.mlx-stream.server"
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ExitTimeOut"] > time_to_end() + 5
    assert job["ProcessType"] == "Interactive"


def test_envoy_balances_two_replicas_by_session_and_cuts_no_stream() -> None:
    envoy = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())
    (cluster,) = envoy["static_resources"]["clusters"]
    (listener,) = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    *refused, route = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [one["match"]["prefix"] for one in refused] == ["/mlxstream.v1.AdminService/"]
    assert route["route"]["cluster"] == cluster["name"]
    assert route["route"]["timeout"] == "0s"
    from service.metadata import SESSION_KEY

    assert route["route"]["hash_policy"] == [{"header": {"header_name": SESSION_KEY}}]
    assert "unavailable" not in route["route"]["retry_policy"]["retry_on"]
    (check,) = cluster["health_checks"]
    assert check["grpc_health_check"]["service_name"] == GENERATION_SERVICE.full_name
    (endpoints,) = cluster["load_assignment"]["endpoints"]
    ports = [one["endpoint"]["address"]["socket_address"]["port_value"] for one in endpoints["lb_endpoints"]]
    assert len(set(ports)) == 2
    assert manager["http_filters"][-1]["name"] == "envoy.filters.http.router"


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana/mlx-stream.json").read_text())
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
