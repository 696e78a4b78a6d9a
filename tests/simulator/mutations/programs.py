"""Bugs of sums that go through programs."""

from __future__ import annotations

from .base import Mutation

FIRST_OF_PROGRAMS = 4 * 10**12
_UNION, _SENDERS = "omnireduce.protocol.collective.combining", "omnireduce.protocol.shard"
_STATES, _PROGRAMMED = "omnireduce.protocol.collective.block_programs", "omnireduce.protocol.collective.block_programs"
_KERNEL = "tests/kernels/test_interpret.py::"

MUTATIONS = (
    Mutation(
        "a program leaves out blocks at the end that nobody brought",
        _UNION,
        "a collective ends before every block was run",
        "is_listed = not self.shape.every or self._cursor >= self.shape.blocks",
        "is_listed = True",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "a result promises blocks that are still to be listed",
        _UNION,
        "a full result says that all below the watermark is in it",
        "return not any(self._unused) and not (self.shape.every and self._cursor < self.watermark)",
        "return not any(self._unused)",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "a state outlives its end",
        _SENDERS,
        "the next program finds what the last one has left",
        "if ended_run.program.drops:",
        "if False:",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "a relay runs the program, too",
        "omnireduce.protocol.relay",
        "sums go through the program twice",
        "self._senders.states = None",
        "pass",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "totals of the first shard only",
        _PROGRAMMED,
        "what other shards have added up is lost",
        "for shard in sorted(self._by_shard)]",
        "for shard in sorted(self._by_shard)[:1]]",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "results of programs are marked",
        "omnireduce.protocol.collective.reduction",
        "a rank keeps its gradient where the result should go",
        "            and descriptor.program is None\n",
        "",
        first=FIRST_OF_PROGRAMS,
    ),
    Mutation(
        "a state for any tensor",
        _STATES,
        "a program works on a state that was made for another tensor",
        "if made_for != kind:",
        "if False:",
        test=f"{_KERNEL}test_states_have_a_limit_and_belong_to_one_tensor",
    ),
    Mutation(
        "states without a limit",
        _STATES,
        "a job takes more memory than it has asked for",
        "if self.nbytes + needed_bytes > self._max_bytes:",
        "if False:",
        test=f"{_KERNEL}test_states_have_a_limit_and_belong_to_one_tensor",
    ),
    Mutation(
        "blocks of different stripes share a state",
        "omnireduce.kernels.interpret",
        "a block finds what another one has kept",
        "return number // (shards * stripe_blocks) * stripe_blocks + number % stripe_blocks",
        "return number % stripe_blocks",
        test=f"{_KERNEL}test_a_shard_keeps_only_its_own_blocks",
    ),
    Mutation(
        "sums of a block take what fills it up",
        "omnireduce.kernels.interpret",
        "totals have elements that the tensor has not",
        "valid = min(size, elements - numbers[k] * size)",
        "valid = size",
        test=f"{_KERNEL}test_functions_and_sums",
    ),
    Mutation(
        "a program reads what a rank brought before",
        "omnireduce.kernels.interpret",
        "a block that nobody brought has an old sum",
        "            block[:] = 0\n",
        "            pass\n",
        test=f"{_KERNEL}test_programs_do_what_their_instructions_say",
    ),
    Mutation(
        "an operand may be the target",
        "omnireduce.core.block_program",
        "a check is gone",
        "if len(set(used)) < len(used):",
        "if False:",
        test="tests/runtime/test_fused.py::test_programs_are_checked",
    ),
    Mutation(
        "a column that is not there",
        "omnireduce.core.block_program",
        "a rank reads and writes memory beside its state",
        "if max(used) >= FIRST_COLUMN + self.columns:",
        "if max(used) > FIRST_COLUMN + self.columns:",
        test="tests/runtime/test_fused.py::test_programs_are_checked",
    ),
)
