"""``/v1/models`` for Anthropic's clients: its form, its pages, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from scripted import ScriptedClient
from serving import Running, serving

from typed import unknown_fields

KEY = "a-key"
NAMES = ("builtin", "org/other", "third")
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def running(text: Any) -> Iterator[Running]:
    from dataclasses import replace

    tokenizer, template, card = text
    shown = (tokenizer, template, replace(card, served_names=NAMES))
    with serving(ScriptedClient([700]), shown, api_key=(KEY,)) as server:
        yield server


@pytest.fixture
def client(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key=KEY, max_retries=0)


def test_models_have_anthropic_s_form(running, client):
    card = running.service.builder.card
    shown = list(client.models.list())
    assert [model.id for model in shown] == list(NAMES)
    for model in (*shown, client.models.retrieve("org/other")):
        assert (model.type, model.display_name) == ("model", model.id)
        assert model.created_at.timestamp() == card.created
        assert model.max_input_tokens == card.max_model_len
    assert unknown_fields(shown) == []


def test_pages_of_models_lead_both_ways(client):
    assert [model.id for model in client.models.list(limit=1)] == list(NAMES)  # page by page
    page = client.models.list(limit=2)
    assert (page.first_id, page.last_id, page.has_more) == ("builtin", "org/other", True)
    page = client.models.list(limit=2, after_id="org/other")
    assert ([model.id for model in page.data], page.has_more) == (["third"], False)
    page = client.models.list(limit=1, before_id="third")
    assert ([model.id for model in page.data], page.has_more) == (["org/other"], True)
    page = client.models.list(limit=2, before_id="third")
    assert ([model.id for model in page.data], page.has_more) == (["builtin", "org/other"], False)
    page = client.models.list(before_id="builtin")
    assert (page.data, page.has_more, page.first_id) == ([], False, None)
    for query in ({"limit": 0}, {"limit": 1001}, {"after_id": "x"}, {"before_id": "x"}):
        with pytest.raises(anthropic.BadRequestError):
            client.models.list(**query)
    with pytest.raises(anthropic.BadRequestError, match="not both"):
        client.models.list(after_id="builtin", before_id="third")


def test_errors_of_models_have_the_form_of_the_client(running, client):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("none")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with running.http(headers={"anthropic-version": "2023-06-01"}) as http:
        refused = http.get("/v1/models")
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    with running.http(headers={"x-api-key": KEY}) as http:
        assert http.get("/v1/models").json()["object"] == "list"
        assert "code" in http.get("/v1/models/none").json()["error"]
