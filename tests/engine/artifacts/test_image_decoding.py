"""Images as callers send them: what mlx-vlm would see of each; and what is no image is refused by name."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from engine.artifacts import image_decoding
from engine.artifacts.image_decoding import decode_image, open_image
from engine.artifacts.image_prompt import fitted_size
from engine.contracts.errors import InvalidRequestError
from engine.contracts.vision import MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE_PIXELS, VisionGeometry
from tests.engine.models.tiny_vision import encoded, picture

GEOMETRY = VisionGeometry(
    hidden_size=8, intermediate_size=8, layers=1, heads=1, kv_heads=1, head_dim=8, patch_pixels=4, pooling=2,
    most_tokens=12,
)  # fmt: skip


def pixels(data):
    return decode_image(open_image(data, "image"), lambda *size: fitted_size(GEOMETRY, *size))


def oracle(data):
    """What mlx-vlm loads and its processor makes of it, before numbers are scaled to 1."""
    from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4ImageProcessor
    from mlx_vlm.utils import load_image

    made = Gemma4ImageProcessor(patch_size=4, max_soft_tokens=12, pooling_kernel_size=2)
    found, _ = made([load_image(io.BytesIO(data))])
    return np.round(found["pixel_values"][0] * 255).astype(np.uint8).transpose(1, 2, 0)


def refusal(data):
    """Why `data` is refused, be it at its header or its pixels."""
    with pytest.raises(InvalidRequestError) as caught:
        pixels(data)
    assert caught.value.violations[0].field == "image"
    return caught.value.violations[0].description


def rotated(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif.tobytes()}


CASES = {
    "a photograph": lambda: encoded(picture(1, 90, 50), "JPEG", quality=90),
    "a photograph on its side": lambda: encoded(picture(1, 90, 50), "JPEG", **rotated(None, 6)),
    "a PNG on its head": lambda: encoded(picture(1, 30, 50), "PNG", **rotated(None, 3)),
    "a WebP": lambda: encoded(picture(2, 33, 47), "WEBP", lossless=True),
    "a WebP with losses": lambda: encoded(picture(2, 33, 47), "WEBP"),
    "transparent": lambda: encoded(picture(3, 40, 20, "RGBA")),
    "grey": lambda: encoded(picture(4, 40, 20, "L")),
    "grey, in JPEG": lambda: encoded(picture(4, 40, 20, "L"), "JPEG"),
    "four inks": lambda: encoded(picture(5, 24, 24, "CMYK"), "JPEG"),
    "of a palette": lambda: encoded(picture(6, 24, 24).quantize(7)),
    "of a palette with a hole": lambda: encoded(picture(6, 24, 24).quantize(7), transparency=2),
    "black and white": lambda: encoded(picture(7, 24, 24, "L").convert("1")),
    "interlaced by rows": lambda: encoded(picture(8, 64, 64), "JPEG", progressive=True),
    "exactly as large as it becomes": lambda: encoded(picture(9, 32, 24)),
    "one pixel": lambda: encoded(picture(10, 1, 1)),
    "a line": lambda: encoded(picture(11, 700, 1)),
    "a column": lambda: encoded(picture(11, 1, 700)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_image_is_what_mlx_vlm_makes_of_it(case):
    data = case()
    found = pixels(data)
    assert found.dtype == np.uint8
    assert np.array_equal(found, oracle(data))
    rows, columns = (side // GEOMETRY.token_pixels for side in found.shape[:2])
    assert found.shape == (rows * 8, columns * 8, 3)
    assert 1 <= rows * columns <= GEOMETRY.most_tokens


def png(width, height, *, data=b"", depth=8):
    """A PNG of any stated size."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


NO_HEADER = "is no PNG, JPEG or WebP image, or its header makes no sense"
NO_IMAGES = {
    "text": b"not an image at all",
    "zeros": bytes(1000),
    "the name of a format alone": b"\x89PNG\r\n\x1a\n",
    "the beginning of a header": encoded(picture(1))[:20],
    "a photograph's beginning": encoded(picture(1), "JPEG")[:30],
    "GIF": encoded(picture(1), "GIF"),
    "BMP": encoded(picture(1), "BMP"),
    "TIFF": encoded(picture(1), "TIFF"),
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>",
}


@pytest.mark.parametrize("data", NO_IMAGES.values(), ids=NO_IMAGES)
def test_what_is_no_image_of_a_known_kind_is_refused(data):
    assert refusal(data) in (
        NO_HEADER,
        "is damaged: it cannot be decoded",
    )


def test_nothing_is_refused_as_empty():
    assert refusal(b"") == "is empty"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_file_that_was_cut_is_damaged(kind, kept):
    whole = encoded(picture(1, 64, 64), kind)
    assert refusal(whole[: int(len(whole) * kept)]) == "is damaged: it cannot be decoded"


def test_a_file_whose_pixels_are_nonsense_is_damaged():
    assert refusal(png(64, 64, data=b"short")) == "is damaged: it cannot be decoded"
    whole = bytearray(encoded(picture(1, 64, 64)))
    whole[len(whole) // 2] ^= 255
    assert refusal(bytes(whole)) == "is damaged: it cannot be decoded"


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size):
    assert refusal(png(*size)) == NO_HEADER


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_what_moves_is_refused(kind):
    moving = encoded(picture(1), kind, save_all=True, append_images=[picture(2), picture(3)])
    assert refusal(moving) == "is animated, and only still images are taken"


def forbidden(*arguments, **options):
    raise AssertionError("it was decoded")


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize(
    "size", [(MAX_IMAGE_SIDE_PIXELS + 1, 1), (5793, 5793), (12_000, 8_000), (2**31 - 1, 2**31 - 1)], ids=str
)
def test_a_bomb_is_refused_from_its_header(size, monkeypatch):
    """A few bytes that would become gigabytes."""
    bomb = png(*size)
    assert len(bomb) < 100
    monkeypatch.setattr(image_decoding, "decode_image", forbidden)
    with pytest.raises(InvalidRequestError, match=r"pixels(;| are)") as caught:
        open_image(bomb, "image")
    assert str(MAX_IMAGE_PIXELS) in str(caught.value)


def test_a_bomb_in_webp_is_refused_too():
    """Its canvas alone is said to be large: 16,384 by 16,384."""
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes([0, 0, 0, 0]) + struct.pack("<I", 16383)[:3] * 2
    inner = encoded(picture(1), "WEBP", lossless=True)[12:]
    body = b"WEBP" + canvas + inner
    assert refusal(b"RIFF" + struct.pack("<I", len(body)) + body)
