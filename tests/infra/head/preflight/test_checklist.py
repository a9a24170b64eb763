import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from infra.head.preflight.checklist import CHECKS, judge, of_error
from infra.head.preflight.findings import Finding
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.inspection.facts import Facts, Folder, Route
from infra.node.node_folders import node_path
from t5train.errors import HostError, HostKeyMismatch, HostUnreachable, RemoteFailed
from tests.support.host_facts import HOSTS, NONCE, REQUIREMENTS, SOFTWARE, facts, reply, with_

Change = Callable[[Facts], Facts]
ON_A_SEPARATE_NETWORK = with_("network", interfaces={"eth0": ["10.9.9.9/24"]}, routes=[Route("10.9.9.0/24", "eth0", 0)])


def findings(changes: dict[str, Change], requirements: LaunchRequirements = REQUIREMENTS) -> list[Finding]:
    return judge(reply(changes), requirements, SOFTWARE, NONCE).findings


def test_hosts_that_agree_and_have_everything_pass_every_check() -> None:
    assert findings({}) == []


def software(**changes: object) -> Change:
    return with_("software", **changes)


def package(**versions: str) -> Change:
    return software(packages={**SOFTWARE.packages, **versions})


def devices(**changes: object) -> Change:
    return with_("devices", **changes)


def build(**changes: object) -> Change:
    return with_("build", **changes)


def resources(**changes: object) -> Change:
    return with_("resources", **changes)


def times(started_at: float, ended_at: float) -> Change:
    return with_("", started_at=started_at, ended_at=ended_at)


NO_TLS = "libgomp: cannot allocate memory in static TLS block"
SHARED_MEMORY = "/dev/shm has 3 of 64 MiB free, but .* need 20 MiB. Enlarge it, for exam"  # noqa: S108 - words of an error
MACHINE = "these names refer to the same machine. Keep one"
# Check, host, how the host differs, and a pattern of what is wrong and what to do.
FAULTS: list[tuple[str, str, Change, str]] = [
    ("machines", "node1, node3", with_("", identity="boot1 machine net:[1]"), MACHINE),
    ("machines", "node1, node3", lambda _: facts(1), MACHINE),
    ("port", "node0", with_("network", port_is_free=False), "another program listens on port 29500. Choose"),
    ("python", "node3", software(python="3.12.1"), "Python 3.12.1, others have 3.11.9. Install 3.11.9 there"),
    ("python", "node3", software(machine="aarch64"), "processor aarch64, others have x86_64. Leave"),
    ("packages", "node3", package(torch="2.12.0"), "torch 2.12.0, others have 2.13.0. Install torch==2.13.0 there"),
    ("packages", "node0", package(deepspeed=""), "deepspeed missing, others have 1.0. Install deepspeed==1.0 there"),
    ("runtime", "node1", software(runtime={}), "torch built for the CPU only, others have cuda 13.*Install the same"),
    ("code", "node1", software(code_digest="d" * 64), "code d{12}, the head has digest c{12}. Install the head's"),
    ("spec", "node1", software(spec_digest="refused: x"), "settings refused: x, the head has digest 5555"),
    ("accelerators", "node2", devices(kind="cpu"), "accelerator cpu, others have cuda. Repair the driver"),
    ("accelerators", "node2", devices(count=1), "torch can use 1 accelerator, but slot 1 is requested"),
    ("accelerators", "node2", devices(error="torch cannot be imported: no libcudart"), "torch cannot be"),
    ("in use", "node2", devices(used_bytes={"1": 70 << 30}), r"another program uses .* 1 \(75.2 GB\)\. End it"),
    ("in use", "node2", devices(held_by={"1": "base-3"}), "accelerators are in use: 1 by base-3. Wait for that run"),
    ("ninja", "node1", build(ninja=None), "ninja is not on the PATH that sshd sets. Run `pip install ninja`"),
    ("operators", "node1", build(compiled=[], compiler=None), "DeepSpeed's cpu_adam is not compiled, .*Install g"),
    ("operators", "node1", build(unwritable={"/ops": "no"}), r"/ops, where DeepSpeed .* cannot be written \(no"),
    ("compile locks", "node1", build(foreign_locks=["/c"]), "the compile lock /c belongs to another user. Ask t"),
    ("openmp", "node1", software(libgomp_error=NO_TLS), f"{NO_TLS}. Set LD_PRELOAD to that library"),
    ("openmp", "node1", devices(error=f"torch: {NO_TLS}"), f"torch: {NO_TLS}. Set LD_PRELOAD"),
    ("root", "node3", resources(nonce=None), "/shared/t5 is not shared with the head, but on node0, n"),
    ("root", "node3", resources(nonce="another"), "/shared/t5 is not shared with the head, but on node0, n"),
    (
        "root",
        "node3",
        with_("resources.root", error="/shared/t5 is bad: use `dmesg`"),
        "/shared/t5 is bad: use `dmesg`",
    ),
    (
        "disks",
        "node3",
        with_("resources.root", free_bytes=1),
        "/shared/t5 has 0.0 MB free, but a run needs at least 1.0 GB",
    ),
    (
        "disks",
        "node1",
        with_("resources.root", free_inodes=12),
        "the disk of /shared/t5 has 12 free inodes, .*needs 1,000 t",
    ),
    ("disks", "node3", with_("resources.node_folder", free_bytes=1), f"{node_path()} has 0.0 MB free, but logs need"),
    ("disks", "node1", with_("resources.node_folder", free_inodes=999), "the disk of /var/tmp/t5-pretrain-"),
    ("disks", "node3", with_("resources.node_folder", error="/x is a link: move it"), "/x is a"),
    (
        "disks",
        "node3",
        with_("resources.node_folder", path="/disk/t5-7"),
        "the user has a different user id there: .*/disk/t5-7",
    ),
    ("memory", "node0", resources(memory_bytes=1 << 30), "1.1 GB of memory are available, but the ranks need 8.6 GB"),
    ("shared memory", "node3", resources(shared_memory_free_bytes=3 << 20), SHARED_MEMORY),
    ("open files", "node0", resources(open_files=256), "256 open files are allowed, .*needs 576 for 8 ranks. Raise"),
    ("clock", "node2", times(900.0, 900.2), "its clock is at least 100 s behind the head's"),
    ("clock", "node2", times(1100.0, 1100.6), "its clock is at least 100 s ahead of the head's"),
]


