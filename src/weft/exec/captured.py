"""The forward passes and sampling of steps, captured for each size and replayed.

The forward pass of decodes alone is captured apart from the one of any rows, and each with lanes
for piggybacked rows apart from the one without. Overlapped sub-batches are captured for pairs of
sizes, those that wait for the host as well as the halves of a step. Where rows are leased, a decode
step that follows one of the same rows is a graph of its own. Other sizes run the same functions
uncaptured.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

from weft.core.errors import InvariantError, OutOfMemoryError
from weft.core.memory import is_out_of_memory
from weft.exec.device import Device, Replay
from weft.exec.functions import StepFunctions
from weft.exec.halves_pass import HalvesPass
from weft.exec.host_prompts import PromptPiece
from weft.exec.overlap_pass import AwaitLayer
from weft.exec.step_layout import Layout, larger_sizes, sample_layout
from weft.exec.step_packer import PackedStep, StepPacker


@dataclass(frozen=True)
class Captured:
    """A captured function, and the hash of the layout whose places it reads."""

    replay: Replay
    layout_hash: int


@contextmanager
def _room_for(size: int) -> Iterator[None]:
    """Raise OutOfMemoryError that names the size of a step if memory runs out within."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"There is not enough memory beside weights and KV for steps of {size} tokens; "
            "lower max_num_batched_tokens or kv_memory."
        ) from error


