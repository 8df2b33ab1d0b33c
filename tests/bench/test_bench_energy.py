"""``weft bench energy``: CPU time of a server's processes, and joules where they can be read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from fakeserver import fake_server, server_process

from weft import cli
from weft.bench.energy import bench_energy, format_energy
from weft.bench.meters import JouleMeter
from weft.bench.options import EnergyBench, ServeBench
from weft.bench.processes import (
    NotMeasuredError,
    ProcessTime,
    ServerProcesses,
    cpu_used,
    plane_of,
)
from weft.bench.rapl import Rapl
from weft.bench.serve import bench_serve
from weft.core.errors import ConfigError

# -- CPU time -------------------------------------------------------------------------------------


def test_the_processes_of_a_server_are_found_by_its_address():
    with server_process() as (port, pid, child):
        found = ServerProcesses("127.0.0.1", port)
        before = found.read()
        assert {one.pid for one in before} == {pid, child}
        until = time.monotonic() + 20.0
        rows = {child: 0.0}
        while rows[child] < 0.05 and time.monotonic() < until:
            used = cpu_used(before, found.read(), 10)
            rows = {row["pid"]: row["cpu_s"] for row in used["processes"]}
        assert rows[child] >= 0.05
        assert used["cpu_s"] == pytest.approx(sum(rows.values()))
        assert used["cpu_s_per_output_token"] == pytest.approx(used["cpu_s"] / 10)
        assert [one.pid for one in ServerProcesses("nowhere", 1, (child,)).read()] == [child]


def test_cpu_time_is_counted_for_each_process_and_plane():
    """One process is new, one has ended, and one has the number of another that ended."""
    before = [
        ProcessTime(1, "weft", 0.0, 1.0),
        ProcessTime(2, "weft-engine", 0.0, 5.0),
        ProcessTime(3, "weft-frontend", 0.0, 2.0),
        ProcessTime(4, "weft-renderer", 0.0, 7.0),
    ]
    after = [
        ProcessTime(1, "weft", 0.0, 1.0),
        ProcessTime(2, "weft-engine", 0.0, 8.0),
        ProcessTime(3, "weft-frontend", 9.0, 0.5),
        ProcessTime(5, "weft-rank1", 9.0, 1.5),
    ]
    used = cpu_used(before, after, 100)
    assert {name: one["cpu_s"] for name, one in used["planes"].items()} == {
        "supervisor": 0.0,
        "engine": 4.5,
        "request plane": 0.5,
    }
    assert used["planes"]["engine"]["cpu_s_per_output_token"] == 0.045
    assert (used["cpu_s"], used["ended"]) == (5.0, 2)
    assert cpu_used(before, after, 0)["cpu_s_per_output_token"] is None


@pytest.mark.parametrize(
    ("name", "plane"),
    [
        ("weft-standby", "engine"),
        ("weft-host", "engine"),
        ("weft-rank3", "engine"),
        ("weft-frontend", "request plane"),
        ("weft-sweeper", "supervisor"),
        ("llama-server", "server"),
    ],
)
def test_titles_of_processes_say_what_they_are_part_of(name, plane):
    assert plane_of(name) == plane


def test_servers_whose_cpu_time_nobody_can_read():
    with fake_server() as server, pytest.raises(NotMeasuredError, match="part of this process"):
        ServerProcesses("127.0.0.1", server.server_address[1])
    with pytest.raises(NotMeasuredError, match="Nothing listens"):
        ServerProcesses("127.0.0.1", 1)
    with pytest.raises(NotMeasuredError, match="no address of this machine"):
        ServerProcesses("192.0.2.7", 80)
    with pytest.raises(ConfigError, match="no process 4194301"):
        ServerProcesses("127.0.0.1", 1, (4194301,))


# -- joules ---------------------------------------------------------------------------------------


def zone(folder: Path, name: str, title: str, joules: float, full: float = 1000.0) -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{title}\n")
    (path / "max_energy_range_uj").write_text(f"{int(full * 1e6)}\n")
    (path / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return path


def test_joules_are_those_of_packages_and_of_memory_beside_them(tmp_path):
    zones = [("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram")]
    zones += [("intel-rapl:1", "psys"), ("intel-rapl-mmio:0", "package-0")]
    for name, title in zones:
        zone(tmp_path, name, title, 990.0)
    rapl = Rapl(tmp_path)
    assert (rapl.missing, rapl.zones) == ("", ["package-0", "dram"])
    for name, title in zones:
        zone(tmp_path, name, title, 995.0)
    assert rapl.joules() == pytest.approx(10.0)
    zone(tmp_path, *zones[0], 3.0)  # it was full at 1000
    assert rapl.joules() == pytest.approx(18.0)


def test_a_meter_says_watts_and_joules_a_token(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 100.0)
    meter = JouleMeter(Rapl(tmp_path))
    meter.start()
    zone(tmp_path, "intel-rapl:0", "package-0", 900.0)
    meter.look()
    zone(tmp_path, "intel-rapl:0", "package-0", 200.0)
    assert meter.end(10.0, 550) == {
        "joules": pytest.approx(1100.0),
        "joules_per_output_token": pytest.approx(2.0),
        "watts": pytest.approx(110.0),
        "counters": ["package-0"],
    }
    meter.start()
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert "could not be read any more" in meter.end(1.0, 1)["not_measured"]


def test_without_counters_it_says_why(tmp_path):
    assert "shows no counters" in Rapl(tmp_path).missing
    path = zone(tmp_path, "intel-rapl:0", "psys", 1.0)
    assert "no package" in Rapl(tmp_path).missing
    zone(tmp_path, "intel-rapl:1", "package-0", 1.0)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("much")
    assert "cannot be read: no number" in Rapl(tmp_path).missing
    (path / "name").unlink()
    assert "cannot be read" in Rapl(tmp_path).missing
    found = JouleMeter(Rapl(tmp_path)).end(1.0, 1)
    assert list(found) == ["not_measured"]


# -- the command ----------------------------------------------------------------------------------

FAST = {"arrivals": "closed", "requests": 6, "output_tokens": "5", "warmup": 0}


def test_each_load_has_its_cpu_time_and_energy(tmp_path):
    with server_process() as (port, pid, child):
        load = ServeBench(url=f"http://127.0.0.1:{port}", clients=(1, 2), **FAST)
        result = bench_energy(EnergyBench(rest_s=0.1), load)
        assert result["command"] == "weft bench energy"
        assert result["at_rest"]["server"]["cpu_s"] > 0
        for run in result["runs"]:
            assert run["output_tokens"] == 30
            assert {row["pid"] for row in run["server"]["processes"]} == {pid, child}
            assert run["server"]["cpu_s_per_output_token"] == run["server"]["cpu_s"] / 30
            assert run["client"]["cpu_s_per_output_token"] > 0
        said = format_energy(result)
        assert said.count("CPU ms/token") == 2
        assert f"{pid}" in said
        if not os.path.exists("/sys/class/powercap"):
            assert "not measured: this machine shows no counters" in said
        file = tmp_path / "result.json"
        words = ["bench", "energy", "--url", load.url, "--requests", "2", "--output-tokens", "3"]
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--rate", "50", "--rest-s", "0", "--output", str(file)])
        assert not ended.value.code
        assert json.loads(file.read_text())["at_rest"] is None


def test_serve_says_that_it_measured_no_cpu_time_of_its_own_process():
    with fake_server() as server:
        (run,) = bench_serve(ServeBench(url=server.url, **FAST))["runs"]
    assert run["server"] == {"not_measured": "The server is a part of this process."}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--url", "nonsense"], 2, "is not a server's address"),
        (["--url", "http://127.0.0.1:1"], 1, "Nothing listens on port 1"),
        (["--server-pids", "4194301"], 2, "There is no process 4194301"),
        (["--rest-s", "-1"], 2, "rest_s must be"),
        (["--clients", "2"], 2, "--clients needs --arrivals closed"),
    ],
)
def test_wrong_uses(capsys, words, code, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "energy", *words])
    assert ended.value.code == code
    assert message in capsys.readouterr().err
