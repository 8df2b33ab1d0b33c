"""Postpones the import of a module until its first use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


def postpone(name: str) -> None:
    """Make imports of this module return a placeholder, unless it is loaded already.

    The first use of an attribute imports the module. Unlike with ``importlib.util.LazyLoader``,
    code that searches all modules for a file does not load it.
    """
    if name not in sys.modules:
        sys.modules[name] = _Postponed(name)


class _Postponed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module '{self.__name__}' has not been imported yet")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
