"""In: the values of [parallel]. Out: a frozen pydantic class with its keys: mesh, schedule, averages, servers, gossip.
Does not check what depends on ranks (build does) and has no other section (sections.py has)."""

from __future__ import annotations

from typing import Literal

from codescent.config.keys import (
    Cut,
    Period,
    Section,
    Servers,
    Text,
    WireText,
    at_least,
    auto,
    key,
    one_of,
    other_than,
)

AVERAGES = other_than("parallel.average_every", 0)
"""Only a run whose replicas train apart reads the key."""

GOSSIPS = other_than("parallel.gossip", "none")
"""Only a run whose replicas exchange weights with neighbours reads the key."""

SERVED = other_than("parallel.servers", 0)
"""Only a run with parameter servers reads the key."""

ASYNCHRONOUS = one_of("parallel.updates", "asynchronous")
"""Only asynchronous servers read the key."""

CHOSEN = (
    "parallel.pp",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.ep",
    "parallel.cp",
    "parallel.tp",
    "train.microbatch_size",
    "parallel.schedule",
    "parallel.virtual_stages",
    "parallel.zero_stage",
    "parallel.offload",
    "parallel.recompute",
    "parallel.sequence_parallel",
    "parallel.context",
)
"""Keys of a layout that decide no losses: parallel.layout = "auto" and `codescent plan --search` choose those that no
file gives. The degrees of the mesh come first, outermost first."""


