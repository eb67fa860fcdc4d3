"""`reblock plan`: how many blocks and requests fit, of models that are not compiled yet as well."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from reblock.budget import WHOLE_DEVICE, parse_budget
from reblock.cli.parser import EXIT_CODES, Once, add_json, add_module, non_empty
from reblock.cli.streams import tell
from reblock.errors import DoesNotFit, InvalidOption, UsageError
from reblock.planning import (
    Plan,
    PlanSettings,
    make_plan,
    open_subject,
    parse_target,
    share_device,
)
from reblock.planning.document import Refused
from reblock.planning.sources import ModelSource
from reblock.units import parse_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from reblock.artifact.reader import Artifact
    from reblock.budget import MemoryBudget
    from reblock.errors import ReblockError
    from reblock.planning import SharedPlan, Target

# More is no number that anybody means, and int() is slow on endless digits.
_MAX_DIGITS = 64
_WHOLE_NUMBERS = (
    "batch_size",
    "max_seq_len",
    "kvcache_partition_len",
    "kvcache_block_size",
    "prefill_chunk_size",
    "num_blocks",
)
_SETTINGS = {
    "batch_size": ("N", "requests that run side by side (default: as many as fit)"),
    "max_seq_len": ("N", "longest request in tokens (default: what the model was made for)"),
    "attn_impl": ("KIND", "flash_attn or eager (default: what the device's compiler takes)"),
    "kvcache_partition_len": ("N", "tokens that flash attention works on at a time"),
    "kvcache_block_size": ("N", "tokens in a block of KV cache"),
    "prefill_chunk_size": ("N", "tokens of a prompt that are read at a time"),
    "dtype": ("TYPE", "type of the weights (default: that of the checkpoint)"),
    "weight_dtype": (
        "TYPE",
        "for the cpu, type of the weights of linear layers, as in compile (default: as --dtype)",
    ),
    "kv_dtype": ("TYPE", "type of keys and values (default: that of the programs)"),
    "num_blocks": ("N", "a block count to ask for (default: the largest that fits)"),
    "weight_bytes": ("SIZE", "what the weights take, all devices together, where you know better"),
}
_EPILOG = f"""\
Nothing is compiled. Of a model on the hub its configuration is read, and of its
weights the headers. Units are binary: 10GB is 10 * 2**30 bytes.
Without --batch-size the plan is for as many requests of the full length as fit.
Several models or artifacts are planned on the same device, with one budget that
is split, or one for each.

examples:
  reblock plan meta-llama/Llama-3.1-8B --npu RBLN-CR13 --max-seq-len 8192
  reblock plan ./Qwen3-8B --npu RBLN-CA25x4 --npu RBLN-CR13 --memory-budget 80%
  reblock plan ./my_artifact --memory-budget 10GB --json
  reblock plan ./small ./large --batch-size 8 --npu RBLN-CR13

