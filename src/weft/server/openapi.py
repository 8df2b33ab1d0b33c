"""``/openapi.json``: the OpenAPI description of the routes, from what decodes their requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from weft import __version__
from weft.api.answers import ErrorAnswer, MessagesErrorAnswer, OllamaErrorAnswer
from weft.api.schemas import Schemas
from weft.server.auth import KEYLESS_PATHS
from weft.server.front_page import NAMED, UNDER
from weft.server.messages import PATH as MESSAGES
from weft.server.model_lists import PATH as MODELS
from weft.server.ollama import PATH as OLLAMA
from weft.server.operations import OPERATIONS, TAGS, Operation, bodies_of, stream_of

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_ABOUT = """LLM serving: the APIs of OpenAI, Anthropic and Ollama over one engine.

Requests choose a service class by `service_tier` or the header `x-weft-class`. Parameters that have
no effect are named in the header `x-weft-ignored` of the answer; parameters that would change it
and are not supported are refused. A server with API keys demands one on every path but those that
say otherwise."""
_ERRORS: dict[str, tuple[type[Struct], ...]] = {
    MESSAGES: (MessagesErrorAnswer,),
    MODELS: (ErrorAnswer, MessagesErrorAnswer),
    OLLAMA: (OllamaErrorAnswer,),
}
_PAGE = {"/", NAMED, f"{UNDER}/{{name}}"}
_HEADERS = {
    "x-request-id": "Identifies the request in the server's log.",
    "x-weft-class": "The service class that the request was served in.",
    "x-weft-ignored": "Parameters of the request that had no effect.",
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def named_operations(routes: Iterable[Any]) -> Iterator[str]:
    """``GET /health`` and so on: every method and path that an application answers."""
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        for method in sorted(route.methods - {"HEAD"}):
            yield f"{method} {path}"


def describe_routes(routes: Iterable[Any], root_path: str = "") -> dict[str, Any]:
    """The OpenAPI description of an application's routes.

    Raises:
        KeyError: a route has no row in `weft.server.operations`.
    """
    schemas = Schemas()
    paths: dict[str, dict[str, Any]] = {}
    names = list(named_operations(routes))
    keyless = KEYLESS_PATHS | (_PAGE if f"GET {NAMED}" in names else set())
    for name in names:
        method, _, path = name.partition(" ")
        told = _Writer(name, OPERATIONS[name], schemas).told()
        if path in keyless:
            told["security"] = []
        paths.setdefault(path, {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "weft",
            "version": __version__,
            "summary": "An LLM serving engine",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{}, *({name: []} for name in _KEYS)],
        "tags": [{"name": tag} for tag in TAGS],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": _KEYS,
            "headers": {
                name: {"description": told, "schema": {"type": "string"}}
                for name, told in _HEADERS.items()
            },
        },
    }


class _Writer:
    """Writes what one method of a path takes and gives."""

    def __init__(self, name: str, row: Operation, schemas: Schemas) -> None:
        self._name = name
        self._path = name.partition(" ")[2]
        self._row = row
        self._schemas = schemas

    def told(self) -> dict[str, Any]:
        words = re.sub(r"\W+", "_", self._name).strip("_").lower()
        told: dict[str, Any] = {
            "operationId": words,
            "summary": self._row.summary,
            "tags": [self._row.tag],
        }
        if parameters := [*self._in_path(), *self._in_query()]:
            told["parameters"] = parameters
        if content := self._taken():
            told["requestBody"] = {"required": True, "content": content}
        return {**told, "responses": self._given()}

    def _in_path(self) -> Iterator[dict[str, Any]]:
        for name in _PARAMETER.findall(self._path):
            yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}

    def _in_query(self) -> Iterator[dict[str, Any]]:
        for query in self._row.query:
            schema = self._schemas.of(query.kind)
            yield {"name": query.name, "in": "query", "description": query.told, "schema": schema}

    def _taken(self) -> dict[str, Any]:
        if self._row.form is not None:
            return {"multipart/form-data": {"schema": dict(self._row.form)}}
        bodies = bodies_of(self._name, self._row)
        return {"application/json": {"schema": self._one_of(bodies)}} if bodies else {}

    def _given(self) -> dict[str, Any]:
        row = self._row
        error = {"description": "An error.", "content": self._json(self._error())}
        if row.refused:
            return {"default": error}
        content = self._json(self._one_of(row.answer)) if row.answer else {row.media: {}}
        if row.streams:
            one = {} if row.events is None else {"x-weft-event": self._schemas.ref(row.events)}
            content[stream_of(self._name)] = {"schema": {"type": "string"}, **one}
        headers = {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS}
        given = {"description": row.summary + ".", "headers": headers, "content": content}
        answers = {"200": given, "default": error}
        if self._path == "/ready":
            answers["503"] = {"description": "The engine takes no requests.", "content": content}
        return answers

    def _error(self) -> dict[str, Any]:
        """The schema of errors, whose form belongs to the path."""
        for under, kinds in _ERRORS.items():
            if f"{self._path}/".startswith(f"{under}/"):
                return self._one_of(kinds)
        return self._schemas.ref(ErrorAnswer)

    def _one_of(self, kinds: tuple[Any, ...]) -> dict[str, Any]:
        found = [self._schemas.of(kind) for kind in kinds]
        return found[0] if len(found) == 1 else {"anyOf": found}

    @staticmethod
    def _json(schema: dict[str, Any]) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}
