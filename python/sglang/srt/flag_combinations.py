"""What flags have to do with each other: checked when :class:`ServerArgs` is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.errors import ArgumentError
from sglang.srt.utils.net import split_address

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def check_combinations(args: ServerArgs) -> None:
    """Raise ArgumentError where one flag's value doesn't go with another's."""
    chunk = args.chunked_prefill_size
    if chunk != -1 and (chunk < args.page_size or chunk % args.page_size):
        raise ArgumentError(
            f"--chunked-prefill-size {chunk} must be -1 (no limit) or a multiple of --page-size {args.page_size}"
        )
    if args.max_total_tokens is not None and args.max_total_tokens < args.page_size:
        raise ArgumentError(
            f"--max-total-tokens {args.max_total_tokens} is less than one page (--page-size {args.page_size})"
        )
    _check_graphs(args)
    if args.constrained_json_disable_any_whitespace and args.constrained_json_max_whitespace_cnt is not None:
        raise ArgumentError(
            "--constrained-json-max-whitespace-cnt says nothing with --constrained-json-disable-any-whitespace"
        )
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ArgumentError("--ssl-keyfile and --ssl-certfile belong together: give both or neither")
    for name in ("ssl_ca_certs", "ssl_keyfile_password"):
        if getattr(args, name) is not None and args.ssl_keyfile is None:
            raise ArgumentError(f"--{name.replace('_', '-')} says nothing without --ssl-keyfile and --ssl-certfile")
    root = args.fastapi_root_path
    if root is not None and (not root.startswith("/") or root.endswith("/")):
        raise ArgumentError(f"--fastapi-root-path must begin with / and not end with one, not {root!r}")
    _check_nodes(args)


def _check_graphs(args: ServerArgs) -> None:
    """Which steps are recorded."""
    for phase in ("", "_prefill"):
        given = [name for name in (f"cuda_graph_bs{phase}", f"cuda_graph_max_bs{phase}") if getattr(args, name)]
        if len(given) == 2:
            raise ArgumentError(f"{_flag(given[1])} says nothing with {_flag(given[0])}, which lists all sizes")
        if given and phase and args.cuda_graph_backend_prefill == "disabled":
            raise ArgumentError(f"{_flag(given[0])} says nothing with --cuda-graph-backend-prefill disabled")
        if given and args.disable_cuda_graph:
            raise ArgumentError(f"{_flag(given[0])} says nothing with --disable-cuda-graph")
    if args.cuda_graph_backend_prefill == "breakable" and args.disable_cuda_graph:
        raise ArgumentError("--cuda-graph-backend-prefill breakable says nothing with --disable-cuda-graph")


def check_device(args: ServerArgs, device_type: str) -> None:
    """Raise ArgumentError where a flag says nothing on the device that is used."""
    if device_type == "cuda":
        return
    given = [name for name in ("cuda_graph_bs_prefill", "cuda_graph_max_bs_prefill") if getattr(args, name)]
    if args.cuda_graph_backend_prefill == "breakable":
        given.append("cuda_graph_backend_prefill")
    if given:
        raise ArgumentError(f"{_flag(given[0])} says nothing on a CPU, where steps with prompts are not recorded")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_nodes(args: ServerArgs) -> None:
    """Ranks and the machines that they are on."""
    if args.tp_size % args.nnodes:
        raise ArgumentError(
            f"--tp-size {args.tp_size} must be a multiple of --nnodes {args.nnodes}: every machine has as many ranks"
        )
    if args.node_rank >= args.nnodes:
        raise ArgumentError(
            f"--node-rank {args.node_rank} must be less than --nnodes {args.nnodes}: machines are counted from 0"
        )
    if args.nnodes > 1 and args.dist_init_addr is None:
        raise ArgumentError(f"--nnodes {args.nnodes} needs --dist-init-addr host:port, the address of machine 0")
    if args.nnodes == 1 and args.dist_init_addr is not None:
        raise ArgumentError("--dist-init-addr says nothing without --nnodes: ranks of one machine need no address")
    if args.dist_init_addr is not None:
        try:
            split_address(args.dist_init_addr)
        except ValueError as error:
            raise ArgumentError(f"--dist-init-addr {args.dist_init_addr}: {error}") from None
    if args.device == "cuda" or args.tp_size > 1:
        from sglang.srt.platforms import gpu_count, resolve_device

        if resolve_device(args.device).type == "cuda" and args.ranks_per_node > gpu_count():
            raise ArgumentError(
                f"--tp-size {args.tp_size}: this machine has {gpu_count()} GPU(s)"
                + (f" for {args.ranks_per_node} ranks" if args.nnodes > 1 else "")
                + "; use at most that many, or --device cpu"
            )
