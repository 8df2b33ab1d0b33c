"""Every setting of ``weft profile``, declared once."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.settings import check_settings, config_errors, setting


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Settings of ``weft profile``, beside the engine's own settings."""

    repeats: int = setting(
        "int", 20, "times that each step is measured; long ones less often", low=20, high=10**6
    )
    steps: int = setting(
        "int", 60, "random steps to fit; half as many are held out", low=10, high=10**5
    )
    seed: int = setting("int", 0, "seed of the random steps", low=0, high=2**63 - 1)
    tune: bool = setting(
        "bool",
        False,
        "measure launches of products and attention on this GPU instead; write them to the file "
        "of tuning",
    )
    json: bool = setting("bool", False, "print the report as JSON")

    def __post_init__(self) -> None:
        with config_errors():
            check_settings(self)
