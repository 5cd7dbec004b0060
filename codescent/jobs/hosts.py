"""In: a job. Out: scripts without a scheduler and without MPI: on this machine, and on hosts that ssh reaches.
Does not start ranks: agents do (launch/agent.py), one on each host."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.jobs.bash import Raw, command, comment, exports, head, quoted, run_variables, setting
from codescent.jobs.job import PORT, Job

END = "END_OF_AGENT"
AGENT = ("python3", "-m", "codescent.launch.agent")


def local(job: Job) -> str:
    """A script for this machine."""
    use = [f"bash {job.saved_as or 'FILE'} begins the run, and the same continues it."]
    variables = [one for one in run_variables(job) if one[1] != "CODESCENT_TOKEN"]  # the agent draws one
    lines = [*head(job, "this machine", use), "", *setting(job), *exports(variables), ""]
    words = [*AGENT, "--ranks", str(job.ranks), "--", *job.site.container, *job.words]
    return "\n".join([*lines, command(["exec", *words])]) + "\n"


def ssh(job: Job) -> str:
    """A script that starts an agent on each host by ssh, and passes signals on to the agents."""
    use = [
        f"bash {job.saved_as or 'FILE'} begins the run, and the same continues it. Ctrl-C saves and stops.",
        "ssh must reach the hosts without a question, and find the folder and the environment there.",
    ]
    lines = [*head(job, "hosts that ssh reaches", use), ""]
    lines += [*_places(job), "", *_agent(job), "", *_SEND, "", *_LOOP]
    return "\n".join(lines) + "\n"


def _places(job: Job) -> Iterator[str]:
    yield f"hosts=({' '.join(map(quoted, job.hosts))})"
    yield f"slots=({' '.join(map(str, job.slots))})"
    peer = job.hosts[-1]
    yield "# the address of rank 0, as the others reach it"
    yield f"master=$({command(['python3', '-m', 'codescent.jobs.address', job.hosts[0], peer])}):{PORT}"
    yield from comment("the secret by which the ranks recognise each other goes to the agents by their input")
    yield "token=$(python3 -c 'import secrets; print(secrets.token_hex(32))')"


def _agent(job: Job) -> Iterator[str]:
    """What the bash of a host reads: its agent gets the first rank, the number of ranks and the address of rank 0."""
    variables = [one for one in run_variables(job) if one[1] != "CODESCENT_TOKEN"]
    yield f"agent=$(cat <<'{END}'"
    yield from setting(job)
    yield from exports(variables)
    place = Raw(f'--follow --first "$1" --ranks "$2" --world {job.ranks} --master "$3"')
    yield command(["exec", *AGENT, place, "--", *job.site.container, *job.words])
    yield END
    yield ")"


_SEND = [
    "# signals go to all agents: they stop their ranks, which save",
    "folder=$(mktemp -d)",
    "trap 'rm -rf \"$folder\"' EXIT",
    "pipes=()",
    "send() {",
    '    for pipe in "${pipes[@]}"; do echo "$1" >&"$pipe" || true; done 2>/dev/null',
    "}",
    'for name in TERM INT HUP USR1 USR2; do trap "send $name" "$name"; done',
]

_LOOP = [
    "pids=() first=0",
    'for number in "${!hosts[@]}"; do',
    '    mkfifo "$folder/$number"',
    '    ssh -o BatchMode=yes "${hosts[number]}" bash -s -- "$first" "${slots[number]}" "$master" <"$folder/$number" &',
    "    pids+=($!)",
    '    exec {pipe}>"$folder/$number"',
    '    pipes+=("$pipe")',
    """    printf '%s\\n' "$agent" "$token" >&"$pipe"  # its bash reads the script, the agent reads the token""",
    "    first=$((first + slots[number]))",
    "done",
    "",
    "# the first failure ends the other agents; its exit code is that of this script",
    "trap '' PIPE  # an agent that has ended reads no more",
    "code=0",
    'while [ "${#pids[@]}" -gt 0 ]; do',
    "    status=0",
    '    wait -n "${pids[@]}" || status=$?',
    "    alive=()",
    '    for pid in "${pids[@]}"; do if kill -0 "$pid" 2>/dev/null; then alive+=("$pid"); fi; done',
    '    if [ "${#alive[@]}" -lt "${#pids[@]}" ] && [ "$status" -ne 0 ] && [ "$code" -eq 0 ]; then',
    "        code=$status",
    "        send TERM",
    "    fi",
    '    pids=("${alive[@]}")',
    "done",
    'exit "$code"',
]
