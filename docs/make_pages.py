"""Writes the pages that are made from the code: `uv run python docs/make_pages.py`; `--check` only compares.

A page that is written by hand beside a table in the code is wrong after the first change. CI and the tests compare.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def configuration() -> str:
    """Every option of ``relax train``, by topic, from the declarations that the command line is made of."""
    from relax_cli.config.options import namespace, settings_classes
    from relax_cli.config.schema import Option

    options = namespace().options
    lines = [
        "# Configuration",
        "",
        "Every option of `relax train`, made from the declarations that the command line itself is made of",
        "(`docs/make_pages.py`). Options come from defaults, then `--config FILE` (TOML or YAML), then the environment",
        "(`RELAX_LR=1e-6`), then the command line; all errors of one start are reported together. Every other argument",
        "of SGLang's server is `--sglang-<name>`. In each of these places an option stands once.",
    ]
    for cls in settings_classes():
        own: list[Option] = [option for option in options.values() if option.owner is cls]
        if not own:
            continue
        lines += ["", f"## {cls.TITLE}", "", "| option | takes | default | |", "|---|---|---|---|"]  # type: ignore[attr-defined]
        lines += [_option_row(option) for option in own]
    return "\n".join(lines) + "\n"


def _option_row(option: object) -> str:
    from relax_cli.config.schema import Option

    assert isinstance(option, Option)
    if option.required:
        default = "required"
    elif option.default is None or option.default == ():
        default = "not set"
    else:
        value = option.default
        default = f"`{str(value).lower() if isinstance(value, bool) else value}`"
    takes = option.kind.noun + (f": {option.range}" if option.range else "")
    cells = (f"`{option.flag}`", takes, default, " ".join(option.help.split()))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


FACTS = {
    "compares_group": "compares the responses to one prompt: with `--n-samples-per-prompt 1` every advantage is 0",
    "divides_by_std": "reads `--disable-grpo-std-normalization`",
    "whitens": "normalises over all trained tokens of the rollout itself: no `--normalize-advantages`",
    "sequence_ratio": "one probability ratio for a whole response",
    "token_ratio": "needs the probability ratio of a token: not with `--advantage-estimator gspo`",
}
"""What the fields of an entry of the tables of algorithms say."""


def estimators() -> str:
    """The table of ``--advantage-estimator``, and what each one computes."""
    from relax_train.algorithms.registry import ADVANTAGES

    return _algorithms(ADVANTAGES)


def losses() -> str:
    """The table of ``--loss-type``, and what each one computes."""
    from relax_train.algorithms.registry import LOSSES

    return _algorithms(LOSSES)


def _algorithms(table: Mapping[str, Any]) -> str:
    lines = ["| name | what it is | paper |", "|---|---|---|"]
    details = []
    for name, entry in table.items():
        text = inspect.cleandoc(entry.function.__doc__ or "")
        first, _, rest = text.partition("\n")
        papers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{5})", text))
        links = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in papers) or "none"
        lines.append(f"| `{name}` | {_markdown(first)} | {links} |")
        facts = [f"- {words}" for fact, words in FACTS.items() if getattr(entry, fact, False)]
        details += ["", f"**`{name}`**", "", _markdown(rest.strip()), *(["", *facts] if facts else [])]
    return "\n".join([*lines, *details])


def _markdown(text: str) -> str:
    """A docstring as Markdown: roles and literals become code, arXiv numbers links."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{5})(v\d+)?", r"[arXiv:\1\2](https://arxiv.org/abs/\1\2)", text)


REFUSALS = {
    "attention_bias": "biases of attention's output: megatron-core has one switch for them and those of the MLP",
    "mlp_bias": "biases of the MLP: SGLang has none there",
    "use_sliding_window": "a window of attention: not built in the trainer",
}
"""Why a switch of ``config.json`` is refused."""
SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


def architectures() -> str:
    """The table of architectures: each record, and the parallel layouts in which the tests train it."""
    from relax_train.models.architectures import ARCHITECTURES

    tested = _tested_layouts()
    lines = ["| `model_type` | models | experts | ran from end to end | layouts held to transformers |"]
    lines.append("|---|---|---|---|---|")
    for name, record in ARCHITECTURES.items():
        layouts = "; ".join(dict.fromkeys(layout for kind, layout in tested if kind == name))
        tried, experts = "; ".join(record.tried) or "not yet", "yes" if record.has_experts else "no"
        lines.append(f"| `{name}` | {', '.join(record.models)} | {experts} | {tried} | {layouts} |")
    lines += ["", "| switch of `config.json` | refused in | why |", "|---|---|---|"]
    for key in dict.fromkeys(key for record in ARCHITECTURES.values() for key in record.refuses):
        families = ", ".join(f"`{name}`" for name, record in ARCHITECTURES.items() if key in record.refuses)
        lines.append(f"| `{key}` | {families} | {REFUSALS[key]} |")
    types = dict.fromkeys(rope for record in ARCHITECTURES.values() for rope in record.rope_types)
    scaled = ", ".join(f"`{rope}`" for rope in types)
    return "\n".join([*lines, "", f"Types of rotary embeddings that are built: {scaled}."])


