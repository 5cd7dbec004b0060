"""In: a job. Out: scripts without a scheduler and without MPI: on this machine, and on hosts that ssh reaches.
Does not start ranks: agents do (launch/agent.py), one on each host."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.jobs.bash import Raw, command, comment, quoted
from codescent.jobs.job import Job
from codescent.jobs.lines import ADDRESS, ANY_PORT, PASSED, PYTHON, begin, head, left_behind, setting, variables

AGENT = (*PYTHON, "codescent.launch.agent")
SETTLE_S = 5
"""Seconds in which a rank ends that has lost another one, and says so (meeting/silent.py)."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")


def local(job: Job) -> str:
    """A script for this machine. The agent draws the secret of the run."""
    use = [f"bash {job.saved_as or 'FILE'} {job.does}", left_behind(job)]
    lines = [*head(job, "this machine", use), "", *setting(job), *variables(job, token=False), ""]
    words = [*AGENT, "--ranks", str(job.ranks), "--", *job.site.container, *job.words]
    return "\n".join([*lines, command(["exec", *words])]) + "\n"


def ssh(job: Job) -> str:
    """A script that starts an agent on each host by ssh, and passes signals on to the agents."""
    use = [
        f"bash {job.saved_as or 'FILE'} {job.does} Ctrl-C stops it.",
        "ssh must reach the hosts without a question, and find the folder and the environment there.",
        left_behind(job),
    ]
    lines = [*head(job, "hosts that ssh reaches", use, starts_ranks=False), "", *_places(job), ""]
    lines += [*_agent(job), "", *_SEND, "", *_START, "", *_WAIT]
    return "\n".join(lines) + "\n"


def _places(job: Job) -> Iterator[str]:
    yield f"hosts=({' '.join(map(quoted, job.hosts))})"
    yield f"slots=({' '.join(map(str, job.slots))})"
    yield "# the address of rank 0, as the others reach it, and a port there"
    yield f"master=$({command([*ADDRESS, job.hosts[0], job.hosts[-1]])}):{ANY_PORT}"
    yield from comment("the secret by which the ranks recognise each other goes to the agents by their input")
    yield "token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"


def _agent(job: Job) -> Iterator[str]:
    """What the bash of a host reads: its agent gets the first rank, the number of ranks and the address of rank 0."""
    lines = list(_on_host(job))
    end = "END_OF_AGENT"
    while any(end in line for line in lines):
        end += "_"
    yield "# what each host does. Its bash reads all of it before it begins: then the agent reads the same input"
    yield f"IFS= read -r -d '' agent <<'{end}' || true"
    yield from lines
    yield end


def _on_host(job: Job) -> Iterator[str]:
    yield "{"
    yield "set -eo pipefail"
    yield "exec 3<&0 </dev/null"
    yield from begin(job)
    yield from setting(job)
    yield from variables(job, token=False)
    place = Raw(f'--follow --first "$1" --ranks "$2" --world {job.ranks} --master "$3"')
    yield command(["exec", *AGENT, place, "--", *job.site.container, *job.words], "<&3 3<&-")
    yield "}"


_SEND = [
    "# signals go to all agents: they stop their ranks, which save",
    "folder=$(mktemp -d)",
    "trap 'rm -rf \"$folder\"' EXIT",
    "trap '' PIPE  # an agent that has ended reads no more",
    "pipes=()",
    "send() {",
    '    for pipe in "${pipes[@]}"; do echo "$1" >&"$pipe" || true; done 2>/dev/null',
    "}",
    *(f"trap 'send {name}' {name}" for name in PASSED),
]

_START = [
    "# start an agent on a host; its exit code is written to `ended`, when it ends",
    'mkfifo "$folder/ended"',
    'exec {ended}<>"$folder/ended"',
    "start() {",
    f"    trap '' {' '.join(PASSED)}  # its agent gets them, and it waits for the agent",
    '    for pipe in "${pipes[@]}"; do exec {pipe}>&-; done  # those of other agents',
    "    status=0",
    f'    {command(SSH)} "$1" bash -s -- "$2" "$3" "$master" || status=$?',
    '    echo "$status" >&"$ended"',
    "}",
    "first=0",
    'for number in "${!hosts[@]}"; do',
    '    mkfifo "$folder/$number"',
    '    start "${hosts[number]}" "$first" "${slots[number]}" <"$folder/$number" &',
    '    exec {pipe}>"$folder/$number"',
    '    pipes+=("$pipe")',
    """    printf '%s%s\\n' "$agent" "$token" >&"$pipe" || true  # ssh says why""",
    "    first=$((first + slots[number]))",
    "done",
    'rm -rf "$folder"  # all pipes are open: a script that is killed leaves no file',
]

_WAIT = [
    "# the exit code is that of the first agent that fails. The others may end by themselves: a rank that has lost",
    f"# another one takes some seconds to say which. After {SETTLE_S} s in which none has ended they are stopped",
    "code=0 left=${#hosts[@]} limit=()",
    'while [ "$left" -gt 0 ]; do',
    '    if read -r "${limit[@]}" status <&"$ended"; then',
    "        left=$((left - 1))",
    f'        if [ "$status" -ne 0 ] && [ "$code" -eq 0 ]; then code=$status limit=(-t {SETTLE_S}); fi',
    '    elif [ "${#limit[@]}" -gt 0 ]; then',
    "        limit=()",
    "        send TERM",
    "    fi  # else a signal came, and was passed on",
    "done",
    'exit "$code"',
]
