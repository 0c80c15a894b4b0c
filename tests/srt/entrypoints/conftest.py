from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from http_server_thread import serve


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    with serve() as url:
        yield url


@pytest.fixture(scope="session")
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(base_url: str) -> OpenAI:
    return OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
