"""In: the ranks of this host, what the run does about losses. Out: who decides: this host, or that of rank 0.
Decides nothing itself (decider.py does)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from codescent.base.token import key_of
from codescent.launch.decider import AloneDecider, Decider
from codescent.launch.group import Group
from codescent.launch.hosts import RUN, AgentHub, Follower
from codescent.launch.places import LossPolicy
from codescent.launch.reports import HostPlace, ProcessDeath
from codescent.launch.supervisor import Supervisor, host
from codescent.launch.survivors import Deciding

CONNECT_S = 3.0
"""Seconds of one attempt to reach the agent of host 0."""


def deciding(
    group: Group,
    policy: LossPolicy,
    supervisor: Supervisor,
    env: Mapping[str, str],
    hub: tuple[socket.socket, int] | None,
    say: Callable[[str], None],
) -> Deciding:
    """Who decides after losses.

    Args:
        group: the ranks of this host.
        policy: what the run does about losses.
        supervisor: of this host.
        env: has the token of the run.
        hub: where the agents of other hosts come, and the port of rank 0; None: all ranks are here, or it is elsewhere.
        say: prints a sentence.
    """
    if group.first:
        connect = partial(socket.create_connection, (group.address, group.port), CONNECT_S)
        return Follower(group.first, HostPlace(host(), group.count, policy.spares), connect, key_of(env, RUN))
    if policy.later is not None:
        policy = replace(policy, fewer=policy.later(supervisor.pages))

    def record(rank: int, death: ProcessDeath, of_host: str) -> None:
        supervisor.record_crash(rank, death.pid, death.ending, death.step, of_host)

    decider = Decider(group.world_size, policy, group.count, host(), say, record)
    if hub is None:
        return AloneDecider(decider)
    listener, port = hub
    return AgentHub(decider, listener, key_of(env, RUN), port)
