"""Every table of the books, as SQLAlchemy Core. The migrations make them; a test compares the two.

base      — metadata, naming of constraints, short forms of columns
parties   — tenants, api_keys, login_tokens, sessions, audit_log: who may do what, and who did
rates     — prices, devices, device_rates: what a request is charged, and what an hour costs
journal   — requests, attempts, device_intervals, and the two small tables of what is still awaited
buckets   — dirty_buckets, usage_15m, device_15m, refusals_15m: sums by quarter of an hour
deferred  — contents, batches, batch_lines: texts at rest, and work that may take its time

There are no foreign keys out of the journal: the recorder must never refuse a record because of a row elsewhere.
"""

from billing.tables import buckets, deferred, journal, parties, rates
from billing.tables.base import metadata

__all__ = ["buckets", "deferred", "journal", "metadata", "parties", "rates"]
