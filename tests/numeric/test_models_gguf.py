"""GGUF files: the logits of the dequantised weights, whatever the type of the tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import prompt, randomise, reference_logits
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from gguf_files import add_tokenizer
from paged import PagedRunner
from tokenizers import Tokenizer

from weft import LLM, SamplingParams
from weft.core.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from weft.kernels.ops import select_ops
from weft.models.hub import resolve_model
from weft.models.kept_weights import KeptWeights
from weft.models.layout import storage_of
from weft.models.loader import load_model
from weft.models.packed_cache import PackedCache
from weft.models.spec_reader import read_spec

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 199,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": ("Gemma3", {"sliding_window": 24, "query_pre_attn_scalar": 64}),
}


def build(arch: str) -> Any:
    name, more = ARCHITECTURES[arch]
    config_type = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_type)(**(SIZES | more))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    randomise(model, 0)
    return model


def interleaved(weight: np.ndarray, heads: int, *, back: bool = False) -> np.ndarray:
    """Reorder rows of Q or K as llama.cpp's converter does, or back."""
    shape = (heads, 2, -1) if not back else (heads, -1, 2)
    cut = weight.reshape(*shape, *weight.shape[1:])
    return cut.swapaxes(1, 2).reshape(weight.shape)


def blocks(kind: Type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random blocks of a type that the package only decodes; their scales are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scales = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}[kind]
    for at in scales:
        numbers = draw.uniform(1e-4, 4e-4, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def write(
    model: Any, arch: str, path: Path, kind: Type, texts: Mapping[str, Any] | None = None
) -> None:
    """Write the model as GGUF, its matrices in ``kind``, and put what that made of them into it.

    Args:
        texts: for ``add_tokenizer``.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch == "qwen3":
        writer.add_rope_freq_base(1e6)
    if arch == "gemma3":
        writer.add_rope_freq_base(1e6)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if texts is None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        add_tokenizer(writer, **texts)
    names = gguf.get_tensor_name_map(
        {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = 0
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weight = tensor.numpy().astype(np.float32)
        if heads:
            weight = interleaved(weight, heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if weight.ndim < 2:
            shift = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
            writer.add_tensor(stored, weight + np.float32(shift))
            continue
        if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
            data = blocks(kind, weight.shape, seed)
        else:
            data = quantize(weight, kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
        plain = dequantize(data, kind)
        tensor.copy_(torch.from_numpy(interleaved(plain, heads, back=True) if heads else plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path, dtype: str = "float32", kernels: str = "reference", **more: Any):
    return load_model(path, dtype, None, select_ops("cpu", dtype, kernels), **more)


CASES = [(arch, Type.Q8_0) for arch in ARCHITECTURES]
CASES += [("llama", kind) for kind in (Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q5_1)]
CASES += [("qwen3", kind) for kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K)]


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_logits_of_the_dequantised_weights(tmp_path, arch, kind) -> None:
    model, path = build(arch), tmp_path / "model.gguf"
    write(model, arch, path, kind)
    tokens = prompt(100)
    expected = reference_logits(model, tokens)
    found = PagedRunner(load(path)).step([("a", tokens)])[0]
    assert (found - expected).abs().max() < 2e-4 * expected.std()


def test_weights_may_be_rounded_again(tmp_path) -> None:
    model, path = build("llama"), tmp_path / "model.gguf"
    write(model, "llama", path, Type.Q8_0)
    rounding = {"rounding": lambda name: storage_of(name, "int8", 64)}
    decoder = load(path, "bfloat16", "cpu", **rounding)
    assert decoder.layers[0].down.format == "int8"
    tokens = prompt(100)
    expected = reference_logits(model, tokens)
    found = PagedRunner(decoder).step([("a", tokens)])[0]
    assert (found - expected).norm() / expected.norm() < 0.1


def test_a_file_is_packed_once_and_again_when_it_changes(tmp_path) -> None:
    model, path = build("llama"), tmp_path / "model.gguf"
    write(model, "llama", path, Type.Q8_0)

    def state() -> str:
        kept = KeptWeights(PackedCache(2**30, tmp_path / "packed"), {})
        load(path, kernels="cpu", kept=kept)
        kept.write()
        assert kept.join(60)
        return kept.state

    assert [state(), state()] == ["packed", "mapped"]
    randomise(model, 1)
    write(model, "llama", path, Type.Q8_0)
    assert [state(), state()] == ["packed", "mapped"]


@pytest.mark.parametrize("alone", [True, False])
def test_the_engine_takes_a_file(tmp_path, monkeypatch, alone) -> None:
    """The built-in model as GGUF answers as it does itself, with its tokeniser in or beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = resolve_model("builtin")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path, texts = tmp_path / "builtin.gguf", None
    if alone:
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        texts = {"made": made, "model": "gpt2", "pre": "llama-bpe", "ids": {"bos": 0, "eos": 1}}
        texts |= {"template": config["chat_template"]}
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / name, tmp_path / name)
    write(model.eval().requires_grad_(False), "llama", path, Type.BF16, texts)
    answers = []
    for name in ("builtin", str(path)):
        with LLM.in_process(name, threads=1, kv_memory="16MiB", max_num_seqs=4) as llm:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            chat = llm.chat([{"role": "user", "content": "sort"}], params)
            plain = llm.generate(["def main("], params, progress=False)[0]
            answers.append((plain.text, chat.text))
    assert answers[0] == answers[1]


def test_damaged_and_unknown_files_are_refused(tmp_path) -> None:
    model, path = build("llama"), tmp_path / "model.gguf"
    write(model, "llama", path, Type.F16)
    data = path.read_bytes()
    for kept in (len(data) - 4096, 1000, 3, 0):
        path.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=r"model\.gguf.*fetch it again"):
            load(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        read_spec(path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"\.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
