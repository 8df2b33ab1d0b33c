"""Matrices of integers: the very bits of their definition, on every instruction set."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.arrays import dtype_name, to_numpy, to_torch
from weft.kernels.cpu import attention
from weft.kernels.cpu.matrix import CpuMatrix, gather, linear
from weft.kernels.quantized import TABLE, Quantized
from weft.kernels.storage import ACTIVATION_GROUP, NEST, Storage

KINDS = [(8, None), (8, 32), (4, 32), (4, 64), (4, 128), (4, None)]
SHAPES = [(1, 1), (64, 64), (97, 33), (130, 257), (256, 704), (66, 1000)]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn(
    seed: int, outputs: int, inputs: int, bits: int, group: int | None, *, zeros: bool
) -> Quantized:
    draws = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group) if group else 1
    scales = torch.rand(outputs, groups, generator=draws) * 0.02 + 1e-3
    values = torch.randint(0, 2**bits, (outputs, inputs), generator=draws, dtype=torch.uint8)
    values[0] = 0
    values[-1] = 2**bits - 1  # the ends of the range, together with the largest activations
    scales = scales if group is None else scales.to([torch.bfloat16, torch.float16][seed % 2])
    found = torch.randint(0, 2**bits, (outputs, groups), generator=draws, dtype=torch.uint8)
    numbers = to_numpy(values), to_numpy(scales), to_numpy(found) if zeros else None
    return Quantized(*numbers, bits, group or inputs)


def drawn_as(seed: int, outputs: int, inputs: int, kind: str) -> Quantized:
    """A weight in one of the forms of GGUF files: ``bits group`` and letters or a table."""
    bits, group, *marks = kind.split()
    width, size = int(bits), int(group)
    draws = np.random.default_rng(seed)
    groups = -(-inputs // size)
    nested, table = "n" in marks, next((mark for mark in marks if len(mark) > 1), None)
    coarse = (outputs, -(-inputs // NEST) if nested else groups)
    found = Quantized(
        draws.integers(0, 2**width, (outputs, inputs), np.uint8),
        draws.uniform(1e-3, 2e-2, coarse).astype(np.float16),
        None,
        width,
        size,
        table=table,
    )
    if nested:
        found = replace(found, steps=draws.integers(-128, 128, (outputs, groups), np.int8))
    if "m" in marks:
        found = replace(found, minimums=draws.uniform(-1e-2, 2e-2, coarse).astype(np.float16))
        if nested:
            steps = draws.integers(-128, 128, (outputs, groups), np.int8)
            found = replace(found, minimum_steps=steps)
    return found


FORMS = ["4 32 m", "4 32 n m", "4 16 n", "4 16 n m", "5 32", "5 32 n m", "6 16 n", "6 16 n m"]
FORMS += ["4 32 nl4", "4 32 n nl4", "4 32 mx4", "8 16 m", "6 128", "5 64 m"]


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize("kind", FORMS)
def test_every_bit_of_gguf_forms_is_that_of_the_definition(isa, kind) -> None:
    attention.use_isa(isa)
    sample = random.Random(f"{isa}{kind}")
    for seed, outputs in enumerate((1, 64, 97, 130)):
        inputs = NEST * sample.randint(1, 3) if "n" in kind.split() else sample.randint(129, 500)
        weight = drawn_as(seed, outputs, inputs, kind)
        dtype = [torch.bfloat16, torch.float32][seed % 2]
        matrix = packed(weight, dtype, gated=outputs % 2 == 0)
        assert matrix.nbytes == weight.storage.nbytes(outputs, inputs, gated=outputs % 2 == 0)
        rows = gather(matrix, torch.arange(outputs))
        assert torch.equal(rows, to_torch(weight.dequantize()).to(dtype))
        x = draw(3, sample.randint(1, 40), inputs, dtype=dtype)
        x[0, : inputs // 2] = 0.0
        x[-1] = 3.0 if seed % 2 else -3.0
        whole = linear(x, matrix, None, "float32")
        assert torch.equal(whole, truth_of(x, weight))
        for count in range(1, min(len(x), 8)):
            assert torch.equal(linear(x[-count:], matrix, None, "float32"), whole[-count:])


def truth_of(x: Tensor, weight: Quantized) -> Tensor:
    """The definition for every form: sums of integers, scaled, less the minimums."""
    values = weight.values
    if weight.table is not None:
        values = np.array(TABLE[weight.table], np.uint8)[values]
    codes = to_torch(values).double() - weight.centre
    scales = to_torch(np.asarray(weight.scales, np.float32))
    lows, minimums = torch.zeros_like(codes), torch.zeros_like(scales)
    if weight.minimums is not None:
        minimums = to_torch(np.asarray(weight.minimums, np.float32))
        lows = lows + 1
    if weight.steps is not None:
        codes = codes * fine(weight.steps, weight.group)
    if weight.minimum_steps is not None:
        lows = lows * fine(weight.minimum_steps, weight.group)
    span = NEST if weight.steps is not None else weight.group
    sums = torch.zeros(len(x), weight.shape[0])
    for number, start in enumerate(range(0, weight.shape[1], span)):
        part, here = x[:, start : start + span].float(), slice(start, start + span)
        most = part.abs().amax(1, keepdim=True).clamp(min=1e-20)
        rounded = (part * (torch.tensor(127.0) / most)).round().nan_to_num(0.0).double()
        factor = most / 127.0
        more = (rounded @ codes[:, here].T).float() * (scales[:, number] * factor)
        low = (rounded @ lows[:, here].T).float()
        if weight.steps is not None:
            more = more - low * (minimums[:, number] * factor)
        else:
            more = more - minimums[:, number] * (low * factor)
        sums = sums + more
    return sums


def fine(steps: Any, group: int) -> Tensor:
    """The steps of groups, [N, G], for each of their inputs."""
    return to_torch(steps).double().repeat_interleave(group, 1)


def test_forms_that_cannot_be_packed_are_refused() -> None:
    nested = Storage(4, 32, "float16", nested=True)
    for kind, why in (
        (Storage(5, 48), "groups of multiples of 32"),
        (replace(nested, group=96), "groups that divide 256"),
        (nested, "of 256 inputs each"),
    ):
        with pytest.raises(ValueError, match=why):
            CpuMatrix.quantised((64, 192), "float32", kind)
    both = Storage(4, 32, zeros=True, minimums=True)
    with pytest.raises(ValueError, match="zeros, minimums"):
        CpuMatrix.quantised((64, 192), "float32", both)
    matrix = CpuMatrix.quantised((64, 192), "float32", Storage(6, 32))
    with pytest.raises(ValueError, match="int8 or int4"):
        matrix.write(0, draw(1, 64, 192))


def packed(weight: Quantized, dtype: torch.dtype, *, gated: bool = False) -> CpuMatrix:
    matrix = CpuMatrix.quantised(weight.shape, dtype_name(dtype), weight.storage, gated=gated)
    matrix.write(0, weight)
    return matrix


def truth(x: Tensor, weight: Quantized) -> Tensor:
    """The definition: integers summed by group, the groups' sums scaled and added in order."""
    whole = weight.storage.group is None
    group = ACTIVATION_GROUP if whole else weight.group
    zeros = 2 ** (weight.bits - 1) if weight.zeros is None else to_torch(weight.zeros).long()
    if not isinstance(zeros, int):
        zeros = zeros.repeat_interleave(weight.group, 1)[:, : weight.shape[1]]
    q, scales = to_torch(weight.values).long() - zeros, to_torch(weight.scales)
    sums = torch.zeros(len(x), weight.shape[0])
    for number, start in enumerate(range(0, weight.shape[1], group)):
        part = x[:, start : start + group].float()
        most = part.abs().amax(1, keepdim=True).clamp(min=1e-20)
        rounded = (part * (torch.tensor(127.0) / most)).round().nan_to_num(0.0)
        dots = rounded.double() @ q[:, start : start + group].double().T
        scale = torch.ones(()) if whole else scales[:, number].float()
        sums = sums + dots.float() * (scale * (most / 127.0))
    return sums * scales[:, 0] if whole else sums


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_every_bit_is_that_of_the_definition(isa, bits, group) -> None:
    attention.use_isa(isa)
    sample = random.Random(f"{isa}{bits}{group}")
    fuzzed = [(sample.randint(1, 300), sample.randint(1, 300)) for _ in range(8)]
    for seed, (outputs, inputs) in enumerate([*SHAPES, *fuzzed]):
        gated = outputs % 2 == 0 and seed % 3 > 0
        weight = drawn(seed, outputs, inputs, bits, group, zeros=seed % 4 > 1)
        dtype = [torch.bfloat16, torch.float32][seed % 2]
        matrix = packed(weight, dtype, gated=gated)
        assert matrix.nbytes == weight.storage.nbytes(outputs, inputs, gated=gated)
        assert torch.equal(
            gather(matrix, torch.arange(outputs)), to_torch(weight.dequantize()).to(dtype)
        )
        x, bias = draw(3, sample.randint(1, 40), inputs, dtype=dtype), draw(4, outputs).to(dtype)
        x[0, : inputs // 2] = 0.0
        x[-1] = 3.0 if seed % 3 else -3.0
        found = linear(x, matrix, bias, "float32")
        assert torch.equal(found, truth(x, weight) + bias.float())


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_rounded_activations_stay_near(bits, group) -> None:
    weight, x = drawn(1, 200, 1024, bits, group, zeros=False), draw(2, 30, 1024)
    found, exact = linear(x, packed(weight, x.dtype), None), x @ to_torch(weight.dequantize()).T
    assert 0 < (found - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("isa", attention.isas())
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 64)])
def test_a_row_depends_on_no_other_nor_on_threads(isa, bits, group) -> None:
    attention.use_isa(isa)
    matrix = packed(drawn(1, 1000, 450, bits, group, zeros=True), torch.bfloat16)
    x = draw(3, 200, 450, dtype=torch.bfloat16)
    attention.set_threads(1)
    whole = linear(x, matrix, None)
    attention.set_threads(2)
    for rows in (*range(1, 14), 95, 96, 97, 199, 200):
        for start in {0, 1, 200 - rows} - {201 - rows}:
            part = linear(x[start : start + rows], matrix, None)
            assert torch.equal(part, whole[start : start + rows])
    assert linear(x[:0], matrix, None).shape == (0, 1000)