{EXIT_CODES}
What fits is what the programs run with: the fewest blocks that work. How many
requests can have their full length at once is part of the answer. Where there
are several devices or budgets, 3 means that none of them fits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `reblock plan`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        type=non_empty,
        help="a model (directory, config.json, GGUF file or hub id) or the directory of an "
        "artifact; several share one device",
    )
    parser.add_argument(
        "--npu",
        dest="npus",
        metavar="NAME",
        action="append",
        help="device to plan for: RBLN-CR13, RBLN-CA25x4 for four, cpu, or cpu:24GB for another "
        "machine; may be given several times (default: cpu, or what an artifact was compiled for)",
    )
    parser.add_argument(
        "--memory-budget",
        dest="memory_budgets",
        metavar="BUDGET",
        action="append",
        help="memory of one device that weights, workspace and KV cache may take: 0.8 of what is "
        "available, 80%%, 10GB; may be given several times (default: all that is available)",
    )
    for name, (metavar, text) in _SETTINGS.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, metavar=metavar, action=Once, help=text)
    add_module(parser)
    add_json(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE",
        action=Once,
        type=non_empty,
        help="draw where the memory goes, and what other budgets give, as .svg, .png or .html",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plans; the exit code says whether any of them fits."""
    if args.plot is not None:
        from reblock.planning.plot import check_plot_path

        check_plot_path(args.plot)
    settings = _settings(args)
    budgets = [parse_budget(text) for text in args.memory_budgets or ()] or [WHOLE_DEVICE]
    targets = [parse_target(text) for text in args.npus or ()]
    if len(args.names) > 1:
        return _run_together(args, settings, targets, budgets)
    return _run_alone(args, settings, targets or [None], budgets)


def _settings(args: argparse.Namespace) -> PlanSettings:
    """Return the settings; what is no number is refused there, with all that is accepted."""
    given = {name: getattr(args, name) for name in _SETTINGS}
    for name in _WHOLE_NUMBERS:
        text = given[name]
        if text is not None and text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS:
            given[name] = int(text)
    if args.weight_bytes is not None:
        try:
            given["weight_bytes"] = parse_size(args.weight_bytes)
        except ValueError as error:
            raise InvalidOption(f"weight_bytes: {error}", option="weight_bytes") from error
    return PlanSettings(**given)


def _run_alone(
    args: argparse.Namespace,
    settings: PlanSettings,
    targets: Sequence[Target | None],
    budgets: Sequence[MemoryBudget],
) -> int:
    subject = _open(args.names[0], args.module)
    pairs = [(target, budget) for target in targets for budget in budgets]
    outcomes, error = _plan_all(subject, settings, pairs)
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if error is not None and not (args.json and isinstance(error, DoesNotFit)):
        raise error
    if args.json:
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        _print_json(plans, None, refused)
    elif len(outcomes) == 1:
        from reblock.cli.plan_tables import report

        print(report(plans[0]))
    else:
        from reblock.cli.plan_comparison import comparison

        print(comparison(outcomes))
    if args.plot is not None and plans:
        _plot(args.plot, [subject] * len(plans), settings, plans, None)
    if error is not None:
        tell(f"reblock: error: {error}")
    return 0 if any(plan.fits for plan in plans) else DoesNotFit.exit_code


def _plan_all(
    subject: ModelSource | Artifact,
    settings: PlanSettings,
    pairs: Sequence[tuple[Target | None, MemoryBudget]],
) -> tuple[list[Plan | Refused], ReblockError | None]:
    """Return a plan for every device and budget, or why there is none.

    Where there is none at all, the first error comes with them.
    """
    outcomes: list[Plan | Refused] = []
    first: ReblockError | None = None
    for target, budget in pairs:
        try:
            outcomes.append(make_plan(subject, settings, target, budget))
        except (UsageError, DoesNotFit) as error:
            # One device may be too small for a size, or have no kernel for what was asked.
            first = first or error
            outcomes.append(_refused(subject, target, budget, error))
    has_plans = any(isinstance(outcome, Plan) for outcome in outcomes)
    return outcomes, None if has_plans else first


def _refused(
    subject: ModelSource | Artifact,
    target: Target | None,
    budget: MemoryBudget,
    error: ReblockError,
) -> Refused:
    if isinstance(subject, ModelSource):
        name, own = subject.name, "cpu"
    else:
        name, own = subject.directory, subject.config.npu or "cpu"
    npu = own if target is None else target.text
    return Refused(name=name, npu=npu, memory_budget=budget.text, reason=str(error))


def _run_together(
    args: argparse.Namespace,
    settings: PlanSettings,
    targets: Sequence[Target],
    budgets: Sequence[MemoryBudget],
) -> int:
    if len(targets) > 1:
        raise UsageError(
            f"{len(args.names)} models share one device, and {len(targets)} are named; give --npu "
            "once"
        )
    if args.module is not None:
        raise UsageError(
            f"--module {args.module!r} is for one artifact, and {len(args.names)} are named; plan "
            "the directory of the module itself"
        )
    subjects = [_open(name, None) for name in args.names]
    shared = share_device(subjects, settings, targets[0] if targets else None, budgets)
    if args.json:
        _print_json(shared.plans, shared, ())
    else:
        from reblock.cli.plan_comparison import shared_report

        print(shared_report(shared))
    if args.plot is not None:
        _plot(args.plot, subjects, settings, shared.plans, shared)
    return 0 if shared.fits else DoesNotFit.exit_code


def _open(name: str, module: str | None) -> ModelSource | Artifact:
    is_path = os.path.lexists(name) or name.startswith((".", "/", "~"))
    if sys.stderr.isatty() and not is_path:
        # The one thing here that may take a while.
        tell(f"looking for {name} on the hub ...")
    return open_subject(name, module)


def _print_json(
    plans: Sequence[Plan], shared: SharedPlan | None, refused: Sequence[Refused]
) -> None:
    import json

    from reblock.planning.document import plan_document

    print(json.dumps(plan_document(plans, shared=shared, refused=refused)))


def _plot(
    path: str,
    subjects: Sequence[ModelSource | Artifact],
    settings: PlanSettings,
    plans: Sequence[Plan],
    shared: SharedPlan | None,
) -> None:
    from reblock.planning.plot import write_plot
    from reblock.planning.plot_parts import printable
    from reblock.planning.sweep import sweep_budgets

    sweeps = {}
    for subject, plan in zip(subjects, plans, strict=True):
        # Other budgets on the same devices have the same one.
        if (plan.name, plan.target) not in sweeps:
            sweeps[plan.name, plan.target] = sweep_budgets(subject, settings, plan.target)
    write_plot(path, plans, [sweeps[plan.name, plan.target] for plan in plans], shared)
    # What is printed on stdout may be for another program.
    tell(f"picture written to {printable(path)}")
