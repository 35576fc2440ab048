"""The front door and the wiring: HTTP, keys, limits, dispatch, the recorder, background work, the command line.

jobs        — background work: chores due by the clock, batches when somebody nudges
celery_app  — Celery as we use it: messages are nudges, the truth is in Postgres
beat        — the clock of the background work: of several, one leads
batch       — deferred generation, each line exactly once
"""
