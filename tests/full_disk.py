"""A disk that is full for this process: no file of its own grows beyond some size (EFBIG where a disk says ENOSPC)."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(bytes_per_file: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_per_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
