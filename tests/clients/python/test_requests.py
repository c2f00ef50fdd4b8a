"""Plain Python values as messages of the schema."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import mlxstream
from mlxstream.requests import filled, generation_request
from mlxstream.v1.delivery_pb2 import DEADLINE_POLICY_PARTIAL_RESULT, DeliveryOptions
from mlxstream.v1.generation_pb2 import CompleteRequest, GenerateRequest
from mlxstream.v1.options_pb2 import FILL_MODE_ECHO, GenerateOptions, LogitBias
from mlxstream.v1.prompt_pb2 import ChatPrompt, TextPrompt


def request_for(prompt: Any, **options: Any) -> GenerateRequest:
    return generation_request(GenerateRequest, prompt, options, delivery=None, model="", request_id="")


def options_of(**options: Any) -> GenerateOptions:
    return request_for("x", **options).options


def test_the_type_of_a_prompt_chooses_its_kind() -> None:
    assert request_for("text").text.text == "text"
    assert request_for("").WhichOneof("prompt") == "text"
    assert list(request_for([1, 2]).tokens.ids) == [1, 2]
    assert request_for([]).WhichOneof("prompt") == "tokens"
    assert request_for(range(3)).tokens.ids == [0, 1, 2]
    assert request_for(TextPrompt(text="own")).text.text == "own"
    (message,) = request_for([{"role": "user", "content": "hi"}]).chat.messages
    assert (message.role, message.content[0].text) == ("user", "hi")


def test_a_conversation_takes_its_settings_along() -> None:
    prompt = {
        "messages": [{"role": "user", "content": [b"PNG", "what is it?"]}],
        "tools": [{"name": "look", "strict": True}],
        "enable_thinking": False,
        "template_variables": {"date": "today"},
    }
    chat = request_for(prompt).chat
    assert [part.WhichOneof("part") for part in chat.messages[0].content] == ["image", "text"]
    assert chat.tools[0]["name"] == "look"
    assert chat.HasField("enable_thinking")
    assert chat.template_variables["date"] == "today"
    assert request_for(ChatPrompt(messages=chat.messages)).chat.messages == chat.messages


@pytest.mark.parametrize(
    "prompt", [None, 5, b"bytes", {1, 2}, [5, {"role": "user", "content": "x"}], {"messages": "x"}]
)
def test_a_prompt_of_another_type_is_a_type_error_that_says_what_one_is(prompt: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^(a prompt is text, a list of|a message is a mapping|the messages .* a list)"
    ):
        request_for(prompt)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "contents": "x"}, "unknown key 'contents' in a message; did you mean 'content'?"),
        ({"role": "user", "content": "x", "zzz": 1}, "unknown key 'zzz' in a message"),
        ({"role": "user"}, "a message lacks its 'content'"),
        ({"content": "x"}, "a message lacks its 'role'"),
        ({"role": "user", "content": 5}, "the content of a message is text, image bytes, or a list of both, not int"),
        (
            {"role": "user", "content": {"text": "x"}},
            "the content of a message is text, image bytes, or a list of both, not dict",
        ),
        (
            {"role": "user", "content": None},
            "the content of a message is text, image bytes, or a list of both, not None",
        ),
    ],
)
def test_a_bad_message_names_the_wrong_key_alone(message: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TypeError) as caught:
        request_for([message])
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("prompt", "error"),
    [(["a"], TypeError), ([-1], ValueError), ([2**32], ValueError), ([{"role": "user"}], TypeError)],
)
def test_what_is_no_prompt_is_refused(prompt: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        request_for(prompt)


def test_options_are_set_by_name_and_none_leaves_one_unset() -> None:
    options = options_of(temperature=0, top_k=5, seed=2**64 - 1, stop_sequences=["a", "b"], top_p=None)
    assert options.HasField("temperature")
    assert (options.top_k, options.seed) == (5, 2**64 - 1)
    assert list(options.stop_sequences) == ["a", "b"]
    assert not options.HasField("top_p")


def test_an_unknown_option_is_a_type_error_that_knows_a_close_name() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        options_of(temprature=1)
    with pytest.raises(TypeError, match=r"unknown option 'zzz'$"):
        options_of(zzz=1)


def test_a_value_that_does_not_fit_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="option 'max_tokens'"):
        options_of(max_tokens=-1)
    with pytest.raises(TypeError, match="option 'temperature'"):
        options_of(temperature="hot")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stop_sequences": "END"}, "option 'stop_sequences': takes a list, such as ['END'], not str"),
        ({"stop_sequences": b"END"}, "option 'stop_sequences': takes a list, such as [b'END'], not bytes"),
        ({"eos_token_ids": 2}, "option 'eos_token_ids': takes a list, such as [2], not int"),
        ({"eos_token_ids": b"\x02"}, "option 'eos_token_ids': takes a list, such as [b'\\x02'], not bytes"),
        ({"choice": "yes"}, "option 'choice': takes a list, such as ['yes'], not str"),
        ({"adapters": "formal"}, "option 'adapters': takes a list, such as ['formal'], not str"),
    ],
)
def test_a_single_value_is_never_taken_apart_into_a_list(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TypeError) as caught:
        options_of(**options)
    assert str(caught.value) == complaint


def test_no_options_leave_the_message_unset() -> None:
    assert not request_for("x").HasField("options")


def test_a_list_that_is_set_but_empty_differs_from_an_unset_one() -> None:
    assert options_of(eos_token_ids=[]).HasField("eos_token_ids")
    assert list(options_of(eos_token_ids=[2, 3]).eos_token_ids.ids) == [2, 3]
    assert not options_of(top_k=1).HasField("eos_token_ids")


def test_a_mapping_or_pairs_become_repeated_entries() -> None:
    expected = [LogitBias(token=5, bias=1.5), LogitBias(token=7, bias=-100)]
    assert list(options_of(logit_bias={5: 1.5, 7: -100}).logit_bias) == expected
    assert list(options_of(logit_bias=[(5, 1.5), {"token": 7, "bias": -100}]).logit_bias) == expected
    points = options_of(curve=[(0, 0), (100, 50)]).curve
    assert [(point.x_percent, point.y_percent) for point in points] == [(0, 0), (100, 50)]


def test_adapters_are_named_or_named_with_a_scale() -> None:
    plain, scaled = options_of(adapters=["formal", ("short", 0.5)]).adapters
    assert (plain.id, plain.HasField("scale")) == ("formal", False)
    assert (scaled.id, scaled.scale) == ("short", 0.5)


def test_constraints_and_nested_options_take_plain_values() -> None:
    assert options_of(json_schema={"type": "object"}).json_schema == '{"type": "object"}'
    assert options_of(json_object=True).WhichOneof("constraint") == "json_object"
    assert list(options_of(choice=["yes", "no"]).choice.choices) == ["yes", "no"]
    assert options_of(denoising={"max_denoising_steps": 4}).denoising.max_denoising_steps == 4
    assert options_of(cache={"bypass": True}).cache.bypass
    assert options_of(fill="echo").fill == FILL_MODE_ECHO
    with pytest.raises(TypeError, match="json_object"):
        options_of(json_object=False)
    with pytest.raises(TypeError, match="unknown field 'steps'"):
        options_of(denoising={"steps": 4})
    with pytest.raises(ValueError, match="none of unspecified, off, strict, echo"):
        options_of(fill="sometimes")
    with pytest.raises(TypeError, match="takes token and bias"):
        options_of(logit_bias=[(1, 2.0, 3)])


def test_delivery_takes_seconds_and_names() -> None:
    values = {"heartbeat_interval": 0.25, "max_delay": timedelta(milliseconds=10), "deadline_policy": "partial-result"}
    delivery = filled(DeliveryOptions(), values, "delivery option")
    assert delivery.heartbeat_interval.ToMilliseconds() == 250
    assert delivery.max_delay.ToMilliseconds() == 10
    assert delivery.deadline_policy == DEADLINE_POLICY_PARTIAL_RESULT
    built = generation_request(CompleteRequest, "x", {}, delivery={"include_text": False}, model="m", request_id="r")
    assert built.delivery.HasField("include_text")
    assert (built.model, built.request_id) == ("m", "r")


async def test_durable_is_no_option_of_an_answer_that_comes_at_once() -> None:
    async with mlxstream.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=r"^durable belongs to stream"):
            await client.generate("hi", durable=True)
