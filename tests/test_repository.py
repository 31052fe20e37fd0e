"""The house itself: packages, imports, sizes and configs keep to what CONTRIBUTING.md says."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("drafters", "data_prep", "train", "eval")
LARGEST_FILE = 1_000_000  # bytes, outside checkpoints/
LARGEST_CHECKPOINT_FILE = 17 * 1024**2
OWN_LOADERS = ("TargetModel", "nn", "AutoHfQuantizer")  # whose from_pretrained and from_config take no remote code
LONGEST_MODULE, LONGEST_FUNCTION = 450, 59  # lines
# Each package from left to right: a room (folder or file) imports from itself and from the left. Files that are not
# named here (methods, programs) are on the right of all.
HOUSE = {
    "drafters": "common config hub cpu model heads loop base drafting policy learned methods loading layouts cli",
    "data_prep": "common dialogues configs store answers extraction",
    "train": "core configs data draft watch run preflight bench plan tools",
    "eval": "prompts entries configs engine_workers measure figures report rooflines",
}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python files under {folders}"
    return found


def shipped() -> list[Path]:
    """The files under version control, or, outside a clone, nothing to check."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_every_package_of_the_library_is_installed() -> None:
    """Catches a new package that works in the clone and is missing from an installed copy, which needs __init__.py."""
    assert all((path.parent / "__init__.py").is_file() for path in sources(*PACKAGES))


