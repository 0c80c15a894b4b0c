import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from flag_lines import parse, refusal
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.errors import ArgumentError
from sglang.srt.server_args import ServerArgs, describe, field_specs, make_parser, prepare_server_args
from sglang.srt.upstream_flags import REFUSED_VALUES, REPLACED_FLAGS, UPSTREAM_FAMILIES, UPSTREAM_FLAGS

PYTHON_FOLDER = Path(__file__).parents[2] / "python"
OUR_FLAGS = {name for spec in field_specs() for name in spec.names}


def test_every_flag_reaches_its_field():
    given = {
        "--model": ("model_path", "org/name"),
        "--tokenizer-path": ("tokenizer_path", "t"),
        "--revision": ("revision", "v2"),
        "--context-length": ("context_length", 512),
        "--load-format": ("load_format", "dummy"),
        "--host": ("host", "0.0.0.0"),
        "--port": ("port", 4321),
        "--served-model-name": ("served_model_name", "name"),
        "--log-level": ("log_level", "debug"),
        "--device": ("device", "cpu"),
        "--dtype": ("dtype", "half"),
        "--quantization": ("quantization", "w4a16_nvfp4"),
        "--kv-cache-dtype": ("kv_cache_dtype", "fp8_e4m3"),
        "--fp4-gemm-backend": ("fp4_gemm_runner_backend", "FlashInfer_cudnn"),
        "--fp4-gemm-autotune": ("fp4_gemm_autotune", "off"),
        "--attention-backend": ("attention_backend", "cpu"),
        "--cuda-graph-backend-prefill": ("cuda_graph_backend_prefill", "breakable"),
        "--cuda-graph-max-bs-prefill": ("cuda_graph_max_bs_prefill", 500),
        "--cuda-graph-max-bs": ("cuda_graph_max_bs", 6),
        "--random-seed": ("random_seed", 7),
        "--mem-fraction-static": ("mem_fraction_static", 0.5),
        "--max-total-tokens": ("max_total_tokens", 1000),
        "--max-running-requests": ("max_running_requests", 3),
        "--chunked-prefill-size": ("chunked_prefill_size", 64),
        "--page-size": ("page_size", 16),
        "--tp": ("tp_size", 4),
        "--nnodes": ("nnodes", 2),
        "--node-rank": ("node_rank", 1),
        "--dist-init-addr": ("dist_init_addr", "10.0.0.1:5000"),
        "--dist-timeout": ("dist_timeout", 60),
        "--trust-remote-code": ("trust_remote_code", True),
        "--skip-server-warmup": ("skip_server_warmup", True),
        "--disable-overlap-schedule": ("disable_overlap_schedule", True),
        "--disable-radix-cache": ("disable_radix_cache", True),
        "--api-key": ("api_key", "key"),
        "--admin-api-key": ("admin_api_key", "other key"),
        "--fastapi-root-path": ("fastapi_root_path", "/llm"),
        "--ssl-keyfile": ("ssl_keyfile", "key.pem"),
        "--ssl-certfile": ("ssl_certfile", "cert.pem"),
        "--ssl-ca-certs": ("ssl_ca_certs", "ca.pem"),
        "--ssl-keyfile-password": ("ssl_keyfile_password", "pass"),
        "--enable-metrics": ("enable_metrics", True),
        "--log-level-http": ("log_level_http", "warning"),
        "--log-requests": ("log_requests", True),
        "--log-requests-level": ("log_requests_level", 1),
        "--max-queued-requests": ("max_queued_requests", 5),
        "--chat-template": ("chat_template", "t.jinja"),
        "--grammar-backend": ("grammar_backend", "none"),
        "--constrained-json-max-whitespace-cnt": ("constrained_json_max_whitespace_cnt", 2),
        "--tool-call-parser": ("tool_call_parser", "hermes"),
        "--reasoning-parser": ("reasoning_parser", "qwen3"),
        "--sampling-defaults": ("sampling_defaults", "openai"),
    }
    excluded = {  # by --constrained-json-max-whitespace-cnt, and the others by --cuda-graph-max-bs
        "constrained_json_disable_any_whitespace": False,
        "cuda_graph_bs": None,
        "cuda_graph_bs_prefill": None,
        "disable_cuda_graph": False,
    }
    assert {name for name, _ in given.values()} | set(excluded) == {
        item.name for item in dataclasses.fields(ServerArgs)
    }
    argv = []
    for flag, (_, value) in given.items():
        argv += [flag] if value is True else [flag, str(value)]
    args = prepare_server_args(argv)
    assert dataclasses.asdict(args) == dict(given.values()) | excluded
    assert parse("--constrained-json-disable-any-whitespace").constrained_json_disable_any_whitespace


