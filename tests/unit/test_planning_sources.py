"""Whatever a user may type is a model that is known then, or a message that says what to do."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_bytes import LLAMA, gguf

from reblock.errors import CorruptArtifact, MissingDependency, UnsupportedModel
from reblock.planning import sources
from reblock.planning.hub import HubModel
from reblock.planning.sources import ModelSource, is_artifact, open_model

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())
CONFIG = (CONFIGS / "SmolLM2-135M" / "config.json").read_text()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration and one tensor of three elements."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(CONFIG)
    header = b'{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}'
    data = struct.pack("<Q", len(header)) + header + bytes(6)
    (directory / "model.safetensors").write_bytes(data)
    return directory


# --- what is opened


@pytest.mark.parametrize("name", NAMES)
def test_directory_of_every_public_model_is_opened(name: str) -> None:
    source = open_model(str(CONFIGS / name))
    assert (source.name, source.kind) == (str(CONFIGS / name), "directory")
    assert source.spec.layers
    assert source.stored is None
    assert source.notes == ()


def test_all_public_models_are_there() -> None:
    assert len(NAMES) == 58


def test_directory_has_the_size_of_its_weights(model: Path) -> None:
    source = open_model(str(model))
    assert source.stored is not None
    assert (source.stored.num_bytes, source.stored.num_elements) == (6, 3)


def test_config_file_stands_for_its_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_model(str(model / "config.json")) == open_model(str(model))
    monkeypatch.chdir(model)
    assert open_model("config.json").name == "."


def test_config_file_of_another_name_stands_alone(model: Path) -> None:
    path = model / "smol.json"
    path.write_text(CONFIG)
    source = open_model(str(path))
    assert (source.name, source.stored) == (str(path), None)
    assert source.notes == ("Weights were not looked for, as smol.json is not called config.json.",)


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    # As in the cache of the hub, where every file is a link to what it holds.
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    (tmp_path / "link").symlink_to(snapshot)
    source = open_model(str(tmp_path / "link"))
    assert source.stored == open_model(str(model)).stored
    assert source.spec.model_type == "llama"


def test_gguf_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "smol.gguf"
    path.write_bytes(gguf(LLAMA))
    source = open_model(str(path))
    assert (source.name, source.kind) == (str(path), "gguf")
    assert len(source.spec.layers) == 2
    assert source.stored is not None
    assert source.stored.source == "gguf"


def test_directory_with_one_gguf_file_stands_for_it(tmp_path: Path) -> None:
    path = tmp_path / "smol.gguf"
    path.write_bytes(gguf(LLAMA))
    (tmp_path / "README.md").write_text("A model.")
    assert open_model(str(tmp_path)) == open_model(str(path))


def test_directory_comes_before_a_model_of_the_hub(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(sources, "read_hub_model", None)
    assert open_model("model").kind == "directory"


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-8B", "01-ai/Yi-1.5_6B", "a/b.json-v2"])
def test_name_of_nothing_here_is_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read(model_id: str) -> HubModel:
        asked.append(model_id)
        return HubModel(
            config_text=CONFIG.encode(), path="p", revision="r", weights=None, notes=("n",)
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "read_hub_model", read)
    source = open_model(name)
    assert asked == [name]
    assert source == ModelSource(
        name=name,
        kind="hub",
        spec=open_model(str(CONFIGS / "SmolLM2-135M")).spec,
        stored=None,
        notes=("n",),
    )


def test_hub_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"pip install 'reblock\[hub\]'") as caught:
        open_model("Qwen/Qwen3-8B")
    assert caught.value.package == "huggingface_hub"


# --- what is refused


@pytest.mark.parametrize(
    "name",
    [
        "",
        "./model",
        "../model",
        "/model",
        "~/model",
        "model.gguf",
        "owner/model.gguf",
        "owner/config.json",
        "a/b/c",
        "a//b",
        "owner/",
        "a model",
        "model\0",
        "m" * 300,
        "https://example.com/gpt2",
        "modèle",
        "-model",
    ],
)
def test_path_of_nothing_never_goes_to_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "read_hub_model", None)
    with pytest.raises(UnsupportedModel, match="there is no such file or directory") as caught:
        open_model(name)
    assert caught.value.model == name


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json and no \.gguf file"):
        open_model(str(tmp_path))


def test_directory_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("b.Q8_0.gguf", "a.Q4_0.gguf"):
        (tmp_path / name).write_bytes(gguf(LLAMA))
    with pytest.raises(UnsupportedModel, match=r"2 GGUF files; .*: a\.Q4_0\.gguf, b\.Q8_0\.gguf$"):
        open_model(str(tmp_path))
    for index in range(10):
        (tmp_path / f"c{index}.gguf").touch()
    with pytest.raises(UnsupportedModel, match=r"12 GGUF files; .*, c5\.gguf, \.\.\.$"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen3-8B"}, "give its base model, 'Qwen/Qwen3-8B', "),
        ({}, "give its base model, with"),
        ({"base_model_name_or_path": 3}, "give its base model, with"),
    ],
)
def test_adapter_names_the_model_to_give(
    tmp_path: Path, config: dict[str, object], match: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=match):
        open_model(str(tmp_path))


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UnsupportedModel, match="give the directory of the model"):
        open_model(str(path))


def test_other_json_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": 2}')
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        open_model(str(path))
    path.write_text("[]")
    with pytest.raises(CorruptArtifact, match="is no JSON object"):
        open_model(str(path))


def test_config_that_is_not_utf_8_is_refused(model: Path) -> None:
    (model / "config.json").write_bytes(CONFIG.encode("utf-16"))
    with pytest.raises(CorruptArtifact, match="is no valid JSON: 'utf-8' codec"):
        open_model(str(model))


def test_config_that_is_too_large_is_refused(model: Path) -> None:
    (model / "config.json").write_text(CONFIG + " " * 2**23)
    with pytest.raises(CorruptArtifact, match="is larger than"):
        open_model(str(model))


def test_config_that_is_a_directory_a_pipe_or_a_broken_link_is_refused(model: Path) -> None:
    path = model / "config.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptArtifact, match="is not a regular file"):
        open_model(str(model))
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CorruptArtifact, match="is not a regular file"):
        open_model(str(model))
    path.unlink()
    path.symlink_to("absent")
    with pytest.raises(CorruptArtifact, match="is missing"):
        open_model(str(model))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_refused(model: Path) -> None:
    (model / "config.json").chmod(0)
    with pytest.raises(CorruptArtifact, match="cannot be read: Permission denied"):
        open_model(str(model))


def test_directory_that_may_not_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CorruptArtifact, match="cannot be read: Permission denied"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text(CONFIG)
    with pytest.raises(CorruptArtifact, match="cannot be read: Permission denied"):
        open_model(str(tmp_path))


def test_pipe_of_a_name_of_a_model_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CorruptArtifact, match="is not a regular file"):
        open_model(str(tmp_path / "pipe.gguf"))


def test_weights_that_are_damaged_are_refused(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"<html>404</html>")
    with pytest.raises(CorruptArtifact, match="safetensors file"):
        open_model(str(model))


# --- artifacts


def test_directory_with_rbln_config_is_an_artifact(model: Path) -> None:
    assert not is_artifact(str(model))
    (model / "rbln_config.json").write_text("{}")
    assert is_artifact(str(model))
    assert is_artifact(f"{model}/")


def test_artifact_whose_edit_is_not_finished_is_one(tmp_path: Path) -> None:
    committed = tmp_path / ".reblock-edit" / "committed"
    committed.mkdir(parents=True)
    (committed / "rbln_config.json").write_text("{}")
    assert is_artifact(str(tmp_path))


@pytest.mark.parametrize("name", ["", "absent", "a\0", "Qwen/Qwen3-8B"])
def test_what_is_not_there_is_no_artifact(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_artifact(name)


def test_file_is_no_artifact(model: Path) -> None:
    assert not is_artifact(str(model / "config.json"))


# --- imports


def test_opening_a_directory_takes_the_standard_library_only() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from reblock.planning.sources import open_model; "
        f"open_model({str(CONFIGS / 'Qwen3-8B')!r}); print(*sys.modules)"
    )
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    modules = {module.partition(".")[0] for module in result.stdout.split()}
    assert not modules - sys.stdlib_module_names - {"__main__", "reblock"}