def test_a_wheel_holds_the_library_alone(tmp_path: Path) -> None:
    """Catches `train` and `eval` as top-level names of site-packages, an editable install without them, a library
    without the source of its kernels, and published drafters that ask for another distribution than this one.
    """
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("drafters", "train"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta as b; b.build_wheel('whole'); b.build_editable('editable')"
    for folder in ("whole", "editable"):
        (tmp_path / folder).mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (whole,), (editable,) = (list((tmp_path / folder).glob("*.whl")) for folder in ("whole", "editable"))
    files = zipfile.ZipFile(whole).namelist()
    assert "drafters/cpu/kernels.cpp" in files
    name, version, *_ = whole.name.split("-")
    name = name.replace("_", "-")
    assert name != "drafters" and f"`{name}`" in (ROOT / "README.md").read_text()
    assert f'requirements.txt": b"{name}>={version}' in (ROOT / "drafters" / "hub" / "publishing.py").read_text()
    names = {name.split("/")[0] for name in files}
    assert {name for name in names if not name.endswith(".dist-info")} == {"drafters"}
    with zipfile.ZipFile(editable) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().strip() == str(tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(package: str) -> None:
    """Catches the library importing a program built on it, or the programs importing the tests."""
    forbidden = {"tests", "conftest", "tiny", "train", "eval"} - {package}
    if package == "drafters":
        forbidden |= {"data_prep", "deepspeed", "datasets", "matplotlib", "tensorboard"}
    found = {path: {name.split(".")[0] for name in imports(tree_of(path))} for path in sources(package)}
    assert not [path for path, roots in found.items() if roots & forbidden]


def test_deepspeed_has_one_door() -> None:
    """Catches a second module that knows DeepSpeed, and has to change with it; a mock instead of an argument."""
    found = {path.relative_to(ROOT): set(imports(tree_of(path))) for path in sources(*PACKAGES)}
    knowing = [str(path) for path, names in found.items() if "deepspeed" in {name.split(".")[0] for name in names}]
    assert knowing == ["train/core/engine.py"]
    assert not [path for path, names in found.items() if any(name.startswith("unittest") for name in names)]


@cache
def tree_of(path: Path) -> ast.Module:
    """Each file is parsed once."""
    return ast.parse(path.read_text())


def modules() -> dict[str, Path]:
    """By dotted name; a package is its __init__.py."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources(*PACKAGES)}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported(name: str, known: dict[str, Path], late: bool) -> set[str]:
    """The modules among ``known`` that ``name`` imports: within functions only if ``late``, for types alone never."""
    package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    left: list[ast.AST] = [tree_of(known[name])]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= members if members <= known.keys() else {source} | (members & known.keys())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        elif late or not isinstance(node, ast.FunctionDef):
            left += ast.iter_child_nodes(node)
    return (found & known.keys()) - {name}


def place(name: str) -> int:
    """The place of a module in its package, from the left; a room's ``__main__`` is a program, on the right."""
    package, *rest = name.split(".")
    rooms = HOUSE[package].split()
    return rooms.index(rest[0]) if rest and rest[0] in rooms and rest[-1] != "__main__" else len(rooms)


def test_rooms_import_from_the_left() -> None:
    """Catches an arrow backwards: the target importing the loop that runs it, a store its program."""
    known = modules()
    for name in known:
        package = name.split(".")[0]
        for other in imported(name, known, late=True):
            if other.split(".")[0] == package and other not in PACKAGES[1:]:  # those hold nothing but a docstring
                assert place(other) <= place(name), f"{name} -> {other}, which is to its right: {HOUSE[package]}"


def test_the_house_lists_what_is_there() -> None:
    """Catches a room that the list forgets, and would put on the right of all, and names that are gone."""
    known = modules()
    listed = {f"{package}.{name}" for package, names in HOUSE.items() for name in names.split()}
    assert listed <= known.keys()
    rooms = {name for name, path in known.items() if path.name == "__init__.py" and name.count(".") == 1}
    assert rooms <= listed


def test_no_circle_of_imports() -> None:
    """Catches modules that only import in a lucky order. What a function imports, late, is not counted."""
    known = modules()
    try:
        TopologicalSorter({name: imported(name, known, late=False) for name in known}).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


def test_nothing_unpickles() -> None:
    """Catches pickle in any dress: a file from a stranger could run code when it is opened."""
    for path in sources(*PACKAGES):
        check_loads(path, tree_of(path))


def check_loads(path: Path, tree: ast.Module) -> None:
    """No pickle, and no code of a repository."""
    roots = {name.split(".")[0] for name in imports(tree)}
    assert not roots & {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}, path
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, options = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load":
            assert options.get("weights_only") == "True", f"{path}:{node.lineno}: torch.load without weights_only=True"
        if called in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", f"{path}:{node.lineno}: numpy.load with pickle"
        assert called not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"{path}:{node.lineno}: use safe_load"
        asks = called.endswith((".from_pretrained", ".from_config")) and called.split(".")[0] not in OWN_LOADERS
        trusts = options.get("trust_remote_code", "not given" if asks else "False")
        assert trusts == "False", f"{path}:{node.lineno}: runs a repository's code, or asks on stdin whether to"


def test_modules_stay_readable() -> None:
    """Catches files and functions too long to be read at once, and modules that do not say what they are."""
    for path in sources(*PACKAGES):
        tree = tree_of(path)
        assert len(path.read_text().splitlines()) <= LONGEST_MODULE, path
        assert path.name == "__init__.py" or ast.get_docstring(tree), f"{path}: no module docstring"
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
        assert not {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION}, path


def test_no_large_or_pickled_files() -> None:
    """Catches a data set or a run folder committed by accident, and weights in a format that nothing here will read."""
    for path in shipped():
        limit = LARGEST_CHECKPOINT_FILE if path.is_relative_to(ROOT / "checkpoints") else LARGEST_FILE
        assert path.stat().st_size <= limit, path
        assert path.suffix not in (".bin", ".pt", ".pth", ".pkl", ".ckpt"), path


def test_constraints_satisfy_the_bounds() -> None:
    """Catches a pin outside the range of pyproject.toml, and a dependency that is not pinned at all."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    for requirement in map(Requirement, wanted):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)
    assert pins["torch"] == "2.13.0"  # without a local part, which would name one build


def make(*arguments: str) -> str:
    """What make would run, without running it."""
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_is_five_commands_in_order(tmp_path: Path) -> None:
    """Catches a step that is skipped or reordered on a machine where nothing was run yet."""
    text = make("quickstart", f"RUNS={tmp_path / 'none'}", f"CORPUS={tmp_path / 'none' / 'stdlib'}")
    steps = ["data_prep.stdlib_corpus", "data_prep.features", "train/eagle.py", "train/kangaroo.py", "eval.speed"]
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert "--resume" not in text


def test_quickstart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Catches a second run that repeats finished steps, or that restarts an interrupted training."""
    for name in ("stdlib", "features"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".done").touch()
    (tmp_path / "eagle" / "state").mkdir(parents=True)
    places = f"RUNS={tmp_path}", f"CORPUS={tmp_path / 'stdlib'}"
    text = make("quickstart", *places)
    assert f"rm -rf {tmp_path / 'eagle'}" in text  # killed before its first state: nothing to resume, and in the way
    assert "--resume" not in text
    (tmp_path / "eagle" / "state" / "latest").touch()
    text = make("quickstart", *places)
    assert "rm -rf" not in text
    assert "data_prep" not in text
    assert re.search(r"train/eagle\.py --config \S+ --resume", text)
    assert re.search(r"train/kangaroo\.py --config \S+ *$", text, flags=re.MULTILINE)
    for name in ("eagle", "kangaroo", "speed"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / ".done").touch()
    assert "--config" not in make("quickstart", *places)
