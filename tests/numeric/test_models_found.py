"""Models of Ollama, of LM Studio and of the hub's cache are found where those keep them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import build, prompt, save
from gguf import GGMLQuantizationType as Type
from paged import PagedRunner
from test_models_gguf import build as build_gguf
from test_models_gguf import load, write

from weft.cli import main
from weft.models.found import OLLAMA_WEIGHTS, found_models
from weft.models.hub import resolve_model
from weft.models.spec_reader import read_spec

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(build_gguf("qwen3"), "qwen3", path, Type.F32)
    return path


def ollama(root: Path, file: Path, name: str = "library/tiny") -> Path:
    """An Ollama folder with one model; returns the file that is its weights."""
    manifest = root / "manifests/registry.ollama.ai" / name / "1b"
    manifest.parent.mkdir(parents=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
        {"mediaType": OLLAMA_WEIGHTS, "digest": DIGEST},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = root / "blobs" / DIGEST.replace(":", "-")
    blob.parent.mkdir()
    shutil.copy(file, blob)
    return blob


def test_each_store_is_looked_through(file, tmp_path) -> None:
    blob = ollama(tmp_path / ".ollama/models", file)
    studio = tmp_path / ".lmstudio/models/maker/tiny-GGUF"
    studio.mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "mmproj-tiny.gguf", "big-00001-of-00002.gguf"):
        shutil.copy(file, studio / name)
    shutil.copy(file, studio / "big-00002-of-00002.gguf")
    snapshot = tmp_path / ".cache/huggingface/hub/models--maker--tiny/snapshots/0123"
    save(build("llama-gqa"), snapshot)
    found = {(model.store, model.name): model for model in found_models(tmp_path, {})}
    assert set(found) == {
        ("Ollama", "tiny:1b"),
        ("LM Studio", "maker/tiny-GGUF/tiny-Q8_0.gguf"),
        ("LM Studio", "maker/tiny-GGUF/big-00001-of-00002.gguf"),
        ("hub", "maker/tiny"),
    }
    assert found["Ollama", "tiny:1b"].path == blob
    assert found["Ollama", "tiny:1b"].nbytes == file.stat().st_size
    assert found["hub", "maker/tiny"].path == snapshot
    whole = [model for model in found.values() if "of-00002" not in model.name]
    assert [model.problem() for model in whole] == ["", "", ""]


def test_folders_may_be_moved_and_makers_are_named(file, tmp_path) -> None:
    ollama(tmp_path / "elsewhere", file, "maker/tiny")
    (model,) = found_models(tmp_path, {"OLLAMA_MODELS": str(tmp_path / "elsewhere")})
    assert model.name == "maker/tiny:1b"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"layers": 3}', '{"layers": [{"mediaType": "x"}]}', "[" * 100_000]
)
def test_what_is_no_manifest_is_passed_over(file, tmp_path, text) -> None:
    ollama(tmp_path, file)
    (tmp_path / "manifests/registry.ollama.ai/library/tiny/odd").write_text(text)
    names = [model.name for model in found_models(tmp_path, {"OLLAMA_MODELS": str(tmp_path)})]
    assert names == ["tiny:1b"]


def test_a_digest_is_no_way_out_of_the_folder(file, tmp_path) -> None:
    ollama(tmp_path / "store", file)
    manifest = tmp_path / "store/manifests/registry.ollama.ai/library/tiny/1b"
    shutil.copy(file, tmp_path / "secret")
    layers = [{"mediaType": OLLAMA_WEIGHTS, "digest": "../../secret"}]
    manifest.write_text(json.dumps({"layers": layers}))
    assert found_models(tmp_path, {"OLLAMA_MODELS": str(tmp_path / "store")}) == []


def test_a_file_without_an_ending_is_served(file, tmp_path) -> None:
    blob = ollama(tmp_path, file)
    assert resolve_model(str(blob)) == blob
    assert read_spec(blob) == read_spec(file)
    tokens = prompt(9)
    whole, same = (PagedRunner(load(path)).step([("a", tokens)])[0] for path in (file, blob))
    assert whole.equal(same)


def test_the_command_tells_how_each_is_served(file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    assert ended.value.code == 0
    assert "OWNER/REPO" in capsys.readouterr().out
    blob = ollama(tmp_path / ".ollama/models", file)
    odd = tmp_path / ".lmstudio/models/maker/odd/odd.gguf"
    odd.parent.mkdir(parents=True)
    odd.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(SystemExit):
        main(["models"])
    told = capsys.readouterr().out
    assert f"{blob.name} has no vocabulary" in told  # nor does weft serve without --tokenizer
    assert str(odd) in told
    hub = tmp_path / ".cache/huggingface/hub/models--maker--tiny/snapshots/0123"
    shutil.copytree(resolve_model("builtin"), hub)
    with pytest.raises(SystemExit):
        main(["models", "list"])
    told = capsys.readouterr().out
    assert "maker/tiny, fits: sequences of 2048 tokens\n    weft serve maker/tiny\n" in told
    with pytest.raises(SystemExit):
        main(["models", "--json"])
    facts = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert "vocabulary" in facts["tiny:1b"]["problem"]
    assert facts["maker/tiny"]["problem"] == ""
    assert facts["maker/tiny"]["fits"]
    assert facts["maker/odd/odd.gguf"]["problem"]


def hub_files(cache: Path, file: Path, *names: str) -> Path:
    """A repository in the hub's cache, whose files are links to blobs."""
    repository = cache / "hub/models--maker--many"
    for name in names:
        blob = repository / "blobs" / f"blob-of-{name}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link = repository / "snapshots/0123" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return repository


def test_one_file_of_a_repository_is_removed_or_all(file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    names = ("a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")
    repository = hub_files(tmp_path, file, *names)

    def remove(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["models", "remove", *words])
        return ended.value.code

    assert remove("maker/many/b-00001-of-00002.gguf", "--yes") == 0
    assert "9.79 MiB" in capsys.readouterr().out
    assert [path.name for path in (repository / "blobs").iterdir()] == ["blob-of-a-Q4_0.gguf"]
    assert remove("maker/many/c.gguf", "--yes") == 2
    assert "Did you mean 'maker/many/a-Q4_0.gguf'?" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert remove("maker/many") == 1
    assert repository.exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert remove("maker/many") == 0
    assert not repository.exists()


def test_models_of_other_programs_are_theirs_to_remove(file, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "theirs"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    blob = ollama(tmp_path / "theirs", file)
    with pytest.raises(SystemExit) as ended:
        main(["models", "remove", "tiny:1b", "--yes"])
    assert ended.value.code == 2
    assert "ollama rm tiny:1b" in capsys.readouterr().err
    assert blob.exists()


@pytest.mark.parametrize(
    ("free_mib", "command"),
    [
        (14, "weft serve maker/tiny\n"),
        (8, "--quantize int8  # fits"),
        (4, "--quantize int4  # fits"),
        (1, ""),
    ],
)
def test_the_command_of_a_model_rounds_weights_that_would_not_fit(
    tmp_path, monkeypatch, capsys, free_mib, command
):
    """The packaged model: 10.4 MiB of weights in bfloat16."""
    hub = tmp_path / ".cache/huggingface/hub/models--maker--tiny"
    shutil.copytree(resolve_model("builtin"), hub / "snapshots/0123")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("weft.engine.devices.available_memory", lambda: free_mib * 2**20)
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert ("does not fit: The weights need 10.44 MiB" in shown) == (free_mib < 10)
    assert command in shown
    assert ("weft serve" in shown) == bool(command)
