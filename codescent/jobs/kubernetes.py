"""In: a job. Out: a manifest of Kubernetes: an indexed Job, with a pod for each node, and a headless Service for names.
Does not apply it. In a pod an agent of codescent starts the ranks: it ends with their exit code, unlike torchrun."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from codescent.base.errors import UserError
from codescent.base.token import TOKEN
from codescent.jobs.bash import Raw, command, comment
from codescent.jobs.hosts import AGENT
from codescent.jobs.job import Job, distinct
from codescent.jobs.lines import ADDRESS, begin, stop_at
from codescent.jobs.site import asked_devices
from codescent.jobs.yaml import literal
from codescent.jobs.yaml import quoted as text

LABEL_CHARS = 63
PORT = 29_400
"""A pod has an address of its own, so no other run has this port."""
WRONG_INPUT = UserError.exit_code
INDEX = "batch.kubernetes.io/job-completion-index"
"""The label of a pod with its number."""
NAME_WAIT_S = 600
"""Seconds until the first pod runs."""


def script(job: Job) -> str:
    """The manifest, for kubectl apply."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: Job) -> Iterator[str]:
    name = pod_name(job)
    yield from comment(f"{job.name}, {job.machines()}. Written for Kubernetes by:")
    yield from comment(job.said)
    yield from comment(f"kubectl apply -f {job.saved_as or 'FILE'} begins the run.")
    yield from comment(f"kubectl replace --force -f {job.saved_as or 'FILE'} ends its pods, and continues it.")
    yield from comment(f"kubectl logs -f -l job-name={name},{INDEX}=0 shows what rank 0 prints.")
    yield from _service(name)
    yield "---"
    yield from _secret(name)
    yield "---"
    yield from _job(job, name)


def pod_name(job: Job) -> str:
    """A name with which the name of each pod is a label of DNS: small letters, digits and dashes."""
    name = job.name.lower().replace("_", "-").replace(".", "-")
    return distinct(name, job.name, LABEL_CHARS - len(f"-{job.nodes - 1}"))


def _service(name: str) -> Iterator[str]:
    """Pods find each other by names in it, before they are ready."""
    yield "apiVersion: v1"
    yield "kind: Service"
    yield f"metadata: {{name: {text(name)}}}"
    yield "spec:"
    yield "  clusterIP: None"
    yield "  publishNotReadyAddresses: true"
    yield f"  selector: {{job-name: {text(name)}}}"


def _secret(name: str) -> Iterator[str]:
    yield "# the secret by which the ranks recognise each other"
    yield "apiVersion: v1"
    yield "kind: Secret"
    yield f"metadata: {{name: {text(name)}}}"
    yield f'stringData: {{token: "{secrets.token_hex(32)}"}}'


def _job(job: Job, name: str) -> Iterator[str]:
    yield "apiVersion: batch/v1"
    yield "kind: Job"
    yield f"metadata: {{name: {text(name)}}}"
    yield "spec:"
    yield "  completionMode: Indexed"
    yield f"  completions: {job.nodes}"
    yield f"  parallelism: {job.nodes}"
    again = "  # a pod that ends with 75 is saved, and starts again" if job.site.requeues else ""
    yield f"  backoffLimit: {job.site.requeues * job.nodes}{again}"
    yield "  podFailurePolicy:"
    yield "    rules:"
    yield "      # wrong input, which another start would not mend"
    yield f"      - {{action: FailJob, onExitCodes: {{containerName: ranks, operator: In, values: [{WRONG_INPUT}]}}}}"
    yield "      # a pod that had to make room is no failure"
    yield "      - {action: Ignore, onPodConditions: [{type: DisruptionTarget}]}"
    yield "  template:"
    yield "    spec:"
    yield "      restartPolicy: Never"
    yield f"      subdomain: {text(name)}"
    yield f"      terminationGracePeriodSeconds: {job.grace_s}"
    if job.limit_s is not None:
        yield f"      activeDeadlineSeconds: {job.limit_s}"
    yield "      containers:"
    yield "        - name: ranks"
    yield f"          image: {text(str(job.site.image))}"
    if job.site.volume is not None:
        yield f"          workingDir: {text(job.site.volume.partition(':')[2])}"
    yield from _command(job, name)
    yield from _environment(name)
    yield from _resources(job)
    yield from _volume(job)


def _command(job: Job, name: str) -> Iterator[str]:
    """A script that starts the agent of a pod; the words of a rank are its arguments."""
    yield "          command:"
    yield "            - bash"
    yield "            - -c"
    yield "            - |"
    yield from (f"              {literal(line)}" for line in "\n".join(_bash(job, name)).split("\n"))
    yield "            - ranks"
    yield "          args:"
    yield from (f"            - {text(literal(word))}" for word in job.words)


def _bash(job: Job, name: str) -> Iterator[str]:
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


def _environment(name: str) -> Iterator[str]:
    yield "          env:"
    yield f"            - {{name: {TOKEN}, valueFrom: {{secretKeyRef: {{name: {text(name)}, key: token}}}}}}"


def _resources(job: Job) -> Iterator[str]:
    site, limits = job.site, []
    if site.cores is not None:
        limits.append(f"cpu: {site.cores * job.devices}")
    if site.memory is not None:
        limits.append(f"memory: {text(f'{site.memory}i')}")  # Ki, Mi, Gi and Ti are powers of 1024
    if devices := asked_devices(site, job.devices):
        name, _, count = devices.partition(":")
        limits.append(f"{text(name.strip())}: {count.strip()}")
    if limits:
        yield "          resources:"
        yield "            limits:"
        yield from (f"              {limit}" for limit in limits)


def _volume(job: Job) -> Iterator[str]:
    """The claim of site.volume, and shared memory as large as the memory allows: a pod has 64 MiB by itself."""
    claim, _, mounted = (job.site.volume or "").partition(":")
    yield "          volumeMounts:"
    if claim:
        yield f"            - {{name: work, mountPath: {text(mounted)}}}"
    yield "            - {name: shm, mountPath: /dev/shm}"
    yield "      volumes:"
    if claim:
        yield f"        - {{name: work, persistentVolumeClaim: {{claimName: {text(claim)}}}}}"
    yield "        - {name: shm, emptyDir: {medium: Memory}}"
