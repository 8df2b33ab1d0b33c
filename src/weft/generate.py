"""``weft generate``: prints text as it is generated, or one result line per prompt of a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from weft.core.errors import ParameterError, WeftError, suggest
from weft.core.settings import settings_of
from weft.core.types import SamplingParams

HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?"


def told_apart(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the words told apart: a model as ``named``, and a ``prompt``.

    Raises:
        ParameterError: there are other words than ``[MODEL] PROMPT``, or ``[MODEL]`` with a file.
    """
    words, by_file = options["words"], options["file"] is not None
    if by_file:
        if len(words) > 1 or not all(map(looks_like_model, words)):
            raise ParameterError(
                "Give either a prompt or --file; beside --file the one word is the model, as in: "
                "weft generate ./folder --file prompts.jsonl"
            )
        return {**options, "named": words[0] if words else None, "prompt": None}
    if not words:
        raise ParameterError('Give either a prompt or --file, as in: weft generate "def add(".')
    if len(words) > 2:
        raise ParameterError(
            "Put the prompt into quotes, as in: weft generate [MODEL] "
            f"{shlex.quote(' '.join(words))}"
        )
    *model, prompt = words
    if not model and "model" not in options and not options["config"] and looks_like_model(prompt):
        raise ParameterError(
            f"'{prompt}' looks like a model; give a prompt, too, as in: weft generate {prompt} "
            f'"def add(" (if it is the prompt, name the model with --model).'
        )
    return {**options, "named": model[0] if model else None, "prompt": prompt}


def looks_like_model(word: str) -> bool:
    """Whether a word is a path of a model, or has the form of a name on the hub."""
    there = os.path.isfile(os.path.join(os.path.expanduser(word), "config.json"))
    named = word == "builtin" or (word.endswith(".gguf") and " " not in word)
    return there or named or re.fullmatch(HUB_NAME, word) is not None


def generate_stream(llm: Any, text: str, params: SamplingParams, options: dict[str, Any]) -> int:
    """Print text as it is made; statistics go to standard error. Raises what ended it early."""
    prompt = llm.encode_chat([{"role": "user", "content": text}]) if options["chat"] else text
    if options["echo"]:
        print(text, end="", flush=True)
    started, first, count, result = time.monotonic(), 0.0, 0, None
    for delta in llm.stream(prompt, params):
        count += len(delta.token_ids)
        first = first or time.monotonic()
        print(delta.text, end="", flush=True)
        result = delta.result
    print()
    assert result is not None, "the last delta of a stream carries the result"
    if result.error is not None:
        raise result.error
    if not options["quiet"]:
        seconds = time.monotonic() - started  # of all: tokens come in groups
        print(
            f"[{len(result.prompt_token_ids)} prompt + {count} output tokens, "
            f"{result.finish_reason}, first token {first - started:.2f} s, "
            f"{count / seconds:.0f} tokens/s in {seconds:.2f} s]",
            file=sys.stderr,
        )
    return 0


class PromptLine(NamedTuple):
    """A line of a prompt file; ``where`` names file and line."""

    where: str
    prompt: str | list[int]
    params: SamplingParams


def generate_file(llm: Any, jobs: list[PromptLine], options: dict[str, Any]) -> int:
    """Print a line for each job in their order, as soon as it and those before it are done.

    The exit code: 0, or 1 if one has failed.
    """
    from tqdm import tqdm

    prompts = [_checked_prompt(llm, job, options["chat"]) for job in jobs]
    waiting: dict[int, str] = {}
    following, failed = 0, False
    hidden = options["quiet"] or not sys.stderr.isatty()
    with tqdm(total=len(jobs), unit="prompt", disable=hidden) as bar:
        try:
            for index, result in llm.generate_iter(prompts, [job.params for job in jobs]):
                waiting[index] = _result_line(index, jobs[index], result)
                failed = failed or result.error is not None
                while following in waiting:
                    _print_line(bar, waiting.pop(following))
                    following += 1
                bar.update()
        finally:  # an interrupt loses nothing that is done
            for index in sorted(waiting):
                _print_line(bar, waiting[index])
    return 1 if failed else 0


def _print_line(bar: Any, line: str) -> None:
    bar.write(line, file=sys.stdout)
    sys.stdout.flush()


def _checked_prompt(llm: Any, job: PromptLine, chat: bool) -> list[int]:
    """The token ids of a job. Raises ParameterError, naming its line, if it cannot be run."""
    with _located(job.where):
        prompt = job.prompt
        if chat and isinstance(prompt, str):
            prompt = llm.encode_chat([{"role": "user", "content": prompt}])
        job.params.check_vocabulary(llm.served.vocab_size)
        ids: list[int] = llm.check_prompt(prompt)
        return ids


def _result_line(index: int, job: PromptLine, result: Any) -> str:
    line = {
        "index": index,
        "prompt": job.prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
    }
    if result.error is not None:
        line["error"] = {"code": result.error.code, "message": result.error.message}
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(line, ensure_ascii=not unicode)


def read_jobs(path: str, defaults: dict[str, Any]) -> list[PromptLine]:
    """Read prompts and their sampling settings; an error names file and line."""
    jobs = []
    for number, line in _lines(path):
        where = f"{path}:{number}"
        with _located(where):
            jobs.append(PromptLine(where, *_job(_parse_json(line), defaults)))
    if not jobs:
        raise ParameterError(f"{path} has no prompts.")
    return jobs


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Put file and line before the message of an error."""
    try:
        yield
    except WeftError as error:
        raise ParameterError(f"{where}: {error.message}", param=error.param) from None


def _parse_json(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ParameterError(f"not valid JSON: {error.msg}.") from None
    except (ValueError, RecursionError):
        raise ParameterError("a number is too long, or the brackets are too deep.") from None


def _lines(path: str) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ParameterError(f"Cannot read '{path}': {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ParameterError(f"'{path}' is not UTF-8 text.") from None


def _job(value: Any, defaults: dict[str, Any]) -> tuple[str | list[int], SamplingParams]:
    if isinstance(value, (str, list)):
        value = {"prompt": value}
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), (str, list)):
        raise ParameterError('a line must be a text, or an object with "prompt".')
    prompt = value["prompt"]
    if not prompt:
        raise ParameterError("the prompt is empty.", param="prompt")
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise ParameterError("a list as prompt must hold token ids (whole numbers).")
    given = {name: item for name, item in value.items() if name != "prompt"}
    known = settings_of(SamplingParams)
    for name in given:
        if name not in known:
            raise ParameterError(f"unknown key '{name}'.{suggest(name, known)}", param=name)
    if isinstance(bias := given.get("logit_bias"), dict):  # JSON has only strings as keys
        given["logit_bias"] = {_token_id(key): item for key, item in bias.items()}
    return prompt, SamplingParams(**{**defaults, **given})


def _token_id(key: str) -> int | str:
    """The number that a key writes, or the key itself, which the check of its type then names."""
    return int(key) if re.fullmatch("[0-9]{1,18}", key) else key
