"""Whole models of several families with the kernels of GPUs, interpreted, against plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from checkpoints import CASES, build, prompt, save
from mxfp4_checkpoint import save_in_mxfp4
from paged import PagedRunner, Rows
from ranks import greedy, tokens_of_processes
from test_latent_codes import fine, save_original, stored
from test_models_blocks import FINE

import where
from depth import deep_on_cpu
from weft.kernels import float8
from weft.kernels.ops import select_ops
from weft.kernels.triton.coded_matrix import CodedMatrix
from weft.kernels.unavailable import KernelUnavailable
from weft.models.fused import fusable
from weft.models.layout import storage_of
from weft.models.loader import load_model

CPU, DEVICE = torch.device("cpu"), torch.device(where.NAME)
TOLERANCE = 1e-4  # absolute, on float32 logits
FAMILIES = [
    "qwen3-full",
    "gemma4-shared-kv",
    "qwen3-moe",
    "gpt-oss",
    "glm4-moe",
    "qwen2-moe",
    "youtu-one-query-matrix",
    "deepseek-v3",
    "apertus",
    "step",
    "lfm3-plain",
    "granite-hybrid",
    "kimi-linear-groups",
]
FAMILIES += [pytest.param(name, marks=deep_on_cpu) for name in ("qwen2-window", "phi4-partial")]
DEEP = (
    "granite-swa",
    "muse-glimmer",
    "afmoe",
    "gemma2",
    "glm4",
    "granite",
    "hunyuan",
    "olmo3",
    "smollm3-windows",
)
DEEP += ("glm4-moe-groups", "minimax-m2-moe", "mixtral-moe-window", "qwen2-moe-mixed", "ernie-moe")
DEEP += ("olmoe", "dots1-moe-windows", "granite-moe", "granite-moe-shared", "exaone-moe", "hy3-moe")
DEEP += ("youtu", "deepseek-v3-yarn", "deepseek-v2", "deepseek-v2-lite", "glm-flash")
DEEP += ("qwen3.5", "qwen3-next-mixed", "lfm2-biases", "lfm2-moe", "lfm2-moe-plain", "lfm3")
DEEP += ("granite-hybrid-moe", "nemotron-h", "nemotron-h-ends", "kimi-linear", "nemotron-h-moe")
DEEP += ("bailing-hybrid", "bailing-hybrid-plain-gate")
DEEP += ("glm-flash-groups", "mimo-flash", "laguna", "ling2", "mellum", "arcee")
FAMILIES += [pytest.param(name, marks=deep_on_cpu) for name in DEEP]
# Two rows of other lengths, then one token for each of them beside the prompt of a third.
STEPS: list[Rows] = [
    [("a", prompt(9, 1)), ("b", prompt(2, 2))],
    [("a", [5]), ("b", [7]), ("c", prompt(3, 3))],
]


@pytest.fixture(autouse=True)
def _where_kernels_run():
    """New tensors are on the CPU, as in an engine, whatever the device of the model."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_plain_torch(name, tmp_path) -> None:
    folder = save(build(name), tmp_path)
    decoders = [
        load_model(
            folder, "float32", CASES[name].max_model_len,
            select_ops(device, "float32", kernels),
        )
        for device, kernels in (("cpu", "reference"), (str(DEVICE), "triton"))
    ]  # fmt: skip
    plain, decoder = decoders
    whole = all(fusable(decoder.spec, layer, decoder.ops.fused) for layer in decoder.spec.layers)
    expected, runners = PagedRunner(plain), [PagedRunner(decoder, bound=whole)]
    if name in ("qwen3-full", "deepseek-v3"):
        runners.append(PagedRunner(decoder))
    for rows in STEPS:
        truth = torch.cat(expected.step(rows))
        assert truth.std() > 0.3, "logits too flat to tell models apart"
        for runner in runners:
            gap = (torch.cat(runner.step(rows)) - truth).abs().max().item()
            assert gap < TOLERANCE, f"logits differ by {gap:.2e}"


def test_experts_in_mxfp4_are_those_of_plain_torch(tmp_path) -> None:
    """Blocks as gpt-oss stores them, with biases, beside sinks."""
    save_in_mxfp4(tmp_path)
    plain, decoder = (
        load_model(tmp_path, "float32", None, select_ops(device, "float32", kernels))
        for device, kernels in (("cpu", "reference"), (str(DEVICE), "triton"))
    )
    runners = PagedRunner(plain), PagedRunner(decoder, bound=True)
    for rows in STEPS:
        truth, found = (torch.cat(runner.step(rows)) for runner in runners)
        assert truth.std() > 0.3
        assert (found - truth).abs().max() < TOLERANCE


