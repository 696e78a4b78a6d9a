"""Lists of hosts, as Horovod, Open MPI, MPICH, Slurm and PBS write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.errors import ConfigError
from omnireduce.launch.hosts import (
    MOST_NAMES,
    MOST_SLOTS,
    Host,
    names_in,
    parse_hosts,
    parse_lines,
    read_hostfile,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4, user@node-2.example:12,node3", [("node1", 4), ("user@node-2.example", 12), ("node3", 1)]),
        ("a,b,a,a", [("a", 3), ("b", 1)]),
        ("a:2,b:1,a:3", [("a", 5), ("b", 1)]),
        ("node[01-03]:2", [("node01", 2), ("node02", 2), ("node03", 2)]),
        ("n[8-11,1]-ib.x", [("n8-ib.x", 1), ("n9-ib.x", 1), ("n10-ib.x", 1), ("n11-ib.x", 1), ("n1-ib.x", 1)]),
        ("r[1-2]n[3,5],login", [("r1n3", 1), ("r1n5", 1), ("r2n3", 1), ("r2n5", 1), ("login", 1)]),
        ("[fd00::1]:2,[fd00::2],fd00::3,me@[::1]:4", [("fd00::1", 2), ("fd00::2", 1), ("fd00::3", 1), ("me@::1", 4)]),
        ("fe80::1%eth0,10.0.0.1:2", [("fe80::1%eth0", 1), ("10.0.0.1", 2)]),
    ],
)
def test_a_list_with_commas(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == [Host(*each) for each in expected]


@pytest.mark.parametrize(
    "text",
    [
        *["", "node1:", ":4", "node1:0", "node1:x", "a b:2", "-oProxy:1", "n1:2,,n2:2", "n:²", "a:1:2", "a@b@c", "@a"],
        *["n[1-2", "n1-2]", "n[]", "n[a]", "n[1--2]", "n[-2]", "n[3-1]", "[fd00::x]:1", "[fd00::1]1", "[fd00::1]:"],
        *["-x@node1", "[1-2]", f"a:{MOST_SLOTS + 1}", "a:" + "9" * 5000, f"n[1-{'9' * 5000}]"],
    ],
)
def test_a_wrong_list_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^-H: got '.*', expected ") as caught:
        parse_hosts(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1 slots=4", [("node1", 4)]),
        ("node1  slots = 4   max_slots = 8  ", [("node1", 4)]),
        ("node1 max-slots=8 slots=4 # the first", [("node1", 4)]),
        ("node1 max_slots=3", [("node1", 3)]),
        ("node1 cpus=2 user=me", [("me@node1", 2)]),
        ("node1:4#", [("node1", 4)]),
        ("node1", [("node1", 3)]),
        ("node[1-2] slots=2", [("node1", 2), ("node2", 2)]),
        ("node[1-2],login:5", [("node1", 3), ("node2", 3), ("login", 5)]),
        ("fd00::1 slots=2", [("fd00::1", 2)]),
        ("[fd00::1] slots=2", [("fd00::1", 2)]),
        ("[fd00::1]:2", [("fd00::1", 2)]),
        ("", []),
        ("  # nothing", []),
    ],
)
def test_a_line(line: str, expected: list[tuple[str, int]]) -> None:
    assert parse_lines(f"\n{line}\n", "file", slots=3) == [Host(*each) for each in expected]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("node2 4", "expected HOST slots=N"),
        ("node1 slots=0", "expected 1 to 32000 slots"),
        ("node1 slots", "expected 1 to 32000 slots"),
        ("node1 slots=2 gpus=2", "expected HOST"),
        ("node1 slots=2 slots=2", "expected HOST"),
        ("node1:2 slots=2", "expected HOST"),
        ("node1 slots=4 max_slots=2", "expected max_slots to be no less than slots"),
        ("node1 user=-x", "expected HOST"),
        ("me@node1 user=you", "expected HOST"),
        ("node1 slots=" + "9" * 5000, "expected 1 to 32000 slots"),
    ],
)
def test_a_wrong_line_is_named(line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lines(f"node0 slots=1\n{line}\n", "file")
    assert str(caught.value).startswith(f"file, line 2: got {line[:80]!r}, {reason}")


def test_the_file_of_pbs_repeats_a_host_for_each_slot() -> None:
    assert parse_lines("n1\nn1\nn2\nn1\n", "file") == [Host("n1", 3), Host("n2", 1)]


def test_hostfile(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows, comments and blank lines are accepted."""
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbf# ours\r\nnode1 slots=4\r\n\r\nnode2:2  # the other\r\nnode3  \r\n")
    assert read_hostfile(path) == [Host("node1", 4), Host("node2", 2), Host("node3", 1)]
    path.write_text("\n# nothing\n")
    with pytest.raises(ConfigError, match="got no host"):
        read_hostfile(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_hostfile(tmp_path / "none")


def test_a_nodelist_of_slurm() -> None:
    assert names_in("node[03-04],other") == ["node03", "node04", "other"]
    assert names_in("") == names_in("(null)") == []


@pytest.mark.parametrize(
    "text",
    [
        f"n[1-{MOST_NAMES + 1}]", "n[1-999999999]", "n[1-60000],m[1-60000]", "n[1-300]r[1-300]", "n[0-9]" * 9,
        "n[" + ",".join("1" * (MOST_NAMES + 1)) + "]", "n[1-60000]" * 5000, "a," * MOST_NAMES + "a",
    ],
    ids=lambda text: text[:16],
)  # fmt: skip
def test_a_list_never_has_more_hosts_than_there_can_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected at most (65536 hosts in all|32000 slots on a)"):
        parse_hosts(text)


# properties

LABEL = st.text("abcxyz09-", min_size=1, max_size=6).map(lambda text: f"n{text}z")
NAME = st.one_of(
    LABEL,
    st.tuples(LABEL, LABEL).map(".".join),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    LABEL.map(lambda text: f"me@{text}"),
    st.ip_addresses(v=6).map(lambda text: f"me@{text}"),
)
COUNT = st.one_of(st.none(), st.integers(1, 99))


def bracketed(name: str) -> str:
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]" if ":" in host else name


