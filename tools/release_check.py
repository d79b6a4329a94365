"""Builds what a release publishes, twice, from two copies in different places, and checks it: `make release-check`.

The source distribution, the pure wheel and, from that source distribution, the wheel of this interpreter: both times
the same bytes, with the right contents and metadata. The release workflow runs it, too, and publishes the first two
of what it leaves in --output; the wheels of the other interpreters are cibuildwheel's, from the same source
distribution. Needs a git checkout, a C compiler and the packages of the dependency group "release".
"""

from __future__ import annotations

import argparse
import ast
import email
import email.message
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

# The machines of the release workflow, and what each is to build.
PLATFORMS = {
    ("linux", "x86_64"): ("manylinux_x86_64", "musllinux_x86_64"),
    ("linux", "aarch64"): ("manylinux_aarch64",),
    ("macos", "arm64"): ("macosx_arm64",),
}
# Tracked, and of no use without the repository; and what setuptools adds.
REPOSITORY_ONLY = (".ci/", ".github/", ".gitignore")
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|lensfast\.egg-info/.*")


def must(condition: object, what: str) -> None:
    if not condition:
        sys.exit(f"release-check: {what}")


def say(what: str) -> None:
    print(f"ok  {what}", flush=True)


def run(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    must(done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


# Version


def read_version() -> str:
    for node in ast.parse((ROOT / "lensfast" / "package_info.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    sys.exit("release-check: lensfast/package_info.py has no __version__")


def check_changelog(version: str, tag: str | None) -> None:
    """A tag needs a dated section with something in it; before that, [Unreleased] may hold what will be there."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    entries = {section.splitlines()[0]: len(re.findall(r"^- ", section, re.MULTILINE)) for section in sections}
    released = [title for title in entries if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", title)]
    if tag is not None:
        must(tag == f"v{version}", f"the tag is {tag}, the version {version}")
        must(released, f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    title = released[0] if released else "[Unreleased]"
    must(entries.get(title), f"CHANGELOG.md says nothing under {title}")
    say(f"version {version}{f', tag {tag}' if tag else ''}, CHANGELOG: {title}, {entries[title]} entries")


# Building


def tracked_files() -> list[str]:
    listed = run("git", "ls-files", "-z").split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()]


def copy_tree(folder: Path) -> Path:
    """The tracked files as they are now, with the permissions of a fresh checkout."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
        (folder / name).chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
    return folder


def normalise(sdist: Path, epoch: int) -> None:
    """Write it anew without what setuptools leaves of the machine: times, owners, permissions, the order of files."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = {member.name: archive.extractfile(member).read() for member in members if member.isfile()}
    with (
        sdist.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for old in members:
            must(old.isfile() or old.isdir(), f"{old.name} in the source distribution is no file and no folder")
            new = tarfile.TarInfo(old.name)
            new.type, new.mtime = old.type, epoch
            new.mode = 0o755 if old.isdir() or old.mode & 0o100 else 0o644
            data = contents.get(old.name, b"")
            new.size = len(data)
            archive.addfile(new, BytesIO(data))


def build(source: Path, out: Path, epoch: int, **variables: str) -> dict[str, Path]:
    """The three files; the wheels are built from the source distribution."""
    # What the shell has of these would be in one build and not in the one of somebody else.
    for name in [name for name in os.environ if name.startswith("LENSFAST_") or name in {"CFLAGS", "LDFLAGS"}]:
        del os.environ[name]
    variables["SOURCE_DATE_EPOCH"] = str(epoch)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, source, **variables)
    (sdist,) = out.glob("*.tar.gz")
    normalise(sdist, epoch)
    with tarfile.open(sdist) as archive:
        archive.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    kinds = {"pure wheel": {"LENSFAST_BUILD_PURE": "1"}, "wheel": {"LENSFAST_REQUIRE_EXTENSION": "1"}}
    built = {"sdist": sdist}
    for kind, choice in kinds.items():
        shutil.rmtree(unpacked / "build", ignore_errors=True)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", out, unpacked, **variables, **choice)
        (built[kind],) = set(out.glob("*.whl")) - set(built.values())
    return built


# Checking


def check_same(first: dict[str, Path], second: dict[str, Path]) -> None:
    for kind, path in first.items():
        must(path.name == second[kind].name, f"{path.name} was {second[kind].name} the second time")
        data = path.read_bytes()
        must(
            data == second[kind].read_bytes(),
            f"{path.name} has other bytes the second time{difference(path, second[kind])}",
        )
        say(
            f"{kind}, the same bytes twice: {path.name}, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}"
        )


def difference(first: Path, second: Path) -> str:
    """Which of the files in two wheels differ."""
    if first.suffix != ".whl":
        return ""
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        names = [name for name in one.namelist() if name in other.namelist() and one.read(name) != other.read(name)]
    return f": {', '.join(names)}"


def check_sdist(path: Path, version: str) -> None:
    prefix = f"lensfast-{version}/"
    with tarfile.open(path) as archive:
        contents = {
            member.name.removeprefix(prefix): archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }
    expected = {name for name in tracked_files() if not name.startswith(REPOSITORY_ONLY)}
    names = {name for name in contents if not GENERATED.fullmatch(name)}
    must(not expected - names, f"not in the source distribution (MANIFEST.in): {sorted(expected - names)}")
    must(not names - expected, f"in the source distribution, and not in the repository: {sorted(names - expected)}")
    check_metadata(email.message_from_bytes(contents["PKG-INFO"]), version)
    for name in PROJECT["license-files"]:
        must(contents[name] == (ROOT / name).read_bytes(), f"the source distribution's {name} is another")
    say(f"{path.name}: the {len(names)} files of the repository, metadata, licence")


MAX_WHEEL_BYTES = 300_000


def check_wheel(path: Path, version: str, private: list[str]) -> None:
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    must(path.stat().st_size < MAX_WHEEL_BYTES, f"{path.name} has {path.stat().st_size:,} bytes")
    info = f"lensfast-{version}.dist-info"
    expected = {
        name for name in tracked_files() if name.startswith("lensfast/") and name.endswith((".py", ".pyi", "/py.typed"))
    }
    extensions = {name for name in contents if name.endswith((".so", ".pyd"))}
    names = {name for name in contents if not name.startswith(f"{info}/")} - extensions
    must(not expected - names, f"not in {path.name}: {sorted(expected - names)}")
    must(not names - expected, f"in {path.name}, where it has no business: {sorted(names - expected)}")
    must({"lensfast/py.typed", "lensfast/_gate.pyi"} <= names, "the wheel has no types")
    pure = path.name.endswith("-py3-none-any.whl")
    must(len(extensions) == (0 if pure else 1), f"extensions of {path.name}: {sorted(extensions)}")
    for name in extensions:
        for folder in private:
            must(folder.encode() not in contents[name], f"{name} names the folder {folder}")
    check_metadata(email.message_from_bytes(contents[f"{info}/METADATA"]), version)
    for name in PROJECT["license-files"]:
        same = contents.get(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
        must(same, f"{path.name} has not the repository's {name}")
    say(f"{path.name}: {len(expected)} files, {len(extensions)} extensions, metadata, licence")


def check_metadata(metadata: email.message.Message, version: str) -> None:
    def requirement(text: str) -> tuple[str, frozenset[str], SpecifierSet]:
        parsed = Requirement(text)
        return parsed.name, frozenset(parsed.extras), parsed.specifier

    must(metadata["Name"] == PROJECT["name"], f"the name is {metadata['Name']}")
    must(metadata["Version"] == version, f"the version is {metadata['Version']}")
    must(metadata["License-Expression"] == PROJECT["license"], f"the licence is {metadata['License-Expression']}")
    must(metadata.get_all("License-File") == PROJECT["license-files"], "the licence files are others")
    must(SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(PROJECT["requires-python"]), "Requires-Python")
    must(sorted(metadata.get_all("Classifier")) == sorted(PROJECT["classifiers"]), "the classifiers are others")
    must(metadata["Description-Content-Type"].startswith("text/markdown"), "the description is no Markdown")
    extras = PROJECT["optional-dependencies"]
    must(set(metadata.get_all("Provides-Extra")) == set(extras), "the extras are others")
    expected = {(None, requirement(each)) for each in PROJECT["dependencies"]}
    expected |= {(extra, requirement(each)) for extra, listed in extras.items() for each in listed}
    found = set()
    for text in metadata.get_all("Requires-Dist"):
        of_extra = re.search(r'extra == "(.*)"', text)
        found.add((of_extra and of_extra[1], requirement(text)))
    must(found == expected, f"the requirements are others: {sorted(map(str, found ^ expected))}")


def check_cibuildwheel() -> None:
    """What cibuildwheel itself says that it would build on each machine of the release workflow."""
    interpreters = [pattern.removesuffix("-*") for pattern in PYPROJECT["tool"]["cibuildwheel"]["build"]]
    count = 0
    for (platform, architecture), builds in PLATFORMS.items():
        command = ("cibuildwheel", "--print-build-identifiers", "--platform", platform, "--archs", architecture)
        printed = run(sys.executable, "-m", *command).split()
        expected = {f"{interpreter}-{name}" for name in builds for interpreter in interpreters}
        must(set(printed) == expected, f"on {platform}, {architecture} cibuildwheel would build {printed}")
        count += len(printed)
    say(f"cibuildwheel: {count} wheels, of {', '.join(interpreters)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds what a release publishes, twice, and checks it.")
    parser.add_argument("--tag", help="the tag of the release, which is to agree with the version")
    parser.add_argument("--output", type=Path, help="a folder for the source distribution and the pure wheel")
    parser.add_argument(
        "--only-wheels", type=Path, metavar="FOLDER", help="check the wheels in there, and build nothing"
    )
    options = parser.parse_args()
    os.umask(0o022)
    version = read_version()
    if options.only_wheels:
        for wheel in sorted(options.only_wheels.glob("*.whl")):
            check_wheel(wheel, version, private=[])
        return
    check_changelog(version, options.tag)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="lensfast-release-") as name:
        folder = Path(name)
        first = build(copy_tree(folder / "one" / "lensfast"), folder / "first", epoch, TZ="UTC", PYTHONHASHSEED="1")
        second = build(
            copy_tree(folder / "another" / "of another depth" / "tree"),
            folder / "second",
            epoch,
            TZ="Asia/Tokyo",
            PYTHONHASHSEED="2",
        )
        check_same(first, second)
        run(sys.executable, "-m", "twine", "check", "--strict", *first.values())
        say("twine check --strict")
        check_sdist(first["sdist"], version)
        for kind in ("pure wheel", "wheel"):
            check_wheel(first[kind], version, private=[name, tempfile.gettempdir() + "/", str(ROOT)])
        check_cibuildwheel()
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            for kind in ("sdist", "pure wheel"):
                shutil.copy(first[kind], options.output)
            say(f"{first['sdist'].name} and {first['pure wheel'].name} are in {options.output}")


if __name__ == "__main__":
    main()
