"""Images of a Gemma 3: the tower, and prompts with images in every chunking, by transformers."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_config

import seen
from weft.core.config import EngineConfig
from weft.core.images import PromptImage
from weft.core.plan import Update
from weft.core.types import FinishReason, Request, SamplingParams
from weft.engine.local import LocalEngine
from weft.engine.model import find_model
from weft.kernels.ops import select_ops
from weft.models.siglip import load_siglip
from weft.models.spec_reader import read_spec

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
TEXT = list(b"What is to be seen here, and what is not?")
SOFT = [seen.mark("<image_soft_token>")] * seen.TOKENS
# Prompts by the pictures in them; text stands between.
PROMPTS: dict[str, list[int | list[int]]] = {
    "start": [0, TEXT],
    "middle": [TEXT[:9], 1, TEXT],
    "end": [TEXT, 2],
    "several": [TEXT[:3], 0, TEXT[:1], 1, TEXT[:20], 0, TEXT[:5]],
    "none": [TEXT],
}


@pytest.fixture(scope="module")
def model():
    return seen.model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return seen.save(model, tmp_path_factory.mktemp("gemma3"))


def request(parts: list[int | list[int]], number: int, **more) -> Request:
    ids: list[int] = [seen.mark("<bos>")]
    images = []
    for part in parts:
        if isinstance(part, int):
            data = seen.pixels(seen.picture(part))
            images.append(PromptImage.of(len(ids), seen.TOKENS, seen.SIZE, seen.SIZE, data))
        ids += SOFT if isinstance(part, int) else part
    sampling = more.pop("sampling", GREEDY).with_defaults({"temperature": 0.0})
    sampling = replace(sampling, seed=0)
    return Request(number, tuple(ids), sampling, images=tuple(images), **more)


def pictures(parts) -> list:
    return [seen.picture(part) for part in parts if isinstance(part, int)]


def engine(folder: Path, **settings) -> LocalEngine:
    defaults = {"model": str(folder), "dtype": "float32", "threads": 1, "kv_memory": "4MiB"}
    return LocalEngine(
        {**defaults, "max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu", **settings}
    )


def answers(local: LocalEngine, requests: list[Request]) -> dict[int, list[Update]]:
    """All updates of each request, when all have ended."""
    news: queue.SimpleQueue[Update] = queue.SimpleQueue()
    found: dict[int, list[Update]] = {one.id: [] for one in requests}
    local.client.submit(requests, lambda updates: [news.put(one) for one in updates])
    ends = 0
    while ends < len(requests):
        update = news.get(timeout=60)
        found[update.sequence_id].append(update)
        ends += update.finish is not None
    return found


def tokens_of(updates: list[Update]) -> list[int]:
    return [update.token for update in updates if update.token is not None]


def scores_of(updates: list[Update]) -> list[float]:
    """Log probabilities of the prompt's tokens but the first."""
    pieces = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
    return [entry.logprob for piece in pieces for entry in piece.entries]


def check(model, asked: Request, parts, updates: list[Update]) -> None:
    """Prompt and answer are those of the reference, which reads all of both in one piece."""
    assert updates[-1].error is None
    found = tokens_of(updates)
    logits = seen.reference_logits(model, [*asked.prompt, *found[:-1]], pictures(parts))
    assert logits[len(asked.prompt) - 1 :].argmax(-1).tolist() == found
    wanted = torch.log_softmax(logits, -1)[torch.arange(len(asked.prompt) - 1), asked.prompt[1:]]
    assert scores_of(updates) == pytest.approx(wanted.tolist(), abs=2e-4)


