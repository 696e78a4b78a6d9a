"""Detection of other protocols: the name of what a peer speaks, by its first bytes."""

from __future__ import annotations

TLS = "TLS"
_HTTP = (b"GET", b"PUT", b"POST", b"HEAD", b"PATCH", b"DELETE", b"OPTIONS", b"CONNECT", b"TRACE")
_BEGINNINGS = {
    b"HTTP": "HTTP",
    b"PRI ": "HTTP/2",
    b"SSH-": "SSH",
    b"PROX": "the PROXY protocol of a load balancer",
    b"\r\n\r\n": "the PROXY protocol of a load balancer",
    **{(method + b" ")[:4]: "HTTP" for method in _HTTP},
}


def spoken(first: bytes) -> str:
    """The name of the protocol; empty if the `first` four bytes or more do not tell."""
    if len(first) >= 2 and 20 <= first[0] <= 23 and first[1] == 3:  # a record: type, then the major version
        return TLS
    return _BEGINNINGS.get(bytes(first[:4]), "")
