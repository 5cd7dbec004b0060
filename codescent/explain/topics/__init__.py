"""In: the name of a topic. Out: its row of the table.
Does not make a lesson: each topic has a file here, which makes it when it is asked for."""

from __future__ import annotations

from codescent.explain.topic import Topic
from codescent.explain.topics import (
    average,
    checkpoint,
    compression,
    context,
    data_parallel,
    flops,
    gossip,
    hybrid,
    launch,
    memory,
    offload,
    pipeline,
    pram,
    ring,
    scaling,
    server,
    tensor,
    zero,
)

TOPICS: dict[str, Topic] = {
    "flops": flops.TOPIC,
    "memory": memory.TOPIC,
    "pram": pram.TOPIC,
    "data-parallel": data_parallel.TOPIC,
    "ring": ring.TOPIC,
    "zero": zero.TOPIC,
    "offload": offload.TOPIC,
    "tensor": tensor.TOPIC,
    "pipeline": pipeline.TOPIC,
    "context": context.TOPIC,
    "hybrid": hybrid.TOPIC,
    "average": average.TOPIC,
    "gossip": gossip.TOPIC,
    "server": server.TOPIC,
    "compression": compression.TOPIC,
    "checkpoint": checkpoint.TOPIC,
    "launch": launch.TOPIC,
    "scaling": scaling.TOPIC,
}
"""By name, in the order of a course."""
