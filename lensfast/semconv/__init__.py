"""Names of attributes, for all generations of the API: each constant of semconv.attributes is here as well."""

from .attributes import *  # noqa: F403
