"""`python -m fusedloss plan` prints what each method of the loss would cost, `calibrate` measures what plans count on, and `doctor` says what this machine has and what does not work."""

import argparse
import re
import sys
from typing import Optional

import torch

DTYPES = ("bfloat16", "float16", "float32", "float64")
NEEDS = ("input", "weight", "bias")
POWERS = ("", "K", "M", "G", "T")


def byte_count(text: str) -> int:
    "Bytes of a text such as 2GiB, 512MiB or 500000000: Ki, Mi, Gi are powers of 1024; k, M, G of 1000."
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if not found:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GiB, got {text!r}")
    number, power, binary = found.groups()
    return round(float(number) * (1024 if binary else 1000) ** POWERS.index(power))


def plan_command(args: argparse.Namespace) -> int:
    "Print a plan: 0 if it takes a method, 1 if none fits."
    from fusedloss.plans import plan

    try:
        found = plan(
            args.tokens,
            args.classes,
            args.features,
            getattr(torch, args.dtype),
            device=None if args.machine or torch.cuda.is_available() else "cpu",
            reduction=args.reduction,
            memory_budget=args.memory_budget,
            accumulate=args.accumulate,
            needs_grad=tuple(name in args.needs_grad for name in NEEDS),
            stats=args.stats,
            options=tuple(args.options),
            chunk_size=args.chunk_size,
            grad_dtype=args.grad_dtype and getattr(torch, args.grad_dtype),
            max_valid=args.max_valid,
            machine=args.machine,
        )
    except ValueError as error:
        args.fail(str(error))
    print(found)
    return int(found.chosen is None)


def add_plan(command: argparse.ArgumentParser):
    "The arguments of `plan`."
    from fusedloss.core.rates import machines
    from fusedloss.plans import OPTIONS

    command.description = (
        "Print FLOPs, bytes, memory beyond the gradients and time of each method of linear_cross_entropy, "
        "which one is taken, and why. Exit code 1 if none fits."
    )
    command.set_defaults(run=plan_command, fail=command.error)
    add = command.add_argument
    add("--tokens", type=int, required=True, metavar="N", help="rows of input")
    add("--classes", type=int, required=True, metavar="V", help="rows of the weight")
    add("--features", type=int, required=True, metavar="H", help="columns of both")
    add(
        "--machine",
        metavar="NAME",
        help=f"one of {', '.join(sorted(machines()))} (default: the GPU at hand, or the CPU if there is none)",
    )
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the matmuls (default: %(default)s)")
    add("--grad-dtype", choices=DTYPES, help="of the parameters (default: as --dtype)")
    add("--memory-budget", type=byte_count, metavar="SIZE", help="beyond the gradients, such as 2GiB or 512MiB")
    add("--reduction", choices=("mean", "sum", "none"), default="mean", help="of the loss (default: %(default)s)")
    add(
        "--accumulate",
        choices=("auto", "float32", "native"),
        default="auto",
        help="how chunks of the weight's gradient add up (default: %(default)s)",
    )
    add(
        "--needs-grad",
        nargs="*",
        choices=NEEDS,
        default=NEEDS[:2],
        help=f"tensors that need a gradient (default: {' '.join(NEEDS[:2])})",
    )
    add("--stats", choices=("detached", "differentiable"), default="", help="statistics that are returned, too")
    add("--options", nargs="+", metavar="NAME", default=(), help=f"arguments in use: {', '.join(OPTIONS)}")
    add("--chunk-size", type=int, metavar="ROWS", help="of a chunk (default: by the plan)")
    add("--max-valid", type=int, metavar="N", help="tokens that are not ignored, at most")


def doctor_command(args: argparse.Namespace) -> int:
    "Print what this machine has: 0 if all that it could use works, 1 if something is broken."
    from fusedloss.doctor import report

    return report()


def add_doctor(command: argparse.ArgumentParser):
    "What `doctor` says of itself: it takes no arguments."
    command.description = (
        "Print what this machine has (GPU, driver, versions and whether they are supported), which kernels are taken here "
        "and why the others are not, which compilers work, and where compiled kernels and tuning are kept: "
        "a dozen lines for a report, without the path of your home directory."
    )
    command.epilog = (
        "Exit code 0 if everything that this machine could use works; 1 if something is broken, in a line that says FAULT: "
        "a version that is not supported, a GPU that PyTorch does not reach, a CuPy, a Triton or an NVRTC that is there "
        "and does not compile for the GPU, a cache folder that somebody else owns or that cannot be written, tuning that cannot be read. "
        "Without a GPU the kernels, and what compiles them, are not needed: it says so, and that is no fault."
    )
    command.set_defaults(run=doctor_command)


def calibrate_command(args: argparse.Namespace) -> int:
    "Measure what plans count on: 0 if there is a GPU, else 1."
    from fusedloss.calibration import report

    try:
        return report(args.device)
    except ValueError as error:
        args.fail(str(error))


def add_calibrate(command: argparse.ArgumentParser):
    "The arguments of `calibrate`."
    command.description = (
        "Measure the rates of a GPU, and the seconds that Python and launches take of a loss by each method, and keep "
        "them by board and CPU: plans of later processes take them instead of those of a table. It takes fifteen hundred small steps, "
        "whose kernels are compiled first. Exit code 1 without a GPU."
    )
    command.set_defaults(run=calibrate_command, fail=command.error)
    command.add_argument("--device", default="cuda", help="as PyTorch names it (default: %(default)s)")


COMMANDS = {
    "plan": (add_plan, "what each method of linear_cross_entropy would cost, and which one is taken"),
    "calibrate": (add_calibrate, "measure this GPU and its host for plans, and keep what was found"),
    "doctor": (add_doctor, "what this machine has, which kernels it takes, and what is broken"),
}


def make_parser(
    asked: str,  # a command; the others' arguments, which import what they name, are left out
) -> argparse.ArgumentParser:
    "The arguments of `python -m fusedloss`."
    parser = argparse.ArgumentParser(
        "python -m fusedloss", description="Memory- and time-efficient losses over many classes."
    )
    parser.set_defaults(run=lambda args: parser.print_help() or 0)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (add_arguments, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == asked:
            add_arguments(command)
    return parser


def main(
    argv: Optional[list[str]] = None,  # `sys.argv[1:]` where None
) -> int:  # the exit code
    "Run a command; without one, print the help."
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser(argv[0] if argv else "").parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
