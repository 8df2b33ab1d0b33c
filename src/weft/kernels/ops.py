"""The op table: one implementation per op, chosen once at start, shown by ``weft info``.

There is no fallback at call time: an op that the machine cannot run is a ``KernelUnavailable`` when
the table is built, with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from weft.kernels import float8, reference, reference_sampling, sampling
from weft.kernels.interface import Fused, OpTable
from weft.kernels.unavailable import KernelUnavailable

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_CHOICES = ("auto", "cpu", "triton", "reference")
WEIGHTED = ("linear", "logits", "embedding", "moe")
TUNED = ("linear", "logits", "moe", "paged_attention")  # the launches of other ops are fixed
# What ops compute in whatever the dtype of the model is.
OP_DTYPES = {
    "angles": "float32",
    "process_logits": "float32",
    "sample": "float32",
    "verify_drafts": "int64",
}


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    kernels: str = "auto",
    weights: Mapping[str, str] | None = None,
    tuning: str = "auto",
) -> OpTable:
    """Choose the implementation of every op for one device and dtype.

    Args:
        kernels: ``auto`` for the kernels of the device: ``cpu``, the native ones, or ``triton``;
            ``reference`` for plain torch in every op, which is slow and whose results may differ by
            the batch.
        weights: how the weights of an op are stored, where it is not in ``dtype``.
        tuning: where launches on a GPU come from: ``auto``, ``heuristic``, or a file.

    Raises:
        KernelUnavailable: the device, the dtype or the wished kernels cannot be served.
    """
    if dtype not in FLOAT_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise KernelUnavailable(f"no kernels compute in {dtype}; choose one of: {known}")
    if kernels not in KERNEL_CHOICES:
        known = ", ".join(KERNEL_CHOICES)
        raise KernelUnavailable(f"unknown kernels '{kernels}'; choose one of: {known}")
    if kernels == "reference":
        return _reference_ops(device, weights or {})
    if device.type == "cuda" or kernels == "triton":
        if kernels == "cpu" or device.type not in ("cuda", "cpu"):
            raise _no_kernel(kernels, device)
        return _triton_ops(device, str(dtype).removeprefix("torch."), weights or {}, tuning)
    if device.type != "cpu":
        raise _no_kernel(kernels, device)
    if dtype == torch.float16:
        raise KernelUnavailable(
            "no CPU kernels compute in float16; choose bfloat16 or float32, or set "
            "kernels='reference' (slow)"
        )
    return _native_ops(str(dtype).removeprefix("torch."), weights or {})


def _no_kernel(kernels: str, device: torch.device) -> KernelUnavailable:
    return KernelUnavailable(
        f"kernels='{kernels}' has no kernel for device '{device}'; "
        "run on the CPU or a CUDA device, or set kernels='reference' (slow)"
    )


def _reference_ops(device: torch.device, weights: Mapping[str, str]) -> OpTable:
    stored = {op: f"torch, {weights[op]} weights" if op in weights else "torch" for op in WEIGHTED}
    return OpTable(
        rms_norm=reference.rms_norm,
        rope=reference.rope,
        angles=reference.angles,
        act_mul=reference.act_mul,
        linear=reference.product,
        logits=reference.logits,
        embedding=reference.embedding,
        route=reference.route,
        moe=partial(reference.moe, linear=reference.product),
        paged_attention=reference.paged_attention,
        process_logits=sampling.process_logits,
        sample=reference_sampling.sample,
        verify_drafts=sampling.verify_drafts,
        pack=reference.keep,
        quantise=partial(float8.quantised, device=device),
        computes=float8.computes,
        widens=True,
        fused=None,
        batch_invariant=False,
        names={
            "rms_norm": "reference",
            "rope": "reference",
            "angles": "reference",
            "act_mul": "reference",
            "route": "torch",
            **stored,
            "paged_attention": "reference",
            "process_logits": "reference",
            "sample": "reference",
            "verify_drafts": "reference",
        },
    )


def _native_ops(dtype: str, weights: Mapping[str, str]) -> OpTable:
    try:
        from weft.kernels.cpu import attention, layer, matrix, sample, stack
    except ImportError as error:
        raise KernelUnavailable(
            "the native CPU kernels are not built; install weft with a C++ compiler "
            f"present, or set kernels='reference' (slow): {error}"
        ) from error
    stored = {op: f"cpu, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    return OpTable(
        rms_norm=stack.rms_norm,
        rope=reference.rope,
        angles=stack.angles,
        act_mul=reference.act_mul,
        linear=matrix.linear,
        logits=matrix.logits,
        embedding=matrix.embedding,
        route=reference.route,
        moe=partial(reference.moe, linear=matrix.linear),
        paged_attention=attention.paged_attention,
        process_logits=sampling.process_logits,
        sample=sample.sample,
        verify_drafts=sampling.verify_drafts,
        pack=matrix.pack,
        quantise=matrix.quantised,
        computes=matrix.computes,
        widens=False,
        fused=Fused(layer.CpuLayer, stack.CpuStack, "all in one native call"),
        batch_invariant=True,
        names={
            "rms_norm": "cpu",
            "rope": "reference",
            "angles": "cpu",
            "act_mul": "reference",
            "route": "torch",
            **stored,
            "paged_attention": "cpu",
            "process_logits": "torch",
            "sample": "cpu",
            "verify_drafts": "torch",
        },
    )


def _triton_ops(
    device: torch.device, dtype: str, weights: Mapping[str, str], tuning: str
) -> OpTable:
    try:
        from weft.kernels.triton import (
            activation,
            attention,
            layer,
            matrix,
            moe,
            norm,
            process_logits,
            rope,
            route,
            sample,
            stack,
            tuned,
        )
        from weft.kernels.triton.launch import interpreted
    except ImportError as error:
        raise KernelUnavailable(
            f"the kernels for GPUs need Triton: {error}; install the triton package, or set "
            "kernels='reference' (slow)"
        ) from error
    if device.type == "cpu" and not interpreted():
        raise KernelUnavailable(
            "kernels='triton' has no kernel for device 'cpu' but in Triton's interpreter, for "
            "tests: set TRITON_INTERPRET=1 before the start, or kernels='cpu'"
        )
    found = tuned.find_tuning(tuning, device)
    stored = {op: f"triton, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    return OpTable(
        rms_norm=norm.rms_norm,
        rope=rope.rope,
        angles=rope.angles,
        act_mul=activation.act_mul,
        linear=matrix.linear,
        logits=matrix.logits,
        embedding=matrix.embedding,
        route=route.route,
        moe=moe.moe,
        paged_attention=partial(attention.paged_attention, tuning=found),
        process_logits=process_logits.process_logits,
        sample=sample.sample,
        verify_drafts=process_logits.verify_drafts,
        pack=partial(matrix.pack, tuning=found),
        quantise=partial(matrix.quantised, device=device, tuning=found),
        computes=matrix.computes,
        widens=False,
        fused=Fused(
            layer.TritonLayer,
            partial(stack.TritonStack, tuning=found),
            "all of fused kernels",
            True,
            True,
        ),
        batch_invariant=False,
        names={
            "rms_norm": "triton",
            "rope": "triton",
            "angles": "triton",
            "act_mul": "triton",
            "route": "triton",
            **stored,
            "paged_attention": "triton",
            "process_logits": "triton",
            "sample": "triton",
            "verify_drafts": "triton",
        },
        tuning=found,
    )
