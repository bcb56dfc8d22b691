"""`[nodes.NAME]`: another machine, or all machines of a name, whose models are served here too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from proxy.config.types import ExpandedPath, SettingsTable, Text
from proxy.nodes.url import NodeUrl, normalized, parse_name_server, parse_url


def _name_server(text: str) -> str:
    parse_name_server(text)
    return text


class NodeSettings(SettingsTable):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: Annotated[str, AfterValidator(normalized)] = Field(
        description="its base URL, as http://192.168.1.7:8080: another llama-corral, a "
        "llama-server, or any server with OpenAI's API; dns+http://NAME:8080 is as many nodes as "
        "the name has addresses, or SRV records if it begins with _service._proto; "
        "mdns+http://_llama-corral._tcp.local those that announce themselves in the local network"
    )
    resolver: Annotated[Text, AfterValidator(_name_server)] | None = Field(
        None,
        description="ADDRESS:PORT of the name server to ask for a url with dns+; unset: those of "
        "the system",
    )
    key_file: ExpandedPath | None = Field(
        None, description="file with its API key, readable by this user alone"
    )
    ca_file: ExpandedPath | None = Field(
        None, description="PEM file of the CAs that its https is trusted by; unset: the system's"
    )
    cert: ExpandedPath | None = Field(
        None, description="PEM file of the certificate to show it, where it demands one; needs key"
    )
    key: ExpandedPath | None = Field(
        None, description="PEM file of the key of cert, readable by this user alone"
    )
    models: tuple[Text, ...] = Field((), description="ids of its models to serve here; unset: all")
    slots: int = Field(
        4,
        ge=1,
        le=1024,
        description="concurrent requests for each model, if it does not report its slots",
    )
    local_first: bool = Field(
        default=True,
        description="whether it gets new conversations only when no local slot is free; "
        "a conversation that began there stays there",
    )
    load: Literal["never", "idle"] = Field(
        "never",
        description="whether it is asked to load models that are not loaded, or one more where "
        "all are busy; it must agree by load_for_others in its own [proxy]",
    )
    weight: float | None = Field(
        None,
        gt=0,
        le=100,
        description="its share of requests as a multiple of an average instance's; "
        "unset: by its measured speed",
    )

    @property
    def parsed_url(self) -> NodeUrl:
        return parse_url(self.url)

    @property
    def tls_files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca_file, self.cert, self.key) if path is not None)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: set both or none")
        if self.resolver and self.parsed_url.discovery != "dns":
            raise ValueError("resolver is for a url with dns+")
        if self.tls_files and not self.parsed_url.is_tls:
            raise ValueError("ca_file, cert and key are for a url with https://")
        return self
