"""Tests of the engine. Before any of them imports torch, its threads are told to wait as those of a worker do: many
small steps beside busy servers would take minutes with the default.
"""

from engine.threads import prepare_threads

prepare_threads(None)
