"""Server spans for FastAPI applications."""

from __future__ import annotations

from typing import Any

__all__ = ["instrument_fastapi"]


def instrument_fastapi(app: Any, service_name: str = "nemo-gym") -> None:
    """Make every request to `app` a server span, child of the span that the request's headers name.

    Call it once per application, before it serves.

    Args:
        app: a fastapi.FastAPI.
        service_name: not used, and accepted for compatibility: the service's name is NemoLensConfig.service_name, from
            OTEL_SERVICE_NAME.

    Raises:
        ImportError: opentelemetry-instrumentation-fastapi, or FastAPI, is not installed.
    """
    try:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    except ImportError as error:
        raise ImportError(
            "instrument_fastapi() needs opentelemetry-instrumentation-fastapi: pip install 'lensfast[fastapi]' "
            f"(nemo-lens[fastapi] has the same packages) ({error})"
        ) from error
    FastAPIInstrumentor.instrument_app(app)
