"""Builds the optional C gate; everything else is in pyproject.toml.

Without a working C compiler the build warns and leaves the extension out: lensfast then runs on its
pure-Python gate. LENSFAST_REQUIRE_EXTENSION=1 makes that an error; LENSFAST_BUILD_PURE=1 asks for it.
"""

import os
import sys
import warnings

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

TRUE = {"1", "true", "yes", "on"}
REQUIRED = os.environ.get("LENSFAST_REQUIRE_EXTENSION", "").strip().lower() in TRUE
PURE = os.environ.get("LENSFAST_BUILD_PURE", "").strip().lower() in TRUE or sys.implementation.name != "cpython"

C_SOURCES = [f"csrc/{name}.c" for name in ("gate", "group", "manager", "noop", "otlp", "span", "traced")]
C_HEADERS = [source[:-1] + "h" for source in C_SOURCES] + ["csrc/atomics.h", "csrc/callargs.h"]

# Debug information is most of the file and names the directories of the build; CFLAGS decides where it is set.
FLAGS = ["-std=c11", "-O2", "-fvisibility=hidden", *([] if "CFLAGS" in os.environ else ["-g0"])]


class OptionalBuildExt(build_ext):
    """Turns a failed compilation into a warning, unless the extension is required."""

    failed = False

    def build_extension(self, extension):
        try:
            super().build_extension(extension)
        except Exception as error:
            if REQUIRED:
                raise
            self.failed = True
            self._warn(error)

    def copy_extensions_to_source(self):
        # An editable install copies what was built.
        if not self.failed:
            super().copy_extensions_to_source()

    def _warn(self, error):
        # A Python warning, since newer pips show those of a build even where they hide its output.
        warnings.warn(
            "the C gate of lensfast was not built, so lensfast will run on its pure-Python gate, where a disabled "
            "span costs about five times as much. Install a C compiler and the Python headers (Debian, Ubuntu: "
            "apt install gcc python3-dev) and reinstall lensfast with --force-reinstall --no-cache-dir, since "
            "pip keeps what it has built; LENSFAST_REQUIRE_EXTENSION=1 makes this an error. "
            f"The reason: {error}",
            stacklevel=2,
        )


def extensions():
    if PURE:
        if REQUIRED:
            sys.exit("LENSFAST_REQUIRE_EXTENSION=1 was set, but this is a pure-Python build")
        return []
    from Cython.Build import cythonize

    gate = Extension(
        "lensfast._gate",
        ["lensfast/_gate.pyx", *C_SOURCES],
        include_dirs=["csrc"],
        depends=C_HEADERS,
        extra_compile_args=[] if sys.platform == "win32" else FLAGS,
    )
    return cythonize([gate], build_dir="build/cython")


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})
