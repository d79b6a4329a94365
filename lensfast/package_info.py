"""Name, version and description of the package, in one place."""

import re as _re

# A literal, which the build reads without importing anything.
__version__ = "0.1.0"

_match = _re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", __version__)
assert _match
MAJOR, MINOR, PATCH = (int(_match[part]) for part in (1, 2, 3))
PRE_RELEASE = _match[4]
VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)
__shortversion__ = f"{MAJOR}.{MINOR}.{PATCH}"

__package_name__ = "lensfast"
__description__ = "Group-gated OpenTelemetry spans for training code, with the gate in C"
__license__ = "Apache-2.0"
__keywords__ = "opentelemetry, tracing, training, megatron, instrumentation"
__contact_names__ = "lensfast maintainers"

# Consumers may read these of any generation; lensfast has no site of its own.
__contact_emails__ = __homepage__ = __repository_url__ = __download_url__ = ""
