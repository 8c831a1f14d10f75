"""/v1/completions and /v1/chat/completions.

It owns the translation from OpenAI's fields to samples and back, in the shapes that SGLang answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.engine.engine import Engine
from services.rollout.engine.errors import RequestError, field_error, openai_error, semantic_error
from services.rollout.engine.generate import raise_refusals, refuse_unless_serving
from services.rollout.engine.http import SSE_DONE, Answer, Application, Request, Stream, json_answer, sse
from services.rollout.engine.requests import GenerateRequest
from services.rollout.engine.sample import Sample

Json = dict[str, Any]
UNSUPPORTED = ("tools", "response_format", "best_of", "suffix", "functions")
SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "n": "n",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
    "logit_bias": "logit_bias",
    "seed": "sampling_seed",
}


@dataclass(frozen=True)
class Call:
    """A parsed call and how its answer looks."""

    body: Json
    request: GenerateRequest
    chat: bool

    @property
    def identifier(self) -> str:
        """The answer's id: the caller's rid, or the first sample's."""
        rid = self.body.get("rid")
        return rid if isinstance(rid, str) else self.request.samples[0].rid

    @property
    def wants_logprobs(self) -> bool:
        """Whether choices carry log-probs."""
        return self.request.samples[0].logprob.enabled


class OpenAIEndpoints:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def register(self, app: Application) -> None:
        """Add the routes."""
        app.route("POST", "/v1/completions", handler=self.completions)
        app.route("POST", "/v1/chat/completions", handler=self.chat)

    async def completions(self, request: Request) -> Answer | Stream:
        """Continue prompts."""
        body = request.json()
        prompt = body.get("prompt")
        if prompt is None:
            raise field_error(("body", "prompt"), "missing", "Field required", body)
        inputs = {"text": prompt} if _is_text(prompt) else {"input_ids": prompt}
        logprobs = body.get("logprobs")
        if logprobs is not None and type(logprobs) is not int:
            raise field_error(("body", "logprobs"), "int_type", "Input should be a valid integer", logprobs)
        wanted: Json = {} if logprobs is None else {"return_logprob": True, "top_logprobs_num": logprobs}
        return await self._run(body, {**inputs, **wanted}, default_tokens=16, chat=False)

    async def chat(self, request: Request) -> Answer | Stream:
        """Answer a conversation."""
        body = request.json()
        messages = body.get("messages")
        if messages is None:
            raise field_error(("body", "messages"), "missing", "Field required", body)
        if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
            raise field_error(("body", "messages"), "list_type", "Input should be a valid list", messages)
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise field_error(("body", "chat_template_kwargs"), "dict_type", "Input should be a map", options)
        ids = self._chat_ids([_flat_content(item) for item in messages], options)
        wanted: Json = {}
        if body.get("logprobs") is True:
            wanted = {"return_logprob": True, "top_logprobs_num": body.get("top_logprobs") or 0}
        room = max(self.engine.limits.context_length - len(ids), 1)
        return await self._run(body, {"input_ids": ids, **wanted}, default_tokens=room, chat=True)

    def _chat_ids(self, messages: Sequence[Json], options: Mapping[str, Any]) -> list[int]:
        from jinja2 import TemplateError

        try:
            return self.engine.tokenizer.chat_ids(messages, options)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise openai_error(semantic_error(f"messages do not fit the chat template: {error}")) from error

    async def _run(self, body: Json, inputs: Json, *, default_tokens: int, chat: bool) -> Answer | Stream:
        engine = self.engine
        try:
            parsed = engine.reader.read(_native(body, inputs, default_tokens))
            refuse_unless_serving(engine)
        except RequestError as error:
            raise openai_error(error) from None
        call = Call(body=body, request=parsed, chat=chat)
        if parsed.stream:
            return Stream(self._events(call))
        await engine.collector.finish(engine.scheduler, parsed.samples)
        raise_refusals(parsed.samples)
        choices = [self._choice(call, index, sample) for index, sample in enumerate(parsed.samples)]
        return json_answer(
            {
                **self._head(call, "chat.completion" if chat else "text_completion"),
                "choices": choices,
                "usage": _usage(parsed.samples),
                "metadata": {
                    "weight_version": parsed.samples[0].spans[-1][0],
                    "weight_versions": _spans(parsed.samples[0]),
                },
            }
        )

    def _head(self, call: Call, kind: str) -> Json:
        model = call.body.get("model") or self.engine.served_model_name
        return {"id": call.identifier, "object": kind, "created": int(time.time()), "model": model}

    def _choice(self, call: Call, index: int, sample: Sample) -> Json:
        text = self.engine.results.text(sample)
        content: Json = (
            {"message": {"role": "assistant", "content": text, "reasoning_content": None}}
            if call.chat
            else {"text": text}
        )
        choice: Json = {
            "index": index,
            **content,
            "logprobs": self._logprobs(call, sample, 0, len(sample.output_ids)),
            **_finish(sample),
        }
        if call.body.get("return_token_ids") is True:
            choice["response_token_ids" if call.chat else "token_ids"] = sample.output_ids
            choice["prompt_token_ids"] = sample.prompt
        if call.body.get("return_meta_info") is True and call.chat:
            choice["meta_info"] = self.engine.results.meta_info(sample, len(sample.output_ids), last=True)
        return choice

    def _logprobs(self, call: Call, sample: Sample, start: int, stop: int) -> Json | None:
        if not call.wants_logprobs:
            return None
        rows = range(start, stop)
        if call.chat:
            return {"content": [self._chat_entry(sample, row) for row in rows]}
        name = self.engine.tokenizer.token_name
        ids, values = sample.output_ids, sample.output_logprobs
        tops = [
            {name(token): value for value, token in sample.output_top[row]} if sample.output_top else None
            for row in rows
        ]
        return {
            "text_offset": [-1] * len(rows),
            "token_logprobs": [values[row] for row in rows],
            "tokens": [name(ids[row]) for row in rows],
            "top_logprobs": tops,
        }

    def _chat_entry(self, sample: Sample, row: int) -> Json:
        entry = self._token_entry(sample.output_ids[row], sample.output_logprobs[row])
        top = sample.output_top[row] if sample.output_top else []
        return {**entry, "top_logprobs": [self._token_entry(token, value) for value, token in top]}

    def _token_entry(self, token: int, value: float) -> Json:
        tokenizer = self.engine.tokenizer
        return {"token": tokenizer.token_text(token), "bytes": list(tokenizer.token_bytes(token)), "logprob": value}

    async def _events(self, call: Call) -> AsyncIterator[bytes]:
        engine, samples = self.engine, call.request.samples
        texts = [engine.results.text_stream(sample) for sample in samples]
        sent = [""] * len(samples)
        counts = [0] * len(samples)
        head = self._head(call, "chat.completion.chunk" if call.chat else "text_completion")
        if call.chat:
            for index in range(len(samples)):
                first = {"reasoning_content": None, "role": "assistant", "content": ""}
                yield sse({**head, "choices": [_delta(index, first, None, None)]})
        async for index, sample, count, last in engine.collector.stream(engine.scheduler, samples):
            text = engine.results.text(sample) if last else texts[index].extend(sample.output_ids[:count])
            new = text[len(sent[index]) :]
            logprobs = self._logprobs(call, sample, counts[index], count)
            sent[index], counts[index] = text, count
            for choice in _chunk_choices(call.chat, index, new, logprobs, sample if last else None):
                yield sse({**head, "choices": [choice]} | ({} if call.chat else {"usage": None}))
        options = call.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") is True:
            yield sse({**head, "choices": [], "usage": _stream_usage(samples)})
        yield SSE_DONE


