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
AGAIN_S, LAST_S = 10, 20
"""Seconds until the agent of a lost host is started again; in which agents that are asked to end do so."""
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")


def local(job: Job) -> str:
    """A script for this machine. The agent draws the secret of the run."""
    use = [f"bash {job.saved_as or 'FILE'} {job.does}", left_behind(job)]
    lines = [*head(job, "this machine", use), "", *setting(job), *variables(job, token=False), ""]
    spares = ["--spares", str(job.spares)] if job.survives else []
    place = ["--ranks", str(job.ranks), *job.agents, *job.survives, *spares]
    words = [*AGENT, *place, "--", *job.site.container, *job.words]
    return "\n".join([*lines, command(["exec", *words])]) + "\n"


def ssh(job: Job) -> str:
    """A script that starts an agent on each host by ssh, and passes signals on to the agents."""
    use = [
        f"bash {job.saved_as or 'FILE'} {job.does} Ctrl-C stops it.",
        "ssh must reach the hosts without a question, and find the folder and the environment there.",
        left_behind(job),
    ]
    lines = [*head(job, "hosts that ssh reaches", use, starts_ranks=False), "", *_places(job), ""]
    lines += [*_agent(job), "", *_send(job), "", *_start(job), "", *(_WAIT_FOR_FIRST if job.survives else _WAIT)]
    return "\n".join(lines) + "\n"


def dealt(spares: int, hosts: int) -> list[int]:
    """Spare processes of each host: one after the other gets one, from host 0 on, which the run cannot lose."""
    return [spares // hosts + (number < spares % hosts) for number in range(hosts)]


def _places(job: Job) -> Iterator[str]:
    yield f"hosts=({' '.join(map(quoted, job.hosts))})"
    yield f"slots=({' '.join(map(str, job.slots))})"
    if job.survives:
        yield f"spares=({' '.join(map(str, dealt(job.spares, job.nodes)))})"
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
    place: list[str | Raw] = [Raw(f'--follow --first "$1" --ranks "$2" --world {job.ranks} --master "$3"')]
    place += job.agents
    place += [*job.survives, Raw('--spares "$4"')] if job.survives else []
    yield command(["exec", *AGENT, *place, "--", *job.site.container, *job.words], "<&3 3<&-")
    yield "}"


def _send(job: Job) -> Iterator[str]:
    """What passes signals on. `asked`: whether there was one; only the hosts of a run that survives ask."""
    yield "# signals go to all agents: they stop their ranks, which save"
    yield "folder=$(mktemp -d)"
    yield "trap 'rm -rf \"$folder\"' EXIT"
    yield "trap '' PIPE  # an agent that has ended reads no more"
    yield "pipes=()" + (" asked=" if job.survives else "")
    yield "send() {"
    if job.survives:
        yield "    asked=yes"
    yield '    for pipe in "${pipes[@]}"; do echo "$1" >&"$pipe" || true; done 2>/dev/null'
    yield "}"
    yield from (f"trap 'send {name}' {name}" for name in PASSED)


def _start(job: Job) -> Iterator[str]:
    """Functions that start an agent, and their first calls."""
    alive = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3") if job.survives else ()
    spares = ' "${spares[number]}"' if job.survives else ""
    yield "# start an agent on a host; its number and its exit code are written to `ended`, when it ends"
    yield 'mkfifo "$folder/ended"'
    yield 'exec {ended}<>"$folder/ended"'
    yield "start() {"
    yield f"    trap '' {' '.join(PASSED)}  # its agent gets them, and it waits for the agent"
    yield '    for pipe in "${pipes[@]}"; do exec {pipe}>&-; done  # those of other agents'
    yield "    first=0 status=0"
    yield '    for slot in "${slots[@]:0:number}"; do first=$((first + slot)); done'
    words = f'"${{hosts[number]}}" bash -s -- "$first" "${{slots[number]}}" "$master"{spares}'
    yield f"    {command([*SSH, *alive])} {words} || status=$?"
    yield '    echo "$number $status" >&"$ended"'
    yield "}"
    yield "begin() {"
    yield '    mkfifo "$folder/$number"'
    yield '    start <"$folder/$number" &'
    yield '    exec {pipe}>"$folder/$number"'
    yield "    pipes[number]=$pipe"
    yield """    printf '%s%s\\n' "$agent" "$token" >&"$pipe" || true  # ssh says why"""
    yield "}"
    yield 'for number in "${!hosts[@]}"; do begin; done'
    yield 'rm -rf "$folder"  # all pipes are open: a script that is killed leaves no file'


_WAIT = [
    "# the exit code is that of the first agent that fails. The others may end by themselves: a rank that has lost",
    f"# another one takes some seconds to say which. After {SETTLE_S} s in which none has ended they are stopped",
    "code=0 left=${#hosts[@]} limit=()",
    'while [ "$left" -gt 0 ]; do',
    '    if read -r "${limit[@]}" _ status <&"$ended"; then',
    "        left=$((left - 1))",
    f'        if [ "$status" -ne 0 ] && [ "$code" -eq 0 ]; then code=$status limit=(-t {SETTLE_S}); fi',
    '    elif [ "${#limit[@]}" -gt 0 ]; then',
    "        limit=()",
    "        send TERM",
    "    fi  # else a signal came, and was passed on",
    "done",
    'exit "$code"',
]

_WAIT_FOR_FIRST = [
    "# the exit code is that of the agent of host 0, which decides for all. Another one that fails is started again",
    f"# after {AGAIN_S} s: its host joins the others. Where host 0 has ended the others end, too",
    f"code=0 left=${{#hosts[@]}} limit={AGAIN_S} lost=() over=",
    'while [ "$left" -gt 0 ]; do',
    '    if read -r -t "$limit" number status <&"$ended"; then',
    "        left=$((left - 1))",
    '        if [ "$number" -eq 0 ]; then',
    f"            code=$status over=yes limit={SETTLE_S}",
    '        elif [ "$status" -ne 0 ]; then',
    '            lost+=("$number")',
    "        fi",
    '    elif [ "$over" = stopped ]; then',
    "        break  # a host that is gone does not answer",
    '    elif [ "$over" = yes ]; then',
    f"        over=stopped limit={LAST_S}",
    "        send TERM",
    '    elif [ -z "$asked" ]; then',
    "        folder=$(mktemp -d)",
    '        for number in "${lost[@]}"; do',
    "            left=$((left + 1))",
    "            pipe=${pipes[number]}",
    "            exec {pipe}>&-",
    "            unset 'pipes[number]'",
    "            begin",
    "        done",
    "        lost=()",
    '        rm -rf "$folder"',
    "    fi",
    "done",
    "kill $(jobs -p) 2>/dev/null || true",
    'exit "$code"',
]
