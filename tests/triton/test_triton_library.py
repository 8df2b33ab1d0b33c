"""Products that torch computes on a GPU: how it is called, for a GPU that is not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from weights import Fixed, make, without_ties

from weft.kernels import float8
from weft.kernels.float8 import E4M3
from weft.kernels.ops import _triton_ops
from weft.kernels.triton import device, matrix
from weft.kernels.triton.matrix import TritonMatrix
from weft.models.layout import storage_of

LAUNCH = Fixed(32, 32, 32, 1)
BF16 = torch.bfloat16
ROWS = 70  # more than ``matrix.SMALL``


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Tensor | None,
    out_dtype: torch.dtype, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """``torch._scaled_mm`` with a scale a row: what CUDA's demands of its arguments, in float32.

    The conditions are those of ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu.
    """
    rows, inputs = a.shape
    outputs = b.shape[1]
    assert a.dtype == b.dtype == E4M3
    assert b.shape[0] == inputs
    assert inputs % 16 == outputs % 16 == 0
    assert a.stride(1) == 1 < a.stride(0), "a must be row-major"
    assert b.stride(0) == 1 < b.stride(1), "b must be column-major"
    assert a.stride(0) % 16 == b.stride(1) % 16 == 0, "rows must be aligned"
    for scale, shape in ((scale_a, (rows, 1)), (scale_b, (1, outputs))):
        assert scale.dtype == torch.float32
        assert scale.shape == shape, "scales must be one a row and one a column"
        assert scale.is_contiguous()
    assert out_dtype == BF16, "scales of rows are for bfloat16 alone"
    assert isinstance(use_fast_accum, bool)
    product = (a.float() @ b.float()) * scale_a * scale_b
    if bias is not None:
        assert bias.dtype == BF16, "the bias must be bfloat16"
        assert bias.shape == (outputs,)
        assert bias.is_contiguous()
        product += bias.float()
    return product.to(out_dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have products computed as on a Hopper GPU; how ``_scaled_mm`` is to add is noted."""
    noted = []

    def note(*args, **kwargs) -> Tensor:
        noted.append("fast" if kwargs["use_fast_accum"] else "full")
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", note)
    monkeypatch.setattr(matrix, "capability", lambda _: (9, 0))
    monkeypatch.setattr(matrix, "_rowwise", lambda _: True)
    return noted


def operands(inputs: str, strided: bool) -> tuple[Tensor, TritonMatrix, Tensor, Tensor]:
    torch.manual_seed(0)
    made = make("fp8", torch.randn(48, 64) * torch.rand(48, 1), LAUNCH)
    if inputs == "tensor":
        made.inputs = torch.tensor(0.02)
    x = without_ties(torch.randn(ROWS, 64 * 3).to(BF16), 64)
    x = x[:, 64:128] if strided else x[:, :64].contiguous()
    return x, made, torch.randn(48).to(BF16), torch.randn(ROWS, 48).to(BF16)


