"""A piece in a file: written under another name, complete or absent, never trusted unread.

A file is a header, the bytes, and a record that closes it: a digest of all that came before. Who
reads it compares the header with what it wants and the digest with what it read; a file that is
cut, changed or another's is removed by its reader. Two servers may write the same piece: the later
rename wins, and both are whole.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

FORMAT = 1
"""Of header, record and payload. Raise it when one of them changes."""
_MAGIC = b"DSV4RING"
_HEADER = struct.Struct("<8sI32s16sQ")
"""Magic, format, key's digest, name space, bytes."""
_RECORD = struct.Struct("<16s8s")
"""Digest of header and bytes, magic."""
TEMPORARY = ".part"


class BadFileError(Exception):
    """A file that is not what its name says."""


Buffers = Sequence[memoryview]


def write(path: Path, key: bytes, name_space: bytes, payload: Buffers) -> None:
    """Write all of ``payload`` to ``path``.

    Raises:
        OSError: the disk is full or gone; nothing is left under ``path`` that was not there before.
    """
    header = _header(key, name_space, sum(part.nbytes for part in payload))
    digest = hashlib.blake2b(header, digest_size=16)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(header)
            for part in payload:
                digest.update(part)
                file.write(part)
            file.write(_RECORD.pack(digest.digest(), _MAGIC))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, key: bytes, name_space: bytes, payload: Buffers) -> None:
    """Fill all of ``payload`` from ``path``.

    Raises:
        BadFileError: it is cut, changed, or another's. What ``payload`` holds then is of no use.
        OSError: it cannot be read.
    """
    header = _header(key, name_space, sum(part.nbytes for part in payload))
    digest = hashlib.blake2b(header, digest_size=16)
    with path.open("rb", buffering=0) as file:
        if file.read(_HEADER.size) != header:
            raise BadFileError(f"{path} has another header than expected")
        for part in payload:
            filled = 0
            while filled < part.nbytes:
                count = file.readinto(part[filled:])
                if not count:
                    raise BadFileError(f"{path} is cut")
                filled += count
            digest.update(part)
        if file.read(_RECORD.size + 1) != _RECORD.pack(digest.digest(), _MAGIC):
            raise BadFileError(f"{path} is not closed by the digest of its bytes")


def _header(key: bytes, name_space: bytes, nbytes: int) -> bytes:
    name = hashlib.blake2b(key, digest_size=32).digest()
    return _HEADER.pack(_MAGIC, FORMAT, name, name_space, nbytes)
