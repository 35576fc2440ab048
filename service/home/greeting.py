"""What `pennyweight up` says when everything runs: the first things to do, ready to paste."""

from __future__ import annotations

from pathlib import Path

from service.home.folder import Bootstrap

_GREETING = """
Pennyweight is ready.

  API         {api_url}   (OpenAI-compatible: {api_url}/v1)
  Dashboard   {dashboard}
  Model       {model}
  Keys        {home}/bootstrap.json
  Logs        {home}/logs

Try it:

  curl {api_url}/v1/chat/completions \\
    -H "Authorization: Bearer {api_key}" -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "max_tokens": 64}}'

or with the openai package (it is in .venv):

  from openai import OpenAI

  client = OpenAI(base_url="{api_url}/v1", api_key="{api_key}")
  question = [{{"role": "user", "content": "Why is the sky blue?"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=question, max_tokens=64, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Prices and device rates marked "example" are made up: set yours with
  pennyweight price set {model} --input 0.10 --output 0.40
  pennyweight device-rate set {device_kind} --hourly 0.08

Ctrl-C stops everything, and finishes running requests first.
"""


def greeting(bootstrap: Bootstrap, *, home: Path, login_url: str | None, device_kind: str) -> str:
    """``login_url`` works once; None without a dashboard."""
    dashboard = f"{login_url}   (logs you in, once)" if login_url else "not started"
    return _GREETING.format(
        api_url=bootstrap.api_url,
        api_key=bootstrap.api_key,
        model=bootstrap.model,
        dashboard=dashboard,
        home=home,
        device_kind=device_kind,
    )