class CapturedSteps:
    """The functions of steps, captured where their sizes are.

    Attributes:
        forward_graphs: by size, tokens of a row at the most, and whether there are lanes.
        sample_graphs: by size, and whether there are lanes.
        leased_graphs: by size, with the hashes of both layouts.
        overlapped_graphs: by the sizes of two sub-batches, and tokens of a row at the most.
    """

    def __init__(self, functions: StepFunctions, packer: StepPacker, device: Device) -> None:
        self._functions, self._packer, self._device = functions, packer, device
        self.forward_graphs: dict[tuple[int, int | None, bool], Captured] = {}
        self.sample_graphs: dict[tuple[int, bool], Captured] = {}
        self.leased_graphs: dict[int, tuple[Replay, tuple[int, int]]] = {}
        self.overlapped_graphs: dict[tuple[tuple[int, ...], int | None], Captured] = {}

    def __len__(self) -> int:
        each = self.forward_graphs, self.sample_graphs, self.leased_graphs, self.overlapped_graphs
        return sum(len(graphs) for graphs in each)

    def upload(self, packed: PackedStep) -> None:
        """Order the upload of a packed step."""
        source = self._packer.buffers[packed.buffer][packed.words]
        self._device.upload(source, self._functions.uploaded[packed.words])

    def forward(self, packed: PackedStep) -> int:
        """Order the forward pass; return the hash of the layout by which it reads."""
        layout, most, carries = packed.forward, packed.max_query_len, packed.carries
        graph = self.forward_graphs.get((layout.size, most, carries))
        self._functions.wake_host()
        if graph is None:
            self._functions.forward(layout, most, carries)
            return self._packer.layout.forward_hash(layout, carries)
        graph.replay()
        return graph.layout_hash

    def overlapped(
        self, packed: PackedStep, prompts: Seq[Seq[PromptPiece]], wait: AwaitLayer | None
    ) -> int:
        """Order the forward pass of overlapped sub-batches; return the hash of their layout.

        Args:
            prompts, wait: for a pass that was not captured; see ``StepFunctions.overlapped``.
        """
        of = packed.overlapped
        assert of is not None
        graph = self.overlapped_graphs.get((of.sizes, of.max_query_len)) if of.captured else None
        if graph is None:
            hosts = [bool(batch.rows) for batch in of.hosted]
            self._functions.overlapped(of.sizes, of.max_query_len, hosts, prompts, wait)
            return packed.forward.hash
        graph.replay()
        return graph.layout_hash

    def is_captured(self, packed: PackedStep) -> bool:
        """Whether all of a step of overlapped sub-batches is replayed."""
        of, sample = packed.overlapped, packed.sample
        return (
            of is not None
            and of.captured
            and (of.sizes, of.max_query_len) in self.overlapped_graphs
            and (sample is None or (sample.size, False) in self.sample_graphs)
        )

    def sample(self, packed: PackedStep) -> int:
        """Order sampling, if there is any; return the hash of its layout, else 0."""
        layout = packed.sample
        if layout is None:
            return 0
        graph = self.sample_graphs.get((layout.size, packed.carries))
        if graph is None:
            self._functions.sample(layout, packed.carries)
            return layout.hash
        graph.replay()
        return graph.layout_hash

    def go_on(self, packed: PackedStep) -> tuple[int, int]:
        """Order the step after the latest one; return the hashes of the layouts by which it reads.

        Args:
            packed: a decode step of the same rows.
        """
        graph, sample = self.leased_graphs.get(packed.forward.size), packed.sample
        self._functions.wake_host()
        if graph is not None:
            replay, read = graph
            replay()
            return read
        assert sample is not None
        self._functions.go_on(packed.forward, sample)
        return packed.forward.hash, sample.hash

    def prepare(self, captured: Seq[int], most_samples: int, *, leases: bool = False) -> None:
        """Capture the steps of some sizes; run larger ones once as warm-up.

        Their kernels compile, and the memory that they take is known to be there.

        Args:
            leases: whether rows may be leased.

        Raises:
            OutOfMemoryError: it is not.
        """
        for size in larger_sizes(self._packer.max_tokens, captured[-1]):
            with _room_for(size):
                layout, _ = self._pad(size)
                with self._device.work():
                    for carries in self._kinds:
                        self._functions.forward(layout, None, carries)
                self._run_halves(size)
        self._capture_pairs()
        for size in reversed(captured):
            with _room_for(size):
                self._capture(size, most_samples)
                if leases and size <= min(most_samples, self._packer.most_decodes):
                    self._capture_leased(size)

    def limit_attention(self, programs: int | None) -> None:
        """Have halves attend with so many programs at the most, None for any.

        Those that are captured are captured anew, with nothing in flight.

        Raises:
            InvariantError: steps have no halves.
            OutOfMemoryError: see ``prepare``.
        """
        halves = self._functions.overlap
        if not isinstance(halves, HalvesPass):
            raise InvariantError("steps without halves cannot be limited")
        self._device.synchronize()
        halves.programs = programs
        if self.overlapped_graphs:
            self.overlapped_graphs.clear()
            self._capture_pairs()

    def _run_halves(self, size: int) -> None:
        """Run a half of this size beside the largest captured one, if steps have halves."""
        if isinstance(self._functions.overlap, HalvesPass):
            sizes = size, max(1, self._packer.max_tokens - size)
            with self._device.work():
                self.upload(self._packer.pack_overlapped((), 0, sizes))
                self._functions.overlapped(sizes, None)
            self._device.synchronize()

    def _capture_pairs(self) -> None:
        """Capture overlapped sub-batches, largest first."""
        for sizes in reversed(self._pairs):
            with _room_for(sum(sizes)):
                self._capture_overlapped(sizes)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """The sizes of overlapped sub-batches, the largest of both last."""
        pairs = self._packer.pairs
        return [] if pairs is None else sorted(product(pairs.first, pairs.second), key=sum)

    def _capture_overlapped(self, sizes: tuple[int, int]) -> None:
        """Capture overlapped sub-batches of such sizes, while the buffer holds only padding."""
        with self._device.work():
            packed = self._packer.pack_overlapped((), 0, sizes)
            self.upload(packed)
        self._device.synchronize()
        for most in (None, 1) if max(sizes) <= self._packer.most_decodes else (None,):
            body = partial(self._functions.overlapped, sizes, most)
            graph = Captured(self._device.capture(body), packed.forward.hash)
            self.overlapped_graphs[sizes, most] = graph

    def _capture_leased(self, size: int) -> None:
        forward, sample = self._pad(size)
        replay = self._device.capture(partial(self._functions.go_on, forward, sample))
        self.leased_graphs[size] = replay, (forward.hash, sample.hash)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Whether steps have lanes: those with them first, as they are larger."""
        return (False,) if self._packer.layout.lanes is None else (True, False)

    def _pad(self, size: int) -> tuple[Layout, Layout]:
        """Upload a step of a size that is all padding; return the layouts of its parts."""
        forward, sampling = self._packer.forward_layout(size), sample_layout(size)
        with self._device.work():
            self.upload(self._packer.pack_padding(forward, sampling))
        self._device.synchronize()
        return forward, sampling

    def _capture(self, size: int, most_samples: int) -> None:
        """Capture the steps of one size, while the buffer holds one that is all padding."""
        forward, sampling = self._pad(size)
        device, functions, layout = self._device, self._functions, self._packer.layout
        for carries in self._kinds:
            for most in (None, 1) if size <= self._packer.most_decodes else (None,):
                body = partial(functions.forward, forward, most, carries)
                graph = Captured(device.capture(body), layout.forward_hash(forward, carries))
                self.forward_graphs[size, most, carries] = graph
            if size <= most_samples:
                body = partial(functions.sample, sampling, carries)
                graph = Captured(device.capture(body), sampling.hash)
                self.sample_graphs[size, carries] = graph
