"""What is shipped: every module, those behind symlinks included, and nothing else."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PARTS = {"passes", "runtime", "models"}
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def modules() -> set[str]:
    """The path of every Python file of the package, symlinks followed."""
    found = set()
    for folder, _, files in os.walk(ROOT / "alpa_lite", followlinks=True):
        found |= {str((pathlib.Path(folder) / name).relative_to(ROOT)) for name in files if name.endswith(".py")}
    return found


def build(kind: str, folder: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """Builds a wheel or an sdist of the project in `folder`."""
    into.mkdir(exist_ok=True)
    run = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(into)],
        cwd=folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return into / run.stdout.splitlines()[-1]


def in_wheel(wheel: pathlib.Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_parts_are_symlinks_that_stay_inside():
    for part in PARTS:
        link = ROOT / "alpa_lite" / part
        assert link.is_symlink() and os.readlink(link) == f"../{part}"
        assert (link / "__init__.py").is_file()


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_module(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("alpa_lite", *PARTS, "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)

    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    direct = in_wheel(build("wheel", source, tmp_path / "wheel"))
    by_way_of_sdist = in_wheel(build("wheel", unpacked, tmp_path / "again"))

    assert {name for name in direct if name.endswith(".py")} == modules()
    assert direct == by_way_of_sdist
    data = ("py.typed", "report/page.html", "report/prose.txt", "cluster/presets.toml", "cluster/nvlink.toml")
    assert {f"alpa_lite/{name}" for name in data} <= direct
    tops = {name.split("/")[0] for name in direct}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"alpa_lite"}
    assert any(name.endswith("licenses/LICENSE") for name in direct)
