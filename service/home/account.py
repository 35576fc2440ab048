"""Whom PostgreSQL runs as, and where its files may then lie.

PostgreSQL refuses to run as root. Started by root we run it as an unprivileged user that this machine already has, in a
folder that this user owns. Nothing outside the home is opened up for that user: where it can't reach the home (or the
virtual environment with the binaries) the files lie under /var/lib/pennyweight instead.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from service.home.children import Account, credentials
from service.home.errors import HomeError

ELSEWHERE = Path("/var/lib/pennyweight")
_CANDIDATES = ("postgres", "nobody")


def database_account() -> Account | None:
    """None: as ourselves, who are not root."""
    if os.geteuid() != 0:
        return None
    for name in _CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    raise HomeError(
        f"PostgreSQL doesn't run as root, and this machine has no user {' or '.join(_CANDIDATES)}: run as another user."
    )


def data_folder(wanted: Path, account: Account | None) -> Path:
    """Make the folder for the database's files and return where it lies: ``wanted``, or a stand-in under ELSEWHERE.

    ``wanted`` is then a symbolic link to the stand-in, which is named by a hash of the path.
    """
    if account is None:
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        return wanted
    if wanted.is_symlink():
        return _owned(wanted.readlink(), account)
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if _may_execute(account, wanted.parent):
        return _owned(wanted, account)
    if wanted.exists():
        raise HomeError(
            f"The user {account.name}, who runs PostgreSQL, can't reach {wanted}: move the home to where it can."
        )
    stand_in = _owned(ELSEWHERE / hashlib.sha256(os.fsencode(wanted.absolute())).hexdigest()[:16], account)
    wanted.symlink_to(stand_in)
    return stand_in


def reachable_binaries(
    package: Path, parts: Iterable[str], *, probe: str, version: str, account: Account | None
) -> Path:
    """``package``, or a copy of its ``parts`` under ELSEWHERE when ``account`` can't execute ``probe`` in it.

    ``parts`` and ``probe`` are paths relative to ``package``.
    """
    if account is None or _may_execute(account, package / probe):
        return package
    copy = ELSEWHERE / version
    if not copy.exists():
        half = copy.with_suffix(f".{os.getpid()}")
        for part in parts:
            shutil.copytree(package / part, half / part, symlinks=True)
        for path in (half, *half.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        half.rename(copy)
    return copy


def _owned(folder: Path, account: Account) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.mkdir(exist_ok=True, mode=0o700)
    os.chown(folder, account.uid, account.gid)
    return folder


def _may_execute(account: Account, path: Path) -> bool:
    """Ask as that user: it knows about parents, access lists and mounts."""
    asked = subprocess.run(["test", "-x", str(path)], cwd="/", check=False, **credentials(account))
    return asked.returncode == 0