@deep_on_cpu
def test_latent_attention_in_fp8_blocks_is_that_of_plain_torch(tmp_path) -> None:
    """What K and V are made of is floats, as its heads cut through blocks; all else keeps codes."""
    folder = tmp_path / "stored"
    folder.mkdir()
    stored(save_original(tmp_path / "original"), folder, FINE, fine)
    plain, decoder = (
        load_model(folder, "float32", None, select_ops(device, "float32", kernels))
        for device, kernels in (("cpu", "reference"), (str(DEVICE), "triton"))
    )
    assert isinstance(decoder.layers[1].qkv, CodedMatrix)
    runners = PagedRunner(plain), PagedRunner(decoder, bound=True)
    for rows in STEPS:
        truth, found = (torch.cat(runner.step(rows)) for runner in runners)
        assert (found - truth).norm() < 1e-4 * truth.norm()


@pytest.mark.parametrize("name", ["llama-gqa", pytest.param("qwen3-moe", marks=deep_on_cpu)])
def test_weights_in_fp8_are_those_of_plain_torch(name, tmp_path, monkeypatch) -> None:
    """Rounded at load and activations by token or group, with the same codes but where a tie falls.

    The kernels round what an output or a down projection multiplies in groups: 32 of float32.
    """
    folder = save(build(name), tmp_path)
    rounding = partial(storage_of, quantize="fp8", group=64)
    plain, rounded, decoder = (
        load_model(folder, "float32", None, select_ops(device, "float32", kernels), way)
        for device, kernels, way in (
            ("cpu", "reference", lambda _: None),
            ("cpu", "reference", rounding),
            (str(DEVICE), "triton", rounding),
        )
    )
    by_token = float8.rounded_inputs
    monkeypatch.setattr(
        float8,
        "rounded_inputs",
        lambda x, inputs, group=None: (
            float8.round_groups(x, 32).widen() if inputs == "groups" else by_token(x, inputs, group)
        ),
    )
    for layer in rounded.layers:
        for matrix in (layer.output, layer.down):
            if matrix is not None:
                matrix.inputs = "groups"
    whole = all(fusable(decoder.spec, layer, decoder.ops.fused) for layer in decoder.spec.layers)
    runners = PagedRunner(plain), PagedRunner(rounded), PagedRunner(decoder, bound=whole)
    for rows in STEPS:
        exact, truth, found = (torch.cat(runner.step(rows)) for runner in runners)
        lost = (truth - exact).abs().max().item()
        assert (found - truth).abs().max().item() < 0.2 * lost


@pytest.mark.skipif(where.ON_GPU, reason="ranks of the interpreter are processes of a CPU")
def test_two_ranks_give_the_tokens_of_one_where_norms_span_all_heads(tmp_path) -> None:
    folder = save(build("olmo2"), tmp_path / "model")
    plain = load_model(folder, "float32", None, select_ops("cpu", "float32", "reference"))
    expected = greedy(plain, prompt(9, 1), 3)
    job = {"folder": str(folder), "prompt": prompt(9, 1), "count": 3, "kernels": "triton"}
    assert tokens_of_processes(2, tmp_path, [job]) == [[expected]] * 2


FEW = {"log_softmax", "top_k", "penalise"}  # which few requests need, or none beside graphs


def test_every_op_has_a_kernel_for_gpus() -> None:
    names = select_ops(str(DEVICE), "bfloat16", "triton", {"linear": "int8"}).describe()
    assert set(names) == set(select_ops("cpu", "bfloat16", "reference").describe())
    assert all(n.startswith("triton") for op, n in names.items() if op not in FEW)
    assert names["linear"] == "triton, int8 weights"
    assert names["logits"] == "triton, bfloat16 weights"


def test_only_tests_run_them_on_a_cpu(monkeypatch) -> None:
    monkeypatch.setattr("weft.kernels.triton.launch.interpreted", lambda: False)
    with pytest.raises(KernelUnavailable, match="TRITON_INTERPRET"):
        select_ops("cpu", "float32", "triton")
    with pytest.raises(KernelUnavailable, match="kernels='cpu' has no kernel for device"):
        select_ops("cuda", "float32", "cpu")
