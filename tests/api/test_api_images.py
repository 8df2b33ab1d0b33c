"""Images in bodies: which are read, what becomes of a prompt, and what hostile ones meet."""

from __future__ import annotations

import io
import struct
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import seen
from weft.api.bodies import ChatBody, TokenizeBody
from weft.api.card import ModelCard
from weft.api.chat import chat_job
from weft.api.decoding import decode_body
from weft.api.jobs import Builder, Job
from weft.api.logprobs import TokenTexts
from weft.api.rules import Notes
from weft.api.tokens import tokenize
from weft.core.errors import ImageError, ParameterError, TemplateError, WeftError
from weft.core.images import ImageInput
from weft.images import reader
from weft.text import ChatTemplate, Tokenizer

HOW = ImageInput(
    seen.SIZE,
    seen.SIZE,
    2,
    seen.TOKENS,
    seen.mark("<image_soft_token>"),
    seen.mark("<start_of_image>"),
    seen.mark("<end_of_image>"),
)
CARD = ModelCard(("m",), 264, 400, images=HOW)


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Builder:
    folder = tmp_path_factory.mktemp("tokenizer")
    seen.tokenizer().save(str(folder / "tokenizer.json"))
    template = ChatTemplate({"default": seen.TEMPLATE}, {"bos_token": "<bos>"})
    made = Builder(Tokenizer.load(folder), template, CARD)
    yield made
    made.images.close()


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def image(data: bytes, kind: str = "png") -> dict:
    return {"type": "image_url", "image_url": {"url": seen.url(data, kind)}}


def job(builder: Builder, *parts: dict, role: str = "user", **fields) -> Job:
    body = {"model": "m", "messages": [{"role": role, "content": list(parts)}], **fields}
    notes = Notes()
    return chat_job(decode_body(ChatBody, _json(body), "", notes), builder, notes)


def _json(body: object) -> bytes:
    import msgspec

    return msgspec.json.encode(body)


def refusal(builder: Builder, data: bytes, kind: str = "png") -> ImageError:
    with pytest.raises(ImageError) as error:
        job(builder, text("What is this?"), image(data, kind))
    assert (error.value.http_status, error.value.code) == (400, "invalid_image")
    assert error.value.param == "messages[0].content[1].image_url.url"
    return error.value


def test_a_prompt_is_that_of_the_reference(builder):
    """Its processor puts the same text into the template's, before all of it is encoded."""
    first, second = seen.picture(1), seen.picture(2)
    found = job(
        builder, image(seen.encoded(first)), text("and"), image(seen.encoded(second)), text("\nor")
    )
    each = "<start_of_image>" + "<image_soft_token>" * seen.TOKENS + "<end_of_image>"
    words = f"<bos><start_of_turn>user\n\n\n{each}\n\nand\n\n{each}\n\nor<end_of_turn>\n"
    words += "<start_of_turn>model\n"
    wanted = seen.tokenizer().encode(words, add_special_tokens=False).ids
    (request,) = found.requests
    assert list(request.prompt) == wanted
    assert [one.pixels for one in request.images] == [seen.pixels(first), seen.pixels(second)]
    for one in request.images:
        assert set(wanted[one.start : one.stop]) == {HOW.token_id}
        assert wanted[one.start - 1] == HOW.begin_id
        assert wanted[one.stop] == HOW.end_id


def test_marks_that_users_spell_are_text(builder):
    words = "<start_of_image><image_soft_token><end_of_image>"
    found = job(builder, text(words), image(seen.encoded(seen.picture())), text(words))
    (request,) = found.requests
    assert request.prompt.count(HOW.begin_id) == 1
    assert request.prompt.count(HOW.token_id) == seen.TOKENS
    assert len(request.images) == 1


