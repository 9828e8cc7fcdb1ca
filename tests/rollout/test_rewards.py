"""Rewards: each kind, and what they say when something is wrong."""

import asyncio
import dataclasses
import json
import threading
import typing
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus
from relax_rollout.rewards import RewardError, build_reward
from relax_rollout.rewards.build import REWARDS
from relax_rollout.rewards.math import MathReward
from relax_rollout.rewards.math_labels import LabelError, label_text
from relax_rollout.rewards.math_worker import compare
from relax_rollout.settings import RewardSettings

Hooks = Callable[[str, str], str]


def sample(response: str, label: Any = "42", index: int = 0) -> Sample:
    prompt = Prompt(prompt_id=3, epoch=0, source="data.jsonl:4", text="6*7=", input_ids=[5, 6], label=label)
    return Sample(prompt, index, SampleStatus.COMPLETED, response=response)


def group(*responses: str) -> SampleGroup:
    samples = [sample(r, index=i) for i, r in enumerate(responses)]
    return SampleGroup(samples[0].prompt, samples)


async def test_exact_match() -> None:
    reward = build_reward(RewardSettings(rm_type="exact-match"))
    scored = group("42", " 42\n", "43", "")
    await reward(scored)
    assert scored.rewards == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        (" 42 ", ["42", "42\n"], ["42.0"]),
        (42, ["42"], ["42.0"]),
        (2.0, ["2", "2.0"], ["2.00", "20"]),
        (2.5, ["2.5"], ["2"]),
        (Decimal("2.00"), ["2", "2.00"], ["2.0"]),
        (Decimal("-0.10"), ["-0.10"], ["0"]),
        (True, ["True", "true"], ["1"]),
    ],
)
async def test_exact_match_reads_numbers_as_they_are_written(label: Any, right: list[str], wrong: list[str]) -> None:
    samples = [sample(r, label=label) for r in right + wrong]
    for one in samples:
        await build_reward(RewardSettings(rm_type="exact-match"))(one)
    assert [s.reward for s in samples] == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("label", [{"a": 1}, [1], float("nan"), float("inf"), Decimal("NaN"), date(2024, 2, 29), b"4"])
async def test_exact_match_refuses_labels_that_are_neither_text_nor_number(label: Any) -> None:
    with pytest.raises(RewardError, match=r"data.jsonl:4 response 0: --rm-type exact-match .*--custom-rm-path"):
        await build_reward(RewardSettings(rm_type="exact-match"))(sample("42", label=label))


async def test_a_row_without_label_is_named() -> None:
    with pytest.raises(RewardError, match=r"data.jsonl:4 response 0.*--label-key"):
        await build_reward(RewardSettings(rm_type="exact-match"))(sample("42", label=None))


