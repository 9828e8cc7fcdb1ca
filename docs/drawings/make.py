"""Draws the pictures of the documentation: `uv run python docs/drawings/make.py`; `--check` only compares.

Each drawing has a paper of its own, so that it can be read on a light and on a dark page.
"""

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent

PAPER, INK, QUIET, RED = "#fffdf7", "#1d2733", "#5b6876", "#b3261e"
BLUE, GREEN, SAND, ROSE, GREY = "#d6e6fb", "#d8f0db", "#f8e7c4", "#f9d9d6", "#e8eaee"

MONOSPACE = "DejaVu Sans Mono, Menlo, Consolas, monospace"

Point = tuple[float, float]


class Drawing:
    """An SVG of boxes, arrows and texts; sizes are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(
        self, at: Point, words: str, *, size: int = 13, color: str = INK, anchor: str = "start", bold: bool = False
    ) -> None:
        """One line of text; its baseline starts (or is centred, or ends) at ``at``. Words in backticks are code."""
        weight = ' font-weight="600"' if bold else ""
        pieces = words.split("`")
        spans = "".join(
            f'<tspan font-family="{MONOSPACE}" font-size="{size - 1}">{html.escape(p)}</tspan>'
            if i % 2
            else html.escape(p)
            for i, p in enumerate(pieces)
        )
        self._parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight} '
            f'xml:space="preserve">{spans}</text>'
        )

    def box(
        self, corner: Point, size: Point, lines: Sequence[str] = (), *, fill: str = GREY, dashed: bool = False
    ) -> None:
        """A box whose first line is bold; the lines are centred in it."""
        (x, y), (w, h) = corner, size
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}" stroke="{INK}" '
            f'stroke-width="1"{dash}/>'
        )
        top = y + h / 2 - (len(lines) - 1) * 8.5 + 4.5
        for i, line in enumerate(lines):
            self.text((x + w / 2, top + i * 17), line, anchor="middle", bold=i == 0, size=13 if i == 0 else 12)

    def line(self, points: Sequence[Point], *, dashed: bool = False, head: bool = True, color: str = INK) -> None:
        """A line through ``points``, an arrow unless ``head`` is False."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        end = f' marker-end="url(#{"red" if color == RED else "head"})"' if head else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.4"{dash}{end}/>')

    def svg(self) -> str:
        """The whole file."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0,1 L10,5 L0,9 z" fill="{color}"/></marker>'
            for name, color in (("head", INK), ("red", RED))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif" role="img">\n'
            f"<title>{html.escape(self.title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PAPER}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def packages() -> Drawing:
    """Who may import whom."""
    d = Drawing(860, 300, "Five packages and who may import whom")
    d.box((30, 110), (190, 80), ("relax-cli", "options, placement,", "controllers, metrics"), fill=SAND)
    d.box((330, 20), (220, 72), ("relax-rollout", "engines, rewards, filters,", "weight sync"), fill=BLUE)
    d.box(
        (330, 114), (220, 72), ("relax-train", "Megatron-core model, losses,", "checkpoints, weight export"), fill=GREEN
    )
    d.box(
        (330, 208), (220, 72), ("relax-profiling", "recorders, trace reader, report", "imports none of ours"), fill=ROSE
    )
    d.box((640, 66), (190, 76), ("relax-data", "types, prompts, packing,", "options; no torch"), fill=GREY)
    d.line([(220, 135), (275, 135), (275, 56), (328, 56)])
    d.line([(220, 150), (328, 150)])
    d.line([(220, 165), (275, 165), (275, 244), (328, 244)])
    d.line([(550, 56), (595, 56), (595, 95), (638, 95)])
    d.line([(550, 150), (595, 150), (595, 113), (638, 113)])
    d.line([(125, 110), (125, 10), (735, 10), (735, 64)])
    d.text((640, 230), "an arrow: may import", size=12, color=QUIET)
    d.text((640, 248), "there is no other arrow", size=12, color=QUIET)
    return d


def _lanes(d: Drawing, lanes: Sequence[tuple[str, str, float, float]], left: float) -> None:
    for name, what, y, h in lanes:
        d.line([(left, y), (d.width - 20, y)], head=False, color="#c9cdd3")
        d.text((24, y + h / 2 - 2), name, bold=True)
        d.text((24, y + h / 2 + 15), what, size=11, color=QUIET)


def colocate() -> Drawing:
    """One step of the colocate mode over time."""
    d = Drawing(1000, 520, "One step of the colocate mode: who works, who waits, until when")
    lanes = [("driver", "one process", 50, 60), ("rollout worker", "one actor", 110, 92)]
    lanes += [("engines", "SGLang servers", 202, 92), ("trainer ranks", "one a GPU", 294, 92)]
    _lanes(d, lanes, 20)
    d.line([(20, 386), (980, 386)], head=False, color="#c9cdd3")
    a, b, c, e, f = 150, 400, 640, 720, 900
    for x, w, words in (
        (a, 240, "generate(t)"),
        (b, 230, "train(t)"),
        (c, 70, "save"),
        (e, 170, "push(t+1)"),
        (f, 80, "report"),
    ):
        d.box((x, 62), (w, 36), (words,), fill=SAND)
    d.box(
        (a, 124), (240, 64), ("prompts -> groups", "generate, reward, filter", "keeps the rows of rollout t"), fill=BLUE
    )
    d.box((b, 124), (150, 64), ("hands out rows", "each rank asks", "for its own samples"), fill=BLUE)
    d.box((c, 124), (70, 64), ("state", "cursor,", "ledger"), fill=BLUE)
    d.box((a, 216), (240, 64), ("generate with version t", "tokens, log-probs,", "version of each token"), fill=BLUE)
    d.box(
        (b, 216), (310, 64), ("asleep", "memory given to the trainer", "(only on shared GPUs)"), fill=PAPER, dashed=True
    )
    d.box((e, 216), (170, 64), ("load weights t+1", "paused; then every engine", "names its version"), fill=BLUE)
    d.box(
        (a, 308),
        (240, 64),
        ("asleep", "weights and optimizer in host", "memory (only on shared GPUs)"),
        fill=PAPER,
        dashed=True,
    )
    d.box(
        (b, 308), (230, 64), ("rows -> weights t+1", "log-probs, advantages,", "gradient, optimizer step"), fill=GREEN
    )
    d.box((c, 308), (70, 64), ("write", "the", "folder"), fill=GREEN)
    d.box((e, 308), (170, 64), ("export buckets", "full tensors, Hugging", "Face names"), fill=GREEN)
    d.line([(a + 100, 188), (a + 100, 214)])
    d.line([(a + 140, 216), (a + 140, 190)])
    d.line([(b + 20, 188), (b + 20, 306)])
    d.line([(e + 85, 308), (e + 85, 282)])
    d.text(
        (150, 38), "t is the id of the rollout and the version of the weights that generate it.", size=12, color=QUIET
    )
    d.text((150, 412), "Who waits for whom, and how long at most", bold=True)
    waits = (
        "driver: the call that it made (24 h each), the versions of the engines (120 s)",
        "rollout worker: engines and rewards; gives up after 5400 s in which no sample is generated or scored",
        "engine call: one response 3600 s; a server that says nothing 300 s; one bucket 600 s; one reward call 600 s",
        "trainer rank: its rows (120 s); an engine that takes a bucket (600 s); the slowest rank",
    )
    for i, words in enumerate(waits):
        d.text((150, 434 + i * 20), words, size=12)
    return d


def fully_async() -> Drawing:
    """One step of the fully-async mode."""
    d = Drawing(1000, 560, "One step of the fully-async mode")
    d.text((24, 32), "Step t: engines generate for later steps while the ranks train", bold=True)
    lanes = [("driver", "one process", 50, 70), ("rollout worker", "runs all the time", 120, 92)]
    lanes += [
        ("engines", "on GPUs of their own", 212, 92),
        ("rows", "in rollout worker", 304, 56),
        ("trainer ranks", "other GPUs", 360, 92),
    ]
    _lanes(d, lanes, 20)
    d.line([(20, 452), (980, 452)], head=False, color="#c9cdd3")
    for x, w, words in (
        (170, 140, ("next_step(t)", "manifest")),
        (320, 230, ("train(t)", "settle: t is trained")),
        (560, 110, ("begin_push", "t+1")),
        (680, 120, ("push(t+1)", "")),
        (810, 90, ("end_push", "")),
        (910, 70, ("t+1 ...", "")),
    ):
        d.box((x, 64), (w, 44), tuple(p for p in words if p), fill=SAND)
    d.box(
        (170, 134),
        (380, 64),
        (
            "producer: start groups as long as the gate allows",
            "generate, reward, filter; whole groups are kept",
            "no sample becomes older than --max-staleness",
        ),
        fill=BLUE,
    )
    d.box(
        (560, 134),
        (340, 64),
        (
            "hold: requests are interrupted, tokens kept",
            "their samples go on with version t+1",
            "a checkpoint is taken here: all is at rest",
        ),
        fill=BLUE,
    )
    d.box((910, 134), (70, 64), ("...",), fill=BLUE)
    d.box((170, 226), (380, 64), ("generate with version t", "while the ranks train step t"), fill=BLUE)
    d.box(
        (560, 226),
        (340, 64),
        ("paused, load t+1", "one process group for each engine: NCCL or gloo", "a dead engine blocks no other"),
        fill=BLUE,
    )
    d.box((910, 226), (70, 64), ("version", "t+1"), fill=BLUE)
    d.box((170, 314), (730, 36), ("TransferQueue: the rows of each group, from when it is whole to settle",), fill=GREY)
    d.box(
        (320, 376),
        (230, 64),
        ("fetch own rows, train", "log-probs, advantages,", "gradient, optimizer step"),
        fill=GREEN,
    )
    d.box((680, 376), (120, 64), ("buckets", "to the engines"), fill=GREEN)
    d.line([(240, 198), (240, 312)])
    d.line([(430, 350), (430, 374)])
    d.line([(740, 376), (740, 292)])
    d.text((170, 476), "Who waits for whom, and how long at most", bold=True)
    waits = (
        "producer: the gate (a push, a closed step, a dropped prompt).  driver in next_step: a finished group, 5400 s",
        "trainer ranks: their rows, 60 s.  begin_push: an evaluation that runs; requests that end, 60 s",
        "a rank that feeds an engine: broadcast and answer, 600 s.  held samples: end_push",
    )
    for i, words in enumerate(waits):
        d.text((170, 498 + i * 19), words, size=12)
    return d


def data_path() -> Drawing:
    """One prompt's way."""
    d = Drawing(1060, 880, "One prompt's way: from a row of a file to new weights")
    for x, w, name in ((20, 400, "rollout worker"), (440, 170, "driver"), (630, 410, "trainer rank")):
        d.box((x, 16), (w, 34), (name,), fill=PAPER)
    left, right, w = 30, 640, 380
    steps = [
        ("`Row`: one line of a file", "readers/jsonl.py, parquet.py, hub.py", BLUE),
        ("`Prompt`: text, tokens, label, prompt_id", "prompts/template.py, source.py, streaming.py", BLUE),
        ("`SampleGroup` of n `Sample`; ledger: OUT", "loop/feed.py, prompts/ledger.py", BLUE),
        (
            "`GenerateRequest` to the least loaded engine",
            "loop/runner.py, generation/generate.py, engines/router.py",
            BLUE,
        ),
        ("SGLang server: `/generate` over HTTP", "engines/sglang/client.py, transport.py, server.py", GREY),
        ("`GenerateResult` -> `Sample.append`", "tokens, log-probs, version and mask of each token", BLUE),
        ("reward: `Sample.reward`", "rewards/base.py", BLUE),
        ("filter: kept, or dropped with a reason", "loop/context.py, filters.py; ledger: BUFFERED or DROPPED", BLUE),
        ("`TrainBatch`: the rows; ledger: ASSIGNED", "types.py, relax_cli/workers/rollout.py", BLUE),
    ]
    y, step = 66, 74
    for i, (head, where, fill) in enumerate(steps):
        d.box((left, y + i * step), (w, 54), (head, where), fill=fill)
        if i:
            d.line([(left + w / 2, y + i * step - 20), (left + w / 2, y + i * step - 2)])
    last = y + 8 * step
    d.box(
        (450, last - 20),
        (150, 94),
        ("`StepManifest`", "lengths, rewards,", "ids, names:", "60 bytes a sample"),
        fill=SAND,
    )
    d.line([(left + w, last + 18), (448, last + 18)])
    right_steps = [
        ("`plan_micro_batches`: which samples are mine", "batching.py; relax_data/packing/pack.py", GREEN),
        ("`RankBatch`: rows of my own samples, fetched", "rows.py; relax_cli/workers/references.py", GREEN),
        ("log-probs of policy and reference", "step.py, algorithms/logprobs.py, reference.py", GREEN),
        ("advantage of each token", "algorithms/advantages.py, estimators.py", GREEN),
        ("`MicroBatch`: packed documents", "batching.py", GREEN),
        ("loss -> gradient", "step.py, algorithms/losses.py, surrogates.py", GREEN),
        ("optimizer step: weights t+1", "step.py, backend/optimizer.py", GREEN),
        ("`Bucket`: whole tensors, Hugging Face names", "models/export.py; relax_data/weights.py", GREEN),
        ("`WeightTransport.push`", "relax_rollout/weight_sync/", GREEN),
    ]
    for i, (head, where, fill) in enumerate(right_steps):
        d.box((right, y + i * step), (w, 54), (head, where), fill=fill)
        if i:
            d.line([(right + w / 2, y + i * step - 20), (right + w / 2, y + i * step - 2)])
    # The manifest goes by the driver, the rows do not.
    d.line([(525, last - 20), (525, y + 27), (right - 2, y + 27)])
    for i, words in enumerate(("the manifest", "and a reference", "to the rows;", "never a row")):
        d.text((533, y + 150 + 17 * i), words, size=12, color=QUIET)
    bottom = last + 54
    d.line(
        [
            (left + 60, bottom),
            (left + 60, bottom + 86),
            (1046, bottom + 86),
            (1046, y + step + 27),
            (right + w + 2, y + step + 27),
        ],
        color=RED,
    )
    d.text(
        (left + 74, bottom + 78),
        "rows: from the rollout worker straight to the rank that asks (`RowSource.fetch`), never through the driver",
        size=12,
        color=RED,
    )
    d.line(
        [
            (right + w / 2, bottom),
            (right + w / 2, bottom + 44),
            (10, bottom + 44),
            (10, y + 4 * step + 27),
            (left - 2, y + 4 * step + 27),
        ]
    )
    d.text((left + 74, bottom + 38), "weights t+1 to the engines: the next rollout has version t+1", size=12)
    d.text(
        (left, bottom + 122),
        "Files: on the left in relax_data (readers, prompts, types.py) and relax_rollout; on the right in relax_train.",
        size=12,
        color=QUIET,
    )
    d.text(
        (left, bottom + 142),
        "When the next rollout begins, or the state is saved, the ledger books the prompts of the step as TRAINED.",
        size=12,
        color=QUIET,
    )
    return d


def push() -> Drawing:
    """The steps of a push of weights."""
    d = Drawing(1000, 430, "A push of weights: begin, bucket after bucket, end; and what a failure leaves")
    xs, w = (30, 270, 510, 750), 210
    heads = ("all ranks", "all ranks, for each bucket", "all ranks", "driver")
    for x, head in zip(xs, heads, strict=True):
        d.text((x + w / 2, 28), head, anchor="middle", bold=True)
    d.box((xs[0], 64), (w, 84), ("`begin_update(t+1)`", "pause, end what runs,", "mark: `pushing:t+1`"), fill=GREEN)
    d.box((xs[1], 64), (w, 84), ("make a `Bucket`; `load` it", "at most two buckets", "exist on a rank"), fill=GREEN)
    d.box((xs[2], 64), (w, 84), ("`end_update(t+1)`", "empty the cache, mark: `t+1`,", "generate again"), fill=GREEN)
    d.box((xs[3], 64), (w, 84), ("ask every engine", "all must name t+1,", "else the run stops"), fill=SAND)
    for x in xs[:-1]:
        d.line([(x + w, 106), (x + w + 28, 106)])
    d.line([(xs[1] + 150, 64), (xs[1] + 150, 46), (xs[1] + 190, 46), (xs[1] + 190, 62)])
    d.text((640, 180), "After each part the ranks agree:", size=12, color=QUIET)
    d.text((640, 197), "an error of one is an error of all.", size=12, color=QUIET)
    d.line([(xs[0] + 80, 148), (xs[0] + 80, 206), (xs[1] + 20, 206), (xs[1] + 20, 226)], color=RED, dashed=True)
    d.line([(xs[1] + 105, 148), (xs[1] + 105, 226)], color=RED, dashed=True)
    d.line([(xs[2] + 80, 148), (xs[2] + 80, 206), (xs[1] + 190, 206), (xs[1] + 190, 226)], color=RED, dashed=True)
    d.box(
        (xs[1] - 40, 230),
        (w + 80, 84),
        ("a failure, anywhere", "`end_update(t+1, whole=False)`", "mark: `broken:t+1`, stays paused"),
        fill=ROSE,
    )
    d.box(
        (xs[2] + 60, 230),
        (400, 84),
        (
            "`WeightPushFailed` on every rank: the run ends",
            "a broken engine refuses to generate in every",
            "process, until a whole push has come",
        ),
        fill=ROSE,
    )
    d.line([(xs[1] + w + 40, 272), (xs[2] + 58, 272)], color=RED)
    d.text(
        (30, 350),
        "The engine itself keeps the mark, and sends it with each of its answers. So a mixture of two versions is seen",
        size=12,
    )
    d.text(
        (30, 368),
        "by every client, also when the process that pushed was killed: the mark then still says `pushing`.",
        size=12,
    )
    d.text((30, 396), "Deadlines: one bucket 600 s, pausing and emptying the cache 120 s each.", size=12)
    return d


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "packages.svg": packages,
    "colocate.svg": colocate,
    "fully-async.svg": fully_async,
    "data-path.svg": data_path,
    "weight-push.svg": push,
}


def main(arguments: list[str]) -> int:
    """Writes the drawings, or says which of them are not what this script draws."""
    stale = []
    for name, draw in DRAWINGS.items():
        file, text = HERE / name, draw().svg()
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            file.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"docs/drawings/{name} " + ("is stale: run docs/drawings/make.py" if "--check" in arguments else "written")
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
