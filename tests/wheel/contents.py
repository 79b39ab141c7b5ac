"""Check that a wheel and an sdist hold every file of the package, linked rooms included, as real files.

Usage: python contents.py REPOSITORY DIST
"""

import sys
import tarfile
import zipfile
from pathlib import Path


def expected_files(repository: Path) -> set[str]:
    """Paths under `autopar/`, as they are in the checkout when links are followed, whatever their kind."""
    files = set()
    for room in ("autopar", "passes", "cost_model", "runtime"):
        target = "autopar" if room == "autopar" else f"autopar/{room}"
        for path in (repository / room).rglob("*"):
            inside_link = any(parent.is_symlink() for parent in path.parents)
            if path.is_file() and "__pycache__" not in path.parts and not inside_link:
                files.add(f"{target}/{path.relative_to(repository / room).as_posix()}")
    return files


def wheel_files(wheel: Path) -> set[str]:
    """What an installation would put into site-packages, metadata aside."""
    with zipfile.ZipFile(wheel) as archive:
        links = [info.filename for info in archive.infolist() if (info.external_attr >> 28) == 0xA]
        if links:
            raise SystemExit(f"{wheel.name} holds links: {links}")
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def sdist_files(sdist: Path) -> set[str]:
    """The sdist's files under `autopar/`; hard links within the archive count as files, symbolic ones do not."""
    with tarfile.open(sdist) as archive:
        members = [(member.name.partition("/")[2], member) for member in archive.getmembers()]
    links = [name for name, member in members if member.issym()]
    if links:
        raise SystemExit(f"{sdist.name} holds links: {links}")
    return {name for name, member in members if not member.isdir() and name.startswith("autopar/")}


def main(repository: Path, dist: Path) -> None:
    """Compare both archives with the checkout; exit with the differing names."""
    expected = expected_files(repository)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    for archive, found in ((wheel, wheel_files(wheel)), (sdist, sdist_files(sdist))):
        if found != expected:
            raise SystemExit(
                f"{archive.name}: missing {sorted(expected - found)}, unexpected {sorted(found - expected)}"
            )
        print(f"{archive.name}: the {len(found)} files of the package, nothing else")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
