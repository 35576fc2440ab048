"""The books: a plain library over a database session. No HTTP, no Redis, no Celery; imports nothing of ours.

ids         — UUIDv7: identifiers that say when they were made
database    — engine from a URL, the one place that opens a transaction, turns between processes
tables      — every table, as SQLAlchemy Core
schema      — bring a database to the newest tables
partitions  — monthly partitions, ahead of time and when a record needs one
"""
