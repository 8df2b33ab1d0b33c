"""Predicted against published TTFT, TPOT and throughput; nothing here was used to fit anything.

    python benchmarks/predictions.py [--out benchmarks/results/predictions.json]

Needs the extra weft[sim]. Three predictors: the roofline of the hardware sheet; measured kernel
times; and those with what an older engine's host adds to each step (``cost/roofline.py``,
``CPU_DRIVEN``). The published figures are in ``published.json``, with where they stand; those of
TensorRT-LLM, vLLM and SGLang on H100 and H200 come with the extra (``silicon_sample.csv``).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import exp, log
from pathlib import Path
from typing import NamedTuple

import report
from weft.cost.hardware import hardware
from weft.cost.model import CostModel, step_time
from weft.cost.roofline import CPU_DRIVEN, NO_OVERHEAD, Roofline
from weft.cost.shape import model_shape
from weft.cost.table import MeasuredCosts
from weft.cost.work import Work

HERE = Path(__file__).parent
SILICON_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
PREDICTORS = ("roofline", "kernels", "kernels + host")


class Setup(NamedTuple):
    """What was measured on."""

    model: str
    machine: str
    dtype: str = "bf16"
    kv_dtype: str | None = None
    tp: int = 1
    backend: str = "vllm"


class Check(NamedTuple):
    """A published figure and what each predictor says of it."""

    source: str
    quantity: str
    what: str
    published: float
    predicted: dict[str, float]


@cache
def cost_of(predictor: str, setup: Setup) -> CostModel:
    """A predictor of ``PREDICTORS`` for a setup."""
    shape, machine = model_shape(setup.model), hardware(setup.machine)
    if predictor == "roofline":
        return Roofline(shape, machine, setup.dtype, setup.kv_dtype, setup.tp, NO_OVERHEAD)
    overhead = CPU_DRIVEN if predictor == "kernels + host" else NO_OVERHEAD
    return MeasuredCosts(
        shape, machine, setup.dtype, setup.kv_dtype, setup.tp, overhead, setup.backend
    )


def step(cost: CostModel, decodes: int, context: float, prompts: int = 0, length: int = 0) -> float:
    """Seconds of a step of equal decodes and equal whole prompts."""
    work = Work(
        tokens=decodes + prompts * length,
        sampled=decodes + prompts,
        prefills=prompts,
        prefill_area=prompts * length * length / 2,
        prefill_context=prompts * length,
        decodes=decodes,
        decode_context=round(decodes * context),
    )
    return step_time(cost, [work])


@cache
def closed_loop(cost: CostModel, clients: int, prompt: int, output: int) -> dict[str, float]:
    """TTFT and TPOT with so many requests always running.

    While a request generates, each of the others ends once, and the prompt that follows it
    piggybacks in one of the steps. If requests end one by one, a new prompt waits for half a step;
    if all begin together, as they do at the start, it waits for half of the other prompts.
    """
    context = prompt + output / 2
    plain = step(cost, clients, context)
    mixed = step(cost, clients - 1, context, 1, prompt)
    tpot = plain + (clients - 1) / max(output - 1, 1) * (mixed - plain)
    together = (clients + 1) / 2 * step(cost, 0, 0, 1, prompt)
    return {"TTFT": plain / 2 + mixed, "TTFT together": together, "TPOT": tpot}


@cache
def open_loop(cost: CostModel, rate: float, prompt: float, output: float) -> tuple[float, float]:
    """TTFT and TPOT of requests that come at a rate, without queueing: rate * output * TPOT run."""
    tpot = step(cost, 1, prompt + output / 2)
    for _ in range(50):
        running = max(1, round(rate * output * tpot))
        plain = step(cost, running, prompt + output / 2)
        mixed = step(cost, running, prompt + output / 2, 1, round(prompt))
        tpot = plain / max(1 - rate * (mixed - plain), 0.05)
    return plain / 2 + mixed, tpot


def predict(setup: Setup, figure: Callable[[CostModel], float]) -> dict[str, float]:
    """A figure by every predictor."""
    return {name: figure(cost_of(name, setup)) for name in PREDICTORS}


def rvllm(published: dict) -> Iterator[Check]:
    """Decode rates, and first tokens of a batch of short prompts."""
    for row in published["rvllm_decode"]["rows"]:
        ours = row["engine"] == "rvllm"
        setup = Setup("qwen2.5-7b", "h100", "fp8", "fp8" if ours else "bf16")
        context, batch = (16 + 5 + 15, row["batch"]) if ours else (16 + 256, row["batch"])
        yield Check(
            "rvLLM 7.2",
            "throughput",
            f"{row['engine']} batch {batch}",
            row["tokens_per_s"],
            predict(setup, lambda cost, n=batch, c=context: n / step(cost, n, c)),
        )
    for row in published["rvllm_ttft"]["rows"]:
        yield Check(
            "rvLLM 7.4",
            "TTFT",
            f"batch {row['batch']}",
            row["ttft_ms"] / 1e3,
            predict(
                Setup("qwen2.5-7b", "h100", "fp8", "fp8"),
                lambda cost, n=row["batch"]: step(cost, 0, 0, n, 16) + step(cost, n, 17),
            ),
        )


def blink(published: dict) -> Iterator[Check]:
    """Medians over the loads of a system's range; lengths are its tokens over its requests."""
    for row in published["blink"]["rows"]:
        prompt = row["prefill_tokens_per_s"] / row["requests_per_s"]
        output = row["decode_tokens_per_s"] / row["requests_per_s"]
        backend = row["system"] if row["system"] in ("vllm", "sglang") else "trtllm"
        setup = Setup(row["model"], "blink-h100", "fp16", backend=backend)

        def mean(cost: CostModel, which: int, row=row, prompt=prompt, output=output) -> float:
            loads = [rate for rate in range(1, row["most"] + 1) if rate <= row["requests_per_s"]]
            times = [open_loop(cost, rate, prompt, output)[which] for rate in loads]
            return exp(statistics.mean(map(log, times)))

        for which, quantity in ((0, "TTFT"), (1, "TPOT")):
            yield Check(
                "Blink B.1",
                quantity,
                f"{row['system']} {row['model']}",
                row[f"{quantity.lower()}_p50_ms"] / 1e3,
                predict(setup, lambda cost, which=which, mean=mean: mean(cost, which)),
            )


