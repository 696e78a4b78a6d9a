"""Hostile input: whatever bytes come from a peer, nothing crashes, hangs, or grows without bound.

    python -m tests.fuzz --examples 10000 --seed 7        # all targets, or those that are named

A target takes the bytes of one peer, plays them to the real code, and says what became of them; it fails when
something raises that may not, writes where it may not, keeps what it should have dropped, or takes too long. The
inputs are those in `corpus/TARGET/` and changes to them. What fails is kept as `corpus/TARGET/found-*.bin`: once
mended, it stays as a test.
"""
