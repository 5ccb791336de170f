"""What is shipped: imports stay light, the wheel is complete, the extras match jax."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import autoshard_ilp
from autoshard_ilp.costs import profile

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_importing_the_package_is_light():
    code = (
        "import sys\nimport autoshard_ilp as autoshard\nautoshard.InfeasibleError, autoshard.__version__\n"
        "print(sorted({'jax', 'keras', 'ortools', 'numpy', 'scipy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_can_be_had():
    for name in autoshard_ilp._LAZY:
        assert getattr(autoshard_ilp, name) is not None
    assert set(autoshard_ilp._LAZY) <= set(dir(autoshard_ilp))
    with pytest.raises(AttributeError, match="absent"):
        autoshard_ilp.absent  # noqa: B018


def test_versions_agree():
    assert autoshard_ilp.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_checkout_finds_its_profiles():
    assert profile.profiles() == sorted(path.stem for path in (ROOT / "cost_models").glob("*.toml"))
    assert len(profile.profiles()) >= 10


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    code = "import sys\nfrom hatchling.build import build_wheel\nprint(build_wheel(sys.argv[1]))"
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return folder / done.stdout.split()[-1]


def test_the_wheel_is_complete(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "autoshard_ilp"
    sources = {f"autoshard_ilp/{path.relative_to(package)}" for path in package.rglob("*.py")}
    data = {f"autoshard_ilp/cost_models/{path.name}" for path in (ROOT / "cost_models").glob("*.toml")}
    data |= {f"autoshard_ilp/{path.relative_to(package)}" for path in package.rglob("*.toml")}
    assert data
    assert sources | data | {"autoshard_ilp/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "cost_models", "src"))]


def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nimport autoshard_ilp\n"
        "assert autoshard_ilp.__file__.startswith(sys.argv[1]), autoshard_ilp.__file__\n"
        "print(*autoshard_ilp.profiles())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == profile.profiles()


# -- requirements ------------------------------------------------------------------------------------------------------


def pinned(package, extra=""):
    """The requirement of an installed jax on a package, under one of its extras."""
    found = [Requirement(text) for text in metadata.requires("jax")]
    return [r for r in found if r.name == package and (r.marker is None or r.marker.evaluate({"extra": extra}))]


@pytest.mark.parametrize(("extra", "of_jax", "package"), [("tpu", "tpu", "libtpu"), ("cuda", "cuda12-local", None)])
def test_compilers_come_through_the_extras_of_jax(extra, of_jax, package):
    """jax pins libtpu and its plugin to its own version; naming them here would let them drift apart."""
    requirements = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
    assert of_jax in {e for r in requirements if r.name == "jax" for e in r.extras}
    package = package or "jax-cuda12-plugin"
    assert package not in {r.name for r in requirements}
    (requirement,) = pinned(package, of_jax)
    jax_version = metadata.version("jax")
    if package == "jax-cuda12-plugin":
        assert requirement.specifier.contains(jax_version)
        assert not requirement.specifier.contains(f"{Version(jax_version).major}.{Version(jax_version).minor + 1}.0")
    else:
        assert str(requirement.specifier).startswith("==")


@pytest.mark.parametrize("package", ["libtpu", "jax-cuda12-plugin"])
def test_installed_compilers_match_the_installed_jax(package):
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    (requirement,) = pinned(package, "tpu" if package == "libtpu" else "cuda12-local")
    assert requirement.specifier.contains(installed)


def test_this_python_and_these_packages_are_what_is_asked_for():
    assert SpecifierSet(PROJECT["requires-python"]).contains(".".join(map(str, sys.version_info[:3])))
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(metadata.version(requirement.name)), text


def test_the_readme_holds_the_commands_that_ci_runs():
    blocks = re.findall(r"<!-- (\w+) -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert [name for name, _ in blocks] == ["setup_and_run", "setup_and_test"]
    for _, command in blocks:
        assert "pip install" in command
        assert len(command.strip().splitlines()) == 1
    assert "<!-- setup_and_test -->" in (ROOT / ".ci" / "run").read_text()
