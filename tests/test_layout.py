"""Who may import whom, and that the rooms work from the checkout and from a wheel without taking generic names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specresearch"
ROOMS = ("drafters", "verifiers", "kernels")
ENTRY_POINTS = {
    "cli.py",
    "build.py",
    "overrides.py",
    "train.py",
    "export.py",
    "certify.py",
    "compare.py",
    "replay.py",
    "tune.py",
}


def sources() -> list[Path]:
    own = [p for p in PACKAGE.rglob("*.py") if not any(part in ROOMS for part in p.relative_to(PACKAGE).parts[:-1])]
    return own + [p for room in ROOMS for p in (ROOT / room).glob("*.py")]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    return found


def test_sources_are_found():
    names = {p.name for p in sources()}
    assert {"decode.py", "rejection.py", "ngram.py", "tree.py", "dynamic.py"} <= names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_one_way_imports(path):
    names = imports(path)
    tops = {name.split(".")[0] for name in names}
    where = path.relative_to(ROOT)
    if path.name not in ENTRY_POINTS:
        assert "hydra" not in tops
    if path.name != "tracking.py":
        assert "wandb" not in tops
    if where != Path("specresearch/grammar/backend.py"):
        assert "xgrammar" not in tops
    if "models" not in where.parts:
        assert not tops & {"transformers", "tokenizers"}
    assert not tops & {"experiments", "flashspec", "economize"}
    assert not tops & set(ROOMS), "the rooms are specresearch.drafters, specresearch.verifiers, specresearch.kernels"
    ours = {name.removeprefix("specresearch.") for name in names if name.startswith("specresearch.")}
    room = where.parts[0] if where.parts[0] in ROOMS else where.parts[1] if "trees" in where.parts else ""
    if room:
        others = {"drafters", "verifiers", "trees"} - {room}
        assert not {name.split(".")[0] for name in ours} & (others | {"decode", "run", "build"})
    if room == "kernels":
        assert not ours - {"types", "folders"} - {name for name in ours if name.startswith("kernels")}
    if path.name == "decode.py":
        assert not {name.split(".")[0] for name in ours} & {"drafters", "verifiers", "trees", "models"}


def test_rooms_are_no_packages_of_their_own():
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()
    for room in (*ROOMS, "checkpoints"):
        assert os.readlink(PACKAGE / room) == f"../{room}"


@pytest.mark.slow
def test_wheel_holds_everything_and_works_from_elsewhere(tmp_path):
    """Build a wheel, unpack it, and run from it outside the checkout; `import kernels` must not find ours."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], check=True)
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} == {"specresearch"}
    code = (
        "import sys, specresearch; sys.path = [p for p in sys.path if p];"
        f"assert specresearch.__file__.startswith({str(site)!r}), specresearch.__file__;"
        "import specresearch.kernels.tree, specresearch.drafters.ngram, specresearch.verifiers.rejection;"
        "from specresearch.kernels import cpu; assert cpu.SOURCE.exists();"
        "e = specresearch.engine('target=tiny', 'drafter=ngram', 'tracker=none', 'max_new_tokens=4');"
        "assert len(e.generate('hello').ids) == 4;"
        "import importlib.util as u; spec = u.find_spec('kernels'); assert spec is None or spec.origin is None;"
        "from specresearch.prompts import builtin; assert len(builtin()) == 56"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_kernels_from_the_checkout_finds_no_package_of_ours():
    """Hugging Face's `kernels` must stay importable by transformers when the checkout is on sys.path."""
    code = "import kernels; raise SystemExit(getattr(kernels, '__file__', None) is not None)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
