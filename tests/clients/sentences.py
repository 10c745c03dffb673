"""What the Python packages read of a model with trained weights: texts, and how they ended."""

import anthropic
import openai
from common import BASE, MODEL, case, tell

openai_client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="none")
anthropic_client = anthropic.Anthropic(base_url=BASE, api_key="none")
MESSAGES = [{"role": "user", "content": "How many days are in a week?"}]
SAME = {"model": MODEL, "temperature": 0}


def chat(max_tokens=48, **more):
    return openai_client.chat.completions.create(messages=MESSAGES, max_tokens=max_tokens, **SAME, **more)


def message(max_tokens=48, **more):
    # This package has no name for the temperature.
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": max_tokens, "extra_body": {"temperature": 0}, **more}


@case("openai chat")
def _():
    choice = chat().choices[0]
    return {"text": choice.message.content, "end": choice.finish_reason}


@case("openai chat, streamed")
def _():
    chunks = [chunk.choices[0] for chunk in chat(stream=True) if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in chunks)
    return {"text": text, "end": chunks[-1].finish_reason, "pieces": len(chunks)}


@case("openai chat, cut")
def _():
    choice = chat(max_tokens=4).choices[0]
    return {"text": choice.message.content, "end": choice.finish_reason}


@case("openai responses")
def _():
    response = openai_client.responses.create(input=MESSAGES[0]["content"], max_output_tokens=48, **SAME)
    return {"text": response.output_text, "end": response.status}


@case("openai responses, streamed")
def _():
    events = list(openai_client.responses.create(input=MESSAGES[0]["content"], max_output_tokens=48, stream=True, **SAME))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"text": "".join(pieces), "end": events[-1].response.status, "pieces": len(pieces)}


@case("anthropic messages")
def _():
    answer = anthropic_client.messages.create(**message())
    return {"text": answer.content[0].text, "end": answer.stop_reason}


@case("anthropic messages, streamed")
def _():
    with anthropic_client.messages.stream(**message()) as stream:
        pieces = list(stream.text_stream)
        return {"text": "".join(pieces), "end": stream.get_final_message().stop_reason, "pieces": len(pieces)}


@case("anthropic messages, cut")
def _():
    answer = anthropic_client.messages.create(**message(max_tokens=4))
    return {"text": answer.content[0].text, "end": answer.stop_reason}


tell()
