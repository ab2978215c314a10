"""The HTTP app: endpoints of the model's task, health, metrics; every refusal in words."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, File, Form, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from torch import Tensor

from acm_compiler.errors import AcmError, BudgetUnreachable, DataError, LayoutUnknown, UsageError, a_few_of
from acm_compiler.recipe.document import show_value
from acm_compiler.recipe.messages import expectation
from acm_compiler.runs.given import number_or_text
from acm_compiler.serving.batcher import Batcher, Example, ModelFailed, Refused, WorkerDied
from acm_compiler.serving.limits import Limited, error_body
from acm_compiler.serving.metrics import Metrics
from acm_compiler.serving.recalibration import Recalibration
from acm_compiler.serving.served import Served

_TOP = 5
# characters of a text that is read without another thread, which takes longer to begin
_AT_ONCE = 2_000
# what those who ask can do something about
_THEIRS = (UsageError, DataError, BudgetUnreachable, LayoutUnknown)


def _budget(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, str))):
        raise PydanticCustomError(
            "budget", "must be a share such as 0.4, or a text such as '60%', got {got}", {"got": ascii(value)[:40]}
        )
    return value


Budget = Annotated[
    float | str | None,
    BeforeValidator(_budget),
    Field(description="0.4, '60%' or '11GMACs'; none: the server's choice"),
]


class Embeddings(BaseModel):
    """A request of OpenAI's embeddings endpoint, and a budget."""

    input: Annotated[Any, Field(description="a text, a list of texts, token ids, or a list of lists of them")]
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    budget: Budget = None


class Classification(BaseModel):
    """Examples to classify, and a budget. Exactly one of the kinds of input, the model's."""

    model_config = ConfigDict(extra="forbid")

    images: Annotated[Any, Field(description="each [channels, height, width], as the model takes them")] = None
    input: Annotated[Any, Field(description="texts, or lists of token ids")] = None
    audio: Annotated[Any, Field(description="clips, each a list of samples, as the model takes them")] = None
    top: Annotated[int, Field(ge=1)] = _TOP
    budget: Budget = None


class Requests:
    """Requests on their way to the batcher and back."""

    def __init__(self, served: Served, batcher: Batcher, most: int) -> None:
        self._served, self._batcher, self._most = served, batcher, most

    async def answers(
        self, read: Callable[[], list[Example]], budget: float | str | None, *, given: Any = None
    ) -> list[Tensor]:
        """The answers to the examples that `read` reads, in a thread of its own unless `given` is one short text.

        Refused, WorkerDied, what the model raised, AcmError.
        """
        own = None if budget is None else self._served.share(budget)
        short = isinstance(given, str) and len(given) <= _AT_ONCE
        examples = read() if short else await run_in_threadpool(read)
        most, option = min((self._most, "--max-inputs"), (self._batcher.most, "--max-waiting"))
        if len(examples) > most:
            raise HTTPException(413, f"{len(examples)} inputs in one request: at most {most} ({option})")
        futures = self._batcher.submit(examples, own)
        found = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        if any(not bool(answer.isfinite().all()) for answer in found):
            raise HTTPException(422, "the model's output for this input is not finite")
        return list(found)


