"""Decides whether large steps are computed in two halves that overlap on a GPU, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.core.config import EngineConfig
from weft.core.config_rules import excludes_halves
from weft.core.errors import ConfigError, ProfileError
from weft.core.resolved import ResolvedConfig
from weft.cost.fit import Fitted, profile_path
from weft.cost.interference import LEAST_GAIN, ridge_tokens
from weft.engine.costs import profile_command, profile_key
from weft.engine.devices import is_cpu
from weft.engine.model import Model
from weft.exec.step_layout import HALF_STRIDE, captured_sizes, half_sizes, sizes_for
from weft.sched.halves import Halves, Measured

SHARES = (8, 4, 2, 1)  # multiprocessors for each program of attention that are tried


@dataclass(frozen=True)
class HalvesChoice:
    """How steps are split.

    Attributes:
        why: a sentence for the start; empty where nobody asks for halves.
        sizes: tokens of halves that are captured.
        programs: of decode attention at the most; None for any.
        rule: splits steps; None where they run whole.
    """

    why: str = ""
    sizes: tuple[int, ...] = ()
    programs: int | None = None
    rule: Halves | None = None

    def applied(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """The settings of an engine whose steps are split so."""
        return replace(resolved, half_sizes=self.sizes, attention_programs=self.programs)


def choose_halves(config: EngineConfig, model: Model) -> HalvesChoice:
    """What the setting ``overlap`` comes to for a model.

    Raises:
        ConfigError: it is "on", and a CPU computes.
    """
    if config.overlap == "off":
        return HalvesChoice()
    if is_cpu(model.device):
        if config.overlap == "on":
            raise ConfigError(
                "overlap 'on' computes steps in two halves on a GPU, but the CPU computes here: "
                "all its cores compute either half already; leave overlap at 'auto', which is off "
                "then.",
                param="overlap",
            )
        return HalvesChoice()
    if why := excludes_halves(config):
        return HalvesChoice(f"steps run whole: {why}")
    if model.host is not None:
        if config.overlap == "on":
            raise ConfigError(
                "overlap 'on' computes steps in two halves, but with host_experts each layer waits "
                "for the host; leave one of them out.",
                param="overlap",
            )
        return HalvesChoice("steps run whole: each layer waits for experts on the host")
    if model.spec.states is not None:
        return HalvesChoice("steps run whole: states of recurrent layers have no halves yet")
    most = config.max_num_batched_tokens
    captured = captured_sizes(most, sizes_for(config.max_num_seqs)) if config.graphs else ()
    sizes = tuple(size for size in half_sizes(captured) if size <= most)
    try:
        key = profile_key(config, model)
        path = profile_path(key, config.profile)
        fitted = Fitted.load(path, key, profile_command(config))
    except ProfileError as error:
        return _unmeasured(config, sizes, str(error))
    if fitted.interference is None:
        lacks = f"{path} has nothing of halves; measure them with: {profile_command(config)}"
        return _unmeasured(config, sizes, lacks)
    return _measured(config, sizes, fitted)


def _unmeasured(config: EngineConfig, sizes: tuple[int, ...], why: str) -> HalvesChoice:
    if config.overlap == "auto":
        return HalvesChoice(f"steps run whole: {why}")
    least = 2 * HALF_STRIDE
    words = f"steps from {least} tokens on run in halves, unmeasured: {why}"
    return HalvesChoice(words, sizes, None, Halves(sizes, least, None))


def _measured(config: EngineConfig, sizes: tuple[int, ...], fitted: Fitted) -> HalvesChoice:
    """By a profile: not at all where no measured step has gained enough."""
    assert fitted.interference is not None
    speeds, ridge = fitted.interference.chosen, ridge_tokens(fitted.dense)
    measured = f"of the measured ones the best is {speeds.gain:.2f} times as fast in halves"
    if config.overlap == "auto" and (speeds.gain <= LEAST_GAIN or ridge is None):
        reason = measured if ridge is not None else "dense layers never leave the compute ridge"
        return HalvesChoice(f"steps run whole: {reason}")
    least = max(2 * HALF_STRIDE, ridge or 0)
    rule = Halves(sizes, least, Measured(fitted, speeds))
    limit = f"{speeds.programs} programs of attention" if speeds.programs else "any attention"
    words = f"steps from {least} tokens on run in halves where that gains, with {limit}: {measured}"
    return HalvesChoice(words, sizes, speeds.programs or None, rule)


def attention_limits(device: str) -> tuple[int, ...]:
    """The limits of decode attention that are measured: shares of a GPU, and 0 for none."""
    import torch

    count = torch.cuda.get_device_properties(device).multi_processor_count
    return (*(max(1, count // share) for share in SHARES), 0)
