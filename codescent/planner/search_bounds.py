"""In: a layout of a space. Out: less than the seconds of its step and the bytes of its fullest rank, without its Plan.
Does not decide what is priced (search.py does). tests/test_search.py compares the bounds with prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.collective_time import seconds
from codescent.cost.stage_memory import stage_memory
from codescent.plan import Instruction, Schedule, Verb
from codescent.planner.search_computing import Computing, computing
from codescent.planner.search_cuts import Cut, cut_of, in_flight
from codescent.planner.search_depths import Depths, candidate_of_piece, piece
from codescent.planner.search_held import Holding, gathered, holding
from codescent.planner.search_kept import Kept
from codescent.planner.search_passes import PartTimes, Passes
from codescent.planner.search_sent import Sending, sending
from codescent.planner.search_space import SCHEDULE, VIRTUAL, Frame, Options, Space
from codescent.strategies.pipeline import Pipeline, depths_of

T = TypeVar("T")
