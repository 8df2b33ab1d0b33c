"""Decoding with routed experts on the host, beside all weights on the GPU, with random weights.

A few layers of the shape of Qwen3-30B-A3B. For each batch: the time of a step with all experts on
the GPU and with all on the host, how much of the latter the host computes, what an exchange adds in
a layer beside that and the step on the GPU, and the measured time over the predicted one
(``cost.expert_offload``).
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from functools import partial

import torch
from decode import Engine, new_device, steady_rate
from figures import figure
from shapes import random_decoder, shape

from weft.core.config import EngineConfig
from weft.core.resolved import Facts
from weft.cost.expert_offload import OffloadedModel, OffloadRates, predict_step
from weft.engine.devices import device_name
from weft.engine.host_experts import measured_rates, offloaded_model, sheet_of
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.host_part import HostPart
from weft.models.layout import storage_of, weight_bytes
from weft.models.spec import ModelSpec

GROUP, LENGTH = 64, 1024


def host_part(spec: ModelSpec, quantize: str) -> HostPart:
    """All experts of a model, computed by the CPU."""
    rounding = partial(storage_of, quantize=quantize, group=GROUP)
    layers = frozenset(number for number, layer in enumerate(spec.layers) if layer.moe)
    return HostPart(layers, select_ops("cpu", "bfloat16", "cpu"), rounding)


def model_of(config: EngineConfig, spec: ModelSpec, host: HostPart) -> OffloadedModel:
    """What a step reads and computes, as the prediction sees it."""
    there = weight_bytes(spec, "bfloat16", config.expert_rounding, GROUP, wanted=host.has)
    device = weight_bytes(spec, "bfloat16", wanted=lambda name: not host.has(name))
    facts = Facts(LENGTH, device, 0, (), host_weight_bytes=there)
    return offloaded_model(config, spec, "bfloat16", facts, host)


def measure(
    name: str,
    decoder: Decoder,
    kind: str,
    batches: list[int],
    output: int,
    predicted: tuple[OffloadedModel, OffloadRates] | None = None,
    alone: dict[int, float] | None = None,
) -> dict[int, float]:
    """Measure steps of each batch; return their seconds."""
    found = {}
    for batch in batches:
        engine = Engine(decoder, new_device(kind), batch, decoder.dtype)
        engine.run(batch, 4)  # whatever is only done once
        experts = engine.executor._functions.experts
        before = 0.0 if experts is None else experts.server.busy_s
        answers = 0 if experts is None else experts.server.answers
        seconds = batch / steady_rate(engine.run(batch, output), batch)
        found[batch] = seconds
        figure(f"{name}, batch {batch}: step", 1e3 * seconds, "ms")
        if experts is not None and predicted is not None and alone is not None:
            model, rates = predicted
            steps = (experts.server.answers - answers) / model.layers
            busy = (experts.server.busy_s - before) / steps
            figure(f"{name}, batch {batch}: the host computes", busy / seconds, "of it")
            added = (seconds - busy - alone[batch]) / model.layers
            figure(f"{name}, batch {batch}: added by an exchange", 1e6 * added, "us a layer")
            of_predicted = seconds / predict_step(model, rates, batch).seconds
            figure(f"{name}, batch {batch}: measured over predicted", of_predicted, "times")
        engine.executor.close()
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--quantize", nargs="+", default=["none", "int4"], help="on the host")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    where = new_device(options.device).where
    ops = select_ops(str(where), "bfloat16", "auto" if where.type == "cuda" else "reference")
    spec = shape(options.model, LENGTH)
    spec = replace(spec, layers=spec.layers[: options.layers])
    given = options.device, options.batches, options.output
    with torch.inference_mode():
        whole = random_decoder(spec, torch.bfloat16, where, ops, "none")
        name = f"{options.model}, {spec.num_layers} layers"
        alone = measure(f"{name} bf16 on the GPU", whole, *given)
        del whole
        for quantize in options.quantize:
            config = EngineConfig(host_experts="all", host_quantize=quantize, quantize_group=GROUP)
            host = host_part(spec, quantize)
            model = model_of(config, spec, host)
            rates = measured_rates(config, model.kind, sheet_of(device_name(str(where))))
            figure(f"{name}: the host reads", rates.host_read / 1e9, "GB/s")
            decoder = random_decoder(spec, torch.bfloat16, where, ops, "none", host)
            words = f"{name}, experts in {model.kind} on the host"
            measure(words, decoder, *given, (model, rates), alone)
            del decoder
            gc.collect()


if __name__ == "__main__":
    main()
