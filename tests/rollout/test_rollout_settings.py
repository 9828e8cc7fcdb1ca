"""Settings of the rollout: every message names its flag; an option without effect is an error (invariant 7)."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from relax_rollout.settings import EQUAL_REWARDS_FILTER, SETTINGS, EvalSettings, RewardSettings, RolloutSettings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RolloutSettings(rollout_batch_size=0), "--rollout-batch-size must be 1 or more, not 0"),
        (RolloutSettings(n_samples_per_prompt=0), "--n-samples-per-prompt must be 1 or more, not 0"),
        (RolloutSettings(rollout_batch_size=8, over_sampling_batch_size=4), "set it to 8 or more"),
        (
            RolloutSettings(partial_rollout=True, partial_rollout_max_aborted_count=0),
            "--partial-rollout-max-aborted-count must be 1 or more, not 0: no sample would ever be interrupted",
        ),
        (RolloutSettings(rollout_max_context_len=1), "--rollout-max-context-len must be 2 or more, not 1"),
        (RolloutSettings(rollout_temperature=-0.1), "--rollout-temperature must be 0 or more, not -0.1"),
        (RolloutSettings(rollout_top_p=0), "--rollout-top-p must be above 0, not 0"),
        (RolloutSettings(rollout_top_k=0), "--rollout-top-k must be 1 or more, or -1, not 0"),
        (RolloutSettings(rollout_stop=("",)), "--rollout-stop holds an empty string"),
        (RolloutSettings(dynamic_sampling_filter_path="filters.keep"), "not of the form module:function"),
        (RolloutSettings(dynamic_sampling_filter_path="/tmp:keep"), "not of the form module:function"),
        (RolloutSettings(custom_generate_function_path="no_such_module:f"), "there is no module 'no_such_module'"),
        (RolloutSettings(rollout_function_path="missing.py:f"), "there is no file missing.py"),
        (RolloutSettings(dynamic_sampling_filter_path=EQUAL_REWARDS_FILTER), "--n-samples-per-prompt to 2"),
        (RewardSettings(rm_type="math", custom_rm_path="json:dumps"), "--rm-type and --custom-rm-path exclude"),
        (RewardSettings(rm_url="localhost:8000"), "must start with http://"),
        (RewardSettings(rm_url="http://[::1"), "--rm-url 'http://[::1' is no address (Invalid IPv6 URL)"),
        (RewardSettings(rm_url="http://"), "is no address (it needs the name of a host"),
        (RewardSettings(rm_url="http://a b/score"), "is no address (it needs"),
        (RewardSettings(rm_url="http://a:65536/score"), "is no address (Port out of range 0-65535)"),
        (RewardSettings(rm_url="http://a:0"), "is no address (it needs"),
        (RewardSettings(reward_max_concurrency=0), "--reward-max-concurrency must be 1 or more, not 0"),
        (EvalSettings(eval_prompt_data=("aime",)), "takes pairs"),
        (EvalSettings(eval_prompt_data=("a", "x", "a", "y")), "the name 'a' twice"),
        (EvalSettings(eval_prompt_data=("data/a.jsonl", "a")), "cannot be a name"),
        (EvalSettings(eval_prompt_data=("a", "x"), eval_top_p=2.0), "--eval-top-p must be 1 or less, not 2.0"),
    ],
)
def test_a_wrong_value_is_one_message(settings: RolloutSettings, expected: str) -> None:
    problems = settings.problems()
    assert len(problems) == 1
    assert expected in problems[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RolloutSettings(partial_rollout_max_aborted_count=3), "without --partial-rollout"),
        (RolloutSettings(mask_offpolicy_in_partial_rollout=True), "without --partial-rollout"),
        (RolloutSettings(rollout_temperature=0, rollout_top_p=0.9), "--rollout-top-p has no effect"),
        (
            RolloutSettings(rollout_function_path="json:dumps", over_sampling_batch_size=64),
            "collects the groups itself",
        ),
        (RewardSettings(rm_type="math", reward_key="score"), "--reward-key has no effect"),
        (RewardSettings(rm_type="exact-match", group_rm=True), "--group-rm has no effect"),
        (RewardSettings(rm_type="exact-match", reward_max_concurrency=2), "--reward-max-concurrency has no effect"),
        (EvalSettings(eval_temperature=0.0), "without --eval-prompt-data"),
    ],
)
def test_an_option_without_effect_is_an_error_when_the_user_gave_it(settings: RolloutSettings, expected: str) -> None:
    changed = frozenset(f.name for f in dataclasses.fields(settings) if f.default != getattr(settings, f.name))
    problems = settings.problems(changed)
    assert len(problems) == 1
    assert expected in problems[0]
    assert settings.problems() == []


@pytest.mark.parametrize("url", ["http://[::1]:65535/x", "https://reward.example/a?b=c", "http://10.0.0.1:1"])
def test_an_address_of_a_reward_server_is_right(url: str) -> None:
    assert RewardSettings(rm_url=url).problems() == []


def test_all_problems_are_reported_together() -> None:
    settings = RolloutSettings(rollout_batch_size=0, rollout_temperature=-1, rollout_top_k=-2)
    assert len(settings.problems()) == 3


def test_defaults_are_valid_and_every_field_has_help() -> None:
    for cls in SETTINGS:
        settings = cls()
        assert settings.problems(frozenset()) == []
        for field in dataclasses.fields(cls):
            assert field.metadata["help"], f"{cls.__name__}.{field.name} has no help"


def test_eval_datasets_are_pairs_in_order() -> None:
    settings = EvalSettings(eval_prompt_data=("b", "y.jsonl", "a", "x.jsonl"))
    assert list(settings.datasets.items()) == [("b", "y.jsonl"), ("a", "x.jsonl")]


def test_settings_import_no_heavy_library() -> None:
    code = (
        "import sys, relax_rollout.settings;"
        "print([m for m in ('torch', 'sglang', 'transformers', 'httpx', 'math_verify') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def reward(sample): return 1.0", None),
        ("async def reward(sample): return 1.0", None),
        ("from elsewhere import score as reward", None),
        ("from elsewhere import *", None),
        ("reward = lambda sample: 1.0", None),
        ("try:\n    import fast\nexcept ImportError:\n    def reward(sample): return 0", None),
        ("globals()['rew' + 'ard'] = print", None),
        ("def rewards(sample): return 1.0", "has no function 'reward'; did you mean 'rewards'?"),
        ("class A:\n    def reward(self): return 1", "has no function 'reward'; it has A"),
        ("", "it has no function"),
        ("def reward(sample) return 1", "is no Python"),
    ],
)
def test_a_function_that_is_not_there_is_told_without_importing_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str | None
) -> None:
    (tmp_path / "my_hook.py").write_text(f"raise SystemExit('imported')\n{text}\n")
    monkeypatch.chdir(tmp_path)
    for path in ("my_hook:reward", "my_hook.py:reward"):
        found = RewardSettings(custom_rm_path=path).problems()
        assert len(found) == (problem is not None)
        assert problem is None or problem in found[0]
