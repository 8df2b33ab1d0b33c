"""Models with recurrent layers on a CPU: what a state costs a token, and which prefixes hit.

    python benchmarks/hybrids.py --output benchmarks/results/hybrids.json

The first part times the native kernel of the gated delta rule in sizes of real models, as a stack
calls it, on one thread: all layers of a model take turns, as they do in its steps, and with each a
copy of as many bytes. Times are the processor's, as other work on the machine would count else.

The bound of a token is memory: it reads the state of all layers once and writes it once, 2 x 62.8
MiB of Qwen3.6-35B-A3B, as a copy of it does. At B bytes a second that takes 2 x 62.8 MiB / B: 6.6
ms at 20 GB/s, about what one core of the machine of the results moves. Arithmetic, 6 operations a
number, is a tenth of that.

The second part times steps of random hybrids of 0.9 to 1.0 billion parameters as one native call,
in turns with their ops one by one: of one of each kind of recurrent layers (delta as of Qwen 3.5,
KDA as of Kimi-Linear, conv as of LFM2, mamba2 as of Granite 4), a token and a prompt. The third one
plays the same conversations, several at once, to a small random hybrid and to a model of attention
alone that is as large, and compares the share of prompt tokens that came from the prefix cache.
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
from weft.cost.hardware import Hardware
from weft.cost.model import step_time
from weft.cost.roofline import NO_OVERHEAD, Roofline
from weft.cost.shape import ModelShape
from weft.cost.work import Work
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
DELTA = HYBRID | {
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
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QUARTERS = ["linear_attention"] * 3 + ["full_attention"]
KDA = SHAPE | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "linear_num_heads": 16,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_local_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "layer_types": QUARTERS * 4,
    "mlp_layer_types": ["dense"] * 16,
}
CONV = SHAPE | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
}
MAMBA2 = SHAPE | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 6144,
    "layer_types": (["mamba"] * 3 + ["attention"]) * 4,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
BILLIONS = {"delta": DELTA, "KDA": KDA, "conv": CONV, "mamba2": MAMBA2}
PARTS = ("kernels", "steps", "predictions", "hits")
CONTEXT, BLOCK = 128, 16  # of the steps of these
PROMPT = 64  # tokens of a prompt beside them


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


def step_of(
    spec: ModelSpec, weights: dict[str, Any], ops: OpTable, tokens: int
) -> Callable[[], None]:
    """What computes the last tokens of one row, from the state that the step before has written."""
    decoder = Decoder(spec, weights, ops)
    blocks = CONTEXT // BLOCK
    store = KVStore(spec.kv_groups, [blocks], BLOCK, "bfloat16")
    store.states = StateStore(spec, 2)
    stack = bind_stack(decoder, store)
    assert (stack is None) == (ops.fused is None)
    forward = forward_recurrent(decoder, store, stack)
    last = np.arange(CONTEXT - tokens, CONTEXT)
    bounds, none = np.array([0, tokens], np.int32), np.zeros((0, 2), np.int32)
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
        ids = draw.integers(0, spec.vocab_size, tokens)
        hidden = forward(ids, last, [batch], StateBatch(bounds, *slots, none))
        decoder.logits(hidden[-1:])

    return step


def time_steps(kind: str, quantize: str, rounds: int) -> dict[str, Any]:
    """Seconds of steps as one call and op by op, in turns, and the medians of their ratios."""
    spec, native = spec_from_config(BILLIONS[kind]), select_ops("cpu", "bfloat16", "cpu")
    assert spec.states is not None
    weights = random_weights(native, quantize, spec)
    tables = {"one call": native, "op by op": replace(native, fused=None)}
    found: dict[str, Any] = {
        "kind": kind,
        "quantize": quantize,
        "billion_parameters": num_parameters(spec) / 1e9,
        "state_mib": spec.states.slot_bytes / 2**20,
    }
    for words, tokens, turns in (
        ("token", 1, rounds),
        (f"prompt of {PROMPT}", PROMPT, rounds // 8),
    ):
        steps = {name: step_of(spec, weights, ops, tokens) for name, ops in tables.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(turns + 2):
            for name, step in steps.items():
                began = time.process_time()
                step()
                if turn >= 2:
                    times[name].append(time.process_time() - began)
        pairs = zip(times["op by op"], times["one call"], strict=True)
        found[words] = {
            "ms": {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()},
            "op_by_op_over_one_call": statistics.median(many / one for many, one in pairs),
        }
    return found


def predictions(rounds: int) -> dict[str, Any]:
    """A token of each kind that `weft sim` knows: what its roofline says, and what it takes.

    The machine's bandwidth is that of a copy, in turns with the steps; products of one row and
    states are bound by it.
    """
    found: dict[str, Any] = {}
    one, other = (host_memory((2**26,), "float32") for _ in range(2))
    one[:] = 1.0
    other[:] = 1.0
    for kind in ("delta", "conv", "mamba2"):
        spec, native = spec_from_config(BILLIONS[kind]), select_ops("cpu", "bfloat16", "cpu")
        step = step_of(spec, random_weights(native, "none", spec), native, 1)
        copies, steps = list[float](), list[float]()
        for _ in range(rounds + 2):
            for body, times in ((lambda: np.copyto(other, one), copies), (step, steps)):
                began = time.process_time()
                body()
                times.append(time.process_time() - began)
        bandwidth = 2 * one.nbytes / statistics.median(copies[2:])
        shape = ModelShape.from_config(BILLIONS[kind])
        sheet = Hardware("this core", {"bf16": 1e12}, bandwidth, 2**40)
        work = Work()
        work.add(CONTEXT - 1, 1)
        predicted = step_time(Roofline(shape, sheet, overhead=NO_OVERHEAD), [work])
        measured = statistics.median(steps[2:])
        found[kind] = {
            "copy_gb_s": bandwidth / 1e9,
            "predicted_ms": 1e3 * predicted,
            "of_states_ms": 1e3 * 2 * shape.state_bytes / bandwidth,
            "measured_ms": 1e3 * measured,
            "measured_over_predicted": measured / predicted,
        }
        print(kind, json.dumps(found[kind]), flush=True)
    return found


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
    """Run the parts and print them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=400)
    options.add_argument("--seeds", type=int, default=2)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--output")
    given = options.parse_args()
    check_output(given.output)
    attention.set_threads(1, [], [])
    found: dict[str, Any] = {}
    if "kernels" in given.parts:
        found["kernels"] = kernels(given.rounds)
    if "steps" in given.parts:
        found["steps"] = []
        for kind in BILLIONS:
            for quantize in ("none", "int4"):
                found["steps"].append(time_steps(kind, quantize, given.rounds // 4))
                print(json.dumps(found["steps"][-1]), flush=True)
    if "predictions" in given.parts:
        found["predictions"] = predictions(given.rounds // 8)
    if "hits" in given.parts:
        found["hits"] = hits(given.seeds)
    if given.output:
        machine = f"{cpu_name()}, {this_machine().describe()}"
        command = f"python {' '.join(['benchmarks/hybrids.py', *sys.argv[1:]])}"
        write_json(given.output, {"command": command, "machine": machine, **found})


def kernels(rounds: int) -> dict[str, dict[str, float]]:
    """The costs of the delta rule, by model."""
    found = {}
    for name, (layers, shape) in MODELS.items():
        seconds = time_kernel(layers, shape, rounds)
        found[name] = {
            "state_mib": layers * shape.state_bytes / 2**20,
            "ms_a_token": 1e3 * layers * seconds["token"],
            "ms_a_prompt_token": 1e3 * layers * seconds["prompt"] / 512,
            "ms_of_a_copy": 1e3 * layers * seconds["copy"],
            "token_over_copy": seconds["token"] / seconds["copy"],
        }
        print(name, json.dumps(found[name]))
    return found


def hits(seeds: int) -> list[dict[str, Any]]:
    """The shares of prompt tokens from the prefix cache, of three models over the same traces."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        hybrid = random_folder(HYBRID, Path(home) / "hybrid")
        plain = random_folder(ATTENTION, Path(home) / "attention")
        large = random_folder(LARGE, Path(home) / "large")
        folders = {"attention": plain, "hybrid": hybrid, "hybrid, large states": large}
        for seed in range(seeds):
            for memory in (2**23, 2**25, 2**26, 2**27):
                shares = {name: play(folder, memory, seed) for name, folder in folders.items()}
                found.append({"seed": seed, "kv_memory": memory, "hits": shares})
                print(json.dumps(found[-1]))
    return found


if __name__ == "__main__":
    main()