def test_defaults():
    args = parse("")
    assert (args.host, args.port) == ("127.0.0.1", 30000)
    assert args.tokenizer_path == args.served_model_name == "m"
    assert (args.device, args.quantization, args.context_length, args.mem_fraction_static) == (None, None, None, None)
    assert (args.page_size, args.tp_size, args.disable_radix_cache) == (1, 1, False)
    assert (args.fp4_gemm_runner_backend, args.fp4_gemm_autotune) == ("auto", "cached")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("--fp4-gemm-autotune", "on"),
        ("--fp4-gemm-autotune --port 1", "on"),
        ("--port 1 --fp4-gemm-autotune off", "off"),
        ("--fp4-gemm-autotune=cached", "cached"),
    ],
)
def test_a_flag_that_may_stand_without_a_value(text, value):
    assert parse(text).fp4_gemm_autotune == value
    assert ServerArgs.from_kwargs(model_path="m", fp4_gemm_autotune=value).fp4_gemm_autotune == value


def test_a_flag_with_several_values():
    for text in ("--cuda-graph-bs 1 2 16", "--cuda-graph-bs 1 2 16 --port 1"):
        assert parse(text).cuda_graph_bs == (1, 2, 16)
    assert ServerArgs.from_kwargs(model_path="m", cuda_graph_bs=[1, 2, 16]).cuda_graph_bs == (1, 2, 16)
    assert parse("--disable-cuda-graph").disable_cuda_graph
    for values, words in (
        ([], "one or several"),
        (3, "one or several"),
        ([2, 1.5], "an integer"),
        ([2, 0], "1 or more"),
    ):
        with pytest.raises(ArgumentError, match=f"--cuda-graph-bs must be {words}"):
            ServerArgs.from_kwargs(model_path="m", cuda_graph_bs=values)


