"""Certificates for tests of TLS, made by the `openssl` program: a CA, what it signed, and another CA."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="no openssl program here to make certificates")
SMALL_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
LARGE_KEY = ("-newkey", "rsa:4096", "-nodes")  # it takes long to sign with


class Certificates:
    """Files in a temporary folder: NAME.pem and NAME.key for each of ca, aggregator, worker and stranger."""

    def __init__(self, key: tuple[str, ...] = SMALL_KEY) -> None:
        self._keep = tempfile.TemporaryDirectory(prefix="omnireduce-certificates-")
        self.folder = Path(self._keep.name)
        for authority in ("ca", "stranger"):
            self._openssl("req", "-x509", *key, "-subj", f"/CN={authority}", *self._out(authority))
        for holder in ("aggregator", "worker"):
            self._openssl("req", "-new", *key, "-subj", f"/CN={holder}", "-keyout", f"{holder}.key", "-out", "request")
            names = "IP:127.0.0.1,IP:::1,IP:fd77::1,DNS:localhost"  # fd77::1 is the first of `separate_hosts`
            (self.folder / "names").write_text(f"subjectAltName={names}\n")
            signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
            self._openssl("x509", "-req", "-in", "request", *signed_by, "-out", f"{holder}.pem", "-days", "2")

    def close(self) -> None:
        """Remove the files."""
        self._keep.cleanup()

    def _out(self, name: str) -> tuple[str, ...]:
        return ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")

    def _openssl(self, *arguments: str) -> None:
        command = [str(OPENSSL), *arguments]
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stderr

    def holder(self, name: str) -> list[str]:
        """Overrides that make `name`'s certificate one's own."""
        return [f"security.tls_certificate={self.folder}/{name}.pem", f"security.tls_key={self.folder}/{name}.key"]

    def trust(self, name: str = "ca") -> str:
        """The override that makes one trust what `name` signed."""
        return f"security.tls_ca={self.folder}/{name}.pem"


@functools.cache
def certificates(key: tuple[str, ...] = SMALL_KEY) -> Certificates:
    return Certificates(key)
