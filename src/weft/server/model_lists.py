"""``/v1/models`` in the form of the API whose client asks: OpenAI's, or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.api.message_lists import message_model, model_page
from weft.server.errors import json_response
from weft.server.files import page_limit

PATH = "/v1/models"
VERSION = "anthropic-version"  # a header that Anthropic's clients send, and nobody else
MOST_MODELS, DEFAULT_MODELS = 1000, 20  # of a page


def model_list_response(request: Request, entries: Seq[Mapping[str, Any]]) -> Response:
    """All models, given as OpenAI's API has them. Raises ParameterError for a wrong page."""
    if VERSION not in request.headers:
        return json_response({"object": "list", "data": entries})
    query = request.query_params
    limit = page_limit(query.get("limit"), DEFAULT_MODELS, MOST_MODELS)
    return json_response(model_page(entries, query.get("after_id"), query.get("before_id"), limit))


def model_response(request: Request, entry: Mapping[str, Any]) -> Response:
    """One model, given as OpenAI's API has it."""
    return json_response(message_model(entry) if VERSION in request.headers else entry)
