"""The table of all kinds of attack."""

from __future__ import annotations

from dataclasses import dataclass

from .steps import Attack, floods, frames, hellos, legal, pages, sealed

MIB = 1 << 20
GIGABIT = 125e6  # bytes a second, in each direction, of an attacker on another host
FEW_JOBS = (
    f"aggregator.max_jobs={hellos.MAX_JOBS}",
    f"aggregator.max_bytes={64 * MIB}",
    f"aggregator.max_job_bytes={32 * MIB}",
)


@dataclass(frozen=True)
class Kind:
    """An attack, and the daemon and the honest job that it needs.

    An attack that reached the daemon yields the word `shows`, or any word if `shows` is "". It must never yield the
    word `forbids`. If the daemon has a secret, `who` attacks: a stranger, a member who knows the secret, or each in
    turn. The slots of the attacker's own jobs may take `own_bytes`. `elastic`: the honest job is elastic. `tls`: the
    attack needs a daemon with a certificate; `large_key`: signing with the key of that certificate takes long.
    `settings` are the daemon's.
    """

    name: str
    attack: Attack
    shows: str
    who: tuple[str, ...] = ("stranger", "member")
    rate: float = 100.0  # steps a second at most
    own_bytes: int = 0
    elastic: bool = False
    tls: bool = False
    large_key: bool = False
    forbids: str = ""
    settings: tuple[str, ...] = ()


STRANGER, MEMBER = ("stranger",), ("member",)
KINDS: tuple[Kind, ...] = (
    Kind("huge worlds", hellos.huge_worlds, "Refused"),
    Kind("extreme hellos", hellos.extreme_hellos, "Refused"),
    Kind("random hellos", hellos.random_hellos, "Refused"),
    Kind("survivors to a running job", hellos.evict_running, "", elastic=True),
    Kind("survivors to a gathering job", hellos.evict_gathering, "Refused"),
    Kind("refused hellos", hellos.refused_hellos, "Refused"),
    Kind(
        "formations",
        hellos.formations,
        "Welcome",
        MEMBER,
        rate=60.0,
        own_bytes=32 * MIB,
        forbids=hellos.TOO_MANY,
        settings=FEW_JOBS,
    ),
    Kind("tiny blocks", legal.tiny_blocks, "result", MEMBER, own_bytes=legal.LARGE_JOB_BYTES),
    Kind("narrow rows", legal.narrow_rows, "result", MEMBER, own_bytes=legal.LARGE_JOB_BYTES),
    Kind("half floats", legal.half_floats, "result", MEMBER, own_bytes=legal.LARGE_JOB_BYTES),
    Kind("greedy jobs", legal.greedy_jobs, "result", MEMBER, own_bytes=legal.GREEDY_BYTES),
    Kind(
        "large results",
        legal.large_results,
        "result",
        MEMBER,
        rate=GIGABIT / legal.TCP_STEP_BYTES,
        own_bytes=legal.TCP_BYTES,
    ),
    Kind("large joins", legal.large_joins, "Welcome", MEMBER),
    Kind("new formats", legal.new_formats, "result", MEMBER, rate=400.0, own_bytes=8 * MIB),
    Kind("restarts", frames.restarts, "Welcome", MEMBER),
    Kind("stragglers", frames.stragglers, "waits", MEMBER, rate=20.0),
    Kind("bad frames", frames.bad_frames, "Aborted", MEMBER),
    Kind("tampered blocks", frames.tampered_blocks, "Aborted", MEMBER),
    Kind("status requests", floods.questions, "Status", MEMBER, rate=400.0),
    Kind("silent connections", floods.silent, "open", STRANGER, rate=200.0),
    Kind("short connections", floods.short, "closed", STRANGER, rate=400.0),
    Kind("half-said frames", floods.half_said, "half"),
    Kind("garbage", floods.garbage, "Refused", STRANGER),
    Kind("deaf members", floods.deaf, "Welcome", MEMBER, own_bytes=10 * MIB),
    Kind("page requests", pages.flood, "answer", STRANGER),
    Kind("silent page requests", pages.silent, "silent", STRANGER, rate=200.0),
    Kind("whole handshakes", sealed.whole_handshakes, "open", STRANGER, rate=400.0, tls=True, large_key=True),
    Kind("half handshakes", sealed.half_handshakes, "half", STRANGER, tls=True, large_key=True),
    Kind("TLS garbage", sealed.garbage, "answer", STRANGER, tls=True),
    Kind("corrupt records", sealed.corrupt_records, "closed", STRANGER + MEMBER, tls=True),
    Kind("key updates", sealed.key_updates, "updated", STRANGER, rate=50.0, tls=True),
)
BY_NAME = {kind.name: kind for kind in KINDS}
