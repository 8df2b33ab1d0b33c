"""The process that renders templates: limits of a template, and isolation of its death."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from depth import deep
from live import eventually
from weft.core.errors import RendererDeadError, TemplateError, TokenizerError, WeftError
from weft.core.logs import NOTICES
from weft.text import ChatTemplate, sandbox
from weft.text.isolated import Failure
from weft.text.renderer import MAX_SOURCE_CHARS, Renderer, TemplateSource
from weft.text.template import GLOBALS, MAX_OUTPUT_CHARS, find_template

CHAT = [{"role": "user", "content": "hi"}]
PLAIN = "{{ messages[0].content }}"
GROW = "{% set ns = namespace(a=messages[0].content) %}{% for i in range(99) %}"
COSTLY = {
    "joining": GROW + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "adding": GROW + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "lists": GROW + "{% set ns.a = [ns.a, ns.a]|list + [ns.a] * 99999 %}{% endfor %}{{ ns.a }}",
    "replace": GROW + "{% set ns.a = ns.a.replace('h', 'h' * 999) %}{% endfor %}",
    "the filter replace": GROW + "{% set ns.a = ns.a|replace('h', 'h' * 999) %}{% endfor %}",
    "indent": "{{ messages[0].content|indent(3000000000, true)|length }}",
    "tojson": "{{ messages|tojson(indent=1000000000)|length }}",
    "batch": "{{ messages|batch(2000000000, 1)|list|length }}",
    "slice": "{{ messages|slice(2000000000)|list|length }}",
    "format": "{{ ('%1000000000d' % messages|length)|length }}",
    "the method format": "{{ '{:>1000000000}'.format(messages[0].content)|length }}",
    "the filter format": "{{ '%1000000000d'|format(messages|length)|length }}",
    "center": "{{ messages[0].content.center(1000000000)|length }}",
    "the filter center": "{{ messages[0].content|center(1000000000)|length }}",
    "ljust": "{{ messages[0].content.ljust(1000000000)|length }}",
    "zfill": "{{ messages[0].content.zfill(1000000000)|length }}",
    "times": "{{ (messages[0].content * 1000000000)|length }}",
    "folded times": "{{ ('x' * 1000000000)|length }}",
    "a power": "{{ (messages|length + 9) ** 1000000000 > 1 }}",
    "a folded power": "{{ 10 ** 1000000000 > 1 }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a product": "{% for i in range(9999) %}{{ range(99999)|sum }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a deep list": GROW + "{% for j in range(999) %}{% set ns.a = [ns.a] %}{% endfor %}{% endfor %}"
    "{{ ns.a|tojson }}",
    "a long source": "x" * (MAX_SOURCE_CHARS + 1),
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "negations": "{{ " + "not " * 20000 + "1 }}",
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "sums": "{{ " + "+".join("1" * 9000) + " }}",
}


def children_of(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for path in listed for child in path.read_text().split()}


SLOW = {"a power", "a folded power", "a loop over a product", "macros"}  # each until it is stopped


def costly() -> list[Any]:
    return [pytest.param(name, marks=[deep] if name in SLOW else []) for name in COSTLY]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


@contextlib.contextmanager
def little_more_memory() -> Iterator[None]:
    """This process fails to get more than 256 MiB: what costs more must be another process's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class TestCosts:
    @pytest.mark.parametrize("name", costly())
    def test_a_template_that_costs_too_much_is_one_error(self, renderer, name):
        def render(source: str) -> str:
            return ChatTemplate({"default": source}, renderer=renderer).render(CHAT)

        assert render(PLAIN) == "hi"
        with little_more_memory(), pytest.raises((TemplateError, TokenizerError)) as caught:
            render(COSTLY[name])
        assert "chat template" in caught.value.message
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 800
        assert render(PLAIN) == "hi"

    def test_what_it_says(self, renderer):
        slow = ChatTemplate({"default": COSTLY["loops"]}, renderer=renderer)
        large = ChatTemplate({"default": COSTLY["times"]}, renderer=renderer)
        with pytest.raises(TemplateError, match="chat template takes more than 1 s of CPU time"):
            slow.render(CHAT)
        with pytest.raises(TemplateError, match="needs more than 64 MiB of memory"):
            large.render(CHAT)
        with pytest.raises(TokenizerError, match="'default' is not valid: it is nested too deeply"):
            ChatTemplate({"default": COSTLY["parentheses"]}, renderer=renderer)

    def test_a_long_conversation_may_use_more(self, renderer):
        source = "{% for m in messages %}{{ 'a' + (m.content ~ 'b')|trim + 'c' }}{% endfor %}"
        text = "<é€" * 2_000_000
        template = ChatTemplate({"default": source}, renderer=renderer)
        assert template.render([{"role": "user", "content": text}]) == f"a{text}bc"

    def test_the_limit_of_the_output(self, renderer):
        source = "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}"
        template = ChatTemplate({"default": source}, renderer=renderer, max_output_chars=10**6)
        with pytest.raises(TemplateError, match="more than 1000000 characters"):
            template.render(CHAT)
        assert MAX_OUTPUT_CHARS > 10**6


