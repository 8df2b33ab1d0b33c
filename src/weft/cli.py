"""The command line: ``weft serve``, ``generate``, ``batch``, ``batches``, ``chat``, ..."""

from __future__ import annotations

try:
    import argparse
    import importlib
    import io
    import json
    import logging
    import os
    import re
    import sys
    from collections.abc import Callable
    from collections.abc import Sequence as Seq
    from dataclasses import replace
    from typing import Any, NoReturn

    from weft import __version__
    from weft.core.config import EngineConfig
    from weft.core.errors import ConfigError, ParameterError, WeftError, suggest
    from weft.core.flags import (
        HELP_ALL,
        add_model,
        add_models,
        add_settings,
        given_settings,
        hide_rare,
    )
    from weft.core.inert import inert
    from weft.core.logs import NOTICES, log_level
    from weft.core.settings import settings_of
    from weft.core.types import SamplingParams
except KeyboardInterrupt:  # Ctrl-C before main() can catch it
    raise SystemExit(130) from None

_OF_GENERATE = "[MODEL] [PROMPT | --file FILE] [settings]"
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EARLY = {  # processes that a command starts first
    "serve": ("weft.engine.process", "weft.server.process"),
    "frontend": ("weft.server.process",),
}
Declare = Callable[[argparse.ArgumentParser], None]
CHOICE = r"argument [^:]+: invalid choice: '(.*)' \(choose from (.*)\)"  # as argparse says it
HELPS = {"-h", "--help", HELP_ALL}
INTRODUCTION = """weft serves large language models on a machine of your own.

  weft serve Qwen/Qwen3-0.6B    fetch a model and serve it on http://127.0.0.1:8000
  weft serve ./model.gguf       serve a file, or a folder, that you have
  weft chat                     talk to it, or to the built-in model if none is served
  weft status                   what a running server does
  weft models                   the models on this machine; fetch and remove some
  weft doctor                   check this machine, and say what to do

'weft --help' lists all commands, 'weft COMMAND --help' the settings of one.
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one sentence and names the nearest flag."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(CHOICE, message):
            word, known = wrong[1], re.findall(r"[^', ]+", wrong[2])
            message = f"unknown word '{word}'.{suggest(word, known)} Known: {', '.join(known)}"
        sentence = re.sub(r"^argument [^:]+: (?=\S+ must be )", "", message)
        sentence = sentence if sentence.endswith((".", "?", "!")) else f"{sentence}."
        self.exit(EXIT_USAGE, f"weft: {sentence} See '{self.prog} --help'.\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            active = getattr(parsed, "parser", self)
            word = unknown[0].split("=")[0]
            flags = [flag for action in active._actions for flag in action.option_strings]
            hint = suggest(word, flags) if word.startswith("-") else ""
            active.error(f"unknown argument '{unknown[0]}'.{hint}")
        match getattr(parsed, "named", None):
            case [str(word), _, *_] if word == parsed.command:  # the entry of an image has it
                parsed.parser.error(f"leave the second '{word}' out.")
        return parsed


def main(arguments: Seq[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    0 done, 1 error, 2 wrong usage, 3 a batch is done but lines have errors, 130 interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    chosen = next((word for word in words if not word.startswith("-")), None)
    start = None
    try:
        if arguments is None and chosen in EARLY and not HELPS & set(words):
            from weft.core.early import fork_early

            start = fork_early(EARLY[chosen][: 1 if "--engine-only" in words else 2])
        _set_up_output()
        if not words:
            print(INTRODUCTION, end="")
            sys.exit(0)
        parser = command_line(chosen, first=words[:1] == [chosen])
        if HELP_ALL not in words:
            hide_rare(parser)
        options = vars(parser.parse_args(words))
        options["start"] = start
        run = options.pop("run")
        options.pop("parser")
        sys.exit(run(options))
    except WeftError as error:
        print(f"weft: {inert(error.message)}", file=sys.stderr)
        usage = isinstance(error, (ConfigError, ParameterError))
        sys.exit(EXIT_USAGE if usage else EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)


def _set_up_output() -> None:
    """Log as the environment says; write what the terminal's encoding lacks as escapes."""
    logging.basicConfig(level=log_level().upper(), format="weft: %(message)s")
    logging.getLogger(NOTICES).setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


