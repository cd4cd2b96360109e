"""The arrows of the design: which folder may import which, and what `import sparta` may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparta

SOURCE = Path(sparta.__file__).parent
# Knows nothing above itself; everyone may use it.
GROUND = {
    "arguments",
    "aten",
    "batch_norms",
    "errors",
    "files",
    "memory",
    "modules",
    "packages",
    "spelling",
    "tables",
    "version",
}

MAY_USE = {
    "tesa": set(),
    "measure": {"tesa"},
    "testing": {"tesa", "measure"},
    "common": set(),
    "reporting": set(),
    "signing": set(),
    "sparsify": {"tesa"},
    "oneshot": {"tesa", "common", "sparsify", "measure"},
    "scheduler": {"tesa", "sparsify"},
    "create": {"tesa", "common", "sparsify", "oneshot"},
    "propagation": {"tesa"},
    "recovery": {"tesa", "common", "sparsify", "oneshot", "create"},
    "specialize": {"tesa", "common", "measure"},
    "nn": {"tesa", "common", "specialize", "measure"},
    "hf": {"tesa", "nn"},
    "precision": {"tesa", "create", "specialize"},
    "compiler": {"tesa", "common", "precision", "propagation", "specialize", "nn", "measure", "reporting", "signing"},
    "generation": {"tesa", "common", "propagation", "specialize", "nn", "measure", "compiler", "signing", "precision"},
    "planning": {"tesa", "common", "oneshot", "precision", "propagation", "specialize", "compiler"},
}
EVERYTHING = {"cli", "demo", "__init__"}


def room_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            package, *rest = name.split(".")
            if package == "sparta" and rest and any((SOURCE / f"{rest[0]}{end}").exists() for end in ("", ".py")):
                yield rest[0]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_arrows_point_one_way(path):
    room = room_of(path)
    if room in EVERYTHING:
        return
    allowed = GROUND if room in GROUND else MAY_USE[room] | GROUND | {room}
    assert set(imported_rooms(path)) <= allowed


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached(name):
    """Return all modules of the package that importing one of them brings in."""
    found, waiting = set(), [name]
    while waiting:
        path = SOURCE.parent.joinpath(*waiting[-1].split("."))
        file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)
        module = waiting.pop()
        if file is None or module in found or not module.startswith("sparta."):
            continue  # a name within a module, which came with the module
        found.add(module)
        for imported in imported_modules(file):
            waiting += [imported, imported.rpartition(".")[0]]
    return found


@pytest.mark.parametrize("path", sorted((SOURCE / "compiler" / "run").glob("*.py")), ids=lambda p: p.name)
def test_what_runs_imports_nothing_of_what_searches(path):
    modules = reached(f"sparta.compiler.run.{path.stem}" if path.stem != "__init__" else "sparta.compiler.run")
    assert not {name for name in modules if name.startswith("sparta.compiler.choose")}


def test_what_searches_is_found_however_far_away():
    assert "sparta.compiler.choose.layers" in reached("sparta.compiler.api")


OPERATIONS = ("attention", "conv", "int8_linear", "linear", "matmul", "moe", "seqlen_attention", "softmax")
SHARED = [
    p for room in ("blocks", "cpu", "cuda", "runtime", "tuning") for p in (SOURCE / "specialize" / room).glob("*.py")
]


@pytest.mark.parametrize("path", sorted(SHARED), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_operations_share_knows_none_of_them(path):
    operations = tuple(f"sparta.specialize.{name}." for name in OPERATIONS)
    assert not [name for name in imported_modules(path) if name.startswith(operations)]


def test_the_check_would_notice_a_wrong_arrow(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from sparta.testing import block_mask\nimport sparta.errors\n")
    assert set(imported_rooms(wrong)) == {"testing", "errors"}


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_loads_nothing_beyond_torch():
    code = (
        "import sys, torch, numpy; before = {m.split('.')[0] for m in sys.modules}; import sparta; "
        "after = {m.split('.')[0] for m in sys.modules}; print(*sorted(after - before))"
    )
    assert set(run(code).split()) - set(sys.stdlib_module_names) == {"sparta"}


def test_import_works_without_optional_packages():
    missing = ["optuna", "pydantic", "yaml", "safetensors", "rich", "typer", "filelock", "platformdirs", "triton"]
    code = (
        f"import sys; sys.modules.update({{name: None for name in {missing}}}); import torch, sparta; "
        "sparta.testing.block_mask((8, 8), (2, 2), 0.5); str(sparta.testing.environment()); "
        "spec = sparta.Spec.from_pattern(torch.nn.Linear(8, 8), sparta.NM(2, 4)); print(spec)"
    )
    assert "2:4" in run(code)


def test_unknown_attributes_are_named():
    with pytest.raises(AttributeError, match="did you mean 'Block'"):
        _ = sparta.Blok
    assert "testing" in dir(sparta)