def as_mpich(name: str, count: int | None) -> str:
    return bracketed(name) if count is None else f"{bracketed(name)}:{count}"


def as_open_mpi(name: str, count: int | None) -> str:
    return name if count is None else f"{name} slots={count}"


def spaced(name: str, count: int | None) -> str:
    return f"  {bracketed(name)}\t" + ("" if count is None else f"slots = {count}  max_slots={count + 1}") + " # here"


def added_up(hosts: list[tuple[str, int | None]]) -> list[Host]:
    """The oracle: what each host has in all, in the order in which hosts come first."""
    order = sorted({name for name, _ in hosts}, key=[name for name, _ in hosts].index)
    return [Host(name, sum(count or 1 for each, count in hosts if each == name)) for name in order]


@given(st.lists(st.tuples(NAME, COUNT), min_size=1, max_size=8), st.sampled_from([as_mpich, as_open_mpi, spaced]))
def test_whatever_way_hosts_are_written(
    hosts: list[tuple[str, int | None]], write: Callable[[str, int | None], str]
) -> None:
    lines = [write(*host) for host in hosts]
    assert parse_lines("\r\n".join(lines), "file") == added_up(hosts)
    assert parse_hosts(",".join(as_mpich(*host) for host in hosts)) == added_up(hosts)
    assert parse_hosts(",".join(map(str, added_up(hosts)))) == added_up(hosts)


RANGE = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4))  # first, how many more, digits
PIECE = st.one_of(LABEL, st.lists(RANGE, min_size=1, max_size=2))


def written(piece: str | list[tuple[int, int, int]]) -> str:
    if isinstance(piece, str):
        return piece
    return "[" + ",".join(f"{first:0{n}}-{first + more}" if more else f"{first:0{n}}" for first, more, n in piece) + "]"


def choices(piece: str | list[tuple[int, int, int]]) -> list[str]:
    if isinstance(piece, str):
        return [piece]
    return [str(first + at).zfill(max(n, len(str(first)))) for first, more, n in piece for at in range(more + 1)]


@given(LABEL, st.lists(PIECE, max_size=3))  # up to 1,000 hosts
def test_ranges_are_counted_up(start: str, pieces: list[str | list[tuple[int, int, int]]]) -> None:
    names = ["".join(parts) for parts in itertools.product([start], *map(choices, pieces))]
    text = start + "".join(map(written, pieces))
    assert parse_hosts(text) == added_up([(name, None) for name in names])


@given(st.one_of(st.text(max_size=60), st.text("n19[]-,: #=@.slot", max_size=60)))
def test_any_text_is_a_list_or_wrong(text: str) -> None:
    for parse in (parse_hosts, lambda each: parse_lines(each, "file")):
        try:
            results = parse(text)
        except ConfigError:
            continue
        assert all(1 <= host.slots <= MOST_SLOTS for host in results)
        assert not results or parse_hosts(",".join(map(str, results))) == results
