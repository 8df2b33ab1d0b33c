"""Costs fitted to measured steps: weft's own profile, kept in a JSON file.

A profile file is one JSON object:

- ``version``: 4.
- ``key``: ``hardware``, ``model``, ``dtype``, ``parallelism``, ``kernels``: what was measured.
- ``layers``: layers of the model.
- ``dense``: ``tokens`` and ``seconds``, the knots of the dense curve of whole steps.
- ``coefficients``: seconds for each feature of ``FEATURES``.
- ``hosts``: by who attends there, the costs of a host tier (``HostCosts``): ``attention`` with
  ``decodes``, ``contexts`` and ``seconds`` (rows by decodes) or null; ``out`` and ``back`` with
  ``step_s`` and ``token_s``; ``stall``; ``duplex``; ``carry`` with ``step_s`` and ``row_layer_s``;
  ``wake`` with ``step_s`` and ``row_s``; ``overlap`` with ``batch_s``, ``row_s``, ``second_s``,
  ``wait_s`` and ``drag``, or null.
- ``interference``: for each limit of decode attention, ``programs``, ``dense``, ``attention``,
  ``alone`` and ``second_s`` (``Speeds``); empty where it was not measured.
- ``report``: the measurements and the prediction error, to be read by users, not by weft.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from weft.core.cache_folder import cache_folder, file_stem
from weft.core.errors import ConfigError, ProfileError
from weft.cost.curves import Curve
from weft.cost.host_costs import PUBLISHED, HostCosts
from weft.cost.interference import Interference
from weft.cost.model import Terms, step_time
from weft.cost.work import Work

VERSION = 4
FEATURES = (
    "prefill",  # a step with any prefill: b1 of OmniServe
    "prefill_area",  # a1
    "prefill_row",
    "decode",  # a step with any decode: b2
    "decode_context",  # a2
    "decode_row",  # a3; may be negative: equal KV in more requests is read faster
    "decode_few",  # a decode among the first FEW: products of few rows have kernels of their own
    "sampled",  # a row of the head
)
FEW = 8


class Point(NamedTuple):
    """A measured step: what it computed, and how long it took (a median)."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class ProfileKey:
    """The key of a profile: it is valid for this machine, model, dtype and kernels only.

    Attributes:
        hardware: the machine, with the threads or devices used.
        parallelism: such as ``tp1``.
        kernels: the kernel behind each op, in one line.
    """

    hardware: str
    model: str
    dtype: str
    parallelism: str
    kernels: str

    @property
    def file_name(self) -> str:
        """A name that is readable and differs where any part of the key does."""
        digest = blake2b("\n".join(asdict(self).values()).encode(), digest_size=4).hexdigest()
        return f"{file_stem(self.model)}-{self.dtype}-{self.parallelism}-{digest}.json"


def profile_path(key: ProfileKey, setting: str | None = None) -> Path:
    """The path of a profile: the one that is set, else one in weft's cache folder."""
    if setting is not None:
        return Path(setting)
    return cache_folder() / "profiles" / key.file_name