@pytest.mark.parametrize(("check", "host", "change", "text"), FAULTS, ids=[f"{row[0]}-{row[3][:30]}" for row in FAULTS])
def test_a_host_with_a_fault_is_named_with_the_remedy(check: str, host: str, change: Change, text: str) -> None:
    (found,) = findings({host[-5:]: change})
    assert (found.check, found.is_problem) == (check, True)
    assert re.match(f"{host}: {text}", found.text)
    assert check in CHECKS


def unshared(scratch_mark: str, yielding_bytes: int = 0, **changes: Any) -> Change:
    scratch = replace(Folder("/disk/scratch", "", 1 << 40), **changes)
    parts = {"scratch": scratch, "scratch_mark": scratch_mark, "scratch_yielding_bytes": yielding_bytes}
    return with_("resources", nonce=None, **parts)


def test_hosts_without_shared_storage_pass_regardless_of_their_root() -> None:
    no_root = with_("resources.root", error="/shared/t5 cannot be written: No such file or directory", free_bytes=0)
    changes: dict[str, Change] = {host: lambda facts, host=host: no_root(unshared(host)(facts)) for host in HOSTS}
    for of_first, is_head in ((changes["node0"], False), (resources(), True)):
        judged = judge(reply(changes | {"node0": of_first}), REQUIREMENTS, SOFTWARE, NONCE, facts(0).identity * is_head)
        assert judged.is_node_local
        (note,) = judged.findings
        assert not note.is_problem
        assert "share no storage with the head" in note.text
    assert not judge(reply(changes | {"node0": resources()}), REQUIREMENTS, SOFTWARE, NONCE, "another").is_node_local


@pytest.mark.parametrize(
    ("check", "change", "text"),
    [
        ("root", unshared("node1"), "node1, node3: /disk/scratch is the same folder on these hosts. Choose a storage"),
        ("root", unshared("", path="", error="/x belongs to user 7: choose"), "node3: /x belongs to user 7: choose"),
        ("disks", unshared("3", free_bytes=1), "node3: /disk/scratch has 0.0 MB free, but the checkpoints"),
        ("disks", unshared("3", free_inodes=0), "/disk/scratch has 0 free inodes"),
    ],
)
def test_a_host_without_a_usable_scratch_folder_of_its_own_is_named(check: str, change: Change, text: str) -> None:
    found = findings({host: unshared(host) for host in HOSTS} | {"node3": change})
    assert [(one.check, text in one.text) for one in found if one.is_problem] == [(check, True)]


def test_too_little_scratch_space_for_checkpoints_and_shards_is_reported() -> None:
    requirements = replace(REQUIREMENTS, checkpoint_bytes=dict.fromkeys(HOSTS, 30 * 10**9), staged_bytes=10**9)
    full = {host: unshared(host, free_bytes=12 * 10**9) for host in HOSTS}
    (found,) = (one for one in findings(full, requirements) if one.is_problem)
    assert found.text == (
        "node0, node1, node2, node3: /disk/scratch has 12.0 GB free, but the checkpoints and token shards "
        "that go there need 31.3 GB. Free some space, keep fewer checkpoints (storage.keep_last, "
        "storage.keep_every_steps, storage.checkpoint_gigabytes), or choose another storage.scratch"
    )
    resumed = {
        host: unshared(host, free_bytes=12 * 10**9, yielding_bytes=size)
        for host, size in zip(HOSTS, (20 * 10**9, 20 * 10**9, 20 * 10**9, 19 * 10**9), strict=True)
    }
    (found,) = (one for one in findings(resumed, requirements) if one.is_problem)
    assert found.text.startswith("node3: /disk/scratch has 12.0 GB free and 19.0 GB that can be freed, but the")


