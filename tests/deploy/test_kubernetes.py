"""The manifests: against Kubernetes' schemas, and against what must agree between their lines.

No schema of KubeRay's is on a package index, so a RayCluster is checked for the fields that are
used here, and its pods, which are most of it, as pods.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.compose import image_entry_point
from tests.support.dockerfile import instructions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
ROCM = ROOT / "deploy" / "Dockerfile"
VERSIONS = ("1.30", "1.37")
"""The oldest that is still common, and the newest that has a schema here."""
OVERLAYS = ("one-host", "two-hosts")
RAY_CLUSTER_FIELDS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
RAY_GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas"} | {
    "rayStartParams",
    "template",
}


def documents(overlay: str) -> dict[str, dict[str, Any]]:
    """The resources that a kustomization lists, by kind."""
    folder = FOLDER / overlay
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    found = [yaml.safe_load((folder / name).read_text()) for name in listed]
    return {document["kind"]: document for document in found}


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    if document["kind"] == "Deployment":
        return [spec["template"]]
    if document["kind"] == "RayCluster":
        return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return []


def server_pod(overlay: str) -> dict[str, Any]:
    """The spec of the pod that answers requests."""
    found = documents(overlay)
    kind = "Deployment" if "Deployment" in found else "RayCluster"
    spec: dict[str, Any] = pod_templates(found[kind])[0]["spec"]
    return spec


def words(overlay: str) -> str:
    (container,) = server_pod(overlay)["containers"]
    return " ".join(container["args"])


def flag(overlay: str, name: str) -> int:
    found = re.search(rf"--{name}=(\d+)", words(overlay))
    assert found, name
    return int(found[1])


def validate(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_file_is_listed_and_every_resource_fits_its_schema(overlay: str) -> None:
    files = {file.name for file in (FOLDER / overlay).iterdir()} - {"kustomization.yaml"}
    kustomization = yaml.safe_load((FOLDER / overlay / "kustomization.yaml").read_text())
    assert files == set(kustomization["resources"])
    for document in documents(overlay).values():
        if document["kind"] != "RayCluster":
            validate(document)
        for template in pod_templates(document):
            metadata = {"name": "pod"} | template.get("metadata", {})
            validate({"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata})


def test_a_misspelt_field_and_a_wrong_type_do_not_fit() -> None:
    for spoil in ({"restartPolicies": "Always"}, {"terminationGracePeriodSeconds": "long"}):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        with pytest.raises(kubernetes_validate.ValidationError):
            validate({**pod, "spec": server_pod("one-host") | spoil})


def test_the_ray_cluster_uses_fields_that_kuberay_has() -> None:
    cluster = documents("two-hosts")["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["spec"].keys() == RAY_CLUSTER_FIELDS
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group.keys() == RAY_GROUP_FIELDS
    assert cluster["spec"]["headGroupSpec"].keys() < RAY_GROUP_FIELDS
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_it(overlay: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip(
            "not checked: kubectl is not installed, so no kustomize has built the manifests"
        )
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER / overlay], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = {document["kind"] for document in yaml.safe_load_all(done.stdout)}
    assert kinds == documents(overlay).keys()
    assert "image: vllm-dsv4\n" not in done.stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_there_is_a_card_for_every_rank(overlay: str) -> None:
    found = documents(overlay)
    templates = [template for document in found.values() for template in pod_templates(document)]
    cards = [
        container["resources"]["limits"]["amd.com/gpu"]
        for template in templates
        for container in template["spec"]["containers"]
    ]
    ranks = flag(overlay, "tensor-parallel-size")
    if overlay == "two-hosts":
        ranks *= flag(overlay, "pipeline-parallel-size")
        assert f'get("GPU", 0) < {ranks})' in words(overlay)
    assert sum(cards) == ranks


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_long_load_is_not_cut_short(overlay: str) -> None:
    """Neither by vLLM, nor by a probe, nor by the roll-out."""
    (container,) = server_pod(overlay)["containers"]
    load = next(
        int(entry["value"])
        for entry in container["env"]
        if entry["name"] == "VLLM_ENGINE_READY_TIMEOUT_S"
    )
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= load >= 3600
    deployment = documents(overlay).get("Deployment")
    if deployment:
        assert deployment["spec"]["progressDeadlineSeconds"] > load
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_server_that_ends_is_started_again_and_one_that_is_told_to_has_time(overlay: str) -> None:
    pod = server_pod(overlay)
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Always"
    _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = flag(overlay, "shutdown-timeout")
    assert pod["terminationGracePeriodSeconds"] > int(pause) + drain


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shared_memory_is_more_than_a_containers_64_mib_and_less_than_its_limit(
    overlay: str,
) -> None:
    for document in documents(overlay).values():
        for template in pod_templates(document):
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
            for container in template["spec"]["containers"]:
                mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
                assert mounts["/dev/shm"] == "shm"
                assert container["resources"]["limits"]["memory"] == "512Gi"


def test_the_service_finds_the_pods_of_the_deployment() -> None:
    found = documents("one-host")
    labels = pod_templates(found["Deployment"])[0]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_the_service_finds_the_head_of_the_ray_cluster() -> None:
    found = documents("two-hosts")
    assert found["Service"]["spec"]["selector"] == {
        "ray.io/cluster": found["RayCluster"]["metadata"]["name"],
        "ray.io/node-type": "head",
    }


def test_ray_is_of_the_images_version() -> None:
    version = documents("two-hosts")["RayCluster"]["spec"]["rayVersion"]
    arguments = [i.value for i in instructions(ROCM) if i.keyword == "ARG"]
    assert f"RAY_VERSION={version}" in arguments


RAY = """
import pathlib
cards = pathlib.Path(__file__).with_name("cards")
def init(**kwargs): assert kwargs["address"] == "auto"
def cluster_resources():
    seen = int(cards.read_text())
    cards.write_text("16")
    return {"GPU": float(seen)}
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment in which Ray, vLLM and sleep are scripts."""
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "cards").write_text("8")
    scripts = {
        # Lives as long as the server, and keeps nobody waiting for its output.
        "ray": 'echo "ray $*"; exec tail --pid=$PPID -f /dev/null >/dev/null 2>&1',
        "vllm": 'echo "vllm $*"',
        "sleep": 'echo "sleep $*"',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(tmp_path),
        "KUBERAY_GEN_RAY_START_CMD": "ray start --head --block",
    }


def run_head(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (head,) = server_pod("two-hosts")["containers"]
    return subprocess.run(
        [*head["command"], *head["args"]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_head_starts_ray_waits_for_all_cards_and_then_serves(machine: dict[str, str]) -> None:
    done = run_head(machine)
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines(), key=lambda line: line.startswith("vllm"))
    assert set(said[:-1]) == {"ray start --head --block", "waiting for 16 cards", "sleep 5"}
    assert said[-1].startswith("vllm serve deepseek-ai/DeepSeek-V4-Pro --served-model-name=dsv4 ")
    assert image_entry_point(ROCM) == ["vllm", "serve"]


def test_a_head_whose_ray_has_ended_ends_too(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ray.py").write_text("raise ConnectionError")
    done = run_head(machine)
    assert done.returncode == 1
    assert "vllm" not in done.stdout
