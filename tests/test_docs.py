"""README and docs show what the package does."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import acm_compiler as acm
from acm_compiler import errors
from acm_compiler.cli.app import VERBS, app
from acm_compiler.recipe.resolved import recipe_json_schema

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CALLS = (ROOT / "docs/python.md").read_text()
COMMANDS = (ROOT / "docs/cli.md").read_text()


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", ["python.md", "calibration.md", "export.md"])
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of(ROOT / "docs" / page), page, "exec"), {"__name__": page})


@pytest.mark.parametrize("name", acm.__all__)
def test_every_public_name_is_documented_with_its_signature(name):
    assert f"### `acm.{name}`" in CALLS
    called = getattr(acm, name)
    if not inspect.isfunction(called):
        return
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(called).parameters.values()]
    written = re.search(rf"```py\nacm\.{name}(\(.*?\))\n```", CALLS, re.DOTALL)
    assert written, f"acm.{name} has no signature"
    shown = re.sub(r"\s+", " ", written[1]).replace("( ", "(").replace(" )", ")")
    assert shown == str(inspect.Signature(parameters)).replace("'", '"')


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_documented_with_its_options(verb):
    section = re.search(rf"^## `acmc {verb}\b.*?(?=^## )", COMMANDS, re.MULTILINE | re.DOTALL)
    assert section, f"acmc {verb} has no section"
    command = typer.main.get_command(app).commands[verb]
    commands = [command, *getattr(command, "commands", {}).values()]
    options = {option for c in commands for p in c.params for option in p.opts if option.startswith("--")}
    row = re.compile(r"^\| `(--[a-z-]+)`", re.MULTILINE)
    shared = re.search(r"^## Options of every saved model\n.*?(?=^## )", COMMANDS, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z-]+)`", section[0])) & set(row.findall(shared[0]))
    assert {*row.findall(section[0]), *named} == options - {"--help"}


def test_every_exit_code_is_documented():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AcmError)]
    documented = re.findall(r"^\| (\d+) \|", COMMANDS, re.MULTILINE)
    assert {int(code) for code in documented} == {0, *(kind.exit_code for kind in kinds)}


def test_every_verb_of_the_readme_exists():
    verbs = set(re.findall(r"^acmc ([a-z]+)", README, re.MULTILINE))
    assert verbs and verbs <= set(VERBS)


def test_the_recipe_reference_is_that_of_the_schema():
    spec = importlib.util.spec_from_file_location("recipe_reference", ROOT / "scripts/recipe_reference.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.page(), "run python scripts/recipe_reference.py"


def test_every_key_of_a_recipe_has_a_meaning():
    schema = recipe_json_schema()
    sections = {"Recipe": schema, **schema["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key in section["properties"]
        if not _meaning(section, key)
    ]
    assert not bare


def _meaning(section, key):
    # the keys that say which section this is stand in its heading
    return key in ("kind", "phase") or section["properties"][key].get("description")


def test_the_page_about_your_own_code_shows_the_example():
    page = (ROOT / "docs/your-own-code.md").read_text()
    project = (ROOT / "examples/my_project.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3 and all(block in project for block in blocks)
    assert re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1] == (ROOT / "examples/my_recipe.yaml").read_text()


def test_code_on_pages_is_python_and_calls_what_there_is():
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            ast.parse(block)
        called = set(re.findall(r"\bacm\.(\w+)\(", page.read_text()))
        assert called <= set(acm.__all__), f"{page.name}: {called - set(acm.__all__)}"


def test_guides_tell_no_load_averages():
    guides = [page for page in PAGES if page.parent.name != "results"]
    assert not [page.name for page in guides if re.search(r"\bload \.?\d", page.read_text())]


def test_prose_is_wrapped_so_that_a_change_can_be_read():
    generated = {"models.md", "recipe-reference.md"}
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines()
        long = [line for line in prose if len(line) > 100 and not line.startswith("|")]
        assert not long or page.name in generated, f"{page.name}: {long[0]}"


def test_every_page_and_example_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"]
    assert all(f"({page})" in index for page in pages)
    assert all(f"(../examples/{path.name})" in index for path in (ROOT / "examples").glob("*.*"))


def test_every_error_is_documented_with_its_exit_code():
    table = (ROOT / "docs/errors.md").read_text()
    documented = {name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AcmError)]
    assert documented == {kind.__name__: kind.exit_code for kind in kinds if kind is not errors.AcmError}
    code = "import acm_compiler as acm, sys; [getattr(acm.errors, name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *documented], check=True)


def test_code_cites_only_pages_and_headings_that_are_here():
    sources = [
        path
        for folder in ("acm_compiler", "benchmarks", "examples", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    cited = {
        match
        for path in sources
        for match in re.findall(r"\bdocs/([\w/-]+\.md)(?:, ([A-Z][\w ]*\w))?", path.read_text())
    }
    assert ("semantics.md", "The module") in cited
    for page, heading in cited:
        text = (ROOT / "docs" / page).read_text()
        assert not heading or re.search(rf"^#+ {heading}$", text, re.MULTILINE), (
            f"docs/{page} has no heading {heading!r}"
        )
    notes = re.compile(r"\b(SEMANTICS|DECISIONS|QUALITY|SURFACE|ARCHITECTURE) [0-9]")
    assert not [path for path in sources if notes.search(path.read_text())]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_their_anchors_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#?([^)\s:]*)\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def test_the_page_about_the_code_names_files_and_parts_that_are_there():
    named = re.findall(r"`([^`\n]+)`", (ROOT / "docs/architecture.md").read_text())
    files = [p for folder in ("acm_compiler", "tests", "scripts", "benchmarks") for p in (ROOT / folder).rglob("*")]
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in files]
    code = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".h"))
    for name in named:
        if re.fullmatch(r"(?!\d)[\w/]+\.(py|h)", name):
            assert any(path.endswith(f"/{name}") for path in paths), f"{name} is no file"
        elif re.fullmatch(r"(?!\d)\w+((\.|::)\w+)*", name):
            assert re.search(rf"\b{name.replace('::', '.').split('.')[-1]}\b", code), f"{name} is nowhere in the code"
