"""Read plain and compressed files in chunks, up to a limit of bytes."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from residuum.records.inputs import max_memory

# A pickle and its arrays stay in memory, so they may unpack to at most this many bytes.
MAX_PICKLE_BYTES = 2 << 30
MAX_UNPACKER_BYTES = 100 << 20  # largest memory of a decompressor in bytes
# Largest number of bytes that are read at once, because a file can claim a false length.
CHUNK = 1 << 20


def read_range(path: Path, start: int, count: int) -> bytearray:
    """Return ``count`` bytes of a file from the position ``start``.

    Args:
        path: The file.
        start: Position of the first byte.
        count: Number of bytes.

    Returns:
        The bytes.

    Raises:
        ValueError: If the file ends too early.
    """
    file_bytes = bytearray(count)
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(file_bytes) != count:
            raise ValueError("the file ends too early")
    return file_bytes


class Source:
    """A stream that returns at most ``limit`` bytes and does not trust claimed lengths.

    Memory for a long read is allocated in chunks, so a false length allocates at most one chunk.

    Attributes:
        requested: Number of bytes that were requested so far.
    """

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream, self._limit, self.requested = stream, limit, 0

    def read(self, count: int) -> bytes:
        """Read up to ``count`` bytes of the stream.

        Args:
            count: Number of bytes.

        Returns:
            The bytes.

        Raises:
            ValueError: If the stream ends too early, or the limit is exceeded.
        """
        self.requested += count
        if self.requested > self._limit:
            raise ValueError("the file ends too early, or unpacks to too many bytes")
        if count <= CHUNK:
            return self._stream.read(count)
        chunks = []
        while count:
            chunk = self._stream.read(min(count, CHUNK))
            if not chunk:
                raise ValueError("the file ends too early")
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)

    def readline(self) -> bytes:
        """Read one line of the stream. The instructions of pickle protocol 0 are lines of text."""
        line = self._stream.readline(CHUNK)
        self.requested += len(line)
        return line


class UnpackingStream(io.RawIOBase):
    """The unpacked bytes of a compressed stream."""

    def __init__(self, stream: BinaryIO, unpacker: Any) -> None:
        self._stream, self._unpacker, self._unconsumed = stream, unpacker, b""

    def readable(self) -> bool:
        """Return True, because the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of ``buffer`` with unpacked bytes and return their number."""
        unpacker = self._unpacker
        try:
            while not unpacker.eof:
                needs_input = getattr(unpacker, "needs_input", not self._unconsumed)
                packed_bytes = self._unconsumed or (
                    self._stream.read(1 << 16) if needs_input else b""
                )
                unpacked_bytes = unpacker.decompress(packed_bytes, len(buffer))
                self._unconsumed = getattr(unpacker, "unconsumed_tail", b"")
                if unpacked_bytes:
                    buffer[: len(unpacked_bytes)] = unpacked_bytes
                    return len(unpacked_bytes)
                if not packed_bytes and needs_input:
                    break
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as problem:
            raise ValueError(f"the file cannot be unpacked: {problem}") from problem
        return 0


UNPACKERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\x78": lambda: zlib.decompressobj(15),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lambda: lzma.LZMADecompressor(memlimit=MAX_UNPACKER_BYTES),
    b"\x5d\x00": lambda: lzma.LZMADecompressor(memlimit=MAX_UNPACKER_BYTES),
}


def open_source(stream: BinaryIO, size: int, unpacker: Callable[[], Any] | None = None) -> Source:
    """Return a stream of the bytes of a file from the beginning. A compressed file is unpacked.

    Args:
        stream: The open file.
        size: Size of the file in bytes.
        unpacker: A value of ``UNPACKERS``, which makes the decompressor. None for an uncompressed file.

    Returns:
        The stream.
    """
    stream.seek(0)
    if unpacker is None:
        return Source(stream, size)
    unpacked_stream = io.BufferedReader(UnpackingStream(stream, unpacker()), 1 << 16)
    return Source(unpacked_stream, min(MAX_PICKLE_BYTES, max_memory(size)))
