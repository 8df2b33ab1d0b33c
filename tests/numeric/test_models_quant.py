"""Quantised checkpoints: each format's own formula, number by number, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build, edit_config, save
from paged import PagedRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from weft.core.errors import CheckpointError, UnsupportedModelError
from weft.kernels.cpu.matrix import gather
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.models.spec_reader import read_spec
from weft.models.weight_files import SINGLE

CPU = torch.device("cpu")
HIDDEN, INNER = 128, 256
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load(folder: Path) -> Decoder:
    return load_model(folder, "float32", None, select_ops("cpu", "float32", "reference"))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("original"))


def words(values: Tensor, bits: int) -> Tensor:
    """Pack the last dimension into 32-bit words, lowest bits first, by Python's own integers."""
    per_word = 32 // bits
    rows = []
    for row in values.reshape(-1, values.shape[-1]).tolist():
        row += [0] * (-len(row) % per_word)
        packed = [
            sum(v << (bits * i) for i, v in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32).reshape(*values.shape[:-1], -1)


def drawn(rows: int, columns: int, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random values [N, K], zero points [N, G] and float16 scales [N, G]."""
    values = torch.randint(0, 2**bits, (rows, columns))
    zeros = torch.randint(3 * 2**bits // 8, 5 * 2**bits // 8, (rows, columns // group))
    return values, zeros, ((torch.rand(rows, columns // group) * 0.02 + 1e-3) * 16 / 2**bits).half()


def formula(values: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    zeros, scales = (x.repeat_interleave(group, 1) for x in (zeros, scales.float()))
    return (values - zeros).float() * scales


def awq(name: str, values: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def pack(x: Tensor) -> Tensor:  # [K or G, N], the columns of each word in AWQ's order
        return words(x.T.reshape(x.shape[1], -1, 8)[..., order].flatten(1), bits)

    return {
        f"{name}.qweight": pack(values),
        f"{name}.qzeros": pack(zeros),
        f"{name}.scales": scales.T.contiguous(),
    }


def gptq(
    name: str, values: Tensor, zeros: Tensor, scales: Tensor, bits: int, offset: int = 1
) -> dict[str, Tensor]:
    return {
        f"{name}.qweight": words(values, bits).T.contiguous(),
        f"{name}.qzeros": words(zeros.T - offset, bits),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": (
            torch.arange(values.shape[1]) // (values.shape[1] // len(scales.T))
        ).int(),
    }


def packed(
    name: str, values: Tensor, zeros: Tensor, scales: Tensor, bits: int
) -> dict[str, Tensor]:
    return {
        f"{name}.weight_packed": words(values, bits),
        f"{name}.weight_scale": scales.bfloat16(),
        f"{name}.weight_shape": torch.tensor(values.shape),
        f"{name}.weight_zero_point": words(zeros.T, bits).T.contiguous(),
    }


def compressed_config(layout: str, bits: int, group: int | None, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def rewritten(
    original: Path, folder: Path, config: dict[str, Any], store: Any
) -> dict[str, Tensor]:
    """Write the checkpoint with every linear weight of a layer as ``store`` says.

    ``store(module, weight)`` returns the tensors and the weight that they stand for.
    """
    tensors, expected = load_file(original / SINGLE), {}
    for key in list(tensors):
        module, _, kind = key.rpartition(".")
        if module.endswith(LINEARS) and kind == "weight":
            parts, expected[module.rpartition(".")[2]] = store(module, tensors.pop(key))
            tensors |= parts
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE)
    (folder / "config.json").write_text((original / "config.json").read_text())
    edit_config(folder, quantization_config=config)
    return expected


def check(folder: Path, expected: dict[str, Tensor]) -> None:
    layer = load(folder).layers[0]
    assert torch.equal(layer.qkv, torch.cat([expected[n] for n in ("q_proj", "k_proj", "v_proj")]))
    assert torch.equal(layer.output, expected["o_proj"])
    assert torch.equal(layer.gate_up, torch.cat([expected["gate_proj"], expected["up_proj"]]))
    assert torch.equal(layer.down, expected["down_proj"])


FORMATS = {
    "awq-32": (awq, 4, 32, {"quant_method": "awq", "version": "gemm", "zero_point": True}),
    "awq-64": (awq, 4, 64, {"quant_method": "awq", "version": "GEMM", "do_fuse": False}),
    "awq-128": (awq, 4, 128, {"quant_method": "awq", "modules_to_not_convert": None}),
    "gptq-64": (gptq, 4, 64, {"quant_method": "gptq", "desc_act": False, "sym": False}),
    "gptq-128": (gptq, 4, 128, {"quant_method": "gptq", "checkpoint_format": "gptq"}),
    "gptq-int8": (gptq, 8, 32, {"quant_method": "gptq", "damp_percent": 0.01}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_that_of_the_formula(original, tmp_path, name) -> None:
    pack, bits, group, config = FORMATS[name]

    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, bits, group)
        return pack(module, *numbers, bits), formula(*numbers, group)

    config = {**config, "bits": bits, "group_size": group}
    check(tmp_path, rewritten(original, tmp_path, config, store))


def test_gptq_v2_stores_zero_points_as_they_are(original, tmp_path) -> None:
    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, 4, 64)
        return gptq(module, *numbers, 4, offset=0), formula(*numbers, 64)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}
    check(tmp_path, rewritten(original, tmp_path, config, store))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_packed_with_zero_points(original, tmp_path, bits, group) -> None:
    def store(module: str, weight: Tensor):
        values, zeros, scales = drawn(*weight.shape, bits, group)
        scales = scales.bfloat16()
        parts = packed(module, values, zeros, scales, bits)
        return parts, formula(values, zeros, scales, group)

    config = compressed_config("pack-quantized", bits, group, symmetric=False)
    check(tmp_path, rewritten(original, tmp_path, config, store))


def test_rows_of_pairs_that_are_rotated_as_halves_keep_codes_and_scales(tmp_path) -> None:
    original, size = save(build("ernie-biases"), tmp_path / "original"), 16
    expected: dict[str, Tensor] = {}  # of the first layer

    def store(module: str, weight: Tensor):
        columns = weight.shape[1]
        values, zeros, scales = drawn(*weight.shape, 8, columns)
        scales = scales.bfloat16()
        whole = formula(values, zeros, scales, columns)
        if ".layers.0." in module:
            expected[module.rpartition(".")[2]] = whole
        return packed(module, values, zeros, scales, 8), whole

    config = compressed_config("pack-quantized", 8, None, symmetric=False)
    rewritten(original, tmp_path / "stored", config, store)
    for name in ("q_proj", "k_proj"):
        heads = expected[name].unflatten(0, (-1, size))
        expected[name] = torch.cat((heads[:, 0::2], heads[:, 1::2]), 1).flatten(0, 1)
    check(tmp_path / "stored", expected)


REFEREED = [
    ("pack-quantized", 4, 32, True),
    ("pack-quantized", 4, 128, False),
    ("pack-quantized", 8, None, True),
    ("int-quantized", 8, None, True),
]


@pytest.mark.parametrize(("layout", "bits", "group", "symmetric"), REFEREED)
def test_what_compressed_tensors_writes(original, tmp_path, layout, bits, group, symmetric) -> None:
    """Its own compressor writes the tensors, its own decompressor says what they stand for."""
    # Not above: tests on GPUs take helpers from here, where this package may be absent.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = compressed_config(layout, bits, group, symmetric)
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def store(module: str, weight: Tensor):
        cut = weight.reshape(weight.shape[0], -1, group or weight.shape[1])
        if symmetric:
            scales, zeros = cut.abs().amax(-1) / (2 ** (bits - 1) - 1), None
        else:
            scales = (cut.amax(-1) - cut.amin(-1)) / (2**bits - 1)
            zeros = (-(2 ** (bits - 1)) - cut.amin(-1) / scales).round().to(torch.int8)
        state = {"weight": weight, "weight_scale": scales}
        state |= {} if zeros is None else {"weight_zero_point": zeros}
        stored = compressor.compress(state, scheme)
        plain = compressor.decompress(stored, scheme)["weight"]
        assert (plain - weight).abs().max() < 0.1
        return {f"{module}.{key}": value for key, value in stored.items()}, plain

    check(tmp_path, rewritten(original, tmp_path, config, store))


def gptq_checkpoint(original: Path, folder: Path) -> Path:
    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, 4, 64)
        return gptq(module, *numbers, 4), formula(*numbers, 64)

    rewritten(original, folder, {"quant_method": "gptq", "bits": 4, "group_size": 64}, store)
    return folder


def test_inputs_in_another_order_are_refused(original, tmp_path) -> None:
    folder = gptq_checkpoint(original, tmp_path)
    tensors = load_file(folder / SINGLE)
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*desc_act"):
        load(folder)


def test_a_missing_part_is_named(original, tmp_path) -> None:
    folder = gptq_checkpoint(original, tmp_path)
    tensors = load_file(folder / SINGLE)
    tensors.pop("model.layers.0.mlp.up_proj.qzeros")
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"missing.*up_proj\.qzeros"):
        load(folder)


def test_a_group_size_that_does_not_fit_is_named(original, tmp_path) -> None:
    folder = gptq_checkpoint(original, tmp_path)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(CheckpointError, match=r"scales.*config\.json makes it"):
        load(folder)


CONTRADICTIONS = {
    "two groups": {"config_groups": {"a": {"targets": ["Linear"]}, "b": {"targets": ["Linear"]}}},
    "sparse": {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "float": {"format": "nvfp4-pack-quantized"},
    "unknown": {"twist": 3},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_unknown_compression_is_refused(original, tmp_path, name) -> None:
    config = compressed_config("pack-quantized", 4, 64, True) | CONTRADICTIONS[name]
    values = json.loads((original / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=next(iter(CONTRADICTIONS[name]))):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_the_native_kernels_compute_with_the_stored_integers(original, tmp_path, name) -> None:
    pack, bits, group, config = FORMATS[name]

    def store(module: str, weight: Tensor):
        numbers = drawn(*weight.shape, bits, group)
        return pack(module, *numbers, bits), formula(*numbers, group)

    rewritten(original, tmp_path, {**config, "bits": bits, "group_size": group}, store)
    ops = select_ops("cpu", "float32", "cpu")
    native = load_model(tmp_path, "float32", None, ops)
    assert native.layers[0].down.format == f"int{bits}"
    rows = torch.arange(INNER)
    assert torch.equal(
        gather(native.layers[0].gate_up, rows), load(tmp_path).layers[0].gate_up[:INNER]
    )
    tokens = torch.randint(0, 96, (50,)).tolist()
    exact, found = (PagedRunner(d).step([("a", tokens)])[0] for d in (load(tmp_path), native))
    assert 0 < (found - exact).norm() / exact.norm() < 0.05
