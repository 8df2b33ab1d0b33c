"""Prints a page of the reference: ``python tools/reference_pages.py errors > docs/errors.md``.

The pages are ``http-api``, ``commands``, ``metrics`` and ``errors``, each from what the code
declares.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric

from weft.cli import command_line
from weft.core.errors import WeftError
from weft.core.types import DEFAULT_CLASSES
from weft.ring.model_board import ModelRow
from weft.server.auth import KEYLESS_PATHS
from weft.server.metric_families import ENGINE_METRICS, OWN_METRICS, families_of
from weft.server.metrics import Metrics
from weft.server.model_metrics import model_families
from weft.server.openapi import describe_routes
from weft.server.operations import OPERATIONS
from weft.server.place_metrics import FAMILIES
from weft.server.probe import NoProbe

PACKAGES = ("core", "api", "server", "batch", "text", "ring", "engine", "models", "kernels")
TOOL = "python tools/reference_pages.py"


# -- HTTP API -----------------------------------------------------------------------------------


def http_api() -> str:
    """Every route of the OpenAPI description, by its tag."""
    routes = [
        SimpleNamespace(path=path, methods={method})
        for method, _, path in (name.partition(" ") for name in OPERATIONS)
    ]
    document = describe_routes(routes)
    open_paths = ", ".join(f"`{path}`" for path in sorted(KEYLESS_PATHS))
    lines = [
        "# HTTP API",
        "",
        f"Every route of a server, from the description that it serves (`{TOOL} http-api > "
        "docs/http-api.md`):",
        "",
        "```sh",
        "curl -s http://127.0.0.1:8000/openapi.json",
        "```",
        "",
        "The description is OpenAPI 3.1, made from what decodes requests. It has the schema of "
        "each body and answer; a field that weft does not honour has `x-weft` (`ignored` or "
        "`refused`) and the reason. [Parameters of requests](parameters.md) has the same as "
        "tables, the [guide](guide.md#serve) what the endpoints do. With API keys every route "
        f"demands one but {open_paths}.",
    ]
    for tag in document["tags"]:
        lines += ["", f"## {tag['name']}", "", "| route | what it does | body | answer |"]
        lines.append("|---|---|---|---|")
        for path, methods in document["paths"].items():
            told = {m: one for m, one in methods.items() if tag["name"] in one["tags"]}
            refused = [method for method, one in told.items() if "200" not in one["responses"]]
            if refused:
                lines.append(_route(f"{', '.join(refused).upper()} {path}", told[refused[0]]))
                continue
            lines += [_route(f"{method.upper()} {path}", one) for method, one in told.items()]
    return "\n".join(lines) + "\n"


def _route(name: str, operation: dict[str, Any]) -> str:
    query = [f"`{p['name']}`" for p in operation.get("parameters", ()) if p["in"] == "query"]
    body = _kinds(operation.get("requestBody", {}).get("content", {}))
    if query:
        body = " ".join([body, f"query: {', '.join(query)}"]).strip()
    answered = operation["responses"].get("200", {}).get("content")
    answer = "an error" if answered is None else _kinds(answered)
    return f"| `{name}` | {operation['summary']} | {body} | {answer} |"


def _kinds(content: dict[str, Any]) -> str:
    """The names of schemas, and of the content types of anything else."""
    named = []
    for media, told in content.items():
        if media == "application/json" and "schema" in told:
            kinds = told["schema"].get("anyOf", [told["schema"]])
            named.append(", ".join(map(_kind, kinds)))
        elif media == "text/event-stream; charset=utf-8":
            named.append("or events")
        elif media == "application/x-ndjson":
            named.append("or lines of JSON" if named else "lines of JSON")
        else:
            named.append(f"`{media.split(';')[0]}`")
    return " ".join(named)


def _kind(schema: dict[str, Any]) -> str:
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    return f"`{schema['$ref'].rsplit('/')[-1]}`"


# -- commands -----------------------------------------------------------------------------------


def commands() -> str:
    """Every command, with what it takes beside its settings."""
    parser = command_line(None, whole=True)
    lines = [
        "# Commands",
        "",
        f"Every command with its usage (`{TOOL} commands > docs/commands.md`). What is not listed "
        "here are [settings](settings.md): each is a flag by its name. `weft COMMAND --help` shows "
        "those of every day, `--help-all` all.",
    ]
    for name, command, told in _commands(parser):
        lines += ["", f"## `weft {name}`", "", f"{told[:1].upper()}{told[1:]}.", ""]
        lines += ["```text", " ".join(command.format_usage().split())[len("usage: ") :], "```"]
        rows = [_argument(action) for action in command._actions if _own(action)]
        if rows:
            lines += ["", "| argument | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _commands(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            told = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield f"{before}{name}", command, told[name]
                yield from _commands(command, f"{before}{name} ")


def _own(action: argparse.Action) -> bool:
    """Whether an argument is no setting, and says what it is."""
    usual = {"--help", "--help-all"} & {*action.option_strings}
    return not hasattr(action, "declared") and bool(action.help) and not usual


def _argument(action: argparse.Action) -> str:
    metavar = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    shown = " ".join(filter(None, [", ".join(action.option_strings), str(metavar)]))
    told = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return f"| `{shown}` | {told} |".replace(f"`{shown}`", f"`{shown}`".replace("|", "\\|"))


# -- metrics ------------------------------------------------------------------------------------


class _Probe(NoProbe):
    """An engine that tells all that engines may tell."""

    def gauges(self) -> dict[str, float]:
        return dict.fromkeys([*ENGINE_METRICS, *OWN_METRICS], 0.0)

    def places(self) -> dict[str, dict[str, float]]:
        return {"10.0.0.7:8700": dict.fromkeys(FAMILIES, 0.0)}

    def policy(self) -> str:
        return "slo"


def metrics() -> str:
    """Every family of ``/metrics``."""
    page = Metrics("model", _Probe(), classes=DEFAULT_CLASSES)
    lines = [
        "# Metrics",
        "",
        f"Every family of `/metrics` (`{TOOL} metrics > docs/metrics.md`). Those of host, disk and "
        "places are there where a server has them, those by key for keys that may read them, those "
        "of models (`weft:model_...`) where models sleep and wake. "
        "`--vllm-metrics` repeats those that dashboards of vLLM know under `vllm:`. "
        "[Watching a server](guide.md#watching-a-server) says what they are for.",
        "",
        "| name | type | labels beside `model_name` | meaning |",
        "|---|---|---|---|",
    ]
    models = model_families({"model": ModelRow()})
    lines += [_family(family) for family in (*families_of(page, by_key=True), *models)]
    return "\n".join(lines) + "\n"


def _family(family: Metric) -> str:
    labels = [f"`{name}`" for name in family._labelnames if name != "model_name"]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation} |"


# -- errors -------------------------------------------------------------------------------------


def errors() -> str:
    """Every typed error that an answer can have."""
    for package in PACKAGES:
        folder = importlib.import_module(f"weft.{package}")
        for module in pkgutil.iter_modules(folder.__path__, f"weft.{package}."):
            importlib.import_module(module.name)
    found: dict[tuple[int, str], dict[str, None]] = {}  # a set of meanings that keeps the order
    for kind in _kinds_of(WeftError):
        found.setdefault((kind.http_status, kind.code), {})[_told(kind)] = None
    lines = [
        "# Errors",
        "",
        f"Every typed error (`{TOOL} errors > docs/errors.md`). An answer has the `code` and a "
        "sentence; those of a start print the sentence. `param` names the parameter or setting. "
        "What has the status 500 tells a client only the id of the request, but for a few codes; "
        "the log has the rest. [When something goes wrong](guide.md#when-something-goes-wrong) "
        "lists messages with what to do.",
        "",
        "Beside these: 401 `invalid_api_key`, 403 `metrics_not_allowed`, `usage_not_allowed`, "
        "`targets_not_allowed`, `loom_not_allowed` and `models_not_allowed`, 404 `not_found` and "
        "405 `method_not_allowed`.",
        "",
        "| status | code | meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| {status} | `{code}` | {' '.join(told)} |"
        for (status, code), told in sorted(found.items(), key=lambda row: row[0])
    ]
    return "\n".join(lines) + "\n"


def _kinds_of(kind: type[WeftError]) -> Iterator[type[WeftError]]:
    """Subclasses that have a code of their own, those nearest to the base first."""
    if "code" in kind.__dict__ and kind is not WeftError:
        yield kind
    for below in sorted(kind.__subclasses__(), key=lambda one: one.__name__):
        yield from _kinds_of(below)


def _told(kind: type[WeftError]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()).replace("|", "\\|")


PAGES: dict[str, Callable[[], str]] = {
    "http-api": http_api,
    "commands": commands,
    "metrics": metrics,
    "errors": errors,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        raise SystemExit(f"name one page: {', '.join(PAGES)}")
    print(PAGES[sys.argv[1]](), end="")
