"""Whether bytes are a picture that can be used: formats, bounds, broken files, strict base64."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from PIL import Image

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media import limits
from mlx_mesh.proxy.media.data_urls import read_base64, read_data_url
from mlx_mesh.proxy.media.files import check_file
from mlx_mesh.proxy.media.item import Item

PART = "messages[2].content[1].image_url"


def picture(source: str = "", media_type: str = "", is_url: bool = True) -> Item:
    return Item(source, PART, is_url=is_url, media_type=media_type)


def made(kind: str = "PNG", size: tuple[int, int] = (3, 2), mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 50).convert(mode).save(file, kind, **options)
    return file.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A header that claims so many pixels, and hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def refusal(file: bytes, media_type: str = "") -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_file(picture(media_type=media_type), file)
    assert caught.value.status == 400 and caught.value.param == PART and PART in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "mode", "media_type"),
    [
        ("PNG", "RGB", "image/png"),
        ("PNG", "RGBA", "image/png"),
        ("PNG", "1", ""),
        ("JPEG", "RGB", "image/jpeg"),
        ("JPEG", "CMYK", "image/jpg"),
        ("WEBP", "RGB", "image/webp"),
        ("GIF", "P", "image/gif"),
        ("BMP", "RGB", "image/bmp"),
    ],
)
def test_what_is_taken(kind: str, mode: str, media_type: str) -> None:
    facts = check_file(picture(media_type=media_type), made(kind, mode=mode))
    assert (facts.format, facts.width, facts.height) == (kind, 3, 2)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("P", (4, 4), colour) for colour in (1, 2, 3)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert check_file(picture(), file.getvalue()).format == "GIF"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_that_ends_early_is_broken(kind: str) -> None:
    file = made(kind, (64, 48))
    error = refusal(file[: len(file) * 2 // 3])
    assert (error.code == "invalid_image" and "broken" in str(error)) or "no picture" in str(error)


@pytest.mark.parametrize(
    "file",
    [
        b"\0",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"\xff\xd8\xff\xe0" + b"\0" * 50,
        b"BM" + b"\xff" * 60,
        made("PNG")[:8] + b"\0\0\0\rIHDR" + b"\xff" * 40,
        b"#!/bin/sh\nexit 1\n",
    ],
)
def test_what_is_no_picture_is_refused_whatever_the_library_raises(file: bytes) -> None:
    assert refusal(file).code in ("invalid_image", "image_too_large")


def test_a_format_that_is_not_on_the_list_is_refused_even_if_it_can_be_read() -> None:
    assert "PNG, JPEG, WEBP, GIF and BMP are" in str(refusal(made("TIFF")))


def test_the_media_type_must_be_the_files_own() -> None:
    error = refusal(made("PNG"), "image/jpeg")
    assert "said to be image/jpeg, and its data are image/png" in str(error)
    refusal(made("JPEG"), "text/html")


@pytest.mark.parametrize(("width", "height"), [(10_000, 5_001), (12_000, 9_000), (60_000, 60_000), (0, 5)])
def test_pixels_are_bounded_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    def decoded(*_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    error = refusal(huge_png(width, height))
    assert error.code == ("image_too_large" if height > 5 else "invalid_image")
    if height > 5:
        assert str(limits.MAX_PIXELS) in str(error) and ("pixels" in str(error))


def test_the_pixels_of_all_pictures_are_bounded_together() -> None:
    check_file(picture(), made(size=(3, 2)), limits.MAX_TOTAL_PIXELS - 6)
    with pytest.raises(ApiError, match="pictures of this request") as caught:
        check_file(picture(), made(size=(3, 2)), limits.MAX_TOTAL_PIXELS - 5)
    assert (caught.value.code, caught.value.param) == ("image_too_large", PART)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:", "is no data URL"),
        ("data:image/png;base64", "is no data URL"),
        ("data:image/png,aGk=", "not base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,aGk", "base64"),
        ("data:image/png;base64,aG k=", "base64"),
        ("data:image/png;base64,aGk=\n", "base64"),
        ("data:image/png;base64,aG-_", "base64"),
        ("data:image/png;base64,héé=", "characters that base64 does not have"),
        ("data:image png;base64,aGk=", "is no data URL"),
        ("data:" + "a" * 300 + ",aGk=", "is no data URL"),
    ],
)
def test_data_urls_are_taken_strictly(url: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        read_data_url(picture(url))
    assert (caught.value.code, caught.value.param) == ("invalid_image", PART)


@pytest.mark.parametrize(
    ("head", "media_type"),
    [
        ("data:image/png;base64,", "image/png"),
        ("DATA:IMAGE/PNG;base64,", "image/png"),
        ("data:image/png;charset=utf-8;base64,", "image/png"),
        ("data:;base64,", ""),
    ],
)
def test_what_a_data_url_says_is_noted(head: str, media_type: str) -> None:
    one = picture(head + base64.b64encode(b"some bytes").decode())
    assert read_data_url(one) == b"some bytes"
    assert one.media_type == media_type


def test_a_file_is_bounded_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MAX_FILE_BYTES, "image", 6)
    assert read_base64(picture("aGVsbG8=", is_url=False)) == b"hello"
    with pytest.raises(ApiError, match="12 characters") as caught:
        read_base64(picture("aGVsbG8gd28=", is_url=False))
    assert caught.value.code == "image_too_large"


def test_errors_never_show_the_data() -> None:
    secret = base64.b64encode(b"secret" * 20).decode()
    with pytest.raises(ApiError) as caught:
        read_data_url(picture(f"data:image/png;base64,!{secret}"))
    one = picture(f"data:image/png;base64,{secret}")
    assert secret[:20] not in str(caught.value) and secret[:20] not in repr(one)
    assert "secret" not in str(refusal(b"secret" * 20))
