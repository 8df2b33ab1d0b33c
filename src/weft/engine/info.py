"""The report of ``weft info``: machine, model, memory, and the kernel behind each op."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.config import EngineConfig
from weft.core.errors import ProfileError, TokenizerError
from weft.core.schedulers import SCHEDULERS
from weft.core.settings import format_bytes
from weft.core.topology import this_machine
from weft.cost.fit import profile_path
from weft.engine.costs import describe_host_costs, measured_costs, profile_key
from weft.engine.devices import device_name, free_memory, is_cpu
from weft.engine.fitting import memory_facts
from weft.engine.halves import choose_halves
from weft.engine.machine import cpu_name, usable_cores
from weft.engine.model import (
    Model,
    describe_kernels,
    describe_stages,
    find_model,
)
from weft.engine.threads import plan_threads
from weft.models.layout import num_parameters
from weft.models.spec import ModelSpec


def collect_info(config: EngineConfig) -> dict[str, Any]:
    """Describe the machine and a model without loading its weights.

    Raises:
        WeftError: settings or model are wrong; a model that does not fit is not an error here.
    """
    model = find_model(config)
    halves = choose_halves(config, model)
    if halves.rule is not None:
        model = find_model(config, halves=True)
    return {
        "weft": __version__,
        "machine": {
            "device": device_name(model.device),
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "topology": this_machine().describe(),
            "threads": plan_threads(config, this_machine()).describe()
            if is_cpu(model.device) or model.host is not None
            else "",
            "isa": model.ops.isa,
            "available_bytes": free_memory(model.device),
            "python": platform.python_version(),
            "torch": _torch_version(),
        },
        "model": _model_facts(config, model),
        "memory": memory_facts(config, model),
        "batch_invariant": model.ops.batch_invariant,
        "ranks": config.processes,
        "stages": describe_stages(config, model),
        "kernels": describe_kernels(config, model),
        "scheduling": _scheduling_facts(config, model),
        "halves": halves.why,
    }


def _torch_version() -> str | None:
    """The version of torch, which is an extra."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _scheduling_facts(config: EngineConfig, model: Model) -> dict[str, Any]:
    """The policy of a server with these settings, and why."""
    if config.pipeline_parallel > 1:
        reason = "as is set" if config.scheduler != "auto" else "the steps of stages overlap"
        return {"policy": "fcfs", "reason": reason}
    if model.spec.encoder is not None:
        return {"policy": "fcfs", "reason": "an encoder's texts are computed whole"}
    path = profile_path(profile_key(config, model), config.profile)
    problem, host_costs = "", ""
    try:
        host_costs = describe_host_costs(measured_costs(config, model))
    except ProfileError as error:
        problem = error.message
    if config.scheduler != "auto":
        wants = SCHEDULERS[config.scheduler].needs_cost
        facts = {"policy": config.scheduler, "reason": "as is set", "problem": problem * wants}
        return {**facts, "host_costs": host_costs * wants}
    if not problem:
        reason = f"the costs of steps are those of {path}"
        return {"policy": "slo", "reason": reason, "host_costs": host_costs}
    reason = "there is no profile of the costs of steps"
    if config.self_profile_s:
        reason += "; a server measures them while it is idle, and goes over to slo"
    return {"policy": "fcfs", "reason": reason, "problem": problem if os.path.exists(path) else ""}


def _model_facts(config: EngineConfig, model: Model) -> dict[str, Any]:
    from weft.text.tokenizer import Tokenizer  # machines that measure a GPU may lack what it needs

    spec = model.spec
    try:
        tokenizer = Tokenizer.load(Path(config.tokenizer or model.folder))
        tokenizer.encoder.decide()
        encoder = f"{tokenizer.encoder.name} ({tokenizer.encoder.reason})"
    except TokenizerError as error:
        encoder = f"none: {error.message}"
    return {
        "name": config.model,
        "family": spec.family,
        "parameters": num_parameters(spec),
        "layers": spec.num_layers,
        "experts": _expert_words(spec),
        "hidden_size": spec.hidden_size,
        "vocabulary": spec.vocab_size,
        "positions": spec.max_position_embeddings,
        "stored_dtype": spec.dtype,
        "stored_weights": None if spec.stored_weights is None else str(spec.stored_weights),
        "dtype": model.dtype,
        "eos_token_ids": list(model.eos_token_ids),
        "kv_groups": [
            {
                "name": group.name,
                "layers": len(group.layers),
                "window": group.window,
                "kv_heads": group.num_kv_heads,
                "head_dim": group.head_dim,
            }
            for group in spec.kv_groups
        ],
        "recurrent_layers": 0 if spec.states is None else len(spec.states.layers),
        "tokenizer": encoder,
        "served_for": model.pooling.describe(),
    }


