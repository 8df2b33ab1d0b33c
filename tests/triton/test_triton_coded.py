"""Products with codes that have a scale for each group of inputs: against float64."""

from __future__ import annotations

import pytest
import torch
from coded_weights import KINDS, drawn, drawn_weight
from torch import Tensor
from weights import Fixed

import where
from weft.kernels import float8
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.cpu.matrix import gather as cpu_rows
from weft.kernels.storage import Storage
from weft.kernels.triton import coded, matrix, unpack
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.tuning import Heuristic

BY_RULE = Heuristic(1, 99 * 1024)


def expected(x: Tensor, made: CodedMatrix, truth: Tensor) -> Tensor:
    """The product in float64, of activations as the matrix sees them."""
    inputs = "group" if made.form.rounds else "float"
    return float8.rounded_inputs(x, inputs, made.form.group).double() @ truth.double().T


# Rows, outputs, inputs and a launch: blocks that end within tiles, groups, steps and parts.
SHAPES = [
    (1, 70, 300, Fixed(16, 32, 64, 1)),
    (17, 130, 600, Fixed(16, 128, 256, 3)),
    (3, 64, 512, Fixed(16, 64, 128, 2)),
]


HALF, FULL = torch.bfloat16, torch.float32


OTHERS = [(0, HALF), (2, HALF), (1, FULL)]


@pytest.mark.parametrize(
    ("kind", "number", "dtype"),
    [
        *((kind, 1, HALF) for kind in KINDS),
        *((kind, *OTHERS[i % 3]) for i, kind in enumerate(KINDS)),
    ],
)
def test_products_are_those_of_float64(kind, number, dtype) -> None:
    count, outputs, inputs, launch = SHAPES[number]
    torch.manual_seed(number)
    made, truth = drawn_weight(kind, (outputs, inputs), launch, dtype)
    assert torch.equal(made.dequantize(), truth)
    x = (torch.randn(count, inputs + 3) * 10 ** torch.randn(count, 1)).to(dtype)[:, :inputs]
    bias = torch.randn(outputs).to(dtype) if number else None
    residual = torch.randn(count, outputs + 2).to(dtype)[:, :outputs] if number == 1 else None
    wide = matrix.linear(x, made, bias, residual, torch.float32)
    product = expected(x, made, truth)
    product += 0 if bias is None else bias.double()
    product += 0 if residual is None else residual.double()
    rounding = 1e-4 if where.ON_GPU and made.form.rounds else 1e-5  # as in test_triton_matrix
    room = rounding * (x.double().abs() @ truth.double().abs().T) + 1e-6
    assert ((wide - product).abs() <= room).all()
    narrow = matrix.linear(x, made, bias, residual)
    assert narrow.dtype == dtype
    assert ((narrow - product).abs() <= 2**-7 * product.abs() + room).all()


@pytest.mark.parametrize("kind", KINDS)
def test_looked_up_rows_are_the_weights(kind) -> None:
    made, truth = drawn_weight(kind, (70, 300), BY_RULE, FULL)
    ids = torch.tensor([3, 69, 3, 64])
    assert torch.equal(matrix.embedding(ids, made), truth[ids])
    assert not coded.gather(made, torch.tensor([70, -1])).any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "row" not in kind])
def test_memory_is_foretold(kind) -> None:
    made, _ = drawn_weight(kind, (128, 256), BY_RULE)
    assert made.nbytes == drawn(kind, 128, 256).storage.nbytes(128, 256)


