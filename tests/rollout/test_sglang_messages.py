"""Reading SGLang's answers: tokens, log-probabilities and versions cannot drift apart."""

import re
from typing import Any

import pytest
from relax_rollout.engines.base import GenerateRequest, SamplingParams
from relax_rollout.engines.sglang.messages import ResponseBuilder, generate_body, raise_error_event, read_answer
from relax_rollout.engines.sglang.weight_status import WeightsIncomplete, WeightStatus


def chunk(tokens: list[int], total: int, version: str = "3", finish: str | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": [[-0.5 * t, t, None] for t in tokens],
            "completion_tokens": total,
            "weight_version": version,
            "finish_reason": {"type": finish} if finish else None,
            "cached_tokens": 4,
            **meta,
        },
    }


def test_one_answer() -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add(chunk([7, 8], 2, finish="stop"))
    result = builder.result()
    assert (result.tokens, result.log_probs, result.versions) == ([7, 8], [-3.5, -4.0], [3, 3])
    assert (result.finish_reason, result.cached_tokens) == ("stop", 4)


@pytest.mark.parametrize("cumulative", [True, False])
def test_versions_change_where_the_stream_changes(cumulative: bool) -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add(chunk([5, 6], 2))
    builder.add(chunk([5, 6, 7] if cumulative else [7], 3))
    builder.add(chunk([5, 6, 7, 8, 9] if cumulative else [8, 9], 5, version="4", finish="length"))
    result = builder.result()
    assert result.tokens == [5, 6, 7, 8, 9]
    assert result.versions == [3, 3, 3, 4, 4]
    assert result.log_probs == [-2.5, -3.0, -3.5, -4.0, -4.5]


def test_tokens_that_arrive_while_a_push_begins_keep_the_old_version() -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add(chunk([5], 1))
    builder.add(chunk([6], 2, version="pushing:4"))
    builder.add(chunk([7], 3, version="4", finish="stop"))
    assert builder.result().versions == [3, 3, 4]


def test_spans_of_newer_servers_win() -> None:
    builder = ResponseBuilder("engine0", 3)
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    builder.add(chunk([5, 6, 7], 3, version="4", finish="stop", weight_versions=spans))
    assert builder.result().versions == [3, 4, 4]


def test_an_abort_before_the_first_token_is_empty() -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"}})
    result = builder.result()
    assert (result.tokens, result.versions, result.finish_reason) == ([], [], "abort")


def test_the_last_chunk_of_an_aborted_stream_repeats_everything() -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add(chunk([5, 6], 2))
    last = chunk([5, 6], 2, finish="abort")
    last["output_ids"] = [6]
    builder.add(last)
    assert builder.result().tokens == [5, 6]


def test_missing_log_probabilities_are_an_error() -> None:
    answer = chunk([5, 6], 2, finish="stop")
    answer["meta_info"]["output_token_logprobs"] = [[-1.0, 5, None]]
    with pytest.raises(RuntimeError, match="engine0 returned 2 tokens but log-probabilities of 1"):
        ResponseBuilder("engine0", 3).add(answer)


def test_a_response_that_never_finished_is_an_error() -> None:
    builder = ResponseBuilder("engine0", 3)
    builder.add(chunk([5], 1))
    with pytest.raises(RuntimeError, match="finish_reason None"):
        builder.result()


def test_the_request_asks_for_log_probabilities() -> None:
    sampling = SamplingParams(max_new_tokens=4, stop=("x",), stop_token_ids=(1,))
    body = generate_body(GenerateRequest(rid="a", input_ids=[1], sampling=sampling), "r-a", 7, stream=False)
    assert body["return_logprob"] is True
    assert (body["rid"], body["extra_key"]) == ("r-a", "v7")
    assert body["sampling_params"]["stop"] == ["x"]
    assert body["sampling_params"]["stop_token_ids"] == [1]
    kept = GenerateRequest(rid="a", input_ids=[1], sampling=sampling, cache_version=0)
    assert generate_body(kept, "r-a", 7, stream=False)["extra_key"] == "v0"
    with pytest.raises(ValueError, match="unknown inputs"):
        generate_body(
            GenerateRequest(rid="a", input_ids=[1], sampling=sampling, multimodal={"smell": []}), "r-a", 7, stream=False
        )


def test_a_refusal_is_a_value_error_and_a_breakdown_is_not() -> None:
    with pytest.raises(ValueError, match=r"engine0 refused a request \(400\): too long"):
        read_answer(400, b'{"error": {"message": "too long"}}', "engine0")
    with pytest.raises(RuntimeError, match=r"\(503\)"):
        read_answer(503, b"busy", "engine0")


@pytest.mark.parametrize("weights", [WeightStatus("whole", 7), WeightStatus("pushing", 8), WeightStatus("broken", 8)])
def test_weights_survive_the_text_that_the_server_keeps(weights: WeightStatus) -> None:
    assert WeightStatus.parse(str(weights)) == weights


def test_only_whole_weights_have_a_version() -> None:
    assert WeightStatus.parse("default").require_whole("engine0") == 0
    with pytest.raises(WeightsIncomplete, match="push of version 8 failed midway"):
        WeightStatus.parse("broken:8").require_whole("engine0")
    with pytest.raises(ValueError, match="no version of ours"):
        WeightStatus.parse("v1.0")


def test_an_event_that_says_why_a_call_failed_is_the_error_that_its_answer_would_be() -> None:
    raise_error_event({"text": "a"}, "engine0")
    with pytest.raises(ValueError, match=re.escape("engine0 refused a request (400): too long")):
        raise_error_event({"error": {"message": "too long"}}, "engine0")
    with pytest.raises(RuntimeError, match=re.escape("engine0 refused a request (503): no room")):
        raise_error_event({"error": {"message": "no room", "code": 503}}, "engine0")
    with pytest.raises(RuntimeError, match=re.escape('engine0 refused a request (500): {"error": {"code": 500}}')):
        raise_error_event({"error": {"code": 500}}, "engine0")
