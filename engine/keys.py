"""The Redis keys that messages travel on. One prefix, so that a shared server can be read.

Every stream entry has the one field DATA, unless said.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "pw:"
DATA: Final = b"d"

WORKERS: Final = PREFIX + "workers"  # hash: boot id -> WorkerCard
RECORDS: Final = PREFIX + "records"  # stream, fields PRODUCER, SEQ, DATA: pack(Record)
RECORDER_GROUP: Final = "recorder"
DEAD_LETTERS: Final = PREFIX + "dead-letters"  # stream, fields of RECORDS and "error" (a class name, never a text)
PRODUCER: Final = b"p"  # boot id of who wrote the record
SEQ: Final = b"n"  # its number in that producer's spool


def inbox_key(worker: str) -> str:
    """Stream of pack(Inbound) for one worker boot."""
    return f"{PREFIX}inbox:{worker}"


def events_key(owner: str) -> str:
    """Stream of pack(EventBatch) for one owner boot."""
    return f"{PREFIX}events:{owner}"


def lease_key(boot: str) -> str:
    """String with expiry: renewed by the boot from its main loop, never by a thread of its own."""
    return f"{PREFIX}lease:{boot}"


def incumbent_key(name: str) -> str:
    """String: the boot that now holds a worker name. A new boot replaces it and deletes the lease of the one before."""
    return f"{PREFIX}incumbent:{name}"


def tokenizer_key(revision: str) -> str:
    """String: the tokenizer.json of a model revision, so that an API machine needs no model files."""
    return f"{PREFIX}tokenizer:{revision}"


def committed_key(producer: str) -> str:
    """List of spool numbers the recorder has committed, consumed by that producer."""
    return f"{PREFIX}committed:{producer}"
