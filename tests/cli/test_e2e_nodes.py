"""Both modes over two nodes of a Ray cluster: an engine on each; an engine dies in a push, then a node; a resume."""

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_gate
import psutil
import pytest
from cli.ray_nodes import Cluster, still_running
from cli.test_e2e_loop import REWARD, hold_from
from engine_gate import Gate
from relax_data.prompts.saved_groups import SAMPLES_FILE, read_arrays

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS, EPOCHS, BATCH = 24, 2, 2
LAUNCH = "relax_rollout.engines.sglang.process.launch"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    # A Ray that tests before have started in this process left variables here that keep one on 127.0.0.1.
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(Path(engine_gate.__file__).parent))  # for the servers that it starts
    monkeypatch.setenv("HELD_REWARD", str(tmp_path / "held"))
    found = Cluster(cpus=6)
    try:
        found.start_node()
        found.start_node()
        yield found
    finally:
        found.close()


def server_at(cluster: Cluster, address: str) -> psutil.Process:
    """SGLang's server that listens at this address."""
    commands = {p: words for node in cluster.nodes for p, words in node.commands().items()}
    wanted = re.compile(rf"\S+ -m {re.escape(LAUNCH)} .*--host {re.escape(address)} ")
    (server,) = (process for process, words in commands.items() if wanted.match(words))
    return server


def test_both_modes_over_two_nodes_of_which_one_dies(
    task: Any, relax: Callable[..., Any], tmp_path: Path, cluster: Cluster
) -> None:
    """Colocate begins, async goes on; an engine dies, then a node; the one that is left trains the rest."""
    data, checkpoints, model = tmp_path / "prompts.jsonl", tmp_path / "checkpoints", tmp_path / "model"
    gate, held = Gate(tmp_path), tmp_path / "held"
    (tmp_path / "my_reward.py").write_text(REWARD)
    shutil.copytree(task.model, model)
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:PROMPTS]))
    common: dict[str, Any] = {
        "ray_address": cluster.address,
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 0,
        "hf_checkpoint": model,
        "rm_type": None,
        "custom_rm_path": f"{tmp_path}/my_reward.py:reward",
        "prompt_data": data,
        "rollout_batch_size": BATCH,
        "over_sampling_batch_size": 2 * BATCH,
        "rollout_max_response_len": 48,
        "entropy_coef": 0.01,  # a reward of 0 moves no weights
        "save": checkpoints,
        "load": checkpoints,
        "save_interval": 1,
    }
    in_turn = relax("train", *task.flags(**common, num_rollout=2, partial_rollout=True), env=cluster.environment)
    assert in_turn.finish() == 0, in_turn.output
    assert "trainer ready: " in in_turn.output
    assert re.search(r"trainer ready: .*DP 2", in_turn.output)
    assert len(in_turn.steps()) == 2
    check_weights(in_turn)
    saved = read_arrays((checkpoints / "rollout_1" / SAMPLES_FILE).read_bytes())
    assert len(saved["status"]), "groups are open, which the other mode takes over"

    common |= {"num_rollout": None, "num_epoch": EPOCHS, "fully_async": True}
    common |= {"update_weight_buffer_size": 64 << 10}  # the tiny model in three buckets or more
    broken = relax("train", *task.flags(**common), *gate_words(gate), env=cluster.environment)
    lose_an_engine_for_good(broken, cluster, gate, held, model)
    parts = cluster.nodes[1].processes()
    cluster.nodes[1].kill_raylet()
    assert broken.finish(deadline_s=120) == 1, broken.output
    said = broken.output.partition("FAILED")[2]
    assert "node 127.0.0.3 of the Ray cluster has died" in said
    assert "It had engine1, trainer rank 1." in said
    assert re.search(r"the checkpoint of rollout \d+ in \S+ is whole; to go on from there", said), said
    assert broken.survivors() == []
    assert still_running(parts) == [], "whatever ran on the node ends with it"
    check_weights(broken)
    shares = [broken.steps()[2][f"async/engine_busy_share/engine{i}"] for i in (0, 1)]
    assert min(shares) > 0, "both generate"

    shutil.copy(task.model / "config.json", model)
    held.unlink()
    last = relax("train", *task.flags(**common | {"actor_num_nodes": 1}), env=cluster.environment)
    assert last.finish() == 0, last.output
    assert "resharded: DP 2 -> DP 1" in last.output
    steps = last.steps()
    assert [m["step"] for m in steps] == list(range(EPOCHS * PROMPTS // BATCH)), (
        "no step is missing, none is there twice"
    )
    assert steps[-1]["prompts/trained"] + BATCH == EPOCHS * PROMPTS, (
        "the metrics are of the moment before the last step"
    )
    assert max(m["staleness/max"] for m in steps) <= 1
    check_weights(last)
    engines = [p for p, words in cluster.nodes[0].commands().items() if LAUNCH in words]
    assert still_running(engines) == []


def gate_words(gate: Gate) -> list[str]:
    return [word for name, value in gate.options().items() for word in (f"--sglang-{name}", str(value))]


def go_on_to(run: Any, held: Path, step: int) -> None:
    """Lets so many steps pass, and one more at most: the others wait for rewards."""
    # At its beginning step `n`, from 0, has opened 2 * BATCH + BATCH * n prompts.
    hold_from(held, 2 * BATCH + BATCH * (step - 1))
    run.wait_for(lambda: len(run.steps()) >= step, f"step {step}")


def lose_an_engine_for_good(run: Any, cluster: Cluster, gate: Gate, held: Path, model: Path) -> None:
    """Kills engine1 in bucket 2 of a push, which engine0 gets; then again, and has its restarts fail."""
    go_on_to(run, held, 4)
    gate.hold_bucket(2, "127.0.0.3")
    hold_from(held, PROMPTS // 2)  # so that there is another push
    asyncio.run(gate.held())
    server_at(cluster, "127.0.0.3").kill()
    gate.open()
    go_on_to(run, held, 8)
    assert re.search(r"engine1 was lost \(it did not take the weights of version \d+: ", run.output)
    assert "restarting it, 1 of 3; its requests go on at engine0" in run.output
    run.wait_for(lambda: "engine1 joined with the weights of version" in run.output, "the engine to come back")
    (model / "config.json").unlink()
    server_at(cluster, "127.0.0.3").kill()
    go_on_to(run, held, 12)
    gone = "after 3 restarts it is out for good; engine0 go on"
    run.wait_for(lambda: gone in run.output, "the end of its restarts")
    assert re.search(rf"engine1 was lost \(.*\): {gone}", run.output)
    go_on_to(run, held, 14)


def check_weights(run: Any) -> None:
    """Every engine has the trainer's weights: its log-probs are the trainer's wherever all tokens are of them."""
    exact = [m for m in run.steps() if m["train/off_policy_token_share"] == 0]
    assert all(m["train/logprob_diff_max"] < 1e-4 for m in exact)
