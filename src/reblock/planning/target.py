"""What a plan is made for: a device by its name, and how many of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from reblock.devices import Device, get_device
from reblock.errors import InvalidOption
from reblock.units import format_bytes, parse_size

__all__ = ["Target", "parse_target"]

_MAX_DEVICES = 1024
_SEVERAL = re.compile(r"(.+?)[xX]([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The devices that programs run on; `text` is how a user names them."""

    device: Device
    num_devices: int
    text: str

    @property
    def num_parts(self) -> int:
        """Chiplets of all devices together: into so many parts weights and heads are shared out."""
        return self.num_devices * self.device.num_chiplets

    @property
    def is_cpu(self) -> bool:
        """Whether the programs are those of the torch backend."""
        return self.device.name == "cpu"


def parse_target(text: str) -> Target:
    """Return the devices that a user named: `RBLN-CR13`, `RBLN-CA25x4`, `cpu` or `cpu:24GB`.

    "cpu" is the machine this runs on, and with a size a cpu with that much memory.

    Raises:
        UnknownDevice: There is no device of that name.
        InvalidOption: The number or the size makes no sense.

    >>> parse_target("RBLN-CA25x4").num_devices
    4
    """
    name, num_devices = text.strip(), 1
    if several := _SEVERAL.fullmatch(name):
        name, num_devices = several[1], int(several[2])
    if not 1 <= num_devices <= _MAX_DEVICES:
        raise InvalidOption(
            f"npu={text!r} asks for {num_devices} devices; give 1 to {_MAX_DEVICES}", option="npu"
        )
    base, colon, size = name.partition(":")
    device = get_device(base.strip() if base.strip() == "cpu" else name)
    if colon:
        device = _with_memory(device, size, text)
    if device.name == "cpu" and num_devices != 1:
        raise InvalidOption(
            f"npu={text!r}: programs for the cpu run on one machine; leave out 'x{num_devices}'",
            option="npu",
        )
    return Target(device=device, num_devices=num_devices, text=text.strip())


def _with_memory(device: Device, size: str, text: str) -> Device:
    try:
        num_bytes = parse_size(size)
    except ValueError as error:
        raise InvalidOption(f"npu={text!r}: {error}", option="npu") from error
    if num_bytes <= device.reserve_bytes_per_chiplet:
        raise InvalidOption(
            f"npu={text!r} has no memory beyond the reserve, "
            f"{format_bytes(device.reserve_bytes_per_chiplet)}",
            option="npu",
        )
    return replace(device, dram_bytes=num_bytes)
