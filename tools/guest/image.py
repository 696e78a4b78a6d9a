"""Boot images of the guests of tools/guests.py: the distribution's stock kernel, and an initramfs around busybox.

The kernel package is downloaded once; the cache folder keeps the kernel and the few modules that the guests need.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import lzma
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

KERNEL_PACKAGES = {"debian": "linux-image-amd64", "ubuntu": "linux-image-generic"}  # the cloud kernels have no rxe
MODULES = ("virtio_pci", "virtio_net", "virtio_console", "9p", "9pnet_virtio", "overlay", "veth")
RDMA_MODULES = ("ib_uverbs", "rdma_rxe", "rdma_ucm")
OPTIONAL_MODULES = ("virtio_rng", "crc32_generic", "crc32_pclmul")  # rxe asks for crc32, and no modprobe is there
TOOLS = {  # beside what nodes have, and the packages that bring them
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "hostname": "hostname",
    "sysctl": "procps",
    "zstd": "zstd",
}
INIT = Path(__file__).resolve().parent / "init.sh"
# Lists what guests need: they have our files.
NODE_PACKAGES_SCRIPT = INIT.parent.parent.parent / "vagrant" / "provision" / "packages.sh"


class CannotRunError(Exception):
    """No guest can be started here; the message says what to do."""


class Image(NamedTuple):
    """The files to boot from; the initramfs is these modules followed by `pack_init()`."""

    kernel: Path
    modules: Path


def distribution() -> str:
    """Return `debian` or `ubuntu`, whose kernel packages are known."""
    os_release: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/etc/os-release").read_text("utf-8").splitlines()
        os_release = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
    for name in [os_release.get("ID", ""), *os_release.get("ID_LIKE", "").split()]:
        if name in KERNEL_PACKAGES and os.uname().machine == "x86_64":
            return name
    system = f"{os_release.get('PRETTY_NAME', 'an unknown system')} on {os.uname().machine}"
    raise CannotRunError(f"expected Debian 12, 13 or Ubuntu 24.04 on x86_64, found {system}: use a container with one")


def missing_packages() -> list[str]:
    """All packages that this machine or a guest would miss. A guest cannot install any."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=path)]
    busybox = shutil.which("busybox")
    if busybox and b"/ld-linux" in Path(busybox).read_bytes()[:4096]:  # the initramfs has no libraries
        missing.append("busybox-static")
    return sorted({*missing, *output_of(NODE_PACKAGES_SCRIPT, "--missing").decode().split()})


def check_tools() -> None:
    """Raise CannotRunError where packages are missing."""
    names, sudo = " ".join(missing_packages()), "" if os.geteuid() == 0 else "sudo "
    if names:
        raise CannotRunError(f"missing: {names}. Install with: {sudo}apt-get install -y {names}")


def output_of(*command: str | Path, cwd: Path | None = None, data: bytes | None = None) -> bytes:
    process = subprocess.run(command, cwd=cwd, input=data, capture_output=True, check=False, timeout=600)
    if process.returncode:
        output = (process.stderr or process.stdout).decode(errors="replace")
        message = (output.strip().splitlines() or ["no message"])[-1]
        raise CannotRunError(f"{shlex.join(map(str, command))} failed with status {process.returncode}: {message}")
    return process.stdout


def prepare(cache: Path) -> Image:
    """Return the image in `cache`; make it if it is not there."""
    system = distribution()
    check_tools()
    recipe = hashlib.sha256(repr((system, MODULES, OPTIONAL_MODULES, RDMA_MODULES)).encode()).hexdigest()
    folder = cache / f"guest-{recipe[:12]}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            build(Path(name), KERNEL_PACKAGES[system])
            with contextlib.suppress(OSError):  # another process was faster
                (Path(name) / "image").rename(folder)
    return Image(folder / "vmlinux", folder / "modules.gz")


