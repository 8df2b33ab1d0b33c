"""The process that decodes images, isolated with limits.

    python -m weft.images.decode_process SOCKET PARENT

`weft.images.reader` starts it. What an image would need is known from its header before any pixel
is decoded; decoders of a few formats only run, within a budget of time and memory.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from weft.text.isolated_process import Reply, answer_requests, budget, failed

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NAMED = "PNG, JPEG, WebP, GIF or BMP"
MOST_PIXELS = 40 * 10**6
MOST_RATIO = 200  # of the longer side to the shorter one
CPU_S = 5.0
# Of an image in its own mode, in red, green and blue, and of what resizing holds between passes.
MOST_BYTES = 12 * MOST_PIXELS
BYTES_PER_INPUT_BYTE = 4


def main() -> None:
    """Answer requests until the parent is gone."""
    Image.MAX_IMAGE_PIXELS = None  # what is too large is refused here, with its size
    answer_requests("weft-images", answer)


def answer(request: dict[str, Any], num_bytes: int) -> Reply:
    """Return the ``pixels`` of an ``image`` at a ``height`` and ``width``, all bytes in base64."""
    with budget(CPU_S, MOST_BYTES + BYTES_PER_INPUT_BYTE * num_bytes):
        try:
            data = base64.b64decode(request["image"])
            return _decode(data, (request["width"], request["height"]), request["resample"])
        except MemoryError:
            return failed("memory", "")
        except UnidentifiedImageError:
            return failed("refused", f"it is not an image in {NAMED}")
        except Exception as error:  # a decoder can fail in any way
            return failed("refused", f"it cannot be read ({str(error) or type(error).__name__})")


def _decode(data: bytes, size: tuple[int, int], resample: int) -> Reply:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > MOST_PIXELS:
            return failed(
                "refused",
                f"it has {width} x {height} pixels, more than {MOST_PIXELS // 10**6} million",
            )
        if max(width, height) > MOST_RATIO * min(width, height):
            why = f"it has {width} x {height} pixels; a side may be {MOST_RATIO} times the other"
            return failed("refused", why)
        if image.format != "MPO" and getattr(image, "is_animated", False):
            return failed("refused", "it is animated; send one picture")
        # As transformers reads images: turned as the camera was held, in red, green and blue.
        upright = ImageOps.exif_transpose(image).convert("RGB")
        resized = upright.resize(size, Image.Resampling(resample))
        return {"pixels": base64.b64encode(resized.tobytes()).decode()}


if __name__ == "__main__":
    main()
