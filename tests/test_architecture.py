"""The house rules that a machine can check; docs/architecture.md explains them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

PACKAGE = Path(__file__).parent.parent / "acm_compiler"
# a room imports only itself and rooms above it in this list, lazy imports included
ROOMS = [
    *("errors", "env", "files", "site", "progress"),
    *("recipe", "sources", "data", "shipped", "acm", "planning"),
    *("passes", "passes/capture", "passes/find", "passes/rewrite", "passes/lower", "passes/survey"),
    *("runtime", "calibration", "tasks", "codegen", "backend", "evaluation", "reporting"),
    *("checkpoint", "exporting", "training"),
    *("runs", "baselines", "serving", "hf", "__init__", "cli", "__main__"),
]
MOST_ENTRIES, MOST_FILES_IN_A_FOLDER, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 30, 16, 300, 45
CODE = (".py", ".h", ".cpp", ".j2", ".css")
HEAVY = ("triton", "transformers", "timm", "matplotlib", "sklearn", "torch._dynamo", "torchvision", "accelerate")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


MODULES = {module_of(path): path for path in sources()}


def room_of(module: str) -> str:
    parts = module.split("/")
    return "/".join(parts[:2]) if parts[0] == "passes" and len(parts) > 1 else parts[0]


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports_of(path: Path, *, types: bool = True):
    """Modules of the package that a file imports anywhere in it, with the line; `types`: for type checkers, too."""
    tree = ast.parse(path.read_text())
    skipped = {id(n) for top in tree.body if not types and for_types_alone(top) for n in ast.walk(top)}
    for node in (node for node in ast.walk(tree) if id(node) not in skipped):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        for longest, shortest in names:
            inside = [n.replace(".", "/").removeprefix("acm_compiler/") for n in (longest, shortest)]
            if shortest.split(".")[0] == "acm_compiler":
                yield next((n for n in inside if n in MODULES), "__init__"), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_downhill(module):
    own = room_of(module)
    assert own in ROOMS, f"{own} is not in the list of rooms"
    for other, line in imports_of(MODULES[module]):
        assert ROOMS.index(room_of(other)) <= ROOMS.index(own), f"{module}:{line} imports {other} from a room below"


def test_no_files_import_each_other_in_a_circle():
    graph = networkx.DiGraph()
    for module, path in MODULES.items():
        graph.add_edges_from((module, other) for other, _ in imports_of(path, types=False) if other != module)
    packages = [module for module, path in MODULES.items() if path.name == "__init__.py"]
    graph.remove_nodes_from(packages)  # a package's __init__ only names what its files define
    assert list(networkx.simple_cycles(graph)) == []


def test_rooms_are_few_and_small():
    top = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(top) <= MOST_ENTRIES, sorted(p.name for p in top)
    folders = {path.parent for path in PACKAGE.rglob("*") if path.suffix in CODE}
    crowded = {
        str(f.relative_to(PACKAGE)): n
        for f in folders
        if (n := sum(path.suffix in CODE for path in f.iterdir())) > MOST_FILES_IN_A_FOLDER
    }
    assert crowded.pop(".", 0) <= MOST_ENTRIES
    assert not crowded


def test_passes_import_no_kernels():
    for path in (PACKAGE / "passes").rglob("*.py"):
        assert all(room_of(other) != "codegen" for other, _ in imports_of(path)), path


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
    code = [path for path in PACKAGE.rglob("*") if path.suffix in CODE]
    long = {path.name: n for path in code if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long


_NO_OPENING = re.compile(
    r"(of |in |to |from |by |at |on |for |with )?(what|which|whether|how|who|whom|whose|where|when|why)\b"
    r"|(if|as|in|to|on|by|with|for|of|that|all that)\b",
    re.IGNORECASE,
)
FOLDERS = ("acm_compiler", "benchmarks", "scripts", "examples", "tests")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path):
    """Every docstring of a module, class, function or attribute, with its line."""
    documented = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _DOCUMENTED)]
    for node in documented:
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def test_docstrings_begin_with_a_verb_or_a_noun():
    root = PACKAGE.parent
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    found = [(path, line, text) for path in paths for line, text in docstrings(path) if _NO_OPENING.match(text)]
    assert not [f"{path.relative_to(root)}:{line} {text[:60]}" for path, line, text in found]


# word: the field's
_OTHER_WORDS = {"picture": "image", "of no use": "excluded or unusable", "kept work": "dense MACs"}


def test_texts_use_the_words_of_the_field():
    pattern = re.compile(rf"\b({'|'.join(_OTHER_WORDS)})s?\b", re.IGNORECASE)
    pages = [PACKAGE.parent / "README.md", *(PACKAGE.parent / "docs").rglob("*.md")]
    texts = [(path, 0, path.read_text()) for path in pages]
    for path in sources():
        strings = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        texts += [(path, node.lineno, " ".join(node.value.split())) for node in strings if isinstance(node.value, str)]
    found = [
        f"{path.name}:{line}: {word}" for path, line, text in texts for word in pattern.findall(" ".join(text.split()))
    ]
    assert not found


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        overload = any("overload" in ast.unparse(decorator) for decorator in statement.decorator_list)
        return [] if overload else [statement.name]
    targets = getattr(statement, "targets", [statement.target] if isinstance(statement, ast.AnnAssign) else [])
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def test_no_file_defines_a_name_twice():
    """Two files merged into one may do so: functions of the first would see the constants of the second."""
    for path in sources():
        names = [name for statement in ast.parse(path.read_text()).body for name in _defined(statement)]
        assert not {name for name in names if names.count(name) > 1}, path


def test_functions_fit_a_screen():
    tall = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                doc = ast.get_docstring(node)
                height = node.end_lineno - node.lineno + 1 - (len(doc.splitlines()) if doc else 0)
                if height > MOST_LINES_OF_A_FUNCTION:
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
    "acm_compiler/checkpoint/folder.py": "into the very file that is locked",
    "acm_compiler/codegen/gpu/ahead/build.py": "into a temporary folder, for a tool to read",
    "acm_compiler/reporting/figures.py": "into memory",
    "acm_compiler/sources/from_gguf.py": "into a temporary folder, to read what transformers writes",
    "acm_compiler/exporting/export.py": "into a temporary folder, whose files are moved",
    "acm_compiler/training/watch.py": "line by line, at the end of what is there",
    "benchmarks/first_gpu_run/parts.py": "row by row, so that an interruption loses none",
    "benchmarks/first_gpu_run/runner.py": "a log that a part's process writes to while it runs",
}
_WRITERS = ("write_text", "write_bytes", "savefig", "save_file", "save_model", "copyfile", "copy2", "save_pretrained")


def _writes(call: ast.Call) -> bool:
    """True if a call makes or changes a file."""
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
