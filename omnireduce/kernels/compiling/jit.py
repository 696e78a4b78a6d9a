"""The compiler behind every kernel: the decorators, and where what it has compiled is kept.

Kernels release the GIL and are kept on disk: `cache.py`. An edit to any file of kernels makes all of
them compile anew, because a compiled kernel holds the code of the kernels that it calls. NUMBA_DISABLE_JIT=1 runs the
same code as plain Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from llvmlite import binding as llvm
from numba.core import caching, event
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from omnireduce.kernels.compiling.cache import KernelFiles
from omnireduce.support.files.cache import CACHE_VARIABLE, cache_folders
from omnireduce.support.version import __version__

# Modules outside of this folder whose constants are compiled into kernels.
CONSTANTS = "core/block_program", "core/dtypes"
OURS = "omnireduce.kernels."
_rebuild: Any = CompileResult._rebuild
_pickled: Any = dumps
_settings: Any = numba.config
F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Compile `function` on first use for each combination of argument types. Python and other kernels may call it."""
    return _on_disk(_compiled(function), function, _all_of)


def inner(function: F) -> F:
    """A kernel that only kernels call: it has no entry for Python, and no file of its own."""
    return _without_entry(_compiled(function, no_cpython_wrapper=True), function)


def inlined(function: F) -> F:
    """An `inner` kernel whose code becomes part of the kernels that call it: what is done for every block is worth
    that."""
    return _without_entry(_compiled(function, no_cpython_wrapper=True, forceinline=True), function)


def spliced(function: F) -> F:
    """An `inner` kernel that is no function of its own in what is compiled: to compile it with its caller takes less
    time than to compile both."""
    return _compiled(function, inline="always")


def reordering(function: F) -> F:
    """A kernel whose float sums may be added in any order, so that they vectorise. Not for what ranks must agree on."""
    return _on_disk(_compiled(function, fastmath={"reassoc", "nsz"}), function, _all_of)


def entry(function: F) -> F:
    """A large kernel that Python calls, and no kernel may call. Its file has none of the code that compilers want:
    loaded, that takes ten times as much memory as the machine code."""
    return _on_disk(_compiled(function), function, _machine_code_only)


def by_address(function: F) -> F:
    """A kernel that kernels call at an address, which `address_of` gives. Its file is as that of an `entry`."""
    return _on_disk(_compiled(function, no_cfunc_wrapper=False), function, _machine_code_only)


def address_of(kernel: Any, types: tuple[Any, ...]) -> int:
    """The address in this process of a kernel that is `by_address`, for these types of arguments. It is compiled, or
    loaded, at the first call. Its arguments are passed as Numba passes those of a C function."""
    if types not in kernel.overloads:
        kernel.compile(types)
    result = kernel.overloads[types]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


def _compiled(function: F, **options: Any) -> F:
    compiled: Any = numba.njit(nogil=True, error_model="numpy", **{"no_cfunc_wrapper": True} | options)(function)
    return cast(F, compiled)


def _without_entry(compiled: F, function: Callable[..., object]) -> F:
    """`compiled`; to call it from Python raises TypeError. Numba would jump to an entry that is not there."""

    def refuse(*_: object, **__: object) -> None:
        raise TypeError(f"only kernels can call {function.__name__}: make it a @kernel to call it from Python")

    if has_compiler():
        dispatcher = cast(Any, compiled)
        dispatcher._insert, dispatcher._compile_for_args = lambda *_: None, refuse
    return compiled


def _on_disk(compiled: F, function: Callable[..., object], stored: Callable[[Any], Any]) -> F:
    """`compiled`, kept in a file of its own for each combination of types."""
    if has_compiler():
        cast(Any, compiled)._cache = _OnDisk(function, stored)
    return compiled


class _OnDisk(caching._Cache):
    """The cache that numba asks for a kernel that may have been compiled before."""

    def __init__(self, function: Callable[..., object], stored: Callable[[Any], Any]) -> None:
        self._function, self._stored, self._is_on = function, stored, True

    @property
    def cache_path(self) -> str | None:
        """The folder, for numba's statistics."""
        folder = kernel_files().folder
        return None if folder is None else str(folder)

    def load_overload(self, types: Any, context: Any) -> Any:
        """The compiled kernel for these types of arguments, or None."""
        name = self._name(types)
        content = kernel_files().load(name) if name else None
        if content is None:
            return None
        context.refresh()
        try:
            return _rebuild(context, *pickle.loads(content))
        except Exception as error:
            kernel_files().note(f"{name}: compiled once more: {error}")
            return None

    def save_overload(self, types: Any, result: Any) -> None:
        """Keep it."""
        name = self._name(types)
        if name and not result.lifted and not result.library.has_dynamic_globals:
            kernel_files().save(name, _pickled(self._stored(result)))

    def enable(self) -> None:
        self._is_on = True

    def disable(self) -> None:
        self._is_on = False

    def flush(self) -> None:
        """Files do not change: there is nothing old in them."""

    def _name(self, types: Any) -> str:
        """The name of its file; empty where nothing tells this kernel from others."""
        function = self._function
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        source = "" if function.__module__.startswith(OURS) else _digest_of(function.__code__.co_filename)
        if source is None or not self._is_on:
            return ""
        definition = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        digest = hashlib.sha256(repr((definition, source, types, _pickled(cells))).encode()).hexdigest()
        return f"{function.__name__}-{digest[:32]}.kernel"


@cache
def _digest_of(file: str) -> str | None:
    """A digest of a user's own module, as it is now; None if it is no file."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def _all_of(result: Any) -> Any:
    return result._reduce()


def _machine_code_only(result: Any) -> Any:
    """The data that numba stores of a compiled kernel, with empty functions in place of those to build into others."""
    (name, kind, (machine_code, bitcode)), *rest = result._reduce()
    names = [defined.name for defined in llvm.parse_bitcode(bitcode).functions if not defined.is_declaration]
    empty = llvm.parse_assembly("\n".join(f'define void @"{name}"() {{ ret void }}' for name in names))
    return (name, kind, (machine_code, empty.as_bitcode())), *rest


def has_compiler() -> bool:
    """Whether kernels are compiled, rather than run as plain Python."""
    return not _settings.DISABLE_JIT


@cache
def kernel_files() -> KernelFiles:
    """The files of compiled kernels: for this source, this compiler and this processor, so that a folder may serve
    many of each."""
    compiler = (sys.version_info[:2], sys.implementation.cache_tag, numba.__version__, llvmlite.__version__)
    processor = cpu_target.target_context.codegen().magic_tuple()
    digest = hashlib.sha256(repr((source_stamp(), compiler, processor)).encode()).hexdigest()
    numbas = os.environ.get("NUMBA_CACHE_DIR", "")
    environ = {CACHE_VARIABLE: os.path.join(numbas, "omnireduce")} if numbas else {}
    return KernelFiles(f"{__version__}-{digest[:16]}", cache_folders(environ | os.environ))


@cache
def source_stamp() -> str:
    """A digest of the kernels as they are now: of their files, of this file, and of those whose constants they take."""
    this = Path(__file__)
    package = this.parents[2]
    kernels = (package / "kernels").rglob("*.py")
    files = [*sorted(kernels), *(package / f"{name}.py" for name in CONSTANTS)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(b"%d " % file.stat().st_size + file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def watching_the_compiler() -> Iterator[Callable[[], bool]]:
    """Yields what tells whether a kernel has been compiled since, rather than loaded from the cache."""
    with event.install_recorder("numba:compile") as recorder:
        yield lambda: bool(recorder.buffer)
