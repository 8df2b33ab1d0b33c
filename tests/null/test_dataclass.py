"""The decorator of data classes does what the standard library's does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from weft.core.dataclass import dataclass


def declared(decorator: Any) -> dict[str, Any]:
    """Classes of all kinds that weft has, as a decorator makes them."""

    @decorator(frozen=True, slots=True)
    class Frozen:
        a: int
        b: str = "b"
        c: list[int] = dataclasses.field(default_factory=list, compare=False)
        d: float = dataclasses.field(default=0.5, repr=False)

    @decorator(frozen=True)
    class Open:
        a: int

        def __post_init__(self) -> None:
            object.__setattr__(self, "seen", self.a + 1)

        @property
        def doubled(self) -> int:
            return 2 * self.a

    @decorator(frozen=True)
    class Derived(Open):
        b: int = 3

    @decorator(slots=True)
    class Mutable:
        a: int = 1
        b: Any = None
        late: int = dataclasses.field(init=False, default=7)

    @decorator(slots=True, kw_only=True)
    class Named:
        a: int = 1
        b: int

    @decorator(eq=False)
    class Same:
        a: int = 1

    @decorator(frozen=True, order=True)
    class Ordered:
        a: int
        b: int

    @decorator
    class Own:
        a: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    @decorator(frozen=True)
    class Empty:
        pass

    return {name: kind for name, kind in locals().items() if isinstance(kind, type)}


OURS, STANDARD = declared(dataclass), declared(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Frozen", (1,), {}),
    ("Frozen", (1, "x"), {"d": 2.0}),
    ("Frozen", (), {}),
    ("Frozen", (1,), {"e": 1}),
    ("Open", (4,), {}),
    ("Derived", (4,), {"b": 5}),
    ("Mutable", (), {}),
    ("Mutable", (2,), {"late": 8}),
    ("Named", (), {"b": 2}),
    ("Named", (1, 2), {}),
    ("Same", (), {}),
    ("Ordered", (1, 2), {}),
    ("Own", (1,), {}),
    ("Empty", (), {}),
]


def outcome(call: Any) -> Any:
    """What a call gives, or the error that it raises."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def facts(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What can be seen of an instance."""
    try:
        made = kind(*args, **kwargs)
    except TypeError as error:
        return {"error": str(error)}
    again = kind(*args, **kwargs)
    names = [row.name for row in dataclasses.fields(made)]
    return {
        "repr": repr(made),
        "dict": dataclasses.asdict(made),
        "seen": getattr(made, "seen", None),
        "equal": (made == again, made == object(), made == copy.copy(made)),
        "hash": outcome(lambda: hash(made) == hash(again)),
        "order": outcome(lambda: (made < again, made <= again)),
        "replaced": outcome(lambda: repr(dataclasses.replace(made, **{"a": 9} if names else {}))),
        "assigned": [outcome(lambda n=n: setattr(made, n, 3)) for n in names],
        "deleted": [outcome(lambda n=n: delattr(made, n)) for n in names],
        "match": kind.__match_args__,
    }


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_a_class_is_as_the_standard_library_makes_it(name, args, kwargs):
    assert facts(OURS[name], args, kwargs) == facts(STANDARD[name], args, kwargs)


@pytest.mark.parametrize("name", sorted(OURS))
def test_its_fields_are_those_of_the_standard_library(name):
    def rows(kind: type) -> list[str]:
        return [repr(row) for row in dataclasses.fields(kind)]

    assert rows(OURS[name]) == rows(STANDARD[name])


@dataclass(frozen=True, slots=True)
class Pickled:
    a: int
    b: tuple[int, ...] = ()


def test_a_frozen_class_with_slots_is_pickled_and_copied():
    made = Pickled(1, (2,))
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made


@pytest.mark.parametrize("name", ["Frozen", "Open", "Derived", "Empty"])
def test_a_frozen_class_takes_no_other_attributes(name):
    made = OURS[name](*[1][: len(dataclasses.fields(OURS[name]))])
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.other = 1


def test_other_classes_are_not_equal():
    assert OURS["Open"](1) != OURS["Derived"](1)
    assert {OURS["Open"](1), OURS["Open"](1)} == {OURS["Open"](1)}


def test_an_init_is_made_once_and_kept():
    kind = declared(dataclass)["Frozen"]
    before = kind.__init__
    kind(1)
    made = kind.__init__
    kind(2)
    assert before is not made
    assert kind.__init__ is made


def test_an_error_names_the_class():
    with pytest.raises(TypeError, match=r"Frozen\.__init__\(\) missing 1 required"):
        OURS["Frozen"]()
