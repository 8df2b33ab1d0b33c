"""Service classes of requests: by tier, header, priority, and what a key may use."""

from __future__ import annotations

import pytest

from weft.api.classes import ClassNotAllowedError, ClassRules
from weft.core.class_table import class_table
from weft.core.errors import ConfigError, ParameterError

TABLE = tuple(row.name for row in class_table({"gold": {"priority": 0}, "scale": {"priority": 9}}))


@pytest.mark.parametrize(
    ("tier", "name", "shown"),
    [
        (None, "interactive", None),
        ("auto", "interactive", "default"),
        ("default", "interactive", "default"),
        ("interactive", "interactive", "default"),
        ("flex", "flex", "flex"),
        ("fast", "priority", "priority"),
        ("batch", "batch", "batch"),
        ("gold", "gold", "gold"),
        ("scale", "scale", "scale"),
    ],
)
def test_tiers_and_names_of_classes_are_asked_for_alike(tier, name, shown):
    assert ClassRules(TABLE).choose(tier) == (name, shown)
    if tier is not None:
        assert ClassRules(TABLE, header=tier).choose(None) == (name, shown)
        assert ClassRules(TABLE, header=tier).choose(tier) == (name, shown)


@pytest.mark.parametrize("tier", ["scale", "Flex", "", "x" * 1000, "weird\n'"])
def test_unknown_ones_are_named_with_what_there_is(tier):
    for rules, asked, param in (
        (ClassRules(), tier, "service_tier"),
        (ClassRules(header=tier), None, "x-weft-class"),
    ):
        with pytest.raises(ParameterError, match=r"auto, default, flex.*batch") as caught:
            rules.choose(asked)
        assert caught.value.param == param
        assert len(caught.value.message) < 400


def test_two_that_disagree_are_refused_and_open_ones_are_not():
    assert ClassRules(header="batch").choose("auto") == ("batch", "batch")
    assert ClassRules(header="auto").choose("flex") == ("flex", "flex")
    assert ClassRules(header="flex").choose(None, 3) == ("flex", "flex")
    assert ClassRules().choose("default", -1) == ("priority", "priority")
    for header, tier, priority in (("batch", "flex", 0), ("flex", None, -1), (None, "flex", 2)):
        with pytest.raises(ParameterError, match="Give either"):
            ClassRules(header=header).choose(tier, priority)


def test_a_key_has_its_own_default_and_what_it_may_not_use_is_said():
    rules = ClassRules(allowed=("flex", "batch"), default="batch")
    assert rules.choose(None, None, "flex") == ("batch", "batch")
    assert rules.choose(None) == rules.choose("auto") == ("batch", "batch")
    assert rules.choose("flex") == ("flex", "flex")
    for tier, priority, param in (("default", 0, "service_tier"), (None, -1, "priority")):
        with pytest.raises(ClassNotAllowedError, match="only 'flex', 'batch'") as caught:
            rules.choose(tier, priority)
        assert (caught.value.http_status, caught.value.param) == (403, param)


@pytest.mark.parametrize("name", ["auto", "default", "fast", "", "a b", "a" * 65, 7, "ü", "-x"])
def test_classes_have_names_that_requests_can_ask_for(name):
    with pytest.raises(ConfigError, match="cannot name a class"):
        class_table({name: {"priority": 1}})
