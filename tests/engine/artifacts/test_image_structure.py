"""Files of images, before a library sees them: pixels and orientation stay, metadata goes, floods are refused."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from engine.artifacts.image_decoding import decode_image, keep_library_quiet, open_image
from engine.artifacts.image_structure import MAX_PARTS, MAX_PNG_CHUNKS, MAX_SCANS, bare_image
from engine.contracts.errors import InvalidRequestError
from engine.contracts.vision import MAX_IMAGE_BYTES
from tests.engine.models.tiny_vision import encoded, picture

XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
KINDS = ("PNG", "JPEG", "WEBP")


def segment(marker, body):
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def after_start(photograph, more):
    return photograph[:2] + more + photograph[2:]


def after_header(drawing, more):
    return drawing[:33] + more + drawing[33:]


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif[0x010E] = "a description " * 300
    return exif.tobytes()


def pixels(data):
    return decode_image(open_image(data, "image"), lambda height, width: (height, width))


def refusal(data):
    with pytest.raises(InvalidRequestError) as caught:
        bare_image(data, "image")
    assert caught.value.violations[0].field == "image"
    return caught.value.violations[0].description


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_metadata_stays_as_it_is(kind):
    plain = encoded(picture(1, 40, 30), kind)
    assert bare_image(plain, "image").data == plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_metadata_goes_and_the_orientation_is_what_the_library_finds(kind, orientation):
    heavy = encoded(picture(1, 40, 30), kind, exif=exif_of(orientation), icc_profile=bytes(5000))
    bare = bare_image(heavy, "image")
    assert bare.orientation == orientation
    assert len(bare.data) < len(heavy) - 4000
    with Image.open(io.BytesIO(bare.data)) as image:
        assert {"exif", "icc_profile", "xmp"}.isdisjoint(image.info)
    with Image.open(io.BytesIO(heavy)) as image:
        wanted = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(pixels(heavy), wanted)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_an_orientation_in_xmp_counts_where_exif_has_none(kind):
    assert bare_image(encoded(picture(1), kind, xmp=XMP), "image").orientation == 6
    both = encoded(picture(1), kind, xmp=XMP, exif=exif_of(3))
    assert bare_image(both, "image").orientation == 3


def test_an_orientation_in_the_xmp_of_a_png_counts_too():
    told = after_header(encoded(picture(1)), chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP))
    assert bare_image(told, "image").orientation == 6
    assert np.array_equal(pixels(told), np.rot90(np.asarray(picture(1)), -1))


@pytest.mark.parametrize(
    "exif", [b"", b"garbage!", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08", b"MM\0*\0\0\0\x08\xff\xff\x01\x12\0\3"]
)
def test_exif_that_makes_no_sense_leaves_an_image_upright(exif):
    told = after_start(encoded(picture(1), "JPEG"), segment(0xE1, b"Exif\0\0" + exif))
    assert np.array_equal(pixels(told), pixels(encoded(picture(1), "JPEG")))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "restart_marker_blocks": 1}])
def test_a_photograph_keeps_its_colours_among_fillings_and_comments(options):
    plain = encoded(picture(2, 40, 30), "JPEG", **options)
    odd = after_start(plain, segment(0xFE, b"a comment") + b"\xff\xff" + segment(0xE5, bytes(70)))
    assert bare_image(odd + b"more after the end", "image").data in (plain, after_start(plain, b"\xff\xff"))
    assert np.array_equal(pixels(odd), pixels(plain))


def test_four_inks_stay_as_adobe_means_them():
    plain = encoded(picture(5, 24, 24, "CMYK"), "JPEG")
    assert b"Adobe" in bare_image(plain, "image").data


def test_a_photograph_of_too_many_scans_is_refused():
    plain = encoded(picture(1, 16, 16, "L"), "JPEG", progressive=True)
    end = plain.rindex(b"\xff\xda")
    scan, rest = plain[end:-2], plain[-2:]
    scans = plain.count(b"\xff\xda")
    bare_image(plain[:-2] + scan * (MAX_SCANS - scans) + rest, "image")
    over = plain[:-2] + scan * (MAX_SCANS - scans + 1) + rest
    assert refusal(over) == f"has more than {MAX_SCANS} scans, which is the most that is taken"


def test_a_scan_of_filling_is_refused():
    photograph = encoded(picture(1), "JPEG")
    bare_image(photograph[:-2] + b"\xff" * 7 + b"\xd9", "image")
    filled = photograph[:-2] + b"\xff" * 1000 + b"\xd9"
    assert refusal(filled) == "has 8 or more bytes of filling in a scan"


def test_floods_of_parts_are_refused():
    photograph, drawing, web = (encoded(picture(1), kind) for kind in ("JPEG", "PNG", "WEBP"))
    exif = segment(0xE1, b"Exif\0\0" + bytes(100))
    bare_image(after_start(photograph, exif * 4000), "image")
    assert refusal(after_start(photograph, exif * MAX_PARTS)).startswith(f"has more than {MAX_PARTS} segments")
    text = chunk(b"zTXt", b"a\0\0")
    assert refusal(after_header(drawing, text * MAX_PNG_CHUNKS)).startswith(f"has more than {MAX_PNG_CHUNKS} chunks")
    body = web[8:] + (b"junk" + bytes(4)) * MAX_PARTS
    flooded = b"RIFF" + struct.pack("<I", len(body)) + body
    assert refusal(flooded).startswith(f"has more than {MAX_PARTS} chunks")


def test_what_a_library_would_inflate_never_reaches_it():
    """A thousand profiles that are a MiB each once inflated."""
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**20), 9))
    drawing = encoded(picture(1))
    assert bare_image(after_header(drawing, profile * 1000), "image").data == drawing


def test_exif_that_names_the_same_bytes_again_and_again_costs_nothing():
    tags, size = 1500, 2**16
    table = b"".join(struct.pack(">HHII", 0x9000 + tag, 7, size, 14) for tag in range(tags))
    exif = b"MM\0*\0\0\0\x08" + struct.pack(">H", tags) + table + bytes(size)
    drawing = encoded(picture(1))
    bare = bare_image(after_header(drawing, chunk(b"eXIf", exif)), "image")
    assert (bare.data, bare.orientation) == (drawing, 1)


def test_a_file_of_too_many_bytes_is_refused():
    assert refusal(bytes(MAX_IMAGE_BYTES + 1)) == (
        f"has {MAX_IMAGE_BYTES + 1} bytes; at most {MAX_IMAGE_BYTES} are taken in an image"
    )


def test_what_the_library_would_warn_of_is_not_printed(recwarn):
    keep_library_quiet()
    holey = encoded(picture(6, 24, 24).quantize(7), transparency=bytes([0, 255]))
    pixels(holey)
    assert not recwarn.list
