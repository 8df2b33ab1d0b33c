"""Models with recurrent layers on a CPU: what a state costs a token, and which prefixes hit.

    python benchmarks/hybrids.py --output benchmarks/results/hybrids.json

The first part times the native kernel of the gated delta rule in sizes of real models, as a stack
calls it, on one thread: all layers of a model take turns, as they do in its steps, and with each a
copy of as many bytes. Times are the processor's, as other work on the machine would count else.

The bound of a token is memory: it reads the state of all layers once and writes it once, 2 x 62.8
MiB of Qwen3.6-35B-A3B, as a copy of it does. At B bytes a second that takes 2 x 62.8 MiB / B: 6.6
ms at 20 GB/s, about what one core of the machine of the results moves. Arithmetic, 6 operations a
number, is a tenth of that.

The second part times the step of a random hybrid of 1.0 billion parameters as one native call, in
turns with its ops one by one. The third one plays the same conversations, several at once, to a
small random hybrid and to a model of attention alone that is as large, and compares the share of
prompt tokens that came from the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from experts import random_weights
from weft import LLM, SamplingParams
from weft.core.results import check_output, write_json
from weft.core.topology import this_machine
from weft.engine.machine import cpu_name
from weft.exec.attend import bind_stack, forward_recurrent
from weft.exec.states import StateStore
from weft.exec.store import KVStore, host_memory
from weft.kernels.arrays import address, view
from weft.kernels.cpu import attention
from weft.kernels.cpu.delta import CpuDelta
from weft.kernels.delta import DeltaParts, DeltaShape, LayerStates, StateBatch
from weft.kernels.interface import AttentionMetadata, OpTable
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.hub import resolve_model
from weft.models.layout import num_parameters, parameters
from weft.models.spec import ModelSpec
from weft.models.spec_reader import spec_from_config

# Recurrent layers, and their heads: those that the configurations of the models state.
MODELS = {
    "Qwen3.6-35B-A3B": (30, DeltaShape(16, 32, 128, 128, 4)),
    "Qwen3.6-27B": (48, DeltaShape(16, 48, 128, 128, 4)),
}
COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
HYBRID = COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# A slot is as large as the KV of 3,146 tokens, as in Qwen3.6-35B-A3B.
LARGE = HYBRID | {
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
ATTENTION = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
BILLION = HYBRID | {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
CONTEXT, BLOCK = 128, 16  # of the steps of that


def random_folder(config: dict, folder: Path) -> Path:
    """Write a random checkpoint of a configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draw, tensors = np.random.default_rng(0), {}
    for parameter in parameters(spec_from_config(config)):
        for piece in parameter.pieces:
            numbers = draw.standard_normal(piece.shape).astype(np.float32) * 0.1
            tensors[f"model.{piece.tensor}"] = numbers
    save_file(tensors, folder / "model.safetensors")
    return folder


