"""Settings of the dashboard, read once per process from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DATABASE_URL = "PENNYWEIGHT_DATABASE_URL"
API_URL = "PENNYWEIGHT_API_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    database_url: str  # postgresql://…, as libpq takes it
    api_url: str  # of the API as the reader's browser reaches it: its login page sets our cookie

    @property
    def login_url(self) -> str:
        return f"{self.api_url.rstrip('/')}/dashboard/login"

    def to_environment(self) -> dict[str, str]:
        return {DATABASE_URL: self.database_url, API_URL: self.api_url}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Raises KeyError with the name of what is not set; ``dashboard.launch`` always sets both."""
        return cls(database_url=environment[DATABASE_URL], api_url=environment[API_URL])
