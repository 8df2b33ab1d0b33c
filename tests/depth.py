"""Depth of random tests: a few minutes, or all examples (``WEFT_TEST_DEEP=1``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

import where

VARIABLE = "WEFT_TEST_DEEP"
DEEP = os.environ.get(VARIABLE) == "1"
SHARE = 6  # of the examples of the deep tests, one in so many is tried in the others

deep = pytest.mark.deep  # only one of the deep tests
# The same, but for a GPU, where kernels are not interpreted.
deep_on_cpu = pytest.mark.skipif(False, reason="runs") if where.ON_GPU else deep

Test = TypeVar("Test", bound=Callable[..., Any])


def searching(examples: int, *, least: int = 10, **options: Any) -> Callable[[Test], Test]:
    """Settings of Hypothesis for a test with so many examples in the deep tests.

    Args:
        examples: in the deep tests.
        least: in the others, where a share would be less.
        options: of ``hypothesis.settings``.
    """
    number = examples if DEEP else min(examples, max(least, examples // SHARE))
    chosen = settings(max_examples=number, deadline=None, **options)

    def decorate(test: Test) -> Test:
        return pytest.mark.deeper(chosen(test))  # type: ignore[no-any-return]

    return decorate
