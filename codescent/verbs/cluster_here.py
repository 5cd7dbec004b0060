"""In: the devices that the programs of their makers list. Out: the shipped cluster of such ones: `--cluster here`.
Does not measure (codescent measure does), and knows of the network only what the shipped file says."""

from __future__ import annotations

from collections.abc import Sequence

from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster
from codescent.clusters.files import load_cluster, shipped_clusters
from codescent.doctor.device_tools import TOOLS, devices
from codescent.plan.device_specs import spec_of

HERE = "here"
INSTEAD = "give the name of a cluster, or a file, which codescent measure writes"


def cluster_here(changes: Sequence[str] = ()) -> Cluster:
    """The shipped cluster of the devices of this machine, with as many devices in a node as this machine has.

    Of several with the same device it is the one that is no certain machine: it says no number of nodes.

    Args:
        changes: what-ifs, as in `load_cluster`. They come after the number of devices.

    Raises:
        UserError: no program lists a device, they differ, or no shipped cluster has such ones.
    """
    found = devices()
    names = list(dict.fromkeys(row.get("name", "a device without a name") for row in found["all"]))
    if not names:
        programs = ", ".join(tool.program for tool in TOOLS)
        why = found["problem"] or f"{programs}: none of them lists a device"
        raise UserError(f"--cluster {HERE}: {why}; {INSTEAD}")
    if len(names) > 1:
        raise UserError(f"--cluster {HERE}: this machine has different devices ({', '.join(names)}); {INSTEAD}")
    spec = spec_of(names[0])
    every = [load_cluster(name) for name in shipped_clusters()] if spec is not None else []
    able = [one for one in every if spec is not None and one.device.name == spec.name]
    if not able:
        raise UserError(f"--cluster {HERE}: no shipped cluster has devices of the name {names[0]!r}; {INSTEAD}")
    name = next((one.name for one in able if one.nodes is None), able[0].name)
    return load_cluster(name, [f"node.devices={len(found['all'])}", *changes])
