"""Decodes request bodies into their declared types; errors name the wrong parameter.

Unknown keys are refused at the top of a body and wherever they could change the answer, and ignored
in the structures that say ``OPEN``: messages, their parts, tools.
"""

from __future__ import annotations

import re
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, Struct

from weft.api.errors import InvalidJSONError, MissingParameterError, UnknownParameterError
from weft.api.rules import MAX_SHOWN_CHARS, Notes, apply_rules, is_neutral
from weft.core.errors import ParameterError

MAX_CONTAINERS = 2**16  # lists and objects of a body; each costs 0.7 us to decode
MAX_STRINGS = 2**18  # strings of a body
UNCOUNTED_BYTES = 128 * 2**10  # bodies up to here cannot hold enough to matter

Body = TypeVar("Body", bound=Struct)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `([^`]*)`")
_UNKNOWN = "contains unknown field"


@cache
def _decoder(body: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body)


def decode_body(
    body: type[Body], data: bytes | Raw, at: str = "", notes: Notes | None = None
) -> Body:
    """Decode and check the body of a request, or the part of it ``at`` a path.

    Args:
        notes: take what is ignored.

    Raises:
        ParameterError: the body is not JSON, or a field is malformed, out of bounds, unknown or
            refused; the error names it.
    """
    notes = Notes() if notes is None else notes
    path = at and f"{at}."
    if isinstance(data, bytes):  # a part has been counted with the whole
        refuse_manyparts_of(data)
    try:
        str(data, "utf-8")  # the decoder does not look into what is left as JSON
        decoded = _decode(body, data, path, notes)
    except msgspec.ValidationError as error:
        raise _explained(body, str(error), at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = "" if isinstance(error, RecursionError) else f" ({str(error)[:200]})"
        raise InvalidJSONError(f"The body of the request is not valid JSON{detail}.") from None
    apply_rules(decoded, path, notes)
    return decoded


def _decode(body: type[Body], data: bytes | Raw, path: str, notes: Notes) -> Body:
    """Decode in one pass; only unknown keys need a second one, without ignored keys."""
    decoded: Body
    try:
        decoded = _decoder(body).decode(data)
    except msgspec.ValidationError as error:
        if _UNKNOWN not in str(error):
            raise
        known = _without_unknown(body, Raw(bytes(data)), path, notes)
        decoded = _decoder(body).decode(known)
    return decoded


def _without_unknown(kind: type[Struct], raw: Raw, path: str, notes: Notes) -> Raw:
    """An object without its unknown keys; those that are not to be ignored stay."""
    try:
        given = msgspec.json.decode(raw, type=dict[str, Raw])
    except msgspec.ValidationError:
        return raw  # no object: the decoder says so
    parts, is_open = parts_of(kind), getattr(kind, "OPEN", False)
    known = tuple(kind.__struct_fields__)
    kept: dict[str, Raw] = {}
    for name, value in given.items():
        if name in parts:
            kept[name] = _within(parts[name], value, f"{path}{name}", notes)
        elif name in known or not (is_open or is_neutral(bytes(value))):
            kept[name] = value
        elif not is_neutral(bytes(value)):
            shown = name[:MAX_SHOWN_CHARS]
            notes.ignore(f"{path}{shown}", lambda param: UnknownParameterError(param, known))
    return Raw(msgspec.json.encode(kept))


class NestedBody(NamedTuple):
    kind: type[Struct]
    in_list: bool


def _within(part: NestedBody, raw: Raw, path: str, notes: Notes) -> Raw:
    if not part.in_list:
        return _without_unknown(part.kind, raw, f"{path}.", notes)
    try:
        items = msgspec.json.decode(raw, type=list[Raw])
    except msgspec.ValidationError:
        return raw
    clean = [
        _without_unknown(part.kind, item, f"{path}[{index}].", notes)
        for index, item in enumerate(items)
    ]
    return Raw(msgspec.json.encode(clean))


@cache
def parts_of(kind: type[Struct]) -> dict[str, NestedBody]:
    """Fields of a structure that are structures themselves, or lists of them."""
    hints = get_type_hints(kind)
    found = {name: _part(hints[name]) for name in kind.__struct_fields__}
    return {name: part for name, part in found.items() if part is not None}


def _part(hint: Any, in_list: bool = False) -> NestedBody | None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return NestedBody(hint, in_list)
    if get_origin(hint) in (Union, UnionType):
        found = [part for one in get_args(hint) if (part := _part(one)) is not None]
        return found[0] if found else None
    if get_origin(hint) is list:
        return _part(get_args(hint)[0], in_list=True)
    return None


def encode_json(value: Any) -> bytes:
    """JSON of a value from a body. Raises ParameterError if it is nested too deeply."""
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise ParameterError("The body of the request is nested too deeply.") from None


class _Kind(Struct):
    type: str | None = None


def kind_of(raw: Raw, path: str, default: str | None = None) -> str:
    """The ``type`` of an object. Raises MissingParameterError if it and a default are missing."""
    kind = decode_body(_Kind, raw, path).type
    kind = default if kind is None else kind
    if kind is None:
        raise MissingParameterError(f"{path}.type")
    return kind


def refuse_manyparts_of(data: bytes) -> None:
    """Raise ParameterError for JSON that would take long to decode, before it is decoded.

    The decoder checks the length of a list only when it has it, and holds up every thread until
    then: a megabyte of empty lists takes 200 ms. To count first takes a few.
    """
    if len(data) <= UNCOUNTED_BYTES or not _many(data):
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MAX_STRINGS or _many(b"".join(plain.split(b'"')[::2])):
        raise ParameterError(
            f"The body of the request has too many parts; it may have {MAX_CONTAINERS} lists and "
            f"objects and {MAX_STRINGS} strings."
        )


def _many(data: bytes) -> bool:
    """Whether there may be too many parts; brackets within strings count, too."""
    containers = data.count(b"[") + data.count(b"{")
    return containers > MAX_CONTAINERS or data.count(b'"') > 2 * MAX_STRINGS


def _explained(body: type[Struct], text: str, at: str) -> ParameterError:
    """Turn the library's sentence into a typed error that names the parameter."""
    match = _AT.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    known = _known(body, path)
    path = f"{at}.{path}".rstrip(".").replace(".[", "[") if at else path
    path = path[:MAX_SHOWN_CHARS]
    field = _FIELD.search(what)
    if field is not None:
        name = field[1][:MAX_SHOWN_CHARS]
        name = f"{path}.{name}" if path else name
        if "missing required" in what:
            return MissingParameterError(name)
        return UnknownParameterError(name, known)
    if not path:
        return ParameterError(f"The body of the request is wrong: {_plain(what)}.")
    return ParameterError(f"'{path}' is wrong: {_plain(what)}.", param=path)


def _known(body: type[Struct], path: str) -> tuple[str, ...]:
    for name in filter(None, re.sub(r"\[[^\]]*\]", "", path).split(".")):
        part = parts_of(body).get(name)
        if part is None:
            return ()
        body = part.kind
    return body.__struct_fields__


def _plain(text: str) -> str:
    """``Expected `int | null`, got `str``` -> ``expected int or null, got str``; shortened."""
    text = text if len(text) <= 3 * MAX_SHOWN_CHARS else f"{text[: 3 * MAX_SHOWN_CHARS]}..."
    return (text[:1].lower() + text[1:]).replace("`", "").replace(" | ", " or ")
