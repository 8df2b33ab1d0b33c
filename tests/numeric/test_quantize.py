"""Weights rounded at load: perplexity, memory and reports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build, edit_config, prompt, reference_logits, save
from paged import PagedRunner
from safetensors.torch import save_file
from torch import Tensor

from depth import deep
from weft import LLM, SamplingParams
from weft.core.config import EngineConfig
from weft.core.errors import CheckpointError, ConfigError
from weft.engine.info import collect_info, format_info
from weft.engine.model import find_model
from weft.kernels.cpu.matrix import CpuMatrix
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.hub import resolve_model
from weft.models.layout import parameters, storage_of, weight_bytes
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.weight_files import SINGLE

CPU = torch.device("cpu")
WINDOWS, WINDOW = 12, 1023  # of the held-out text, by the method of the built-in model's card


@cache
@cache
def perplexity(quantize: str, group: int = 64) -> float:
    settings: dict[str, Any] = {"threads": 1, "kv_memory": "256MiB", "max_num_seqs": 8}
    settings |= {"dtype": "bfloat16", "quantize": quantize, "quantize_group": group}
    with LLM.in_process("builtin", **settings) as llm:
        text = (resolve_model("builtin") / "heldout.txt").read_bytes().decode()
        ids = llm.tokenizer.encode(text, add_special_tokens=False)[: WINDOWS * WINDOW]
        prompts = [[llm.tokenizer.bos_id, *ids[i : i + WINDOW]] for i in range(0, len(ids), WINDOW)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        results = llm.generate(prompts, params, progress=False)
    scores = [entry.logprob for r in results for entry in r.prompt_logprobs[1:]]
    return math.exp(-sum(scores) / len(scores))


@pytest.mark.parametrize(
    ("quantize", "group", "limit"),
    [
        ("int8", 64, 0.005),
        ("int4", 128, 0.04),
        *(pytest.param("int4", group, 0.04, marks=deep) for group in (32, 64)),
    ],
)
def test_perplexity_stays_near_that_of_bfloat16(quantize, group, limit) -> None:
    assert 0 < abs(perplexity(quantize, group) / perplexity("none") - 1) <= limit


def load(folder: Path, quantize: str = "none", group: int = 64, kernels: str = "cpu") -> Decoder:
    rounding = partial(storage_of, quantize=quantize, group=group)
    ops = select_ops("cpu", "float32", kernels)
    return load_model(folder, "float32", None, ops, rounding)


ALL_CHOSEN = "nemotron-h-moe"  # its choice of a few would turn on small errors
CASES = ["llama-gqa", "llama-tied-biases", "phi3-plain", "qwen3-moe", "gemma3", "gemma4"]
CASES += ["lfm2-moe", "granite-hybrid-moe", "nemotron-h", ALL_CHOSEN]


@pytest.mark.parametrize("name", CASES)
def test_logits_stay_near_and_memory_is_foretold(tmp_path, name) -> None:
    reference = build(name)
    if name == ALL_CHOSEN:
        reference.config.num_experts_per_tok, reference.config.topk_group = 6, 2
        for router in (module for module in reference.modules() if hasattr(module, "top_k")):
            router.top_k, router.topk_group = 6, 2
    folder, tokens = save(reference, tmp_path), prompt(100)
    expected = reference_logits(reference, tokens)
    for quantize, limit in (("int8", 0.1), ("int4", 0.6)):
        decoder = load(folder, quantize, 32)
        found = PagedRunner(decoder).step([("a", tokens)])[0]
        error = (found - expected).pow(2).mean().sqrt() / expected.std()
        assert 0 < error < limit
        foretold = weight_bytes(decoder.spec, "float32", quantize, 32)
        assert foretold == sum(map(bytes_of, loaded_weights(decoder)))


def loaded_weights(decoder: Decoder) -> list[Any]:
    spec = decoder.spec
    found = [decoder.embedding, decoder.final_norm]
    found += [] if spec.tied_embeddings else [decoder.lm_head]
    for layer in decoder.layers:
        found += [weight for weight in vars(layer).values() if weight is not None]
    found += [decoder.per_layer_embedding, decoder.per_layer_projection, decoder.per_layer_norm]
    found = [weight for weight in found if weight is not None]
    assert len(found) == len(list(parameters(spec)))
    return found


def bytes_of(weight: Tensor | CpuMatrix | tuple[CpuMatrix, ...]) -> int:
    if isinstance(weight, tuple):
        return sum(map(bytes_of, weight))
    if isinstance(weight, CpuMatrix) and weight.format in ("float32", "bfloat16"):
        return math.prod(weight.shape) * 4  # without the padding
    return weight.nbytes


def test_experts_stored_as_one_tensor_are_the_same(tmp_path) -> None:
    model = build("qwen3-moe")
    one = load(save(model, tmp_path / "one"), "int4", 32)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    folder = tmp_path / "stacked"
    folder.mkdir()
    save_file(state, folder / SINGLE)
    (folder / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    assert any(name.endswith("experts.down_proj") for name in state)
    tokens = prompt(20)
    logits = [PagedRunner(d).step([("a", tokens)])[0] for d in (one, load(folder, "int4", 32))]
    assert torch.equal(*logits)


MEASURE = """
import sys, torch
from pathlib import Path
from weft.kernels.ops import select_ops
from weft.models.layout import storage_of, weight_bytes
from weft.models.loader import load_model
from weft.kernels.cpu import matrix

