"""Accelerators by name: how many devices, and how much memory each offers.

Memory is what the makers' data sheets say, in decimal gigabytes, which is a little less than what the devices report:
NVIDIA H100 SXM 80 GB and H200 SXM 141 GB (product briefs), Google Cloud TPU v5e 16 GB, v6e 32 GB and v5p 95 GB a chip
(system architecture pages). On GPUs JAX takes three quarters of it unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says
otherwise, so that is what a plan may count on. A v5p slice is named after its cores, of which a chip, one device, has
two.
"""

from __future__ import annotations

import dataclasses
import re

from jaxserve.errors import ConfigError

GIGABYTE = 10**9
GPU_SHARE = 0.75
# Bytes that a device offers, devices for each number in the slice's name, and the platform.
DEVICES = {
    "h100": (int(80 * GIGABYTE * GPU_SHARE), 1.0, "gpu"),
    "h200": (int(141 * GIGABYTE * GPU_SHARE), 1.0, "gpu"),
    "v5e": (16 * GIGABYTE, 1.0, "tpu"),
    "v6e": (32 * GIGABYTE, 1.0, "tpu"),
    "v5p": (95 * GIGABYTE, 0.5, "tpu"),
}
COMMON = ("1xh200", "8xh100", "v5e-8", "v6e-8", "v5p-16")


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """A machine or a slice: ``devices`` of ``memory`` bytes each."""

    name: str
    devices: int
    memory: int

    @property
    def platform(self) -> str:
        """What JAX calls it: ``cpu``, ``gpu``, ``tpu``; this machine is named so."""
        return next((platform for kind, (_, _, platform) in DEVICES.items() if kind in self.name), self.name)


def hardware(name: str) -> Hardware:
    """What a name stands for: ``h200``, ``8xh100``, ``v5e-8``, ``v5p-16``.

    Raises:
        ConfigError: no such device.
    """
    match = re.fullmatch(r"(?:(\d{1,4})x)?([a-z]\w*?)(?:-(\d{1,5}))?", name.strip().lower())
    if match is None or match[2] not in DEVICES or (match[1] and match[3]):
        known = ", ".join((*DEVICES, *COMMON))
        raise ConfigError(f"no device is called {name[:40]!r} here; known are {known}", param="device")
    memory, each, _ = DEVICES[match[2]]
    devices = int(match[1] or 1) if match[3] is None else int(int(match[3]) * each)
    if devices < 1:
        raise ConfigError(f"{name[:40]} has no device", param="device")
    return Hardware(name.strip().lower(), devices, memory)
