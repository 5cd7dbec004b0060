"""In: options of a command line. Out: `Wanted`: what the checks need to know of the run that will begin.
Does not read a config (from_config.py does). Without one only what every run needs is checked."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.clusters.cluster import Cluster
from codescent.doctor.finding import Finding


@dataclass(frozen=True)
class Wanted:
    """What is checked.

    Attributes:
        device: train.device.
        listen: parallel.listen; None: auto.
        run_folder: of the run, as the config has it: relative to the folder in which ranks start.
        data_folder: data.folder; "": it is not checked.
        data_ready: where the prepared data is, as rank 0 sees it; "": it is not prepared, or nobody can tell.
        checkpoint_bytes: room that checkpoints need beside those that are there: see jobs/room.py; None: unknown.
        state_bytes, host_bytes: what a rank holds in the memory of its host, in the mean of stages: where it computes
            there, and where it has a device.
        device_bytes: the least that a step needs on the device of the fullest rank.
        mark: by which the run's processes are found; "": unknown.
        timeout_s: parallel.timeout_s.
        message_bytes: the most that a rank sends in one collective.
        message: its purpose.
        machines: the declared links of hosts.
        bandwidth: whether it is measured.
        wait_s: how long rank 0 waits for the others.
        problems: why the config does not fit.
        notes: what could not be found out.
    """

    device: str = "auto"
    listen: str | None = None
    run_folder: str = "runs"
    data_folder: str = ""
    data_ready: str = ""
    checkpoint_bytes: int | None = None
    state_bytes: float = 0.0
    host_bytes: float = 0.0
    device_bytes: float = 0.0
    mark: str = ""
    timeout_s: float = 0.0
    message_bytes: float = 0.0
    message: str = ""
    machines: Cluster | None = None
    bandwidth: bool = True
    wait_s: float = 30.0
    problems: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
