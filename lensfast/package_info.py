"""Name and version of the package, in one place."""

__package_name__ = "lensfast"
__version__ = "0.1.0"