def _tested_layouts() -> list[tuple[str, str]]:
    """(family, layout) of every case of the tests that hold the trainer to transformers."""
    cases = list(_constants("test_parity_layouts.py")["CASES"].values())
    cases += [("qwen2_5_vl", ranks, options) for ranks, _, options, _ in _constants("test_vision.py")["CASES"].values()]
    found = []
    for kind, ranks, options in cases:
        family, _, rope = kind.partition("+")
        sizes = {short: options[key] for key, short in SHORT.items() if key in options}
        used = [f"{short}{size}" for short, size in sizes.items() if size > 1]
        if options.get("sequence_parallel"):
            used.insert(1, "SP")
        dp = ranks // math.prod(sizes.get(short, 1) for short in ("TP", "PP", "CP"))
        used += [f"DP{dp}"] if dp > 1 and "EP" not in sizes else []
        if granularity := options.get("recompute_granularity"):
            used.append(f"{granularity} recomputation")
        used += ["moments on the host"] if options.get("optimizer_cpu_offload") else []
        layout = " ".join(used) or "one rank"
        found.append((family, f"{layout} (`{rope}`)" if rope else layout))
    return found


def _constants(file: str) -> dict[str, Any]:
    """The constants of a file of ``tests/train`` by name, those that need no import."""
    import ast

    values: dict[str, Any] = {}
    for node in ast.parse((DOCS.parent / "tests/train" / file).read_text(encoding="utf-8")).body:
        name = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(name, ast.Name) and value is not None:
            values[name.id] = eval(compile(ast.Expression(value), "cases", "eval"), {}, values)
    return values


def simulation() -> str:
    """The options of ``relax simulate``."""
    from relax_cli.simulate.command import options

    return "\n".join(["| option | takes | default | |", "|---|---|---|---|", *map(_option_row, options().values())])


def simulated_example() -> str:
    """Some columns of what the command prints that stands on the page."""
    from relax_cli.simulate.command import read_settings, simulated

    page = (DOCS / "simulate.md").read_text(encoding="utf-8")
    command = re.search(r"^    relax simulate (--num-gpus(?:.*\\\n)*.*)$", page, re.M)
    assert command, "docs/simulate.md has lost its example"
    rows = simulated(read_settings(command[1].replace("\\", " ").split())).rows
    lines = ["| mode | GPUs | `--max-staleness` | step, s | gain | trainer idle | mean staleness | binds |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|---|")
    for row in rows:
        plan, step = row.plan, row.step
        cells = (plan.mode, row.gpus, plan.bound.max_staleness, f"{step.seconds:.0f}", f"{row.speed_up:.1f}")
        cells += (f"{step.trainer_idle:.0%}", f"{step.staleness_mean:.1f}", step.binds)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def simulate() -> str:
    """The page on the model of a step."""
    return _between_marks("simulate.md", {"example": simulated_example, "options": simulation})


def models() -> str:
    """The page on models."""
    return _between_marks("models.md", {"architectures": architectures})


def algorithms() -> str:
    """The page on algorithms."""
    return _between_marks("algorithms.md", {"estimators": estimators, "losses": losses})


def _between_marks(file: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """A page as it is, with the parts between marks made anew."""
    page = (DOCS / file).read_text(encoding="utf-8")
    for name, make in parts.items():
        begin, end = f"<!-- made by docs/make_pages.py: {name} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"docs/{file} has lost its mark: {begin}"
        assert closed, f"docs/{file} has lost its mark: {end}"
        page = f"{before}{begin}\n{make()}\n\n{end}{after}"
    return page


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "algorithms.md": algorithms,
    "models.md": models,
    "simulate.md": simulate,
}


def main(arguments: list[str]) -> int:
    """Writes the pages, or says which of them are not what the code says."""
    stale = []
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"docs/{name} "
            + ("is not what the code says: run docs/make_pages.py" if "--check" in arguments else "written")
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
