"""Plots and Markdown tables of what bench_gpu_steps.py and bench_gpu_server.py have measured.

    python benchmark/plot_gpu.py --update docs/performance.md benchmark/results/h200_steps.json ...

Beside each file a .png with its name is written (this needs matplotlib; ``--no-plots`` leaves it out). The tables are
printed, and put between the marks ``<!-- NAME.json -->`` and ``<!-- /NAME.json -->`` of the page to ``--update``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PEER = "transformers bf16"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def steps_tables(report: Row) -> str:
    """Every row, NVFP4 over bf16 where both were measured, and what more ranks give."""
    head = ("Shape", "Weights", "Ranks", "Phase", "Batch", "Context", "ms", "Floor, ms", "Bound by", "Floor / time")
    rows = report["rows"]
    cells = [
        (
            row["shape"], row["quant"], row["tp"], row["phase"], row["batch"], row["context"], f"{row['ms']:.3g}",
            f"{row['floor_ms']:.3g}", row["bound"], f"{row['ratio']:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    parts = [table((*head, "Tokens/s"), ((*c, f"{r['tokens_per_s']:.0f}") for c, r in zip(cells, rows, strict=True)))]
    ratios = [
        f"* {row['shape']}, {row['phase']}, batch {row['batch']}, context {row['context']}, {row['tp']} rank(s): NVFP4 "
        f"is {other['ms'] / row['ms']:.2f} times as fast as bf16"
        for row in rows
        if row["quant"] != "bf16" and (other := _like(row, rows, quant="bf16"))
    ]
    ranks = [
        f"* {row['shape']} {row['quant']}, {row['phase']}, batch {row['batch']}: {row['tp']} ranks are "
        f"{one['ms'] / row['ms']:.2f} times as fast as one"
        for row in rows
        if row["tp"] > 1 and (one := _like(row, rows, tp=1))
    ]
    loops = [
        f"* {row['shape']} {row['quant']}, batch {row['batch']}: a turn takes {row['ms']:.3g} ms, in "
        f"{row['busy_ms']:.3g} ms of it the GPU works, gap {row['gap']:.1%}"
        for row in rows
        if "gap" in row
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(ratios), "\n".join(ranks), "\n".join(loops)) if part)


def logits_tables(report: Row) -> str:
    """What bench_gpu_tp.py found."""
    head = ("Shape", "Weights", "Ranks", "One rank, error", "Several, error", "Between both", "Same best token")
    names = ("shape", "quant", "tp", "one", "several", "between", "same_best")
    return table(head, ([row[name] for name in names] for row in report["rows"]))


def update(page: str, name: str, tables: str) -> str:
    """``page`` with the tables of the file ``name``, where it has marks for it."""
    first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, found, rest = page.partition(first)
    if not found:
        return page
    return before + first + "\n" + tables + "\n\n" + last + rest.partition(last)[2]


def _like(row: Row, rows: list[Row], **other: Any) -> Row | None:
    """The row that differs from ``row`` in ``other`` alone."""
    wanted = {name: row[name] for name in ("shape", "quant", "tp", "phase", "batch", "context")} | other
    return next((each for each in rows if all(each[name] == value for name, value in wanted.items())), None)


def server_tables(report: Row) -> str:
    """Every row, with its throughput over that of transformers."""
    rows = report["rows"]
    peers = {row["concurrency"]: row["output_throughput"] for row in rows if row["engine"] == PEER}
    head = ("Engine", "Requests at a time", "New tokens/s", f"Over {PEER}", "TTFT, ms", "ITL, ms")

    def over(row: Row) -> str:
        peer = peers.get(row["concurrency"])
        return f"{row['output_throughput'] / peer:.2f}" if peer else "-"

    return table(
        head,
        (
            (row["engine"], row["concurrency"], row["output_throughput"], over(row),
             row.get("ttft_ms", "-"), row.get("itl_ms", "-"))
            for row in rows
        ),
    )  # fmt: skip


def plot_steps(report: Row, path: Path) -> None:
    """For each shape: time of decode steps against the batch, with the floor of each kind of weights."""
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    rows = [row for row in report["rows"] if row["phase"] == "decode"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4.5 * len(shapes), 3.5), squeeze=False)
    for shape, axis in zip(shapes, axes[0], strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        for number, (quant, tp) in enumerate(dict.fromkeys((row["quant"], row["tp"]) for row in mine)):
            found = [row for row in mine if (row["quant"], row["tp"]) == (quant, tp)]
            batches, color = [row["batch"] for row in found], f"C{number}"
            label = quant + (f", {tp} ranks" if tp > 1 else "")
            axis.plot(batches, [row["ms"] for row in found], marker=".", color=color, label=label)
            axis.plot(batches, [row["floor_ms"] for row in found], linestyle=":", color=color, label=f"{label}, floor")
        axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="ms a decode step", title=shape)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def plot_server(report: Row, path: Path) -> None:
    """Throughput and time between tokens against the number of requests at a time."""
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.5))
    names = (("output_throughput", "new tokens/s"), ("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms"))
    for axis, (key, label) in zip(axes, names, strict=True):
        for engine in dict.fromkeys(row["engine"] for row in report["rows"]):
            found = [row for row in report["rows"] if row["engine"] == engine and key in row]
            axis.plot([row["concurrency"] for row in found], [row[key] for row in found], marker=".", label=engine)
        axis.set(xscale="log", yscale="log", xlabel="requests at a time", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


# A key that only rows of this kind have, their tables and their plot.
KINDS: tuple[tuple[str, Callable[[Row], str], Callable[[Row, Path], None] | None], ...] = (
    ("engine", server_tables, plot_server),
    ("phase", steps_tables, plot_steps),
    ("same_best", logits_tables, None),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--update", type=Path, help="a Markdown page with marks")
    options = parser.parse_args()
    if not options.no_plots:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]

        matplotlib.use("Agg")
    for file in options.files:
        report = json.loads(file.read_text())
        tables, plot = next((tables, plot) for key, tables, plot in KINDS if key in report["rows"][0])
        text = tables(report)
        print(f"\n{file.name}\n\n{text}")
        if options.update:
            options.update.write_text(update(options.update.read_text(), file.name, text))
        if plot is not None and not options.no_plots:
            plot(report, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
