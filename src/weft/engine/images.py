"""Images: which engines read them, and the thread that turns them into what prompts read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from weft.core.config import EngineConfig
from weft.core.errors import ParameterError
from weft.core.images import PromptImage
from weft.core.types import Request
from weft.engine.devices import is_cpu
from weft.kernels.arrays import Array
from weft.kernels.interface import OpTable
from weft.models.layout import DTYPE_BYTES
from weft.models.spec import ModelSpec

if TYPE_CHECKING:
    from weft.engine.model import Model
    from weft.models.siglip import SiglipTower

KEPT_BYTES = 128 * 2**20  # of encoded images


def why_no_images(config: EngineConfig, spec: ModelSpec, ops: OpTable, device: str) -> str:
    """Why an engine reads no images; empty where it does, or the model has no tower for them."""
    if spec.vision is None:
        return spec.no_vision
    if not config.images:
        return "the server was started with images set to false"
    if not is_cpu(device):
        return "there are no kernels for images on GPUs yet; set device to cpu"
    if ops.names["paged_attention"] != "cpu":
        return "only the native kernels read images; set kernels to cpu"
    wanted = {
        "tensor_parallel to 1": config.tensor_parallel > 1,
        "pipeline_parallel to 1": config.pipeline_parallel > 1,
        "scheduler to slo or fcfs": config.attends_on_host,
    }
    for what, is_set in wanted.items():
        if is_set:
            return f"images are not read with these settings yet; set {what}"
    least = spec.vision.tokens + config.max_num_seqs
    if config.max_num_batched_tokens < least:
        return (
            f"an image has {spec.vision.tokens} tokens, which are computed in one step beside one "
            f"of each other sequence; set max_num_batched_tokens to {least}, or max_num_seqs lower"
        )
    return ""


def tower_bytes(
    config: EngineConfig, spec: ModelSpec, dtype: str, ops: OpTable, device: str
) -> int:
    """Memory of the tower's weights; 0 where no images are read."""
    if spec.vision is None or why_no_images(config, spec, ops, device):
        return 0
    return spec.vision.parameters * DTYPE_BYTES[dtype]


def load_encoder(model: Model) -> ImageEncoder | None:
    """Load the tower of a model; None where no images are read.

    Raises:
        CheckpointError: a tensor of it is missing, misshapen or unreadable.
    """
    if model.spec.vision is None or model.no_images:
        return None
    from weft.models.siglip import load_siglip

    return ImageEncoder(load_siglip(model.source, model.spec.vision, model.dtype, model.ops))


class ImageEncoder:
    """Encodes the images of requests on a thread of its own, each content once while it is kept."""

    def __init__(self, tower: SiglipTower) -> None:
        self._tower = tower
        self._asked: SimpleQueue[tuple[Request, Future[Request]] | None] = SimpleQueue()
        self._kept: OrderedDict[bytes, Array] = OrderedDict()
        self._bytes = 0
        self.encoded = 0  # images, since the start
        # Nobody waits at the end of the process for an image that nobody reads.
        threading.Thread(target=self._work, name="weft-images", daemon=True).start()

    def encode(self, request: Request) -> Future[Request]:
        """Return the request with its images encoded, in time."""
        future: Future[Request] = Future()
        self._asked.put((request, future))
        return future

    def close(self) -> None:
        """End the thread after what is asked already. May be called twice."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            request, future = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._encode_all(request))
            except BaseException as error:
                future.set_exception(error)

    def _encode_all(self, request: Request) -> Request:
        images = tuple(
            replace(image, pixels=b"", rows=self._rows_of(image)) for image in request.images
        )
        return replace(request, images=images)

    def _rows_of(self, image: PromptImage) -> Array:
        found = self._kept.get(image.digest)
        if found is not None:
            self._kept.move_to_end(image.digest)
            return found
        wanted = self._tower.spec.input
        if (image.height, image.width, image.count) != (wanted.height, wanted.width, wanted.tokens):
            raise ParameterError("An image does not have the size that the model takes.")
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        rows = self._tower.encode(pixels)  # [count, C]
        self.encoded += 1
        self._kept[image.digest] = rows
        self._bytes += rows.nbytes
        while self._bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
        return rows
