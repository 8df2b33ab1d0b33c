"""Closes objects of schemas, so that keys without a property do not occur in the output.

JSON Schema allows any other keys in an object that does not say ``additionalProperties``. A model
that may write them fills its output with them, and no program that sends such a schema reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_MERGED = ("$ref", "$dynamicRef", "anyOf", "oneOf")


def close_objects(nodes: Sequence[dict[str, Any]]) -> bool:
    """Close the objects of a schema that have properties and no rule for others.

    What satisfies the closed schema satisfies the schema. Where schemas are merged, one would
    close out what another names, so that nothing is closed.

    Args:
        nodes: every schema within the schema, itself included; changed in place.

    Returns:
        whether anything was closed.
    """
    if any(_merges(node) for node in nodes):
        return False
    closable = [node for node in nodes if _closable(node)]
    for node in closable:
        node["additionalProperties"] = False
    return bool(closable)


def _merges(node: dict[str, Any]) -> bool:
    """Whether several schemas describe one object."""
    return "allOf" in node or ("properties" in node and any(name in node for name in _MERGED))


def _closable(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or any(name in node for name in _OPEN):
        return False
    least = node.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(name in properties for name in required)
        and isinstance(least, (int, float))
        and least <= len(properties)
    )
