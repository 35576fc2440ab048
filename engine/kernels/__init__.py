"""Kernels: what a step computes with, chosen by device.

device — which device, number format and threads
memory — keys and values of all layers, in blocks
attention — the border: spans of rows in, attention per layer
spans — one step: store the new rows, single rows at once, longer spans one by one
dense — attention over keys and values side by side, its masks
chunk — dense attention for a span of several rows
padded — single rows on any device, padded to the longest context
sparse — single rows on the CPU, without gathering or padding
linear — linear layers in the form that is quickest on the device, or that was asked for
arithmetic — which forms there are
int8 — exact products of integers, with channels mixed before they are rounded
int4 — weights in groups of 32 with four bits each
"""