# -- flags from declarations --------------------------------------------------------------------


def command_line(
    chosen: str | None, *, first: bool = False, whole: bool = False
) -> argparse.ArgumentParser:
    """The parser of all commands; only that of the chosen one knows its arguments.

    Declaring those of all takes several times as long as all else before a server starts.

    Args:
        first: nothing is before the chosen one, so that no other one will be asked for.
        whole: the parsers of all commands know their arguments.
    """
    parser = _Parser(prog="weft", description="Serve and run large language models.")
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = _commands()
    for name in (chosen,) if first and chosen in known else known:
        declare, text, usage = known[name]
        shown = None if usage is None else f"weft {name} {usage}"
        command = commands.add_parser(name, help=text, usage=shown)
        if whole or name == chosen:
            declare(command)
    return parser


def _commands() -> dict[str, tuple[Declare, str, str | None]]:
    """What declares the arguments of each command, its line of help, and its usage."""
    return {
        "serve": (
            _serve_args,
            "serve a model over HTTP with OpenAI's API",
            "[MODEL ...] [settings]",
        ),
        "chat": (
            _of_module("weft.chat.command"),
            "talk to a model in the terminal; starts a server if none is there",
            "[MODEL] [--url URL] [settings]",
        ),
        "status": (
            _of_module("weft.status_command"),
            "show what a running server does",
            "[--url URL] [--json]",
        ),
        "top": (
            _of_module("weft.top_command"),
            "show what a running server computes, step by step",
            "[--url URL] [--once] [--json]",
        ),
        "models": (
            _of_module("weft.models_command"),
            "list, fetch and remove models, and say which fit",
            None,
        ),
        "doctor": (
            _of_module("weft.doctor_command"),
            "check this machine, and say what to do",
            "[--port PORT] [--json]",
        ),
        "generate": (_generate_args, "generate text from a prompt or a file", _OF_GENERATE),
        "info": (_info_args, "show model, memory, and the kernel of each op", "[MODEL] [settings]"),
        "batch": (
            _batch_args,
            "answer a file of requests in OpenAI's batch format",
            "INPUT -o OUTPUT [--url URL ...] [settings]",
        ),
        "batches": (
            _of_module("weft.batch.commands"),
            "submit, follow and fetch batches of a running server",
            None,
        ),
        "bench": (_bench_args, "measure a server, an engine or its kernels", None),
        "profile": (
            _profile_args,
            "measure what steps cost here, for schedulers that plan by time",
            "[MODEL] [--profile FILE] [--tune --tuning FILE] [settings]",
        ),
        "compile": (
            _compile_args,
            "compile the kernels of a model for a GPU, which need not be here",
            "[MODEL] [--target GPU] [settings]",
        ),
        "cache": (
            _of_module("weft.packed_command"),
            "show or remove packed weights that are kept",
            None,
        ),
        "frontend": (
            _of_module("weft.frontend"),
            "serve HTTP for an engine on another machine",
            "--ring HOST:PORT [--ring-key-file FILE] [settings]",
        ),
        "attend": (
            _attend_args,
            "attend on this machine for best effort that an engine elsewhere serves",
            "--listen HOST:PORT [--key-file FILE] [settings]",
        ),
        "sim": (_sim_args, "run a scheduler on simulated hardware", "[settings]"),
        "completion": (
            _of_module("weft.completion_command"),
            "print what completes weft's commands and flags in a shell",
            "bash|zsh|fish|tcsh",
        ),
    }


