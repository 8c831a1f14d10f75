"""The native endpoints: /generate, /tokenize, /detokenize.

It owns how a request becomes samples and samples become an answer or a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from services.rollout.engine.engine import Engine
from services.rollout.engine.errors import RequestError, field_error, unavailable
from services.rollout.engine.http import SSE_DONE, Answer, Application, Request, Stream, json_answer, sse
from services.rollout.engine.requests import GenerateRequest
from services.rollout.engine.results import Json
from services.rollout.engine.sample import Sample


def refuse_unless_serving(engine: Engine) -> None:
    """503 while draining or without valid weights."""
    if engine.draining:
        raise unavailable("The engine is shutting down. Send the request to another one.")
    if engine.weights.invalid_reason is not None:
        raise unavailable(engine.scheduler.unusable_text())


def raise_refusals(samples: Sequence[Sample]) -> None:
    """503 if the queue took none of the samples."""
    for sample in samples:
        if sample.finish_error is not None:
            raise unavailable(sample.finish_error)


class GenerateEndpoints:
    """Handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def register(self, app: Application) -> None:
        """Add the routes."""
        app.route("POST PUT", "/generate", handler=self.generate)
        app.route("POST", "/tokenize", "/v1/tokenize", handler=self.tokenize)
        app.route("POST", "/detokenize", "/v1/detokenize", handler=self.detokenize)

    async def generate(self, request: Request) -> Answer | Stream:
        """Run the samples of a request."""
        engine = self.engine
        body = request.json()
        try:
            parsed = engine.reader.read(body)
        except RequestError as error:
            if error.in_stream and body.get("stream") is True:
                return Stream(_error_events(error))
            raise
        refuse_unless_serving(engine)
        if parsed.stream:
            return Stream(self._events(parsed))
        await engine.collector.finish(engine.scheduler, parsed.samples)
        raise_refusals(parsed.samples)
        answers = [self._whole(parsed, sample) for sample in parsed.samples]
        return json_answer(answers if parsed.is_list else answers[0])

    def _whole(self, parsed: GenerateRequest, sample: Sample) -> Json:
        answer = self.engine.results.whole(sample)
        if parsed.return_prompt_ids:
            answer["prompt_token_ids"] = sample.prompt
        return answer

    async def _events(self, parsed: GenerateRequest) -> AsyncIterator[bytes]:
        engine = self.engine
        texts = [engine.results.text_stream(sample) for sample in parsed.samples]
        async for index, sample, count, last in engine.collector.stream(engine.scheduler, parsed.samples):
            if last:
                chunk = self._whole(parsed, sample)
            else:
                text = texts[index].extend(sample.output_ids[:count])
                chunk = engine.results.chunk(sample, text, count)
            yield sse({**chunk, "index": index} if parsed.is_list else chunk)
        yield SSE_DONE

    async def tokenize(self, request: Request) -> Answer:
        """Return the ids of a prompt, or of each of a list."""
        prompt = request.json().get("prompt")
        if isinstance(prompt, str):
            ids = self.engine.tokenizer.encode(prompt)
            return json_answer({"tokens": ids, "count": len(ids), "max_model_len": self._context})
        if isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
            lists = [self.engine.tokenizer.encode(item) for item in prompt]
            counts = [len(item) for item in lists]
            return json_answer({"tokens": lists, "count": counts, "max_model_len": self._context})
        raise field_error(("body", "prompt"), "string_type", "Input should be a string or a list of them", prompt)

    async def detokenize(self, request: Request) -> Answer:
        """Return the text of ids, or of each of a list of lists."""
        body = request.json()
        tokens = body.get("tokens")
        skip = body.get("skip_special_tokens", True) is not False
        if isinstance(tokens, list) and all(type(item) is int for item in tokens):
            return json_answer({"text": self._decode(tokens, skip=skip)})
        if isinstance(tokens, list) and all(isinstance(item, list) for item in tokens):
            return json_answer({"text": [self._decode(item, skip=skip) for item in tokens]})
        raise field_error(("body", "tokens"), "list_type", "Input should be a list of token ids", tokens)

    def _decode(self, tokens: list[int], *, skip: bool) -> str:
        if any(type(item) is not int for item in tokens):
            raise field_error(("body", "tokens"), "int_type", "Input should be a list of token ids", tokens)
        self.engine.reader.check_ids(tokens, "tokens")
        return self.engine.tokenizer.decode(tokens, skip_special_tokens=skip)

    @property
    def _context(self) -> int:
        return self.engine.limits.context_length


async def _error_events(error: RequestError) -> AsyncIterator[bytes]:
    detail = {"message": error.message, "type": "invalid_request_error", "code": error.status, "retryable": False}
    yield sse({"error": detail})
    yield SSE_DONE
