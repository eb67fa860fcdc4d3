from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reblock.devices import (
    CPU_RESERVE_BYTES,
    KNOWN_DEVICES,
    get_device,
    read_cpu_device,
)
from reblock.errors import ReblockError, UnknownDevice
from reblock.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

# What cgroup version 1 writes where there is no limit.
V1_NO_LIMIT = "9223372036854771712"


def make_root(root: Path, files: dict[str, str], *, physical_bytes: int = 64 * GIB) -> str:
    meminfo = f"MemTotal:       {physical_bytes // KIB} kB\nMemFree:         1024 kB\n"
    for path, text in {"proc/meminfo": meminfo, **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


@pytest.mark.parametrize("name", ["RBLN-CA02", "RBLN-CA12", "RBLN-CA22", "RBLN-CA25"])
def test_ca_devices_have_16_gib_less_one_reserve(name: str) -> None:
    device = get_device(name)
    assert device.available_bytes == 16 * GIB - 288 * MIB == 16_877_879_296
    assert device.available_bytes_per_chiplet == device.available_bytes
    assert device.max_eager_seq_len == 32_768
    assert (device.min_partition_len, device.max_partition_len) == (1_024, 32_768)
    assert device.default_partition_len == 16_384


@pytest.mark.parametrize("name", ["RBLN-CR03", "RBLN-CR13"])
def test_cr_devices_have_144_gib_less_a_reserve_on_every_chiplet(name: str) -> None:
    device = get_device(name)
    assert device.available_bytes_per_chiplet == 35 * GIB
    assert device.available_bytes == 140 * GIB
    assert device.max_eager_seq_len == 16_384
    assert (device.min_partition_len, device.max_partition_len) == (1_024, 16_384)
    assert device.default_partition_len == 8_192


def test_every_known_device_can_be_had() -> None:
    assert [get_device(name).name for name in KNOWN_DEVICES] == list(KNOWN_DEVICES)


def test_unknown_device_is_answered_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UnknownDevice) as caught:
        get_device("rbln-ca25")
    assert caught.value.device == "rbln-ca25"
    assert caught.value.known == KNOWN_DEVICES
    assert all(name in str(caught.value) for name in KNOWN_DEVICES)
    assert "did you mean 'RBLN-CA25'?" in str(caught.value)


def test_unknown_device_like_no_other_is_answered_without_a_guess() -> None:
    with pytest.raises(UnknownDevice) as caught:
        get_device("toaster")
    assert "did you mean" not in str(caught.value)


def test_cpu_without_control_groups_has_the_physical_memory(tmp_path: Path) -> None:
    device = read_cpu_device(make_root(tmp_path, {}))
    assert device.dram_bytes == 64 * GIB
    assert device.available_bytes == 64 * GIB - CPU_RESERVE_BYTES
    assert (device.name, device.num_chiplets, device.min_partition_len) == ("cpu", 1, 16)
    assert device.max_eager_seq_len is None


def test_cpu_of_this_machine_has_some_memory() -> None:
    assert get_device("cpu").dram_bytes > 0


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{3 * GIB}\n"},
            3 * GIB,
            id="version 2, own group",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="version 2, parent",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{5 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="version 2, parent below its child",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"},
            2 * GIB,
            id="version 2, container with a namespace of its own",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../host\n",
                "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
                "sys/memory.max": f"{GIB}\n",
            },
            2 * GIB,
            id="version 2, path out of the namespace",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"},
            64 * GIB,
            id="version 2, no limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": f"{100 * GIB}\n"},
            64 * GIB,
            id="version 2, limit above the physical memory",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,memory:/docker/c\n1:name=systemd:/docker/c\n",
                "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            },
            3 * GIB,
            id="version 1, own group",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/docker/c\n",
                "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
                "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="version 1, parent",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/docker/c\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="version 1, mount shows the own group only",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            },
            64 * GIB,
            id="version 1, no limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/a\n0::/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/unified/a/memory.max": f"{2 * GIB}\n",
            },
            2 * GIB,
            id="both versions",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a:b\n", "sys/fs/cgroup/a:b/memory.max": f"{GIB}\n"},
            GIB,
            id="colon in the group's name",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:cpuset:/a\n", "sys/fs/cgroup/memory/a/memory.max": "5\n"},
            64 * GIB,
            id="no memory controller",
        ),
    ],
)
def test_cpu_has_the_least_of_all_limits(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert read_cpu_device(make_root(tmp_path, files)).dram_bytes == limit


def test_cpu_with_less_than_the_reserve_has_nothing_available(tmp_path: Path) -> None:
    device = read_cpu_device(make_root(tmp_path, {}, physical_bytes=128 * MIB))
    assert device.available_bytes == 0


@pytest.mark.parametrize("meminfo", ["", "MemFree: 1 kB\n", "MemTotal: lots kB\n"])
def test_cpu_that_does_not_say_its_memory_is_an_error(tmp_path: Path, meminfo: str) -> None:
    root = make_root(tmp_path, {"proc/meminfo": meminfo})
    with pytest.raises(ReblockError, match="does not say how much memory"):
        read_cpu_device(root)


def test_machine_without_proc_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReblockError, match="proc/meminfo"):
        read_cpu_device(str(tmp_path))
