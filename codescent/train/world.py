"""In: a rank, train.device; later a plan. Out: `World`: the connected rank with its device (chosen by devices.py), its
process groups, and small collectives (sums, JSON).
Does not start processes (launch does) or communicate gradients (strategies do) or activations (messages.py does)."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from codescent.base import cause
from codescent.base.agreement import from_first, kept, together
from codescent.base.code_digest import code_digest
from codescent.base.cores import OUR_THREADS, available_cores, threads_per_rank
from codescent.base.device import offered, synchronize, unique_name
from codescent.base.device_kinds import GPUS
from codescent.base.early import StopAsked, may_end
from codescent.base.ending import FREE_S, fail, within
from codescent.base.errors import RunFailed, UserError
from codescent.base.parent import end_with_parent
from codescent.base.progress import ENDED, PREPARATION, OwnPage, Pages
from codescent.base.ranges import Recording, begins, know_groups, named_collective
from codescent.base.rank import Rank
from codescent.base.stopwatch import waiting
from codescent.coupling.lost_peer import is_lost_peer
from codescent.meeting.addresses import is_local
from codescent.meeting.compared import compare, differences, stay_until_read
from codescent.meeting.facts import facts_of_process
from codescent.meeting.interfaces import name_interface
from codescent.meeting.past import StoredPast
from codescent.meeting.rendezvous import meet
from codescent.meeting.silent import tell
from codescent.plan import AXES, Collective, Mesh, Plan
from codescent.strategies.collectives import abort_groups
from codescent.train.devices import AND, IN_CONFIG, backends, choose_devices, refusal, versions
from codescent.train.hang_up import hang_up, outlives
from codescent.train.messages import Messages
from codescent.train.torch_store import TorchStore, open_agent
from codescent.train.watched import watch

T = TypeVar("T")

MEET_S = 300.0
"""Default of parallel.meet_s."""
PRINTED, PRINTED_S = "an error of all ranks is printed", 2.0
"""Key that the rank sets that prints it, and how long the others wait for it: less than FREE_S."""
DATASET_WAIT = timedelta(days=2)
"""Longest time that ranks wait, at the store, for a rank that prepares the dataset. A large corpus takes hours."""


RESUMED = "the run ends here; it goes on from its last checkpoint with --resume"
LEAVE = timedelta(seconds=10)
"""Longest time that a rank waits for the others before it ends on request."""


class World:
    """This rank's view of the run: its device, the store, and a process group for each axis of the mesh.

    Args:
        this_rank: this process among the ranks.
        device: train.device of a config.
        num_threads: train.num_threads.
        timeout_s: parallel.timeout_s.
        facts: JSON values by name, which must be equal on all ranks.
        shards_alone: a single rank may call torch's fully_shard, too: see `backends`.
        restarts: ranks that die may be started again.
        meet_s: parallel.meet_s.
        listen: parallel.listen.
        stopped_s: parallel.stopped_s.
        option: how a user asks for a device, in messages.
        devices_per_rank: more than one for a module that lies on several; `device` is the first of `devices`.

    Raises:
        UserError: the device does not exist, ranks cannot connect, or they differ in a fact or in what facts.py lists.
    """

    def __init__(
        self,
        this_rank: Rank,
        device: str,
        num_threads: int | None,
        timeout_s: float,
        facts: Mapping[str, Any] = MappingProxyType({}),
        *,
        shards_alone: bool = False,
        restarts: bool = False,
        meet_s: float = MEET_S,
        listen: str | None = None,
        stopped_s: float | None = None,
        option: str = IN_CONFIG,
        devices_per_rank: int = 1,
    ) -> None:
        if this_rank.child and this_rank.world_size > 1:  # a single rank may outlive the process that started it
            end_with_parent(f"rank {this_rank.rank} of {this_rank.world_size}")
        cause.is_rank(this_rank)
        self.this_rank = this_rank
        self.is_first = this_rank.rank == 0  # prints and writes the run folder
        self.devices = choose_devices(device, this_rank, option, each=devices_per_rank)
        self.device = self.devices[0]
        self.timeout = timedelta(seconds=timeout_s)
        backend, _ = backends(self.device, this_rank.world_size, shards_alone=shards_alone)
        own: dict[str, Any] = {"devices of a rank": devices_per_rank}
        own |= facts_of_process(code_digest(), backend, versions(backend), os.environ)  # reads files: nobody waits yet
        self.meeting = meet(this_rank, timedelta(seconds=meet_s), open_agent, listen)
        self.store = self.meeting.store
        self._torch_store = TorchStore(self.store)
        try:
            refuse = partial(refusal, wanted=device, option=option, each=devices_per_rank)
            named = AND.join(dict.fromkeys(map(unique_name, self.devices)))
            topology = compare(self.store, this_rank, named, {**own, **facts}, refuse)
            self.named = name_interface(this_rank.here(), self.meeting.address, is_local=is_local(this_rank))
            self.store.set_timeout(self.timeout)
            cause.has_met()
            self.leaders = topology.leaders
            keeps = this_rank.late or (restarts and self.is_first)
            self.past = StoredPast(self.store, is_late=this_rank.late) if keeps else None
            given = num_threads or _given_threads(os.environ)
            self.tries_threads = given is None
            self.num_threads = given or threads_per_rank(available_cores(), topology.sharing)
            torch.set_num_threads(self.num_threads)
            if offered(self.device).aborts:  # torch warns that messages of a group wait: a channel is a group
                os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            self.living = (this_rank.rank,) if this_rank.late else tuple(range(this_rank.world_size))
            self._begin_groups(HashStore() if this_rank.late else self._torch_store, shards_alone=shards_alone)
            self.pages = Pages.of(os.environ) if is_local(this_rank) else None
            of_launcher = self.pages or Pages.of(os.environ)
            watch(this_rank, self.store, self.leaders, of_launcher, listen, (stopped_s, timeout_s))
        except BaseException:
            self.meeting.close()
            raise
        self.mesh = Mesh(dp_replicate=this_rank.world_size)
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._goes_on = False
        self.servers: dist.ProcessGroup | None = None
        self.stage = 0  # the index of this rank's program in the plan: see `Plan.role`

    def _begin_groups(self, store: Store, *, shards_alone: bool = False) -> None:
        """Make the default process group, of the living. torch numbers them anew."""
        names, starts = backends(self.device, len(self.living), shards_alone=shards_alone, each=len(self.devices))
        dist.init_process_group(
            names,
            store=store,
            rank=self.living.index(self.this_rank.rank),
            world_size=len(self.living),
            timeout=self.timeout,
            device_id=starts,
        )

    def divide(self, plan: Plan) -> None:
        """Create the process groups of the plan: one for each mesh axis and each axis of its traffic. Collective.

        `living` are the ranks of the default process group, in order. Others have died. A rank that comes late is in a
        group of its own, until the others make their groups anew (`go_on_with`).

        Every rank makes the same number of groups in the same order, if need be of itself alone. NCCL depends on it: a
        new group is one ncclCommSplit of all ranks, with a colour for each list of ranks. So the first groups of all
        ranks together, then the second ones and so on, divide the ranks. torch names a group by its ranks and by a
        count. All ranks of a group must have the same name for it. Groups are destroyed in the order of their names.

        Communicators do not share NCCL's resources (splitShare): those that share run one after the other, and a
        message would wait for another one, which waits for it (decision 6).
        """
        world = dist.group.WORLD
        assert world is not None
        self.mesh, this_rank = plan.mesh, self.this_rank.rank
        created = {self.living: world}
        know_groups([])
        self.stage = plan.role(this_rank)
        if len(plan.servers) > 1:
            serves = this_rank in plan.servers
            group = self._new_group(plan.servers if serves else (this_rank,))
            self.servers = group if serves else None
        if this_rank not in plan.mesh:  # it is in no group of the mesh, and makes as many as the workers
            workers = tuple(range(self.mesh.world_size))
            created[workers] = self._new_group((this_rank,))
            for axis in AXES:
                if self.mesh.group(axis, 0) not in created:
                    created[self.mesh.group(axis, 0)] = self._new_group((this_rank,))
            return
        if plan.has_ranks_outside:
            workers = tuple(range(self.mesh.world_size))
            created[workers] = self._new_group(workers)
        axes = dict.fromkeys([*AXES, *(record.axis for record in plan.traffic if record.axis)])
        for axis in axes:
            ranks = self.mesh.group(axis, this_rank)
            if axis == "dp_replicate" and plan.apart and not plan.layout.served:  # a thread sends beside other groups
                self.groups[axis] = self._new_group(ranks)
            elif "[" not in axis:  # axes with the same ranks share a group
                if ranks not in created:
                    created[ranks] = self._new_group(ranks)
                self.groups[axis] = created[ranks]
            elif this_rank in ranks:
                self.groups[axis] = self._new_group(ranks)
            else:
                self._new_group((this_rank,))
        Recording.axes = {group.group_name: axis for axis, group in reversed(self.groups.items())}
        know_groups([*self.groups.values()])

    def messages(self, dtype: torch.dtype, shape: tuple[int, int]) -> Messages:
        """The point-to-point messages of this rank's pipeline stage."""
        return Messages(self.stage, self.groups, self.mesh.group("pp", self.this_rank.rank), dtype, self.device, shape)

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        members = [self.living.index(rank) for rank in ranks if rank in self.living]
        group: dist.ProcessGroup = dist.new_group(members, self.timeout, use_local_synchronization=True)
        return group

    def go_on_with(self, living: Sequence[int], plan: Plan, when: str) -> None:
        """Make the process groups anew, of the ranks that live. Collective of these.

        A group with a dead member is broken, and its collectives fail or hang.

        Args:
            living: those ranks, in order.
            plan: of the run.
            when: names these groups; others have another name.
        """
        self.living = tuple(living)
        self.groups.clear()
        self.servers = None
        gc.collect()
        if offered(self.device).aborts:  # NCCL's would wait for the dead
            within(FREE_S, abort_groups)
        elif self.device.type in GPUS:
            raise RunFailed(f"{offered(self.device).library} cannot give up the groups of lost ranks: {RESUMED}")
        if dist.is_initialized():
            dist.destroy_process_group()
        self._begin_groups(PrefixStore(f"groups {when}", self._torch_store))  # it has the old groups' addresses
        self.divide(plan)

    def share(self, plan: Plan) -> tuple[int, int]:
        """This worker's number among those that share out samples, and how many they are."""
        if len(self.living) == self.this_rank.world_size:
            return plan.mesh.dp_index(self.this_rank.rank), plan.mesh.dp
        workers = [rank for rank in self.living if rank < plan.mesh.world_size]
        return workers.index(self.this_rank.rank), len(workers)

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 only; return its result (JSON data), or raise its error, on every rank. Collective."""
        return from_first(UserError, make)

    def refuse_differences(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError on every rank if a fact (JSON value by name) differs between ranks. Collective."""
        everyone = together(UserError, lambda: {"host": socket.gethostname(), "facts": dict(facts)})
        if problems := differences(everyone):
            raise _of_all(problems)

    def all_agree(self, mine: bool) -> bool:
        """Whether `mine` is True on every rank. Collective."""

        def vote() -> bool:
            votes = torch.tensor([int(mine)])
            begins(Collective.ALL_REDUCE, memory=votes)
            dist.all_reduce(votes, dist.ReduceOp.MIN)
            return bool(votes.item())

        return kept(vote)

    def sum_over(self, values: torch.Tensor, axis: str) -> torch.Tensor:
        """Sum `values` over the ranks of an axis, in place, and return them. Collective."""
        if self.this_rank.world_size > 1 and self.mesh.degree(axis) > 1:
            with waiting(), named_collective(Collective.ALL_REDUCE, self.groups[axis], values):
                dist.all_reduce(values, group=self.groups[axis])
        return values

    def in_turn(self, work: Callable[[], object], name: str = "in_turn") -> None:
        """Call `work` on rank 0 first, then on the first rank of every other machine, then on the rest. Collective.

        On a shared file system the others find the files that rank 0 has written. The ranks wait at the store, not in
        a collective, so that a collective's timeout does not end long work. Each call has another `name`.

        Raises:
            UserError: on every rank, if `work` raises it on rank 0 or on the first rank of a machine.
            StopAsked: on every rank, if one of these ranks was asked to stop.
        """
        if OwnPage.current is not None:
            OwnPage.current.enter(PREPARATION)
        for turn in ([0], [rank for rank in self.leaders if rank != 0]):
            keys = [f"{name}{rank}" for rank in turn]
            if self.this_rank.rank in turn:
                self.store.set(f"{name}{self.this_rank.rank}", json.dumps(_tried(work)))
            self.store.wait(keys, DATASET_WAIT)
            found = [json.loads(one) for one in (self.store.multi_get(keys) if keys else [])]
            problems = [problem for one in found for problem in one["problems"]]
            asked = [one["asked"] for one in found if one["asked"]]
            if problems or asked:
                stay_until_read(self.store, self.this_rank, "problems")
                raise _of_all(problems) if problems else StopAsked(asked[0])
        work()
        if OwnPage.current is not None:
            OwnPage.current.enter("")

    def leave(self) -> None:
        """Wait for the other ranks, at most LEAVE: all have written what they write. Some launchers end all ranks as
        soon as one ends with a code other than 0."""
        sys.stdout.flush()
        with suppress(RuntimeError):  # a rank has died, or rank 0, which serves the store, was faster
            self.store.set(f"leaves{self.this_rank.rank}", "")
            self.store.wait([f"leaves{rank}" for rank in self.living], LEAVE)

    def at(self, position: float, instruction: str = "") -> None:
        """Write this rank's progress, in steps, for the launcher: see `base/progress.py`."""
        cause.process.position = position
        if OwnPage.current is not None:
            OwnPage.current.at(position, self.stage, instruction)

    def ends(self, *, goes_on: bool = False) -> None:
        """This rank has taken its steps. `goes_on`: it soon takes more, with other ranks, and the run may lose it."""
        self._goes_on = goes_on
        if not goes_on:
            self.at(ENDED)

    def meets(self, step: int) -> None:
        """Write for the launcher that this rank is in the collectives after a step; 0: it is in none."""
        if OwnPage.current is not None:
            OwnPage.current.meet(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or self.this_rank.world_size == 1:
            self.close()
        elif outlives(error):
            self.part()
        else:
            self.give_up(error)

    def close(self, *, alone: bool = False) -> None:
        """Destroy the process groups. NCCL waits for the other ranks: each has to call it, too.

        `alone`: perhaps no other rank calls it, so NCCL's are given up instead, when this rank's messages have ended or
        FREE_S is over. gloo's wait for nobody.
        """
        if not (alone or self._goes_on):
            self.at(ENDED)
        OwnPage.current = None
        self.groups.clear()
        gc.collect()  # free groups that reference cycles still hold, so that their threads end
        if alone and self.device.type in GPUS and self.this_rank.world_size > 1:
            within(FREE_S, partial(synchronize, self.device))
            if offered(self.device).aborts:  # others stay until the process ends
                within(FREE_S, abort_groups)
        else:
            dist.destroy_process_group()
        self._leave_meeting()

    def _leave_meeting(self) -> None:
        self.meeting.close()
        for variable in self.named:  # the next run of this process may have another interface
            os.environ.pop(variable, None)

    def part(self) -> None:
        """Another rank was lost: let go of the process groups and of the store, without the others. The process goes
        on. It ends if it cannot let go, and is started again."""
        OwnPage.current = None
        self.groups.clear()
        self.servers = None
        hang_up()  # gloo's destructors would wait for messages under way

        def let_go() -> None:
            if offered(self.device).aborts:
                abort_groups()
            if dist.is_initialized():
                dist.destroy_process_group()

        if not within(FREE_S, let_go):
            why = f"codescent: {FREE_S:g} s after a loss the process groups have not ended: this rank ends\n"
            os.write(2, why.encode())  # no line `error:`, so that it is started again
            os._exit(RunFailed.exit_code)
        self._leave_meeting()

    def give_up(self, error: BaseException, *, said: bool = False) -> None:
        """An error ends this rank, and perhaps no other one: the process ends without the others (base/ending.py).

        The process groups stay until then: with them, gloo's destructors would wait for messages under way. The end of
        the process closes gloo's connections; so the other ranks fail only after this one has printed its error.

        Where ranks are on several machines, they say at the store that they end, and name those that do not.

        Args:
            error: the cause.
            said: whether it is printed already.
        """

        cause.is_consequence(is_lost_peer(error))

        def free() -> None:
            self._let_one_print(error)
            if not is_local(self.this_rank):
                tell(self.store, self.this_rank, self.living, lost_peer=is_lost_peer(error))
            if offered(self.device).aborts:
                abort_groups()

        fail(error, free, said=said)

    def _let_one_print(self, error: BaseException) -> None:
        """A launcher may end all ranks when one has ended. So those that print nothing end after the one that does."""
        if not getattr(error, "everywhere", False):
            return
        is_printer = cause.prints(error, os.environ)

        def agree() -> None:
            with suppress(RuntimeError):  # rank 0, which serves the store, has ended: it has printed
                if is_printer:
                    self.store.set(PRINTED, "")
                else:
                    self.store.wait([PRINTED], timedelta(seconds=PRINTED_S))

        within(PRINTED_S, agree)


def _of_all(problems: Sequence[str]) -> UserError:
    error = UserError(*dict.fromkeys(problems))
    error.everywhere = True
    return error


def _tried(work: Callable[[], object]) -> dict[str, Any]:
    """Call `work`. What it found wrong, and why it has ended before its time, as JSON data."""
    problems: tuple[str, ...] = ()
    asked = ""
    try:
        with may_end():
            work()
    except StopAsked as error:
        asked = error.why
    except UserError as error:
        problems = error.problems
    return {"problems": problems, "asked": asked}


def _given_threads(env: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS, if the user or another launcher has set it; None: our launcher has, or nobody."""
    wanted = env.get("OMP_NUM_THREADS", "")
    return int(wanted) or None if wanted.isdigit() and OUR_THREADS not in env else None
