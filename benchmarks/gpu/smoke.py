"""Whether the GPU computes what it should: products, attention, sampling, captured steps.

Each check says how far the kernels are from a plain computation of the same numbers.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from figures import figure, note
from shapes import random_decoder, shape

from weft.exec.device import CudaDevice, Device, HostDevice
from weft.kernels import reference
from weft.kernels.float8 import rounded_inputs
from weft.kernels.interface import AttentionMetadata
from weft.kernels.kv_storage import KV_DTYPES, row_size, write_rows
from weft.kernels.ops import select_ops
from weft.kernels.reference_sampling import sample as reference_sample
from weft.kernels.triton.attention import paged_attention
from weft.kernels.triton.fp8 import round_rows
from weft.kernels.triton.latent import heads
from weft.kernels.triton.matrix import linear
from weft.kernels.triton.moe import moe
from weft.kernels.triton.sample import sample
from weft.kernels.triton.tuned import find_tuning, random_matrix
from weft.kernels.triton.tuned_attention import Rows
from weft.kernels.tuning import LaunchShape

# Codes, inputs of a scale, and how activations are multiplied: as they are, or rounded in groups.
CODED = ("int4/128 in", "int8/64 in", "e2m1/32 in", "e4m3/128 to")
EXPERTS = ("", "int4/64 in ", "e2m1/32 in ")  # of mixtures: floats and codes
CLOSE = 0.02  # of the largest number of a result: bfloat16 keeps 8 bits, FP8 products sum in 14
BLOCK = 16
SETTINGS = [(0.0, 0.0, 1.0, 0.0), (0.8, 50.0, 0.9, 0.0), (1.0, 0.0, 0.95, 0.02)]


def apart(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Tell how far results are from what they should be. Raises AssertionError: too far."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    error = float((found - wanted).abs().max() / wanted.abs().max())
    figure(f"{name}: error", error, "of the largest", CLOSE, "less")
    if not error <= CLOSE:
        raise AssertionError(f"{name} is {error:.3g} off")


def check_products(device: torch.device, *, tiny: bool) -> None:
    """FP8 products by Triton (few rows) and by the library (many), with a bias."""
    outputs, inputs = (64, 96) if tiny else (4608, 3584)
    tuning = find_tuning("auto", device)
    kind = LaunchShape("gemm", "fp8 to bfloat16", (outputs, inputs))
    matrix = random_matrix(kind, device, tuning)
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16)
    for rows in (1, 33, 300):
        given = round_rows(torch.randn(rows, inputs, device=device, dtype=torch.bfloat16))
        plain = given.codes.float() * given.scales.unsqueeze(1)
        wanted = plain @ matrix.dequantize().t() + bias.float()
        apart(f"FP8 product, {rows} rows", linear(given, matrix, bias), wanted)


def check_codes(device: torch.device, *, tiny: bool) -> None:
    """Products with codes, which are unpacked by instructions that no interpreter knows."""
    outputs, inputs = (64, 128) if tiny else (4608, 3584)
    tuning = find_tuning("auto", device)
    for kind in CODED:
        shape = LaunchShape("gemm", f"{kind} bfloat16", (outputs, inputs))
        matrix = random_matrix(shape, device, tuning)
        for rows in (1, 33, 300):
            given = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
            group = matrix.form.group if matrix.form.rounds else None
            seen = rounded_inputs(given, "group" if group else "float", group)
            wanted = seen @ matrix.dequantize().t()
            apart(f"{kind.split()[0]} product, {rows} rows", linear(given, matrix, None), wanted)


def check_experts(device: torch.device, *, tiny: bool) -> None:
    """Mixtures of experts, some of which no token has chosen."""
    count, inner, hidden = (6, 32, 64) if tiny else (32, 768, 2048)
    tuning = find_tuning("auto", device)
    for kind in EXPERTS:
        gate_up, down = (
            random_matrix(LaunchShape(op, f"{kind}bfloat16", (count, *sizes)), device, tuning)
            for op, sizes in (
                ("moe_gate_up", (2 * inner, hidden)),
                ("moe_down", (hidden, inner)),
            )
        )
        for rows in (1, 40):
            x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
            shares, experts = torch.rand(rows, count - 2, device=device).topk(2)
            numbers = (each.dequantize() for each in (gate_up, down))
            wanted = reference.moe(x.float(), shares, experts, *numbers, "silu")
            found = moe(x, shares, experts, gate_up, down, "silu")
            apart(f"experts in {kind.split('/')[0] or 'bf16'}, {rows} rows", found, wanted)


def check_attention(device: torch.device, *, tiny: bool) -> None:
    """Decodes and a prompt over KV of each type."""
    kv_heads, group, dim = (2, 2, 16) if tiny else (4, 7, 128)
    cases = (Rows(3, 1, 40), Rows(1, 40, 40)) if tiny else (Rows(5, 1, 999), Rows(1, 300, 300))
    for name, kv in {"bf16": torch.bfloat16, **KV_DTYPES}.items():
        for rows in cases:
            q = torch.randn(rows.count * rows.queries, kv_heads * group, dim, dtype=torch.bfloat16)
            keys, values = (random_cache(rows, kv_heads, dim, kv) for _ in range(2))
            batch = batch_of(rows, torch.device("cpu"))
            how: dict[str, Any] = {"scale": dim**-0.5, "window": None, "softcap": None}
            wanted = reference.paged_attention(q, None, None, keys, values, batch, **how)
            caches = (each.view(torch.uint8).to(device).view(kv) for each in (keys, values))
            tuning = find_tuning("auto", device)
            given = q.to(device), None, None, *caches, batch_of(rows, device)
            found = paged_attention(*given, **how, tuning=tuning)
            apart(f"attention, {name} KV, {rows.queries} new tokens a row", found, wanted)


def check_latents(device: torch.device, *, tiny: bool) -> None:
    """Latent attention over one row of all heads, in two types, and a product by head."""
    count, rotated, rank = (3, 8, 24) if tiny else (20, 64, 512)
    cases = (Rows(3, 1, 40), Rows(1, 40, 40)) if tiny else (Rows(5, 1, 999), Rows(1, 300, 300))
    how: dict[str, Any] = {"scale": (rotated + rank) ** -0.5, "window": None, "softcap": None}
    for name, kv in {"bf16": torch.bfloat16, "int8": torch.int8}.items():
        for rows in cases:
            tokens = rows.count * rows.queries
            q = torch.randn(tokens, count, rotated + rank, dtype=torch.bfloat16)
            cache = random_cache(rows, 1, rotated + rank, kv)
            plain = batch_of(rows, torch.device("cpu"))
            wanted = reference.paged_attention(q, None, None, cache, cache, plain, **how)
            moved = cache.view(torch.uint8).to(device).view(kv)
            given = q.to(device), None, None, moved, moved, batch_of(rows, device)
            tuning = find_tuning("auto", device)
            found = paged_attention(*given, **how, value_dim=rank, tuning=tuning)
            words = f"latent attention, {name} KV, {rows.queries} new tokens a row"
            apart(words, found[..., rotated:], wanted[..., rotated:])
    weights = torch.randn(count, 2 * rotated, rank, device=device, dtype=torch.bfloat16)
    for tokens in (1, 40):
        x = torch.randn(tokens, count, rank + rotated, device=device, dtype=torch.bfloat16)
        x = x[..., rotated:]
        apart(f"product by head, {tokens} rows", heads(x, weights), reference.heads(x, weights))


def random_cache(rows: Rows, kv_heads: int, dim: int, kv: torch.dtype) -> torch.Tensor:
    """Keys or values of rows, in blocks one after another, on the host."""
    blocks = rows.count * -(-rows.context // BLOCK)
    cache = torch.zeros(blocks, kv_heads, BLOCK, row_size(kv, dim), dtype=kv)
    at = torch.arange(blocks * BLOCK)
    write_rows(cache, at // BLOCK, at % BLOCK, torch.randn(len(at), kv_heads, dim))
    return cache


def batch_of(rows: Rows, device: torch.device) -> AttentionMetadata:
    """Rows alike, whose blocks lie one after another."""
    count, width = rows.count, -(-rows.context // BLOCK)
    tables = torch.arange(count * width, dtype=torch.int32, device=device).view(count, width)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=device) * rows.queries
    slots = torch.zeros(count * rows.queries, dtype=torch.int64, device=device)
    lengths = torch.full((count,), rows.context, dtype=torch.int32, device=device)
    most = 1 if rows.queries == 1 else None
    return AttentionMetadata(tables, bounds, lengths, slots, BLOCK, max_query_len=most)


def check_sampling(device: torch.device, *, tiny: bool) -> None:
    """Tokens of greedy and random rows, which must be those of the reference."""
    vocabulary, rows = (500 if tiny else 152_064), 6
    logits = 3 * torch.randn(rows, vocabulary)
    settings = torch.tensor((SETTINGS * rows)[:rows], dtype=torch.float64)
    counters, chosen = torch.arange(rows), []
    for place, choose in ((device, sample), (torch.device("cpu"), reference_sample)):
        tokens = torch.zeros(rows, dtype=torch.int64, device=place)
        finite = torch.zeros(rows, dtype=torch.bool, device=place)
        given = (each.to(place) for each in (logits.clone(), settings, counters, counters))
        choose(*given, tokens, finite)
        chosen.append(tokens.cpu())
    differ = int((chosen[0] != chosen[1]).sum())
    figure("sampling: tokens that differ from the reference", differ, "", 0, "less")
    if differ:
        raise AssertionError(f"{differ} of {rows} tokens differ")


def check_steps(device: torch.device, *, tiny: bool) -> None:
    """A tiny model whose captured steps must give the tokens of uncaptured ones."""
    from leases import Rows as DecodingRows
    from leases import uncaptured

    cuda, steps, batch = device.type == "cuda", 8 if tiny else 40, 4
    port: Device = CudaDevice("cuda:0") if cuda else HostDevice()
    ops = select_ops(str(port.where), "bfloat16", "auto" if cuda else "reference")
    with torch.inference_mode():
        spec = shape("tiny", 64)
        decoder = random_decoder(spec, torch.bfloat16, port.where, ops, "none")
    truth = uncaptured(decoder, port, batch, steps)
    port = CudaDevice("cuda:0") if cuda else HostDevice()
    rows = DecodingRows(decoder, port, batch, steps)
    rows.begin()
    found = rows.planned(steps)
    differ = int((torch.tensor(found) != torch.tensor(truth)).sum())
    figure("captured steps: tokens that differ from uncaptured ones", differ, "", 0, "less")
    rows.executor.close()
    if differ:
        raise AssertionError(f"{differ} tokens differ")


CHECKS: tuple[Callable[..., None], ...] = (
    check_products,
    check_codes,
    check_experts,
    check_attention,
    check_sampling,
    check_steps,
    check_latents,  # which compiles for long
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="checks whose names hold this, as attention")
    options = parser.parse_args()
    device, failed = torch.device(options.device), 0
    torch.manual_seed(0)
    for check in (each for each in CHECKS if options.only in each.__name__):
        try:
            with torch.inference_mode():
                check(device, tiny=options.device == "cpu")
        except Exception as error:  # the others say more about what is wrong
            traceback.print_exc()
            note(f"{check.__name__}: {type(error).__name__}: {str(error)[:300]}")
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
