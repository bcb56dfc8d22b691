"""Paths and methods find their handlers."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from proxy.errors import MethodNotAllowed, NotFound
from proxy.http.middleware import PATH_ID, Routes


async def answer_list(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


async def answer_one(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


async def answer_post(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


@pytest.fixture
def routes() -> Routes:
    routes = Routes()
    routes.add("/models", get=answer_list)
    routes.add("/models/{id}", get=answer_one, delete=answer_post)
    routes.add("/models/{id}/warm", post=answer_post)
    return routes


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_head_has_the_handler_of_get(routes: Routes, method: str) -> None:
    assert routes.find(make_mocked_request(method, "/models")) is answer_list


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/models/chat", "chat"),
        ("/models/a/b", "a/b"),
        ("/models/a%2Fb", "a/b"),
        ("/models/100%25", "100%"),
        ("/models/a%20b", "a b"),
        ("/models/chat/warm", "chat/warm"),
    ],
)
def test_an_id_may_have_any_characters(routes: Routes, path: str, model: str) -> None:
    request = make_mocked_request("GET", path)
    assert routes.find(request) is answer_one
    assert request[PATH_ID] == model


@pytest.mark.parametrize("path", ["/", "/models/", "/none", "/modelsX", "*"])
def test_other_paths_are_not_found(routes: Routes, path: str) -> None:
    with pytest.raises(NotFound):
        routes.find(make_mocked_request("GET", path))


def test_delete_has_a_separate_handler(routes: Routes) -> None:
    assert routes.find(make_mocked_request("DELETE", "/models/chat")) is answer_post
    with pytest.raises(MethodNotAllowed):
        routes.find(make_mocked_request("DELETE", "/models"))


def test_another_method_is_not_allowed(routes: Routes) -> None:
    with pytest.raises(MethodNotAllowed) as rejected:
        routes.find(make_mocked_request("POST", "/models"))
    assert rejected.value.headers()["Allow"] == "GET, HEAD"
