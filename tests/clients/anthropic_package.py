"""The `anthropic` package."""

import anthropic
from common import BASE, MODEL, PARAMETERS, QUESTION, case, image, tell

client = anthropic.Anthropic(base_url=BASE, api_key="none")
TOOLS = [{"name": "add", "description": "adds", "input_schema": PARAMETERS}]


def say(messages=QUESTION, max_tokens=24, **more):
    # llama-server takes a seed here too; the package has no name for it.
    fixed = {"extra_body": {"seed": 7, "temperature": 0}}
    return client.messages.create(model=MODEL, messages=messages, max_tokens=max_tokens, **fixed, **more)


@case("messages")
def _():
    return say()


@case("messages, streamed")
def _():
    return list(say(stream=True))


@case("messages, put together from a stream")
def _():
    fixed = {"extra_body": {"seed": 7, "temperature": 0}}
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=24, **fixed) as stream:
        return [list(stream.text_stream), stream.get_final_message().model_dump(mode="json")]


@case("a system prompt")
def _():
    return say(system="be brief", stop_sequences=["no such words"])


@case("tools")
def _():
    return say(max_tokens=160, tools=TOOLS, tool_choice={"type": "any"})


@case("tools, streamed")
def _():
    return list(say(max_tokens=160, tools=TOOLS, tool_choice={"type": "any"}, stream=True))


@case("an image")
def _():
    source = {"type": "base64", "media_type": "image/png", "data": image(90)}
    return say(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])


@case("count_tokens")
def _():
    return client.messages.count_tokens(model=MODEL, messages=QUESTION)


@case("count_tokens, with tools")
def _():
    return client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=TOOLS)


@case("error: no messages")
def _():
    return client.post("/v1/messages", body={"model": MODEL, "max_tokens": 8}, cast_to=object)


@case("error: too long for the context")
def _():
    return say(messages=[{"role": "user", "content": "word " * 6000}])


tell()
