"""`relax doctor`: what this machine has, whether that is enough, and what to do where it is not."""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warn", "fail"]

GB = 1e9

_PACKAGES = ("ray", "torch", "sglang", "megatron-core", "transformers", "TransferQueue", "tensorboard", "memray")
_GPU_PACKAGES = ("sglang-kernel", "flashinfer-python")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        fix: what to do, for a finding that is not ``ok``.
    """

    level: Level
    name: str
    detail: str
    fix: str = ""


def main(argv: Sequence[str] = ()) -> int:
    """Prints all findings.

    Returns:
        1 when one of them is ``fail``, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="relax doctor",
        description="Says what this machine has, what is missing, and how to fix it.",
        allow_abbrev=False,
    )
    parser.parse_args(list(argv))
    findings = list(examine())
    width = max(len(f.name) for f in findings)
    for finding in findings:
        print(f"{finding.level:<4}  {finding.name:<{width}}  {finding.detail}")
        if finding.fix:
            print(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    failed = sum(f.level == "fail" for f in findings)
    print(f"\n{failed} of {len(findings)} checks failed" if failed else f"\nall {len(findings)} checks passed")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """All checks of this machine, in the order of the report."""
    gpus = check_gpus()
    yield check_python(sys.version_info[:3])
    yield check_cores(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield check_memory(available_memory())
    yield from gpus
    has_gpu = any(g.name != "GPU" for g in gpus)
    yield from check_packages(installed_version, has_gpu=has_gpu)
    yield check_space("disk", Path.cwd(), warn=20 * GB, fail=2 * GB, fix="free some space, or run in another folder")
    shm = Path("/dev/shm")
    if shm.is_dir():
        fix = "give the container more shared memory, for example `docker run --shm-size 8g`"
        yield check_space("shared memory", shm, warn=2 * GB, fail=0.2 * GB, fix=fix)


def check_python(version: tuple[int, ...]) -> Finding:
    """Python 3.11 to 3.13 is what the packages support."""
    shown = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if (3, 11) <= version[:2] < (3, 14):
        return Finding("ok", "python", shown)
    return Finding("fail", "python", shown, "use Python 3.11, 3.12 or 3.13: `uv python install 3.12`")


def check_cores(cores: int) -> Finding:
    """A trainer and an engine run side by side, so one core is slow."""
    if cores >= 2:
        return Finding("ok", "cores", str(cores))
    return Finding("warn", "cores", str(cores), "2 cores or more are better: trainer and engine are two processes")


def available_memory() -> float | None:
    """Bytes that can still be used, within the limit of the container; None when nobody says."""
    free: list[float] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free.append(float(lines["MemAvailable"].split()[0]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free.append(float(text) - float(used.read_text()))
    return min(free) if free else None


def check_memory(available: float | None) -> Finding:
    """The smallest run (Ray, one trainer and one engine on CPU) takes about 5 GB."""
    if available is None:
        return Finding("warn", "memory", "unknown", "make sure that 6 GB are free")
    shown = f"{available / GB:.1f} GB available"
    if available < 3 * GB:
        return Finding("fail", "memory", shown, "end other programs: Ray, a trainer and an engine need about 5 GB")
    if available < 6 * GB:
        return Finding("warn", "memory", shown, "about 5 GB are needed on CPU; end other programs if a run is killed")
    return Finding("ok", "memory", shown)


def check_gpus(tool: str | None = None) -> list[Finding]:
    """One finding a GPU, as the driver sees them.

    Args:
        tool: path of ``nvidia-smi``; by default the one on PATH.
    """
    tool = tool or shutil.which("nvidia-smi")
    if tool is None:
        return [Finding("ok", "GPU", "none (no nvidia-smi): runs use the CPU")]
    query = "index,name,memory.total,memory.used,driver_version"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)).strip()
        fix = "repair the NVIDIA driver, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPU"
        return [Finding("fail", "GPU", f"nvidia-smi fails: {said.splitlines()[0]}", fix)]
    found = []
    for line in listed.strip().splitlines():
        index, name, total, used, driver = (part.strip() for part in line.split(","))
        detail = f"{name}, {float(total) / 1024:.0f} GiB, driver {driver}"
        if float(used) > 0.1 * float(total):
            fix = "end the program that holds it (nvidia-smi names it), or choose GPUs with CUDA_VISIBLE_DEVICES"
            found.append(Finding("warn", f"GPU {index}", f"{detail}, {float(used) / 1024:.0f} GiB in use", fix))
        else:
            found.append(Finding("ok", f"GPU {index}", detail))
    return found or [Finding("ok", "GPU", "none: runs use the CPU")]


def installed_version(package: str) -> str | None:
    """Version of an installed package, None when it is missing; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(version_of: Callable[[str], str | None], *, has_gpu: bool) -> Iterator[Finding]:
    """The engines and libraries that a run uses; on a machine with GPUs SGLang's CUDA kernels too."""
    for package in _PACKAGES:
        version = version_of(package)
        if version is None:
            yield Finding("fail", package, "not installed", "install everything with `uv sync`")
        elif package == "torch" and has_gpu and version.endswith("+cpu"):
            yield Finding(
                "fail", package, f"{version}, without CUDA", "install the CUDA build with `uv sync --extra gpu`"
            )
        else:
            yield Finding("ok", package, version)
    if has_gpu:
        for package in _GPU_PACKAGES:
            version = version_of(package)
            if version is None:
                yield Finding("fail", package, "not installed", "SGLang needs it on a GPU: `uv sync --extra gpu`")
            else:
                yield Finding("ok", package, version)


def check_space(name: str, folder: Path, *, warn: float, fail: float, fix: str) -> Finding:
    """Free bytes of the file system that holds ``folder``."""
    free = shutil.disk_usage(folder).free
    shown = f"{free / GB:.1f} GB free in {folder}"
    if free < fail:
        return Finding("fail", name, shown, fix)
    return Finding("warn", name, shown, fix) if free < warn else Finding("ok", name, shown)
