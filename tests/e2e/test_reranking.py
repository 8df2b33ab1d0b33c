"""Rerankers and embedding models behind a real server, against transformers' numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

import pooled
from live import SMALL, Server, eventually, run, serving
from weft import LLM
from weft.text.pairs import QWEN3_RERANKER, WEB_SEARCH

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts two bodies.", "", "no " * 30]
KEY = "secret"
START = [*SMALL, "--dtype", "float32"]


@pytest.fixture(scope="module")
def model():
    return pooled.model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    return pooled.save(model, tmp_path_factory.mktemp("r") / "Qwen3-Reranker-tiny")


@pytest.fixture(scope="module")
def reranker(folder, tmp_path_factory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("data")
    options = ["--model", str(folder), "--served-model-name", "reranker", "--api-key", KEY]
    with serving(data, *START, *options, "--data-dir", str(data / "files")) as server:
        yield server


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Iterator[Server]:
    made = pooled.save_embedding(pooled.model(), tmp_path_factory.mktemp("e") / "embedding")
    options = ["--model", str(made), "--served-model-name", "embedder"]
    with serving(tmp_path_factory.mktemp("log"), *START, *options) as server:
        yield server


@pytest.fixture(scope="module")
def probabilities(model) -> list[float]:
    """Of yes against no, by transformers, after the documented prompt."""
    tokenizer = pooled.tokenizer()
    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    found = []
    for document in DOCUMENTS:
        text = QWEN3_RERANKER.format(instruction=WEB_SEARCH, query=QUERY, document=document)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, [yes, no]].double()
        found.append(float(torch.softmax(logits, -1)[0]))
    return found


def post(server: Server, path: str, key: str = KEY, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def test_relevance_is_the_probability_of_yes(reranker, probabilities):
    fields = {"model": "reranker", "query": QUERY, "documents": DOCUMENTS}
    whole = post(reranker, "/v1/rerank", **fields).json()
    scores = {row["index"]: row["relevance_score"] for row in whole["results"]}
    assert [scores[i] for i in range(len(DOCUMENTS))] == pytest.approx(probabilities, abs=1e-5)
    assert [*scores] == sorted(scores, key=lambda i: -scores[i])
    best = post(reranker, "/v2/rerank", **fields, top_n=1, return_documents=False).json()
    assert best["results"] == [
        {name: whole["results"][0][name] for name in ("index", "relevance_score")}
    ]
    pairs = {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS}
    scored = post(reranker, "/score", **pairs).json()
    assert [row["score"] for row in scored["data"]] == [scores[i] for i in range(len(DOCUMENTS))]


def test_documents_share_the_prefix_of_their_query(reranker):
    """What is counted, and what the prefix cache found: most of every prompt but the first."""
    names = [f"weft:{name}_total" for name in ("prompt_tokens", "generation_tokens")]
    names += ["weft:prefix_cache_hits_total"]
    headers = {"authorization": f"Bearer {KEY}"}
    before = [reranker.metrics(name, headers=headers)[0] for name in names]
    documents = [f"{number} yes" for number in range(70)]  # two waves
    fields = {"query": "Which number?", "documents": documents, "priority": 1}
    used = post(reranker, "/rerank", **fields).json()["usage"]
    after = [reranker.metrics(name, headers=headers)[0] for name in names]
    prompts, outputs, hits = (b - a for a, b in zip(before, after, strict=True))
    assert (prompts, outputs) == (used["prompt_tokens"], 0)
    assert hits > 0.5 * prompts


def test_the_same_server_generates_beside_it(reranker, probabilities):
    """Streams and scores at once: neither changes the other."""
    text = {"model": "reranker", "prompt": "yes", "max_tokens": 60, "temperature": 0}
    alone = post(reranker, "/v1/completions", **text).json()["choices"][0]["text"]
    fields = {"query": QUERY, "documents": DOCUMENTS * 8}
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(post, reranker, "/v1/completions", **text) for _ in range(2)]
        ranks = [pool.submit(post, reranker, "/v1/rerank", **fields) for _ in range(2)]
        assert [one.result().json()["choices"][0]["text"] for one in texts] == [alone] * 2
        for rank in ranks:
            for row in rank.result().json()["results"]:
                wanted = probabilities[row["index"] % len(DOCUMENTS)]
                assert row["relevance_score"] == pytest.approx(wanted, abs=1e-5)
    eventually(lambda: reranker.metrics("weft:num_requests_running", headers=AUTH) == [0])


AUTH = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"])
def test_every_path_demands_the_key(reranker, path):
    answer = post(reranker, path, key="wrong", query="q", documents=["d"])
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


def test_wrong_uses_get_sentences(reranker):
    cases = {
        "The list of documents is empty.": {"query": "q", "documents": []},
        "'documents' is wrong: expected array, got str.": {"query": "q", "documents": "d"},
        "Missing required parameter: 'query'.": {"documents": ["d"]},
        "cuts it.": {"query": "q", "documents": ["d", "no " * 600]},
    }
    for words, body in cases.items():
        error = post(reranker, "/v1/rerank", **body).json()["error"]
        assert error["message"].endswith(words)
        assert error.keys() == {"message", "type", "param", "code"}


def test_batches_score(reranker, probabilities, folder, tmp_path):
    """Over HTTP, and with ``weft batch``."""
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/rerank"}
        | {"body": {"query": QUERY, "documents": DOCUMENTS}},
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    with reranker.client(KEY) as client:
        given = client.files.create(file=("in.jsonl", data), purpose="batch")
        made = client.batches.create(
            input_file_id=given.id, endpoint="/v1/rerank", completion_window="24h"
        )
        eventually(lambda: client.batches.retrieve(made.id).status == "completed", 60)
        done = client.batches.retrieve(made.id)
        over_http = json.loads(client.files.content(done.output_file_id).text)
    (tmp_path / "in.jsonl").write_bytes(data)
    out = tmp_path / "out.jsonl"
    ended = run(
        "batch", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", str(folder),
        "--dtype", "float32", "--threads", "1", "--kv-memory", "32MiB",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for line in (over_http, json.loads(out.read_text())):
        results = line["response"]["body"]["results"]
        found = sorted(results, key=lambda row: row["index"])
        scores = [row["relevance_score"] for row in found]
        assert scores == pytest.approx(probabilities, abs=1e-5)
    assert (done.usage.input_tokens > 0, done.usage.output_tokens) == (True, 0)


def test_an_embedding_model_embeds_and_ranks_by_similarity(embedder):
    with embedder.client() as client:
        texts = [QUERY, *DOCUMENTS[:2]]
        answer = client.embeddings.create(model="embedder", input=texts)
        vectors = np.array([row.embedding for row in answer.data])
        short = client.embeddings.create(model="embedder", input=QUERY, dimensions=16)
    cut = vectors[0, :16] / np.linalg.norm(vectors[0, :16])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-6)
    fields = {"query": QUERY, "documents": DOCUMENTS[:2]}
    whole = post(embedder, "/v1/rerank", **fields).json()
    cosines = vectors[1:] @ vectors[0]
    for row in whole["results"]:
        assert row["relevance_score"] == pytest.approx(cosines[row["index"]], abs=1e-5)
    assert whole["usage"]["prompt_tokens"] == answer.usage.prompt_tokens


def test_an_embedding_model_generates_nothing(embedder):
    answer = post(embedder, "/v1/completions", model="embedder", prompt="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsuitable_model")
    assert "Ask /v1/embeddings, /v1/rerank or /v1/score." in error["message"]
    chat = {"model": "embedder", "messages": [{"role": "user", "content": "a"}]}
    assert post(embedder, "/v1/chat/completions", **chat).json()["error"] == error


def test_info_says_what_a_model_gives(folder, tmp_path):
    done = run("info", str(folder))
    assert (
        "embeddings of the last token, of length 1; scores by the answer yes or no" in done.stdout
    )
    modes = {"pooling_mode_mean_tokens": True}
    other = pooled.save_embedding(pooled.model(), tmp_path / "mean", pooling=modes)
    refused = run("info", str(other))
    assert refused.returncode != 0
    assert "pooling by 'mean' is supported of encoders" in refused.stderr


@pytest.mark.parametrize("ways", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_classifier_over_several_processes(tmp_path, ways):
    """Cut, or split into stages: the head belongs to the process that has the last layer."""
    head = pooled.model("Qwen3ForSequenceClassification", num_labels=1)
    other = pooled.save(head, tmp_path / "head")
    tokenizer, expected = pooled.tokenizer(), []
    for document in DOCUMENTS:
        text = QWEN3_RERANKER.format(instruction=WEB_SEARCH, query=QUERY, document=document)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            expected.append(float(torch.sigmoid(head(torch.tensor([ids])).logits[0, 0])))
    settings = {"dtype": "float32", "threads": 1, "kv_memory": "4MiB", "max_num_seqs": 8}
    with LLM(other, **settings, **ways) as llm:
        assert llm.score(QUERY, DOCUMENTS) == pytest.approx(expected, abs=1e-5)