def _chunk_choices(chat: bool, index: int, text: str, logprobs: Json | None, ended: Sample | None) -> list[Json]:
    """The choices that one step of a stream sends: for chat, the end is a chunk of its own."""
    if not chat:
        if not text and ended is None:
            return []
        return [{"index": index, "text": text, "logprobs": logprobs, **_finish(ended)}]
    choices: list[Json] = []
    if text:
        choices.append(_delta(index, {"reasoning_content": None, "content": text}, logprobs, None))
    if ended is not None:
        choices.append(_delta(index, {"reasoning_content": None}, None, ended))
    return choices


def _delta(index: int, delta: Json, logprobs: Json | None, ended: Sample | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, **_finish(ended)}


def _finish(sample: Sample | None) -> Json:
    reason = (sample.finish_reason if sample else None) or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _spans(sample: Sample) -> list[Json]:
    return [{"version": version, "start": start, "end": end} for version, start, end in sample.spans]


def _counts(samples: Sequence[Sample]) -> tuple[int, int]:
    prompts = {sample.prompt_key: len(sample.prompt) for sample in samples}
    return sum(prompts.values()), sum(len(sample.output_ids) for sample in samples)


def _usage(samples: Sequence[Sample]) -> Json:
    prompt, completion = _counts(samples)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _stream_usage(samples: Sequence[Sample]) -> Json:
    prompt, completion = _counts(samples)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "reasoning_tokens": 0,
    }


def _native(body: Json, inputs: Json, default_tokens: int) -> Json:
    """Translate to the fields of /generate."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise semantic_error(f"{name} is not supported by the CPU engine; remove it or serve with SGLang.")
    params = {ours: body[theirs] for theirs, ours in SAMPLING_FIELDS.items() if body.get(theirs) is not None}
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    params["max_new_tokens"] = default_tokens if limit is None else limit
    if isinstance(params.get("temperature"), int | float):
        params["temperature"] = float(params["temperature"])
    native = {**inputs, "sampling_params": params, "stream": body.get("stream"), "rid": body.get("rid")}
    return {name: value for name, value in native.items() if value is not None}


def _is_text(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str))


def _flat_content(message: Json) -> Json:
    """Join a message's text parts: templates of text models want a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise openai_error(semantic_error("messages may hold text only on the CPU engine."))
        parts.append(str(part.get("text", "")))
    return {**message, "content": "".join(parts)}
