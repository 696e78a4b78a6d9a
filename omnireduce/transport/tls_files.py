"""TLS contexts from files of the configuration: certificates, keys, authorities. Errors name a file and its fault."""

from __future__ import annotations

import os
import ssl
import stat

from omnireduce.config import Metrics, Security
from omnireduce.errors import ConfigError
from omnireduce.files.paths import without_waiting
from omnireduce.secret import read_private

_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH")


def aggregator_context(files: Security | Metrics, section: str = "security") -> ssl.SSLContext | None:
    """An aggregator's TLS: the certificate that it shows and, with `tls_ca`, demands of its peers; None without TLS.

    `files` is the `section` of the configuration. Raises ConfigError.
    """
    if not (files.tls_certificate or files.tls_key or files.tls_ca):
        return None
    if not files.tls_certificate:
        raise ConfigError(f"{section}.tls_certificate: an aggregator with TLS needs one, and {section}.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody resumes a session
    if files.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, files, section)


def worker_context(security: Security) -> ssl.SSLContext | None:
    """A worker's TLS: the certificates that it accepts and, with `tls_certificate`, the one that it shows; None without
    TLS.

    Raises ConfigError.
    """
    if not (security.tls_certificate or security.tls_key or security.tls_ca):
        return None
    if not security.tls_ca:
        raise ConfigError("security.tls_ca: a worker with TLS needs it, to know the aggregators' certificates")
    return _filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), security, "security")


def _filled(context: ssl.SSLContext, files: Security | Metrics, section: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificate, key = files.tls_certificate, files.tls_key
    if bool(certificate) != bool(key):
        raise ConfigError(
            f"{section}.tls_certificate and {section}.tls_key go together: got one, expected both or neither"
        )
    if files.tls_ca:
        _add_authority(context, f"{section}.tls_ca", files.tls_ca)
    if certificate:
        _add_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), f"{section}.tls_certificate", certificate)  # is it one?
        read_private(key, f"{section}.tls_key")
        _add_certificate(context, section, certificate, key)
    return context


def _add_authority(context: ssl.SSLContext, name: str, file: str) -> None:
    """Let `context` trust the certificates in a file, the value of the key `name`."""
    try:
        with open(file, "rb", opener=without_waiting) as opened:  # OpenSSL tells less of what is wrong here
            if stat.S_ISFIFO(os.fstat(opened.fileno()).st_mode):
                raise ConfigError(f"{name}: {file} is a pipe, expected a file")
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"{name}: {file} has no certificate that can be read, expected PEM{_why(error)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _add_certificate(context: ssl.SSLContext, section: str, certificate: str, key: str) -> None:
    asked = []

    def no_passphrase() -> str:
        asked.append(key)
        return ""

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        if asked:
            wrong = f"{key} has a passphrase, expected a key without one: openssl pkey -in {os.path.basename(key)}"
        elif reason in _OTHER_KEY:
            wrong = f"{key} is not the key of the certificate {certificate}"
        elif reason is None or "PEM" in reason or "NO_START_LINE" in reason:
            wrong = f"{key} has no private key that can be read, expected PEM"
        else:
            wrong = f"OpenSSL refuses {certificate} and {key}{_why(error)}"
        raise ConfigError(f"{section}.tls_key: {wrong}") from None


def _why(error: Exception) -> str:
    """OpenSSL's name of the error, in small letters."""
    reason = getattr(error, "reason", None) or ""
    return f" ({reason.replace('_', ' ').lower()})" if reason else ""
