"""What listens at addresses besides the proxy's own: Ollama's API, and llama.cpp's web UI."""

from __future__ import annotations

from collections.abc import Callable

from proxy.auth.access import Access
from proxy.auth.api_keys import ApiKeys
from proxy.body.bodies import Bodies
from proxy.forwarded_endpoints import ForwardedEndpoints
from proxy.models import ModelLoader
from proxy.ollama.host import OllamaHost
from proxy.router.router import Router
from proxy.routes import Handler, Routes
from proxy.settings import ProxySettings


def ollama_routes(
    forwarded: ForwardedEndpoints, loader: ModelLoader, host: OllamaHost, bodies: Bodies
) -> Callable[[Routes], None]:
    """Return what adds Ollama's API to routes."""
    # Imported here: most daemons need no memory for it.
    from proxy.ollama_endpoints import OllamaEndpoints  # noqa: PLC0415

    return OllamaEndpoints(forwarded, loader, host, bodies).add_routes


def handle_ollama(
    settings: ProxySettings,
    routes: Routes,
    add_ollama: Callable[[Routes], None],
    guard: Callable[[ProxySettings, Routes], Handler],
) -> Handler | None:
    """Add Ollama's API to the routes; return the handler of its own address, if it has one."""
    if settings.ollama.enabled:
        add_ollama(routes)
    if (listen := settings.ollama.listen) is None:
        return None
    add_ollama(beside := Routes(beneath=routes))
    return guard(settings.model_copy(update={"listen": listen}), beside)


def handle_engine_ui(
    settings: ProxySettings,
    router: Router,
    keys: ApiKeys,
    routes: Routes,
    guard: Callable[[ProxySettings, Routes, Access], Handler],
) -> Handler | None:
    """Return the handler of the address of llama.cpp's web UI, if it has one."""
    if settings.engine_ui is None:
        return None
    # Imported here: most daemons need no memory for it.
    from proxy.engine_ui import EngineUi, EngineUiAccess  # noqa: PLC0415

    EngineUi(router, settings).add_routes(beside := Routes(beneath=routes))
    own = settings.model_copy(update={"listen": settings.engine_ui})
    return guard(own, beside, EngineUiAccess(keys))