async def test_math_compares_by_value() -> None:
    reward = MathReward(max_workers=2, time_limit_s=120.0)
    try:
        answers = {
            r"so it is \boxed{\frac{84}{2}}": 1.0,
            "The answer is 42.": 1.0,
            r"\boxed{41}": 0.0,
            "": 0.0,
        }
        scored = group(*answers)
        await reward(scored)
        assert scored.rewards == list(answers.values())
        assert all(s.reward_info == {"math_limit_hit": 0} for s in scored.samples)
        fraction = sample(r"\boxed{0.5}", label=r"\frac{1}{2}")
        await reward(fraction)
        assert fraction.reward == 1.0
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("2x+3", [r"\boxed{2x+3}", r"\boxed{3+2x}", "2x+3"], [r"\boxed{2}", r"\boxed{3}"]),
        ("(1, 2)", [r"\boxed{(1, 2)}"], [r"\boxed{2}", r"\boxed{(2, 1)}"]),
        ("[0, 1)", [r"\boxed{[0, 1)}"], [r"\boxed{1}", r"\boxed{[0, 1]}"]),
        ("2^{10}", [r"\boxed{1024}"], [r"\boxed{2}"]),
        ("y = 2x + 1", [r"\boxed{y = 2x + 1}"], [r"\boxed{1}"]),
        ("12:30", [r"\boxed{12:30}"], [r"\boxed{12}"]),
        ("1331 and 1728", [r"\boxed{1331 \text{ and } 1728}"], [r"\boxed{1728}"]),
        ("$2x+3$", [r"\boxed{2x+3}"], [r"\boxed{2}"]),
        ("The answer is $4$", [r"\boxed{4}"], [r"\boxed{5}"]),
        (r"so \boxed{\frac{1}{2}}", [r"\boxed{0.5}"], [r"\boxed{1}"]),
        ("He sold 48/2 = 24.\n#### 1,072", [r"\boxed{1072}", "1072"], [r"\boxed{24}"]),
        ("1 1/2", [r"\boxed{\frac{3}{2}}", r"\boxed{1.5}"], [r"\boxed{1}"]),
        ("50%", [r"\boxed{50\%}", r"\boxed{0.5}", "50%"], [r"\boxed{5}"]),
        ("3·4", [r"\boxed{12}"], [r"\boxed{3}"]),
        ("1 + sqrt(5)", [r"\boxed{1+\sqrt{5}}"], [r"\boxed{5}", r"\boxed{1}"]),
        (r"33\frac{1}{3}\%", [r"\boxed{\frac{1}{3}}"], [r"\boxed{3}"]),
        ("3.50 \N{EURO SIGN}", [r"\boxed{3.5}"], [r"\boxed{50}"]),
        ("pi/2", [r"\boxed{\frac{\pi}{2}}"], [r"\boxed{\frac{1}{2}}"]),
        ("6 cm^2", [r"\boxed{6}", r"\boxed{6\text{ cm}^2}"], [r"\boxed{36}"]),
        ("Paris", [r"\boxed{\text{Paris}}", "The answer is Paris."], [r"\boxed{Pairs}", ""]),
        ("2024-01-01", [r"\boxed{2024-01-01}"], [r"\boxed{2022}"]),
        (r"\begin{pmatrix}" + " & ".join(map(str, range(60))) + r"\end{pmatrix}", [], [r"\boxed{59}"]),
        ("C", [r"\boxed{C}", "The answer is C."], [r"\boxed{D}"]),
        (1e-7, [r"\boxed{10^{-7}}"], [r"\boxed{0}"]),
        (2.0, [r"\boxed{2}"], [r"\boxed{20}"]),
    ],
)
def test_math_reads_a_label_whole(label: Any, right: list[str], wrong: list[str]) -> None:
    text = label_text(label)
    assert text is not None
    assert [compare(r, text) for r in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    "label",
    [
        "2x+3)",
        "1.5 million",
        "2 hours 30 minutes",
        "x is $3$ of 4",
        "If $x=2$ then $y=z$",
        "0.333...",
        "1e999",
        "",
        "$$",
        r"\boxed{4",
        "so we know " * 10,
        "1.\n2.",
    ],
)
def test_math_refuses_a_label_that_it_cannot_read_whole(label: str) -> None:
    with pytest.raises(LabelError, match=r"the label .* cannot be compared.*correct the row"):
        compare(r"\boxed{4}", label)


async def test_math_names_the_row_of_a_label_that_it_cannot_read() -> None:
    reward = MathReward(max_workers=1, time_limit_s=120.0)
    try:
        with pytest.raises(RewardError, match=r"^data.jsonl:4 response 0: --rm-type math: the label '2x\+3\)'"):
            await reward(sample(r"\boxed{3}", label="2x+3)"))
    finally:
        await reward.close()


@pytest.mark.parametrize("label", [{"ground_truth": "72"}, ["72"], True, float("nan"), Decimal("Infinity"), b"4"])
async def test_math_refuses_labels_that_are_neither_text_nor_number(label: Any) -> None:
    with pytest.raises(RewardError, match=r"data.jsonl:4 response 0: --rm-type math .*--label-key.*--custom-rm-path"):
        await MathReward(max_workers=1)(sample("72", label=label))


async def test_math_ends_a_comparison_that_does_not_return() -> None:
    reward = MathReward(max_workers=1, time_limit_s=2.0)
    try:
        bomb = sample(r"\boxed{9^{9^{9^{9}}}+1}", label="3")
        await asyncio.wait_for(reward(bomb), 400)
        assert (bomb.reward, bomb.reward_info) == (0.0, {"math_limit_hit": 1})
        reward._time_limit_s = 120.0  # the worker that replaces it need not be quick
        after = sample(r"\boxed{42}")
        await reward(after)
        assert after.reward == 1.0
    finally:
        await reward.close()


async def test_custom_sync_async_and_dict_with_key(hooks: Hooks) -> None:
    path = hooks(
        "mine",
        "def plain(sample):\n    return len(sample.response) if sample.label == sample.prompt.label else -1\n"
        "async def later(sample):\n    return {'score': 0.5, 'length': len(sample.response)}\n"
        "def whole(samples):\n    best = max(len(s.response) for s in samples)\n"
        "    return [float(len(s.response) == best) for s in samples]\n",
    )
    one = sample("abc")
    await build_reward(RewardSettings(custom_rm_path=f"{path}:plain"))(one)
    assert one.reward == 3.0
    two = sample("abc")
    await build_reward(RewardSettings(custom_rm_path=f"{path}:later", reward_key="score"))(two)
    assert (two.reward, two.reward_info) == (0.5, {"length": 3})
    many = group("a", "abc", "ab")
    await build_reward(RewardSettings(custom_rm_path=f"{path}:whole", group_rm=True))(many)
    assert many.rewards == [0.0, 1.0, 0.0]