@dataclass(frozen=True)
class Fitted:
    """A cost model fitted to whole steps of an executor.

    ``dense`` has what a step costs by its tokens alone: layers, embedding, and what every step
    costs; collectives are within it, as they grow linearly with tokens (OmniServe section 3.3.1).
    Attention is linear in the features that OmniServe's section 3.3.1 names. ``host`` has what each
    prefilling row adds; what each decoding row adds, wherever its KV lies, is within ``head``, as
    every decode is sampled: a fit can hardly tell the two apart. Terms may be negative, since
    coefficients are not constrained; their sum is what is fitted.

    Attributes:
        coefficients: seconds by feature.
        hosts: what was measured of host tiers, by who attends there.
        host: the one that is planned with; in no file.
        interference: of halves of a step; None where it was not measured.
    """

    key: ProfileKey
    layers: int
    dense: Curve
    coefficients: Mapping[str, float]
    hosts: Mapping[str, HostCosts] = field(default_factory=dict)
    host: HostCosts | None = None
    interference: Interference | None = None
    _flat: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if set(self.coefficients) != set(FEATURES):
            raise ProfileError(f"coefficients must be those of {', '.join(FEATURES)}")
        object.__setattr__(self, "_flat", tuple(self.coefficients[name] for name in FEATURES))

    def terms(self, work: Work) -> Terms:
        """Seconds of each part.

        Raises:
            ConfigError: work for the host or moves, which this profile does not have.
        """
        prefill, area, prefill_row, decode, context, decode_row, few, sampled = self._flat
        host = self.host
        cpu = move = stall = handover = 0.0
        overlap = None if host is None else host.overlap
        carry_s = (PUBLISHED if host is None else host.carry).seconds(work.piggyback_layers)
        out_tokens = work.out_tokens
        if decodes := work.host_decodes:
            if host is None:
                raise ConfigError("the profile has no CPU attention")
            cpu = host.attention_s(decodes, work.host_context)
            if overlap is not None:
                handover = overlap.handover_s(decodes, cpu - overlap.wait_s)
                out_tokens -= decodes  # which are handed over with their queries
        if out_tokens or work.in_tokens:
            if host is None:
                raise ConfigError("the profile has no moves of KV")
            move = host.move_s(out_tokens, work.in_tokens)
            stall = host.stall * move
        if not work.tokens:
            return Terms(kv_move=move - stall, piggybacked=carry_s, kv_stall=stall)
        rows = work.decodes + work.host_decodes
        head = sampled * work.sampled + decode_row * rows + few * min(rows, FEW)
        return Terms(
            0.0,
            self.dense.at(work.tokens),
            prefill + area * work.prefill_area if work.prefills else 0.0,
            decode + context * work.decode_context if work.decodes else 0.0,
            cpu,
            move - stall,
            0.0,
            head,
            0.0,
            prefill_row * work.prefills,
            carry_s,
            stall,
            handover,
            0.0 if overlap is None else overlap.second_s,
        )

    def planned_with(self, host: HostCosts | None) -> Fitted:
        """The same with these costs of a host tier."""
        return replace(self, host=host)

    def save(self, path: Path, report: Mapping[str, Any] | None = None) -> None:
        """Write the file as the module says; the folder is made, and an old file replaced whole.

        Of a file with the same key it keeps host tiers and interference that were not measured
        again, and its report where there is no new one.
        """
        kept: Mapping[str, HostCosts] = {}
        interference = self.interference
        with suppress(ProfileError, OSError):  # there is none, or one of something else
            before = Fitted.load(path, self.key)
            kept, interference = before.hosts, interference or before.interference
            report = report or json.loads(path.read_text(encoding="utf-8"))["report"]
        written = {
            "version": VERSION,
            "key": asdict(self.key),
            "layers": self.layers,
            "dense": {"tokens": self.dense.tokens, "seconds": self.dense.seconds},
            "coefficients": dict(self.coefficients),
            "hosts": {name: host.to_json() for name, host in {**kept, **self.hosts}.items()},
            "interference": [] if interference is None else interference.to_json(),
            "report": report or {},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, key: ProfileKey | None = None, command: str = "") -> Fitted:
        """Read a profile.

        Args:
            key: what is to be served; None takes the profile of whatever it is.
            command: that measures it; one for the model, unless it is named.

        Raises:
            ProfileError: there is no such file, it is damaged, or it was measured with something
                else; the message names the command that makes one.
        """
        command = command or "weft profile" + (f" --model {key.model}" if key else "")
        make = f"Make one with: {command} --profile {path}"
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            if read["version"] != VERSION:
                raise ProfileError(f"{path} has version {read['version']}, not {VERSION}. {make}")
            found = ProfileKey(**read["key"])
            fitted = cls(
                found,
                int(read["layers"]),
                Curve(tuple(read["dense"]["tokens"]), tuple(read["dense"]["seconds"])),
                {name: float(value) for name, value in read["coefficients"].items()},
                {name: HostCosts.from_json(host) for name, host in read["hosts"].items()},
                interference=Interference.from_json(found_at)
                if (found_at := read.get("interference"))
                else None,
            )
        except FileNotFoundError:
            raise ProfileError(f"There is no profile of costs at {path}. {make}") from None
        except OSError as error:
            raise ProfileError(f"Cannot read {path}: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProfileError(f"{path} is not a profile of costs ({error}). {make}") from None
        if key is not None and found != key:
            differs = ", ".join(
                f"{name} is '{was}', not '{asdict(key)[name]}'"
                for name, was in asdict(found).items()
                if was != asdict(key)[name]
            )
            raise ProfileError(f"{path} was measured with something else: {differs}. {make}")
        return fitted


def features(work: Work) -> list[float]:
    """The features of a sub-batch, in the order of ``FEATURES``."""
    return [
        work.prefills > 0,
        work.prefill_area,
        work.prefills,
        work.decodes > 0,
        work.decode_context,
        work.decodes,
        min(work.decodes, FEW),
        work.sampled,
    ]


def fit(key: ProfileKey, layers: int, points: Seq[Point], knots: Iterable[int]) -> Fitted:
    """Fit a dense curve through ``knots`` and the coefficients, all at once.

    Ordinary least squares on relative errors: every point weighs 1 / seconds, so that short steps
    count as much as long ones. Steps with two sub-batches are not fitted.

    Raises:
        ProfileError: fewer points than unknowns, a knot at whose tokens nothing was measured, or a
            point that took no time.
    """
    import numpy as np

    tokens = tuple(knots)
    shape = Curve(tokens, (0.0,) * len(tokens))
    unknown = len(shape.tokens) + len(FEATURES)
    if len(points) < unknown:
        raise ProfileError(f"{unknown} unknowns cannot be fitted to {len(points)} points")
    unmeasured = set(tokens) - {point.work.tokens for point in points}
    if unmeasured:
        raise ProfileError(f"no step of {min(unmeasured)} tokens was measured")
    if min(point.seconds for point in points) <= 0:
        raise ProfileError("a measured step took no time")
    rows = np.zeros((len(points), unknown))
    for row, (work, seconds) in zip(rows, points, strict=True):
        for knot, share in shape.weights(work.tokens):
            row[knot] = share
        row[len(shape.tokens) :] = features(work)
        row /= seconds
    scale = np.abs(rows).max(axis=0)  # areas are millions of times larger than flags
    scale[scale == 0] = 1.0
    solved, *_ = np.linalg.lstsq(rows / scale, np.ones(len(points)), rcond=None)
    values = [float(value) for value in solved / scale]
    curve = Curve(shape.tokens, tuple(values[: len(shape.tokens)]))
    coefficients = dict(zip(FEATURES, values[len(shape.tokens) :], strict=True))
    return Fitted(key, layers, curve, coefficients)


class Accuracy(NamedTuple):
    """Prediction accuracy: the mean of 1 - |error|, and the value that 90 % of points reach."""

    average: float
    p90: float


def accuracy(fitted: Fitted, points: Seq[Point]) -> Accuracy:
    """The accuracy on measured points, as OmniServe's table 2 gives it."""
    pairs = [(step_time(fitted, [point.work]), point.seconds) for point in points]
    return agreement(pairs)


def agreement(pairs: Iterable[tuple[float, float]]) -> Accuracy:
    """The accuracy of predicted against measured seconds; the latter are the reference.

    Raises:
        ProfileError: there are no pairs.
    """
    kept = sorted((1 - abs(guess - truth) / truth for guess, truth in pairs), reverse=True)
    if not kept:
        raise ProfileError("no points to compare")
    return Accuracy(sum(kept) / len(kept), kept[(9 * len(kept) + 9) // 10 - 1])
