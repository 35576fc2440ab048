"""The front door and the wiring: HTTP, keys, limits, dispatch, recorder, background work, the one-machine home.

The way of a request:

server — API processes on one port, and the parent that replaces them
process — one API process
protocol — HTTP's head, bounded
app — the ASGI application and its parts
docs — the page at /docs, without internet too
front — what all routes share, and the marks that a request carries
inference — OpenAI's routes: key, body, model, token ids, order
bodies — a body within a time, or drained
auth — who is asking
wire — OpenAI's requests, answers and errors
workers — who serves which model, and who is alive
text — template, tokens, detokenising, stop strings
vocabulary — the bytes of single tokens
reading — a typed request to token ids and sampling, for both owners
order — a valid request, ready for admission
reply — the answer, while the disconnect is watched
dispatch — the owner of requests: jobs out, events in, leases
loops — the owner's loops, which never end by themselves
desk — what a generation needs of its owner
generation — a request's life, from admission to settlement
admission — limits, slot, worker and inbox in one Redis call
completion — ids in, text out, up to a stop string
logprobs — what the engine told of a token's likelihood, in words
settlement — what it ended as, what is billed
refusals — what was not admitted, counted

What comes after it:

records_stream — the records stream as the recorder reads it
records — messages of the engine to rows of the books
recorder — records stream to Postgres, once
recorder_metrics — what the recorder counts

Background work:

celery_app — the Celery application and its tasks
jobs — chores and deferred work
beat — exactly one clock
batch — a file of requests through the workers at low priority

For the operator:

admin — tenants and keys over HTTP
login — the dashboard's cookie
health — live, ready, and which part is not
metrics — for Prometheus
telemetry — for OpenTelemetry
logs — for people
settings — from the environment, read once
home — everything on one machine
cli — the command `pennyweight`
"""
