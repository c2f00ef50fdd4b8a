"""Memory and cores of this process, within the limits of its container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runtime.control_groups import ControlGroups
from engine.runtime.host import Host

GIB = 1 << 30
NO_LIMIT = "9223372036854771712"

Files = dict[str, str]


def groups(root: Path, membership: str, files: Files) -> ControlGroups:
    """A control group tree made of `files`, and a process that is where `membership` says."""
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (root / "membership").write_text(membership)
    return ControlGroups(mount=root / "cgroup", membership=root / "membership")


def unified_memory(limit: str, used: int, inactive: int = 0) -> Files:
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": f"anon 5\ninactive_file {inactive}"}


def below(folder: str, files: Files) -> Files:
    return {f"{folder}/{name}": content for name, content in files.items()}


def test_unified_headroom_counts_unused_file_pages_as_free(tmp_path: Path) -> None:
    tree = groups(tmp_path, "0::/job\n", below("job", unified_memory(str(8 * GIB), 3 * GIB, GIB)))
    assert tree.memory_headroom_bytes() == 6 * GIB


def test_file_pages_in_use_are_given_back_before_a_limit_is_enforced(tmp_path: Path) -> None:
    files = unified_memory(str(8 * GIB), 7 * GIB, GIB)
    files["memory.stat"] += f"\nactive_file {2 * GIB}"
    tree = groups(tmp_path, "0::/job\n", below("job", files))
    assert tree.memory_headroom_bytes() == 2 * GIB
    assert tree.memory_left_bytes() == 4 * GIB
    machine = host(tmp_path, available_bytes=3 * GIB, siblings={}, control_groups=tree)
    assert (machine.available_memory_bytes(), machine.free_memory_bytes()) == (2 * GIB, 3 * GIB)


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = below("a/b", unified_memory("max", 0)) | below("a", unified_memory(str(2 * GIB), GIB))
    assert groups(tmp_path, "0::/a/b\n", files).memory_headroom_bytes() == GIB


def test_a_path_of_the_host_falls_back_to_what_is_mounted(tmp_path: Path) -> None:
    tree = groups(tmp_path, "0::/docker/0123/job\n", unified_memory(str(4 * GIB), GIB))
    assert tree.memory_headroom_bytes() == 3 * GIB


def test_legacy_limits_are_read(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(4 * GIB),
        "memory/job/memory.usage_in_bytes": str(GIB),
        "memory/job/memory.stat": f"total_inactive_file {GIB // 2}",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    tree = groups(tmp_path, "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/job\n", files)
    assert tree.memory_headroom_bytes() == 3 * GIB + GIB // 2
    assert tree.cpu_quota() == 1.5


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("", {}),
        ("0::/\n", unified_memory("max", GIB) | {"cpu.max": "max 100000"}),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.usage_in_bytes": "1"}),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("0::/\n", {"memory.max": "garbage", "cpu.max": ""}),
    ],
)
def test_no_limit_is_no_limit(tmp_path: Path, membership: str, files: Files) -> None:
    tree = groups(tmp_path, membership, files)
    assert (tree.memory_headroom_bytes(), tree.memory_left_bytes(), tree.cpu_quota()) == (None, None, None)


def host(root: Path, *, available_bytes: int, siblings: dict[int, str], control_groups: ControlGroups) -> Host:
    (root / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_bytes // 1024} kB\n")
    for processor, text in siblings.items():
        folder = root / f"processors/cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text)
    return Host(memory_table=root / "meminfo", processors=root / "processors", control_groups=control_groups)


@pytest.mark.parametrize(("limit", "expected"), [("max", 8 * GIB), (str(3 * GIB), 2 * GIB), (str(GIB // 2), 0)])
def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path: Path, limit: str, expected: int) -> None:
    tree = groups(tmp_path, "0::/\n", unified_memory(limit, GIB))
    machine = host(tmp_path, available_bytes=8 * GIB, siblings={}, control_groups=tree)
    assert machine.available_memory_bytes() == expected


def test_without_a_memory_table_the_whole_memory_is_the_answer(tmp_path: Path) -> None:
    machine = Host(memory_table=tmp_path / "none", control_groups=groups(tmp_path, "", {}))
    assert machine.available_memory_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 2), ("100000 100000", 1), ("50000 100000", 1), ("900000 100000", 2)]
)
def test_hardware_threads_of_one_core_count_once_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    tree = groups(tmp_path, "0::/\n", {"cpu.max": quota})
    siblings = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}
    assert host(tmp_path, available_bytes=GIB, siblings=siblings, control_groups=tree).usable_cores() == cores


def test_without_a_topology_each_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    machine = Host(processors=tmp_path / "none", control_groups=groups(tmp_path, "", {}))
    assert machine.usable_cores() == 3


def test_this_machine_has_memory_and_cores() -> None:
    assert Host().available_memory_bytes() > 1 << 20
    assert Host().usable_cores() >= 1