def read(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024

ops = select_ops("cpu", "bfloat16", "cpu")
rounding = lambda name: storage_of(name, sys.argv[2], 64)
before = read("VmRSS")
decoder = load_model(Path(sys.argv[1]), "bfloat16", None, ops, rounding)
print(read("VmHWM") - before, weight_bytes(decoder.spec, "bfloat16", sys.argv[2], 64))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint of 180 MB, a quarter of it one tensor."""
    folder = tmp_path_factory.mktemp("large")
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 768}
    config |= {"intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12}
    config |= {"num_key_value_heads": 4, "max_position_embeddings": 512}
    config |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for parameter in parameters(read_spec(folder)):
        for piece in parameter.pieces:
            bits = torch.randint(0, 0x4000, piece.shape, dtype=torch.int16)  # 0 to 2
            tensors["model." + piece.tensor] = bits.view(torch.bfloat16)
    save_file(tensors, folder / SINGLE)
    return folder


@pytest.mark.parametrize("quantize", [pytest.param("int8", marks=deep), "int4"])
def test_peak_memory_of_loading(large, quantize) -> None:
    command = [sys.executable, "-c", MEASURE, str(large), quantize]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, weights = map(int, done.stdout.split())
    assert weights < (large / SINGLE).stat().st_size * (0.52 if quantize == "int8" else 0.3)
    assert weights * 0.9 < grown <= 1.3 * weights + 2**23  # threads and what they allocate


def test_numbers_that_are_not_finite_are_refused(tmp_path) -> None:
    model = build("llama-gqa")
    name = "model.layers.1.mlp.up_proj.weight"
    model.state_dict()[name][3, 4] = float("inf")
    with pytest.raises(CheckpointError, match=rf"{name}.*only finite"):
        load(save(model, tmp_path), "int8")


def test_what_is_told() -> None:
    config = EngineConfig(quantize="int4", quantize_group=64, dtype="bfloat16")
    info = collect_info(config)
    assert info["kernels"]["linear"]["kernel"] == "cpu, int4 (groups of 64) weights"
    assert info["kernels"]["logits"]["kernel"] == "cpu, int4 (groups of 32) weights"
    assert info["memory"]["weight_bytes"] == find_model(config).facts.weight_bytes
    assert info["memory"]["weight_bytes"] < 0.4 * 2 * info["model"]["parameters"]
    assert "int4 (groups of 64)" in format_info(info)


def test_what_contradicts_itself_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"is int8, but those .*reference' do not compute with"):
        find_model(EngineConfig(quantize="int8", kernels="reference"))
    with pytest.raises(ConfigError, match=r"is fp8, but the kernels of a CPU do not.*of a GPU"):
        find_model(EngineConfig(quantize="fp8"))
    with pytest.raises(ConfigError, match="32, 64 or 128"):
        EngineConfig(quantize="int4", quantize_group=48)
    folder = save(build("llama-gqa"), tmp_path)
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    edit_config(folder, quantization_config=stored)
    with pytest.raises(ConfigError, match="quantised already"):
        find_model(EngineConfig(model=str(folder), quantize="int8"))