def test_the_tower_gives_what_the_reference_does(model, folder):
    spec = read_spec(folder).vision
    assert spec is not None
    tower = load_siglip(folder, spec, "float32", select_ops("cpu", "float32"))
    image = seen.picture(3)
    given = np.frombuffer(seen.pixels(image), np.uint8).reshape(seen.SIZE, seen.SIZE, 3)
    values = seen.processor()(images=[image], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        wanted = model.model.get_image_features(values).pooler_output[0]
    np.testing.assert_allclose(tower.encode(given), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [20, 21, 37, 64, 256])
def test_prompts_in_every_chunking(model, folder, most):
    local = engine(folder, max_num_batched_tokens=most)
    try:
        assert local.served.images is not None
        asked = {name: request(parts, i + 1) for i, (name, parts) in enumerate(PROMPTS.items())}
        found = answers(local, list(asked.values()))
    finally:
        local.close()
    for name, parts in PROMPTS.items():
        check(model, asked[name], parts, found[asked[name].id])


def test_a_cached_prefix_is_of_the_same_images(model, folder):
    """Also one that ends within an image; another image in its place is never found."""
    sampling = replace(GREEDY, prompt_logprobs=None)
    local = engine(folder, block_size=16)
    cases = {
        1: ([TEXT[:9], 0, TEXT], 0),
        2: ([TEXT[:9], 0, TEXT], 64),
        3: ([TEXT[:9], 1, TEXT], 0),
        4: ([TEXT[:9], 0, TEXT[:3]], 16),
        5: ([TEXT[:9], 1, TEXT[:30]], 48),
        6: ([TEXT[:9], SOFT, TEXT], 0),  # the tokens of an image, and no image
    }
    try:
        for number, (parts, cached) in cases.items():
            asked = request(parts, number, sampling=sampling)
            updates = answers(local, [asked])[number]
            assert max(update.cached_tokens for update in updates) == cached, number
            if number == 6:
                continue
            found = tokens_of(updates)
            logits = seen.reference_logits(model, [*asked.prompt, *found[:-1]], pictures(parts))
            assert logits[len(asked.prompt) - 1 :].argmax(-1).tolist() == found
        assert local.built.images is not None
        assert local.built.images.encoded == 2  # the same content is encoded once
    finally:
        local.close()


def test_a_preempted_sequence_with_an_image_comes_back(model, folder):
    sampling = replace(GREEDY, prompt_logprobs=None, max_tokens=80)
    local = engine(folder, kv_memory="160KiB", prefix_caching=False)
    parts = {1: [TEXT[:5], 0, TEXT], 2: [1, TEXT], 3: [TEXT[:7], 2, TEXT]}
    asked = {number: request(given, number, sampling=sampling) for number, given in parts.items()}
    news: queue.SimpleQueue[Update] = queue.SimpleQueue()
    try:
        first = replace(asked[1], service_class="batch")
        local.client.submit([first], lambda updates: [news.put(one) for one in updates])
        updates = [news.get(timeout=60) for _ in range(20)]
        found = answers(local, [asked[2], asked[3]])
        while updates[-1].finish is None:
            updates.append(news.get(timeout=60))
        found[1] = updates
        assert local.built.scheduler.totals.preemptions > 0
    finally:
        local.close()
    for number, given in parts.items():
        tokens, prompt = tokens_of(found[number]), asked[number].prompt
        assert len(tokens) == 80
        logits = seen.reference_logits(model, [*prompt, *tokens[:-1]], pictures(given))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def test_unsound_images_end_their_request_alone(folder):
    local = engine(folder)
    try:
        wrong = request([0, TEXT], 1)
        small = PromptImage.of(1, seen.TOKENS, 7, 7, bytes(3 * 49))
        wrong = replace(wrong, images=(small,))
        sound = request([TEXT], 2)
        found = answers(local, [wrong, sound])
        assert found[1][-1].finish is FinishReason.ERROR
        assert "size" in found[1][-1].error.message
        assert found[2][-1].finish is FinishReason.LENGTH
    finally:
        local.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images": False}, "images set to false"),
        ({"kernels": "reference"}, "native kernels"),
        ({"max_num_batched_tokens": 19}, "max_num_batched_tokens to 20"),
        ({"tensor_parallel": 2}, "tensor_parallel to 1"),
    ],
)
def test_engines_that_read_no_images_say_why(folder, settings, words):
    values = {"model": str(folder), "device": "cpu", "max_num_seqs": 4, **settings}
    found = find_model(EngineConfig.from_mapping(values))
    assert words in found.no_images


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "model_type"),
        ({"vision_config": {"num_channels": 1}}, "num_channels"),
    ],
)
def test_other_towers_leave_the_text_model(folder, tmp_path, changes, words):
    import json

    config = json.loads((folder / "config.json").read_text())
    vision = {**config["vision_config"], **changes.pop("vision_config", {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit_config(tmp_path, vision_config=vision, **changes)
    spec = read_spec(tmp_path)
    assert spec.vision is None
    assert words in spec.no_vision