def build(work: Path, package: str) -> None:
    packages = kernel_packages(package)
    output_of("apt-get", "download", *packages, cwd=work)
    for archive in sorted(work.glob("*.deb")):
        output_of("dpkg", "-x", archive, work / "tree")
    vmlinuz = next((work / "tree/boot").glob("vmlinuz-*"))
    version = vmlinuz.name.removeprefix("vmlinuz-")
    base = next(path for path in (work / "tree/lib", work / "tree/usr/lib") if (path / "modules" / version).is_dir())
    output_of("depmod", "-b", base.parent, version)
    config = (work / "tree/boot" / f"config-{version}").read_text("utf-8")
    (work / "image").mkdir()
    (work / "image/vmlinux").write_bytes(unpack_kernel(vmlinuz.read_bytes(), config))
    (work / "image/modules.gz").write_bytes(pack_modules(base / "modules" / version, work / "initramfs"))


def kernel_packages(package: str) -> list[str]:
    """Return the packages of kernel and modules that the meta package stands for."""
    packages, waiting = [], [package]
    while waiting:
        name = waiting.pop()
        try:
            depends = output_of("apt-cache", "depends", "--no-recommends", "--no-suggests", name).decode()
        except CannotRunError as error:
            raise CannotRunError(f"apt does not know the package {name}: run apt-get update first") from error
        waiting += re.findall(r"Depends: (linux-(?:image|modules)-\S+)", depends)
        if re.search(r"\d+\.\d+", name):
            packages.append(name)
    return packages


def unpack_kernel(vmlinuz: bytes, config: str) -> bytes:
    """Return the ELF kernel inside, which boots seconds sooner than one that is decompressed under emulation."""
    if "CONFIG_PVH=y" in config:  # QEMU starts an ELF kernel by this protocol only
        for magic, unpack in ((b"\xfd7zXZ\0", unpack_xz), (b"\x28\xb5\x2f\xfd", unpack_zstd)):
            for match in re.finditer(re.escape(magic), vmlinuz):
                if (kernel := unpack(vmlinuz[match.start() :])).startswith(b"\x7fELF"):
                    return kernel
    return vmlinuz


def unpack_xz(data: bytes) -> bytes:
    with contextlib.suppress(lzma.LZMAError):
        return lzma.LZMADecompressor().decompress(data)
    return b""


def unpack_zstd(data: bytes) -> bytes:
    # what follows the kernel is no zstd, so the status says nothing
    return subprocess.run(["zstd", "-dcq"], input=data, capture_output=True, check=False).stdout


def module_name(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")


def modules_in_order(base: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and file of every module that the guest loads, each after those it needs."""
    modules: dict[str, tuple[str, list[str]]] = {}
    for line in (base / "modules.dep").read_text("utf-8").splitlines():
        path, _, dependencies = line.partition(":")
        modules[module_name(path)] = path, [module_name(dependency) for dependency in dependencies.split()]
    built_in = {module_name(line) for line in (base / "modules.builtin").read_text("utf-8").splitlines()}
    absent = sorted({*MODULES, *RDMA_MODULES} - modules.keys() - built_in)
    if absent:
        raise CannotRunError(f"the kernel {base.name} has no module {', '.join(absent)}, so it can be no guest's")
    yielded = set()
    for name in (*MODULES, *OPTIONAL_MODULES, *RDMA_MODULES):
        for module in [*reversed(modules[name][1]), name] if name in modules else []:
            if module not in yielded:
                yielded.add(module)
                yield module, base / modules[module][0]


def pack_modules(base: Path, work: Path) -> bytes:
    """Return busybox and the modules, with their order, as a part of an initramfs."""
    for inner in ("bin", "dev", "modules", "proc", "sys"):
        (work / inner).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", work / "bin/busybox")
    order = []
    for module, path in modules_in_order(base):
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        elif path.suffix == ".zst":
            data = unpack_zstd(data)
        (work / "modules" / f"{module}.ko").write_bytes(data)
        order.append(f"{module}.ko\n")
    (work / "modules/order").write_text("".join(order))
    return pack(work)


def pack_init() -> bytes:
    """Return init.sh as the last part of an initramfs."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(INIT, Path(name) / "init")
        (Path(name) / "init").chmod(0o755)
        return pack(Path(name))


def pack(work: Path) -> bytes:
    listing = output_of("find", ".", cwd=work)
    return gzip.compress(output_of("cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0", cwd=work, data=listing), 1)
