"""Name, version and description of the package, in one place."""

# A literal, which the build reads without importing anything.
__version__ = "0.1.0"

_major, _minor, _rest = __version__.split(".", 2)
PRE_RELEASE = _rest.lstrip("0123456789")
MAJOR, MINOR, PATCH = int(_major), int(_minor), int(_rest.removesuffix(PRE_RELEASE))
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
__shortversion__ = f"{MAJOR}.{MINOR}.{PATCH}"

__package_name__ = "lensfast"
__description__ = "Group-gated OpenTelemetry spans for training code, with the gate in C"
__license__ = "Apache-2.0"
__keywords__ = "opentelemetry, tracing, training, megatron, instrumentation"
__contact_names__ = "lensfast maintainers"

# Consumers may read these of any generation; lensfast has no site of its own.
__contact_emails__ = __homepage__ = __repository_url__ = __download_url__ = ""