def run_assembly(text: str, word: int) -> list[int]:
    """What the instructions of such a text make of a word; PTX ISA, sections of each."""
    registers = {"$4": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in (line.strip(" ;") for line in text.splitlines() if "." in line):
        operation, _, rest = line.partition(" ")
        if operation == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        given = [value(name) for name in names]
        match operation:
            case "shr.u32":
                found = given[0] >> given[1]
            case "shl.b32":
                found = given[0] << given[1] & 0xFFFFFFFF
            case "and.b32":
                found = given[0] & given[1]
            case "prmt.b32":
                pair = (given[0] | given[1] << 32).to_bytes(8, "little")
                picks = [given[2] >> 4 * place & 15 for place in range(4)]
                chosen = [pair[pick] for pick in picks]  # from 8 on it would repeat a sign
                found = int.from_bytes(bytes(chosen), "little")
            case "lop3.b32":
                a, b, c, table = given
                found = sum(
                    (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
                    for i in range(32)
                )
            case _:
                raise AssertionError(operation)
        registers[target] = found
    return [registers[f"${place}"] for place in range(4)]


def test_assembly_unpacks_to_bfloat16() -> None:
    """Registers have two numbers each: of quarters one of each unit, of halves two neighbours."""
    codes = torch.tensor([[7, 0, 15, 3], [8, 1, 14, 12]])  # of two units, each quarter's
    word = sum(int(code) << 4 * place for place, code in enumerate(codes.flatten()))
    found = torch.tensor(run_assembly(unpack.QUARTERS_TO_BFLOAT16, word)).int()
    numbers = found.view(torch.bfloat16).reshape(4, 2).float()
    assert torch.equal(numbers, codes.T.float() + 128)
    pairs = torch.tensor([[7, 0], [15, 3], [8, 1], [14, 12]])  # of four bytes, low and high bits
    word = sum(int(low + 16 * high) << 8 * place for place, (low, high) in enumerate(pairs))
    found = torch.tensor(run_assembly(unpack.HALVES_TO_BFLOAT16, word)).int()
    numbers = found.view(torch.bfloat16).reshape(2, 4).float()
    assert torch.equal(numbers, pairs.T.float() + 128)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((table, -table))
    for shift in range(16):
        pairs = (torch.arange(8).reshape(4, 2) * 3 + shift) % 16
        word = sum(int(low + 16 * high) << 8 * place for place, (low, high) in enumerate(pairs))
        found = torch.tensor(run_assembly(unpack.E2M1_TO_BFLOAT16, word)).to(torch.uint32)
        numbers = found.view(torch.bfloat16).reshape(2, 4).float()
        assert torch.equal(numbers, table[pairs.T])


def test_parts_are_added_in_one_order() -> None:
    """Equal calls give equal bits, and a row's do not depend on the rows beside it."""
    made, _ = drawn_weight("int4 by 32, zeros", (70, 300), Fixed(16, 32, 64, 4), torch.bfloat16)
    x = torch.randn(12, 300).bfloat16()
    whole = matrix.logits(x, made)
    assert torch.equal(whole, matrix.logits(x, made))
    assert torch.equal(whole[3:4], matrix.logits(x[3:4], made))


def test_groups_of_activations_are_rounded_as_the_reference_does() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 200) * 10 ** torch.linspace(-8, 8, 5).unsqueeze(1)
    x[1, :64], x[2, 70], x[3, 199] = 0.0, float("inf"), float("nan")
    codes, scales = coded.round_groups(x, 64)
    truth = float8.round_groups(x, 64)
    assert torch.equal(codes.float(), truth.codes.float())
    torch.testing.assert_close(scales.T, truth.scales, rtol=1e-6, atol=0, equal_nan=True)
    assert scales.T.isnan().nonzero().tolist() == [[2, 1], [3, 3]]


@pytest.mark.parametrize("storage", [Storage(4, 32), Storage(4, 128), Storage(8, None)])
def test_floats_are_rounded_as_on_a_cpu(storage) -> None:
    """``quantize`` gives the same codes; a tie of two scales may fall to either side."""
    torch.manual_seed(5)
    weight = torch.randn(70, 256) * torch.rand(70, 1)
    weight[3], weight[4, :32] = 0.0, 0.0
    native = CpuMatrix.quantised((70, 256), "float32", storage)
    native.write(0, weight.cpu())
    made = matrix.quantised(
        "down", (70, 256), "float32", storage, device=weight.device, tuning=BY_RULE
    )
    made.write(0, weight)
    truth, found = cpu_rows(native, torch.arange(70).cpu()), made.dequantize().cpu()
    groups = (found - truth).abs().unflatten(1, (-1, storage.group or 256)).amax(-1)
    assert (groups > 1e-6).float().mean() < 0.01
    assert (found - truth).abs().max() < 0.2


def test_what_does_not_fit_is_refused() -> None:
    made, _ = drawn_weight("int4 by 32", (70, 64), BY_RULE, torch.bfloat16)
    with pytest.raises(ValueError, match=r"\[2, 31\].*does not fit"):
        matrix.linear(torch.randn(2, 31).bfloat16(), made, None)
    with pytest.raises(ValueError, match="do not fit"):
        made.write(65, torch.randn(6, 64))
    with pytest.raises(ValueError, match="finite"):
        made.write(0, torch.full((6, 64), float("inf")))
    block, _ = drawn_weight("e4m3 by 64", (70, 64), BY_RULE, torch.bfloat16)
    with pytest.raises(ValueError, match="no floats are rounded to e4m3"):
        block.write(0, torch.randn(6, 64))
    assert matrix.linear(torch.randn(0, 64).bfloat16(), made, None).shape == (0, 70)
