"""The command-line arguments of SGLang's server as a table that needs neither torch nor SGLang.

``server_arguments.json`` is generated from the argument parser of the pinned SGLang release::

    python -m relax_rollout.engines.sglang.arguments --write

and a test holds it equal to the installed release. With it ``--sglang-<name>`` is checked as strictly as our own flags,
before anything starts.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

TABLE = Path(__file__).with_name("server_arguments.json")

_PLACEMENT = "the placement of engines on GPUs sets it; use --rollout-num-gpus and --rollout-num-gpus-per-engine"
_CLIENT = "the engine's HTTP client depends on it"
_ADDRESS = "each engine gets its own address and free ports"
_SECRET = "each run makes up a key of its own, which only its own processes know"
_TLS = "the engine's client speaks plain HTTP on a private address"
_OTHER_SERVER = "the engine is SGLang's HTTP server; this starts another kind of server"

_ONE_SIDED: Mapping[str, str] = MappingProxyType(
    {
        "the engine would compute with other numbers than the trainer, which knows no such precision": (
            "quantization quantization-param-path quantize-and-serve torchao-config modelopt-quant "
            "modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path rl-quant-profile "
            "kv-cache-dtype enable-tf32-matmul enable-quant-communications deepep-dispatcher-output-dtype "
            "enable-deepseek-v4-fp4-indexer flashinfer-mxfp4-moe-precision mamba-ssm-dtype int8-mamba-ckpt-size "
            "enable-int8-mamba-checkpoint enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds"
        ),
        "the weights are those of --hf-checkpoint and then the trainer's": (
            "load-format model-loader-extra-config custom-weight-loader model-config-parser revision "
            "decrypted-config-file decrypted-draft-config-file modelexpress-config kt-cpuinfer "
            "kt-max-deferred-experts-per-token kt-method kt-num-gpu-experts kt-threadpool-count kt-weight-path "
            "remote-instance-weight-loader-backend remote-instance-weight-loader-seed-instance-ip "
            "remote-instance-weight-loader-seed-instance-service-port "
            "remote-instance-weight-loader-send-weights-group-ports "
            "remote-instance-weight-loader-start-seed-via-transfer-engine weight-cache-socket weight-cache-timeout"
        ),
        "new weights are sent under the names of SGLang's own models": "model-impl",
        "the trainer has no adapters": (
            "enable-lora enable-lora-overlap-loading experts-shared-outer-loras lora-backend lora-drain-wait-threshold "
            "lora-eviction-policy lora-paths lora-strict-loading lora-target-modules lora-use-virtual-experts "
            "max-loaded-loras max-lora-chunk-size max-lora-rank max-loras-per-batch"
        ),
        "the trainer computes the model as it is written in --hf-checkpoint": (
            "debug-tensor-dump-input-file dllm-algorithm dllm-algorithm-config dllm-fdfo enable-hisparse "
            "hisparse-config is-embedding language-only prefill-only-disable-kv-cache"
        ),
        "a token would be taken that the model would not have sampled": (
            "speculative-accept-threshold-acc speculative-accept-threshold-single enable-strict-thinking"
        ),
        "the prompt would be another one than is trained": (
            "allow-auto-truncate mm-process-config disable-fast-image-processor enable-precise-embedding-interpolation"
        ),
        "prompts come to the engine as tokens; use --apply-chat-template and --apply-chat-template-kwargs": (
            "chat-template hf-chat-template-name completion-template default-chat-template-kwargs"
        ),
        "each request says how it is sampled; use the options --rollout-temperature and the like": (
            "preferred-sampling-params sampling-defaults"
        ),
        "it would delete the weights that the trainer reads": "delete-ckpt-after-loading",
        "keys and values of older weights could come back from a storage outside of the engine": (
            "hicache-storage-backend hicache-storage-backend-extra-config hicache-storage-prefetch-policy "
            "enable-lmcache lmcache-config-file enable-flexkv flexkv-config-file"
        ),
    }
)
"""By the reason: further arguments that would change what one side computes, or would have no effect."""


OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model-path": "the model is the one that is trained; use --hf-checkpoint",
        "tokenizer-path": "the tokenizer is that of the trained model; use --hf-checkpoint",
        "dtype": "generation and training use one precision; use --bf16 or --no-bf16",
        "device": "it follows from the machine",
        "random-seed": "use --rollout-seed",
        "host": _ADDRESS,
        "port": _ADDRESS,
        "nccl-port": _ADDRESS,
        "dist-init-addr": _ADDRESS,
        "grpc-port": _OTHER_SERVER,
        "tp-size": "use --rollout-num-gpus-per-engine",
        "dp-size": "replicas are engines of their own; use --rollout-num-gpus",
        "nnodes": _PLACEMENT,
        "node-rank": _PLACEMENT,
        "base-gpu-id": _PLACEMENT,
        "gpu-id-step": _PLACEMENT,
        "enable-memory-saver": "colocated runs switch it on, others do not need it",
        "weight-version": "the run numbers the weights itself",
        "weight-cache-mode": "weights are updated while the server runs, which this forbids",
        "incremental-streaming-output": _CLIENT,
        "stream-output": _CLIENT,
        "stream-interval": _CLIENT,
        "tokenizer-worker-num": "one worker must see every weight version",
        "json-model-override-args": "the trainer would not know of it; change config.json in --hf-checkpoint",
        "config": "put SGLang's options into the run's own --config file, as sglang-<name>",
        "mem-fraction-static": "it has its own setting, sglang_mem_fraction_static",
        "api-key": _SECRET,
        "admin-api-key": _SECRET,
        "ssl-keyfile": _TLS,
        "ssl-certfile": _TLS,
        "ssl-ca-certs": _TLS,
        "ssl-keyfile-password": _TLS,
        "enable-ssl-refresh": _TLS,
        "enable-http2": _CLIENT,
        "use-ray": "Ray places the engines already",
        "grpc-mode": _OTHER_SERVER,
        "smg-grpc-mode": _OTHER_SERVER,
        "encoder-only": _OTHER_SERVER,
        "disaggregation-mode": _OTHER_SERVER,
        "encoder-urls": _OTHER_SERVER,
        "sidecar": _OTHER_SERVER,
        "sidecar-args": _OTHER_SERVER,
        "encoder-register-urls": _OTHER_SERVER,
        "pp-size": "the GPUs of an engine share each layer; use --rollout-num-gpus-per-engine",
        "skip-tokenizer-init": _CLIENT,
        "skip-server-warmup": "the first requests of the run warm the engine up",
        **{name: reason for reason, names in _ONE_SIDED.items() for name in names.split()},
    }
)
"""Arguments that the system sets itself, each with the reason and what to use instead."""


_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_WORDS = {"log-level": _LOG_LEVELS, "log-level-http": ("trace", *_LOG_LEVELS)}
"""Values, in small or capital letters, that the server takes and its parser does not know: a wrong one ends it late."""


_AT_LEAST_ONE = frozenset(
    {
        "page-size",
        "max-running-requests",
        "max-total-tokens",
        "max-prefill-tokens",
        "num-continuous-decode-steps",
        "tokenizer-worker-num",
        "cuda-graph-max-bs",
    }
)
"""Sizes and counts that SGLang takes at its word, and then divides by or waits for: 0 is none of them."""


@dataclasses.dataclass(frozen=True)
class ServerArgument:
    """One argument of SGLang's server.

    Attributes:
        name: without the leading dashes, in kebab-case.
        kind: type of a value: ``int``, ``float``, ``str`` or ``json`` (text that holds JSON); ``flag`` takes no value.
        many: takes one or more values.
        choices: the only values it takes, or empty.
        alias_of: the main name when this is another spelling.
    """

    name: str
    kind: str
    many: bool = False
    choices: tuple[Any, ...] = ()
    alias_of: str | None = None

    @property
    def flag(self) -> str:
        """The spelling on the command line: ``--sglang-<name>``."""
        return f"--sglang-{self.name}"

    def parse(self, words: Sequence[str]) -> Any:
        """The value of the words that follow the flag.

        Raises:
            ValueError: wrong number of words, wrong type or not among the choices; the message names the flag.
        """
        if self.kind == "flag":
            if words:
                raise ValueError(f"{self.flag} takes no value, but got {' '.join(words)}")
            return True
        if not words or (len(words) > 1 and not self.many):
            expected = "one value or more" if self.many else "one value"
            raise ValueError(f"{self.flag} takes {expected}, but got {len(words)}")
        values = [self._convert(w) for w in words]
        return values if self.many else values[0]

    def check(self, value: Any) -> str | None:
        """Says what is wrong with an already typed value (of a configuration file), or None."""
        if self.kind == "flag":
            return None if isinstance(value, bool) else f"{self.flag} must be true or false, not {value!r}"
        if isinstance(value, list | tuple):
            if not self.many:
                return f"{self.flag} takes one value, not a list"
            return next((p for p in map(self.check_one, value) if p), None)
        return self.check_one(value)

    def check_one(self, value: Any) -> str | None:
        """Says what is wrong with a single value, or None."""
        if isinstance(value, bool) or not isinstance(value, str | int | float | dict):
            return f"{self.flag} takes {_KINDS[self.kind]}, not {value!r}"
        try:
            self._convert(value if isinstance(value, str) else json.dumps(value))
        except ValueError as error:
            return str(error)
        return None

    def _convert(self, word: str) -> Any:
        try:
            value = _CONVERTERS[self.kind](word)
        except (ValueError, RecursionError):
            raise ValueError(f"{self.flag} takes {_KINDS[self.kind]}, not {word!r}") from None
        number = word.strip().lstrip("-").isdecimal() and len(word) < 20
        if number and int(word) < 1 and (self.alias_of or self.name) in _AT_LEAST_ONE:
            raise ValueError(f"{self.flag} is {word}; it must be at least 1, or left out")
        words = _WORDS.get(self.name, ())
        if (self.choices and value not in self.choices) or (words and word.lower() not in words):
            raise ValueError(f"{self.flag} is {word}; it must be one of {', '.join(map(str, self.choices or words))}")
        return value


def _json_text(word: str) -> str:
    json.loads(word)
    return word


_CONVERTERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {"int": int, "float": float, "str": str, "json": _json_text}
)
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a word",
    "json": "JSON, for example '{\"key\": 1}'",
    "flag": "no value",
}


@functools.cache
def server_arguments() -> Mapping[str, ServerArgument]:
    """Every argument of the pinned SGLang release by its kebab-case name, aliases too."""
    table = json.loads(TABLE.read_text())["arguments"]
    return MappingProxyType(
        {
            name: ServerArgument(
                name,
                row.get("kind", "str"),
                row.get("many", False),
                tuple(row.get("choices", ())),
                row.get("alias_of"),
            )
            for name, row in table.items()
        }
    )


def lookup(name: str) -> ServerArgument:
    """The argument that users may set as ``--sglang-<name>`` (kebab- or snake-case).

    Raises:
        ValueError: SGLang has no such argument (with the nearest names), or the system owns it (with the reason).
    """
    key = name.replace("_", "-")
    arguments = server_arguments()
    if key not in arguments:
        near = difflib.get_close_matches(key, [n for n in arguments if owner(n) is None], n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join('--sglang-' + n for n in near)}?" if near else ""
        raise ValueError(f"--sglang-{key}: SGLang's server has no argument --{key}{hint}")
    if (reason := owner(key)) is not None:
        raise ValueError(f"--sglang-{key} cannot be set: {reason}")
    return arguments[key]


def owner(key: str) -> str | None:
    """Why the system sets an argument of that kebab-case name itself, or None when users may set it."""
    return OWNED.get(key) or OWNED.get(server_arguments()[key].alias_of or "")


def problems(extra: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with the pass-through options, one message each."""
    found: list[str] = []
    seen: dict[str, str] = {}
    for name, value in extra.items():
        try:
            argument = lookup(name)
        except ValueError as error:
            found.append(str(error))
            continue
        if (problem := argument.check(value)) is not None:
            found.append(problem)
        main = argument.alias_of or argument.name
        if main in seen:
            found.append(f"{argument.flag} and {seen[main]} are the same option; give one of them")
        seen[main] = argument.flag
    return found