def test_a_hostname_on_loopback_is_a_note_if_the_interface_is_known() -> None:
    (found,) = findings({"node1": with_("network", hostname_addresses=["127.0.1.1"])})
    assert not found.is_problem
    assert found.text == "node1: its hostname node1 resolves to 127.0.1.1 there. Ranks will use eth0 instead"


@pytest.mark.parametrize("addresses", [["127.0.1.1"], []])
def test_a_hostname_on_loopback_is_a_problem_if_no_interface_is_known(addresses: list[str]) -> None:
    found = findings({"node0": ON_A_SEPARATE_NETWORK, "node1": with_("network", hostname_addresses=addresses)})
    assert [one.check for one in found if one.is_problem] == ["address", "hostname"]
    assert "node1: its hostname node1" in found[1].text
    assert "/etc/hosts" in found[1].text


def test_a_first_host_without_wandb_is_a_note_as_it_may_have_taken_over_from_another() -> None:
    without = package(wandb="")
    (found,) = findings({"node0": without})
    assert (found.check, found.is_problem) == ("packages", False)
    assert "node0: wandb missing, but monitor.wandb is true, so W&B gets no metrics. Install it there" in found.text
    assert not findings({"node3": without})


def test_an_operator_that_can_be_compiled_and_compile_locks_are_notes() -> None:
    node1, node2 = build(compiled=[], cleared_locks=["/c/lock"]), build(shared_locks=["/nfs/lock"])
    found = findings({"node1": node1, "node2": node2})
    assert [(one.check, one.is_problem) for one in found] == [("operators", False), *[("compile locks", False)] * 2]
    assert any("the compile lock /nfs/lock, on a disk that other machines may use" in one.text for one in found)
    assert "node1: compiles DeepSpeed's cpu_adam when its ranks start" in found[0].text
    assert any("removed /c/lock" in one.text for one in found)
    assert not findings({"node1": build(unwritable={"/ops": "no"})}, replace(REQUIREMENTS, operators=()))


@pytest.mark.parametrize("given", ["9.0a", "Hopper", "8.0,9.0", "9", "8.0+ptx"])
def test_architectures_that_deepspeed_cannot_read_are_reported(given: str) -> None:
    for readable in ("", "9.0", "8.0;9.0+PTX", "8.6 9.0;10.0"):
        assert findings({}, replace(REQUIREMENTS, environment={"TORCH_CUDA_ARCH_LIST": readable})) == []
    (found,) = findings({}, replace(REQUIREMENTS, environment={"TORCH_CUDA_ARCH_LIST": f"8.0;{given}"}))
    assert found.check == "architectures"
    assert f"cannot read {given}" in found.text


def test_of_two_hosts_that_differ_the_one_unlike_the_head_is_named() -> None:
    requirements = replace(REQUIREMENTS, slots={"node0": (0,), "node1": (0,)})
    two = {host: one for host, one in reply({"node0": software(python="3.12.1")}).items() if host in requirements.slots}
    (found,) = judge(two, requirements, SOFTWARE, NONCE).findings
    assert found.text.startswith("node0: Python 3.12.1, others have 3.11.9")


def test_a_clock_offset_within_the_reply_time_is_accepted() -> None:
    slow = {"node0": replace(reply()["node0"], asked_at=900.0, answered_at=1100.0)}
    requirements = replace(REQUIREMENTS, slots={"node0": (0, 1)})
    assert judge(slow, requirements, SOFTWARE, NONCE).findings == []


def test_only_ranks_that_are_meant_for_the_cpu_need_no_accelerator() -> None:
    change = devices(kind="cpu", count=0)
    assert findings(dict.fromkeys(HOSTS, change), replace(REQUIREMENTS, accelerator="cpu")) == []
    for accelerator in (None, "cuda"):
        (found,) = findings(dict.fromkeys(HOSTS, change), replace(REQUIREMENTS, accelerator=accelerator))
        assert "node0, node1, node2, node3: torch can use 0 accelerators, but slot 1 is requested" in found.text


@pytest.mark.parametrize(
    ("error", "check"), [(HostUnreachable, "reachable"), (HostKeyMismatch, "host key"), (RemoteFailed, "program")]
)
def test_a_host_that_does_not_answer_is_reported_with_its_error(error: type[HostError], check: str) -> None:
    found = Finding(check, "node2: no", hosts=("node2",), is_transient=error is HostUnreachable)
    assert of_error(error("node2: no", ["node2"])) == found
    remaining = {host: one for host, one in reply().items() if host != "node2"}
    assert judge(remaining, REQUIREMENTS, SOFTWARE, NONCE).findings == []


def test_there_is_no_rendezvous_if_the_first_host_does_not_answer() -> None:
    remaining = {host: one for host, one in reply().items() if host != "node0"}
    found = judge(remaining, REQUIREMENTS, SOFTWARE, NONCE)
    assert (found.rendezvous, found.port) == (None, None)
