"""What a disk may make of a file."""

from __future__ import annotations


def flipped(content: bytes, bit: int) -> bytes:
    """The content with this bit another one."""
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
