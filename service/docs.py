"""The page at /docs: Swagger UI from an installed package, so that it works where there is no internet."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Final

from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import FromPath

_PATH: Final = "/docs"
_ICON: Final = "favicon-32x32.png"
_ASSETS: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui-standalone-preset.js": "text/javascript",
    "swagger-ui.css": "text/css",
    _ICON: "image/png",
}


@get(f"{_PATH}/assets/{{name:str}}", include_in_schema=False, sync_to_thread=True)
def asset(name: FromPath[str]) -> Response[bytes]:
    if name not in _ASSETS:
        raise NotFoundException
    content = (files("swagger_ui") / "static" / name).read_bytes()
    return Response(content, media_type=_ASSETS[name], headers={"cache-control": "public, max-age=86400"})


def openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Pennyweight",
        version=version("pennyweight"),
        description="OpenAI's API, with keys, quotas and a bill for every token.",
        path=_PATH,
        render_plugins=[
            SwaggerRenderPlugin(
                js_url=f"{_PATH}/assets/swagger-ui-bundle.js",
                standalone_preset_js_url=f"{_PATH}/assets/swagger-ui-standalone-preset.js",
                css_url=f"{_PATH}/assets/swagger-ui.css",
                favicon=f"<link rel='icon' href='{_PATH}/assets/{_ICON}'>",
            )
        ],
        components=Components(security_schemes={"key": SecurityScheme(type="http", scheme="bearer")}),
        security=[{"key": []}],
    )
