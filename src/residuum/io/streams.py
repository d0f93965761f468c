"""Read packed streams piece by piece, within a limit of bytes."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from residuum.records.inputs import may_hold

MAX_PICKLE_BYTES = (
    2 << 30
)  # bytes that a pickle with its arrays may unpack to, because they stay in memory
MAX_UNPACKER_BYTES = 100 << 20  # memory of an unpacker
CHUNK = 1 << 20  # bytes that are allocated at a time for a claimed length


class Source:
    """A stream that returns at most ``limit`` bytes and allocates nothing for a length that is only claimed.

    Attributes:
        taken: Bytes that were asked for so far.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._limit, self.taken = stream, limit, 0

    def read(self, count: int) -> bytes:
        """Return up to ``count`` bytes."""
        self.taken += count
        if self.taken > self._limit:
            raise ValueError("it ends before what it claims, or unpacks to more than it may")
        if count <= CHUNK:
            return self._stream.read(count)
        parts = []
        while count:
            part = self._stream.read(min(count, CHUNK))
            if not part:
                raise ValueError("it ends before what it claims")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def readline(self) -> bytes:
        """Return one line, for the text protocol of pickle."""
        line = self._stream.readline(CHUNK)
        self.taken += len(line)
        return line


class UnpackingStream(io.RawIOBase):
    """The unpacked bytes of a compressed stream."""

    def __init__(self, stream: BinaryIO, unpacker: Any) -> None:
        self._stream, self._unpacker, self._rest = stream, unpacker, b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of ``buffer`` and return the number of bytes."""
        unpacker = self._unpacker
        try:
            while not unpacker.eof:
                hungry = getattr(unpacker, "needs_input", not self._rest)
                given = self._rest or (self._stream.read(1 << 16) if hungry else b"")
                found = unpacker.decompress(given, len(buffer))
                self._rest = getattr(unpacker, "unconsumed_tail", b"")
                if found:
                    buffer[: len(found)] = found
                    return len(found)
                if not given and hungry:
                    break
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as problem:
            raise ValueError(f"it cannot be unpacked: {problem}") from problem
        return 0


UNPACKERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\x78": lambda: zlib.decompressobj(15),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lambda: lzma.LZMADecompressor(memlimit=MAX_UNPACKER_BYTES),
    b"\x5d\x00": lambda: lzma.LZMADecompressor(memlimit=MAX_UNPACKER_BYTES),
}


def open_source(stream: BinaryIO, size: int, unpacker: Callable[[], Any] | None = None) -> Source:
    """Return the bytes of a file from its beginning, unpacked if there is an unpacker.

    Args:
        stream: The open file.
        size: Bytes of the file.
        unpacker: Makes the decompressor, an entry of ``UNPACKERS``.
    """
    stream.seek(0)
    if unpacker is None:
        return Source(stream, size)
    unpacked = io.BufferedReader(UnpackingStream(stream, unpacker()), 1 << 16)
    return Source(unpacked, min(MAX_PICKLE_BYTES, may_hold(size)))