async def test_a_scored_sample_is_not_scored_again(hooks: Hooks) -> None:
    path = hooks("once", "def f(sample):\n    raise AssertionError('scored twice')\n")
    done = sample("x")
    done.reward = 0.25
    await build_reward(RewardSettings(custom_rm_path=f"{path}:f"))(done)
    assert done.reward == 0.25


async def test_a_reward_that_raises_names_sample_function_and_traceback(hooks: Hooks) -> None:
    path = hooks("broken", "def score(sample):\n    return helper(sample)\ndef helper(s):\n    return {}['answer']\n")
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:score"))
    with pytest.raises(RewardError) as caught:
        await reward(group("a", "b"))
    message = str(caught.value)
    assert "data.jsonl:4 response 0" in message
    assert f"--custom-rm-path {path}:score raised KeyError: 'answer'" in message
    assert "in helper" in message
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    ("raised", "message"),
    [
        ("SystemExit(3)", "SystemExit: 3"),
        ("KeyboardInterrupt", "KeyboardInterrupt: "),
        ("asyncio.CancelledError", "CancelledError: "),
        ("TimeoutError('mine')", "TimeoutError: mine"),
        ("type('Mute', (Exception,), {'__str__': lambda e: 1 / 0})", r"Mute: \(its message cannot be shown"),
    ],
)
async def test_whatever_a_reward_raises_is_an_error_that_names_it(
    hooks: Hooks, kind: str, raised: str, message: str
) -> None:
    path = hooks("exits", f"import asyncio\n{kind} score(sample):\n    raise {raised}\n")
    with pytest.raises(RewardError, match=rf"data\.jsonl:4 response 0: .*exits.*:score raised .*{message}"):
        await build_reward(RewardSettings(custom_rm_path=f"{path}:score"))(group("a"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("True", 1.0),
        ("2**70", 2.0**70),
        ("np.float32(0.5)", 0.5),
        ("np.array(0.5)", 0.5),
        ("np.bool_(True)", 1.0),
        ("torch.tensor(0.5)", 0.5),
        ("Decimal('0.5')", 0.5),
        ("Fraction(1, 2)", 0.5),
    ],
)
@pytest.mark.parametrize("key", [None, "score"])
async def test_every_kind_of_number_is_a_reward(hooks: Hooks, value: str, expected: float, key: str | None) -> None:
    returned = value if key is None else f"{{'score': {value}, 'other': np.float32(2)}}"
    imports = "from decimal import Decimal\nfrom fractions import Fraction\nimport numpy as np, torch\n"
    path = hooks("numbers", f"{imports}def f(sample):\n    return {returned}\n")
    one = sample("x")
    await build_reward(RewardSettings(custom_rm_path=f"{path}:f", reward_key=key))(one)
    assert (one.reward, one.reward_info) == (expected, {} if key is None else {"other": 2.0})
    assert type(one.reward) is float


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        ("return {'a': 1}", {}, "returned a dict with a; say with --reward-key"),
        ("return {'a': 1}", {"reward_key": "b"}, "without --reward-key 'b'; it has a"),
        ("return 1.0", {"reward_key": "b"}, "needs a dict"),
        ("return 'good'", {}, "returned 'good', which is no number"),
        ("return '0.5'", {}, "returned '0.5', which is no number; return a float"),
        ("return None", {}, "returned None, which is no number"),
        ("return float('nan')", {}, "must be finite"),
        ("return 10**400", {}, "a reward must be finite"),
        ("return 10**5000", {}, "returned a int that cannot be shown (ValueError); a reward must be finite"),
        ("return type('Odd', (), {'__float__': lambda o: 1 / 0})()", {}, "which is no number"),
        ("d = {'a': 1}; d['b'] = d; return d", {"reward_key": "a"}, "returned a dict of which"),
        ("return [1.0]", {"group_rm": True}, "1 rewards for 2 samples"),
        ("return 1.0", {"group_rm": True}, "a float for 2 samples"),
        ("return {'a': 1, 'b': object()}", {"reward_key": "a"}, "cannot be stored in a checkpoint"),
    ],
)
async def test_a_wrong_return_value_is_named(hooks: Hooks, body: str, options: dict[str, Any], expected: str) -> None:
    path = hooks("wrong", f"def f(x):\n    {body}\n")
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:f", **options))
    with pytest.raises(RewardError, match=r"data.jsonl:4") as caught:
        await reward(group("a", "b"))
    assert expected in str(caught.value)


