"""The models of one server: what the command line names, and how requests name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import ConfigError, WeftError
from weft.models.hub import OTHER_PARTS, local_source, resolve_model
from weft.models.weight_files import SUFFIX, is_later_part, weight_files

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]{0,127})=(.+)", re.DOTALL)
MOST_MODELS = 64


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its name.

    Attributes:
        name: in requests.
        source: folder, GGUF file or name on the hub.
        chosen: the name was given, as in ``name=source``.
    """

    name: str
    source: str
    chosen: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the files of its weights, of a hub model in the cache; 0 if it has none."""
        try:
            path = local_source(self.source) or resolve_model(self.source, offline=True)
            return sum(file.stat().st_size for file in weight_files(path))
        except (OSError, WeftError):
            return 0


def named_models(words: Iterable[str]) -> list[NamedModel]:
    """The models that these words name: each one model, or a folder of several.

    Raises:
        ConfigError: two have one name, or a folder has too many.
        ModelNotFoundError: a path leads to no model.
    """
    found: list[NamedModel] = []
    for word in words:
        given = None if Path(word).exists() else _NAMED.fullmatch(word)
        source = word if given is None else given[2]
        inside = list(_models_in(source))
        if given is not None and inside:
            raise ConfigError(
                f"'{source}' is a folder of {len(inside)} models, which cannot all be "
                f"'{given[1]}'; name them one by one.",
                param="model",
            )
        if not inside and local_source(source) is not None:
            resolve_model(source)  # says what is wrong with a path
        if given is not None:
            found.append(NamedModel(given[1], source, chosen=True))
        else:
            found += [NamedModel(_name_of(one), one) for one in inside or [source]]
    _check(found)
    return found


def _models_in(source: str) -> Iterator[str]:
    """Models in a folder that is none itself, in the order of their names."""
    folder = local_source(source)
    if folder is None or not folder.is_dir() or (folder / "config.json").exists():
        return
    for path in sorted(folder.iterdir()):
        gguf = path.suffix == SUFFIX and not is_later_part(path.name)
        if (path / "config.json").is_file() or (gguf and not OTHER_PARTS.search(path.name)):
            yield str(path)


def _name_of(source: str) -> str:
    """The name of a model that was given none: of a path, its last part."""
    path = local_source(source)
    if path is None or source == "builtin":
        return source
    return path.resolve().name.removesuffix(SUFFIX)


def _check(models: list[NamedModel]) -> None:
    if len(models) > MOST_MODELS:
        raise ConfigError(
            f"These are {len(models)} models; one server has {MOST_MODELS} at most.", param="model"
        )
    seen: dict[str, NamedModel] = {}
    for model in models:
        other = seen.setdefault(model.name, model)
        if other is not model:
            raise ConfigError(
                f"Two models have the name '{model.name}': {other.source} and {model.source}. "
                f"Give one another name, as in: --model other={model.source}",
                param="model",
            )
