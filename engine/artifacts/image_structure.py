"""Encoded images, reduced to what their pixels and their orientation need, before a library sees them.

Files are walked from part to part, in time that grows with their length: a library's own reading of metadata and of
very many parts does not, and it is what hostile files are made of. Metadata is left out, however much there is.
Sources: ITU-T T.81 annex B (JPEG), PNG third edition §5, RFC 9649 (WebP), Exif 2.3 §4.6 (orientation). Units: bytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.contracts.errors import InvalidRequestError
from engine.contracts.vision import MAX_IMAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SCANS: Final = 40
"""Most scans of a JPEG, each of which goes over the whole image: ten are usual."""
MAX_PARTS: Final = 4096
"""Most segments of a JPEG or chunks of a WebP."""
MAX_PNG_CHUNKS: Final = 65_536
"""Most chunks of a PNG, whose pixels may come in small ones."""
FILLING_BYTES: Final = 8
"""So many bytes of filling in a row are too many in a scan, where an encoder writes one if any."""

NO_IMAGE: Final = "is no PNG, JPEG or WebP image, or its header makes no sense"
DAMAGED: Final = "is damaged: it cannot be decoded"
ANIMATED: Final = "is animated, and only still images are taken"

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT: Final = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_PNG_XMP: Final = b"XML:com.adobe.xmp\0\0"
_WEBP_KEPT: Final = frozenset({b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"})
_WEBP_METADATA_FLAGS: Final = 0x20 | 0x08 | 0x04

_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""A marker that is neither a stuffed byte, nor filling, nor a restart."""
_WINDOW_BYTES: Final = 2**20
"""So much is searched at once: other threads wait meanwhile."""
_CODED, _SCAN, _END_OF_IMAGE, _APP1 = 0x00, 0xDA, 0xD9, 0xE1
_BARE_MARKERS: Final = frozenset({0x01, 0xD8, _END_OF_IMAGE})
_JPEG_KEPT: Final = frozenset({*range(0xC0, 0xD0), 0xDB, 0xDC, 0xDD, _CODED, _SCAN, _END_OF_IMAGE})
_COLOUR_MARKS: Final = {0xE0: b"JFIF", 0xEE: b"Adobe"}
"""The metadata that says what the components of a JPEG are."""
_JPEG_XMP: Final = b"http://ns.adobe.com/xap/1.0/\0"

_EXIF: Final = b"Exif\0\0"
_ORIENTATION_TAG: Final = 0x0112
_ENTRY_BYTES: Final = 12
_WHOLE_NUMBERS: Final = {1: "B", 3: "H", 4: "I"}
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


@dataclass(frozen=True, slots=True, kw_only=True)
class BareImage:
    """A file of the same pixels without metadata; `orientation` is Exif's number, 1 for upright or unknown."""

    data: bytes
    orientation: int


