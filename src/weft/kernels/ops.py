"""The op table: one implementation per op, chosen once at start, shown by ``weft info``.

There is no fallback at call time: an op that the machine cannot run is a ``KernelUnavailable`` when
the table is built, with a sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from weft.kernels import reference_advance, reference_lanes
from weft.kernels.interface import Fused, OpTable, PackedMatrices, WholeNorm
from weft.kernels.lanes import LaneOps
from weft.kernels.sampling import penalise
from weft.kernels.unavailable import KernelUnavailable

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
KERNEL_CHOICES = ("auto", "cpu", "triton", "reference")
GPU_KINDS = ("cuda", "meta")  # types of devices
WEIGHTED = ("linear", "logits", "embedding", "moe")
TUNED = ("linear", "logits", "moe", "paged_attention")  # the launches of other ops are fixed
# What ops compute in whatever the dtype of the model is.
OP_DTYPES = {
    "angles": "float32",
    "softcap": "float32",
    "process_logits": "float32",
    "penalise": "float32",
    "sample": "float32",
    "log_softmax": "float32",
    "top_k": "float32",
    "verify_drafts": "int64",
    "advance": "int64",
}

LANES_ON_TENSORS = LaneOps(
    reference_lanes.choose_lanes,
    reference_lanes.join_lanes,
    reference_lanes.keep_lanes,
    reference_lanes.send_lanes,
    reference_lanes.wait_for_lanes,
    reference_lanes.receive_lanes,
)


def select_ops(
    device: str,
    dtype: str,
    kernels: str = "auto",
    weights: Mapping[str, str] | None = None,
    tuning: str = "auto",
    fp8_accumulation: str = "auto",
) -> OpTable:
    """Choose the implementation of every op for one device and dtype.

    Args:
        device: ``cpu``, or a CUDA device as torch names it, such as ``cuda:0``; ``meta`` for one
            that is absent, see ``triton.device``.
        dtype: the name of that of weights and activations.
        kernels: ``auto`` for the kernels of the device: ``cpu``, the native ones, or ``triton``;
            ``reference`` for plain torch in every op, which is slow and whose results may differ by
            the batch.
        weights: how the weights of an op are stored, where it is not in ``dtype``.
        tuning: where launches on a GPU come from: ``auto``, ``heuristic``, or a file.
        fp8_accumulation: of products by torch on a GPU: ``auto``, ``fast`` or ``full``.

    Raises:
        KernelUnavailable: the device, the dtype, the wished kernels or the instruction set of
            WEFT_ISA cannot be served.
    """
    if dtype not in FLOAT_DTYPES:
        known = ", ".join(FLOAT_DTYPES)
        raise KernelUnavailable(f"no kernels compute in {dtype}; choose one of: {known}")
    if kernels not in KERNEL_CHOICES:
        known = ", ".join(KERNEL_CHOICES)
        raise KernelUnavailable(f"unknown kernels '{kernels}'; choose one of: {known}")
    if kernels == "reference":
        return _reference_ops(device, weights or {})
    kind = device.partition(":")[0]
    if kind in GPU_KINDS or kernels == "triton":
        if kernels == "cpu" or kind not in (*GPU_KINDS, "cpu"):
            raise _no_kernel(kernels, device)
        return _triton_ops(device, dtype, weights or {}, tuning, fp8_accumulation)
    if kind != "cpu":
        raise _no_kernel(kernels, device)
    if dtype == "float16":
        raise KernelUnavailable(
            "no CPU kernels compute in float16; choose bfloat16 or float32, or set "
            "kernels='reference' (slow)"
        )
    return _native_ops(dtype, weights or {})


def _no_kernel(kernels: str, device: str) -> KernelUnavailable:
    return KernelUnavailable(
        f"kernels='{kernels}' has no kernel for device '{device}'; "
        "run on the CPU or a CUDA device, or set kernels='reference' (slow)"
    )


def _reference_ops(device: str, weights: Mapping[str, str]) -> OpTable:
    torch = _torch("kernels='reference'")
    from weft.kernels import (
        float8,
        reference,
        reference_conv,
        reference_delta,
        reference_mamba2,
        reference_sampling,
    )

    where = torch.device(device)
    stored = {op: f"torch, {weights[op]} weights" if op in weights else "torch" for op in WEIGHTED}
    return OpTable(
        rms_norm=reference.rms_norm,
        whole_norm=WholeNorm(reference.square_sums, reference.norm_by_sums),
        rope=reference.rope,
        angles=reference.angles,
        act_mul=reference.act_mul,
        gate=reference.gate,
        linear=reference.product,
        heads=reference.heads,
        logits=reference.logits,
        softcap=reference.softcap,
        embedding=reference.embedding,
        route=reference.route,
        moe=partial(reference.moe, linear=reference.product),
        paged_attention=reference.paged_attention,
        process_logits=reference_sampling.process_logits,
        penalise=penalise,
        sample=reference_sampling.sample,
        log_softmax=reference_sampling.log_softmax,
        top_k=reference_sampling.top_k,
        verify_drafts=reference_sampling.verify_drafts,
        advance=reference_advance.advance,
        lanes=LANES_ON_TENSORS,
        pack=partial(reference.upload, device=where),
        quantise=partial(float8.quantised, device=where),
        computes=float8.computes,
        fused=None,
        batch_invariant=False,
        names={
            "rms_norm": "reference",
            "rope": "reference",
            "angles": "reference",
            "act_mul": "reference",
            "gate": "reference",
            "softcap": "torch",
            "route": "torch",
            **stored,
            "paged_attention": "reference",
            "process_logits": "reference",
            "penalise": "torch",
            "sample": "reference",
            "log_softmax": "torch",
            "top_k": "torch",
            "verify_drafts": "reference",
            "advance": "reference",
        },
        delta=reference_delta.ReferenceDelta,
        conv=reference_conv.ReferenceConv,
        mamba2=reference_mamba2.ReferenceMamba2,
    )


def _torch(purpose: str) -> Any:
    """Import torch, which is an extra.

    Raises:
        KernelUnavailable: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise KernelUnavailable(
            f"{purpose} needs torch, which is not installed ({error}): pip install 'weft[cuda]'"
        ) from error
    return torch


