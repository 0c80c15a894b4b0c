import importlib.util
from pathlib import Path

import pytest

from sglang.kernels import cpu_extension
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.fp4_backends.flashinfer import AUTO_TABLE
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.server_args import field_specs

SCRIPT = Path(__file__).parents[1] / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_in_the_repository_are_fresh(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_pages_do_not_depend_on_the_machine(generate, monkeypatch, tmp_path):
    def asked(*arguments):
        raise AssertionError("a page depends on this machine")

    for name in ("load", "unavailable", "fix"):
        monkeypatch.setattr(cpu_extension, name, asked)
    monkeypatch.setattr("shutil.which", asked)
    monkeypatch.setattr("subprocess.run", asked)
    assert generate.main([], tmp_path) == 0


def test_check_finds_stale_and_missing_pages(generate, tmp_path, capsys):
    assert generate.main(["--check"], tmp_path) == 1
    assert generate.main([], tmp_path) == 0
    assert generate.main(["--check"], tmp_path) == 0
    page = tmp_path / "server_arguments.md"
    page.write_text(page.read_text().replace("30000", "30001"))
    capsys.readouterr()
    assert generate.main(["--check"], tmp_path) == 1
    assert "stale: server_arguments.md" in capsys.readouterr().err
    assert "30001" in page.read_text()  # a check writes nothing


def test_pages_are_complete(generate):
    arguments = generate.server_arguments()
    assert all(f"`{name}`" in arguments for spec in field_specs() for name in spec.names)
    assert all(variable.name in generate.environment_variables() for variable in envs.all())
    hardware = generate.supported_hardware()
    assert all(f"`{name}`" in hardware for name in backends())


def test_every_row_of_a_table_has_its_columns(generate):
    for render in generate.PAGES.values():
        columns = None
        for line in render().splitlines():
            if not line.startswith("|"):
                columns = None
                continue
            count = line.replace("\\|", "").count("|")
            columns = columns or count
            assert count == columns, line


def test_hardware_page_says_what_the_registry_says(generate):
    rows = [line.strip("| ").split(" | ") for line in generate.supported_hardware().splitlines() if line[:1] == "|"]
    header = rows[0]
    by_device = {row[0]: dict(zip(header, row, strict=True)) for row in rows[2:] if len(row) == len(header)}
    capabilities = {"7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "10.7", "11.0", "12.0", "12.1"}
    assert set(by_device) == {*capabilities, "CPU"}
    assert all(row["`torch`"] == "yes" for row in by_device.values())
    assert by_device["9.0"]["`cutlass`"].startswith("no [")
    assert by_device["10.0"]["`cutlass`"].startswith("yes / no [")
    for row in AUTO_TABLE:
        device = ".".join(map(str, row.capability))
        assert device in by_device
        assert by_device[device]["`auto`, W4A4"].strip("`") in row.order


def test_hardware_page_has_the_order_of_auto_with_its_reasons(generate):
    page = generate.supported_hardware()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    for row in AUTO_TABLE:
        order = ", ".join(f"`{name}`" for name in row.order)
        expected = [".".join(map(str, row.capability)), row.condition or "any", order, row.reason, row.source]
        assert expected in rows


def test_hardware_page_has_the_command_for_what_is_missing(generate):
    page = generate.supported_hardware()
    answers = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    by_answer = {row[1]: (row[0], row[2]) for row in answers}
    names, command = by_answer["needs FlashInfer, which is not installed"]
    assert all(f"`{name}`" in names for name in ("cudnn", "cutlass", "cutedsl", "trtllm", "b12x"))
    assert "pip install 'sglang-nvfp4[cuda13]'" in command
    assert any("nvidia-cutlass-dsl" in answer and "cutedsl" in names for answer, (names, _) in by_answer.items())
    assert not any("`torch`" in names for names, _ in by_answer.values())  # it needs nothing
