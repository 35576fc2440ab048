"""The OpenAPI page works where there is no internet: everything it loads comes from here."""

import asyncio
import re

from tests.service.conftest import serve


def test_the_page_loads_nothing_from_elsewhere_and_describes_every_route(settings):
    async def main():
        async with serve(settings) as api, api.client("") as client:
            page = await client.get("/docs")
            assert page.status_code == 200
            loaded = re.findall(r"""(?:src|href)=["']([^"']+)["']""", page.text)
            assert len(loaded) == 4
            assert not re.search(r"(?:src|href)=[\"'](?:https?:)?//", page.text)
            assets = [await client.get(address) for address in loaded]
            assert [asset.status_code for asset in assets] == [200] * 4
            assert all(asset.headers["content-type"].startswith(("text/", "image/png")) for asset in assets)
            paths = (await client.get("/docs/openapi.json")).json()["paths"]
            assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= paths.keys()
            away = await client.get("/docs/assets/../../core.py")
            assert away.status_code == 404

    asyncio.run(main())