def time_kernel(layers: int, shape: DeltaShape, rounds: int) -> dict[str, float]:
    """Seconds of a layer for a token, for a prompt of 512, and for a copy of a state's bytes.

    The layers take turns, and each time reads what it has written the time before.
    """
    draw = np.random.default_rng(0)

    def floats(*sizes: int) -> np.ndarray:
        return draw.standard_normal(sizes).astype(np.float32)

    parts = DeltaParts(
        shape,
        floats(shape.channels, shape.taps),
        floats(shape.value_heads),
        floats(shape.value_heads),
        floats(shape.value_dim),
        1e-6,
    )
    delta = CpuDelta(parts)
    slots = 2 * layers
    sizes = ((slots, *shape.matrix), (slots, *shape.kept_inputs))
    states = LayerStates(*(host_memory(size, "float32") for size in sizes))
    for numbers in states:
        numbers[:] = floats(*numbers.shape[1:])
    none = np.zeros((0, 2), np.int32)

    def run(tokens: int, turn: int) -> float:
        x = floats(tokens, shape.channels + shape.values)
        gates = floats(tokens, 2 * shape.value_heads)
        slots = [np.array([slot], np.int32) for slot in places(turn)]
        bounds, out = np.array([0, tokens], np.int32), np.empty((tokens, shape.values), np.float32)
        views = view("x", x), view("gates", gates), address(out)
        began = time.thread_time()
        delta.native.advance(*map(address, states), bounds, *slots, none, *views)
        return time.thread_time() - began

    def copy(turn: int) -> float:
        read, write = places(turn)
        began = time.thread_time()
        np.copyto(states.matrices[write], states.matrices[read])
        return time.thread_time() - began

    def places(turn: int) -> tuple[int, int]:
        pair, odd = 2 * (turn % layers), turn // layers % 2
        return pair + odd, pair + 1 - odd

    found: dict[str, list[float]] = {"token": [], "prompt": [], "copy": []}
    for turn in range(rounds):
        found["token"].append(run(1, turn))
        found["copy"].append(copy(turn + layers // 2))
        if turn % 20 == 0:
            found["prompt"].append(run(512, turn))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def step_of(spec: ModelSpec, weights: dict[str, Any], ops: OpTable) -> Callable[[], None]:
    """What computes the next token of one row, from the state that the step before has written."""
    decoder = Decoder(spec, weights, ops)
    blocks = CONTEXT // BLOCK
    store = KVStore(spec.kv_groups, [blocks], BLOCK, "bfloat16")
    store.states = StateStore(spec, 2)
    forward = forward_recurrent(decoder, store, bind_stack(decoder, store))
    last = np.array([CONTEXT - 1])
    bounds, none = np.array([0, 1], np.int32), np.zeros((0, 2), np.int32)
    batch = AttentionMetadata(
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        query_start=bounds,
        seq_lens=np.array([CONTEXT], np.int32),
        slot_mapping=last,
        block_size=BLOCK,
    )
    slots, draw = [np.array([slot], np.int32) for slot in (0, 1)], np.random.default_rng(1)

    def step() -> None:
        slots.reverse()
        ids = draw.integers(0, spec.vocab_size, 1)
        decoder.logits(forward(ids, last, [batch], StateBatch(bounds, *slots, none)))

    return step


def time_steps(quantize: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step as one call and op by op, in turns, and the median of their ratios."""
    spec, native = spec_from_config(BILLION), select_ops("cpu", "bfloat16", "cpu")
    weights = random_weights(native, quantize, spec)
    steps = {
        "one call": step_of(spec, weights, native),
        "op by op": step_of(spec, weights, replace(native, fused=None)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if turn >= 2:
                times[name].append(time.process_time() - began)
    pairs = zip(times["op by op"], times["one call"], strict=True)
    return {
        "billion_parameters": num_parameters(spec) / 1e9,
        "ms": {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
        "op_by_op_over_one_call": statistics.median(many / one for many, one in pairs),
    }


def play(folder: Path, kv_memory: int, seed: int) -> float:
    """The share of prompt tokens from the prefix cache, over conversations that take turns."""
    draw = random.Random(seed)
    systems = [[draw.randrange(512) for _ in range(draw.randint(80, 400))] for _ in range(3)]
    texts = [list(draw.choice(systems)) for _ in range(24)]
    settings = {"device": "cpu", "kv_memory": kv_memory, "max_num_seqs": 8}
    settings["tokenizer"] = str(resolve_model("builtin"))
    with LLM.in_process(folder, **settings) as engine:
        for _ in range(6):
            order = draw.sample(range(len(texts)), len(texts))
            for first in range(0, len(order), 6):
                chosen = order[first : first + 6]
                for i in chosen:
                    texts[i] += [draw.randrange(512) for _ in range(draw.randint(10, 120))]
                sampling = SamplingParams(
                    temperature=0, max_tokens=draw.randint(10, 60), ignore_eos=True
                )
                answers = engine.generate([texts[i] for i in chosen], sampling, progress=False)
                for i, answer in zip(chosen, answers, strict=True):
                    texts[i] += answer.token_ids
        totals = engine.engine.built.scheduler.totals
    return totals.cached_tokens / totals.prompt_tokens


def main() -> None:
    """Run both parts and print them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=400)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--output")
    given = options.parse_args()
    check_output(given.output)
    attention.set_threads(1, [], [])
    kernels = {}
    for name, (layers, shape) in MODELS.items():
        seconds = time_kernel(layers, shape, given.rounds)
        kernels[name] = {
            "state_mib": layers * shape.state_bytes / 2**20,
            "ms_a_token": 1e3 * layers * seconds["token"],
            "ms_a_prompt_token": 1e3 * layers * seconds["prompt"] / 512,
            "ms_of_a_copy": 1e3 * layers * seconds["copy"],
            "token_over_copy": seconds["token"] / seconds["copy"],
        }
        print(name, json.dumps(kernels[name]))
    steps = {name: time_steps(name, given.rounds // 4) for name in ("none", "int4")}
    print(json.dumps(steps))
    hits = []
    with tempfile.TemporaryDirectory() as home:
        hybrid = random_folder(HYBRID, Path(home) / "hybrid")
        plain = random_folder(ATTENTION, Path(home) / "attention")
        large = random_folder(LARGE, Path(home) / "large")
        folders = {"attention": plain, "hybrid": hybrid, "hybrid, large states": large}
        for seed in range(given.seeds):
            for memory in (2**23, 2**25, 2**26, 2**27):
                shares = {name: play(folder, memory, seed) for name, folder in folders.items()}
                hits.append({"seed": seed, "kv_memory": memory, "hits": shares})
                print(json.dumps(hits[-1]))
    if given.output:
        machine = f"{cpu_name()}, {this_machine().describe()}"
        command = f"python {' '.join(['benchmarks/hybrids.py', *sys.argv[1:]])}"
        result = {"command": command, "machine": machine, "kernels": kernels}
        result |= {"steps": steps, "hits": hits}
        write_json(given.output, result)


if __name__ == "__main__":
    main()
