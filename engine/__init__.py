"""Token ids in, token ids out.

protocol — the messages between processes
keys — the Redis keys that they travel on
names — attributes and metrics: every name that telemetry uses
spool — what a producer of records has written and the recorder has not committed
adoption — what dead producers left
frames — the spool's file: frames that are whole or not there

config — the knobs, and the worker's environment
sequence — one choice of one attempt on its way
intake — what may enter: refusals, and the fence of attempts
plan — what one step shall do and did: the border to the computing half
kv — which block of KV memory holds what, and what may be taken up again
waiting — who waits, and whose turn it is among tenants
scheduler — who computes what in the next step
timeline — what the device is kept for at each moment
work — what a step makes the device do
least_squares — coefficients that are not negative
step_time — how long a step takes, fitted to those that ran
shares — who pays how much of a step
accounts — device time and tokens of one attempt
meter — whose the device's time was
endings — how an attempt ends, and its report
core — Engine: add, abort, step

models — from a model's files to a decoder and a tokenizer
kernels — what a decoder computes with
runner — a plan into tensors, a step of the model, tokens out
draws — what is asked of the sampler for a row
adjust — bias, penalties and masks on logits
sampler — tokens from logits
logprobs — what the model thought of the tokens drawn

exchange — one round trip to Redis between two steps
inbox — jobs and aborts in
outbox — events out
owners — whether those who wait still live
registration — name, lease and card
loop — the worker's one loop
threads — how many torch gets, and how they wait
loading — configuration to runner and card
metrics — for Prometheus
telemetry — for OpenTelemetry
logs — for people
worker — the process
"""