def _on_tensors(name: str) -> Any:
    """An op of ``reference_sampling``, which executors of a device alone call, on tensors."""

    def call(*tensors: Any) -> None:
        from weft.kernels import reference_sampling

        getattr(reference_sampling, name)(*tensors)

    return call


def _native_ops(dtype: str, weights: Mapping[str, str]) -> OpTable:
    try:
        from weft.kernels.cpu import (
            attention,
            conv,
            delta,
            experts,
            isa,
            layer,
            logprobs,
            mamba2,
            matrix,
            rows,
            sample,
            stack,
        )
    except ImportError as error:
        raise KernelUnavailable(
            "the native CPU kernels are not built; install weft with a C++ compiler "
            f"present, or set kernels='reference' (slow): {error}"
        ) from error
    stored = {op: f"cpu, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    return OpTable(
        rms_norm=rows.rms_norm,
        whole_norm=WholeNorm(rows.square_sums, rows.norm_by_sums),
        rope=rows.rope,
        angles=rows.angles,
        act_mul=rows.act_mul,
        gate=rows.gate,
        linear=matrix.linear,
        heads=matrix.heads,
        logits=matrix.logits,
        softcap=rows.softcap,
        embedding=matrix.embedding,
        route=experts.route,
        moe=experts.moe,
        paged_attention=attention.paged_attention,
        process_logits=_on_tensors("process_logits"),
        penalise=sample.penalise,
        sample=sample.sample,
        log_softmax=logprobs.log_softmax,
        top_k=logprobs.top_k,
        verify_drafts=_on_tensors("verify_drafts"),
        advance=reference_advance.advance,
        lanes=LANES_ON_TENSORS,
        pack=matrix.pack,
        quantise=matrix.quantised,
        computes=matrix.computes,
        packed=PackedMatrices(matrix.layout, matrix.CpuMatrix.mapped),
        fused=Fused(
            layer.CpuLayer,
            stack.CpuStack,
            "all in one native call",
            every_layer=True,
            mixes=True,
        ),
        batch_invariant=True,
        names={
            "rms_norm": "cpu",
            "rope": "cpu",
            "angles": "cpu",
            "act_mul": "cpu",
            "gate": "cpu",
            "softcap": "cpu",
            "route": "cpu",
            **stored,
            "paged_attention": "cpu",
            "process_logits": "numpy",
            "penalise": "cpu",
            "sample": "cpu",
            "log_softmax": "numpy",
            "top_k": "numpy",
            "verify_drafts": "python",
            "advance": "python",
        },
        isa=isa.chosen_isa(),
        delta=delta.CpuDelta,
        conv=conv.CpuConv,
        mamba2=mamba2.CpuMamba2,
    )


