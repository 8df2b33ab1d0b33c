"""Finding a model: the real hub library against a small local server, and every way to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from live import free_port
from local_hub import OTHER, TOKEN, Hub, serving_hub
from weft.core.errors import ModelNotFoundError
from weft.models.hub import choose_gguf, resolve_model
from weft.models.named import NamedModel

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same in another form",
    "pytorch_model.bin": b"pickle",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# model",
    "onnx/config.json": b"{}",
}
GGUF = {
    "config.json": b"{}",
    "README.md": b"# quantised",
    "m-Q8_0.gguf": b"eight",
    "m-Q4_K_M.gguf": b"four",
    "m-UD-Q2_K_XL.gguf": b"two",
    "mmproj-m-F16.gguf": b"vision",
    "Q6_K/m-Q6_K-00001-of-00002.gguf": b"six",
    "Q6_K/m-Q6_K-00002-of-00002.gguf": b"six again",
}
FILES_OF = {
    "owner/open": FILES,
    "owner/gated": FILES,
    "owner/bare": {"README.md": b"# bare"},
    "owner/gguf": GGUF,
}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving_hub(FILES_OF) as served:
        yield served


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_download_takes_what_is_needed(hub, tmp_path) -> None:
    folder = resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    assert names(folder) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_revision(hub, tmp_path) -> None:
    folder = resolve_model("owner/open", "v2", cache_dir=tmp_path, endpoint=hub.url)
    assert folder.name == OTHER
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        resolve_model("owner/open", "v9", cache_dir=tmp_path, endpoint=hub.url)


def test_token(hub, tmp_path, monkeypatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"gated.*HF_TOKEN"):
        resolve_model("owner/gated", cache_dir=tmp_path, endpoint=hub.url)
    folder = resolve_model("owner/gated", token=TOKEN, cache_dir=tmp_path / "a", endpoint=hub.url)
    assert "config.json" in names(folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = resolve_model("owner/gated", cache_dir=tmp_path / "b", endpoint=hub.url)
    assert "config.json" in names(folder)
    assert hub.tokens == {None, TOKEN}


def test_what_is_kept_is_found_while_the_hub_is_away(hub, tmp_path) -> None:
    kept = resolve_model("owner/gguf:Q8_0", cache_dir=tmp_path, endpoint=hub.url)
    away = {"cache_dir": tmp_path, "endpoint": f"http://127.0.0.1:{free_port()}"}
    assert resolve_model("owner/gguf:Q8_0", **away) == kept
    with pytest.raises(ModelNotFoundError, match=r"'Q4_K_M'; its files: m-Q8_0\.gguf"):
        resolve_model("owner/gguf:Q4_K_M", **away)
    with pytest.raises(ModelNotFoundError, match="try again or give a folder"):
        resolve_model("owner/none:Q4_K_M", **away)


def test_offline_uses_the_cache_and_nothing_else(hub, tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match="offline mode is on"):
        resolve_model("owner/open", cache_dir=tmp_path, offline=True, endpoint=hub.url)
    assert hub.paths == []
    online = resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    hub.paths.clear()
    assert resolve_model("owner/open", cache_dir=tmp_path, offline=True) == online
    assert hub.paths == []


def test_hub_offline_setting(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="offline mode is on"):
        resolve_model("owner/open", cache_dir=tmp_path, endpoint=hub.url)
    assert hub.paths == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/absent", "not on the hub, or is private; check the name, or set HF_TOKEN"),
        ("owner/bare", "has no config.json"),
        ("owner/broken", "cannot be reached"),
        ("not a name!", "neither a folder nor a hub id"),
    ],
)
def test_hub_answers_that_are_errors(hub, tmp_path, name, words) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.url)
    assert words in caught.value.message
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_unreachable_hub(tmp_path) -> None:
    with pytest.raises(ModelNotFoundError, match="the hub cannot be reached"):
        resolve_model("owner/open", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent", "a/b/c", "../absent"])
def test_paths_are_never_sent_to_the_hub(hub, tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve_model(name, cache_dir=tmp_path, endpoint=hub.url)
    assert hub.paths == []


def test_folders(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "open").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model("owner/open", endpoint=hub.url)
    config = tmp_path / "owner" / "open" / "config.json"
    config.write_text("{}")
    assert resolve_model("owner/open", endpoint=hub.url) == Path("owner/open")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(config))
    assert hub.paths == []


def test_builtin_needs_no_network() -> None:
    folder = resolve_model("builtin", offline=True)
    assert (folder / "config.json").is_file()
    assert folder.parent.name == "weft"


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("owner/gguf", "m-Q4_K_M.gguf"),
        ("owner/gguf:q8_0", "m-Q8_0.gguf"),
        ("owner/gguf:Q6_K", "Q6_K/m-Q6_K-00001-of-00002.gguf"),
        ("owner/gguf:m-UD-Q2_K_XL.gguf", "m-UD-Q2_K_XL.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_its_type(hub, tmp_path, asked, file) -> None:
    found = resolve_model(asked, cache_dir=tmp_path, endpoint=hub.url)
    assert found.is_file()
    assert found.as_posix().endswith(f"/{file}")
    fetched = {
        path.split("/resolve/")[1].split("/", 1)[1] for path in hub.paths if "/resolve/" in path
    }
    parts = {file, file.replace("00001-of", "00002-of")}
    assert fetched - {"config.json"} == parts
    before = len(hub.paths)
    again = resolve_model(asked, cache_dir=tmp_path, endpoint=hub.url, offline=True)
    assert again == found
    assert len(hub.paths) == before


def test_a_type_that_is_not_there_is_refused_with_those_that_are(hub, tmp_path) -> None:
    words = r"no GGUF file of the type 'Q5_K_M'; its files: m-Q4_K_M\.gguf, m-Q6_K-00001-of"
    with pytest.raises(ModelNotFoundError, match=words):
        resolve_model("owner/gguf:Q5_K_M", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(ModelNotFoundError, match="'owner/none:Q4_0' is not on the hub"):
        resolve_model("owner/none:Q4_0", cache_dir=tmp_path, endpoint=hub.url)


def test_without_the_usual_type_the_first_file_counts() -> None:
    assert choose_gguf(["b-Q8_0.gguf", "a-F16.gguf"], None) == ["a-F16.gguf"]
    assert choose_gguf(["a-IQ4_XS.gguf"], "XS") is None
    assert choose_gguf([], None) is None


def test_a_cached_model_of_the_hub_has_the_size_of_its_files(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = resolve_model("owner/open", endpoint=hub.url)
    assert folder.is_relative_to(tmp_path)
    assert NamedModel("open", "owner/open").nbytes == len(FILES["model.safetensors"])
    assert NamedModel("gguf", "owner/gguf:Q8_0").nbytes == 0
    resolve_model("owner/gguf:Q8_0", endpoint=hub.url)
    assert NamedModel("gguf", "owner/gguf:Q8_0").nbytes == len(GGUF["m-Q8_0.gguf"])
