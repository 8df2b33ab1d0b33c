"""A server runs as in the image: without root, and with nothing to write to but its data."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from live import START_S, Server, eventually, refused, run, serving

USER = 10001
KEY = "of-the-image"
ROOT = Path(__file__).parents[2]
# Runs a command as the user, in mounts of its own: all of them read-only but for the data.
CONFINED = """
set -e
data=$1 prefix=$2 user=$3; shift 3
mount --make-rprivate /
mount --bind "$data" "$data"
mkdir "$data/prefix"
mount --bind "$prefix" "$data/prefix"
top=/$(echo "$prefix" | cut -d/ -f2)
if [ "$top" = /root ]; then  # whose folder others may not enter
  mount -t tmpfs -o mode=755 tmpfs "$top"
  mkdir -p "$prefix"
  mount --bind "$data/prefix" "$prefix"
fi
umount "$data/prefix"
rmdir "$data/prefix"
mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm
for point in $(cut -d' ' -f5 /proc/self/mountinfo | sort -u); do
  case "$point" in
    "$data"|/dev|/dev/*|/proc|/proc/*|/sys|/sys/*) ;;
    *) mount -o remount,bind,ro "$point" ;;
  esac
done
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The folder that the server may write to."""
    folder = tmp_path_factory.mktemp("image") / "data"
    folder.mkdir(mode=0o700)
    for above in folder.parents:
        if above.stat().st_uid == 0 and not above.stat().st_mode & 1:
            above.chmod(above.stat().st_mode | 0o711)  # of pytest's own, for root alone
    shutil.chown(folder, USER, USER)
    return folder


@pytest.fixture(scope="module")
def within(data) -> list[str]:
    """The beginning of a command that is confined; skips where this process may not do that."""
    command = ["unshare", "--mount", "sh", "-c", CONFINED, "sh", str(data), sys.base_prefix]
    command.append(str(USER))
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this process may not confine others: {tried.stderr.strip()}")
    return command


@pytest.fixture(scope="module")
def server(tmp_path_factory, data, within) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(data))
        for name, folder in (("CACHE_HOME", "cache"), ("STATE_HOME", "state")):
            patch.setenv(f"XDG_{name}", str(data / folder))
        patch.setenv("HF_HOME", str(data / "huggingface"))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        given = ["--host", "0.0.0.0", "--disk-reserve-bytes", "0", "--api-key", KEY]
        with serving(tmp_path_factory.mktemp("logs"), *given, within=within) as running:
            yield running


@pytest.mark.parametrize("folder", ["/", "/tmp", "/usr", "/var", str(ROOT)])
def test_nothing_else_can_be_written(within, folder):
    done = subprocess.run(
        [*within, "touch", f"{folder}/weft-was-here"], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "Read-only file system" in done.stderr


def test_no_process_has_rights(server):
    family = [server.process.pid, *(child.pid for child in server.children().values())]
    assert len(family) > 2
    for pid in family:
        status = Path(f"/proc/{pid}/status").read_text()
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert facts["Uid"].split() == [str(USER)] * 4
        assert facts["NoNewPrivs"] == "1"
        assert {facts[f"Cap{kind}"] for kind in ("Eff", "Prm", "Bnd")} == {"0" * 16}


def test_it_answers_and_keeps_files_and_responses(server, data):
    client = server.client(KEY)
    chat = [{"role": "user", "content": "Hi"}]
    assert client.chat.completions.create(model="builtin", messages=chat, max_tokens=8).choices
    file = client.files.create(file=("x.jsonl", b"{}\n"), purpose="batch")
    assert (data / "state" / "weft" / "files" / file.id).exists()
    first = client.responses.create(model="builtin", input="Hi", max_output_tokens=16)
    assert client.responses.retrieve(first.id).id == first.id
    packed = data / "cache" / "weft" / "packed"
    eventually(lambda: packed.is_dir() and any(packed.iterdir()), START_S)
    log = server.errors.read_text()
    assert not [word for word in ("warning", "error", "Traceback") if word in log], log


def test_its_health_check_needs_no_key(server):
    assert httpx.get(f"{server.url}/server_info").status_code == 401
    done = run("status", "--ready", "--url", server.url, OPENAI_API_KEY="")
    assert (done.returncode, done.stdout) == (0, "ready\n")
    done = run("status", "--ready", "--json", "--url", server.url, OPENAI_API_KEY="wrong")
    assert (done.returncode, done.stdout) == (0, '{"state": "ready"}\n')


def test_the_health_check_fails_where_nobody_answers():
    refused(run("status", "--ready", "--url", "http://127.0.0.1:9"), "No server answers", code=1)
