"""Calls to a router under test that are answered with JSON."""

from tests.router.conftest import Running


async def call(router: Running, method: str, path: str, json: object = None, **headers: str) -> tuple[int, dict]:
    async with router.http.request(method, router.url + path, json=json, headers=headers) as answer:
        assert answer.content_type == "application/json", await answer.text()
        return answer.status, await answer.json()