def test_what_is_not_finite_stays_in_its_row() -> None:
    matrix, x = packed(drawn(1, 70, 300, 8, None, zeros=False), torch.float32), draw(2, 9, 300)
    whole = linear(x, matrix, None)
    x[4, 7], x[6, 299] = float("nan"), float("inf")
    found = linear(x, matrix, None)
    bad = torch.tensor([4, 6])
    assert found[bad].isnan().all()
    good = torch.tensor([i for i in range(9) if i not in (4, 6)])
    assert torch.equal(found[good], whole[good])


STORAGES = [Storage(8, None), Storage(4, 32), Storage(4, 64), Storage(4, 128)]


@pytest.mark.parametrize("storage", STORAGES)
def test_rounding_weights(storage) -> None:
    """Alike on every instruction set and in any parts; within what the steps allow."""
    weight = draw(5, 130, 300)
    weight[3] = 0.0
    found = []
    for isa in attention.isas():
        attention.use_isa(isa)
        matrix = CpuMatrix.quantised(weight.shape, "float32", storage)
        for first, last in ((100, 130), (0, 7), (7, 100)):
            matrix.write(first, weight[first:last])
        found.append(gather(matrix, torch.arange(130)))
    for other in found[1:]:
        assert torch.equal(found[0], other)
    group = storage.group or 300
    for start in range(0, 300, group):
        part, near = weight[:, start : start + group], found[0][:, start : start + group]
        most = part.abs().amax(1, keepdim=True).clamp(min=1e-20)
        if storage.bits == 8:
            assert ((part - near).abs() <= most / 254 * 1.001).all()
        else:
            plain = (part / (most / 7)).round() * (most / 7)
            assert (part - near).norm() < (part - plain).norm()
    assert (found[0][3] == 0).all()


def test_rows_that_do_not_fit_are_refused() -> None:
    matrix = CpuMatrix.quantised((8, 32), "float32", Storage(8, None))
    with pytest.raises(ValueError, match="do not fit"):
        matrix.write(7, torch.zeros(2, 32))
    with pytest.raises(ValueError, match="groups of"):
        CpuMatrix.quantised((8, 32), "float32", Storage(4, 24))