def test_seed_is_drawn_once_and_survives_pickling():
    args = parse("")
    assert pickle.loads(pickle.dumps(args)) == args
    assert len({parse("").random_seed for _ in range(4)}) > 1


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("").port = 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--port 0", ["--port", "1", "0"]),
        ("--port 65536", ["--port", "65535", "65536"]),
        ("--port x", ["--port", "'x'"]),
        ("--port", ["--port"]),
        ("--mem-fraction-static 0", ["--mem-fraction-static", "more than 0"]),
        ("--mem-fraction-static 1.01", ["--mem-fraction-static", "1 or less"]),
        ("--mem-fraction-static nan", ["--mem-fraction-static", "nan"]),
        ("--max-total-tokens 0", ["--max-total-tokens"]),
        ("--max-running-requests 0", ["--max-running-requests"]),
        ("--context-length -1", ["--context-length"]),
        ("--page-size 0", ["--page-size"]),
        ("--random-seed -1", ["--random-seed"]),
        ("--chunked-prefill-size 0", ["--chunked-prefill-size", "-1"]),
        ("--chunked-prefill-size -2", ["--chunked-prefill-size"]),
        ("--chunked-prefill-size 8 --page-size 16", ["--chunked-prefill-size 8", "--page-size 16"]),
        ("--chunked-prefill-size 24 --page-size 16", ["multiple"]),
        ("--max-total-tokens 8 --page-size 16", ["--max-total-tokens 8", "--page-size 16"]),
        ("--tp-size 0", ["--tp-size", "1 or more"]),
        ("--attention-backend triton", ["triton is not in this version yet", "auto, cpu, flashinfer, torch_native"]),
        ("--attention-backend foo", ["'foo'", "torch_native"]),
        ("--fp4-gemm-autotune always", ["--fp4-gemm-autotune", "'always'", "on, cached, off"]),
        ("--fp4-gemm-autotune=", ["--fp4-gemm-autotune", "''", "on, cached, off"]),
        ("--quantization fp8", ["fp8 is not supported by this version", "modelopt_fp4"]),
        ("--quantization nvfp5", ["did you mean 'nvfp4'", "modelopt_fp4, compressed-tensors, nvfp4, w4a16_nvfp4"]),
        ("--kv-cache-dtype fp8_e5m2", ["fp8_e5m2 is not supported", "fp8_e4m3"]),
        ("--dtype fp16", ["'fp16'", "float16"]),
        ("--load-format gguf", ["gguf is not supported", "safetensors"]),
        ("--log-level INFO", ["did you mean 'info'"]),
        ("--device xpu", ["xpu is not supported", "cpu, cuda"]),
        ("--served-model-name= --host=", ["--host must not be empty"]),
        ("--enable-lora", ["--enable-lora", "known from SGLang"]),
        ("--speculative-num-steps=3", ["--speculative-num-steps is known from SGLang"]),
        ("--max-model-len 4", ["--max-model-len", "use --context-length"]),
        ("--disable-radix-cach", ["unknown argument --disable-radix-cach", "'--disable-radix-cache'"]),
        ("--page_size 4", ["did you mean '--page-size'"]),
        ("--ssl-keyfile k", ["--ssl-keyfile and --ssl-certfile belong together"]),
        ("--ssl-ca-certs c", ["--ssl-ca-certs says nothing without --ssl-keyfile"]),
        ("--fastapi-root-path llm", ["--fastapi-root-path must begin with /"]),
        ("--fastapi-root-path /llm/", ["--fastapi-root-path must begin with /"]),
        ("--log-requests-level 4", ["--log-requests-level must be 3 or less"]),
        ("--max-queued-requests 0", ["--max-queued-requests must be 1 or more"]),
        ("--api-key=", ["--api-key must not be empty"]),
        ("--zzz", ["unknown argument --zzz"]),
        ("--disable-radix-cache=1", ["--disable-radix-cache"]),
        ("surplus", ["surplus"]),
    ],
)
def test_refused_by_name(text, words):
    message = refusal(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "text",
    [
        "--chunked-prefill-size -1",
        "--chunked-prefill-size -1 --page-size 3",
        "--chunked-prefill-size 16 --page-size 16",
        "--mem-fraction-static 1",
        "--mem-fraction-static 0.001",
        "--port 1",
        "--port 65535",
        "--tensor-parallel-size 4 --device cpu",
        "--kv-cache-dtype bf16",
        "--max-total-tokens 16 --page-size 16",
    ],
)
def test_edges_accepted(text):
    parse(text)


def test_no_model():
    with pytest.raises(ArgumentError, match="--model-path"):
        prepare_server_args([])
    with pytest.raises(ArgumentError, match="--model-path must not be empty"):
        prepare_server_args(["--model-path", " "])


def test_unknown_flag_is_reported_before_a_missing_one():
    with pytest.raises(ArgumentError, match="--dp-size is known"):
        prepare_server_args(["--dp-size", "2"])


def test_abbreviations_are_not_guessed():
    assert "--mem-fraction-static" in refusal("--mem-fraction 0.5")


def test_upstream_tables_do_not_hide_what_exists():
    assert sorted(OUR_FLAGS - UPSTREAM_FLAGS) == ["--fp4-gemm-autotune", "--tp"]
    assert not OUR_FLAGS & set(REPLACED_FLAGS)
    assert not [flag for flag in OUR_FLAGS if flag.startswith(UPSTREAM_FAMILIES)]
    assert {replacement.partition(" ")[0] for replacement in REPLACED_FLAGS.values()} <= OUR_FLAGS
    specs = {spec.name: spec for spec in field_specs()}
    for name, values in REFUSED_VALUES.items():
        assert not set(values) & set(specs[name].choices)


