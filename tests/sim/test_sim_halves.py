"""Simulated steps in halves: which are split, how long they take, and what is refused."""

from __future__ import annotations

import pytest

from weft.core.errors import ConfigError, ProfileError
from weft.cost.curves import Curve
from weft.cost.fit import FEATURES, Fitted, ProfileKey
from weft.cost.interference import Interference, Speeds
from weft.cost.model import step_time
from weft.cost.work import Work
from weft.sim.build import build
from weft.sim.command import run_sim
from weft.sim.options import SimOptions
from weft.sim.overlap import interfering, published
from weft.sim.report import format_sim

ONLINE = {
    "hardware": "h100", "rate": "200", "requests": 250, "input_tokens": "1500",
    "output_tokens": "150", "max_num_seqs": 512, "host_overhead": "none", "error": 0,
    "long_steps": 0,
}  # fmt: skip


def test_halves_save_time_and_lose_no_token() -> None:
    off, on = (run_sim(SimOptions(**ONLINE, overlap=overlap)) for overlap in ("off", "published"))
    (whole,), (halved,) = off["runs"], on["runs"]
    assert halved["split_steps"] > 20
    assert "split_steps" not in whole
    for run in (whole, halved):
        assert run["classes"]["interactive"]["completed"] == 250
    took = [run["classes"]["interactive"]["output_tokens_per_s"] for run in (whole, halved)]
    assert 1.0 < took[1] / took[0] < 1.2
    assert f"{halved['split_steps']} steps in two that overlap" in format_sim(on)


def test_the_published_interference_is_that_of_offline_runs() -> None:
    """At the one share of the GPU that saves most over some mixes, as an engine captures one."""
    interference = published()
    for speeds in interference.at:
        for reads in (0.1, 1.0, 3.0):
            assert speeds.both_s(1.0, reads) >= interfering(1.0, reads) * 0.999
    best = interference.chosen
    assert (best.dense, best.attention) == pytest.approx((0.8, 0.4))
    assert best.gain == pytest.approx(1.2, rel=0.01)  # of half as many reads, all beside


def test_a_step_in_halves_takes_what_its_parts_do_side_by_side() -> None:
    speeds = Speeds(8, 0.5, 0.8, 0.5, 1e-3)
    fitted = Fitted(
        ProfileKey("a", "b", "c", "d", "e"), 2, Curve((1, 1000), (0.0, 1.0)),
        dict.fromkeys(FEATURES, 0.0) | {"decode_context": 1e-3, "prefill_area": 1e-6},
    )  # fmt: skip
    prompts, decodes = Work(), Work()
    prompts.add(0, 400)
    for _ in range(10):
        decodes.add(99, 1)
    dense, few = fitted.dense.at(400), fitted.dense.at(10)
    both = 1.0 / 0.8 if dense > 0.5 / 0.8 else dense / 0.5 + (1 - 0.8 * dense / 0.5) / 0.5
    wanted = both + few + 1e-6 * 400 * 200 + 1e-3
    assert speeds.halves_s(fitted, [prompts, decodes]) == pytest.approx(wanted)
    assert step_time(fitted, [prompts.joined(decodes)]) == pytest.approx(
        fitted.dense.at(410) + 1.0 + 0.08
    )


def test_what_cannot_be_split_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="sub-batches of its own"):
        build(SimOptions(**ONLINE, overlap="published", scheduler="load-aware"))
    with pytest.raises(ProfileError, match="no profile of costs"):
        build(SimOptions(**ONLINE, overlap=str(tmp_path / "none.json")))
    key, flat = ProfileKey("a", "b", "c", "d", "e"), Curve((1, 2), (1.0, 1.0))
    fitted = Fitted(key, 2, flat, dict.fromkeys(FEATURES, 0.0))
    fitted.save(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match="has nothing of halves; measure them on a GPU"):
        build(SimOptions(**ONLINE, overlap=str(tmp_path / "profile.json")))
    measured = Fitted(
        key, 2, flat, dict.fromkeys(FEATURES, 0.0), interference=Interference((Speeds(4, 1, 1),))
    )
    measured.save(tmp_path / "measured.json")
    world = build(SimOptions(**ONLINE, overlap=str(tmp_path / "measured.json")))
    assert world.planned.halves.speeds == Speeds(4, 1, 1)