def _of_module(name: str) -> Declare:
    """Declares what a module does: its ``add_arguments``."""

    def declare(parser: argparse.ArgumentParser) -> None:
        importlib.import_module(name).add_arguments(parser)

    return declare


def _generate_args(generate: argparse.ArgumentParser) -> None:
    generate.set_defaults(run=_generate, parser=generate)
    generate.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="the text to continue; before it the model, as for weft serve",
    )
    generate.add_argument(
        "--file", metavar="FILE", help='JSON lines: a text, or {"prompt": ..., sampling settings}'
    )
    generate.add_argument("--chat", action="store_true", help="put the prompt into the chat form")
    generate.add_argument("--echo", action="store_true", help="print the prompt, too")
    generate.add_argument("--quiet", action="store_true", help="no progress and no statistics")
    generate.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(generate, "engine", EngineConfig)
    add_settings(generate, "sampling", SamplingParams, there=settings_of(EngineConfig))


def _info_args(info: argparse.ArgumentParser) -> None:
    info.set_defaults(run=_info, parser=info)
    add_model(info)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(info, "engine", EngineConfig)


def _serve_args(serve: argparse.ArgumentParser) -> None:
    serve.set_defaults(run=_serve, parser=serve)
    add_models(serve, settings_of(EngineConfig)["model"])
    serve.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    from weft.server.options import ServerOptions

    add_settings(serve, "engine", EngineConfig, there=("model",))
    add_settings(serve, "server", ServerOptions)


def _batch_args(batch: argparse.ArgumentParser) -> None:
    from weft.batch.options import BatchOptions

    batch.set_defaults(run=_batch, parser=batch)
    batch.add_argument("input", help="JSON lines, each with custom_id, method, url and body")
    batch.add_argument(
        "-o", dest="output", metavar="FILE", default=argparse.SUPPRESS, help="file for the results"
    )
    batch.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(batch, "batch", BatchOptions)
    add_settings(batch, "engine", EngineConfig)


def _bench_args(bench: argparse.ArgumentParser) -> None:
    from weft.bench_command import BENCHES

    kinds = bench.add_subparsers(dest="kind", required=True, metavar="|".join(BENCHES))
    for name, (declared, run, text) in BENCHES.items():
        takes = any("model" in settings_of(declared_by) for declared_by in declared.values())
        usage = f"weft bench {name} {'[MODEL] ' * takes}[settings]"
        parser = kinds.add_parser(name, help=text, usage=usage)
        parser.set_defaults(run=run, parser=parser)
        if takes:
            add_model(parser)
        parser.add_argument("--config", metavar="FILE", help="YAML file with the same names")
        for title, declared_by in declared.items():
            add_settings(parser, title, declared_by)


def _profile_args(profile: argparse.ArgumentParser) -> None:
    from weft.cost.options import ProfileOptions
    from weft.profile_command import run_profile

    profile.set_defaults(run=run_profile, parser=profile)
    add_model(profile)
    profile.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(profile, "profile", ProfileOptions)
    add_settings(profile, "engine", EngineConfig)


def _compile_args(command: argparse.ArgumentParser) -> None:
    from weft.compile_command import run_compile

    command.set_defaults(run=run_compile, parser=command)
    add_model(command)
    command.add_argument(
        "--target",
        default=argparse.SUPPRESS,
        metavar="GPU",
        help="such as h100, or sm_90 for the usual GPU of a compute capability; that of this "
        "machine by default",
    )
    command.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(command, "engine", EngineConfig)


def _attend_args(attend: argparse.ArgumentParser) -> None:
    from weft.attend.options import PlaceOptions

    attend.set_defaults(run=_attend, parser=attend)
    attend.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    add_settings(attend, "place", PlaceOptions)


def _sim_args(sim: argparse.ArgumentParser) -> None:
    sim.set_defaults(run=_sim, parser=sim)
    sim.add_argument("--config", metavar="FILE", help="YAML file with the same names")
    from weft.sim.options import SimOptions

    add_settings(sim, "simulation", SimOptions)


