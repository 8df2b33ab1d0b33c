"""What can be seen of the images without building them: users, pins, files, settings."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from weft.cli import EXIT_USAGE, command_line
from weft.core.flags import actions_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNPINNED = r"pip install(?![^&]*--(require-hashes|no-index))|pip wheel(?![^&]*--no-build-isolation)"
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+[\w.-]*")


def instructions(text: str) -> list[tuple[str, str]]:
    """Names and arguments, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in lines]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage, with those of the stages that it begins from."""
    found: dict[str, list[tuple[str, str]]] = {}
    stage: list[tuple[str, str]] = []
    for name, words in instructions(text):
        if name == "FROM":
            base, _, own = words.partition(" AS ")
            stage = found[own] = [*found.get(base, [("FROM", base)])]
        else:
            stage.append((name, words))
    return found


def faults(text: str) -> list[str]:
    """What is wrong with the images of a Dockerfile."""
    made, found = stages(text), []
    for name, words in instructions(text):
        if name == "RUN" and re.search(r"(curl|wget)[^|&]*\|\s*(ba)?sh|sudo |chmod -R 777", words):
            found.append(f"runs what it has fetched: {words}")
        if name == "RUN" and re.search(UNPINNED, words):
            found.append(f"installs what is not pinned: {words}")
        if name == "ADD":
            found.append(f"ADD may fetch; COPY does not: {words}")
    for base in {stage[0][1] for stage in made.values()}:
        if not PINNED.fullmatch(base):
            found.append(f"{base} is no version")
    for image in ("cpu", "cuda"):
        given = dict(made.get(image, []))  # the last of each name
        user = given.get("USER", "root").split(":")[0]
        if not user.isdecimal() or user == "0":  # a number, so that runAsNonRoot can tell
            found.append(f"{image} runs as {user}")
        missing = {"HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "VOLUME"} - given.keys()
        found += [f"{image} has no {name}" for name in sorted(missing)]
        tools = " ".join(words for name, words in made.get(image, []) if name == "RUN")
        if image == "cpu" and re.search(r"g\+\+|\bgcc\b|build-essential", tools):
            found.append("cpu has a compiler")
    return found


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def test_the_images_keep_the_rules(dockerfile):
    assert faults(dockerfile) == []
    assert list(stages(dockerfile))[-1] == "cpu"  # what is built if no target is named


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("USER 10001:10001", "USER root", "cuda runs as root"),
        ("slim-bookworm AS base", "slim AS base", ""),
        ("python:3.13-slim-bookworm AS base", "python:latest AS base", "python:latest is no"),
        ("STOPSIGNAL SIGTERM\n", "", "cuda has no STOPSIGNAL"),
        ("ENV PATH", "RUN curl -L x.example/get | sh\nENV PATH", "runs what it has fetched"),
        (" --require-hashes", "", "what is not pinned"),
        (" --no-build-isolation", "", "what is not pinned"),
        ("FROM base AS cpu", "FROM base AS cpu\nRUN apt-get install g++", "cpu has a compiler"),
    ],
)
def test_a_broken_rule_is_found(dockerfile, old, new, words):
    assert old in dockerfile
    found = faults(dockerfile.replace(old, new))
    assert any(words in fault for fault in found) == bool(words), found


def test_what_is_copied_is_there_and_sent_to_the_builder(dockerfile):
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = set()
    for name, words in instructions(dockerfile):
        if name == "COPY" and not words.startswith("--from"):
            *sources, _ = words.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source
                copied.add(source)
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {facts["project"]["readme"], *facts["project"]["license-files"], "CMakeLists.txt"}
    assert needed <= copied  # a build reads them


def flags_of(command: str) -> set[str]:
    parser = command_line(command, first=True)
    return {flag for action in actions_of(parser) for flag in action.option_strings}


def test_commands_of_the_images_are_weft_s(dockerfile):
    given = dict(stages(dockerfile)["cpu"])
    for words in (given["ENTRYPOINT"], given["HEALTHCHECK"].partition("CMD ")[2]):
        program, command, *flags = json.loads(words)
        assert program == "weft"
        assert {flag for flag in flags if flag.startswith("-")} <= flags_of(command)


def test_a_command_after_that_of_the_image_is_named(dockerfile, capsys):
    """`docker run weft serve MODEL`."""
    _, *entry = json.loads(dict(stages(dockerfile)["cpu"])["ENTRYPOINT"])
    words = [*entry, "serve", "owner/model"]
    with pytest.raises(SystemExit) as ended:
        command_line("serve", first=True).parse_args(words)
    assert ended.value.code == EXIT_USAGE
    assert "leave the second 'serve' out" in capsys.readouterr().err


def test_the_services_of_compose_keep_the_rules(dockerfile):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        assert "build" in service or PINNED.fullmatch(service["image"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = (DEPLOY / source).exists() if source[0] == "." else source in compose["volumes"]
            assert known, volume
    weft = compose["services"]["weft"]
    assert weft["read_only"]
    assert (DEPLOY / weft["build"]["dockerfile"].removeprefix("deploy/")).exists()
    assert (DEPLOY / weft["build"]["context"]).resolve() == ROOT
    (volume,) = weft["volumes"]
    assert volume.split(":")[1] == dict(stages(dockerfile)["cpu"])["VOLUME"]


def test_prometheus_and_grafana_find_each_other():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert job["job_name"] == "weft"  # which an alert and a panel name
    assert target.split(":")[0] in services
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text(encoding="utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    inside = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{folder}/weft.json" in inside
