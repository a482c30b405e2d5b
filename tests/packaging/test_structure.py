"""`docs/structure.md`, `pyproject.toml` and the tree say the same; an editable install would hide a forgotten package."""

from __future__ import annotations

import re

from tests.packaging.tree import NAMES, ROOT, folders_with_python, project, shipped_modules


def test_structure_page_lists_every_folder():
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == folders_with_python()


def test_import_names_of_the_page():
    rows = re.findall(r"^\| `([^`]+)/` \| `([^`]+)` \|", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)
    for folder, name in rows:
        top = next(top for top in NAMES if folder == top or folder.startswith(top + "/"))
        assert name == NAMES[top] + folder.removeprefix(top).replace("/", ".")


def test_pyproject_lists_every_package():
    packages = {name.removesuffix(".__init__") for name in shipped_modules() if name.endswith(".__init__")}
    without_init = {name.rpartition(".")[0] for name in shipped_modules()} - packages
    assert not without_init, "folders with Python but no __init__.py"
    assert set(project()["tool"]["setuptools"]["packages"]) == packages
    assert project()["tool"]["setuptools"]["package-dir"] == {name: folder for folder, name in NAMES.items()}


def test_relative_links_of_the_pages_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    missing = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not missing, missing
