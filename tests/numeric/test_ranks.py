"""Models cut over ranks: sums in order, every number on its rank, the tokens of one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import CASES, LATENT, RECURRENT, prompt, save, saved_once
from paged import PagedRunner
from ranks import greedy, load, on_ranks, tokens_of_processes
from test_models_quant import FORMATS, drawn, formula, rewritten
from transformers import Qwen3MoeForCausalLM

from depth import deep
from weft.core.errors import ConfigError
from weft.kernels.collectives import ALONE, ONE_EXCHANGE_BYTES
from weft.kernels.cpu.matrix import gather
from weft.kernels.process_group import Group
from weft.models.hub import resolve_model
from weft.models.layout import parameters, storage_of, weight_bytes
from weft.models.shard import Shard, cut, shard_range, shard_spec
from weft.models.spec_reader import read_spec

SIZES = (2, 4)
# 3 KV heads, one row for all of them, or recurrent layers.
UNCUT = ("qwen2-window", *RECURRENT, *LATENT)


def pretend(rank: int, size: int) -> SimpleNamespace:
    """A rank without the others, for what needs no sum."""
    return SimpleNamespace(rank=rank, size=size)


# -- collectives


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_the_order_of_ranks_whatever_the_size(tmp_path, size, dtype) -> None:
    columns, draw = 48, torch.Generator().manual_seed(size)
    large = 2 * ONE_EXCHANGE_BYTES // (columns * dtype.itemsize)
    scales = 10.0 ** torch.arange(size)  # so that another order gives other bits
    parts = [(torch.randn(large, columns, generator=draw) * scale).to(dtype) for scale in scales]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    expected = expected.to(dtype)

    def work(group: Group):
        mine = parts[group.rank]
        rows = [group.sum(mine[count : count + 1]) for count in range(3)]
        return group.sum(mine), torch.cat(rows), group.sum(mine[:5, :7].T)

    for whole, rows, odd in on_ranks(size, tmp_path, work):
        assert torch.equal(whole, expected)  # in two exchanges
        assert torch.equal(rows, expected[:3])  # in one
        assert torch.equal(odd, expected[:5, :7].T)
    if size > 2 and dtype == torch.float32:
        backwards = sum(part.float() for part in reversed(parts)).to(dtype)
        assert not torch.equal(backwards, expected)


def test_gathered_columns_are_in_the_order_of_ranks(tmp_path) -> None:
    whole = torch.arange(30.0).view(5, 6)
    found = on_ranks(3, tmp_path, lambda g: g.gather(whole[:, 2 * g.rank : 2 * g.rank + 2]))
    assert all(torch.equal(part, whole) for part in found)


# -- what each rank has


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_once(tmp_path_factory)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_on_a_rank(name, size, folders) -> None:
    spec = read_spec(folders(name))
    try:
        shard_spec(spec, size)
    except ConfigError:
        assert name in UNCUT
        return
    whole = {parameter.name: parameter for parameter in parameters(spec)}
    ranks = [{p.name: p for p in cut(whole.values(), spec, Shard(r, size))} for r in range(size)]
    for parameter in whole.values():
        rows: set[tuple[int, int, str]] = set()
        for rank in ranks:
            part = rank.get(parameter.name)
            if part is None:
                assert parameter.name.endswith(("output_bias", "down_bias"))
                continue
            filled = torch.zeros(part.shape, dtype=torch.int8)
            for piece in part.pieces:
                source = torch.ones(piece.shape, dtype=torch.int8)[piece.part]
                inside = filled[piece.index]
                inside += source.reshape(source.shape[max(0, source.ndim - inside.ndim) :])
                taken = [range(n)[s] for n, s in zip(piece.shape, piece.taken, strict=True)]
                rows |= {(d, n, piece.tensor) for d, span in enumerate(taken) for n in span}
            assert bool((filled == 1).all()), parameter.name
        every = {
            (d, n, piece.tensor)
            for piece in parameter.pieces
            for d, count in enumerate(piece.shape)
            for n in range(count)
        }
        assert rows == every, parameter.name


@pytest.mark.parametrize("name", ["llama-tied-biases", "phi3-plain", "gemma4-moe-key-is-value"])
def test_parts_are_those_of_the_checkpoint(name, folders) -> None:
    folder, size = folders(name), 2
    whole = load(folder, ALONE, "reference")
    ranks = [load(folder, pretend(r, size), "reference") for r in range(size)]
    for number, layer in enumerate(whole.spec.layers):
        parts = [rank.layers[number] for rank in ranks]
        full = whole.layers[number]
        heads, dim = whole.spec.num_heads, layer.head_dim
        query = torch.cat([part.qkv[: heads // size * dim] for part in parts])
        assert torch.equal(query, full.qkv[: heads * dim])
        assert torch.equal(torch.cat([part.output for part in parts], 1), full.output)
        assert torch.equal(torch.cat([part.down for part in parts], 1), full.down)
        gates = [part.gate_up.chunk(2) for part in parts]
        assert torch.equal(
            torch.cat([*(g for g, _ in gates), *(u for _, u in gates)]), full.gate_up
        )
        assert parts[0].down_bias is None or torch.equal(parts[0].down_bias, full.down_bias)
        assert parts[1].down_bias is None
        if layer.moe:
            downs = torch.cat([part.expert_down for part in parts], 2)
            assert torch.equal(downs, full.expert_down)
            assert torch.equal(parts[1].router, full.router)
    assert torch.equal(torch.cat([rank.embedding for rank in ranks]), whole.embedding)


def test_the_memory_of_a_rank_is_that_of_its_tensors(folders) -> None:
    for name in ("llama-tied-biases", "qwen3-moe-mixed", "gemma4"):
        spec, shard = read_spec(folders(name)), Shard(0, 4)
        counts = [math.prod(p.shape) for p in cut(parameters(spec), spec, shard)]
        assert weight_bytes(spec, "bfloat16", shard=shard) == 2 * sum(counts)
        kept = shard_spec(spec, 4).kv_groups
        every = zip(kept, spec.kv_groups, strict=True)
        assert all(part.num_kv_heads == max(1, all_.num_kv_heads // 4) for part, all_ in every)


def test_a_vocabulary_need_not_divide() -> None:
    assert [list(shard_range(5, Shard(rank, 4))) for rank in range(4)] == [[0, 1], [2, 3], [4], []]


def test_what_does_not_divide_is_named_with_what_does(folders) -> None:
    spec = read_spec(folders("llama-gqa"))  # 4 heads, 2 KV heads, 88 wide
    with pytest.raises(ConfigError, match=r"3 does not .* 4 heads\. Sizes that do: 1, 2, 4\."):
        shard_spec(spec, 3)
    with pytest.raises(ConfigError, match=r"8 .* 4 heads"):
        shard_spec(spec, 8)
    with pytest.raises(ConfigError, match=r"2 .* 3 KV heads\. Sizes that do: 1\."):
        shard_spec(read_spec(folders("qwen2-window")), 2)


# -- tokens


TWO = ["llama-gqa", "phi3-plain", "qwen3-moe-mixed", "gemma4-shared-kv"]
RANKS = [(name, 4) for name in CASES if name not in UNCUT] + [(name, 2) for name in TWO]


@pytest.mark.parametrize(("name", "size"), RANKS)
def test_ranks_give_the_tokens_of_one(name, size, folders, tmp_path) -> None:
    longest = {"max_model_len": CASES[name].max_model_len}
    expected = greedy(load(folders(name), ALONE, **longest), prompt(40), 8)

    def work(group: Group):
        return greedy(load(folders(name), group, **longest), prompt(40), 8)

    assert on_ranks(size, tmp_path, work) == [expected] * size


@pytest.mark.parametrize("name", ["olmo2", "olmo2-one-kv-head", "olmo3-layers"])
def test_norms_over_the_heads_of_all_ranks_with_plain_torch(name, folders, tmp_path) -> None:
    given = {"max_model_len": CASES[name].max_model_len, "kernels": "reference"}
    exact = PagedRunner(load(folders(name), ALONE, **given)).step([("a", prompt(40))])[0]

    def work(group: Group):
        decoder = load(folders(name), group, **given)
        return PagedRunner(decoder).step([("a", prompt(40))])[0]

    found = on_ranks(2, tmp_path, work)
    assert torch.equal(*found)
    assert 0 < (found[0] - exact).abs().max() < 1e-4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=deep)])
def test_processes_give_the_tokens_of_one(size, folders, tmp_path) -> None:
    families = {
        name: folders(name) for name in ("llama-tied-biases", "qwen3-moe", "gemma4", "olmo2")
    }
    jobs = [
        {"folder": str(folder), "prompt": [30, 40, 50, 60], "count": 6}
        for folder in (*families.values(), resolve_model("builtin"))
    ]
    expected = [greedy(load(Path(j["folder"]), ALONE), j["prompt"], j["count"]) for j in jobs]
    assert tokens_of_processes(size, tmp_path, jobs) == [expected] * size


def test_logits_of_a_vocabulary_that_does_not_divide_can_be_sampled_from(folders, tmp_path) -> None:
    tokens = np.zeros((2, CASES["llama-gqa"].config().hidden_size), np.float32)

    def work(group: Group):
        decoder = load(folders("llama-gqa"), group)
        assert decoder.spec.vocab_size % group.size
        logits = decoder.logits(tokens)
        assert logits.flags.c_contiguous
        return logits

    for found in on_ranks(2, tmp_path, work):
        np.testing.assert_array_equal(found, np.zeros((2, found.shape[1])))


@pytest.mark.parametrize("name", ["qwen3-full", "olmo2-one-kv-head"])
def test_ranks_agree_to_the_bit_and_rows_are_independent(name, folders, tmp_path) -> None:
    folder = folders(name)
    exact = PagedRunner(load(folder, ALONE)).step([("a", prompt(40))])[0]

    def work(group: Group):
        decoder = load(folder, group)
        assert decoder.bind([], []) is None
        one = PagedRunner(decoder).step([("a", prompt(40))])[0]
        rows = [("b", prompt(90, 1)), ("a", prompt(40)), ("c", prompt(3, 2))]
        return one, PagedRunner(decoder).step(rows)[1]

    results = on_ranks(4, tmp_path, work)
    for one, beside_others in results:
        assert torch.equal(one, results[0][0])
        assert torch.equal(beside_others, one)
    assert 0 < (results[0][0] - exact).abs().max() < 1e-4


LONG = [("a", prompt(40)), ("b", prompt(24, 1))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["llama-tied-biases", "gemma3", "qwen3-moe-mixed", "gemma4-moe-key-is-value"]
)
def test_norms_of_a_share_of_the_rows_give_the_same_bits(
    name, size, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr("weft.kernels.process_group.ONE_EXCHANGE_BYTES", 2048)  # 8 rows of 64
    monkeypatch.setattr("weft.kernels.process_group.TIMEOUT_S", 30)
    longest, shares = {"max_model_len": CASES[name].max_model_len}, []

    def work(group: Group):
        decoder, found = load(folders(name), group, **longest), []
        for group.by_rows in (False, True):
            runner = PagedRunner(decoder)
            found.append(torch.cat([*runner.step(LONG), *runner.step([("a", prompt(9, 2))])]))
        return found

    def sum_rows(group: Group, x: np.ndarray) -> np.ndarray:
        found = exact(group, x)
        shares.append(len(found) * size == len(x) == 64)
        return found

    exact = Group.sum_rows
    monkeypatch.setattr(Group, "sum_rows", sum_rows)
    for whole, by_rows in on_ranks(size, tmp_path, work):
        assert torch.equal(whole, by_rows)
    assert all(shares)
    # After attention, and after the MLP or the experts, or both.
    assert len(shares) >= size * 2 * read_spec(folders(name)).num_layers


# -- integers


@pytest.fixture
def quantised(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=96, hidden_size=128, intermediate_size=256, **sizes)
    original = save(LlamaForCausalLM(config), tmp_path / "original")

    def made(name: str) -> Path:
        pack, bits, group, config = FORMATS[name]

        def store(_: str, weight: torch.Tensor):
            numbers = drawn(*weight.shape, bits, group)
            return pack(_, *numbers, bits), formula(*numbers, group)

        settings = {**config, "bits": bits, "group_size": group}
        rewritten(original, tmp_path / name, settings, store)
        return tmp_path / name

    return made


@pytest.mark.parametrize("name", ["awq-32", "gptq-64", "gptq-int8"])
def test_stored_integers_are_cut_between_groups(name, quantised, tmp_path) -> None:
    folder, size = quantised(name), 2
    whole = load(folder, ALONE, "reference")
    for rank in range(size):
        part = load(folder, pretend(rank, size))  # native, in integers
        layer, full = part.layers[0], whole.layers[0]
        assert layer.down.format in ("int4", "int8")
        columns = slice(128 * rank, 128 * (rank + 1))
        assert torch.equal(gather(layer.down, torch.arange(128)), full.down[:, columns])
        rows = torch.cat((full.gate_up[columns], full.gate_up[256:][columns]))
        assert torch.equal(gather(layer.gate_up, torch.arange(256)), rows)
    tokens = torch.randint(0, 96, (50,)).tolist()
    exact = PagedRunner(whole).step([("a", tokens)])[0]
    found = on_ranks(
        size, tmp_path, lambda g: PagedRunner(load(folder, g)).step([("a", tokens)])[0]
    )
    assert torch.equal(found[0], found[1])
    assert 0 < (found[0] - exact).norm() / exact.norm() < 0.05


def test_stored_experts_are_cut_between_groups(tmp_path) -> None:
    config = CASES["qwen3-moe"].config()
    config.moe_intermediate_size, config.num_hidden_layers = 64, 1
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    source = save(model, tmp_path / "source")
    pack, bits, group, settings = FORMATS["awq-32"]

    def store(module: str, weight: torch.Tensor):
        numbers = drawn(*weight.shape, bits, group)
        return pack(module, *numbers, bits), formula(*numbers, group)

    folder = tmp_path / "stored"
    rewritten(source, folder, {**settings, "bits": bits, "group_size": group}, store)
    whole = load(folder, ALONE, "reference").layers[0]
    for rank in range(2):
        part = load(folder, pretend(rank, 2)).layers[0]
        columns = slice(32 * rank, 32 * (rank + 1))
        found = gather(part.expert_down[5], torch.arange(64))
        assert torch.equal(found, whole.expert_down[5][:, columns])
    with pytest.raises(ConfigError, match=r"groups of 32 of 64 inputs\. Sizes that do: 1, 2"):
        shard_spec(read_spec(folder), 4)


def test_groups_that_do_not_divide_are_refused(quantised) -> None:
    with pytest.raises(ConfigError, match=r"groups of 128 of 256 inputs\. Sizes that do: 1, 2"):
        shard_spec(read_spec(quantised("awq-128")), 4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3-moe", "gemma4-moe-key-is-value"])
def test_a_rank_rounds_its_part(name, quantize, folders) -> None:
    def rounding(parameter: str):
        return storage_of(parameter, quantize, 32)

    exact = load(folders(name), ALONE, "reference")
    for rank in range(2):
        part = load(folders(name), pretend(rank, 2), rounding=rounding)
        for mine, full in zip(part.layers, exact.layers, strict=True):
            width = full.expert_down.shape[2] // 2
            columns = slice(rank * width, (rank + 1) * width)
            for expert in range(len(full.expert_down)):
                found = gather(mine.expert_down[expert], torch.arange(64))
                wanted = full.expert_down[expert][:, columns]
                assert (found - wanted).norm() / wanted.norm() < (
                    0.01 if quantize == "int8" else 0.2
                )
                gates, ups = full.expert_gate_up[expert].chunk(2)
                wanted = torch.cat((gates[columns], ups[columns]))
                found = gather(mine.expert_gate_up[expert], torch.arange(2 * width))
                assert (found - wanted).norm() / wanted.norm() < (
                    0.01 if quantize == "int8" else 0.2
                )
