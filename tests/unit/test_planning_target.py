"""The devices that a user names for a plan."""

from __future__ import annotations

import pytest

from reblock.errors import InvalidOption, UnknownDevice
from reblock.planning import parse_target
from reblock.units import GIB


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("RBLN-CR13", "RBLN-CR13", 1),
        ("RBLN-CA25x4", "RBLN-CA25", 4),
        ("RBLN-CA25X4", "RBLN-CA25", 4),
        (" RBLN-CR03x16 ", "RBLN-CR03", 16),
        ("cpu", "cpu", 1),
        ("cpux1", "cpu", 1),
    ],
)
def test_a_target_is_a_device_and_a_number(text: str, name: str, count: int) -> None:
    target = parse_target(text)
    assert (target.device.name, target.num_devices) == (name, count)


def test_chiplets_of_all_devices_are_the_parts_of_a_target() -> None:
    assert parse_target("RBLN-CR13x2").num_parts == 8


def test_a_cpu_with_a_size_has_that_memory_and_the_reserve_of_any() -> None:
    device = parse_target("cpu:24GB").device
    assert device.dram_bytes == 24 * GIB
    assert device.available_bytes == 24 * GIB - parse_target("cpu").device.reserve_bytes_per_chiplet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RBLN-CA25x0", "asks for 0 devices; give 1 to 1024"),
        ("RBLN-CA25x2000", "asks for 2000 devices"),
        ("cpux2", "run on one machine"),
        ("cpu:24", "no memory beyond the reserve"),
        ("cpu:100MB", "no memory beyond the reserve"),
        ("cpu:lots", "is no size"),
        ("cpu:", "is no size"),
        ("cpu:1.5", "has no unit"),
    ],
)
def test_a_number_or_a_size_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        parse_target(text)


@pytest.mark.parametrize("text", ["", "RBLN-CA99", "rbln-cr13", "RBLN-CR13:24GB", "x4", "gpux2"])
def test_an_unknown_device_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UnknownDevice, match="RBLN-CR13, cpu"):
        parse_target(text)
