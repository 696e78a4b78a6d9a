"""Bugs of what the ranks of one host do together, where one host has all ranks and where there are several."""

from __future__ import annotations

from .base import Mutation

_OF_HOSTS, _OF_SEVERAL = 10**12, 2 * 10**12  # seeds, as `draw` draws them
_MACHINE = "omnireduce.protocol.worker"
_EXCHANGE = "omnireduce.protocol.exchange"
_OPERANDS = "omnireduce.protocol.operands"
_SENDERS = "omnireduce.protocol.senders"
_REGIONS = "omnireduce.kernels.regions"
_TESTS = "tests/protocol/test_several_hosts.py::"

MUTATIONS = (
    Mutation(
        "whoever left keeps the others awake",
        _EXCHANGE,
        "a rank turns and turns until it hears why another one has left",
        "self.heeded = [BY_ITSELF]",
        "self.heeded = [BY_ITSELF, RETIRED]",
        within=1,
        first=_OF_HOSTS + 247135,
    ),
    Mutation(
        "whoever was told goes to sleep",
        _MACHINE,
        "a rank waits in memory for one that has gone with the shard",
        "self.host.heeded = [BY_ITSELF, RETIRED]",
        "self.host.heeded = [BY_ITSELF]",
        test="tests/protocol/test_host_exchange.py::test_nobody_sleeps_while_a_rank_that_left_is_a_reason_to_end",
    ),
    Mutation(
        "sums are shown before they arrive",
        _REGIONS,
        "ranks take the sum of their own host for the result",
        'return bool(_delegate_of(state, first) != s["me"] or s["arrived"] >= first + count)',
        "return True",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "sums are shown when one shard has answered",
        _MACHINE,
        "of the stripes of another shard the ranks get the sum of their own host",
        "host.arrived(min([",
        "host.arrived(max([",
        test=_TESTS + "test_a_host_shows_only_what_its_shard_has_answered",
    ),
    Mutation(
        "sums are sent before they are there",
        _OPERANDS,
        "a shard gets what one rank alone has",
        "        return cursor < ready and int(np.count_nonzero(self.notes[cursor:ready] & NON_ZERO)) >= most\n",
        "        return True\n",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "the rest of a host's sum is not worth a message",
        _OPERANDS,
        "a shard waits for the last blocks for ever",
        "        if ready == blocks or ready - cursor",
        "        if ready - cursor",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "every rank sends the sum of its host",
        _MACHINE,
        "a shard hears ranks that are no delegates",
        "if delegate(each.shard) == self.rank] if sums",
        "if delegate(each.shard) >= 0] if sums",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "a host divides a mean",
        "omnireduce.protocol.host_preset",
        "a mean over several hosts is divided twice",
        'op_code("sum" if is_sum and descriptor.op == "mean" else descriptor.op, element)',
        "op_code(descriptor.op, element)",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "a mean is divided by hosts",
        "omnireduce.protocol.combine",
        "a mean over several hosts is too large",
        "self._divisor = divisor\n",
        "self._divisor = min(divisor, 2)\n",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "rows come from one rank of a host",
        _SENDERS,
        "rows of the other ranks are lost, or nobody gets on",
        "self.delegates != () and descriptor.summed_by_host",
        "self.delegates != ()",
        first=_OF_SEVERAL,
    ),
    Mutation(
        "ranks that see little judge first",
        _MACHINE,
        "a rank that waits for its delegate blames its neighbours before that one has named the shard or the rank",
        "        return self._patience.moments_of_hosts(now, sees_who, owing, self._after_own)\n",
        "        return self._patience.moments_of_hosts(now, True, [], self._after_own)\n",
        within=2000,
        first=_OF_SEVERAL,
    ),
    Mutation(
        "who waits in rows is blamed in the next collective",
        _MACHINE,
        "a rank that still waits for the rows of a shard that hangs is named before it can name the shard",
        '"", not collective.descriptor.summed_by_host\n',
        '"", False\n',
        test=_TESTS + "test_a_rank_that_may_still_wait_for_rows_speaks_before_it_is_named",
    ),
    Mutation(
        "who left may still show",
        _EXCHANGE,
        "a rank waits for results of a delegate that has gone with the shard",
        "if rank in late or self._read(rank, COMBINED) < shown]",
        "if rank in late]",
        test=_TESTS + "test_a_delegate_that_left_before_it_has_shown_is_not_waited_for",
    ),
    Mutation(
        "hosts add up float16",
        "omnireduce.descriptor",
        "a host's sum is infinite where the result is not",
        ' and self.element.name != "float16"',
        "",
        test=_TESTS + "test_a_host_sends_no_sum_that_float16_cannot_hold",
    ),
    Mutation(
        "ranks of a host need not agree about rows",
        _MACHINE,
        "rows of some ranks of each host wait for tensors of the others, and nobody sees that they differ",
        "        if self.host is not None:\n            self.host.submit(collective, now)\n",
        "        if self.host is not None and collective.host_sum is None and self._neighbours.hosts > 1:\n"
        "            collective.parts_left -= 1\n"
        "        elif self.host is not None:\n            self.host.submit(collective, now)\n",
        test=_TESTS + "test_rows_beside_a_tensor_end_the_job_on_all_ranks",
    ),
    Mutation(
        "a pause counts as waiting",
        "omnireduce.protocol.aggregator",
        "ranks hear that a shard that had nothing to do stood still",
        "            self._quiet.begin(now)  # no result was awaited before\n",
        "            pass\n",
        test=_TESTS + "test_the_wait_for_ranks_begins_with_the_first_message",
    ),
    Mutation(
        "a lone rank judges like one that sees all",
        _MACHINE,
        "a rank alone on its host blames the delegate of another host, which waits for its neighbour",
        "        if self._neighbours.hosts == 1:\n            return 0 if",
        "        if self.host is None or self._neighbours.hosts == 1:\n            return 0 if",
        test=_TESTS + "test_a_rank_alone_on_its_host_lets_the_others_judge_who_is_late",
    ),
    Mutation(
        "who rests does not say so",
        _EXCHANGE,
        "a rank that waits to hear why the job is over is blamed for that",
        "        if self.has_failed:\n            self._publish(LEFT, FAILED)\n",
        "",
        test="tests/protocol/test_host_exchange.py::test_who_waits_for_the_reason_of_an_end_is_not_late",
    ),
)
