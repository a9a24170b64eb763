"""A hostfile is read strictly, and its hosts are chosen as DeepSpeed chooses them."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.head.hosts.hostfile import (
    Host,
    Hosts,
    chosen_hosts,
    hostfile_text,
    include_argument,
    parse,
    read_hosts,
    select,
    spare_hosts,
)
from t5train.errors import SpecError
from t5train.spec import ClusterSpec

NOT_PLAIN = ["-oProxy=x", "^/etc/passwd", "$(reboot)", "node%n", "node2.", "n\u00f6de2", "a" * 254, "node2,node3"]
TWO = parse("node1 slots=2\nnode2 slots=4\n", "hosts")
HOSTS = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(
    lambda slots: Hosts(tuple(Host(f"node{i}", tuple(range(n))) for i, n in enumerate(slots)))
)


@st.composite
def choices(draw: st.DrawFn, hosts: Hosts) -> str:
    """A valid include or exclude: some hosts in any order, each whole or with some of its slots in one or two parts."""
    parts = []
    for host in draw(st.lists(st.sampled_from(hosts.all), min_size=1, unique=True)):
        slots = draw(st.lists(st.sampled_from(host.slots), unique=True))
        cut = draw(st.integers(0, len(slots)))
        pieces = [piece for piece in (slots[:cut], slots[cut:]) if piece]
        parts += [f"{host.name}:{','.join(map(str, piece))}" for piece in pieces] or [host.name]
    return "@".join(draw(st.permutations(parts)))


def chosen_by_deepspeed(hosts: Hosts, include: str = "", exclude: str = "", num_nodes: int = -1) -> Hosts:
    """The hosts and slots that DeepSpeed's launcher chooses from a hostfile with these options."""
    from deepspeed.launcher import runner

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    pool = runner._parse_hostfile(hostfile_text(hosts).splitlines())
    active = runner.parse_inclusion_exclusion(pool, include, exclude)
    active = runner.apply_num_nodes_and_gpus(active, num_nodes, -1)
    return Hosts(tuple(Host(name, tuple(slots)) for name, slots in active.items()))


