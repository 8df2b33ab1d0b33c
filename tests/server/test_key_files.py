"""Files of API keys in YAML: classes and limits of each key, and what is wrong with them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from weft.core.errors import ConfigError
from weft.server.keyfile import MAX_KEYS, read_keys
from weft.server.quota import NO_LIMITS, Quota

TABLE = ("priority", "interactive", "flex", "batch", "gold")
WHOLE = """
# who may ask
keys:
  - name: chat
    key: sk-chat
    classes: [gold, interactive]
    requests_per_minute: 600
    tokens_per_minute: 200000
    max_concurrent_requests: 32
    max_queued_batch_tokens: 1000000
  - name: nightly
    key: [sk-old, sk-new]
    classes: [flex, batch]
  - name: hashed
    sha256: {digest}
    default_class: flex
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_an_entry_has_a_name_classes_and_limits(file):
    file.write_text(WHOLE.format(digest=sha256(b"sk-hashed").hexdigest()))
    chat, old, new, hashed = read_keys((), str(file), TABLE)
    assert (chat.name, chat.digest) == ("chat", sha256(b"sk-chat").digest())
    assert (chat.classes, chat.default_class) == (("gold", "interactive"), "interactive")
    assert chat.quota == Quota(600, 200000, 32, 1000000)
    assert (old.name, new.name) == ("nightly", "nightly")
    assert old.digest != new.digest
    assert old.account == new.account != chat.account
    assert (old.classes, old.default_class) == (("flex", "batch"), "flex")
    assert (hashed.digest, hashed.quota) == (sha256(b"sk-hashed").digest(), NO_LIMITS)
    assert (hashed.classes, hashed.default_class) == ((), "flex")


def test_lines_are_what_they_were(file):
    file.write_text("# who\nalice: first # until May\nsecond\nkeys:are-fine\nkeys: too\n")
    found = read_keys(("third",), str(file), TABLE)
    assert [key.name for key in found] == ["api_key-1", "alice", "line-3", "keys", "keys"]
    assert {(key.classes, key.default_class, key.quota) for key in found} == {
        ((), "interactive", NO_LIMITS)
    }
    assert len({key.account for key in found}) == 5


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("- just a string", "entry maps"),
        ("- key: x", "'name'"),
        ("- {name: a b, key: x}", "'name'"),
        ("- name: a", "'key' or 'sha256' is missing"),
        ("- {name: a, key: 5}", "quotes"),
        ("- {name: a, key: 'two words\u00fc'}", "printable ASCII"),
        ("- {name: a, key: []}", "missing"),
        ("- {name: a, sha256: abc}", "64 hexadecimal"),
        ("- {name: a, key: x, clases: [flex]}", "Did you mean 'classes'"),
        ("- {name: a, key: x, 7: 1}", "unknown field 7"),
        ("- {name: a, key: x, classes: flex}", "list"),
        ("- {name: a, key: x, classes: []}", "at least one"),
        ("- {name: a, key: x, classes: [silver]}", "no service class; there are priority"),
        ("- {name: a, key: x, classes: [flex], default_class: batch}", "none of its"),
        ("- {name: a, key: x, requests_per_minute: 0}", "requests_per_minute must be"),
        ("- {name: a, key: x, tokens_per_minute: lots}", "tokens_per_minute must be"),
        ("- {name: a, key: x}\n  - {name: a, key: y}", "given twice"),
        ("- {name: a, key: x}\n  - {name: b, key: x}", "given twice"),
        ("nothing: like it", "must be a list"),
        ("- {name: a, key: x}\nmore: 1", "more than 'keys:'"),
        ("- {name: a, key: x, key: y}", "'key' twice in what begins at line 2"),
        ("- {name: a, key: x}\nkeys:\n  - {name: b, key: y}", "'keys' twice"),
        ("- {name: a, key: sk-secret", "not valid YAML at line"),
        ("- !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_without_the_keys(file, entry, words):
    file.write_text(f"keys:\n  {entry}\n")
    with pytest.raises(ConfigError) as caught:
        read_keys((), str(file), TABLE)
    assert words in caught.value.message
    assert caught.value.param == "api_key_file"
    assert "sk-secret" not in caught.value.message


def test_yaml_may_begin_with_its_mark(file):
    file.write_text("# who\n---\nkeys: # all\n  - {name: a, key: x}\n")
    assert [key.name for key in read_keys((), str(file))] == ["a"]
    file.write_text("---\nother\n")
    assert [key.name for key in read_keys((), str(file))] == ["line-1", "line-2"]


@pytest.mark.parametrize("text", ["keys:\n", "keys: # none\n", "keys:\n  []\n"])
def test_no_entry_is_no_key(file, text):
    file.write_text(text)
    with pytest.raises(ConfigError, match="has no keys"):
        read_keys((), str(file))


def test_so_many_keys_at_most(file):
    file.write_text("".join(f"key-{number}\n" for number in range(MAX_KEYS + 1)))
    with pytest.raises(ConfigError, match="can be served"):
        read_keys((), str(file))
