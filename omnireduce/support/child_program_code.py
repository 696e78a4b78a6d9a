"""Code for another interpreter to run a module of this tree, no matter where it is installed."""

from __future__ import annotations

from pathlib import Path

TREE = str(Path(__file__).resolve().parents[2])


def program_of(module: str, tree_index: str = "", *, name: str = "") -> str:
    """The code for `python -c` that calls `main` of `module`. `tree_index`: the index of TREE in the arguments; empty:
    the last. `name`: the name of the program, if `main` is a command of click.

    It never imports a module of the user, or of the current folder, in place of this tree's. Ctrl-C ends it without a
    traceback while it imports.
    """
    set_path = f"import signal, sys; sys.path.insert(0, sys.argv.pop({tree_index}))"
    quiet = "handler = signal.getsignal(2); handler is signal.SIG_IGN or signal.signal(2, signal.SIG_DFL)"
    main = f"del sys.path[0]; signal.signal(2, handler); main({f'prog_name={name!r}' if name else ''})"

    return f"{set_path}; {quiet}; from {module} import main; {main}"
