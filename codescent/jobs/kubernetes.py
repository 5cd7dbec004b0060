"""In: a job. Out: a manifest of Kubernetes: an indexed Job, with a pod for each node, and a headless Service for names.
Does not apply it."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator

from codescent.jobs.job import PORT, Job
from codescent.jobs.torchrun import SIGNALS

NOT_FINISHED, WRONG_INPUT = 75, 2
"""Exit codes: saved, to be started again; nothing that another start would mend."""


def script(job: Job) -> str:
    """The manifest, for kubectl apply."""
    return "\n".join(_lines(job)) + "\n"


def _lines(job: Job) -> Iterator[str]:
    name = job.name.lower().replace("_", "-").replace(".", "-")
    yield f"# {job.name}, {job.shape()}. Written for Kubernetes by:"
    yield from (f"# {line}" for line in job.said.splitlines())
    yield f"# kubectl apply -f {job.saved_as or 'FILE'} begins the run."
    yield f"# To continue it: kubectl delete job {name}, and apply it again."
    yield from _service(name)
    yield "---"
    yield from _secret(name)
    yield "---"
    yield from _job(job, name)


def _service(name: str) -> Iterator[str]:
    """Pods find each other by names in it, before they are ready."""
    yield "apiVersion: v1"
    yield "kind: Service"
    yield f"metadata: {{name: {name}}}"
    yield "spec:"
    yield "  clusterIP: None"
    yield "  publishNotReadyAddresses: true"
    yield f"  selector: {{job-name: {name}}}"


def _secret(name: str) -> Iterator[str]:
    yield "# the secret by which the ranks recognise each other"
    yield "apiVersion: v1"
    yield "kind: Secret"
    yield f"metadata: {{name: {name}}}"
    yield f"stringData: {{token: {secrets.token_hex(32)}}}"


def _job(job: Job, name: str) -> Iterator[str]:
    site = job.site
    yield "apiVersion: batch/v1"
    yield "kind: Job"
    yield f"metadata: {{name: {name}}}"
    yield "spec:"
    yield "  completionMode: Indexed"
    yield f"  completions: {job.nodes}"
    yield f"  parallelism: {job.nodes}"
    yield f"  backoffLimit: {site.requeues * job.nodes}"
    if job.limit_s is not None:
        yield f"  activeDeadlineSeconds: {job.limit_s}"
    yield "  podFailurePolicy:"
    yield "    rules:"
    yield "      # 2: wrong input, which another start would not mend"
    yield f"      - {{action: FailJob, onExitCodes: {{containerName: ranks, operator: In, values: [{WRONG_INPUT}]}}}}"
    yield "  template:"
    yield "    spec:"
    yield "      restartPolicy: Never"
    yield f"      subdomain: {name}"
    yield f"      terminationGracePeriodSeconds: {job.grace_s}"
    yield "      containers:"
    yield "        - name: ranks"
    yield f"          image: {json.dumps(site.image)}"
    yield f"          workingDir: {json.dumps(str(job.folder))}"
    yield "          command: [bash, -c]"
    yield "          args:"
    yield "            - |"
    yield from (f"              {line}" for line in _bash(job, name))
    yield from _environment(job, name)
    yield from _resources(job)
    yield from _volume(job)


def _bash(job: Job, name: str) -> Iterator[str]:
    """An agent of torchrun in each pod. The first pod's name in the Service is its address."""
    yield "set -e"
    yield from job.site.before
    if job.limit_s is not None:
        yield f"export CODESCENT_STOP_AT=$(($(date +%s) + {job.limit_s - job.grace_s}))"
    agent = ["exec torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.devices}"]
    agent += ['--node-rank="$JOB_COMPLETION_INDEX"', f"--master-addr={name}-0.{name}", f"--master-port={PORT}"]
    agent += [f"--max-restarts={job.restarts}", f"--signals-to-handle={SIGNALS}", *map(shlex.quote, job.site.launcher)]
    yield " ".join(agent) + " \\"
    yield f"    {shlex.join(job.python)}"


def _environment(job: Job, name: str) -> Iterator[str]:
    yield "          env:"
    yield f"            - {{name: CODESCENT_TOKEN, valueFrom: {{secretKeyRef: {{name: {name}, key: token}}}}}}"
    yield f"            - {{name: CODESCENT_MARK, value: {json.dumps(job.mark)}}}"


def _resources(job: Job) -> Iterator[str]:
    site = job.site
    yield "          resources:"
    yield "            limits:"
    if site.cores is not None:
        yield f"              cpu: {site.cores * job.devices}"
    if site.memory is not None:
        yield f"              memory: {json.dumps(site.memory)}"
    if site.devices not in (None, "none"):
        yield f"              {site.devices.partition(':')[0].strip()}: {job.devices}"
    else:
        yield "              {}" if site.cores is None and site.memory is None else ""


def _volume(job: Job) -> Iterator[str]:
    """The claim of site.volume, and shared memory as large as the memory allows: a pod has 64 MiB by itself."""
    claim, _, mounted = (job.site.volume or "").partition(":")
    yield "          volumeMounts:"
    if claim:
        yield f"            - {{name: work, mountPath: {json.dumps(mounted)}}}"
    yield "            - {name: shm, mountPath: /dev/shm}"
    yield "      volumes:"
    if claim:
        yield f"        - {{name: work, persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}}}"
    yield "        - {name: shm, emptyDir: {medium: Memory}}"