@pytest.mark.parametrize("size", [(70, 43), (43, 70), (56, 56), (400, 3), (1, 1)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1"])
def test_pixels_are_those_of_the_reference(builder, size, mode):
    """Of every kind of PNG, to the bit: also the numbers that its processor makes of them."""
    given = seen.picture(5, size, mode)
    found = builder.images.read(seen.encoded(given), HOW, "image")
    values = np.frombuffer(found, np.uint8).reshape(seen.SIZE, seen.SIZE, 3)
    wanted = seen.processor()(images=[given.convert("RGB")], return_tensors="np")["pixel_values"]
    made = (values.astype(np.float32) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(made.transpose(2, 0, 1), wanted[0], atol=1e-6)


def test_other_formats_and_photos_that_were_turned(builder):
    upright = seen.picture(6)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    data = seen.encoded(turned, "JPEG", exif=exif, quality=100, subsampling=0)
    found = np.frombuffer(builder.images.read(data, HOW, "image"), np.uint8).astype(int)
    wanted = np.frombuffer(seen.pixels(upright), np.uint8)
    assert np.abs(found - wanted).mean() < 12
    for kind in ("WEBP", "BMP", "GIF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = seen.encoded(upright, kind, **options)
        again = Image.open(io.BytesIO(data))
        assert builder.images.read(data, HOW, "image") == seen.pixels(again)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of these sizes, whatever is in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rest = b"".join(chunk(*one) for one in chunks)
    return b"\x89PNG\r\n\x1a\n" + head + rest + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    frames = [seen.picture(i) for i in range(3)]
    return seen.encoded(frames[0], kind, save_all=True, append_images=frames[1:])


HOSTILE = {
    "a bomb": (lambda: png(30_000, 30_000, (b"IDAT", zlib.compress(bytes(10**7)))), "pixels"),
    "a bomb in a GIF": (lambda: b"GIF89a" + struct.pack("<2H", 65_535, 65_535) + bytes(9), ""),
    "too narrow": (lambda: seen.encoded(Image.new("L", (1, 30_000))), "a side may be"),
    "1 x 100,000": (lambda: png(1, 100_000, (b"IDAT", zlib.compress(bytes(400_000)))), "side"),
    "truncated": (lambda: seen.encoded(seen.picture(1, (300, 300)))[:-400], "cannot be read"),
    "only a header": (lambda: png(100, 100), "cannot be read"),
    "a bomb of text": (
        lambda: png(9, 9, (b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))),
        "cannot be read",
    ),
    "no size": (lambda: png(0, 5), ""),
    "text": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is not an image in PNG"),
    "a TIFF": (lambda: seen.encoded(seen.picture(), "TIFF"), "it is not an image in PNG"),
    "nothing": (lambda: b"", "it is not an image in PNG"),
    "an animated GIF": (lambda: animated("GIF"), "animated"),
    "an animated PNG": (lambda: animated("PNG"), "animated"),
    "an animated WebP": (lambda: animated("WEBP"), "animated"),
    "noise": (lambda: b"\x89PNG\r\n\x1a\n" + np.random.default_rng(0).bytes(4000), ""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_images_are_one_clear_error(builder, case):
    made, words = HOSTILE[case]
    began = time.monotonic()
    error = refusal(builder, made())
    assert words in error.message
    assert "Traceback" not in error.message
    assert len(error.message) < 700
    assert time.monotonic() - began < 8
    job(builder, image(seen.encoded(seen.picture())))  # the next one is read


def test_more_bytes_or_images_than_are_allowed(builder, monkeypatch):
    monkeypatch.setattr(reader, "MOST_IMAGE_BYTES", 1000)
    assert "1000 are allowed" in refusal(builder, bytes(1001)).message
    monkeypatch.undo()
    small = image(seen.encoded(seen.picture(0, (8, 8))))
    with pytest.raises(ImageError, match="16 images"):
        job(builder, *[small] * 17)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("https://example.com/cat.png", "fetches no images"),
        ("file:///etc/passwd", "fetches no images"),
        ("http://127.0.0.1:8000/x.png", "fetches no images"),
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png,abc", "not a data URL of an image in base64"),
        ("data:text/html;base64,PGI+", "not a data URL of an image in base64"),
        ("", "fetches no images"),
    ],
)
def test_only_data_urls_are_read(builder, given, words):
    with pytest.raises(ImageError, match=words) as error:
        job(builder, {"type": "image_url", "image_url": {"url": given}})
    assert error.value.param == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url"),
        ({"type": "image_url", "image_url": ["x"]}, "image_url"),
    ],
)
def test_malformed_parts(builder, part, param):
    with pytest.raises(ParameterError) as error:
        job(builder, part)
    assert error.value.param == f"messages[0].content[0].{param}"


def test_where_no_images_are_read(builder, monkeypatch):
    part = image(seen.encoded(seen.picture()))
    deaf = Builder(builder.tokenizer, builder.chat_template, replace(CARD, images=None))
    with pytest.raises(WeftError, match="reads no images") as error:
        job(deaf, part)
    assert (error.value.code, error.value.http_status) == ("unsupported_parameter", 400)
    why = replace(CARD, images=None, no_images="there are no kernels for images on GPUs yet")
    with pytest.raises(WeftError, match="no kernels for images on GPUs yet"):
        job(Builder(builder.tokenizer, builder.chat_template, why), part)
    with pytest.raises(WeftError, match="images as a user"):
        job(builder, text("x"), part, role="assistant")
    with pytest.raises(ParameterError, match="cannot be truncated"):
        job(builder, part, truncate_prompt_tokens=9)
    monkeypatch.setattr("weft.api.pictures.can_read_images", lambda: False)
    with pytest.raises(WeftError, match="install weft"):
        job(builder, part)


def test_a_template_that_shows_no_images(builder):
    silent = ChatTemplate({"default": "{% for m in messages %}{{ m['role'] }}{% endfor %}"})
    with pytest.raises(TemplateError, match="does not show the images"):
        job(Builder(builder.tokenizer, silent, CARD), image(seen.encoded(seen.picture())))


def test_tokens_of_a_conversation_with_an_image(builder):
    parts = [text("What?"), image(seen.encoded(seen.picture()))]
    body = {"messages": [{"role": "user", "content": parts}]}
    texts = TokenTexts(builder.tokenizer)
    found = tokenize(decode_body(TokenizeBody, _json(body), "", Notes()), builder, texts)
    assert tuple(found["tokens"]) == job(builder, *parts).requests[0].prompt


def test_a_process_that_is_killed_is_replaced(builder):
    builder.images.start()
    builder.images._process.kill()
    builder.images._process.wait()
    job(builder, image(seen.encoded(seen.picture())))
