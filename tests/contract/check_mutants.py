"""Whether the contract tests notice deliberate faults: each is put into a copy of the package, and at least one test
must fail. Prints fault and test; the exit status is 1 if a fault goes unnoticed. Run by ``make mutants``.

The faults of what only FlashInfer 0.7 has need one: give its folder with ``--flashinfer-07``.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "python/sglang", "tests/contract", "tests/fixtures/numerics.safetensors")


def copy_tree(to: Path) -> None:
    for name in COPIED:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)


def run_tests(tree: Path, tests: str = "tests/contract") -> tuple[int, str]:
    """Exit status and output of the contract tests of a copy, up to the first failure.

    They run in a fork, so that torch and FlashInfer are imported once for all; the package never is before.
    """
    log = tree / "output.txt"
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, log.read_text()
    os.chdir(tree)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    result = int(pytest.main([tests, "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]))
    if not (sys.modules["sglang"].__file__ or "").startswith(str(tree)):
        print("another sglang was tested")
        result = 99
    sys.stdout.flush()
    os._exit(result)


def killer(mutant: Mutant, tree: Path) -> str | None:
    """The test that fails with the fault in; None if none does."""
    path = tree / mutant.file
    source = path.read_text()
    found = source.count(mutant.old)
    if found != 1:
        sys.exit(f"{mutant.fault}: {mutant.old!r} stands {found} times in {mutant.file}, not once")
    path.write_text(source.replace(mutant.old, mutant.new))
    status, output = run_tests(tree, f"tests/contract/test_contract_{mutant.first}.py")
    if status == 0:
        status, output = run_tests(tree)
    path.write_text(source)
    failed = re.search(r"^FAILED tests/contract/(.+?)(?: - |$)", output, re.MULTILINE)
    if status == 0:
        return None
    if status != 1 or failed is None:  # a fault that can't be imported shows nothing
        sys.exit(f"{mutant.fault}: the tests could not run\n{output}")
    return failed[1]


def check(mutants: list[Mutant], flashinfer: Path | None) -> int:
    """How many go unnoticed by the tests with the FlashInfer of that folder."""
    if flashinfer is not None:
        sys.path.insert(0, str(flashinfer.resolve()))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = folder
        import flashinfer as package
        import torch

        torch.set_num_threads(1)
        tree = Path(folder).resolve()
        copy_tree(tree)
        status, output = run_tests(tree)
        if status != 0:
            sys.exit(f"the contract tests fail without any fault\n{output}")
        survivors = 0
        print(f"{len(mutants)} faults, FlashInfer {package.__version__}")
        for mutant in mutants:
            test = killer(mutant, tree)
            survivors += test is None
            print(f"{mutant.fault:42} {test or 'NOT NOTICED'}", flush=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer-07", type=Path, metavar="FOLDER", help="where FlashInfer 0.7 is installed")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this text")
    args = parser.parse_args()
    sys.dont_write_bytecode = True  # a fault must not be taken from the cache of another
    sys.path.remove(str(Path(__file__).parent))
    survivors = 0
    for v07 in (False, True):
        chosen = [m for m in MUTANTS if args.only in m.fault and (m.first == "w4a16") == v07]
        if chosen and v07 and args.flashinfer_07 is None:
            print(f"{len(chosen)} faults not tried: they need --flashinfer-07")
        elif chosen:
            sys.stdout.flush()
            child = os.fork()  # a process has one FlashInfer
            if not child:
                unnoticed = check(chosen, args.flashinfer_07 if v07 else None)
                sys.stdout.flush()
                os._exit(min(unnoticed, 99))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            survivors += status
    print(f"{survivors} not noticed" if survivors else "every fault was noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