@pytest.mark.parametrize(("inputs", "strided"), [("token", True), ("tensor", False)])
@pytest.mark.parametrize("added", ["", "bias", "residual", "bias residual"])
def test_fp8_products(calls, inputs: str, strided: bool, added: str) -> None:
    x, made, bias, residual = operands(inputs, strided)
    bias, residual = (
        part if name in added else None for name, part in (("bias", bias), ("residual", residual))
    )
    found = matrix.linear(x, made, bias, None if residual is None else residual.clone())
    assert calls == ["full"]
    truth = float8.rounded_inputs(x, made.inputs).double() @ made.dequantize().double().T
    truth = truth + (0 if bias is None else bias) + (0 if residual is None else residual)
    assert found.dtype == BF16
    # The sum is rounded before the residual is added, and with it.
    torch.testing.assert_close(found.double(), truth, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(
    ("capability", "wish", "fast"),
    [
        ((8, 9), "auto", False),
        ((9, 0), "auto", False),
        ((9, 0), "fast", True),
        ((10, 0), "auto", True),
        ((10, 0), "full", False),
        ((12, 0), "auto", False),
    ],
)
def test_sums_keep_their_bits_unless_asked_otherwise(
    calls, monkeypatch, capability, wish, fast
) -> None:
    """The least exact sums are those of Ada and Hopper; the rows of Triton's kernels lose none."""
    monkeypatch.setattr(device, "capability", lambda _: capability)
    ops = _triton_ops(str(torch.get_default_device()), "bfloat16", {"linear": "fp8"}, "auto", wish)
    assert ops.names["linear"].endswith("fast sums") == fast
    made = ops.quantise("down", (48, 64), "bfloat16", storage_of("down", "fp8", 64))
    experts = ops.quantise("expert_down", (2, 48, 64), "bfloat16", storage_of("down", "fp8", 64))
    x = torch.randn(ROWS, 64).to(BF16)
    for weight in (made, experts[1]):
        matrix.linear(x, weight, None)
    assert calls == ["fast" if fast else "full"] * 2


def test_what_torch_cannot_compute_stays_here(calls) -> None:
    """Results in float32, few rows, and sizes that are no multiple of 16."""
    x, made, _, _ = operands("token", strided=False)
    matrix.logits(x, made)
    matrix.linear(x[:64], made, None)
    matrix.linear(x, make("fp8", torch.randn(40, 64), LAUNCH), None)
    matrix.linear(x[:, :40], make("fp8", torch.randn(48, 40), LAUNCH), None)
    matrix.linear(x, make("fp8 weights", torch.randn(48, 64), LAUNCH), None)
    assert not calls


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda a: a.t().contiguous().t()),
        (1, lambda b: b.contiguous()),
        (2, lambda scale: scale.flatten()),
        (2, lambda scale: scale.to(BF16)),
        (3, lambda scale: scale.t()),
        (3, lambda scale: scale[:, :40]),
    ],
)
def test_torch_refuses_what_the_stand_in_refuses(place: int, change) -> None:
    """So that the stand-in's conditions are torch's own, of tensors on a GPU as it checks them."""
    arguments = [
        torch.zeros(130, 64, dtype=torch.uint8).view(E4M3),
        torch.zeros(48, 64, dtype=torch.uint8).view(E4M3).t(),
        torch.ones(130, 1),
        torch.ones(1, 48),
    ]
    kinds = {"bias": torch.zeros(48, dtype=BF16), "out_dtype": BF16}
    assert scaled_mm(*arguments, **kinds).shape == (130, 48)
    arguments[place] = change(arguments[place])
    with pytest.raises(AssertionError):
        scaled_mm(*arguments, **kinds)
    with FakeTensorMode(allow_non_fake_inputs=False):
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            for x in arguments
        ]
        with pytest.raises((RuntimeError, ValueError)):
            torch._scaled_mm(*fakes, out_dtype=BF16)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("stored", "dtype", "out"),
    [
        (E4M3, BF16, BF16),
        (BF16, BF16, BF16),
        (BF16, BF16, torch.float32),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_torch_takes_the_calls_for_a_gpu(stored, dtype, out, added: bool) -> None:
    """By its own checks of tensors on a GPU, which has no part in it, without their numbers."""
    with FakeTensorMode(), torch.device("cuda"):
        fp8 = stored == E4M3
        values = torch.empty(48, 64, dtype=stored)
        made = TritonMatrix(values, torch.empty(48) if fp8 else None, dtype, LAUNCH)
        rows = torch.empty_strided((130, 64), (192, 1), dtype=stored)
        bias = torch.empty(48, dtype=dtype) if added else None
        residual = torch.empty(130, 48, dtype=dtype) if added else None
        scales = torch.empty(130) if fp8 else None
        found = matrix._library(rows, scales, made, bias, residual, out)
    assert (found.shape, found.dtype, found.device.type) == ((130, 48), out, "cuda")


@pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"), reason="CPUs may lack products with a scale a row"
)
def test_the_stand_in_computes_what_torch_does() -> None:
    with torch.device("cpu"):
        x, made, bias, _ = operands("token", strided=True)
    rounded = float8.round_rows(x)
    arguments = (rounded.codes, made.values.t(), rounded.scales[:, None], made.scales[None])
    found = torch._scaled_mm(*arguments, bias=bias, out_dtype=BF16)
    wanted = scaled_mm(*arguments, bias=bias, out_dtype=BF16)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7)