async def test_a_reward_that_hangs_is_an_error_that_names_it(hooks: Hooks) -> None:
    path = hooks("slow", "import asyncio\nasync def f(sample):\n    await asyncio.Event().wait()\n")
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:f"))
    reward._timeout_s = 0.05
    with pytest.raises(RewardError, match=r"response 0: --custom-rm-path .*did not answer within"):
        await reward(sample("x"))


async def test_at_most_reward_max_concurrency_calls_at_once(hooks: Hooks) -> None:
    path = hooks(
        "counted",
        "import asyncio\nnow = most = 0\n"
        "async def f(sample):\n"
        "    global now, most\n"
        "    now += 1; most = max(most, now)\n"
        "    await asyncio.sleep(0); await asyncio.sleep(0)\n"
        "    now -= 1\n"
        "    return most\n",
    )
    many = group(*"abcdefgh")
    await build_reward(RewardSettings(custom_rm_path=f"{path}:f", reward_max_concurrency=3))(many)
    assert max(many.rewards) == 3.0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("json:dump_s", "did you mean 'dump"),
        ("json:__doc__", "not a function"),
        ("json.no_such:f", "importing json.no_such failed"),
        ("raise SystemExit(3)", "failed: SystemExit: 3"),
        ("import asyncio; raise asyncio.CancelledError", "failed: CancelledError"),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda e: 1 / 0})",
            "failed: Mute: (its message cannot be shown",
        ),
    ],
)
def test_a_function_that_cannot_be_imported(hooks: Hooks, path: str, expected: str) -> None:
    if "raise" in path:
        path = hooks("unimportable", f"{path}\n\ndef f(sample):\n    return 1.0\n") + ":f"
    with pytest.raises(ValueError, match="--custom-rm-path") as caught:
        build_reward(RewardSettings(custom_rm_path=path))
    assert expected in str(caught.value)


def test_no_reward_chosen_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"--rm-type exact-match or math, --custom-rm-path"):
        build_reward(RewardSettings())


class RewardServer(BaseHTTPRequestHandler):
    """Answers length of the response; fails the first call with 503."""

    calls: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.calls.append(body)
        if self.path == "/bad":
            self._answer(400, {"detail": "no"})
        elif len(self.calls) == 1:
            self._answer(503, {})
        elif "samples" in body:
            self._answer(200, [{"score": len(s["response"])} for s in body["samples"]])
        else:
            self._answer(200, len(body["response"]))

    def _answer(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def reward_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    calls: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (RewardServer,), {"calls": calls}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_remote_repeats_a_transient_failure(reward_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, calls = reward_server
    reward = build_reward(RewardSettings(rm_url=url))
    one = sample("abcd")
    await reward(one)
    await reward.close()
    assert one.reward == 4.0
    assert len(calls) == 2
    assert calls[1] == {"prompt": "6*7=", "messages": None, "response": "abcd", "label": "42", "metadata": {}}


async def test_remote_scores_a_group_in_one_call(reward_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, calls = reward_server
    reward = build_reward(RewardSettings(rm_url=url, group_rm=True, reward_key="score"))
    many = group("a", "abc")
    await reward(many)
    await reward.close()
    assert many.rewards == [1.0, 3.0]
    assert len(calls) == 2


async def test_remote_refusal_is_not_repeated(reward_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, calls = reward_server
    reward = build_reward(RewardSettings(rm_url=f"{url}/bad"))
    with pytest.raises(RewardError, match=r"data.jsonl:4 response 0: --rm-url .*400"):
        await reward(sample("abcd"))
    await reward.close()
    assert len(calls) == 1


def test_a_reward_works_in_one_event_loop_after_another(hooks: Hooks) -> None:
    path = hooks("again", "async def f(sample):\n    return 1.0\n")
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:f", reward_max_concurrency=1))
    for _ in range(2):
        many = group("a", "b", "c")
        asyncio.run(reward(many))
        assert many.rewards == [1.0, 1.0, 1.0]


def test_the_table_of_reward_types_is_what_the_option_takes_and_every_one_is_built() -> None:
    annotation = typing.get_type_hints(RewardSettings)["rm_type"]
    (choices,) = (a for a in typing.get_args(annotation) if a is not type(None))
    assert typing.get_args(choices) == tuple(REWARDS)
    text = {f.name: f for f in dataclasses.fields(RewardSettings)}["rm_type"].metadata["help"]
    for name in REWARDS:
        assert callable(build_reward(RewardSettings(rm_type=name)))
        assert f"{name}: 1 when" in text


def test_a_new_reward_type_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    built = object()
    monkeypatch.setitem(REWARDS, "always", lambda settings: built)
    assert build_reward(RewardSettings(rm_type="always")) is built


def test_without_a_choice_the_message_names_the_types() -> None:
    with pytest.raises(ValueError, match="give --rm-type exact-match or math, --custom-rm-path"):
        build_reward(RewardSettings())
