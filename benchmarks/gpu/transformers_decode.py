"""Hugging Face transformers on the same shapes: eager, compiled, and its continuous batching."""

from __future__ import annotations

import argparse
import time

import torch
from figures import figure
from shapes import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StaticCache

PROMPT = 16
WAYS = ("eager", "compiled", "continuous")


def random_model(name: str, device: torch.device) -> torch.nn.Module:
    """A model of a shape with random weights in bfloat16, made where it computes."""
    config = dict(CONFIGS[name])
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    with device:
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    return model.eval()


@torch.inference_mode()
def decode_rate(model: torch.nn.Module, batch: int, steps: int, compiled: bool) -> float:
    """Tokens a second of greedy decoding after a prompt of ``PROMPT`` tokens."""
    device = model.device
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + 2 * steps + 8)
    tokens = torch.randint(model.config.vocab_size, (batch, PROMPT), device=device)
    place = torch.arange(PROMPT, device=device)
    logits = model(tokens, past_key_values=cache, cache_position=place).logits
    token, place = logits[:, -1:].argmax(-1), place[-1:] + 1

    def run() -> float:
        nonlocal token, place
        _wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            logits = forward(token, past_key_values=cache, cache_position=place).logits
            token, place = logits[:, -1:].argmax(-1), place + 1
        _wait(device)
        return batch * steps / (time.perf_counter() - start)

    run()  # compiles
    return run()


def continuous_rate(model: torch.nn.Module, batch: int, steps: int) -> float | None:
    """Tokens a second of steps in which all requests decode; None where there is no such thing.

    The manager has a thread of its own, its own paged cache and, where it can, captured graphs.
    """
    if not hasattr(model, "generate_batch"):
        return None
    prompts = torch.randint(model.config.vocab_size, (batch, PROMPT)).tolist()
    asked = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1)
    more = {}
    if model.device.type == "cpu":  # else it takes nearly all of the memory
        from transformers.generation import ContinuousBatchingConfig

        more["continuous_batching_config"] = ContinuousBatchingConfig(
            max_memory_percent=0.01, max_batch_tokens=256
        )
    found = model.generate_batch(prompts, generation_config=asked, record_timestamps=True, **more)
    times = [output.timestamps for output in found.values()]
    if len(times) != batch or any(len(each) != steps for each in times):
        raise RuntimeError(f"{len(found)} of {batch} requests were answered")
    first, last = max(each[0] for each in times), min(each[-1] for each in times)
    tokens = sum(first < when <= last for each in times for when in each)
    return tokens / (last - first)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=sorted(CONFIGS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"no way is called {', '.join(sorted(unknown))}; they are: {', '.join(WAYS)}")
    model = random_model(options.model, torch.device(options.device))
    name = f"{options.model} bf16, batch {options.batch}: transformers"
    for way in ways:
        if way == "continuous":
            rate = continuous_rate(model, options.batch, 4 * options.steps)
            if rate is None:
                print("this transformers has no continuous batching (generate_batch)")
                continue
        else:
            rate = decode_rate(model, options.batch, options.steps, way == "compiled")
        label = {"eager": "eager", "compiled": "static cache, compiled"}.get(way, f"{way} batching")
        figure(f"{name}, {label}", rate, "tok/s")


if __name__ == "__main__":
    main()
