"""Deferred generation: a file of requests, run through the workers at low priority, each line exactly once.

file    — OpenAI's lines of input and output
line    — one line's way: order, generation, output kept, settled
runner  — the owner: claims lines, chunk by chunk, and drains
"""
