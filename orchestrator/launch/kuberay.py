"""A study as a KubeRay job: the manifest of a RayJob, which starts a Ray cluster of pods and runs the study on it.

The run directory is on a volume that all pods mount, so another job of the same study goes on from there, and so does the next attempt
of this one after the head's pod was lost.
"""

from __future__ import annotations

import json
import re
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batchscout.trainers.files import written_whole

CLONE = "/batchscout"
"""Where the image has the clone, with the user's code in it: configs/Dockerfile."""
IMAGE_USER = 1000
NUM_RETRIES = 3
"""How often KubeRay starts another cluster for a job that failed. Bad input costs these starts, too."""
LONGEST_NAME = 38
"""KubeRay takes 47 characters for a RayJob, and a name that had to be changed ends with nine that tell it from others."""


@dataclass(frozen=True)
class KubeRayJob:
    """What a study asks of Kubernetes. All else is the namespace's default."""

    name: str
    study: str
    """The study file's text, which comes with the manifest and not with the image."""
    image: str
    claim: str
    """A PersistentVolumeClaim that many pods may write to (ReadWriteMany), for run directories."""
    options: tuple[str, ...] = ()
    """Of `batchscout run`."""
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int = 4
    memory_per_node: str = "16Gi"
    head_memory: str = "16Gi"
    """The driver is there, and builds the model once, on the CPU."""

    def __post_init__(self) -> None:
        """Raises ValueError for what Kubernetes would refuse without a word of help."""
        for option, size in {"--memory-per-node": self.memory_per_node, "--head-memory": self.head_memory}.items():
            if not re.fullmatch(r"[0-9]+([KMGT]i?)?", size):
                raise ValueError(f"{option} is '{size}', which Kubernetes cannot read; write 16Gi for 16 x 2^30 bytes")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", self.claim):
            raise ValueError(
                f"--claim is '{self.claim}', which is no name of a PersistentVolumeClaim; kubectl get pvc lists them"
            )


def resource_name(name: str) -> str:
    """Return the study's name as Kubernetes takes one, and no other study's: small letters, digits and '-'."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return plain if plain == name else f"{plain or 'study'}-{zlib.crc32(name.encode()):08x}"


def command(job: KubeRayJob) -> list[str]:
    """Return what runs the study on the pods' cluster."""
    run = ["batchscout", "run", "/study/study.yaml", "--dir", f"{CLONE}/runs/{job.name}", "--address", "auto"]
    named = f"name={json.dumps(job.name)}"  # the file has another name there than on this machine
    return [*run, "--min-nodes", str(job.nodes + 1), *job.options, "--set", named]


def manifest(job: KubeRayJob) -> list[dict[str, Any]]:
    """Return the two objects of a job: the study's file, and the RayJob. No word of the user's is read by a shell: KubeRay hands
    the entrypoint to one, and each word of it is quoted."""
    name = resource_name(job.name)
    study = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"study.yaml": job.study},
    }
    spec = {
        "entrypoint": shlex.join(command(job)),
        "backoffLimit": NUM_RETRIES,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": _cluster(job, name),
    }
    return [study, {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}]


def _cluster(job: KubeRayJob, name: str) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {}
    worker = {"cpu": job.cpus_per_node, "memory": job.memory_per_node} | gpus
    workers = {"groupName": "lanes", "replicas": job.nodes, "minReplicas": job.nodes, "maxReplicas": job.nodes}
    return {
        "rayVersion": "2.60.0",
        "authOptions": {"mode": "token"},  # KubeRay makes it, keeps it in a Secret, and gives it to these pods alone
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod("ray-head", job, name, {"cpu": 2, "memory": job.head_memory}),
        },
        "workerGroupSpecs": [workers | {"rayStartParams": {}, "template": _pod("ray-worker", job, name, worker)}],
    }


def _pod(container: str, job: KubeRayJob, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "study", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for Ray's objects, and for data workers
    ]
    places = {"runs": f"{CLONE}/runs", "study": "/study", "shm": "/dev/shm"}
    mounts = [{"name": volume, "mountPath": place} for volume, place in places.items()]
    resources = {"limits": asked, "requests": asked}
    ray = {"name": container, "image": job.image, "workingDir": CLONE, "resources": resources, "volumeMounts": mounts}
    # The image's user may write to the volume.
    return {"spec": {"containers": [ray], "volumes": volumes, "securityContext": {"fsGroup": IMAGE_USER}}}


def write_manifest(path: Path, job: KubeRayJob) -> None:
    """Write the job's manifest, whole or not at all."""
    with written_whole(path) as file:
        file.write(yaml.safe_dump_all(manifest(job), sort_keys=False).encode())
