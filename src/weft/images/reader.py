"""The client of the process that decodes images."""

from __future__ import annotations

import base64
from importlib.util import find_spec

from weft.core.errors import ImageError
from weft.core.images import ImageInput
from weft.text.isolated import Failure, IsolatedProcess

MOST_IMAGE_BYTES = 20 * 2**20
_COSTLY = {"time": "it takes too long to decode", "memory": "it needs too much memory to decode"}


def can_read_images() -> bool:
    """Whether Pillow is installed, an extra."""
    return find_spec("PIL") is not None


class ImageReader(IsolatedProcess):
    """The process that decodes images and brings them to the size that a model takes."""

    module = "weft.images.decode_process"
    work = "decodes images"

    def read(self, data: bytes, how: ImageInput, param: str) -> bytes:
        """Return rows of red, green and blue bytes.

        Args:
            param: where the request has the image, for errors.

        Raises:
            ImageError: it is no image of a known format, damaged, animated, too large, too narrow,
                or takes too much time or memory.
            RendererDeadError: the process cannot be started, or has ended for no known reason.
        """
        if len(data) > MOST_IMAGE_BYTES:
            raise ImageError(
                f"The image of '{param}' has {len(data)} bytes; {MOST_IMAGE_BYTES} are allowed.",
                param=param,
            )
        request = {
            "image": base64.b64encode(data).decode(),
            "height": how.height,
            "width": how.width,
            "resample": how.resample,
        }
        with self._own_lock():
            reply = self._ask(request)
        if isinstance(reply, Failure):
            why = _COSTLY.get(reply.kind, reply.detail)
            raise ImageError(f"The image of '{param}' was refused: {why}.", param=param)
        return base64.b64decode(reply["pixels"])
