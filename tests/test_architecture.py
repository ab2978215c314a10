"""The house rules that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "acm_compiler"
ROWS = [
    {"errors", "inputs", "site", "env", "dump", "files", "progress"}
    | {"audio_frames", "call_mask", "dynamo_remarks", "size_conditions"},
    {"acm", "recipe", "float64"},
    {"plans", "read_plan", "cost", "cost_table", "conversion", "loss_terms", "budgets"},
    {"planner", "control", "batch_context", "decoder_tokens", "site_status", "codegen"},
    {"passes", "kept_work", "usage", "measure"},
    {
        "data",
        "tasks",
        "sources",
        "checkpoint",
        "training",
        "calibration",
        "evaluation",
        "reporting",
        "base_metric",
        "survey",
    },
    {"advice", "pipeline", "run_folder", "run_recipe", "backend", "bench", "explanation", "hf"},
    {"cli", "__init__", "__main__"},
]
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
HEAVY = ("triton", "transformers", "timm", "matplotlib", "sklearn", "torch._dynamo", "torchvision", "accelerate")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "acm_compiler" else [f"acm_compiler.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from ((n.split(".")[1], node.lineno) for n in names if n.startswith("acm_compiler."))


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downhill(path):
    own = room_of(path)
    assert own in ROW_OF, f"{own} has no row"
    for room, line in imported_rooms(path):
        assert ROW_OF[room] <= ROW_OF[own], f"{path.name}:{line} imports {room} from a higher row"


def test_passes_import_no_kernels():
    for path in (PACKAGE / "passes").rglob("*.py"):
        assert all(room != "codegen" for room, _ in imported_rooms(path)), path


def test_no_room_for_everything():
    assert not [path for path in sources() if path.stem in ("utils", "helpers", "misc", "common")]


def test_no_module_hides_a_public_function():
    import acm_compiler

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not modules & set(acm_compiler.__all__)
    assert all(getattr(acm_compiler, name).__doc__ for name in acm_compiler.__all__)


def test_importing_the_package_loads_nothing_heavy():
    code = f"import sys, acm_compiler; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_using_the_core_loads_nothing_heavy():
    code = (
        "import sys, acm_compiler as acm\n"
        "acm.plan, acm.rewrite, acm.set_budget, acm.record, acm.save, acm.losses\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_stay_readable():
    long = {path.name: n for path in sources() if (n := len(path.read_text().splitlines())) > 300}
    assert not long


def test_functions_fit_a_screen():
    tall = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = ast.get_docstring(node)
                height = node.end_lineno - node.lineno + 1 - (len(doc.splitlines()) if doc else 0)
                if height > 45:
                    tall.append(f"{path.name}:{node.lineno} {node.name} {height}")
    assert not tall


def test_the_tree_names_no_machine():
    pattern = re.compile(r"/(work|farm|root)/|pypi-|index-url")
    assert not [path for path in sources() if pattern.search(path.read_text())]


def test_every_switch_is_declared_once():
    declared = set(re.findall(r'"(ACM_[A-Z]+)"', (PACKAGE / "env.py").read_text()))
    used = {name for path in sources() for name in re.findall(r"\bACM_[A-Z]+\b", path.read_text())}
    assert declared and used <= declared


# file: calls that write where nobody looks for a file, or to a file that grows
_OTHER_WRITES = {
    "acm_compiler/checkpoint/lock.py": "into the very file that is locked",
    "acm_compiler/codegen/gpu/ahead.py": "into a temporary folder, for a tool to read",
    "acm_compiler/reporting/figures.py": "into memory",
    "acm_compiler/training/job.py": "line by line, at the end of what is there",
    "benchmarks/gpu.py": "row by row, so that an interruption loses none",
    "benchmarks/step_memory.py": "a switch of the kernel",
}
_WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "save_model", "copyfile", "copy2", "save_pretrained")


def _writes(call: ast.Call) -> bool:
    """Whether a call makes or changes a file."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name == "open":
        modes = [arg.value for arg in (*call.args, *(k.value for k in call.keywords)) if isinstance(arg, ast.Constant)]
        return any(isinstance(mode, str) and re.fullmatch(r"[rbt]*[wax+][rwabt+]*", mode) for mode in modes)
    return name in _WRITERS or (owner, name) in (("torch", "save"), ("json", "dump"), ("np", "save"), ("np", "savez"))


@pytest.mark.parametrize("folder", ["acm_compiler", "benchmarks"])
def test_files_are_written_whole_or_not_at_all(folder):
    root = PACKAGE.parent
    for path in sorted((root / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        whole = [
            range(block.lineno, block.end_lineno + 1)
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "whole_file(" in ast.unparse(block.items[-1].context_expr)
        ]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _writes(node)]
        bare = [call.lineno for call in calls if not any(call.lineno in lines for lines in whole)]
        name = path.relative_to(root).as_posix()
        assert bool(bare) == (name in _OTHER_WRITES), f"{name}: lines {bare}: write with acm_compiler.files"


def test_json_is_read_in_one_place():
    """Others would pass on a RecursionError."""
    reads = [path.name for path in sources() if re.search(r"\bjson\.loads?\(", path.read_text())]
    assert reads == ["files.py"]
