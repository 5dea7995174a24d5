"""Set-up from nothing: which Python is chosen, what the locks promise, and when .venv is made anew.

The interpreters here are stand-ins that write down how they are called; CI runs the real thing.
"""

import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$1 $2" in
    "-c import sys"*) echo "{version}" ;;
    "-c import ensurepip"*) exit {no_venv} ;;
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip") exit ${{PIP_FAILS:-0}} ;;
esac
"""


class Checkout:
    """A copy of what set-up reads, and a PATH with nothing but what the test puts there and the system's own tools."""

    def __init__(self, directory):
        self.root, self.bin, self.calls = directory / "checkout", directory / "bin", directory / "calls"
        for name in (
            "scripts/setup.sh",
            "Makefile",
            "pyproject.toml",
            "requirements/base.lock",
            "requirements/dev.lock",
            "requirements/gpu.lock",
        ):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.bin.mkdir()
        for tool in ("sh", "cat", "cmp", "grep", "dirname", "basename", "mkdir", "cp", "rm", "make", "pwd"):
            os.symlink(shutil.which(tool), self.bin / tool)

    def add(self, name, text):
        path = self.bin / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def add_python(self, name, version, no_venv=0):
        self.add(name, FAKE_PYTHON.format(version=version, no_venv=no_venv))

    def run(self, *command, **environment):
        """(exit code, what was printed, how the interpreters were called to make .venv and install)."""
        self.calls.write_text("")
        finished = subprocess.run(
            command,
            cwd=self.root,
            env={"PATH": str(self.bin), "CALLS": str(self.calls)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        calls = [call for call in self.calls.read_text().splitlines() if " -m " in call]
        return finished.returncode, finished.stdout, calls

    def edit(self, name, extra):
        with (self.root / name).open("a") as file:
            file.write(extra)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def chosen(calls):
    """The interpreter that made .venv."""
    [name] = [call.split()[0] for call in calls if call.endswith("-m venv --clear .venv")]
    return name


def installed(calls):
    """The locks that were installed."""
    return [lock for call in calls if "-m pip" in call for lock in re.findall(r"requirements/(\w+)\.lock", call)]


def test_from_nothing(checkout):
    checkout.add_python("python3", "3.12")
    code, printed, calls = checkout.run("make", "venv")
    assert code == 0, printed
    assert chosen(calls) == "python3"
    assert installed(calls) == ["base"]
    locked, editable = (call for call in calls if "-m pip" in call)
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(locked.split())
    assert {"--no-deps", "--no-index", "--no-build-isolation", "--editable"} <= set(editable.split())


def test_what_is_there_is_not_made_again(checkout):
    checkout.add_python("python3", "3.12")
    checkout.run("make", "venv")
    assert checkout.run("make", "venv") == (0, "", [])


def test_the_dev_environment_holds_the_base_one(checkout):
    checkout.add_python("python3", "3.12")
    assert installed(checkout.run("scripts/setup.sh", "base")[2]) == ["base"]
    code, _, calls = checkout.run("scripts/setup.sh", "dev")
    assert (code, installed(calls)) == (0, ["dev"])
    assert not [call for call in calls if "-m venv" in call], "the environment is added to, not made again"
    for name in ("base", "dev"):
        assert checkout.run("scripts/setup.sh", name) == (0, "", [])


def test_the_gpu_compiler_lies_beside_the_environment(checkout):
    """Inside it, JAX would try the CUDA plugin in every process."""
    checkout.add_python("python3", "3.12")
    code, _, calls = checkout.run("scripts/setup.sh", "gpu")
    assert (code, installed(calls)) == (0, ["base", "gpu"])
    (call,) = (call for call in calls if "gpu.lock" in call)
    assert {"--require-hashes", "--no-deps", "--target", ".venv/gpu-compiler"} <= set(call.split())
    assert checkout.run("scripts/setup.sh", "gpu") == (0, "", [])
    checkout.edit("requirements/gpu.lock", "# changed\n")
    assert installed(checkout.run("scripts/setup.sh", "gpu")[2]) == ["gpu"]


@pytest.mark.parametrize("changed", ["requirements/base.lock", "pyproject.toml"])
def test_a_changed_lock_or_project_is_installed(checkout, changed):
    checkout.add_python("python3", "3.12")
    checkout.run("make", "venv")
    checkout.edit(changed, "# changed\n")
    code, _, calls = checkout.run("make", "venv")
    assert (code, installed(calls)) == (0, ["base"])


def test_a_moved_checkout_is_installed_again(checkout):
    """The environment holds absolute paths."""
    checkout.add_python("python3", "3.12")
    checkout.run("make", "venv")
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root = moved
    assert installed(checkout.run("make", "venv")[2]) == ["base"]


def test_an_installation_that_failed_is_tried_again(checkout):
    checkout.add_python("python3", "3.12")
    code, _, _ = checkout.run("make", "venv", PIP_FAILS="1")
    assert code != 0
    assert installed(checkout.run("make", "venv")[2]) == ["base"]


def test_an_environment_of_an_old_python_is_replaced(checkout):
    checkout.add_python("python3", "3.12")
    (checkout.root / ".venv/bin").mkdir(parents=True)
    checkout.add_python("old", "3.11")
    shutil.move(checkout.bin / "old", checkout.root / ".venv/bin/python")
    assert chosen(checkout.run("make", "venv")[2]) == "python3"


@pytest.mark.parametrize(
    ("interpreters", "expected"),
    [
        ({"python3": "3.12"}, "python3"),
        ({"python3": "3.14"}, "python3"),
        ({"python3": "3.11", "python3.12": "3.12"}, "python3.12"),
        ({"python3": "3.15", "python3.13": "3.13", "python3.12": "3.12"}, "python3.13"),
        ({"python3.12": "3.12"}, "python3.12"),
    ],
)
def test_the_first_python_that_will_do(checkout, interpreters, expected):
    for name, version in interpreters.items():
        checkout.add_python(name, version)
    assert chosen(checkout.run("make", "venv")[2]) == expected


def test_an_interpreter_named_by_the_user_comes_first(checkout):
    checkout.add_python("python3", "3.12")
    checkout.add_python("mine", "3.13")
    assert chosen(checkout.run("make", "venv", PYTHON="mine")[2]) == "mine"
    shutil.rmtree(checkout.root / ".venv")
    assert chosen(checkout.run("make", "venv", f"PYTHON={checkout.bin}/mine")[2]) == "mine"


def test_an_interpreter_that_does_not_run_is_passed_over(checkout):
    """Version managers put a shim on the PATH for versions that are not installed."""
    checkout.add("python3", "#!/bin/sh\necho 'pyenv: version 3.12 is not installed' >&2\nexit 127\n")
    checkout.add("python3.14", "no program at all")
    checkout.add_python("python3.13", "3.13")
    assert chosen(checkout.run("make", "venv")[2]) == "python3.13"


def test_too_old_a_python_gets_a_clear_message(checkout):
    checkout.add_python("python3", "3.9")
    checkout.add_python("python3.12", "3.12", no_venv=1)
    code, printed, calls = checkout.run("make", "quickstart")
    assert code != 0
    assert "jaxpar needs Python 3.12, 3.13 or 3.14. Found:" in printed
    assert "python3 is Python 3.9" in printed
    assert "python3.12 is Python 3.12, but without its venv module" in printed
    assert "apt install python3.12-venv" in printed
    assert "make PYTHON=" in printed
    assert calls == []
    assert not (checkout.root / ".venv").exists()


def test_no_python_at_all_gets_a_clear_message(checkout):
    code, printed, _ = checkout.run("make", "test")
    assert code != 0
    assert "no python3 that runs" in printed


def locked(name):
    """Requirement and number of hashes of each entry of a lock."""
    entries = (ROOT / f"requirements/{name}.lock").read_text().replace("\\\n", " ").splitlines()
    found = {}
    for entry in filter(None, entries):
        requirement, *hashes = entry.split("--hash=sha256:")
        parsed = Requirement(requirement.strip())
        assert parsed.name not in found, f"{parsed.name} is locked twice"
        found[parsed.name] = (parsed, len(hashes))
    return found


@pytest.mark.parametrize("name", ["base", "dev", "gpu"])
def test_every_entry_of_a_lock_is_one_version_with_hashes_and_without_an_address(name):
    text = (ROOT / f"requirements/{name}.lock").read_text()
    assert not re.search(r"://|--index|--find-links|--extra-index|--trusted-host", text)
    for requirement, hashes in locked(name).values():
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), requirement
        assert hashes > 0, requirement


def test_the_dev_lock_holds_the_base_lock():
    base, dev = locked("base"), locked("dev")
    assert {name: str(dev[name][0]) for name in base} == {
        name: str(requirement) for name, (requirement, _) in base.items()
    }


def test_the_gpu_lock_holds_only_what_the_dev_lock_does_not():
    assert not locked("gpu").keys() & locked("dev").keys()


def test_the_locks_hold_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {
        "base": [*project["project"]["dependencies"], *project["dependency-groups"]["build"]],
        "dev": project["dependency-groups"]["dev"],
        "gpu": project["project"]["optional-dependencies"]["plan-gpu"],
    }
    for name, requirements in asked.items():
        entries = {entry.lower(): requirement for entry, (requirement, _) in locked(name).items()}
        for requirement in map(Requirement, requirements):
            version = str(entries[requirement.name.lower()].specifier).removeprefix("==")
            assert requirement.specifier.contains(version), f"{requirement} but {name}.lock has {version}: make lock"


def test_the_names_that_scripts_rely_on():
    makefile = (ROOT / "Makefile").read_text()
    assert {"venv", "quickstart", "test", "lint", "proof"} <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    for script in (".ci/run", "scripts/setup.sh", "scripts/make_lock.sh"):
        assert os.access(ROOT / script, os.X_OK), f"{script} is not executable"


@pytest.mark.parametrize(
    ("closing", "passes"),
    [
        ("==== 12 passed in 3.21s ====", True),
        ("==== 12 passed, 3 deselected in 3.21s ====", True),
        ("==== 12 passed, 1 skipped in 3.21s ====", False),
        ("==== 1 skipped, 3 deselected in 3.21s ====", False),
        ("12 passed, 1 skipped in 603.21s (0:10:03)", False),
        ("no tests ran", False),
    ],
)
def test_ci_takes_a_skipped_test_for_a_failure(tmp_path, closing, passes):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    targets = f'lint:\n\t@echo linted\ntest:\n\t@echo "1 passed in 0.10s"\nproof:\n\t@echo "{closing}"\n'
    (tmp_path / "Makefile").write_text(targets)
    finished = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True)
    assert (finished.returncode == 0) == passes, finished.stderr
    assert closing in finished.stdout


@pytest.mark.parametrize("fails", ["lint", "test", "proof"])
def test_ci_ends_at_the_first_failure(tmp_path, fails):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    lines = {name: "@exit 3" if name == fails else f"@echo made {name}" for name in ("lint", "test", "proof")}
    (tmp_path / "Makefile").write_text("".join(f"{name}:\n\t{line}\n" for name, line in lines.items()))
    finished = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True)
    assert finished.returncode != 0
    names = list(lines)
    assert [name for name in names if f"made {name}\n" in finished.stdout] == names[: names.index(fails)]