class TestProcess:
    def test_nothing_is_started_before_it_is_needed(self):
        before = children_of(os.getpid())
        renderer = Renderer()
        assert children_of(os.getpid()) == before
        renderer.start()
        assert len(children_of(os.getpid()) - before) == 1

    def test_more_templates_than_are_kept_compiled(self, renderer):
        templates = [ChatTemplate({"default": f"{n}{PLAIN}"}, renderer=renderer) for n in range(40)]
        assert [template.render(CHAT) for template in templates] == [f"{n}hi" for n in range(40)]

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_a_process_that_was_killed_idle_costs_no_request(self, number):
        renderer = Renderer()
        template = ChatTemplate({"default": PLAIN}, renderer=renderer)
        gone = os.pidfd_open(renderer._process.pid)
        os.kill(renderer._process.pid, number)
        assert select.select([gone], [], [], 30)[0]
        os.close(gone)
        assert template.render(CHAT) == "hi"

    def test_a_request_whose_process_is_killed_is_sent_again(self):
        renderer = Renderer()
        template = ChatTemplate({"default": PLAIN}, renderer=renderer)
        first = renderer._process.pid
        os.kill(first, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(template.render, CHAT)
            eventually(renderer._lock.locked)
            os.kill(first, signal.SIGKILL)
            assert asked.result(30) == "hi"

    def test_a_request_is_sent_again_once(self, monkeypatch):
        renderer = Renderer()
        connect, killed = renderer._connected, []

        def doomed():
            link = connect()
            if renderer._process.pid not in killed:
                killed.append(renderer._process.pid)
                os.kill(renderer._process.pid, signal.SIGKILL)
            return link

        monkeypatch.setattr(renderer, "_connected", doomed)
        with pytest.raises(RendererDeadError):
            renderer.render(TemplateSource.of("x"), {}, None, 9)
        assert len(killed) == 3, "two for the request, and the next one"

    def test_a_silent_process_is_one_error(self, monkeypatch):
        monkeypatch.setattr("weft.text.isolated.PATIENCE_S", 1.0)
        renderer = Renderer()
        renderer.start()
        os.kill(renderer._process.pid, signal.SIGSTOP)
        with pytest.raises(RendererDeadError):
            renderer.render(TemplateSource.of("x"), {}, None, 9)
        renderer._link.settimeout(30)
        assert renderer.render(TemplateSource.of("x"), {}, None, 9) == "x"

    def test_threads_take_turns(self, renderer):
        template = ChatTemplate({"default": PLAIN}, renderer=renderer)
        wrong: list[object] = []

        def ask(number: int) -> None:
            for n in range(50):
                text = f"{number}.{n}" * 500
                if template.render([{"role": "user", "content": text}]) != text:
                    wrong.append(text)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_forked_child_has_one_of_its_own(self):
        script = f"""
            import os
            from weft.text import ChatTemplate
            template = ChatTemplate({{"default": {PLAIN!r}}})
            child = os.fork()
            for n in range(200):
                assert template.render([{{"role": "user", "content": str(n + child)}}]) == str(
                    n + child
                )
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize("held", [False, True], ids=["alone", "its socket held by a fork"])
    def test_it_ends_with_its_parent(self, held):
        script = f"""
            import os, signal, sys, time
            from weft.text.renderer import Renderer, TemplateSource
            renderer = Renderer()
            renderer.compile(TemplateSource.of("x"))
            fork = os.fork() if {held} else 0
            if {held} and fork == 0:
                sys.stdin.read()
                os._exit(0)
            print(renderer._process.pid, flush=True)
            sys.stdin.read()
        """
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as parent:
            gone = os.pidfd_open(int(parent.stdout.readline()))
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            assert select.select([gone], [], [], 30)[0]
            os.close(gone)

    def test_signals_of_the_terminal_do_not_reach_it(self, renderer):
        renderer.start()
        renderer.compile(TemplateSource.of("x"))
        assert os.getsid(renderer._process.pid) != os.getsid(0)
        os.kill(renderer._process.pid, signal.SIGINT)
        os.kill(renderer._process.pid, signal.SIGTERM)
        assert renderer.render(TemplateSource.of("y"), {}, None, 9) == "y"

    def test_no_file_descriptors_are_left(self):
        resource_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        open_files = len(os.listdir("/proc/self/fd"))
        renderer = Renderer()
        for _ in range(3):
            assert renderer.render(TemplateSource.of("x"), {}, None, 9) == "x"
            os.kill(renderer._process.pid, signal.SIGKILL)
            assert renderer.render(TemplateSource.of("x"), {}, None, 9) == "x"
        assert len(os.listdir("/proc/self/fd")) <= open_files + 1
        os.close(lowest := os.dup(0))  # whatever numbers others left free above it
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource_limit[1]))
        try:
            with pytest.raises(RendererDeadError, match="cannot be started: Too many open files"):
                Renderer().start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, resource_limit)


def test_names_of_the_environment_are_reserved():
    assert set(GLOBALS.split()) == set(sandbox.new_environment().globals)


def test_a_server_says_why_chat_is_off(tmp_path, caplog):
    (tmp_path / "chat_template.jinja").write_text(COSTLY["parentheses"])
    with caplog.at_level("INFO", NOTICES):
        assert find_template(tmp_path, None) is None
    assert "chat is off. The chat template 'default' is not valid" in caplog.text
    with pytest.raises(WeftError, match="nested too deeply"):
        find_template(tmp_path, str(tmp_path / "chat_template.jinja"))


def test_a_failure_is_told_apart_from_a_text():
    renderer = Renderer()
    assert renderer.render(TemplateSource.of("{{ x }}"), {"x": "unknown"}, None, 99) == "unknown"
    assert renderer.render(TemplateSource.of("{{ x.y.z }}"), {"x": 1}, None, 99) == Failure(
        "failed", "UndefinedError: 'int object' has no attribute 'y'"
    )
