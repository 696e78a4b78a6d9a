"""`buggy_daemon.py BUG python -m omnireduce.aggregator …`: the daemon with a deliberate bug that an attack must show.

Imports nothing of the product before the bug is in place.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1 + up]) for up in (0, 1)]  # tests/ and the project

from simulator.mutate import install
from simulator.mutations.base import Mutation

_DECODE = "        message: ControlMessage = _control_decoder.decode(body)\n"
BUGS = {
    bug.name: bug
    for bug in (
        Mutation(
            "nothing limits the log",
            "omnireduce.support.logs",
            "a stranger fills the disk",
            "        if event not in UNLIMITED_EVENTS and not self._has_room(event):\n",
            # Long lines: few steps show it on a slow machine, too.
            '        record.msg = str(record.msg) + "." * (1 << 16)\n        if False:\n',
        ),
        Mutation(
            "messages are kept",
            "omnireduce.core.wire.control",
            "a stranger fills the memory",
            _DECODE,
            _DECODE
            + '        kept = decode_control.__dict__.setdefault("kept", [])\n'
            + "        if len(kept) < 8:\n            kept.append(bytearray(range(256)) * (1 << 17))\n",
        ),
        Mutation(
            "a turn stalls",
            "omnireduce.core.wire.control",
            "a stranger stops the jobs of all others",
            _DECODE,
            _DECODE + '        __import__("select").select([], [], [], 0.2)\n',
        ),
        Mutation(
            "sums are maxima",
            "omnireduce.protocol.collective.combining",
            "a sum is wrong",
            "        self._op = op_code(descriptor.op, descriptor.element)\n",
            '        self._op = op_code("max", descriptor.element)\n',
        ),
    )
}


def main() -> None:
    """Run the module that follows the bug's name, as Python would."""
    _, name, _python, option, module, *rest = sys.argv
    assert option == "-m", option
    install(BUGS[name])
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
