"""Client spans, and the headers of the current span, for requests that aiohttp makes."""

from __future__ import annotations

__all__ = ["instrument_aiohttp_client"]


def instrument_aiohttp_client() -> None:
    """Make every request of an aiohttp.ClientSession created from now on a client span, and send its trace context.

    Process-wide; call it once.

    Raises:
        ImportError: opentelemetry-instrumentation-aiohttp-client, or aiohttp, is not installed.
    """
    try:
        from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor
    except ImportError as error:
        raise ImportError(
            "instrument_aiohttp_client() needs opentelemetry-instrumentation-aiohttp-client: "
            f"pip install 'lensfast[aiohttp]' (nemo-lens[aiohttp] has the same packages) ({error})"
        ) from error
    AioHttpClientInstrumentor().instrument()
