"""The operator's API: what it makes works at the front door, what it refuses leaves nothing, and who did it is kept."""

import asyncio
from uuid import uuid4

from tests.service.conftest import serve
from tests.service.scripted import MODEL, ScriptedWorker

ASK = {"model": MODEL, "prompt": "hi"}


def test_a_tenant_and_its_key_are_made_used_listed_and_revoked(settings, keyring, redis_url):
    async def main():
        async with (
            ScriptedWorker(redis_url) as _,
            serve(settings) as api,
            api.client(keyring.admin()) as operator,
        ):
            await api.knows()
            tenant = (await operator.post("/admin/tenants", json={"name": "Åcme <b>", "rpm": 2})).json()
            assert (tenant["name"], tenant["rpm"], tenant["tpm"]) == ("Åcme <b>", 2, None)
            keys = f"/admin/tenants/{tenant['id']}/keys"
            made = (await operator.post(keys, json={"name": "laptop", "concurrency": 1})).json()
            async with api.client(made["secret"]) as client:
                answers = [(await client.post("/v1/completions", json=ASK)).status_code for _ in range(3)]
                assert answers == [200, 200, 429]
                assert (await client.get("/admin/tenants")).status_code == 403
                revoked = (await operator.post(f"/admin/keys/{made['id']}/revoke")).json()
                assert revoked["revoked_at"]
                await asyncio.sleep(settings.key_cache_s + 0.1)
                assert (await client.post("/v1/completions", json=ASK)).status_code == 401
            (listed,) = (await operator.get(keys)).json()["data"]
            assert (listed["name"], listed["prefix"], listed["concurrency"]) == ("laptop", made["prefix"], 1)
            assert made["secret"] not in (await operator.get(keys)).text
            tenants = (await operator.get("/admin/tenants")).json()["data"]
            assert [(one["name"], one["keys"]) for one in tenants] == [("Åcme <b>", 0)]
        log = keyring.execute("SELECT actor, action FROM audit_log WHERE actor <> 'test' ORDER BY at")
        assert len(log) == 3
        assert {actor for actor, _ in log} == {log[0][0]}
        assert log[0][0].startswith("pw-")

    asyncio.run(main())


def test_who_is_not_the_operator_gets_nothing_and_a_mistake_changes_nothing(settings, keyring, redis_url):
    async def main():
        nobody = f"/admin/tenants/{uuid4()}/keys"
        asked = [
            ("GET", "/admin/tenants", None),
            ("POST", "/admin/tenants", {"name": "x"}),
            ("GET", nobody, None),
            ("POST", nobody, {"name": "x"}),
            ("POST", f"/admin/keys/{uuid4()}/revoke", None),
        ]
        async with serve(settings) as api, api.client(keyring.admin()) as operator:
            for key, status in (("", 401), ("pw-unknown", 401), (keyring.key(), 403)):
                async with api.client(key) as client:
                    answers = [await client.request(method, url, json=body) for method, url, body in asked]
                assert [answer.status_code for answer in answers] == [status] * len(asked)
                assert all(answer.json()["error"]["message"] for answer in answers)
            answers = [await operator.request(method, url, json=body) for method, url, body in asked[2:]]
            assert [answer.status_code for answer in answers] == [404] * 3
            wrong = [
                {},
                {"name": ""},
                {"name": "x" * 101},
                {"name": "x", "rpm": 0},
                {"name": "x", "rpm": 2**31},
                {"name": "x", "rpm": "many"},
                {"name": "x", "weight": 0},
                {"name": "x", "weight": 1e-320},
                {"name": "x", "colour": "red"},
                {"name": "nul\0"},
                {"name": "acme"},  # there is one
            ]
            (acme,) = (await operator.get("/admin/tenants")).json()["data"]
            odd = [
                {"name": "nul\0"},
                {"name": "x", "expires_at": "9999-12-31T23:59:59-14:00"},
                {"name": "x", "expires_at": "0001-01-01T00:00:00+14:00"},
                {"name": "x", "expires_at": "tomorrow"},
            ]
            answers = [await operator.post(f"/admin/tenants/{acme['id']}/keys", json=body) for body in odd]
            assert [answer.status_code for answer in answers] == [400] * len(odd)
            assert len((await operator.get(f"/admin/tenants/{acme['id']}/keys")).json()["data"]) == 1
            answers = [await operator.post("/admin/tenants", json=body) for body in wrong]
            assert [answer.status_code for answer in answers] == [400] * len(wrong)
            assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in answers)
        assert [name for (name,) in keyring.execute("SELECT name FROM tenants")] == ["acme"]

    asyncio.run(main())
