"""In: nothing. Out: the dataclass Layout: options of the config section [parallel], such as schedule and ZeRO stage.
Does not contain the size of each mesh axis (mesh.py does) and does not apply an option (strategies do)."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.plan.brief import brief
from codescent.plan.wire import Wire


@dataclass(frozen=True)
class Layout:
    """Options for the strategies. Each field is the key of [parallel] with the same name (see docs/config.md)."""

    schedule: str = "1f1b"
    virtual_stages: int = 1
    cut: str = "cost"
    zero_stage: int = 3
    context: str = "ring"
    sequence_parallel: bool = True
    recompute: str = "none"
    offload: str = "none"
    data_parallel: int = 1
    bucket_bytes: int = 16_777_216
    reduce_dtype: str = "auto"
    average_every: int = brief(0)
    synchronous_steps: int = brief(0)
    outer_optimizer: str = brief("none")
    outer_learning_rate: float = brief(0.7)
    outer_momentum: float = brief(0.9)
    fragments: int = brief(1)
    overlap_steps: int = brief(0)
    servers: int | str = brief(0)
    updates: str = brief("synchronous")
    staleness: int | None = brief(None)
    momentum_every: int | None = brief(None)
    local_steps: str = brief("equal")
    quorum: int | None = brief(None)
    wire: str = brief("none")
    wire_from: int = brief(0)
    gossip: str = brief("none")
    gossip_mode: str = brief("synchronous")
    gossip_every: int = brief(1)
    gossip_rate: float = brief(1.0)
    agree_every: int | None = brief(None)

    @property
    def computes_blocks_again(self) -> bool:
        """Whether backward computes blocks again from their inputs, and so repeats the messages inside of them."""
        return self.recompute in ("products", "full")

    @property
    def defers_weights(self) -> bool:
        """Whether stages compute gradients of weights apart from those of activations, and later."""
        return self.schedule == "zero-bubble"

    @property
    def apart(self) -> bool:
        """Whether the replicas of dp_replicate train apart, with their own gradients."""
        return self.average_every > 0 or self.gossip != "none"

    @property
    def keeps_anchor(self) -> bool:
        """Whether changes since the last average are sent, not weights: for an outer optimizer, or to be compressed."""
        return self.outer_optimizer != "none" or Wire.parse(self.wire).lossy

    @property
    def has_outer_momentum(self) -> bool:
        """Whether the outer optimizer has a momentum."""
        return self.outer_optimizer != "none" and self.outer_momentum > 0

    @property
    def served(self) -> bool:
        """Whether parameter servers hold the weights."""
        return self.servers != 0

    @property
    def averages_beside(self) -> bool:
        """Whether pairs of replicas average their weights beside the computation: asynchronous gossip."""
        return self.gossip != "none" and self.gossip_mode == "asynchronous"

    @property
    def hands_out(self) -> bool:
        """Whether ranks are given portions of a step's samples, and a faster rank computes more of them."""
        return bool(self.hands_out_by)

    @property
    def hands_out_by(self) -> str:
        """The key of [parallel] that makes `hands_out` true; "" without one."""
        return "servers" if self.served else "gossip_mode" if self.averages_beside else ""

    @property
    def server_ranks(self) -> int:
        """Number of ranks that are servers and nothing else."""
        return self.servers if isinstance(self.servers, int) else 0

    @property
    def served_rounds(self) -> bool:
        """Whether workers take rounds of steps with their own optimizers, and servers apply the changes."""
        return self.served and self.average_every > 0

    @property
    def can_lose_workers(self) -> bool:
        """Whether a run goes on without a worker that has died. No step may wait for a certain worker. Workers keep no
        state that a checkpoint needs: residuals of a lossy wire, optimizers of rounds."""
        keeps_state = Wire.parse(self.wire).lossy or self.served_rounds
        return self.server_ranks > 0 and self.updates == "asynchronous" and not keeps_state

    @property
    def in_steps(self) -> bool:
        """Whether servers add the pushes of a step before they update: always, but with asynchronous updates without a
        bound on the staleness."""
        return self.updates == "synchronous" or self.staleness is not None

    @property
    def updates_alone(self) -> bool:
        """Whether each portion of a step updates weights by itself, and one that is not finite is refused alone."""
        return self.averages_beside or (self.served and not (self.in_steps or self.served_rounds))

    @property
    def agrees_at_ends(self) -> bool:
        """Whether all replicas have the same weights at the end of a round."""
        averages = self.gossip == "none" and self.fragments == 1 and self.overlap_steps == 0
        return not self.apart or averages
