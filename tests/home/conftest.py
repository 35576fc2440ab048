import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def open_folder():
    """A temporary folder that any user of this machine can reach."""
    folder = Path(tempfile.mkdtemp(prefix="pennyweight-test-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)
