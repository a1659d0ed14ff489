"""The manifests are valid for Kubernetes, and the programs accept their commands and settings."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]
from tokenbus.clients.gateway.connections.server import READY_SEEN_S
from tokenbus.clients.gateway.metrics import FAMILIES, PREFIX
from tokenbus.protocol.endpoints import separate
from tokenbus.protocol.settings import Settings, resolve

from .manifests import (
    COMPONENT,
    COMPONENTS,
    FOLDER,
    OVERLAYS,
    TEMPLATED,
    Object,
    containers,
    environment,
    kubectl,
    objects,
    of_kind,
    pods,
    rendered,
)

pytestmark = pytest.mark.process

KUBERNETES = "1.37"
KILL_MARGIN_S = 10
"""A process is killed if it has not ended this number of seconds after ``drain_s``, as under
supervisord."""
MADE_BY_HAND = {
    "secretName": {
        "tokenbus-broker-key",
        "tokenbus-worker-key",
        "tokenbus-client-key",
        "tokenbus-api-keys",
    },
    "configMap": {"tokenbus-clients", "tokenbus-workers"},
    "claimName": {"tokenbus-models"},
}
"""The names of objects that are not in the manifests, by the field that refers to them. secrets.sh
makes the Secrets and ConfigMaps; its test checks their names."""


def settings_of(overlay: str, container: Object) -> Settings:
    """The settings of a container; raises SettingError if a setting is not valid."""
    return resolve({}, environment(overlay, container), {}, "")


def labels_match(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("overlay", ["gpu", "without-rwx"])
def test_the_guest_user_is_another_user_than_the_workers(overlay: str, tmp_path: Path) -> None:
    component = FOLDER / "components/guest-user"
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{os.path.relpath(FOLDER / overlay, tmp_path)}]\n"
        f"components: [{os.path.relpath(component, tmp_path)}]\n"
    )
    command = [kubectl(), "kustomize", str(tmp_path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    [found] = [
        each
        for each in objects(text)
        if each["kind"] in TEMPLATED and each["metadata"]["name"] == "tokenbus-controller-worker"
    ]
    kubernetes_validate.validate(found, KUBERNETES, strict=True)
    pod = found["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 0
    added = container["securityContext"]["capabilities"]["add"]
    assert added == ["SETUID", "SETGID", "KILL", "SYS_NICE"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert given["TOKENBUS_GUEST_USER"] == "nobody"
    assert int(given["TOKENBUS_GUEST_PROCESSES"]) > 0


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_is_valid_for_kubernetes(overlay: str) -> None:
    for found in rendered(overlay):
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_an_unknown_field_is_not_valid() -> None:
    """The validation of the test above finds an unknown field."""
    found = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x", "colour": "red"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", ["base", *OVERLAYS, *COMPONENTS])
def test_every_file_is_named_by_its_kustomization(folder: str) -> None:
    kustomization = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())
    patches = [patch["path"] for patch in kustomization.get("patches", ())]
    files = {path.name for path in (FOLDER / folder).glob("*.yaml")} - {"kustomization.yaml"}
    assert files <= {*kustomization.get("resources", ()), *patches}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_runs_a_program_of_ours_with_valid_settings(overlay: str) -> None:
    for _, container in containers(overlay):
        python, flag, module, *arguments = container["command"]
        assert (python, flag) == ("python", "-m")
        assert find_spec(f"{module}.__main__") is not None
        assert arguments in ([], ["--standby"])
        settings = settings_of(overlay, container)
        assert settings.health_file or module == "tokenbus.clients.gateway"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_variable_of_a_service_is_taken_for_a_setting(overlay: str) -> None:
    """Kubernetes would set TOKENBUS_BROKER_PORT in every pod, and an unknown setting is refused."""
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(overlay).values())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_has_the_time_that_its_processes_need_to_drain(overlay: str) -> None:
    for spec, container in containers(overlay):
        needed = settings_of(overlay, container).drain_s + KILL_MARGIN_S
        before = container.get("lifecycle", {}).get("preStop", {})
        if "sleep" in before:
            needed += before["sleep"]["seconds"] + READY_SEEN_S
        assert spec["terminationGracePeriodSeconds"] >= needed, container["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_liveness_waits_for_longer_than_a_lease(overlay: str) -> None:
    """A process that only waits for CPU time or for a broker must not be restarted."""
    for _, container in containers(overlay):
        probe = container["livenessProbe"]
        waits_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert waits_s >= 4 * settings_of(overlay, container).expiry_s
        assert container["startupProbe"]["failureThreshold"] * 2 >= 120
        assert "readinessProbe" in container


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_keep_to_the_restricted_security_standard(overlay: str) -> None:
    for pod in pods(overlay).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not spec["automountServiceAccountToken"]
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def references(value: Any, key: str) -> list[str]:
    """All values of ``key`` within an object."""
    if isinstance(value, list):
        return [name for item in value for name in references(item, key)]
    if not isinstance(value, dict):
        return []
    found = [value[key]] if isinstance(value.get(key), str) else []
    return [*found, *(name for item in value.values() for name in references(item, key))]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_refers_to_is_there(overlay: str) -> None:
    names = {(found["kind"], found["metadata"]["name"]) for found in rendered(overlay)}
    for pod in pods(overlay).values():
        spec = pod["spec"]
        for name in references(spec, "secretName"):
            assert name in MADE_BY_HAND["secretName"]
        for name in references(spec, "claimName"):
            there = ("PersistentVolumeClaim", name) in names
            assert there or name in MADE_BY_HAND["claimName"]
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in MADE_BY_HAND["configMap"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_mount_has_its_volume(overlay: str) -> None:
    for found in of_kind(overlay, "Deployment", "StatefulSet"):
        spec = found["spec"]["template"]["spec"]
        claims = found["spec"].get("volumeClaimTemplates", ())
        volumes = {volume["name"] for volume in spec["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounted = {
            mount["name"]
            for container in (*spec["initContainers"], *spec["containers"])
            for mount in container["volumeMounts"]
        }
        assert mounted == volumes


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_budgets_and_policies_select_the_pods_that_they_are_for(overlay: str) -> None:
    templates = pods(overlay)
    for found in of_kind(overlay, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec, component = found["spec"], found["metadata"]["labels"].get(COMPONENT)
        selector = spec.get("podSelector", spec.get("selector"))
        if found["kind"] != "Service":
            if component is None:  # This object selects all workers.
                (expression,) = selector["matchExpressions"]
                assert set(expression["values"]) == set(templates) - {"broker", "gateway"}
                continue
            selector = selector["matchLabels"]
        # Kubernetes adds this label to each pod of a StatefulSet.
        of_pod = {k: v for k, v in selector.items() if k == POD_NAME}
        assert set(of_pod.values()) <= pod_names(overlay, component)
        chosen = [
            name
            for name, pod in templates.items()
            if labels_match(selector, pod["metadata"]["labels"] | of_pod)
        ]
        assert chosen == [component]
        ports = {
            port["name"]
            for container in templates[component]["spec"]["containers"]
            for port in container.get("ports", ())
        }
        targets = [port["targetPort"] for port in spec.get("ports", ())]
        targets += [port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]]
        assert set(targets) <= ports
    budgets = {b["metadata"]["labels"][COMPONENT] for b in of_kind(overlay, "PodDisruptionBudget")}
    assert budgets == set(templates)


def pod_names(overlay: str, component: str) -> set[str]:
    """The names of the pods of a StatefulSet."""
    return {
        f"{found['metadata']['name']}-{number}"
        for found in of_kind(overlay, "StatefulSet")
        if found["metadata"]["labels"][COMPONENT] == component
        for number in range(found["spec"].get("replicas", 0))
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_clients_and_workers_connect_to_the_ports_of_every_broker(overlay: str) -> None:
    services = [
        found
        for found in of_kind(overlay, "Service")
        if found["metadata"]["labels"][COMPONENT] == "broker"
    ]
    assert len(services) == len(pod_names(overlay, "broker"))
    for _, container in containers(overlay):
        settings = settings_of(overlay, container)
        hosts = [found["metadata"]["name"] for found in services]
        if container["name"] == "broker":
            hosts = ["0.0.0.0"]
        for port, addresses in (("front", settings.front), ("back", settings.back)):
            (number,) = {
                p["port"] for s in services for p in s["spec"]["ports"] if p["name"] == port
            }
            assert separate(addresses) == [f"tcp://{host}:{number}" for host in hosts]


def test_two_brokers_have_a_service_each() -> None:
    services = of_kind("two-brokers", "Service")
    chosen = {found["spec"]["selector"].get(POD_NAME) for found in services}
    assert pod_names("two-brokers", "broker") <= chosen


def test_without_rwx_no_volume_is_shared_by_pods() -> None:
    assert of_kind("gpu", "PersistentVolumeClaim")
    assert of_kind("without-rwx", "PersistentVolumeClaim") == []
    modes = [
        mode
        for found in of_kind("without-rwx", "StatefulSet")
        for claim in found["spec"].get("volumeClaimTemplates", ())
        for mode in claim["spec"]["accessModes"]
    ]
    assert sorted(modes) == ["ReadWriteOnce", "ReadWriteOncePod"]


POD_NAME = "statefulset.kubernetes.io/pod-name"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_autoscalers_have_targets_and_metrics(overlay: str) -> None:
    workers = of_kind(overlay, "Deployment", "StatefulSet")
    kinds = {found["metadata"]["name"]: found["kind"] for found in workers}
    deployments = {f["metadata"]["name"]: f for f in workers if "replicas" not in f["spec"]}
    scaled = set()
    adapter = yaml.safe_load((FOLDER / "prometheus" / "adapter.yaml").read_text())
    offered = {rule["name"]["as"] for rule in adapter["externalRules"]}
    used = set()
    for found in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = found["spec"]["scaleTargetRef"]["name"]
        scaled.add(target)
        assert found["spec"]["scaleTargetRef"]["kind"] == kinds[target]
        # If the manifest had a number of replicas, each 'kubectl apply' would undo the autoscaler's
        # change.
        assert "replicas" not in deployments[target]["spec"]
        for metric in found["spec"]["metrics"]:
            if metric["type"] == "External":
                used.add(metric["external"]["metric"]["name"])
    assert scaled == set(deployments)
    assert used == offered


def test_the_metrics_of_prometheus_are_those_of_the_gateways() -> None:
    adapter = yaml.safe_load((FOLDER / "prometheus" / "adapter.yaml").read_text())
    text = str(adapter)
    names = re.findall(rf"{PREFIX}(\w+)", text)
    assert names
    assert set(names) <= set(FAMILIES)
