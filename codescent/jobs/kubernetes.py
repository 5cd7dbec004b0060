"""In: a job. Out: a manifest of Kubernetes: an indexed Job, with a pod for each node, and a headless Service for names.
Does not apply it. In a pod an agent of codescent starts the ranks: it ends with their exit code, unlike torchrun."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from typing import Any

import yaml

from codescent.base.errors import UserError
from codescent.base.token import TOKEN
from codescent.jobs.bash import Raw, command, comment
from codescent.jobs.hosts import AGENT
from codescent.jobs.job import Job, distinct
from codescent.jobs.lines import ADDRESS, begin, stop_at
from codescent.jobs.site import asked_devices

LABEL_CHARS = 63
PORT = 29_400
"""A pod has an address of its own, so no other run has this port."""
WRONG_INPUT = UserError.exit_code
INDEX = "batch.kubernetes.io/job-completion-index"
"""The label of a pod with its number."""
NAME_WAIT_S = 600
"""Seconds until the first pod runs."""
REPLACED = re.compile(r"\$(?=[$(])")
"""Kubernetes reads $(NAME) as a variable of the container, and $$ as one dollar sign."""
PLAIN = re.compile(r"[A-Za-z][\w./-]+", re.ASCII)
"""Texts that need no quotes. Kubernetes reads more words as numbers and booleans than PyYAML does: 1e-3, 0o17, y."""
BREAKS = re.compile("[\x85\u2028\u2029]")
"""Ends of lines, for YAML, that a block of lines would not keep."""

Document = dict[str, Any]


def script(job: Job) -> str:
    """The manifest, for kubectl apply."""
    name = pod_name(job)
    documents = (_service(name), _secret(name), _job(job, name))
    return "\n".join([*_head(job, name), dumped(*documents)])


def dumped(*documents: Document) -> str:
    """The documents as YAML. A text of several lines is a block, so that people can read a script."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return text


def literal(text: str) -> str:
    """A text whose words Kubernetes takes as they are."""
    return REPLACED.sub("$$", text)


def pod_name(job: Job) -> str:
    """A name with which the name of each pod is a label of DNS: small letters, digits and dashes."""
    name = job.name.lower().replace("_", "-").replace(".", "-")
    return distinct(name, job.name, LABEL_CHARS - len(f"-{job.nodes - 1}"))


class _Dumper(yaml.SafeDumper):
    """Writes a text plain, as a block, or in double quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """A text as a scalar."""
        style = None if PLAIN.fullmatch(data) else "|" if "\n" in data and not BREAKS.search(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _head(job: Job, name: str) -> Iterator[str]:
    file = job.saved_as or "FILE"
    yield from comment(f"{job.name}, {job.machines()}. Written for Kubernetes by:")
    yield from comment(job.said)
    yield from comment(f"kubectl apply -f {file} begins the run.")
    yield from comment(f"kubectl replace --force -f {file} ends its pods, and continues it.")
    yield from comment(f"kubectl logs -f -l job-name={name},{INDEX}=0 shows what rank 0 prints.")
    yield "# The Secret has the token by which the ranks recognise each other."
    if job.site.requeues:
        yield "# backoffLimit: a pod that ends with 75 is saved, and starts again."
    yield f"# podFailurePolicy: a pod that ends with {WRONG_INPUT} had wrong input, which another start would not mend."
    yield "# A pod that had to make room is no failure."


def _service(name: str) -> Document:
    """Pods find each other by names in it, before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _secret(name: str) -> Document:
    token = {"token": secrets.token_hex(32)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": token}


def _job(job: Job, name: str) -> Document:
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [WRONG_INPUT]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.site.requeues * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(job, name)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _pod(job: Job, name: str) -> Document:
    """A pod, with shared memory as large as the memory allows: a pod has 64 MiB by itself."""
    claim, _, mounted = (job.site.volume or "").partition(":")
    mounts = [{"name": "work", "mountPath": mounted}] if claim else []
    volumes: list[Document] = [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    key = {"secretKeyRef": {"name": name, "key": "token"}}
    limits = _limits(job)
    container = {
        "name": "ranks",
        "image": str(job.site.image),
        **({"workingDir": mounted} if claim else {}),
        "command": ["bash", "-c", literal("\n".join(_bash(job, name)) + "\n"), "ranks"],
        "args": [literal(word) for word in job.words],
        "env": [{"name": TOKEN, "valueFrom": key}],
        **({"resources": {"limits": limits}} if limits else {}),
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": job.grace_s,
        **({} if job.limit_s is None else {"activeDeadlineSeconds": job.limit_s}),
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }


def _bash(job: Job, name: str) -> Iterator[str]:
    """A script that starts the agent of a pod; the words of a rank are its arguments."""
    yield "set -eo pipefail"
    yield from begin(job)
    yield from job.site.before
    yield from stop_at(job)
    yield "# the first pod runs rank 0"
    first = command([*ADDRESS, "--wait", str(NAME_WAIT_S), f"{name}-0.{name}"])
    yield f"master=$({first}) || exit 1  # it is not there yet"
    place = [f'--first "$((JOB_COMPLETION_INDEX * {job.devices}))"', f"--ranks {job.devices}"]
    place += [f"--world {job.ranks}", f'--master "$master:{PORT}"']
    yield command(["exec", *AGENT, *map(Raw, place), "--"], '"$@"')


def _limits(job: Job) -> Document:
    site, limits = job.site, Document()
    if site.cores is not None:
        limits["cpu"] = site.cores * job.devices
    if site.memory is not None:
        limits["memory"] = f"{site.memory}i"  # Ki, Mi, Gi and Ti are powers of 1024
    if devices := asked_devices(site, job.devices):
        name, _, count = devices.partition(":")
        limits[name.strip()] = int(count)
    return limits
