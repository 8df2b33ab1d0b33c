"""Images of a conversation: read from its parts, and placed in its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from weft.api.errors import MissingParameterError, UnsupportedParameterError
from weft.api.jobs import Builder
from weft.api.rules import MAX_SHOWN_CHARS, Notes
from weft.core.errors import ImageError, ParameterError, TemplateError
from weft.core.images import ImageInput, PromptImage
from weft.images.reader import can_read_images
from weft.images.urls import image_bytes

IMAGE_PARTS = ("image_url", "input_image")  # one name in each of OpenAI's APIs
MOST_IMAGES = 16  # of a conversation


class Pictures:
    """The images of one conversation, in the order of its parts."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._pixels: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._pixels)

    def read(self, part: Mapping[str, Any], path: str, notes: Notes) -> dict[str, str]:
        """Take the image of a part in; return what templates get of it.

        Raises:
            UnsupportedParameterError: the model or this server reads no images.
            ParameterError: the part or its image is unsound.
        """
        how = self._input(path)
        if len(self._pixels) == MOST_IMAGES:
            raise ImageError(f"A request may have {MOST_IMAGES} images.", param=path)
        where = f"{path}.image_url"
        given = part.get("image_url")
        if isinstance(given, Mapping):
            for name in given:
                if name not in ("url", "detail"):
                    notes.ignore(f"{where}.{str(name)[:MAX_SHOWN_CHARS]}")
            given, where = given.get("url"), f"{where}.url"
        if given is None:
            raise MissingParameterError(where)
        if not isinstance(given, str):
            raise ParameterError(f"'{where}' must be a string.", param=where)
        for name, value in part.items():
            if name not in ("type", "image_url", "detail") and value is not None:
                notes.ignore(f"{path}.{str(name)[:MAX_SHOWN_CHARS]}")
        data = image_bytes(given, where)
        self._pixels.append(self._builder.images.read(data, how, where))
        return {"type": "image"}

    def _input(self, path: str) -> ImageInput:
        card = self._builder.card
        if card.images is None:
            why = f": {card.no_images}" if card.no_images else ""
            raise UnsupportedParameterError(
                f"{path}.type", f" This model reads no images{why}. Send text."
            )
        if not can_read_images():
            raise UnsupportedParameterError(
                f"{path}.type", " The server cannot decode images: install weft[images] there."
            )
        return card.images

    def expand(self, rendered: str) -> str:
        """Put the tokens of every image where the template has written its mark.

        Raises:
            TemplateError: it has not written one mark for each image.
        """
        how = self._builder.card.images
        assert how is not None
        texts = {token.token_id: token.content for token in self._builder.tokenizer.added_tokens}
        try:
            begin, each, end = (texts[i] for i in (how.begin_id, how.token_id, how.end_id))
        except KeyError:
            raise TemplateError("The tokeniser of this model has no tokens for images.") from None
        if rendered.count(begin) != len(self._pixels):
            raise TemplateError(
                "The chat template does not show the images of this conversation to the model.",
                param="messages",
            )
        return rendered.replace(begin, f"\n\n{begin}{each * how.tokens}{end}\n\n")

    def place(self, ids: Seq[int]) -> tuple[PromptImage, ...]:
        """The images with the tokens that stand for them.

        Raises:
            TemplateError: the prompt has not so many tokens for each.
        """
        if not self._pixels:
            return ()
        how = self._builder.card.images
        assert how is not None
        at = [place for place, token in enumerate(ids) if token == how.token_id]
        starts = at[:: how.tokens]
        whole = [start + i for start in starts for i in range(how.tokens)]
        if at != whole or len(starts) != len(self._pixels):
            raise TemplateError("The prompt has no place for its images.", param="messages")
        return tuple(
            PromptImage.of(start, how.tokens, how.height, how.width, pixels)
            for start, pixels in zip(starts, self._pixels, strict=True)
        )