# -- generate -----------------------------------------------------------------------------------


def _generate(options: dict[str, Any]) -> int:
    from weft.generate import generate_file, generate_stream, read_jobs, told_apart

    options = told_apart(options)
    engine_settings, sampling_settings = given_settings(options, EngineConfig, SamplingParams)
    if options["echo"] and options["file"] is not None:
        raise ParameterError(
            "--echo cannot be combined with --file, whose results have the prompts."
        )
    params = SamplingParams(**sampling_settings)
    jobs = None if options["file"] is None else read_jobs(options["file"], sampling_settings)
    EngineConfig.from_mapping(engine_settings)
    from weft.core.starting import show_start
    from weft.engine.llm import LLM

    if options["quiet"]:
        show_start(None)
    with LLM(**engine_settings) as llm:
        if jobs is not None:
            return generate_file(llm, jobs, options)
        return generate_stream(llm, options["prompt"], params, options)


# -- serve and batch ------------------------------------------------------------------------------


def _serve(options: dict[str, Any]) -> int:
    from weft.core.process import start_child
    from weft.models.named import named_models
    from weft.server.options import ServerOptions, check_given
    from weft.supervise import serve

    words = list(dict.fromkeys([*options.pop("named"), *options.pop("model")]))
    server_settings, engine_settings = given_settings(options, ServerOptions, EngineConfig)
    chosen = ServerOptions(**server_settings)
    check_given(server_settings, engine_only=chosen.engine_only)
    in_file = engine_settings.pop("model", EngineConfig().model)
    words = words or _words_of(in_file)
    start = options["start"] or start_child
    models = named_models(words)
    if len(models) > 1 or chosen.idle_sleep_s:
        from weft.several import check_several

        check_several(models, engine_settings, chosen)
        return serve(engine_settings, chosen, start, models)
    if "models_memory" in server_settings:
        raise ConfigError("--models-memory is for several models.", param="models_memory")
    if models[0].chosen:
        if chosen.served_model_name:
            raise ConfigError(
                "The model has a name, as in NAME=MODEL, and --served-model-name gives another; "
                "leave one out.",
                param="served_model_name",
            )
        chosen = replace(chosen, served_model_name=(models[0].name,))
    return serve({**engine_settings, "model": models[0].source}, chosen, start)


def _words_of(given: Any) -> list[str]:
    """The models that a file names: one, or a list. Raises ConfigError."""
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise ConfigError("model must be a string or a list of strings.", param="model")
    return words


def _batch(options: dict[str, Any]) -> int:
    from weft.batch.options import BatchOptions
    from weft.offline import run_batch

    batch_settings, engine_settings = given_settings(options, BatchOptions, EngineConfig)
    return run_batch(options["input"], BatchOptions(**batch_settings), engine_settings)


def _attend(options: dict[str, Any]) -> int:
    from weft.attend.options import PlaceOptions

    (settings,) = given_settings(options, PlaceOptions)
    chosen = PlaceOptions(**settings)
    from weft.attend.place import run_place

    return run_place(chosen)


def _sim(options: dict[str, Any]) -> int:
    from weft.sim.command import run_sim
    from weft.sim.options import SimOptions
    from weft.sim.report import format_sim

    (settings,) = given_settings(options, SimOptions)
    result = run_sim(SimOptions(**settings))
    print(format_sim(result))
    return 0 if all(run["completed"] for run in result["runs"]) else EXIT_ERROR


def _info(options: dict[str, Any]) -> int:
    settings, _ = given_settings(
        options, EngineConfig, SamplingParams
    )  # one file serves all commands
    config = EngineConfig.from_mapping(settings)
    from weft.engine.info import collect_info, format_info

    info = collect_info(config)
    print(json.dumps(info, indent=2) if options["json"] else format_info(info))
    return 0


if __name__ == "__main__":
    main()
