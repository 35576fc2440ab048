"""The books: a plain library over a database session. No HTTP, no Redis, no Celery; imports nothing of ours.

ids         — UUIDv7: identifiers that say when they were made
moments     — times that the books can hold
database    — engine from a URL, the one place that opens a transaction, turns between processes
tables      — every table, as SQLAlchemy Core
schema      — bring a database to the newest tables
partitions  — monthly partitions, ahead of time and when a record needs one
changes     — the log of who changed what
tenants     — who is served, within which limits
keys        — API keys: made, revoked, recognised
sessions    — logins to the dashboard
rating      — the arithmetic of money
prices      — what a model costs a tenant, effective-dated
rates       — what an hour of a device costs, effective-dated
bootstrap   — what a new system starts with
records     — what the recorder hands over: settlements, attempts, intervals
staging     — records as rows, copied beside their tables
recording   — every record into the books, once
lookups     — the price and the rate in force, as SQL
closing     — price and cost of requests, whenever something they follow from came in
histograms  — latencies as counts in fixed buckets
rollup      — sums by quarter of an hour
sweeping    — what nobody will close any more
contents    — texts at rest: sealed, until they expire
batches     — deferred requests: lines that are claimed and end exactly once
refusals    — what was not admitted, counted by cause
economics   — unit economics of a time range, on both bases
trends      — the same over time, and quantiles of the latencies
listing     — requests one by one
audit       — do the books close?
"""
