"""Zip archives from anywhere: the directory is measured before anything parses it.

A directory of a few megabytes can name a hundred thousand members, or carry extra fields that take
quadratic time to walk; two directories can show two readers different members.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import BinaryIO

from residuum.errors import UnsafeFileError

MAX_DIRECTORY_BYTES = 1 << 20  # about 13 000 members of torch.save
END = struct.Struct("<4s4H2IH")
END_64 = struct.Struct("<4sQ2H2I4Q")  # zip64 writes this and a locator before END
LOCATOR = struct.Struct("<4sIQI")


def open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    """The archive in ``stream``, which must end in its one directory, and that of a sane length."""
    end = stream.seek(0, io.SEEK_END) - END.size
    wide = END_64.size + LOCATOR.size
    stream.seek(max(end - wide, 0))
    tail = stream.read()
    before, last = tail[: -END.size], tail[-END.size :]
    if not last.startswith(b"PK\x05\x06") or len(last) < END.size:
        raise zipfile.BadZipFile("it does not end in its directory")
    *_, length, start, comment = END.unpack(last)
    if before[-LOCATOR.size :].startswith(b"PK\x06\x07"):  # what zipfile and torch go by
        if not before.startswith(b"PK\x06\x06") or len(before) < wide:
            raise zipfile.BadZipFile("its directory has no end")
        *_, length, start = END_64.unpack(before[: END_64.size])
        end -= wide
    if comment or start + length != end:
        raise zipfile.BadZipFile("it does not end in its directory")
    if length > MAX_DIRECTORY_BYTES:
        raise UnsafeFileError(
            f"The directory of an archive may have {MAX_DIRECTORY_BYTES} bytes; this one has {length}.",
            "Save fewer, larger arrays.",
        )
    return zipfile.ZipFile(stream)
