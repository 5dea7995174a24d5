"""Guards over the whole source tree: imports go one way, what needs no JAX imports none, and names say something."""

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ORDER = (
    "families",
    "config",
    "events",
    "schedule",
    "plan",
    "compiler_options",
    "mesh",
    "sharding",
    "collectives",
    "model",
    "trained",
    "pipeline",
    "placement",
    "loss",
    "optim",
    "state",
    "strategy",
    "step",
    "stages",
    "program",
    "audit",
    "data",
    "own_model",
    "checkpoint",
    "hf",
    "resume",
    "reshard",
    "convert",
    "runtime",
    "loop",
    "trainer",
    "experiments",
    "cli",
)
"""Each part of the package may import only those before it, and itself."""

SEES_EVENTS = ("events", "loop", "trainer", "experiments", "cli")
"""Everything else is handed a progress object: events are never imported sideways."""

LAZY = ("jaxpar", "jaxpar.cli", "jaxpar.data", "jaxpar.schedule")
"""Where a module may be imported by name at run time, so that ``--help`` and ``data prepare`` start without JAX."""

NO_JAX = ("families", "config", "events", "schedule", "plan")
"""Parts that must work, and start fast, where JAX is not wanted."""
NO_JAX_MODULES = ("jaxpar", "jaxpar.cli.main", "jaxpar.data.prepare", "jaxpar.data.dataset")

EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc", "base", "core", "lib"}


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every file of the package."""
    found = {}
    for path in sorted((ROOT / "jaxpar").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def resolved(node: ast.Import | ast.ImportFrom, importer: str) -> list[str]:
    """Dotted names that an import statement asks for; ``from a import b`` gives a.b if that is a module, else a."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"{importer} line {node.lineno}: write imports with the full name"
    return [
        f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules() else node.module
        for alias in node.names
    ]


def imports_by_name(node: ast.Call) -> list[str]:
    """Modules named in a call of ``importlib.import_module`` or ``__import__``."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("import_module", "__import__"):
        return []
    return [argument.value if isinstance(argument, ast.Constant) else "" for argument in node.args[:1]]


def all_imports(name: str) -> list[tuple[int, str]]:
    """(line, imported module) of every import in a module, inside functions too."""
    found = []
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(node.lineno, target) for target in resolved(node, name)]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, target) for target in imports_by_name(node)]
    return found


def part(name: str) -> str | None:
    """The entry of ``ORDER`` that a module belongs to; None outside the package and for its ``__init__``."""
    head, _, rest = name.partition(".")
    return (rest.partition(".")[0] or None) if head == "jaxpar" else None


def forbidden(importer: str, imported: str) -> str | None:
    """Why one module must not import another, or None."""
    above, below = part(imported), part(importer)
    if above is None or below in (None, "__main__"):
        return None
    if ORDER.index(above) > ORDER.index(below):
        return f"{above} comes after {below}"
    if above == "events" and below not in SEES_EVENTS:
        return "progress is passed in, never imported"
    if below == "checkpoint" and above == "model":
        return "checkpoints see pytrees, shardings and key maps, never model code"
    return None


def test_every_module_has_its_place():
    unknown = {name for name in modules() if part(name) not in (None, "__main__", *ORDER)}
    assert not unknown, f"give {sorted(unknown)} a place in ORDER"


@pytest.mark.parametrize(
    ("importer", "imported", "legal"),
    [
        ("jaxpar.step", "jaxpar.model.decoder", True),
        ("jaxpar.model.layers", "jaxpar.loss", False),
        ("jaxpar.checkpoint.store", "jaxpar.families.keymap", True),
        ("jaxpar.checkpoint.store", "jaxpar.model.decoder", False),
        ("jaxpar.data.loader", "jaxpar.events", False),
        ("jaxpar.audit.report", "jaxpar.program", True),
        ("jaxpar.program", "jaxpar.audit", False),
        ("jaxpar.config.load", "jaxpar.plan.rules", False),
        ("jaxpar.loss", "jax.numpy", True),
    ],
)
def test_the_rule_itself(importer, imported, legal):
    assert (forbidden(importer, imported) is None) == legal


def test_imports_go_one_way():
    wrong = [
        f"{name} line {line} imports {target}: {reason}"
        for name in modules()
        for line, target in all_imports(name)
        if (reason := forbidden(name, target))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles():
    graph = {
        name: {target for _, target in all_imports(name) if target in modules() and target not in (name, "jaxpar")}
        for name in modules()
        if name != "jaxpar"
    }
    # A package's __init__ collects its own modules; they do not import it back.
    order = tuple(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) == len(graph)


def optional_packages() -> set[str]:
    """Import names of the optional dependencies."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [requirement for group in extras.values() for requirement in group]
    names = {requirement.partition("[")[0].partition("=")[0].partition(">")[0].strip() for requirement in requirements}
    return names - {"jax"}


def test_imports_stand_at_the_top():
    """Except optional dependencies, and lazy imports by name where ``LAZY`` allows them."""
    optional, wrong = optional_packages(), []
    for name, tree in modules().items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    wrong += [
                        f"{name} line {node.lineno} imports {target} inside a function"
                        for target in resolved(node, name)
                        if target.partition(".")[0] not in optional
                    ]
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and imports_by_name(node) and not name.startswith("jaxpar.cli."):
                wrong += [f"{name} line {node.lineno} imports by name"] if name not in LAZY else []
    assert not wrong, "\n".join(wrong)


def test_no_jax_where_none_is_needed():
    """In a fresh process: no module of these parts, nor the command line, brings JAX or what stands on it in."""
    names = [name for name in modules() if part(name) in NO_JAX] + [
        name for name in NO_JAX_MODULES if name in modules()
    ]
    program = (
        "import importlib, sys\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'grain'}\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    found = {module.partition('.')[0] for module in sys.modules} & heavy\n"
        "    assert not found, f'{name} imports {sorted(found)}'\n"
    )
    finished = subprocess.run([sys.executable, "-c", program, *names], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_files_are_named_after_an_idea():
    files = [path for folder in ("jaxpar", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    empty = [str(path.relative_to(ROOT)) for path in files if EMPTY_NAMES & set(path.stem.split("_"))]
    assert not empty, f"name these after what they hold: {empty}"


def defined_names(tree: ast.Module) -> set[str]:
    """Names of functions, classes, arguments and assigned variables and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def is_vague(name: str) -> bool:
    """Names that this project does not use, because each means several things elsewhere."""
    return name in {"rank", "world_size", "batch_size", "mp", "mubatch"} or name.startswith(
        ("maybe_", "ici_", "dcn_", "dp_", "tp_", "pp_", "ep_")
    )


def test_terms_are_those_of_the_field():
    wrong = {name: vague for name, tree in modules().items() if (vague := set(filter(is_vague, defined_names(tree))))}
    assert not wrong, f"say process, device count, global_batch_size, rows, or the axis's name: {wrong}"