class Parallel(Section):
    """How the ranks divide the work. World size = pp x dp_replicate x dp_shard x ep x cp x tp."""

    ranks: int = key(1, "ranks that `codescent train` starts on this machine, unless a launcher started it", ge=1)
    layout: Literal["given", "auto"] = key(
        "given",
        "given: the layout is that of the keys below and of train.microbatch_size; auto: those that no file gives are "
        "chosen, the fastest ones predicted for run.cluster that fit and keep the losses",
    )
    dp_replicate: int | None = auto(
        "model replicas, each with its part of the batch; auto: world size / all other axes", ge=1
    )
    pp: int = key(1, "pipeline stages", ge=1)
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = key(
        "1f1b",
        "pipeline schedule: the order in which a stage computes its micro-batches",
        only=at_least("parallel.pp", 2),
    )
    virtual_stages: int = key(
        1,
        "chunks of the model on each pipeline stage; at least 2",
        ge=1,
        only=one_of("parallel.schedule", "interleaved"),
    )
    cut: Cut = key(
        "cost",
        "where pipeline stages begin: cost: the most expensive stage is as cheap as possible; "
        "encoder-decoder: also, one stage begins at the first layer of the decoder; numbers with commas: the layers of "
        "each stage, and of each virtual stage",
    )
    dp_shard: int = key(1, "ranks that shard one replica, each with its part of the batch", ge=1)
    zero_stage: int = key(
        3,
        "what dp_shard shards: 1: optimizer state; 2: also gradients; 3: also weights",
        ge=1,
        le=3,
        only=at_least("parallel.dp_shard", 2),
    )
    ep: int = key(1, "ranks that divide the experts of each layer, each with its part of the batch", ge=1)
    cp: int = key(1, "ranks that divide each sequence (context parallelism)", ge=1)
    context: Literal["ring", "all-gather"] = key(
        "ring", "how the cp ranks exchange keys and values", only=at_least("parallel.cp", 2)
    )
    tp: int = key(1, "ranks that divide each matrix (tensor parallelism)", ge=1)
    sequence_parallel: bool = key(
        True,
        "norms, dropout and residual sums are divided along the sequence",
        only=at_least("parallel.tp", 2),
    )
    recompute: Literal["none", "selective", "products", "full"] = key(
        "none",
        "activations that the backward pass recomputes to save memory: selective: GELU or SwiGLU, and attention "
        "probabilities; products: every block, from its input, its attention and its products before attention and "
        "activation; full: every block, from its input",
    )
    offload: Literal["none", "optimizer", "all"] = key(
        "none",
        "offload to host memory, for training on CUDA: optimizer: master weights and optimizer state, updated there; "
        "all: also weights (dp_shard with zero_stage 3)",
    )
    data_parallel: int = key(
        1, "CUDA devices of one process (torch.nn.DataParallel), a baseline for dp_replicate", ge=1, le=1024
    )
    bucket_bytes: int = key(16_777_216, "bytes of gradients that are reduced in one collective", ge=1)
    reduce_dtype: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        "number format in which gradients are sent; auto: train.precision; with zero_stage 1 and several micro-batches "
        "of bf16: fp32",
    )
    average_every: Period = key(
        0,
        'steps that each model replica takes alone before the replicas average their weights, or "n epochs"; 0: the '
        "replicas sum their gradients in every step",
    )
    synchronous_steps: int = key(
        0, "first steps, in which the replicas sum their gradients all the same", ge=0, only=AVERAGES
    )
    outer_optimizer: Literal["none", "sgd", "nesterov"] = key(
        "none",
        "what the mean change of a round does to the weights: none: they become the mean of the replicas; sgd, "
        "nesterov: it is the gradient of an outer optimizer (DiLoCo)",
        only=AVERAGES,
    )
    outer_learning_rate: float = key(
        0.7, "learning rate of the outer optimizer", gt=0, only=other_than("parallel.outer_optimizer", "none")
    )
    outer_momentum: float = key(
        0.9, "momentum of the outer optimizer", ge=0, lt=1, only=other_than("parallel.outer_optimizer", "none")
    )
    fragments: int = key(
        1, "parts of the weights, by blocks, that are averaged one after the other in a round", ge=1, only=AVERAGES
    )
    overlap_steps: int = key(0, "steps that the replicas take while an average is under way", ge=0, only=AVERAGES)
    servers: Servers | Literal["workers"] = key(
        0,
        "ranks that are parameter servers, behind those that train; each holds a part of the weights and of the "
        "optimizer; workers: each rank that trains is also the server of a part; 0: none",
    )
    updates: Literal["synchronous", "asynchronous"] = key(
        "synchronous",
        "when servers update: synchronous: when all workers have sent the gradients of a step; asynchronous: after the "
        "gradients of one worker, or as parallel.staleness says",
        only=SERVED,
    )
    staleness: int | None = auto(
        "by how many updates the weights of a gradient may be old; an update then adds as many parts as a step has; "
        "auto: no bound, and each part is an update",
        ge=0,
        only=SERVED,
    )
    momentum_every: int | None = auto(
        "pushes from one update of the outer momentum to the next (delayed Nesterov); auto: the number of workers",
        ge=1,
        only=ASYNCHRONOUS,
    )
    local_steps: Literal["equal", "by_speed"] = key(
        "equal",
        "steps of a worker between two pushes: equal: parallel.average_every; by_speed: a slower worker takes fewer",
        only=ASYNCHRONOUS,
    )
    quorum: int | None = auto(
        "workers with which a round of synchronous servers may end, after a deadline that is learnt from arrivals; "
        "auto: all",
        ge=1,
        only=AVERAGES,
    )
    wire: WireText = key(
        "none",
        "format in which replicas send gradients or, with average_every, changes of weights: none, bf16, int8, int4, "
        "sign, powersgd:RANK or topk:SHARE; what rounding loses is sent later (error feedback)",
    )
    wire_from: int = key(
        0,
        "steps at the beginning that do not use parallel.wire",
        ge=0,
        only=other_than("parallel.wire", "none"),
    )
    gossip: Literal["none", "ring", "pairs", "complete", "exponential", "push-sum"] = key(
        "none",
        "with whom each model replica exchanges weights, after steps of its own: ring: two neighbours; pairs: one, "
        "drawn anew each time; complete: all; exponential: to one, 1, 2, 4, ... further, in turn; push-sum: to one, "
        "drawn anew, and a replica counts by a weight that travels along",
    )
    gossip_mode: Literal["synchronous", "asynchronous"] = key(
        "synchronous",
        "synchronous: a replica waits for the weights of its neighbours; asynchronous: pairs of replicas average their "
        "weights beside the computation, and a faster replica computes more samples; for ring and pairs",
        only=GOSSIPS,
    )
    gossip_every: int = key(1, "steps from one exchange of weights to the next", ge=1, only=GOSSIPS)
    gossip_rate: float = key(
        1.0,
        "how far an exchange goes: 1: to the mean with the neighbours; less for coarse wire",
        gt=0,
        le=1,
        only=GOSSIPS,
    )
    agree_every: int | None = auto(
        "steps after which all ranks sum loss and requests to stop; the run saves, validates and stops there only; "
        "auto: as seldom as the keys for these allow, at most 32 exchanges",
        ge=1,
        only=GOSSIPS,
    )
    restarts: int = key(
        0,
        "how often a worker of asynchronous servers that has died is started again, within survive.restart_window_s; "
        "no other rank waits for it",
        ge=0,
    )
    timeout_s: float = key(600.0, "seconds that a rank waits for the others in a collective", gt=0, le=604_800)
    stopped_s: float | None = auto(
        "seconds after which a rank that is stopped (SIGSTOP) or frozen is ended, by what watches the ranks of its "
        "host; auto: parallel.timeout_s ends the run",
        gt=0,
        le=604_800,
    )
    meet_s: float = key(300.0, "seconds that a rank waits at its start until all ranks are there", gt=0, le=604_800)
    listen: Text | None = auto(
        'network interface at which rank 0 listens, such as "eth0", or "all"; auto: loopback where all ranks are on '
        "one machine, else the interface of the route to MASTER_ADDR"
    )
