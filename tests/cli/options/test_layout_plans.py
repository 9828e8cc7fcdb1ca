"""The layouts that `tests/cli/gpu_layouts_check.py` runs on GPUs, planned: every GPU has its part, and that alone."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.gpu_layouts_check import LAYOUTS, REWARD, model_config, words
from relax_cli.cluster.placement import Placement
from relax_cli.cluster.slots import Slot, engine_slots, slots_needed, trainer_slots
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import RunConfig
from relax_rollout.weight_sync.feeders import choose_feeders


def planned(name: str, folder: Path, *, gpu: bool) -> tuple[RunConfig, Placement]:
    for kind in ("dense", "moe"):
        model_config(kind, gpu=gpu).save_pretrained(folder / kind)
        (folder / kind / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "prompts.jsonl").write_text(json.dumps({"input": "1+1="}) + "\n")
    (folder / "digits_reward.py").write_text(REWARD)
    config = resolve([*words(name, folder, 3, gpu=gpu), "--dry-run"], {})
    assert config.placement is not None
    return config, config.placement


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_uses_each_of_its_gpus_once(name: str, workspace: Path, gpus: Callable[..., None]) -> None:
    layout = LAYOUTS[name]
    gpus(layout.gpus, memory=140e9)
    config, placement = planned(name, workspace, gpu=True)
    assert not [w for w in config.warnings if "idle" in w or w.startswith("memory ")], config.warnings
    missing = [note for note in config.notes if "has no weights" not in note and "has no tokenizer" not in note]
    assert missing == []

    sides = (layout.train, layout.generate or layout.train)
    assert (placement.train_ranks, placement.engines * placement.gpus_per_engine) == sides
    assert placement.gpus == slots_needed(placement) == layout.gpus
    assert placement.tp * placement.cp * placement.pp * placement.dp == layout.train
    assert placement.etp * placement.ep * placement.pp * placement.expert_dp == layout.train
    sizes = [int(word) for word in layout.options if word.isdigit()]
    assert math.prod((placement.tp, placement.pp, placement.cp, placement.ep)) == math.prod(sizes)

    slots = [Slot(i, "node", "127.0.0.1", str(i)) for i in range(layout.gpus)]
    ranks, engines = trainer_slots(placement, slots), engine_slots(placement, slots)
    assert [len(own) for own in engines] == [layout.engine] * placement.engines
    used = Counter(slot.gpu_id for part in (ranks, *engines) for slot in part)
    assert used == dict.fromkeys(map(str, range(layout.gpus)), 2 if placement.shared else 1)
    # Each engine has one rank that feeds it, and no rank feeds two more than another.
    feeders = Counter(choose_feeders([[True] * placement.engines] * placement.train_ranks))
    assert sum(feeders.values()) == placement.engines
    assert max(feeders.values()) == math.ceil(placement.engines / placement.train_ranks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_can_be_tried_with_processes_on_a_cpu(name: str, workspace: Path) -> None:
    layout = LAYOUTS[name]
    _, placement = planned(name, workspace, gpu=False)
    assert (placement.device, placement.gpus, placement.engines) == ("cpu", 0, 1)
    assert placement.shared == (layout.generate == 0)
    # A replica is one set of ranks on CPU: of the layout all sizes are there but the data-parallel one.
    sizes = [int(word) for word in layout.options if word.isdigit()]
    assert math.prod((placement.tp, placement.pp, placement.cp, placement.ep)) == math.prod(sizes)
    assert placement.dp in (1, placement.ep)
    assert placement.train_ranks <= layout.train