def _triton_ops(
    device: str,
    dtype: str,
    weights: Mapping[str, str],
    tuning: str,
    fp8_accumulation: str = "auto",
) -> OpTable:
    torch = _torch("a GPU" if device != "cpu" else "kernels='triton'")
    try:
        from weft.kernels import reference_sampling
        from weft.kernels.triton import (
            activation,
            advance,
            conv,
            cudnn_prefill,
            delta,
            hosted,
            lanes,
            latent,
            layer,
            mamba2,
            matrix,
            moe,
            norm,
            process_logits,
            rope,
            route,
            sample,
            stack,
            tuned,
            whole_norm,
        )
        from weft.kernels.triton.device import fast_sums
        from weft.kernels.triton.launch import interpreted
    except ImportError as error:
        raise KernelUnavailable(
            f"the kernels for GPUs need Triton: {error}; install the triton package, or set "
            "kernels='reference' (slow)"
        ) from error
    where = torch.device(device)
    if where.type == "cpu" and not interpreted():
        raise KernelUnavailable(
            "kernels='triton' has no kernel for device 'cpu' but in Triton's interpreter, for "
            "tests: set TRITON_INTERPRET=1 before the start, or kernels='cpu'"
        )
    found = tuned.find_tuning(tuning, where)
    stored = {op: f"triton, {weights.get(op, dtype)} weights" for op in WEIGHTED}
    fast = fast_sums(fp8_accumulation, where)
    for op in ("linear", "logits") if fast else ():
        stored[op] += ", fast sums" * ("fp8" in weights.get(op, ""))
    return OpTable(
        rms_norm=norm.rms_norm,
        whole_norm=WholeNorm(whole_norm.square_sums, whole_norm.norm_by_sums),
        rope=rope.rope,
        angles=rope.angles,
        act_mul=activation.act_mul,
        gate=activation.gate,
        linear=matrix.linear,
        heads=latent.heads,
        logits=matrix.logits,
        softcap=activation.softcap,
        embedding=matrix.embedding,
        route=route.route,
        moe=moe.moe,
        paged_attention=cudnn_prefill.attention_by(found),
        process_logits=process_logits.process_logits,
        penalise=penalise,
        sample=sample.sample,
        log_softmax=reference_sampling.log_softmax,
        top_k=reference_sampling.top_k,
        verify_drafts=process_logits.verify_drafts,
        advance=advance.advance,
        lanes=LaneOps(
            lanes.choose_lanes,
            lanes.join_lanes,
            lanes.keep_lanes,
            lanes.send_lanes,
            lanes.wait_for_lanes,
            lanes.receive_lanes,
        ),
        pack=partial(matrix.pack, device=where, tuning=found),
        quantise=partial(matrix.quantised, device=where, tuning=found, fast_sums=fast),
        computes=matrix.computes,
        fused=Fused(
            layer.TritonLayer,
            partial(stack.TritonStack, tuning=found),
            "all of fused kernels",
            padded=True,
            hosted=True,
        ),
        batch_invariant=False,
        names={
            "rms_norm": "triton",
            "rope": "triton",
            "angles": "triton",
            "act_mul": "triton",
            "gate": "triton",
            "softcap": "triton",
            "route": "triton",
            **stored,
            "paged_attention": "triton",
            "process_logits": "triton",
            "penalise": "torch",
            "sample": "triton",
            "log_softmax": "torch",
            "top_k": "torch",
            "verify_drafts": "triton",
            "advance": "triton",
        },
        tuning=found,
        delta=delta.TritonDelta,
        conv=conv.TritonConv,
        mamba2=mamba2.TritonMamba2,
        await_answer=hosted.await_answer,
    )
