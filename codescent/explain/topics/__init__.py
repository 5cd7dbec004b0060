"""In: the name of a topic. Out: its row of the table.
Does not make a lesson: each topic has a file here, which makes it when it is asked for."""

from __future__ import annotations

from codescent.explain.topic import Topic
from codescent.explain.topics import flops, memory, pipeline, pram, server, zero

TOPICS: dict[str, Topic] = {
    "flops": flops.TOPIC,
    "memory": memory.TOPIC,
    "pram": pram.TOPIC,
    "server": server.TOPIC,
    "zero": zero.TOPIC,
    "pipeline": pipeline.TOPIC,
}
"""By name, in the order of a course."""
