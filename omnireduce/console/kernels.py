"""Compilation of kernels with progress shown: `omnireduce warm`, and a check of the doctor."""

from __future__ import annotations

import time

from rich.console import Console

from omnireduce.console.finding import Finding
from omnireduce.errors import UsageError
from omnireduce.kernels.jit import has_compiler, kernel_files
from omnireduce.kernels.warm import COMPILING, take_trouble, warm_up_all
from omnireduce.printing import make_console
from omnireduce.progress import PlainProgress

NO_COMPILER = "unset NUMBA_DISABLE_JIT"


def warm() -> None:
    """Compile all kernels that the first folder for them does not have, and print where they are kept. Raises
    UsageError where they are not."""
    if not has_compiler():
        raise UsageError(f"kernels run as plain Python, and there is nothing to compile: {NO_COMPILER}")
    console = make_console()
    kernel_files().use_first_only()  # an image is for other users, who do not have this user's own folder
    took_s = _make_ready(console)
    if trouble := take_trouble():
        raise UsageError(trouble)
    console.print(f"kernels ready after {took_s:.1f} s, kept in {kernel_files().kept_in}")


def check_kernels(console: Console) -> Finding:
    """Compile all kernels, or load them, and say how that went."""
    text = f"ready after {_make_ready(console):.1f} s"
    if not has_compiler():
        return Finding("warn", "kernels", f"{text}, as plain Python, which is very slow", NO_COMPILER)
    if trouble := take_trouble():
        return Finding("warn", "kernels", f"{text}; {trouble}")
    return Finding("ok", "kernels", f"{text}, kept in {kernel_files().kept_in}")


def _make_ready(console: Console) -> float:
    """Show how far that is; return how many seconds it took."""
    started = time.monotonic()
    plain = PlainProgress(started)
    with console.status("loading kernels") as status:

        def tell(ready: int, total: int) -> None:
            if console.is_terminal:
                status.update(COMPILING % (ready, total))
            else:
                plain.at(COMPILING % (ready, total), time.monotonic())

        warm_up_all(tell)
    return time.monotonic() - started
