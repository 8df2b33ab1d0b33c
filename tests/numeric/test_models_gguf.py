"""GGUF files: the logits of the dequantised weights, whatever the type of the tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
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
from weft.kernels.cpu.matrix import gather
from weft.kernels.ops import select_ops
from weft.models.hub import resolve_model
from weft.models.kept_weights import KeptWeights
from weft.models.layout import storage_of, weight_bytes
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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 100 for i in range(32)],
    "long_factor": [1.5 + i / 10 for i in range(32)],
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
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
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        | {"norm_topk_prob": True},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": None, "original_max_position_embeddings": 64}
        | {"rope_parameters": LONGROPE},
    ),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
        | {"residual_multiplier": 0.5},
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "seed_oss": ("SeedOss", {"attention_bias": True}),
    "hunyuan-dense": ("HunYuanDenseV1", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "exaone4": (
        "Exaone4",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4": ("Glm4", {"attention_bias": True}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
        | {"sliding_window": 24, "rope_parameters": YARN},
    ),
}
PAIRED = ("llama", "granite", "smollm3")  # whose rows of Q and K llama.cpp reorders
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
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


# Where the float16 of a block lie, of types that the package only decodes.
HALVES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2)}
HALVES |= {Type.Q6_K: (208,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,)}


def blocks(kind: Type, shape: tuple[int, ...], seed: int, scale: float = 4e-4) -> np.ndarray:
    """Random blocks of a type that the package only decodes; their scales are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        numbers = draw.uniform(scale / 4, scale, data.shape[:-1]).astype(np.float16)
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def stored(weight: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """A matrix in a type: its own numbers, or random ones where the package does not round."""
    return blocks(kind, weight.shape, seed) if kind in HALVES else quantize(weight, kind)


def write(
    model: Any,
    arch: str,
    path: Path,
    kind: Type | Callable[[str], Type],
    texts: Mapping[str, Any] | None = None,
) -> None:
    """Write the model as GGUF, its matrices in ``kind``, and put what that made of them into it.

    Args:
        kind: of all matrices, or of each by its name.
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
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None and arch not in ("qwen3", "gemma2", "gemma3"):
        writer.add_rope_freq_base(theta)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(YARN["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(YARN["beta_slow"])
    if arch == "granite":
        for key, name in SCALES.items():
            writer.add_float32(f"granite.{key}", getattr(config, name))
    if arch == "exaone4":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind.startswith("s") for kind in config.layer_types])
    if arch == "glm4":
        writer.add_rope_dimension_count(32)
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(64)
        for length in ("short", "long"):
            factors = np.array(LONGROPE[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
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
        if arch in PAIRED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        weight = tensor.numpy().astype(np.float32)
        if heads:
            weight = interleaved(weight, heads)
        if arch == "gpt-oss" and (".experts." in name or name.endswith(".sinks")):
            write_part_of_gpt_oss(writer, name, tensor, kind)
            continue
        if weight.ndim == 3:
            write_experts(writer, name, tensor, kind)
            continue
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if weight.ndim < 2:
            shift = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0
            writer.add_tensor(place, weight + np.float32(shift))
            continue
        here = kind if isinstance(kind, Type) else kind(name)
        data = stored(weight, here, seed)
        writer.add_tensor(place, data, raw_dtype=here)
        plain = dequantize(data, here)
        tensor.copy_(torch.from_numpy(interleaved(plain, heads, back=True) if heads else plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_experts(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: Type) -> None:
    """Write the experts of a layer, gates and values apart, and put what becomes of them back."""
    number, weight = name.split(".")[2], tensor.numpy().astype(np.float32)
    fused = name.endswith("gate_up_proj")
    parts = dict(zip(("gate", "up"), np.split(weight, 2, 1), strict=True)) if fused else {}
    plain = []
    for part, numbers in (parts or {"down": weight}).items():
        data = quantize(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"blk.{number}.ffn_{part}_exps.weight", data, raw_dtype=kind)
        plain.append(dequantize(data, kind))
    tensor.copy_(torch.from_numpy(np.concatenate(plain, 1)))


def write_part_of_gpt_oss(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    kind: Type | Callable[[str], Type],
) -> None:
    """Write sinks, or experts, whose gates alternate with what they multiply in transformers."""
    number, part = name.split(".")[2], name.rpartition(".")[2]
    kind = kind if isinstance(kind, Type) else kind(name)
    numbers = tensor.numpy().astype(np.float32)
    if part == "sinks":
        writer.add_tensor(f"blk.{number}.attn_sinks.weight", numbers)
        return
    bias = part.endswith("_bias")
    outputs = numbers if bias else numbers.swapaxes(1, 2)
    sides = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]}
    if part.startswith("down"):
        sides = {"down": outputs}
    plain = np.empty_like(outputs)
    for at, (side, side_numbers) in enumerate(sides.items()):
        place = f"blk.{number}.ffn_{side}_exps.{'bias' if bias else 'weight'}"
        if bias:
            writer.add_tensor(place, np.ascontiguousarray(side_numbers))
            continue
        data = quantize(np.ascontiguousarray(side_numbers), kind)
        writer.add_tensor(place, data, raw_dtype=kind)
        plain[:, at :: len(sides)] = dequantize(data, kind)
    if not bias:
        tensor.copy_(torch.from_numpy(plain.swapaxes(1, 2).copy()))


def load(path: Path, dtype: str = "float32", kernels: str = "reference", **more: Any):
    return load_model(path, dtype, None, select_ops("cpu", dtype, kernels), **more)


CASES = [(arch, Type.Q8_0) for arch in ARCHITECTURES]
CASES += [("llama", kind) for kind in (Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q5_1)]
CASES += [("qwen3", kind) for kind in HALVES]
CASES += [("gpt-oss", Type.MXFP4)]


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_logits_of_the_dequantised_weights(tmp_path, arch, kind) -> None:
    model, path = build(arch), tmp_path / "model.gguf"
    write(model, arch, path, kind)
    tokens = prompt(100)
    expected = reference_logits(model, tokens)
    found = PagedRunner(load(path)).step([("a", tokens)])[0]
    assert (found - expected).abs().max() < 2e-4 * expected.std()


JOINED = ("qkv", "output", "gate_up", "down")


def mixed(name: str) -> Type:
    """As llama.cpp mixes types within the parts that weft joins: Q4_K_M."""
    return Type.Q6_K if "v_proj" in name or "up_proj" in name else Type.Q4_K


# Types of all matrices, and the format that the joined Q, K and V get.
CODED = [
    (Type.Q4_0, "int4"),
    (Type.Q4_1, "int4"),
    (Type.Q5_0, "int5"),
    (Type.Q5_1, "int5"),
    (Type.Q8_0, "int8"),
    (Type.MXFP4, "mx4"),
    (Type.Q2_K, "int4"),
    (Type.Q3_K, "int4"),
    (Type.Q4_K, "int4"),
    (Type.Q5_K, "int5"),
    (Type.Q6_K, "int6"),
    (Type.IQ4_NL, "nl4"),
    (Type.IQ4_XS, "nl4"),
    (mixed, "int6"),
]


def round_inputs(model: Any, decoder: Any) -> None:
    """Have a reference round what its matrices multiply, as kernels do before codes."""

    def rounding(matrix: Any) -> Callable[..., Any]:
        form = matrix.form
        span = 256 if form.nested else form.group

        def rounded(_: Any, inputs: tuple[Any]) -> Any:
            groups = inputs[0].unflatten(-1, (-1, span))
            step = groups.abs().amax(-1, keepdim=True) / 127.0
            return (torch.where(step > 0, (groups / step).round() * step, 0.0).flatten(-2),)

        return rounded

    for layer, own in zip(model.model.layers, decoder.layers, strict=True):
        mixer, mlp = layer.self_attn, layer.mlp
        for names, matrix in (
            ((mixer.q_proj, mixer.k_proj, mixer.v_proj), own.qkv),
            ((mixer.o_proj,), own.output),
            ((mlp.gate_proj, mlp.up_proj), own.gate_up),
            ((mlp.down_proj,), own.down),
        ):
            for linear in names:
                linear.register_forward_pre_hook(rounding(matrix))
    model.lm_head.register_forward_pre_hook(rounding(decoder.lm_head))


@pytest.mark.parametrize(("kind", "format_"), CODED)
def test_kernels_read_codes_as_they_are(tmp_path, kind, format_) -> None:
    """Weights are those of the file to the bit; so are inputs once they are rounded to 8 bits."""
    model, path = build("llama"), tmp_path / "model.gguf"
    write(model, "llama", path, kind)
    decoder = load(path, kernels="cpu")
    layer = decoder.layers[0]
    assert layer.qkv.format == format_
    assert layer.qkv.nbytes < 0.3 * 4 * np.prod(layer.qkv.shape)
    state = model.state_dict()
    names = [f"model.layers.0.self_attn.{one}_proj.weight" for one in "qkv"]
    expected = torch.cat([state[name] for name in names])
    assert torch.equal(gather(layer.qkv, torch.arange(len(expected))), expected)
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(gather(layer.down, torch.arange(len(down))), down)
    tokens = prompt(100)
    round_inputs(model, decoder)
    logits = reference_logits(model, tokens)
    found = PagedRunner(decoder).step([("a", tokens)])[0]
    # A number between two codes may be rounded to either by sums in another order.
    assert (found - logits).norm() / logits.norm() < 0.03
    kept = [getattr(one, name).nbytes for one in decoder.layers for name in JOINED]
    expected_bytes = weight_bytes(
        read_spec(path), "float32", wanted=lambda name: name.rpartition(".")[2] in JOINED
    )
    assert sum(kept) == expected_bytes


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
    with pytest.raises(ModelNotFoundError, match="GGUF file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_a_file_in_parts_is_read_as_one(tmp_path) -> None:
    """Split as gguf-split does: the metadata in the first part."""
    model, whole = build("llama"), tmp_path / "whole.gguf"
    write(model, "llama", whole, Type.Q8_0)
    names = [f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    reader = gguf.GGUFReader(whole)
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        if number == 0:
            copy_fields(reader, writer)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    first = resolve_model(str(tmp_path / names[1]))
    assert first == tmp_path / names[0]
    tokens = prompt(50)
    found, expected = (
        PagedRunner(load(path, kernels="cpu")).step([("a", tokens)])[0] for path in (first, whole)
    )
    assert torch.equal(found, expected)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=r"one of 2 parts, of which are not there: m-00002"):
        resolve_model(str(first))


def copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("gptoss", "ggml-org/gpt-oss-20b-GGUF"),
        ("qwen4", "The nearest supported: qwen3, qwen2"),
        ("bert", r"GGUF files\. docs/models\.md"),
    ],
)
def test_other_architectures_are_refused(tmp_path, arch, words) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec(tmp_path / "model.gguf")


def test_experts_of_gpt_oss_stay_codes(tmp_path) -> None:
    model, path = build("gpt-oss"), tmp_path / "model.gguf"
    write(model, "gpt-oss", path, lambda name: Type.MXFP4 if ".experts." in name else Type.Q8_0)
    decoder, tokens = load(path, kernels="cpu"), prompt(100)
    experts = decoder.layers[0].expert_down
    assert {one.format for one in experts} == {"mx4"}
    found = PagedRunner(decoder).step([("a", tokens)])[0]
    logits = reference_logits(model, tokens)
    assert (found.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9
