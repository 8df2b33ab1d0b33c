"""Images of a prompt: which tokens stand for them, their pixels, and how a model takes them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Any

from weft.core.errors import ParameterError

DIGEST_BYTES = 16
_RECORD = Struct("<4Q")  # start, count, height, width; then the pixels
_SIZES = Struct("<2Q")
_MARK = Struct("<q16s")


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image and the tokens of a prompt that stand for it.

    Attributes:
        start, count: its tokens are ``[start, start + count)`` of the prompt.
        height, width: of its pixels.
        pixels: rows of red, green and blue bytes; empty once there are ``rows``.
        digest: tells its content from that of any other image.
        rows: [count, C], what the model reads in place of the tokens' embeddings; None: the image
            is not encoded yet.
    """

    start: int
    count: int
    height: int
    width: int
    pixels: bytes = field(repr=False)
    digest: bytes
    rows: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, start: int, count: int, height: int, width: int, pixels: bytes) -> PromptImage:
        """The image with its digest.

        Raises:
            ParameterError: the pixels are not as many as the sizes say.
        """
        if len(pixels) != 3 * height * width or count < 1:
            raise ParameterError("An image of the request is cut off.", param="messages")
        content = blake2b(_SIZES.pack(height, width), digest_size=DIGEST_BYTES)
        content.update(pixels)
        return cls(start, count, height, width, pixels, content.digest())

    @property
    def stop(self) -> int:
        """The end of its tokens."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a model takes images.

    Attributes:
        height, width: to which every image is brought.
        resample: how, as the number that Pillow has for it.
        tokens: of the prompt that stand for an image.
        token_id: of each of these.
        begin_id: of the token that the chat template writes where an image is to be.
        end_id: of the token behind the image.
    """

    height: int
    width: int
    resample: int
    tokens: int
    token_id: int
    begin_id: int
    end_id: int

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> ImageInput | None:
        """The same after a passage through JSON."""
        return None if values is None else cls(**values)


def pack_images(images: Seq[PromptImage]) -> bytes:
    """Images as bytes, one behind the other."""
    return b"".join(
        _RECORD.pack(image.start, image.count, image.height, image.width) + image.pixels
        for image in images
    )


def unpack_images(packed: bytes, prompt_tokens: int) -> tuple[PromptImage, ...]:
    """The images that were packed.

    Raises:
        ParameterError: bytes are missing, or their tokens are not in order within the prompt.
    """
    images: list[PromptImage] = []
    at = end = 0
    while at < len(packed):
        head = packed[at : at + _RECORD.size]
        if len(head) < _RECORD.size:
            raise ParameterError("An image of the request is cut off.", param="messages")
        start, count, height, width = _RECORD.unpack(head)
        at += _RECORD.size
        size = 3 * height * width
        image = PromptImage.of(start, count, height, width, packed[at : at + size])
        if not end <= start < start + count <= prompt_tokens:
            raise ParameterError("The tokens of an image are outside the prompt.", param="messages")
        images.append(image)
        at, end = at + size, image.stop
    return tuple(images)


def uncut(images: Seq[PromptImage], start: int, count: int, most: int) -> int:
    """How many of a sequence's next tokens to compute, so that no image is cut.

    All tokens of an image read each other, so they are computed together, or not yet. An image that
    begins the tokens may take more than ``count``: else a step with a limit of time might never
    have room for it.

    Args:
        start: tokens that are computed.
        count: the next ones that fit.
        most: tokens that may be computed at the most.
    """
    for image in images if count > 0 else ():
        if image.start < start + count < image.stop:
            if image.start > start:
                return image.start - start
            return image.stop - start if image.stop - start <= most else 0
    return count


def marks_of(images: Seq[PromptImage], start: int, stop: int) -> bytes:
    """What tells tokens ``[start, stop)`` from the same ones with other images; empty for none."""
    return b"".join(
        _MARK.pack(image.start - start, image.digest)
        for image in images
        if image.start < stop and start < image.stop
    )
