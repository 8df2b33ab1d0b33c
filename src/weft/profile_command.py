"""The command ``weft profile``: measures what steps cost, and keeps that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.core.config import EngineConfig
from weft.core.flags import given_settings


def run_profile(options: dict[str, Any]) -> int:
    """Run the command; returns the exit status."""
    from weft.core.results import check_folder
    from weft.cost.fit import profile_path
    from weft.cost.options import ProfileOptions
    from weft.cost.profile_report import format_report
    from weft.engine.profiling import profile_engine, profiled_config

    profile_settings, engine_settings = given_settings(options, ProfileOptions, EngineConfig)
    chosen = ProfileOptions(**profile_settings)
    config = profiled_config(engine_settings)
    if chosen.tune:
        from weft.engine.tuning import tune_kernels

        print(f"written to {tune_kernels(config)}")
        return 0
    if config.profile is not None:
        check_folder(str(Path(config.profile).parent), "profile")
    key, fitted, report = profile_engine(config, chosen)
    path = profile_path(key, config.profile)
    fitted.save(path, report)
    print(json.dumps(report, indent=2) if chosen.json else format_report(report, key))
    if not chosen.json:
        print(f"written to {path}")
    return 0
