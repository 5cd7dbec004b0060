"""In: what a site says of its devices: a name such as "A100-80GB", or their memory such as "80GB". Out: that memory,
and the peak that the maker publishes. Does not look for a device."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass

from codescent.base.counted import counted
from codescent.base.sizes import memory_size
from codescent.plan.device_specs import GB, SPECS, DeviceSpec, specs_like


@dataclass(frozen=True)
class Device:
    """A device of a node.

    Attributes:
        name: as the site says it.
        memory_bytes: at most. A maker's 80 GB are up to 80 GiB, which torch sees almost whole.
        specs: the entries of the table that it may be; empty: only its memory is known.
    """

    name: str
    memory_bytes: int
    specs: tuple[DeviceSpec, ...] = ()

    def peak_flops_per_s(self, precision: str) -> float | None:
        """The highest peak of matrix products in "bf16", "fp32" (or tf32, which a run may use) or "fp64"."""
        if not self.specs:
            return None
        names = ("fp32", "tf32") if precision == "fp32" else (precision,)
        peaks = [spec.peak_flops_per_s(name) for spec in self.specs for name in names]
        published = [peak for peak in peaks if peak is not None]
        return max(published, default=None)


def device_of(text: str) -> Device:
    """The device that a site names. Raises ValueError: neither a size nor one device of the table."""
    if "{n}" in text:
        raise ValueError('names the device, such as "A100-80GB"; how devices are asked for is site.devices')
    try:
        return Device(text, memory_size(text).size_bytes)
    except argparse.ArgumentTypeError:
        specs = specs_like(text)
    sizes = sorted({spec.memory_bytes // GB for spec in specs})
    if len(sizes) > 1:
        several = " or ".join(f"{size} GB" for size in sizes)
        raise ValueError(f'has {several}: say which, such as "{text.strip()}-{sizes[-1]}GB"')
    if specs:
        return Device(text, sizes[0] * 2**30, specs)
    near = difflib.get_close_matches(text, [name for spec in SPECS for name in spec.matches], n=1, cutoff=0.5)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'must be a device of the table of {counted(len(SPECS), "device")}, such as "A100-80GB", or the memory of one, '
        f'such as "80GB"{hint}'
    )
