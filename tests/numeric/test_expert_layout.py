"""Experts as gpt-oss stores them: transposed, gates between what they multiply, with biases."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from weft.kernels.arrays import to_numpy, to_torch
from weft.kernels.ops import select_ops
from weft.models.decoder import Decoder
from weft.models.layers import feed_forward
from weft.models.layout import parameters, storage_of
from weft.models.loader import Checkpoint
from weft.models.shard import Shard, shard_spec
from weft.models.spec import CheckpointLayout, LayerSpec, ModelSpec, MoeSpec, RopeSpec

EXPERTS, TOP_K, HIDDEN, SIZE = 5, 2, 64, 40
SPEC = ModelSpec(
    vocab_size=9,
    hidden_size=HIDDEN,
    num_heads=2,
    layers=(LayerSpec(2, 16, SIZE, moe=True),),
    ropes=(RopeSpec("default", 1e4, 16),),
    norm_eps=1e-6,
    max_position_embeddings=64,
    attention_scale=0.25,
    tied_embeddings=True,
    activation="swiglu_oai",
    moe=MoeSpec(EXPERTS, TOP_K, SIZE, normalise=True, router_bias=True, expert_bias=True),
    layout=CheckpointLayout(
        stacked_experts=True,
        transposed_experts=True,
        interleaved_experts=True,
        renamed={"mlp.gate": "mlp.router"},
    ),
)


@pytest.fixture
def stored(tmp_path):
    """A checkpoint of one layer, and what transformers makes of its rows."""
    draw = torch.Generator().manual_seed(5)
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    experts, router = GptOssExperts(config), GptOssTopKRouter(config)
    tensors = {}
    for piece in (piece for parameter in parameters(SPEC) for piece in parameter.pieces):
        tensor = torch.randn(piece.stored_shape, generator=draw)
        tensors[f"model.{piece.tensor}"] = tensor if tensor.ndim == 1 else tensor / 5
    tensors["model.layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, tmp_path / "model.safetensors")
    for module, name in ((experts, "experts."), (router, "router.")):
        prefix = f"model.layers.0.mlp.{name}"
        module.load_state_dict(
            {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        )
    x = torch.randn(11, HIDDEN, generator=draw) * 3
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    with torch.inference_mode():
        _, shares, ids = router(normed)
        return tmp_path, x, experts(normed, ids, shares)


def loaded(folder, kernels: str, quantize: str = "none", shard: Shard | None = None) -> Decoder:
    ops = select_ops("cpu", "float32", kernels)
    spec = SPEC if shard is None else shard_spec(SPEC, shard.size)
    with ExitStack() as files:
        checkpoint = Checkpoint(folder, SPEC, files, shard or Shard())
        rounding = lambda name: storage_of(name, quantize, 32)  # noqa: E731
        return Decoder(spec, checkpoint.load("float32", ops, rounding), ops)


def given(decoder: Decoder, x: Tensor) -> Tensor:
    rows = to_numpy(x) if decoder.on_numpy else x
    layer, weights = decoder.spec.layers[0], decoder.layers[0]
    found = feed_forward(decoder.spec, layer, weights, rows, decoder.ops)
    return to_torch(found) if decoder.on_numpy else found


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_experts_are_those_of_transformers(stored, kernels) -> None:
    folder, x, expected = stored
    assert (expected.abs().max(), expected.std()) > (1.0, 0.1)
    torch.testing.assert_close(given(loaded(folder, kernels), x), expected, rtol=1e-4, atol=1e-4)


def test_rounded_experts_come_expert_by_expert(stored) -> None:
    folder, x, expected = stored
    decoder = loaded(folder, "cpu", "int8")
    assert decoder.layers[0].expert_down[0].format == "int8"
    gap = (given(decoder, x) - expected).norm() / expected.norm()
    assert 1e-4 < gap < 0.05


def test_parts_of_ranks_add_up(stored) -> None:
    """The bias of the second product is on the first rank alone."""
    folder, x, expected = stored
    parts = [loaded(folder, "cpu", shard=Shard(rank, 2)) for rank in range(2)]
    assert [part.layers[0].expert_down_bias is None for part in parts] == [False, True]
    found = sum(given(part, x) for part in parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
