"""A study as a RayJob of KubeRay: its manifest is held against the schema that KubeRay publishes; no Kubernetes runs here."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from batchscout.orchestrator.config.load import load_study
from batchscout.orchestrator.launch.kuberay import CLONE, IMAGE_USER, KubeRayJob, manifest, resource_name
from tests.support.command_line import Typed
from tests.support.studies import TINY

HERE = Path(__file__).parent
HOSTILE = "a b;touch INJECTED $(touch INJECTED) `touch INJECTED` 'x' \"y\" $HOME *"


@pytest.fixture(scope="module")
def kuberay() -> Draft202012Validator:
    schema = json.loads(gzip.decompress((HERE / "kuberay/rayjob_v1.json.gz").read_bytes()))
    return Draft202012Validator(strict(schema))


def strict(schema: Any) -> Any:
    """The schema in plain JSON Schema: what Kubernetes would drop without a word is a fault, and 1 and "1" may both be said where
    it takes both."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = (
        {"additionalProperties": False} if schema.get("properties") else {}
    )  # metadata has none: it is Kubernetes' own
    return closed | {key: strict(value) for key, value in schema.items()}


def job(**changes: Any) -> KubeRayJob:
    given: dict[str, Any] = {"name": "tiny", "study": "name: tiny\n", "image": "me/scout:1", "claim": "runs"}
    return KubeRayJob(**(given | changes))


@pytest.mark.parametrize("changes", [{}, {"nodes": 2, "gpus_per_node": 4}, {"name": HOSTILE}])
def test_the_manifest_is_one_that_kuberay_takes(kuberay: Draft202012Validator, changes: dict[str, Any]) -> None:
    study, rayjob = manifest(job(**changes))
    assert [fault.message for fault in kuberay.iter_errors(rayjob)] == []
    assert (study["kind"], rayjob["kind"], rayjob["apiVersion"]) == ("ConfigMap", "RayJob", "ray.io/v1")
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        mounted = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounted == {f"{CLONE}/runs", "/study", "/dev/shm"}
        assert {"name": "study", "configMap": {"name": study["metadata"]["name"]}} in pod["volumes"]


def test_the_dockerfile_makes_the_image_that_the_manifest_counts_on() -> None:
    said = dict(
        line.split(maxsplit=1)
        for line in (HERE.parents[1] / "configs" / "Dockerfile").read_text().splitlines()
        if " " in line
    )
    assert (said["WORKDIR"], said["USER"]) == (CLONE, str(IMAGE_USER))
    left_out = (HERE.parents[1] / "configs" / "Dockerfile.dockerignore").read_text().split()
    assert {"runs", "wandb", ".git", "venv"} <= set(left_out)


def test_a_key_that_kuberay_does_not_know_would_be_found(kuberay: Draft202012Validator) -> None:
    _, rayjob = manifest(job())
    rayjob["spec"]["rayClusterSpec"]["authOption"] = {"mode": "token"}
    (fault,) = kuberay.iter_errors(rayjob)
    assert "'authOption' was unexpected" in fault.message


def test_what_is_asked_of_kubernetes_is_what_was_given() -> None:
    _, rayjob = manifest(job(nodes=2, gpus_per_node=4, cpus_per_node=32, memory_per_node="200Gi", head_memory="64Gi"))
    (head,) = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["resources"]["limits"]["memory"] == "64Gi"
    (lanes,) = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = lanes["template"]["spec"]["containers"]
    assert (lanes["replicas"], lanes["minReplicas"], lanes["maxReplicas"]) == (2, 2, 2)
    assert container["resources"]["limits"] == {"cpu": 32, "memory": "200Gi", "nvidia.com/gpu": 4}
    assert "--min-nodes 3" in rayjob["spec"]["entrypoint"], "the head is one of them"


def test_no_word_of_the_users_is_read_by_the_shell(tmp_path: Path) -> None:
    """KubeRay has a shell read the entrypoint, and `ray job submit` quotes again what that makes of it."""
    _, rayjob = manifest(job(name=HOSTILE, options=("--set", f"model.kwargs.x={HOSTILE}")))
    read = f"printf '%s\\0' {rayjob['spec']['entrypoint']}"
    words = subprocess.run(["bash", "-c", read], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"\0--dir\0{CLONE}/runs/{HOSTILE}\0" in words
    assert f"\0--set\0model.kwargs.x={HOSTILE}\0--set\0name={json.dumps(HOSTILE)}\0" in words
    assert list(tmp_path.iterdir()) == []


def test_studies_of_other_names_are_other_jobs() -> None:
    names = ["tiny", "Tiny", "tiny!", "a study", "a-study", "ä", "x" * 60, "x" * 61]
    made = [resource_name(name) for name in names]
    assert made[0] == "tiny", "a name that Kubernetes takes stays as it is"
    assert len(set(made)) == len(names)
    for name in made:
        assert len(name) <= 47
        assert name.replace("-", "").isalnum()
        assert name.isascii()
        assert name == name.lower().strip("-")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_memory": "16 GB"}, "--head-memory is '16 GB', which Kubernetes cannot read; write 16Gi for"),
        ({"memory_per_node": "16 GB"}, "--memory-per-node is '16 GB', which Kubernetes cannot read; write 16Gi for"),
        ({"claim": "My Disk"}, "--claim is 'My Disk', which is no name of a PersistentVolumeClaim; kubectl get pvc"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job(**changes)


def test_the_verb_writes_a_manifest_with_the_study_in_it(home: Path, typed: Typed) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(TINY))
    asked = ("--image", "me/scout:1", "--claim", "runs", "--nodes", "2")
    code, out, _ = typed("launch", "kuberay", "study.yaml", *asked)
    assert code == 0
    written = home / "runs" / "tiny.rayjob.yaml"
    assert f"kubectl replace --force -f {written}" in out
    study, _ = yaml.safe_load_all(written.read_text())
    Path("again.yaml").write_text(study["data"]["study.yaml"])
    assert load_study(Path("again.yaml"), [], print) == load_study(Path("study.yaml"), [], print)
