"""The shape of the repository: what is installed, and rules that no linter checks."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("launcher", "mesh", "node", "proxy")
PACKAGE = ROOT / "src" / "mlx_mesh"


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_a_package_of_mlx_mesh(folder: str) -> None:
    module = importlib.import_module(f"mlx_mesh.{folder}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / folder
    assert (module.__doc__ or "").strip(), "its docstring says what the folder is"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_link_to_each_folder_is_relative(folder: str) -> None:
    link = PACKAGE / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"


def test_every_folder_with_python_files_is_a_package() -> None:
    missing = {
        name_of(path.parent) for path in sources(*FOLDERS) if not (path.parent / "__init__.py").exists()
    }
    assert not missing, "setuptools leaves these out of the wheel"


def test_the_console_script_can_be_loaded() -> None:
    (script,) = entry_points(group="console_scripts", name="mlx-mesh")
    assert callable(script.load())


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_mlx_is_imported_only_in_the_engine() -> None:
    engine = ROOT / "node" / "engine"
    importers = {
        name_of(path)
        for path in sources(*FOLDERS)
        if engine not in path.parents
        for module in imported_modules(path)
        if module.split(".")[0] in ("mlx", "mlx_lm", "mlx_vlm")
    }
    assert not importers


def test_nothing_unpickles_what_others_sent() -> None:
    users = {
        name_of(path)
        for path in sources(*FOLDERS)
        if {"pickle", "cPickle", "dill", "marshal", "shelve"}
        & {m.split(".")[0] for m in imported_modules(path)}
    }
    assert not users


def test_no_command_goes_through_a_local_shell() -> None:
    shell = re.compile(r"shell\s*=\s*True|os\.system\(|os\.popen\(|create_subprocess_shell")
    users = {name_of(path) for path in sources(*FOLDERS, "scripts") if shell.search(path.read_text())}
    assert not users


def test_children_are_never_forked_without_exec() -> None:
    fork = re.compile(r"os\.fork\(|preexec_fn|multiprocessing")
    users = {name_of(path) for path in sources(*FOLDERS) if fork.search(path.read_text())}
    assert not users


def test_every_module_says_what_it_is() -> None:
    silent = {
        name_of(path)
        for path in sources(*FOLDERS)
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not silent


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to list the files")
def test_wheel_and_sdist_hold_every_file_of_the_package(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    names = [name for name in tracked.decode().split("\0") if name and (ROOT / name).exists()]
    tree = tmp_path / "tree"
    for name in names:  # a copy: setuptools writes into the tree that it builds
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    expected = {f"mlx_mesh/{name}" for name in names if name.split("/")[0] in FOLDERS}
    expected |= {"mlx_mesh/__init__.py", "mlx_mesh/py.typed"}

    sdist = build("sdist", tree, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    in_sdist = {str(path.relative_to(unpacked / "src")) for path in (unpacked / "src").rglob("*")}
    assert expected <= in_sdist

    for source in (tree, unpacked):  # a wheel may be built from either
        with zipfile.ZipFile(build("wheel", source, tmp_path)) as wheel:
            assert expected <= set(wheel.namelist())


def build(kind: str, tree: Path, folder: Path) -> Path:
    """Build with the setuptools of this environment: no network."""
    code = f"import sys\nfrom setuptools import build_meta\nprint(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    dead = [
        f"{name_of(page)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert pages
    assert not dead


def test_every_imported_package_is_declared() -> None:
    """A package that only comes along with another one may leave with it. One of an extra is imported only
    where it is needed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {package_of(line) for line in project["dependencies"]}
    optional = {package_of(line) for lines in project["optional-dependencies"].values() for line in lines}
    providers = packages_distributions()
    undeclared = set()
    for path in sources(*FOLDERS):
        for module in imported_modules(path):
            top = module.split(".")[0]
            if not top or top in sys.stdlib_module_names or top == "mlx_mesh":
                continue
            names = {name.lower().replace("_", "-") for name in providers.get(top, [top])}
            is_lazy = not re.search(rf"^(import|from) {top}\b", path.read_text(), re.MULTILINE)
            if not names & (declared | optional if is_lazy else declared):
                undeclared.add(f"{name_of(path)}: {top}")
    assert not undeclared


def package_of(requirement: str) -> str:
    return re.split(r"[<>=\[ ]", requirement)[0].lower().replace("_", "-")


def test_folders_that_the_second_part_of_all_tests_leaves_out_have_none_of_its_tests() -> None:
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    found = re.search(r'alone="(.+?)"', script)
    folders = re.findall(r"--ignore=(\S+)", script)
    assert found and folders
    marks = [f"pytest.mark.{name}" for name in found[1].split(" or ")]
    for path in sources(*folders):
        text = path.read_text(encoding="utf-8")
        assert not [mark for mark in marks if mark in text], name_of(path)