def bare_image(data: bytes, field: str) -> BareImage:
    """Walk an encoded image, the `field` of a request, and leave out what its pixels do not need.

    Raises:
        InvalidRequestError: it is of no known kind, is animated, is cut between its parts, or has too many of them.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequestError.of(field, f"has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are taken in an image")
    if data.startswith(_PNG):
        return _bare_png(data, field)
    if data.startswith(b"\xff\xd8\xff"):
        return _bare_jpeg(data, field)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _bare_webp(data, field)
    raise InvalidRequestError.of(field, NO_IMAGE)


def _bare_png(data: bytes, field: str) -> BareImage:
    kept = _Kept(data, len(_PNG))
    orientation = _Orientation(data)
    for count, (name, start, body, end) in enumerate(_png_chunks(data), 1):
        _require_few(count, MAX_PNG_CHUNKS, "chunks", field)
        if name in _PNG_KEPT:
            kept.add(start, end)
        elif name == b"acTL" and data[body : body + 4] > b"\0\0\0\1":
            raise InvalidRequestError.of(field, ANIMATED)
        elif name == b"eXIf":
            orientation.in_exif(body, end)
        elif name == b"iTXt" and data.startswith(_PNG_XMP, body):
            orientation.in_xmp(body, end)
    return BareImage(data=kept.joined(), orientation=orientation.number)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """The name of each chunk, where it starts, where its body does, and where it ends, its checksum included."""
    start = len(_PNG)
    while start + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, start)
        end = start + length + 12
        yield name, start, start + 8, min(end, len(data))
        if name == b"IEND":
            return
        start = end


def _bare_jpeg(data: bytes, field: str) -> BareImage:
    kept = _Kept(data, 2)
    orientation, scans = _Orientation(data), 0
    colour_marks = dict(_COLOUR_MARKS)
    for count, (marker, start, end) in enumerate(_jpeg_segments(data, field), 1):
        _require_few(count, MAX_PARTS, "segments", field)
        body = start + 4
        if marker in _JPEG_KEPT:
            kept.add(start, end)
            scans += marker == _SCAN
            _require_few(scans, MAX_SCANS, "scans", field)
        elif marker in colour_marks and data.startswith(colour_marks[marker], body):
            kept.add(start, end)
            del colour_marks[marker]
        elif marker == _APP1 and data.startswith(_EXIF, body):
            orientation.in_exif(body, end)
        elif marker == _APP1 and data.startswith(_JPEG_XMP, body):
            orientation.in_xmp(body, end)
    return BareImage(data=kept.joined(), orientation=orientation.number)


def _jpeg_segments(data: bytes, field: str) -> Iterator[tuple[int, int, int]]:
    """The marker of each segment, where it starts and where it ends; the coded data of a scan is one of `_CODED`."""
    at, marker = 2, 0
    while True:
        start = _next_marker(data, at)
        if marker == _SCAN:
            _require_data(data, at, start, field)
            yield _CODED, at, start
        if start == len(data):
            return
        marker, at = data[start + 1], start + 2
        if marker not in _BARE_MARKERS:
            at += int.from_bytes(data[at : at + 2])
            if not start + 4 <= at <= len(data):
                raise InvalidRequestError.of(field, DAMAGED)
        yield marker, start, at
        if marker == _END_OF_IMAGE:
            return


def _require_data(data: bytes, start: int, end: int, field: str) -> None:
    """Refuse a scan with a long run of filling, over and over which the decoder goes."""
    if data.find(b"\xff" * FILLING_BYTES, start, end) >= 0:
        raise InvalidRequestError.of(field, f"has {FILLING_BYTES} or more bytes of filling in a scan")


def _next_marker(data: bytes, at: int) -> int:
    """Where the next marker is, from `at` on; the end if there is none."""
    for start in range(at, len(data), _WINDOW_BYTES):
        found = _MARKER.search(data, start, start + _WINDOW_BYTES + 1)
        if found is not None:
            return found.start()
    return len(data)


def _bare_webp(data: bytes, field: str) -> BareImage:
    whole = 8 + int.from_bytes(data[4:8], "little")
    if whole > len(data):
        raise InvalidRequestError.of(field, DAMAGED)
    orientation, frames = _Orientation(data), 0
    pieces = []
    start = 12
    for count in range(1, MAX_PARTS + 2):
        if start + 8 > whole:
            break
        _require_few(count, MAX_PARTS, "chunks", field)
        name, body = data[start : start + 4], start + 8
        end = body + int.from_bytes(data[start + 4 : body], "little")
        if end > whole:
            raise InvalidRequestError.of(field, DAMAGED)
        frames += name == b"ANMF"
        if frames > 1:
            raise InvalidRequestError.of(field, ANIMATED)
        if name == b"VP8X" and end > body:
            flags = bytes([data[body] & ~_WEBP_METADATA_FLAGS])
            pieces += [data[start:body], flags, data[body + 1 : end + end % 2]]
        elif name in _WEBP_KEPT:
            pieces.append(data[start : end + end % 2])
        elif name == b"EXIF":
            orientation.in_exif(body, end)
        elif name == b"XMP ":
            orientation.in_xmp(body, end)
        start = end + end % 2
    size = 4 + sum(map(len, pieces))
    bare = b"".join([b"RIFF", size.to_bytes(4, "little"), b"WEBP", *pieces])
    return BareImage(data=bare, orientation=orientation.number)


class _Kept:
    """Stretches of a file that stay, of which neighbours become one."""

    def __init__(self, data: bytes, end: int) -> None:
        self._data = data
        self._stretches = [(0, end)]

    def add(self, start: int, end: int) -> None:
        """Keep one more, further on."""
        before, last = self._stretches[-1]
        if start == last:
            self._stretches[-1] = (before, end)
        else:
            self._stretches.append((start, end))

    def joined(self) -> bytes:
        """All that stays; the file itself where that is all of it."""
        if self._stretches == [(0, len(self._data))]:
            return self._data
        view = memoryview(self._data)
        return b"".join(view[start:end] for start, end in self._stretches)


class _Orientation:
    """What a file's first Exif says, or else its first XMP: the rule of Pillow, and so of mlx-vlm."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._exif: int | None = None
        self._xmp: int | None = None

    def in_exif(self, start: int, end: int) -> None:
        """Read a stretch of the file that is Exif."""
        if self._exif is None:
            self._exif = _exif_orientation(self._data[start:end])

    def in_xmp(self, start: int, end: int) -> None:
        """Read a stretch of the file that is XMP."""
        if self._xmp is None:
            found = _XMP_ORIENTATION.search(self._data, start, end)
            self._xmp = 0 if found is None else int(found[1])

    @property
    def number(self) -> int:
        """The orientation; 1 where none is said."""
        return self._exif or self._xmp or 1


def _require_few(count: int, most: int, parts: str, field: str) -> None:
    if count > most:
        raise InvalidRequestError.of(field, f"has more than {most} {parts}, which is the most that is taken")


def _exif_orientation(exif: bytes) -> int:
    """The orientation in the first directory of `exif`, 0 where none is said."""
    tiff = exif.removeprefix(_EXIF)
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 0
    (at,) = struct.unpack_from(order + "I", tiff, 4)
    if at + 2 > len(tiff):
        return 0
    (entries,) = struct.unpack_from(order + "H", tiff, at)
    whole = min(entries, (len(tiff) - at - 2) // _ENTRY_BYTES)
    for entry in range(at + 2, at + 2 + whole * _ENTRY_BYTES, _ENTRY_BYTES):
        tag, kind, count = struct.unpack_from(order + "HHI", tiff, entry)
        if tag == _ORIENTATION_TAG and kind in _WHOLE_NUMBERS and count == 1:
            number: int = struct.unpack_from(order + _WHOLE_NUMBERS[kind], tiff, entry + 8)[0]
            return number
    return 0