def create_app(
    served: Served,
    batcher: Batcher,
    metrics: Metrics,
    *,
    max_body: int,
    max_inputs: int,
    recalibration: Recalibration | None = None,
) -> Any:
    """The ASGI app. It starts the batcher when it starts, and stops it when it ends."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await run_in_threadpool(batcher.stop)
        if recalibration is not None:
            await run_in_threadpool(recalibration.stop)

    app = FastAPI(title=f"acm_compiler: {served.name}", lifespan=living)
    requests = Requests(served, batcher, max_inputs)
    (_add_embeddings if served.kind == "embed" else _add_classify)(app, served, requests)
    _add_state(app, served, batcher, metrics)
    if recalibration is not None:
        _add_recalibrate(app, recalibration)
        metrics.follow_recalibration(recalibration)
    _word_errors(app)
    metrics.follow(waiting=lambda: batcher.waiting, budget=lambda: batcher.budget, use=served.use)
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    return Limited(app, most=max_body, metrics=metrics, paths=paths)


def _add_embeddings(app: FastAPI, served: Served, requests: Requests) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(asked: Embeddings) -> dict[str, Any]:
        """Vectors of texts, of length 1."""
        if asked.encoding_format not in ("float", "base64"):
            raise HTTPException(400, f"encoding_format: found {asked.encoding_format!a}, expected 'float' or 'base64'")
        if asked.dimensions is not None:
            raise HTTPException(400, "dimensions: this model's vectors have one length; leave it out")
        counts: list[int] = []

        def read() -> list[Example]:
            examples = served.reader.examples(asked.input)
            counts.extend(len(example["input_ids"]) for example in examples)
            return examples

        vectors = await requests.answers(read, asked.budget, given=asked.input)
        written = _base64 if asked.encoding_format == "base64" else Tensor.tolist
        data = [{"object": "embedding", "index": i, "embedding": written(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
        return {"object": "list", "data": data, "model": served.name, "usage": usage}


def _base64(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def _add_classify(app: FastAPI, served: Served, requests: Requests) -> None:
    @app.post("/classify")
    async def classify(asked: Classification) -> dict[str, Any]:
        """The classes of each example, the most probable first."""
        given = getattr(asked, served.reader.name)
        if asked.model_fields_set & {"images", "input", "audio"} != {served.reader.name}:
            raise HTTPException(422, f"{served.reader.name}: this model takes {served.reader.expected}, and no other")
        logits = await requests.answers(lambda: served.reader.examples(given), asked.budget, given=given)
        return {"model": served.name, "predictions": [_prediction(served, row, asked.top) for row in logits]}

    @app.post("/classify/files")
    async def classify_files(
        files: Annotated[list[UploadFile], File()],
        top: Annotated[int, Form(ge=1)] = _TOP,
        budget: Annotated[str | None, Form()] = None,
    ) -> dict[str, Any]:
        """The classes of the image or clip in each file, the most probable first."""
        contents = [
            (await file.read(), (file.filename or "a file").encode("ascii", "replace").decode()) for file in files
        ]
        asked = number_or_text(budget) if budget else None
        logits = await requests.answers(lambda: [served.reader.file(*part) for part in contents], asked)
        return {"model": served.name, "predictions": [_prediction(served, row, top) for row in logits]}


def _prediction(served: Served, logits: Tensor, top: int) -> dict[str, Any]:
    probability, number = logits.softmax(-1).topk(min(top, len(logits)))
    rows = zip(number.tolist(), probability.tolist(), strict=True)
    classes = [{"class": n, "label": served.classes.get(n, str(n)), "probability": p} for n, p in rows]
    return {**classes[0], "classes": classes}


def _add_state(app: FastAPI, served: Served, batcher: Batcher, metrics: Metrics) -> None:
    @app.get("/health")
    async def health(response: Response) -> dict[str, Any]:
        """200 while requests are taken, else 503."""
        response.status_code = 503 if batcher.stopping else 200
        status = "stopping" if batcher.stopping else "ok"
        return {"status": status, "model": served.name, "waiting": batcher.waiting, "budget": batcher.budget}

    @app.get("/metrics")
    async def counters() -> Response:
        """Counters for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served, in OpenAI's form."""
        return {"object": "list", "data": [{"id": served.name, "object": "model", "owned_by": "acm_compiler"}]}


def _add_recalibrate(app: FastAPI, recalibration: Recalibration) -> None:
    @app.post("/recalibrate", status_code=202)
    async def recalibrate() -> dict[str, Any]:
        """Begin to measure the budget table anew, on a sample of recent inputs."""
        return {"status": "measuring", "inputs": recalibration.start()}


def _word_errors(app: FastAPI) -> None:
    def worded(status: Callable[[Any], int], words: Callable[[Any], str]) -> Any:
        async def answer(_: Request, error: Exception) -> Response:
            headers = {"retry-after": "1"} if isinstance(error, Refused) else None
            body = error_body(status(error), words(error))
            return Response(body, status_code=status(error), headers=headers, media_type="application/json")

        return answer

    def detail(error: Any) -> str:
        if error.status_code not in (404, 405):
            return error.detail
        known = [route for route in app.routes if isinstance(route, APIRoute)]
        return f"no such endpoint: there are {', '.join(f'{min(route.methods or ())} {route.path}' for route in known)}"

    app.add_exception_handler(HTTPException, worded(lambda error: error.status_code, detail))
    app.add_exception_handler(RequestValidationError, worded(_status, _faults))
    app.add_exception_handler(AcmError, worded(lambda error: 400 if isinstance(error, _THEIRS) else 500, str))
    app.add_exception_handler(Refused, worded(lambda _: 503, str))
    app.add_exception_handler(WorkerDied, worded(lambda _: 500, str))
    app.add_exception_handler(ModelFailed, worded(lambda _: 500, str))


_NO_JSON, _NOT_READ = "json_invalid", "model_attributes_type"


def _status(error: Any) -> int:
    return 400 if error.errors()[0]["type"] == _NO_JSON else 422


def _faults(error: Any) -> str:
    """`top must be at least 1, got 0` for each fault, a few of them."""
    faults = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"][1:])
        if fault["type"] == _NO_JSON:
            problem = fault["ctx"]["error"].removesuffix(" starting at")
            faults.append(f"the body is not JSON, at character {place}: {problem}")
        elif fault["type"] == _NOT_READ and isinstance(fault["input"], bytes):
            faults.append("the body was not read: send JSON, with the header content-type: application/json")
        else:
            faults.append(_fault(place or "the body", fault))
    return a_few_of(list(dict.fromkeys(faults)))


def _fault(place: str, fault: Any) -> str:
    if fault["type"] == "missing":
        return f"{place} must be given, got nothing"
    if fault["type"] == "extra_forbidden":
        return f"{place} must be left out: there is no such field"
    # a form's file that is text is the one value that FastAPI itself refuses
    wish = "a file" if fault["type"] == "value_error" else expectation(fault)
    return f"{place}: {fault['msg']}" if wish is None else f"{place} must be {wish}, got {show_value(fault['input'])}"