def test_a_hostfile_has_a_line_for_each_host() -> None:
    text = "# the cluster\n\n  node1\tslots=2  # in rack 1\r\n10.0.0.2 slots=08\nGPU-node_3.example.org   slots=1"
    hosts = parse(text, "hosts")
    assert hosts == Hosts((Host("node1", (0, 1)), Host("10.0.0.2", (*range(8),)), Host("GPU-node_3.example.org", (0,))))
    assert (hosts.num_ranks, hosts.names[0]) == (11, "node1")
    assert list(hosts.ranks()) == [range(2), range(2, 10), range(10, 11)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node2 slots=0", r"node2 has slots=0; slots must be 1 to 1024. Remove the line to leave the host out"),
        ("node2 slots=1025", "slots=1025; slots must be 1 to 1024"),
        # The last one is a digit, to Python and to DeepSpeed.
        *(
            (f"node2 {rest}", "is not of the form 'name slots=N'")
            for rest in ("slots=99999999999", "slots=-1", "slots=")
        ),
        *((f"node2 {rest}", "is not of the form") for rest in ("", "slots=2 max_slots=4", "gpus=2", "slots=\u0663")),
        ("node1 slots=2", r"host 'node1' is listed twice; write one line for it, with all its slots"),
        ("NODE1 slots=2", "host 'NODE1' is listed twice"),
        ("node[2-3] slots=2", r"'node\[2-3\]' is not a plain host name .*Write one host per line"),
        ("root@node2 slots=2", r"not a plain host name .* cluster\.ssh_user"),
        *((f"{name} slots=2", "not a plain host name") for name in NOT_PLAIN),
        ("fe80::1 slots=2", r"has colons, .*\. For an IPv6 address, define a name"),
        ("ssh:node2 slots=2", "has colons"),
        *((f"{name} slots=2", f"'{name}' is not an IPv4 address") for name in ("10.0.0.256", "127.1", "2130706433")),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(line: str, words: str) -> None:
    with pytest.raises(SpecError, match=f"hosts, line 2: .*{words}"):
        parse(f"node1 slots=2\n{line}\n", "hosts")


@pytest.mark.parametrize("text", ["", "\n", "# node1 slots=2\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="hosts lists no host: write a line 'name slots=N' for each"):
        parse(text, "hosts")


@given(data=st.data(), hosts=HOSTS)
def test_exclude_selects_the_same_slots_as_deepspeed(data: st.DataObject, hosts: Hosts) -> None:
    exclude = data.draw(choices(hosts))
    expected = chosen_by_deepspeed(hosts, exclude=exclude)
    if expected.all:
        assert select(hosts, exclude=exclude) == expected
    else:
        with pytest.raises(SpecError, match="excludes every slot of every host"):
            select(hosts, exclude=exclude)


@given(data=st.data(), hosts=HOSTS)
def test_include_and_num_nodes_select_the_same_slots_as_deepspeed(data: st.DataObject, hosts: Hosts) -> None:
    num_nodes, include = data.draw(st.integers(1, len(hosts.all))), data.draw(choices(hosts))
    assert select(hosts, num_nodes=num_nodes) == chosen_by_deepspeed(hosts, num_nodes=num_nodes)
    chosen = select(hosts, include=include)
    assert chosen == chosen_by_deepspeed(hosts, include=include)
    assert chosen_by_deepspeed(chosen, include=include_argument(chosen)) == chosen


@pytest.mark.parametrize(
    "choice",
    [
        *("", "node3", "@", "node1@", "node1:", "node1:2", "node1:-1", "node1: 0", "node1:0,", "node1:0:1"),
        *("node1:0,0", "node1@node1", "node1@node1:0", "node1:0@node1:0", "node1:\u0661", "Node1", "node1 "),
    ],
)
@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_an_invalid_include_or_exclude_is_refused(setting: str, choice: str) -> None:
    with pytest.raises(SpecError, match=rf"cluster\.{setting} is '"):
        select(TWO, **{setting: choice})


def test_more_nodes_than_the_hostfile_has_are_refused() -> None:
    with pytest.raises(SpecError, match=r"cluster\.num_nodes is 3, but the hostfile has 2 hosts\. Request fewer"):
        select(TWO, num_nodes=3)


def test_hosts_are_read_and_chosen_as_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=4\n")
    cluster = ClusterSpec(hostfile=tmp_path / "hosts", include="node2:1,3", ranks=2)
    assert chosen_hosts(cluster) == read_hosts(cluster) == Hosts((Host("node2", (1, 3)),))


def test_a_hostfile_that_was_changed_after_the_ranks_were_counted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    with pytest.raises(SpecError, match=r"cluster\.ranks is 4, but .* have 2 slots: .* Start the run again"):
        read_hosts(ClusterSpec(hostfile=tmp_path / "hosts", ranks=4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"the hostfile cannot be read: .*/hosts: No such file or directory; check the path"),
        (b"\xff\xfe slots=1", r"the hostfile .*/hosts is not text: its byte 0 is not UTF-8"),
    ],
)
def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    with pytest.raises(SpecError, match=said):
        chosen_hosts(ClusterSpec(hostfile=tmp_path / "hosts"))


def test_the_last_chosen_hosts_are_the_spares(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n", "utf-8")
    cluster = ClusterSpec(hostfile=tmp_path / "hosts", exclude="a:1", spares=1, ranks=3)
    assert read_hosts(cluster) == Hosts((Host("a", (0,)), Host("b", (0, 1))))
    assert spare_hosts(cluster) == Hosts((Host("c", (0, 1)),))
    with pytest.raises(SpecError, match=r"cluster\.spares is 3, of 3 hosts chosen\. Leave at least one"):
        chosen_hosts(ClusterSpec(hostfile=tmp_path / "hosts", spares=3))