@pytest.mark.parametrize("flag", sorted((UPSTREAM_FLAGS | set(REPLACED_FLAGS)) - OUR_FLAGS))
def test_every_upstream_flag_that_is_not_ours_is_refused_with_and_without_value(flag):
    for text in (flag, f"{flag} 1", f"{flag}=1"):
        assert flag in refusal(text)


def test_cuda_without_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = refusal("--device cuda")
    assert "--device cuda" in message
    assert "--device cpu" in message


def test_ranks_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("", "--device cuda"):
        assert parse(f"--tp-size 2 {device}").tp_size == 2
        assert "--tp-size 3: this machine has 2 GPU(s)" in refusal(f"--tp-size 3 {device}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert parse("--tp-size 3").tp_size == 3


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({}, "model_path is required"),
        ({"model_path": None}, "model_path is required"),
        ({"model_path": 3}, "--model-path must be a string, not 3"),
        ({"model_path": "m", "modelpath": "m"}, "unknown argument modelpath (did you mean 'model_path'?)"),
        ({"model_path": "m", "dp_size": 2}, "dp_size is known from SGLang"),
        ({"model_path": "m", "max_model_len": 2}, "use --context-length"),
        ({"model_path": "m", "port": "30000"}, "--port must be an integer, not '30000'"),
        ({"model_path": "m", "port": True}, "--port must be an integer, not True"),
        ({"model_path": "m", "page_size": 1.0}, "--page-size must be an integer"),
        ({"model_path": "m", "mem_fraction_static": "0.5"}, "--mem-fraction-static must be a number"),
        ({"model_path": "m", "disable_radix_cache": 1}, "--disable-radix-cache must be True or False"),
    ],
)
def test_keywords_refused(keywords, words):
    with pytest.raises(ArgumentError) as caught:
        ServerArgs.from_kwargs(**keywords)
    assert words in str(caught.value)


def test_keyword_none_means_default():
    everything = {spec.name: None for spec in field_specs()} | {"model_path": "m", "random_seed": 1}
    assert ServerArgs.from_kwargs(**everything) == parse("--random-seed 1")


@given(st.integers(-3, 70000), st.integers(-1, 70), st.integers(-3, 300))
def test_constructor_and_command_line_agree(port, page, chunk):
    argv = ["--model", "m", "--random-seed", "1", "--port", str(port)]
    argv += ["--page-size", str(page), "--chunked-prefill-size", str(chunk)]

    def outcome(make):
        try:
            return make()
        except ArgumentError as error:
            return str(error)

    keywords = {"port": port, "page_size": page, "chunked_prefill_size": chunk}
    assert outcome(lambda: prepare_server_args(argv)) == outcome(
        lambda: ServerArgs(model_path="m", random_seed=1, **keywords)
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("example.org", "http://example.org:30000"),
        ("::", "http://[::1]:30000"),
        ("fe80::1", "http://[fe80::1]:30000"),
    ],
)
def test_url(host, url):
    assert parse(f"--host {host}").url() == url


def test_secrets_are_not_shown():
    args = parse("--api-key sesame --admin-api-key barley --ssl-keyfile k --ssl-certfile c --ssl-keyfile-password rye")
    for text in (repr(args), str(args), str(args.shown())):
        assert not [secret for secret in ("sesame", "barley", "rye") if secret in text]
        assert "port" in text and "30000" in text
    assert args.shown()["api_key"] == "***" and parse("").shown()["api_key"] is None
    assert args.url() == "https://127.0.0.1:30000"
    with pytest.raises(ArgumentError) as caught:
        ServerArgs(model_path="m", api_key=20394857)
    assert "--api-key" in str(caught.value) and "20394857" not in str(caught.value)


def test_help_names_every_flag_and_default():
    text = " ".join(make_parser().format_help().split())
    for spec in field_specs():
        assert all(name in text for name in spec.names)
        assert spec.flag.help.endswith(".")
        if spec.default not in (None, "", False):
            assert f"Default: {spec.default}." in describe(spec)


def test_help_imports_no_torch():
    code = "import sys, sglang.srt.server_args as s; s.make_parser().format_help(); print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(PYTHON_FOLDER)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"