def blendserve(published: dict) -> Iterator[Check]:
    """Tokens a second from density and sharing, with compute and memory in a row (not overlapped).

    The density says how long reading KV takes for each second of arithmetic by the paper's formulas
    and the sheet; a predictor then says how much longer both really take: arithmetic in a step of
    2048 tokens, reading in one of 256 decodes of 1024 tokens.
    """
    setup = Setup("llama-3-8b", "a100")
    sheet, shape = hardware("a100"), model_shape("llama-3-8b")
    for row in published["blendserve"]["rows"]:

        def rate(cost: CostModel, row=row) -> float:
            compute = 2 * shape.active_parameters / sheet.peak("bf16")
            tokens, kv = 2048, 256 * 1024
            prompt = cost.terms(Work(tokens=tokens, prefills=1, prefill_context=tokens))
            reading = cost.terms(Work(tokens=256, decodes=256, decode_context=kv))
            slower = prompt.dense / tokens / compute
            bytes_read = kv * shape.kv_values_per_token * 2
            slower_read = reading.decode_attention / (bytes_read / sheet.bandwidth)
            a_token = compute * (slower + slower_read / row["density"]) * (1 - row["sharing"])
            return 1 / a_token

        yield Check(
            "BlendServe 3",
            "throughput",
            f"trace {row['trace']}",
            row["tokens_per_s"],
            predict(setup, rate),
        )


def silicon(models: Mapping[str, str] = SILICON_MODELS) -> Iterator[Check]:
    """Closed loops of serving engines, as the extra has them."""
    found = importlib.util.find_spec("aiconfigurator_core")
    path = Path(found.origin).parent / "systems" / "silicon_sample.csv"
    for row in csv.DictReader(path.read_text("utf-8").splitlines()):
        model, machine = models.get(row["model_path"]), row["system"].split("_")[0]
        known = model and machine in ("h100", "h200") and row["mode"] == "agg"
        if not known or row["attention_dp_size"] not in ("", "1"):
            continue
        dtype = "fp8" if row["precision"] == "fp8" else "bf16"
        setup = Setup(model, machine, dtype, "bf16", int(row["tp_size"]), row["backend"])
        clients, prompt, output = (int(row[name]) for name in ("batch_size", "isl", "osl"))
        what = f"{row['id']}"
        source = f"extra, {row['backend']}"
        first, token = (float(row[f"silicon_{name}_ms"]) / 1e3 for name in ("ttft", "tpot"))
        for quantity, published in (("TTFT", first), ("TTFT together", first), ("TPOT", token)):
            figure = predict(
                setup,
                lambda cost, quantity=quantity, load=(clients, prompt, output): closed_loop(
                    cost, *load
                )[quantity],
            )
            yield Check(source, quantity, what, published, figure)
        rates = {name: clients / seconds for name, seconds in figure.items()}
        yield Check(source, "throughput", what, clients / token, rates)


def all_checks() -> list[Check]:
    """Every published figure with its predictions."""
    published = json.loads((HERE / "published.json").read_text("utf-8"))
    checks = [*rvllm(published), *blink(published), *blendserve(published), *silicon()]
    return [check for check in checks if check.published > 0]


def summary(checks: list[Check]) -> list[dict]:
    """The distribution of errors (predicted / published - 1) by source, quantity and predictor."""
    groups: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks:
        groups[check.source, check.quantity].append(check)
    rows = []
    for (source, quantity), group in groups.items():
        for name in PREDICTORS:
            errors = sorted(check.predicted[name] / check.published - 1 for check in group)
            sizes = sorted(map(abs, errors))
            rows.append(
                {
                    "source": source,
                    "quantity": quantity,
                    "predictor": name,
                    "figures": len(group),
                    "median": statistics.median(errors),
                    "median_abs": statistics.median(sizes),
                    "p90_abs": sizes[(9 * len(sizes) + 9) // 10 - 1],
                    "lowest": errors[0],
                    "highest": errors[-1],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checks = all_checks()
    rows = summary(checks)
    print(f"{'source':14}{'figure':14}{'predictor':16}{'n':>4}{'median':>9}{'|median|':>9}", end="")
    print(f"{'|P90|':>9}{'lowest':>9}{'highest':>9}")
    for row in rows:
        print(
            f"{row['source']:14}{row['quantity']:14}{row['predictor']:16}{row['figures']:4}"
            f"{row['median']:+9.0%}{row['median_abs']:9.0%}{row['p90_abs']:9.0%}"
            f"{row['lowest']:+9.0%}{row['highest']:+9.0%}"
        )
    if options.out is not None:
        papers = [check._asdict() for check in checks if not check.source.startswith("extra")]
        report.save(options.out, summary=rows, papers=papers)


if __name__ == "__main__":
    main()