def to_argv(options: Mapping[str, Any]) -> list[str]:
    """Options as words for SGLang's command line. ``True`` is a bare flag; ``False`` and ``None`` are left out."""
    argv: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is not True:
            argv.extend(_word(v) for v in (value if isinstance(value, list | tuple) else [value]))
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; names are brought to their main kebab-case spelling first."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            key = name.replace("_", "-")
            known = server_arguments().get(key)
            merged[(known.alias_of if known else None) or key] = value
    return merged


def _rows(actions: Iterable[argparse.Action]) -> dict[str, dict[str, Any]]:
    """The table's rows from the actions of an argument parser."""
    rows: dict[str, dict[str, Any]] = {}
    for action in actions:
        names = [o.removeprefix("--") for o in action.option_strings if o.startswith("--")]
        if not names or "help" in names:
            continue
        row: dict[str, Any] = {}
        if action.nargs == 0:
            row["kind"] = "flag"
        elif action.type in (int, float):
            row["kind"] = action.type.__name__
        elif action.type is json.loads:
            row["kind"] = "json"
        if action.nargs in ("+", "*") or (isinstance(action.nargs, int) and action.nargs > 1):
            row["many"] = True
        if action.choices is not None:
            # Some choices are enumerations: their value counts on the command line. Sets have no order of their own.
            choices = [getattr(c, "value", c) for c in action.choices]
            row["choices"] = sorted(choices) if isinstance(action.choices, set | frozenset) else choices
        main = names[0]
        rows[main] = row
        for other in names[1:]:
            rows[other] = {**row, "alias_of": main}
    return dict(sorted(rows.items()))


def generate() -> str:
    """The table of the installed SGLang as JSON text. Imports SGLang; on CPU it needs ``cpu.environment``."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in _rows(parser._actions).items()]
    body = ",\n  ".join(rows)
    return f'{{"sglang": {json.dumps(sglang.__version__)}, "arguments": {{\n  {body}\n}}}}\n'


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        TABLE.write_text(generate())
    else:
        sys.stdout.write(generate())
