"""The `openai` package."""

import openai
from common import BASE, MODEL, PARAMETERS, QUESTION, SAME, case, image, tell

client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]
PICTURE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is it?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64," + image(200)}},
        ],
    }
]


def chat(messages=QUESTION, max_tokens=24, **more):
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=max_tokens, **SAME, **more)


@case("models")
def _():
    return [{"id": model.id, "object": model.object} for model in client.models.list().data]


@case("chat")
def _():
    return chat()


@case("chat, streamed")
def _():
    return list(chat(stream=True, stream_options={"include_usage": True}))


@case("error: more choices than slots")
def _():
    return chat(n=2)


@case("chat, log probabilities")
def _():
    return chat(max_tokens=3, logprobs=True, top_logprobs=2)


@case("chat, JSON by a schema")
def _():
    schema = {"name": "sum", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
    return chat(max_tokens=64, response_format={"type": "json_schema", "json_schema": schema})


@case("tools")
def _():
    return chat(max_tokens=160, tools=TOOLS, tool_choice="required")


@case("tools, streamed")
def _():
    return list(chat(max_tokens=160, tools=TOOLS, tool_choice="required", stream=True))


@case("a tool's result")
def _():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "2"}]
    return chat(messages=QUESTION + turns, tools=TOOLS)


@case("an image")
def _():
    return chat(messages=PICTURE)


@case("an image, streamed")
def _():
    return list(chat(messages=PICTURE, stream=True))


@case("completions")
def _():
    return client.completions.create(model=MODEL, prompt="once upon", max_tokens=16, **SAME)


@case("completions, streamed")
def _():
    return list(client.completions.create(model=MODEL, prompt="once upon", max_tokens=16, stream=True, **SAME))


@case("embeddings")
def _():
    return client.embeddings.create(model=MODEL, input=["one text", "and another"])


@case("embeddings, as numbers")
def _():
    return client.embeddings.create(model=MODEL, input="one text", encoding_format="float")


def respond(**more):
    # llama-server takes a seed here too; the package has no name for it.
    return client.responses.create(model=MODEL, max_output_tokens=24, temperature=0, extra_body={"seed": 7}, **more)


@case("responses")
def _():
    return respond(input="what is it?")


@case("responses, streamed")
def _():
    return list(respond(input="what is it?", stream=True))


@case("responses, tools")
def _():
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS, "strict": True}
    return respond(input="what is it?", tools=[tool], tool_choice="required")


@case("error: no messages")
def _():
    return client.post("/chat/completions", body={"model": MODEL}, cast_to=object)


@case("error: too long for the context")
def _():
    return chat(messages=[{"role": "user", "content": "word " * 6000}])


@case("error: a parameter of the wrong type")
def _():
    return chat(extra_body={"temperature": "hot"})


@case("error: an image that is none")
def _():
    url = {"url": "data:image/png;base64,bm8gaW1hZ2U="}
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])


@case("error: no such route")
def _():
    return client.post("/no/such/route", body={"model": MODEL}, cast_to=object)


tell()
