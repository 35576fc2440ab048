"""``python -m dashboard --host H --port P``: what `pennyweight dashboard` becomes, with its environment."""

from __future__ import annotations

import argparse

from dashboard.launch import run
from dashboard.settings import Settings

parser = argparse.ArgumentParser(prog="pennyweight dashboard")
parser.add_argument("--host", required=True)
parser.add_argument("--port", required=True, type=int)
words = parser.parse_args()
settings = Settings.from_environment()
run(database_url=settings.database_url, api_url=settings.api_url, port=words.port, host=words.host)
