"""What a decode step launches, reads, writes and multiplies: counted from shapes, without a GPU.

``python benchmarks/gpu/cost_sheet.py --model qwen2.5-7b --quantize fp8 --batch 1 64`` runs the host
code of a whole step, from the ids in the uploaded buffer to the chosen tokens, on tensors that have
shapes and no memory. Launches of Triton and of torch are counted instead of made. It pretends an
H100, as launches follow from a device's multiprocessors.

Bytes are those of the arrays that a kernel has to read and write once each; caches hold what is
read twice. Operations are those of products, attention included. Greedy choice is assumed, and
that tokens choose experts alike. Weights are floats, rounded as ``quantize`` does, or stored as in
checkpoints (``STORED``). A kernel that ``ROLES`` does not name is an error: whoever adds a kernel
says here what it reads and writes.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from weft.kernels.triton import device as gpu
from weft.kernels.triton import launch

H100 = {"capability": (9, 0), "processors": 132, "shared_bytes": 232_448}
for _name, _fact in H100.items():  # before any kernel's module takes the functions
    setattr(gpu, _name, lambda _, fact=_fact: fact)

from weft.kernels.triton import stack  # noqa: E402, F401 - before what is pretended

launch.interpreted = lambda: True  # to ``select_ops``: its kernels may be called on a CPU

from shapes import CONFIGS, shape  # noqa: E402

from weft.exec.device import HostDevice, tensor_memory  # noqa: E402
from weft.exec.functions import StepFunctions  # noqa: E402
from weft.exec.input_batch import MOST_EDITS, InputBatch  # noqa: E402
from weft.exec.step_layout import sample_layout  # noqa: E402
from weft.exec.step_packer import StepPacker  # noqa: E402
from weft.exec.store import KVStore  # noqa: E402
from weft.kernels.arrays import dtype_name  # noqa: E402
from weft.kernels.interface import OpTable  # noqa: E402
from weft.kernels.ops import select_ops  # noqa: E402
from weft.kernels.sampling import RowState  # noqa: E402
from weft.kernels.unavailable import KernelUnavailable  # noqa: E402
from weft.models.decoder import Decoder  # noqa: E402
from weft.models.layout import parameters, storage_of, stored_as  # noqa: E402
from weft.models.spec import ModelSpec  # noqa: E402

WHERE = torch.device("cpu")  # or torch wants a driver for what it makes of numbers
BLOCK = 16
QUANTIZE = ("none", "fp8", "fp8-head", "int8", "int4")
STORED: dict[str, dict[str, Any]] = {  # formats of checkpoints, as their configs say
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "fp8-blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},  # of experts
}

# Of each kernel the arguments that it reads and those that it writes, each once. ``*``: what it
# takes of the argument depends on numbers; ``Counter`` has how much. ``?``: it reads the argument
# if the constant behind it says so, a number being a bit of FLAGS.
ROLES = {
    "gemm": ("x w factors scale bias residual", "out"),
    "gated_gemm": ("x w factors scale bias", "out scales"),
    "add_parts": ("parts row_scale scale bias residual", "out"),
    "_add_norm": ("x row_scale_of_x scale_of_x bias_of_x residual post weight", "total out scales"),
    "_rms_norm": ("x weight", "out"),
    "coded_gemm": ("x w row_scales?ROUNDED scale zero?ZEROS bias?4 residual?8", "out"),
    "_round_groups": ("x", "codes scales"),
    "_gather_rows": ("ids w* scale* zero*?ZEROS", "out"),
    "_rotate": ("x row_scale scale_of_x bias weight cos sin slot_mapping", "out k_cache* v_cache*"),
    "_act_mul": ("gate_up", "out"),
    "_act_mul_round": ("gate_up", "out scales"),
    "_round_rows": ("x", "codes scales"),
    "_embedding": ("ids table*", "out"),
    "_enter": ("ids in_flight* table* weight", "total out scales"),
    "_angles": ("positions frequencies", "cos sin"),
    "list_kernel": ("query_start seq_lens", "items*"),
    "decode_kernel": (
        "q keys* values* tables* items* partial_sums* partial_stats*",
        "out partial_sums* partial_stats*",
    ),
    "_latent_rows": (
        "x* row_scale scale_of_x bias cos sin row_norm query_norm slot_mapping",
        "cache* queries query_scales",
    ),
    "_heads": ("x* row_scale scale_of_x bias weights cos sin", "out*"),
    "_route": ("scores row_scale scale bias", "shares experts"),
    "_blocks": ("starts", "experts firsts"),
    "_grouped": ("x w* row_scale scale* share order starts experts firsts", "out"),
    "grouped_codes": (
        "x w* row_scales?ROUNDED scale* zero*?ZEROS share order starts experts firsts",
        "out",
    ),
    "_combine": ("parts experts", "out"),
    "_softcap": ("logits", "out"),
    "_process_logits": ("changes", ""),
    "_largest": ("logits settings", "largest indices finite"),
    "_candidates": ("settings all_finite", ""),
    "_sample": ("largest indices all_finite settings", "tokens finite"),
    "_verify_drafts": ("tokens finite row", "results"),
}
PRODUCTS = ("mm", "addmm", "_scaled_mm")  # of torch


@dataclass
class Line:
    """All launches of one kernel in a step."""

    launches: int = 0
    read: int = 0
    written: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Case:
    """A decode step: ``batch`` rows that each know ``context`` tokens."""

    model: str
    quantize: str
    batch: int
    context: int
    kv_dtype: str = "bfloat16"


class Counter:
    """Counts what is launched while it is open."""

    def __init__(self, spec: ModelSpec, case: Case) -> None:
        self.lines: dict[str, Line] = defaultdict(Line)
        self._spec, self._case = spec, case
        self._splits = 1  # of a row, by the list of them that was made last

    def kernel(self, name: str, given: dict[str, Any]) -> None:
        """Count a launch of Triton."""
        if name not in ROLES:
            raise SystemExit(f"{name} is in no cost sheet: say in ROLES what it reads and writes")
        line = self.lines[name]
        line.launches += 1
        reads, writes = (names.split() for names in ROLES[name])
        line.read += sum(self._bytes(name, part, given) for part in reads)
        line.written += sum(self._bytes(name, part, given) for part in writes)
        line.operations += self._operations(name, given)

    def torch(self, name: str, given: Seq[Tensor], made: Seq[Tensor]) -> None:
        """Count a launch of torch."""
        line = self.lines[name if name in PRODUCTS else f"torch {name}"]
        line.launches += 1
        written = sum(map(size_of, made))
        gathers = name in ("index", "index_select")  # as much as it writes
        line.read += written if gathers else sum(map(size_of, given))
        line.written += written
        if name in PRODUCTS:
            rows = given[-2] if name == "addmm" else given[0]
            line.operations += 2 * made[0].numel() * rows.shape[1]

    def _bytes(self, kernel: str, part: str, given: dict[str, Any]) -> int:
        part, _, needs = part.partition("?")
        if needs and not (given["FLAGS"] & int(needs) if needs.isdigit() else given[needs]):
            return 0
        tensor = given.get(part.rstrip("*"))
        if not isinstance(tensor, Tensor):
            return 0
        if not part.endswith("*"):
            return size_of(tensor)
        batch, context = self._case.batch, self._case.context
        match kernel:
            case "_embedding" | "_enter":
                return batch * tensor[:1].numel() * tensor.itemsize
            case "_rotate":
                return batch * given["KV_HEADS"] * tensor.shape[-1] * tensor.itemsize
            case "_latent_rows":
                columns = tensor.shape[-1]
                if part == "x*":  # whole if queries have a latent, else the end of each row
                    row = given["RANK"] + 2 * given["R"]
                    columns = row if given["queries"] is None else given["N"]
                    columns *= given["SPLITS"]
                return batch * columns * tensor.itemsize
            case "_heads":  # of rows, that have other numbers beside those of heads
                heads, early = len(given["weights"]), 2 * given["R"]
                read = (given["K"] + early) * (given["SPLITS"] if given["SPLITS"] > 1 else 1)
                each = read if part == "x*" else given["OUT"] + early
                return batch * heads * each * tensor.itemsize
            case "_gather_rows":
                return batch * size_of(tensor) // given["N"]
            case "_grouped" | "grouped_codes":
                return round(size_of(tensor) * self._chosen(len(tensor)))
        if part in ("keys*", "values*"):
            seen = min(context, given["WINDOW"] or context)
            heads = tensor.shape[1]
            if part == "values*" and given["VALUE"] < given["DIM"]:
                return 0  # the ends of keys
            return batch * seen * heads * tensor.shape[-1] * tensor.itemsize
        if part == "tables*":
            return batch * -(-context // BLOCK) * tensor.itemsize
        if kernel == "list_kernel":
            seen = min(context, given["WINDOW"] or context)
            size = given["LEAST"]
            while size * given["SPLITS"] < seen:
                size *= 2
            self._splits = -(-seen // size)
        if part == "items*":
            return (1 + batch * self._splits) * tensor.shape[1] * tensor.itemsize
        # The sums of splits that a row has, of those that there is room for; one makes none.
        return size_of(tensor) * self._splits // given["SPLITS"] if self._splits > 1 else 0

    def _chosen(self, experts: int) -> float:
        """The share of the experts that some token of the batch has chosen."""
        assert self._spec.moe is not None
        return 1.0 - (1.0 - self._spec.moe.top_k / experts) ** self._case.batch

    def _operations(self, kernel: str, given: dict[str, Any]) -> int:
        if kernel in ("gemm", "gated_gemm", "coded_gemm"):
            halves = 2 if kernel == "gated_gemm" else 1
            return 2 * given["M"] * given["N"] * given["K"] * halves
        if kernel in ("_grouped", "grouped_codes"):
            halves = 2 if given["GATED"] else 1
            return 2 * len(given["order"]) * given["N"] * given["K"] * halves
        if kernel == "decode_kernel":
            seen = min(self._case.context, given["WINDOW"] or self._case.context)
            each = given["DIM"] + given["VALUE"]
            return 2 * self._case.batch * seen * given["HEADS"] * each
        if kernel == "_heads":
            return 2 * given["weights"].numel() * self._case.batch
        return 0


def size_of(tensor: Tensor) -> int:
    """Bytes of the numbers of a tensor, whatever memory is between them."""
    return tensor.numel() * tensor.itemsize


class _Operations(TorchDispatchMode):
    """Hands to a counter those that do more than make a view or take memory."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if func.namespace == "aten" and not view and "empty" not in name:
            found = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
            outputs = made if isinstance(made, tuple | list) else [made]
            tensors = ([x for x in some if isinstance(x, Tensor)] for some in (found, outputs))
            self._counter.torch(name, *tensors)
        return made


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Have launches counted instead of made."""

    def getitem(self: Any, _: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            named = dict(zip(self.arg_names, args, strict=False))
            counter.kernel(self.__name__, named | kwargs)

        return launch

    before = JITFunction.__getitem__
    JITFunction.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        with _Operations(counter):
            yield
    finally:
        JITFunction.__getitem__ = before  # type: ignore[method-assign]


def bare_decoder(spec: ModelSpec, quantize: str, ops: OpTable) -> Decoder:
    """A decoder whose weights are never written."""
    weights: dict[str, Any] = {}
    for parameter in parameters(spec, stacked_experts=True):
        tied = parameter.name == "embed" and spec.tied_embeddings
        name = "lm_head" if tied else parameter.name
        storage = storage_of(name, quantize, 64)
        if storage is None and spec.stored_weights is not None:
            storage = stored_as(spec.stored_weights, parameter)
        tensor = torch.empty(parameter.shape, dtype=torch.bfloat16, device=WHERE)
        if storage is None or ops.quantise is None:
            weights[parameter.name] = ops.pack(name, tensor)
        else:
            weights[parameter.name] = ops.quantise(
                name, tensor.shape, dtype_name(tensor.dtype), storage
            )
    return Decoder(spec, weights, ops)


def sheet(case: Case) -> dict[str, Line]:
    """Return what a step launches, by the names of kernels in the order of their first launch.

    Raises:
        SystemExit: the model is unknown, or a kernel is, or nothing is stored in that format.
    """
    spec = shape(case.model, case.context, stored=STORED.get(case.quantize))
    if case.quantize == "mxfp4" and spec.moe is None:
        raise SystemExit(
            f"{case.model} has no experts, and checkpoints store nothing else in mxfp4"
        )
    table = InputBatch(case.batch, case.context, [-(-case.context // BLOCK)] * len(spec.kv_groups))
    windows, sizes = [group.window for group in spec.kv_groups], (case.batch,)
    packer = StepPacker(table, BLOCK, windows, HostDevice(), case.batch, sizes, None, None)
    with catch_warnings(), FakeTensorMode(), torch.inference_mode():
        simplefilter("ignore")  # an address is asked for that is never used
        ops = select_ops("cpu", "bfloat16", "triton", tuning="heuristic")
        rounded = case.quantize if case.quantize in QUANTIZE else "none"
        decoder = bare_decoder(spec, rounded, ops)
        blocks = [case.batch * -(-case.context // BLOCK)] * len(spec.kv_groups)
        memory = tensor_memory(str(WHERE))
        store = KVStore(spec.kv_groups, blocks, BLOCK, case.kv_dtype, memory)
        state = RowState.empty(case.batch, MOST_EDITS, spec.vocab_size, WHERE)
        functions = StepFunctions(decoder, store, packer, HostDevice(), state)
        counter = Counter(spec, case)
        with counting(counter):
            functions.forward(packer.forward_layout(case.batch), 1)
            functions.sample(sample_layout(case.batch))
    return dict(counter.lines)


def printed(case: Case, lines: dict[str, Line]) -> None:
    """Print a sheet as a table."""
    print(f"{case}: launches, MB read, MB written, GFLOP of products")
    total = Line()
    for name, line in [*lines.items(), ("total", total)]:
        row = line.launches, line.read / 1e6, line.written / 1e6, line.operations / 1e9
        print("{:>24} {:6d} {:12.3f} {:12.3f} {:12.3f}".format(name, *row))
        for part in vars(line):
            setattr(total, part, getattr(total, part) + getattr(line, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", help=f"one of: {', '.join(CONFIGS)}")
    parser.add_argument("--quantize", default="fp8", choices=(*QUANTIZE, *STORED))
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("bfloat16", "int8", "fp8"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 128, 512])
    parser.add_argument("--context", type=int, default=272, help="tokens that each row knows")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each batch")
    options = parser.parse_args()
    if min(*options.batch, options.context) < 1:
        parser.error("--batch and --context must be at least 1")
    for batch in options.batch:
        given = options.model, options.quantize, batch, options.context, options.kv_dtype
        try:
            lines = sheet(Case(*given))
        except KernelUnavailable as error:
            parser.error(str(error))
        if options.json:
            found = {name: vars(line) for name, line in lines.items()}
            print(json.dumps({"batch": batch, "kernels": found}))
        else:
            printed(Case(*given), lines)


if __name__ == "__main__":
    main()