def format_info(info: dict[str, Any]) -> str:
    """Lay the facts of ``collect_info`` out for a terminal."""
    machine, model, memory = info["machine"], info["model"], info["memory"]
    share = f", on each of {info['ranks']} ranks" if info["ranks"] > 1 else ""
    groups = ", ".join(_group_words(group) for group in model["kv_groups"])
    if model["recurrent_layers"]:
        groups += f", {model['recurrent_layers']} recurrent"
    pinned = format_bytes(memory["pinned_bytes"])
    pinned = f", and {pinned} of the host for buffers" if memory["pinned_bytes"] else ""
    rows = [
        ("weft", f"{info['weft']} (Python {machine['python']}, {_torch_words(machine)})"),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores{_isa_words(machine)}"),
        ("topology", machine["topology"]),
        *([("threads", machine["threads"])] if machine["threads"] else []),
        ("device", f"{machine['device']}, {format_bytes(machine['available_bytes'])} free"),
        (
            "model",
            f"{model['name']} ({model['family']}), {model['parameters'] / 1e6:.1f} M weights",
        ),
        ("supported", f"yes, as {model['family']}"),
        ("", f"{model['layers']} layers of {model['hidden_size']}: {groups}"),
        *([("", model["experts"])] if model["experts"] else []),
        ("", f"vocabulary {model['vocabulary']}, end ids {model['eos_token_ids']}"),
        ("", f"stored as {_stored_words(model)}, computed in {model['dtype']}"),
        ("", f"gives {model['served_for']}"),
        ("tokenizer", model["tokenizer"]),
        ("weights", f"{format_bytes(memory['weight_bytes'])}{share}"),
        *[("" if at else "offload", line) for at, line in enumerate(memory["host_experts"])],
        *(("", line) for line in info["stages"]),
        ("workspace", f"{format_bytes(memory['workspace_bytes'])}{pinned}"),
        (
            "KV cache",
            f"{format_bytes(memory['kv_bytes_per_token'])} a token in {memory['kv_dtype']}{share}",
        ),
    ]
    if memory["state_bytes"]:
        slots = f", {memory['state_slots']} of them" if memory["fits"] else ""
        size = format_bytes(memory["state_bytes"])
        rows.insert(-1, ("states", f"{size} a slot in float32{slots}"))
    if memory["fits"]:
        rows[-1] = ("KV cache", f"{rows[-1][1]}, {format_bytes(memory['kv_bytes'])} in all")
        if memory["host_kv_bytes"]:
            size = format_bytes(memory["host_kv_bytes"])
            rows.append(("", f"{size} on the host{share}, for sequences that give way"))
        rows += [("", memory[line]) for line in ("host_attention", "kv_disk") if memory[line]]
        rows.append(("fits", f"yes, sequences of {memory['max_model_len']} tokens"))
    else:
        rows.append(("fits", f"no. {memory['reason']}"))
    rows.append(
        ("context", f"{memory['largest_context']} of {model['positions']} tokens at the most")
    )
    scheduling = info["scheduling"]
    rows.append(("scheduling", f"{scheduling['policy']}: {scheduling['reason']}"))
    rows += [("", scheduling[line]) for line in ("problem", "host_costs") if scheduling.get(line)]
    if info["halves"]:
        rows.append(("halves", info["halves"]))
    alike = "are the same in any batch" if info["batch_invariant"] else "may differ by the batch"
    rows.append(("results", alike))
    rows += [
        ("kernels" if index == 0 else "", f"{op:16} {_kernel_words(facts)}")
        for index, (op, facts) in enumerate(info["kernels"].items())
    ]
    return "\n".join(f"{label:10} {text}" for label, text in rows)


def _stored_words(model: dict[str, Any]) -> str:
    coded = model["stored_weights"]
    return f"{model['stored_dtype']}" if coded is None else f"{coded}, else {model['stored_dtype']}"


def _expert_words(spec: ModelSpec) -> str:
    """Say how experts are routed, nothing of a dense model."""
    moe = spec.moe
    if moe is None:
        return ""
    sparse = [layer for layer in spec.layers if layer.moe]
    by = moe.scoring + (" and a correction bias" if moe.correction_bias else "")
    if moe.n_group > 1:
        by += f", from {moe.topk_group} of {moe.n_group} groups"
    words = f"{moe.num_experts} experts of {moe.intermediate_size} in {len(sparse)} layers"
    words += f", {moe.top_k} a token by {by}"
    words += f"; shared ones of {sparse[0].intermediate_size}" if moe.shared else ""
    limits = [layer for layer in spec.layers if layer.mlp_limit or layer.expert_limit]
    return words + (f"; limits of SwiGLU in {len(limits)} layers" if limits else "")


def _group_words(group: dict[str, Any]) -> str:
    window = f" of {group['window']}" if group["window"] else ""
    heads = f"{group['kv_heads']} KV heads of {group['head_dim']}"
    return f"{group['layers']} {group['name']}{window} ({heads})"


def _kernel_words(facts: dict[str, str]) -> str:
    words = f"{facts['kernel']}, in {facts['dtype']}"
    if "kv_dtype" in facts:
        words += f", KV in {facts['kv_dtype']}"
    return words + (f", launches: {facts['tuning']}" if "tuning" in facts else "")


def _isa_words(machine: dict[str, Any]) -> str:
    return f", instruction set {machine['isa']}" if machine["isa"] else ""


def _torch_words(machine: dict[str, Any]) -> str:
    return f"torch {machine['torch']}" if machine["torch"] else "no torch"
