"""What `pennyweight up` says when everything runs: the first things to do, ready to paste."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from service.home.folder import Bootstrap

_GREETING: Final = """
Pennyweight is ready.

  API         {api_url}/v1   (OpenAI's; its page: {api_url}/docs)
  Dashboard   {dashboard}
  Model       {model}
  Keys        {home}/bootstrap.json
  Logs        {home}/logs

Try it with curl:

curl {api_url}/v1/chat/completions -H "Authorization: Bearer {api_key}" -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}'

or in Python (pip install openai):

from openai import OpenAI

client = OpenAI(base_url="{api_url}/v1", api_key="{api_key}")
question = [{{"role": "user", "content": "Why is the sky blue?"}}]
for chunk in client.chat.completions.create(model="{model}", messages=question, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)

Prices and rates marked "example" are made up. Set yours:

{command} price set {model} --input 0.10 --output 0.40
{command} device-rate set {device_kind} --hourly 0.08

Ctrl-C stops everything, and finishes running requests first.
"""


def greeting(bootstrap: Bootstrap, *, home: Path, login_url: str | None, device_kind: str) -> str:
    """What is to be pasted starts at the first column: Python takes no other. ``login_url`` works once; None without a
    dashboard.
    """
    return _GREETING.format(
        api_url=bootstrap.api_url,
        api_key=bootstrap.api_key,
        model=bootstrap.model,
        dashboard=f"{login_url}   (logs you in, once)" if login_url else "not started",
        home=home,
        device_kind=device_kind,
        command=_command(),
    )


def _command() -> str:
    """How to call us from here: the name where it is on the path, else where it lies beside our Python."""
    ours = Path(sys.executable).with_name("pennyweight")
    if shutil.which(ours.name) == str(ours):
        return ours.name
    return str(ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours)
